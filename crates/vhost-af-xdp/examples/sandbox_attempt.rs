//! What a process that was taken over would try, from within the daemon's sandbox: for crates/testkit/tests/sandbox.
//!
//! `sandbox_attempt NAME [OPTION...]` does what `vhost-af-xdp serve OPTION...` does until it is in its sandbox, and
//! then tries one thing. How it ends tells which layer stopped it: by SIGSYS, or with an error of the kernel's; success
//! is a hole.
//!
//! As the daemon it starts a helper from its own program, so it is one, too.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_long};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    if name == "helper" {
        return vhost_af_xdp::run();
    }
    // A thread that begins in the sandbox is in it, too.
    let act = || {
        let tried = std::thread::spawn(move || attempt(&name)).join();
        tried.unwrap_or_else(|_| bail!("the attempt panicked"))
    };
    match vhost_af_xdp::in_sandbox(arguments, act) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sandbox_attempt: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn attempt(name: &str) -> anyhow::Result<()> {
    let (kind, of) = name.split_once(':').unwrap_or((name, ""));
    let number = || {
        of.parse::<c_long>()
            .with_context(|| format!("{name}: a number is missing"))
    };
    let path = || std::ffi::CString::new(of);
    let done = match kind {
        // Layers `files` and `user`.
        "read" => open(&path()?, libc::O_RDONLY),
        "create" => open(&path()?, libc::O_WRONLY | libc::O_CREAT),
        "remove" => path_call(libc::SYS_unlinkat, &[libc::AT_FDCWD.into()], &path()?, &[0]),
        "chmod" => path_call(libc::SYS_fchmodat, &[libc::AT_FDCWD.into()], &path()?, &[0o777]),
        "chown" => path_call(libc::SYS_fchownat, &[libc::AT_FDCWD.into()], &path()?, &[0, 0, 0]),
        "mkdir" => path_call(libc::SYS_mkdirat, &[libc::AT_FDCWD.into()], &path()?, &[0o777]),
        "chroot" => path_call(libc::SYS_chroot, &[], &path()?, &[]),
        "execute" => path_call(libc::SYS_execve, &[], &path()?, &[0, 0]),
        // Layers `network` and `capabilities`.
        "socket" => call(libc::SYS_socket, &[number()?, libc::SOCK_RAW.into(), 0]),
        "tcp" => call(
            libc::SYS_socket,
            &[libc::AF_INET.into(), libc::SOCK_STREAM.into(), 0],
        ),
        "netlink" => call(
            libc::SYS_socket,
            &[libc::AF_NETLINK.into(), libc::SOCK_RAW.into(), 0],
        ),
        // Options of a socket; whether there is one comes later.
        "set-option" => call(
            libc::SYS_setsockopt,
            &[-1, libc::SOL_SOCKET.into(), number()?, 0, 0],
        ),
        "set-xdp-option" => call(libc::SYS_setsockopt, &[-1, libc::SOL_XDP.into(), number()?, 0, 0]),
        "get-option" => call(
            libc::SYS_getsockopt,
            &[-1, libc::SOL_SOCKET.into(), number()?, 0, 0],
        ),
        // Layer `mounts`.
        "connect" => UnixStream::connect(of).map(drop),
        // Up from whatever directory is open.
        "connect-from-descriptors" => (0..256)
            .map(|fd| UnixStream::connect(format!("/proc/self/fd/{fd}/../../../../../..{of}")))
            .find_map(Result::ok)
            .map(drop)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT)),
        "root" => call(libc::SYS_setresuid, &[0, 0, 0]),
        "mount" => call(libc::SYS_umount2, &[c"/proc".as_ptr() as c_long, 0]),
        "namespace" => call(libc::SYS_unshare, &[libc::CLONE_NEWNET.into()]),
        "enter-namespace" => call(libc::SYS_setns, &[0, 0]),
        "bpf" => call(libc::SYS_bpf, &[0, 0, 0]),
        "bpf-map" => call(libc::SYS_bpf, &[1, 0, 0]),
        "trace" => call(libc::SYS_ptrace, &[libc::PTRACE_ATTACH.into(), number()?, 0, 0]),
        "memory-of" => call(libc::SYS_process_vm_readv, &[number()?, 0, 0, 0, 0, 0]),
        "kill" => call(libc::SYS_kill, &[number()?, 0]),
        "signal-thread-of" => call(libc::SYS_tgkill, &[number()?, number()?, 0]),
        "limit" => call(libc::SYS_prlimit64, &[number()?, libc::RLIMIT_CORE.into(), 0, 0]),
        // Layer `calls`.
        "process" => call(libc::SYS_clone, &[libc::SIGCHLD.into(), 0, 0, 0, 0]),
        "new-clone" => call(libc::SYS_clone3, &[0, 0]),
        "executable-memory" => executable_memory(),
        "own-handler" => call(libc::SYS_rt_sigaction, &[libc::SIGSYS.into(), 0, 0, 8]),
        "dumpable" => call(libc::SYS_prctl, &[libc::PR_SET_DUMPABLE.into(), 1, 0, 0, 0]),
        "ioctl" => call(
            libc::SYS_ioctl,
            &[2, libc::TIOCSTI as c_long, c"x".as_ptr() as c_long],
        ),
        "owner" => call(libc::SYS_fcntl, &[2, libc::F_SETOWN.into(), number()?]),
        "io-uring" => call(libc::SYS_io_uring_setup, &[1, 0]),
        // NUMA: from which nodes memory comes, what is asked of that; of no pages: whose they would be, whether moved.
        "memory-policy" => call(libc::SYS_set_mempolicy, &[number()?, 0, 0]),
        "policy-question" => call(libc::SYS_get_mempolicy, &[0, 0, 0, 0, number()?]),
        "pages-of" => call(libc::SYS_move_pages, &[number()?, 0, 0, 0, 0, 0]),
        "move-pages" => call(libc::SYS_move_pages, &[0, 0, 0, c"".as_ptr() as c_long, 0, 0]),
        // Requests to the helper, a JSON list of them; what the last one is answered with.
        "ask" => return ask_the_helper(of),
        "nothing" => Ok(()),
        // What must work, too.
        "panic" => panic!("as was asked for"),
        "abort" => std::process::abort(),
        _ => bail!("no attempt is named {name}"),
    };
    done.with_context(|| format!("attempt {name}"))
}

/// Finds the way to the helper among all descriptors, and asks by it as soon as a line is typed in.
fn ask_the_helper(requests: &str) -> anyhow::Result<()> {
    let requests: Vec<serde_json::Value> = serde_json::from_str(requests)?;
    let desk = (3..256).find(|&fd| {
        let socket = socket_at(fd);
        if rustix::net::sockopt::socket_type(&*socket) != Ok(rustix::net::SocketType::SEQPACKET) {
            return false;
        }
        let limited = socket.set_read_timeout(Some(Duration::from_secs(2)));
        limited.is_ok() && ask(&socket, &"nonsense".into()).is_ok_and(|said| said.contains("no request"))
    });
    let desk = socket_at(desk.context("no way to the helper")?);
    desk.set_read_timeout(Some(Duration::from_secs(30)))?;
    eprintln!("found the helper");
    io::stdin().read_line(&mut String::new())?;
    let mut said = String::new();
    for request in &requests {
        said = ask(&desk, request)?;
    }
    match said.contains("\"Done\"") {
        true => Ok(()),
        false => bail!("{said}"),
    }
}

fn ask(socket: &UnixDatagram, request: &serde_json::Value) -> io::Result<String> {
    let message = serde_json::json!({"number": 7, "what": request});
    socket.send(message.to_string().as_bytes())?;
    let mut answer = [0; 4096];
    let len = socket.recv(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..len]).into_owned())
}

/// Whatever it is.
fn socket_at(fd: RawFd) -> ManuallyDrop<UnixDatagram> {
    // SAFETY: not closed by us, and asked nothing that harms another descriptor of this process, which only serves
    // this.
    ManuallyDrop::new(unsafe { UnixDatagram::from_raw_fd(fd) })
}

fn call(number: c_long, arguments: &[c_long]) -> io::Result<()> {
    let argument = |at: usize| arguments.get(at).copied().unwrap_or(0);
    // SAFETY: pointers among the arguments lead to constant, terminated strings or are null, which the kernel answers
    // with an error; none of these calls writes to our memory.
    let result = unsafe {
        libc::syscall(
            number,
            argument(0),
            argument(1),
            argument(2),
            argument(3),
            argument(4),
            argument(5),
        )
    };
    match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn path_call(number: c_long, before: &[c_long], path: &CStr, after: &[c_long]) -> io::Result<()> {
    let path = [path.as_ptr() as c_long];
    call(number, &[before, &path[..], after].concat())
}

fn open(path: &CStr, flags: libc::c_int) -> io::Result<()> {
    path_call(
        libc::SYS_openat,
        &[libc::AT_FDCWD.into()],
        path,
        &[flags.into(), 0o600],
    )
}

fn executable_memory() -> io::Result<()> {
    let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    call(libc::SYS_mmap, &[0, 4096, protection.into(), flags.into(), -1, 0])
}
