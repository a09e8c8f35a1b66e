//! The system calls of a worker, each with its reason. Any other call ends the process.
//!
//! The filter checks arguments that decide what a call can do: families of sockets, requests of ioctl, fcntl and prctl,
//! whether memory becomes executable, the target of a signal. It cannot check what an argument points to, such as the
//! address of a bind or connect; the other layers restrict that.
//!
//! docs/sandbox.md names these calls; a test compares them.

use libc::{
    AF_NETLINK, AF_UNIX, AF_XDP, CLONE_SIGHAND, CLONE_THREAD, CLONE_VM, F_ADD_SEALS, F_DUPFD_CLOEXEC,
    F_GET_SEALS, F_GETFD, F_GETFL, F_SETFD, F_SETFL, MPOL_DEFAULT, MPOL_PREFERRED, O_ACCMODE, O_CREAT,
    O_TRUNC, PR_SET_NAME, PR_SET_TIMERSLACK, PROT_EXEC, SIGSYS, SOL_SOCKET, SOL_XDP, c_long,
};

/// `PR_SET_VMA`, include/uapi/linux/prctl.h.
const PR_SET_VMA: u64 = 0x5356_4d41;
/// `PR_GET_AUXV`, same place (Linux 6.4).
const PR_GET_AUXV: u64 = 0x4155_5856;
/// Flags of clone(2) that make namespaces, and the one that traces.
const NEW_NAMESPACE: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_PTRACE) as u64;
/// Flags of clone(2) for a new thread, not a new process.
const THREAD: u64 = (CLONE_VM | CLONE_THREAD | CLONE_SIGHAND) as u64;
/// Flags of open(2) for anything but reading an existing file.
const CHANGES: u64 = (O_ACCMODE | O_CREAT | O_TRUNC) as u64;
/// Commands of bpf(2) on a map that is open: look up, update, delete an element.
const MAP_ELEMENTS: [u64; 3] = [1, 2, 3];

/// `XDP_MAX_TX_SKB_BUDGET`, include/uapi/linux/if_xdp.h (Linux 6.18).
const XDP_MAX_TX_SKB_BUDGET: u64 = 9;
/// `SO_RCVTIMEO_NEW`, include/uapi/asm-generic/socket.h.
const SO_RCVTIMEO_NEW: u64 = 66;
/// `SO_SNDTIMEO_NEW`, same place.
const SO_SNDTIMEO_NEW: u64 = 67;

/// A condition on an argument.
#[derive(Debug, Clone, Copy)]
pub(super) enum If {
    /// Argument, value.
    Is(u8, u64),
    /// Argument, value that it must not have.
    IsNot(u8, u64),
    /// Argument, mask, value of the masked bits.
    Bits(u8, u64, u64),
    /// Argument: this process's number.
    Own(u8),
}

/// A system call that is allowed: always if there are no cases, else if all conditions of one of them hold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call {
    pub(super) number: c_long,
    pub(super) name: &'static str,
    pub(super) cases: &'static [&'static [If]],
}

const ALWAYS: &[&[If]] = &[];

// The text after a call's cases says what it is for.
macro_rules! table {
    ($($(#[$cfg:meta])* $name:ident: $cases:expr, $why:literal;)*) => {
        &[$($(#[$cfg])* Call {
            number: libc::$name,
            // Without SYS_.
            name: tail(stringify!($name)),
            cases: $cases,
        },)*]
    };
}

/// An option of a socket by its level: a case.
macro_rules! xdp {
    ($option:expr) => {
        &[If::Is(1, SOL_XDP as u64), If::Is(2, $option as u64)]
    };
}
macro_rules! socket {
    ($option:expr) => {
        &[If::Is(1, SOL_SOCKET as u64), If::Is(2, $option as u64)]
    };
}
macro_rules! netlink {
    ($option:expr) => {
        &[If::Is(1, libc::SOL_NETLINK as u64), If::Is(2, $option as u64)]
    };
}

const fn tail(name: &'static str) -> &'static str {
    name.split_at(4).1
}

#[rustfmt::skip]
pub(super) const CALLS: &[Call] = table! {
    // Frames.
    SYS_sendto: ALWAYS, "wakes the kernel for frames to send (AF_XDP rings); queries of rtnetlink";
    SYS_recvfrom: ALWAYS, "lets the kernel poll the NIC; peeks at messages of a VMM; rtnetlink";
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_wait: ALWAYS, "a worker waits for kicks";
    SYS_epoll_pwait: ALWAYS, "a worker waits for kicks";
    SYS_epoll_pwait2: ALWAYS, "a worker waits for kicks";
    SYS_epoll_create1: ALWAYS, "event queues of workers and of a lease";
    SYS_epoll_ctl: ALWAYS, "adds and removes descriptors of lanes";
    SYS_eventfd2: ALWAYS, "wake-ups of workers and ports";
    SYS_read: ALWAYS, "kicks, messages, signals";
    SYS_readv: ALWAYS, "messages; frames from a tap";
    SYS_write: ALWAYS, "interrupts of the guest, the log, answers";
    SYS_writev: ALWAYS, "the log; frames to a tap; GSO packets";
    #[cfg(target_arch = "x86_64")]
    SYS_poll: ALWAYS, "control threads wait";
    SYS_ppoll: ALWAYS, "a worker sleeps; control threads wait";
    // Sockets.
    SYS_socket: &[&[If::Is(0, AF_UNIX as u64)]], "to a VMM that listens, to the steward: Unix sockets, no others";
    SYS_connect: ALWAYS, "to a VMM that listens, to the steward";
    SYS_accept4: ALWAYS, "VMMs, and control clients";
    SYS_bind: ALWAYS, "AF_XDP sockets, where the steward does not bind them (before Linux 6.4); rtnetlink";
    SYS_recvmsg: ALWAYS, "messages with descriptors: guest memory, eventfds, leased sockets";
    SYS_sendmsg: ALWAYS, "messages with descriptors: the inflight area, packet memory";
    SYS_getsockopt: &[
        xdp!(libc::XDP_MMAP_OFFSETS), xdp!(libc::XDP_STATISTICS), xdp!(libc::XDP_OPTIONS),
        socket!(libc::SO_DOMAIN), socket!(libc::SO_TYPE), socket!(libc::SO_ERROR),
        socket!(libc::SO_ACCEPTCONN), socket!(libc::SO_PEERCRED), socket!(libc::SO_PREFER_BUSY_POLL),
        socket!(libc::SO_COOKIE),
    ], "ring offsets and statistics; who the VMM is; busy polling; which UMEM a socket shares";
    SYS_setsockopt: &[
        xdp!(XDP_MAX_TX_SKB_BUDGET),
        socket!(libc::SO_RCVTIMEO), socket!(libc::SO_SNDTIMEO), socket!(SO_RCVTIMEO_NEW), socket!(SO_SNDTIMEO_NEW),
        socket!(libc::SO_PREFER_BUSY_POLL), socket!(libc::SO_BUSY_POLL), socket!(libc::SO_BUSY_POLL_BUDGET),
        socket!(libc::SO_SNDBUFFORCE), socket!(libc::SO_SNDBUF),
    ], "frames a kick may send; busy polling; timeouts; send buffers: no filter or program, no device";
    SYS_getsockname: ALWAYS, "kind of a socket";
    SYS_getpeername: ALWAYS, "kind of a socket";
    SYS_shutdown: ALWAYS, "the end of a VMM's connection";
    // Memory.
    SYS_mmap: &[&[If::Bits(2, PROT_EXEC as u64, 0)]], "guest memory, rings, stacks: never executable";
    SYS_mprotect: &[&[If::Bits(2, PROT_EXEC as u64, 0)]], "guard pages: never executable";
    SYS_munmap: ALWAYS, "memory that is no longer used";
    SYS_mremap: ALWAYS, "memory of the allocator";
    SYS_madvise: ALWAYS, "huge pages, core dumps without guest memory, pages entered ahead";
    SYS_brk: ALWAYS, "memory of the allocator";
    SYS_get_mempolicy: &[&[If::Bits(3, u64::MAX, 0), If::Is(4, 0)]],
        "whether the user set a NUMA policy";
    SYS_set_mempolicy: &[&[If::Is(0, MPOL_DEFAULT as u64)], &[If::Is(0, MPOL_PREFERRED as u64)]],
        "packet memory from the NIC's NUMA node";
    SYS_move_pages: &[&[If::Is(0, 0), If::Bits(3, u64::MAX, 0), If::Is(5, 0)]],
        "packet memory from the NIC's NUMA node: pages are looked up, none is moved";
    SYS_memfd_create: ALWAYS, "the inflight area, packet memory";
    SYS_ftruncate: ALWAYS, "size of the inflight area, packet memory";
    // Files that are open.
    SYS_close: ALWAYS, "unused descriptors";
    SYS_fcntl: &[
        &[If::Is(1, F_DUPFD_CLOEXEC as u64)], &[If::Is(1, F_GETFD as u64)], &[If::Is(1, F_SETFD as u64)],
        &[If::Is(1, F_GETFL as u64)], &[If::Is(1, F_SETFL as u64)],
        &[If::Is(1, F_GET_SEALS as u64)], &[If::Is(1, F_ADD_SEALS as u64)],
    ], "copies of descriptors, eventfds that do not block, seals: no owner, no signal, no lease";
    SYS_ioctl: &[&[If::Is(1, libc::FIONBIO)], &[If::Is(1, libc::FIONREAD)], &[If::Is(1, libc::TUNSETOFFLOAD)]],
        "sockets that do not block; whether a VMM's call socket holds bytes; offloads of a tap";
    SYS_fstat: ALWAYS, "size and kind of a VMM's files";
    SYS_fstatfs: ALWAYS, "page size of guest memory";
    SYS_newfstatat: ALWAYS, "as fstat; backtraces";
    SYS_statx: ALWAYS, "as fstat; backtraces";
    SYS_lseek: ALWAYS, "reading of files";
    // Files that are not.
    SYS_openat: &[&[If::Bits(2, CHANGES, 0)]],
        "/proc/self/smaps, the mount of a refused file, a panic's backtrace: read-only, as landlock allows";
    SYS_readlinkat: ALWAYS, "kind of a descriptor (/proc/self/fd): is it an eventfd";
    #[cfg(target_arch = "x86_64")]
    SYS_readlink: ALWAYS, "kind of a descriptor (/proc/self/fd): is it an eventfd";
    SYS_getcwd: ALWAYS, "a panic's backtrace";
    // Threads.
    SYS_clone: &[&[If::Bits(0, THREAD | NEW_NAMESPACE, THREAD)]], "threads of this process: no process, no namespace";
    SYS_set_robust_list: ALWAYS, "a thread begins";
    SYS_rseq: ALWAYS, "a thread begins";
    SYS_sigaltstack: ALWAYS, "a thread begins and ends";
    SYS_prctl: &[&[If::Is(0, PR_SET_NAME as u64)], &[If::Is(0, PR_SET_VMA)], &[If::Is(0, PR_GET_AUXV)],
        &[If::Is(0, PR_SET_TIMERSLACK as u64)]],
        "a thread's name, names of memory, the page size, how precisely a worker sleeps";
    SYS_sched_getaffinity: ALWAYS, "how many CPUs there are";
    SYS_sched_setaffinity: &[&[If::Is(0, 0)]],
        "workers on CPUs that the user named, or the NIC's NUMA node: a thread for itself";
    SYS_sched_yield: ALWAYS, "waits for a lock that is held";
    SYS_futex: ALWAYS, "locks";
    SYS_gettid: ALWAYS, "locks, abort";
    SYS_getpid: ALWAYS, "status, abort";
    SYS_geteuid: ALWAYS, "the log: who may not connect to a VMM";
    SYS_exit: ALWAYS, "a thread ends";
    SYS_exit_group: ALWAYS, "the process ends";
    // Signals.
    SYS_rt_sigaction: &[&[If::IsNot(0, SIGSYS as u64)]],
        "SIGBUS gets its default action back; not SIGSYS, which is this sandbox's";
    SYS_rt_sigprocmask: ALWAYS, "threads begin, abort";
    SYS_rt_sigreturn: ALWAYS, "handlers return";
    SYS_restart_syscall: ALWAYS, "interrupted calls";
    SYS_tgkill: &[&[If::Own(0)]], "abort, SIGBUS: signals to this process only";
    // The rest.
    SYS_clock_gettime: ALWAYS, "time, without the vDSO";
    SYS_clock_getres: ALWAYS, "time, without the vDSO";
    SYS_gettimeofday: ALWAYS, "time, without the vDSO";
    SYS_clock_nanosleep: ALWAYS, "pauses";
    SYS_nanosleep: ALWAYS, "pauses";
    SYS_timerfd_create: ALWAYS, "retries for an absent steward";
    SYS_timerfd_settime: ALWAYS, "retries for an absent steward";
    SYS_getrandom: ALWAYS, "hash tables, the token of a lease";
    SYS_prlimit64: &[&[If::Is(0, 0), If::Bits(2, u64::MAX, 0)]], "limits of this process are read";
};

/// Additional calls of a process that uses another program's map or sockets: it looks up interfaces, and may create
/// AF_XDP sockets itself.
#[rustfmt::skip]
pub(super) const EXTERNAL: &[Call] = table! {
    SYS_bpf: &[&[If::Is(0, MAP_ELEMENTS[0])], &[If::Is(0, MAP_ELEMENTS[1])], &[If::Is(0, MAP_ELEMENTS[2])]],
        "--inhibit with a map: sockets are put into it and taken out";
    SYS_socket: &[&[If::Is(0, AF_XDP as u64)], &[If::Is(0, AF_NETLINK as u64)],
        &[If::Is(0, libc::AF_INET as u64), If::Bits(1, 0xf, libc::SOCK_DGRAM as u64)]],
        "--inhibit: AF_XDP sockets are made here, interfaces are queried by netlink and ioctl";
    SYS_setsockopt: &[
        xdp!(libc::XDP_UMEM_REG), xdp!(libc::XDP_UMEM_FILL_RING), xdp!(libc::XDP_UMEM_COMPLETION_RING),
        xdp!(libc::XDP_RX_RING), xdp!(libc::XDP_TX_RING),
        netlink!(libc::NETLINK_PKTINFO), netlink!(libc::NETLINK_EXT_ACK),
    ], "--inhibit: packet memory and rings; options of netlink sockets";
    SYS_ioctl: &[&[If::Is(1, 0x8946)]], "--inhibit: what a driver can do (SIOCETHTOOL)";
};

/// All calls of the process that answers HTTP (crate `gateway`), which has no guest's data: its
/// sockets listen already, and it makes no thread, no socket and no file.
#[rustfmt::skip]
pub(super) const API: &[Call] = table! {
    SYS_accept4: ALWAYS, "API: clients";
    SYS_read: ALWAYS, "API: requests, answers of the daemon";
    SYS_recvfrom: ALWAYS, "API: requests, answers of the daemon";
    SYS_write: ALWAYS, "API: answers, the log";
    SYS_writev: ALWAYS, "API: answers, the log";
    SYS_sendto: ALWAYS, "API: answers, the log";
    SYS_shutdown: ALWAYS, "API: the end of a connection";
    SYS_close: ALWAYS, "API: the end of a connection";
    SYS_getsockopt: &[socket!(libc::SO_PEERCRED), socket!(libc::SO_ERROR)], "API: who a client is";
    SYS_ioctl: &[&[If::Is(1, libc::FIONBIO)]], "API: sockets that do not block";
    SYS_fcntl: &[&[If::Is(1, libc::F_GETFL as u64)], &[If::Is(1, F_SETFL as u64)],
        &[If::Is(1, F_DUPFD_CLOEXEC as u64)], &[If::Is(1, F_GETFD as u64)]],
        "API: sockets that do not block; its own event queue";
    #[cfg(target_arch = "x86_64")]
    SYS_epoll_wait: ALWAYS, "API: waits for clients and for the daemon";
    SYS_epoll_pwait: ALWAYS, "API: waits for clients and for the daemon";
    SYS_epoll_create1: ALWAYS, "API: waits for clients and for the daemon";
    SYS_epoll_ctl: ALWAYS, "API: waits for clients and for the daemon";
    SYS_eventfd2: ALWAYS, "API: waits for clients and for the daemon";
    SYS_mmap: &[&[If::Bits(2, PROT_EXEC as u64, 0)]], "API: memory, never executable";
    SYS_mprotect: &[&[If::Bits(2, PROT_EXEC as u64, 0)]], "API: memory, never executable";
    SYS_munmap: ALWAYS, "API: memory, never executable";
    SYS_mremap: ALWAYS, "API: memory, never executable";
    SYS_madvise: ALWAYS, "API: memory, never executable";
    SYS_brk: ALWAYS, "API: memory, never executable";
    SYS_futex: ALWAYS, "API: locks";
    SYS_getrandom: ALWAYS, "API: hash tables";
    SYS_clock_gettime: ALWAYS, "API: time, without the vDSO";
    SYS_gettid: ALWAYS, "API: abort";
    SYS_getpid: ALWAYS, "API: abort";
    SYS_tgkill: &[&[If::Own(0)]], "API: abort: signals to this process only";
    SYS_rt_sigprocmask: ALWAYS, "API: abort";
    SYS_rt_sigaction: &[&[If::IsNot(0, SIGSYS as u64)]], "API: abort; not SIGSYS, which is this sandbox's";
    SYS_rt_sigreturn: ALWAYS, "API: handlers return";
    SYS_restart_syscall: ALWAYS, "API: interrupted calls";
    SYS_sigaltstack: ALWAYS, "API: a thread ends";
    SYS_exit_group: ALWAYS, "API: the process ends";
};

/// Calls that libraries try but do not need: they fail with ENOSYS.
#[rustfmt::skip]
pub(super) const ABSENT: &[Call] = table! {
    SYS_clone3: ALWAYS, "seccomp cannot check its flags, which are in memory: the C library then uses clone";
    SYS_sysinfo: ALWAYS, "the C library reads the memory size before it sorts";
    SYS_uname: ALWAYS, "version checks of libraries";
    SYS_membarrier: ALWAYS, "the C library tries it";
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_in_the_document() {
        let document = include_str!("../../../../docs/sandbox.md");
        let (_, document) = document.split_once("## System calls").expect("it is a section");
        let names: Vec<_> = document
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .collect();
        for call in [CALLS, EXTERNAL, API, ABSENT].into_iter().flatten() {
            assert!(names.contains(&call.name), "docs/sandbox.md lacks {}", call.name);
        }
    }

    #[test]
    fn what_takes_over_machines_is_not_in_the_table() {
        let never = [
            "execve",
            "execveat",
            "ptrace",
            "process_vm_readv",
            "process_vm_writev",
            "mount",
            "umount2",
            "pivot_root",
            "chroot",
            "setns",
            "unshare",
            "bpf",
            "perf_event_open",
            "kexec_load",
            "init_module",
            "finit_module",
            "keyctl",
            "add_key",
            "request_key",
            "userfaultfd",
            "io_uring_setup",
            "open_by_handle_at",
            "chmod",
            "fchmod",
            "fchmodat",
            "chown",
            "fchown",
            "unlink",
            "unlinkat",
            "rename",
            "renameat2",
            "link",
            "symlink",
            "mknod",
            "mknodat",
            "mkdir",
            "kill",
            "tkill",
            "setuid",
            "setgid",
            "setresuid",
            "setresgid",
            "setgroups",
            "capset",
            "seccomp",
            "fork",
            "vfork",
            "personality",
            "pidfd_open",
            "pidfd_getfd",
            "pidfd_send_signal",
            "socketpair",
            "listen",
        ];
        for call in CALLS.iter().chain(API) {
            assert!(!never.contains(&call.name), "{}", call.name);
        }
        // A process without data of guests needs fewer calls.
        let more = [
            "socket", "connect", "bind", "openat", "clone", "recvmsg", "sendmsg", "readlink",
        ];
        for call in API {
            assert!(!more.contains(&call.name), "{}", call.name);
        }
    }
}
