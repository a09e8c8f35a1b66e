//! A lessee without privileges, in a process of its own: this test program again, which gives up what root can do
//! before it does anything.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit};
use steer::Mode;
use steward_client::{Lease, LeaseError, Prepared};
use steward_protocol::Facts;
use testkit::Running;
use xsk::{AttachMode, FramePool, Kick, Lender, OwnMemory, QueueId, Socket, SocketConfig, TxDesc, Umem};

use super::{HOLDER, World, lessee_uid, take, wanted};

const CHUNK: u32 = 2048;
const CHUNKS: usize = 1024;
/// What the memory of one socket takes.
pub(crate) const UMEM_BYTES: u64 = CHUNK as u64 * CHUNKS as u64;

/// Starts a test of this file's program, which is one of `child_…`, as a lessee.
pub(crate) fn spawn(world: &World, role: &str, queue: u32) -> Running {
    run(
        Command::new(program()),
        world,
        role,
        ("STEWARD_QUEUE", &queue.to_string()),
    )
}

/// As [`spawn`], in the network namespace of the steward.
pub(crate) fn spawn_beside(world: &World, role: &str, queue: u32) -> Running {
    let command = world.veth.near.command(program());
    run(command, world, role, ("STEWARD_QUEUE", &queue.to_string()))
}

/// As [`spawn`], for the first queue of an interface.
pub(crate) fn spawn_on(world: &World, role: &str, interface: &str) -> Running {
    run(
        Command::new(program()),
        world,
        role,
        ("STEWARD_INTERFACE", interface),
    )
}

fn program() -> PathBuf {
    std::env::current_exe().expect("a test is a program")
}

/// Runs the program by this command, for what is to be leased.
fn run(mut command: Command, world: &World, role: &str, (what, value): (&str, &str)) -> Running {
    command.args(["--ignored", "--exact", role, "--nocapture", "--test-threads=1"]);
    command
        .env(HOLDER, lessee_uid().to_string())
        .env("STEWARD_SOCKET", world.socket())
        .env(what, value);
    Running::start(command)
}

/// As [`spawn`], and waits until it says `text`.
pub(crate) fn start(world: &World, role: &str, queue: u32) -> Running {
    let mut running = spawn(world, role, queue);
    running.await_text("echoing");
    running
}

/// Where the steward is, in a child.
pub(crate) fn socket() -> PathBuf {
    std::env::var_os("STEWARD_SOCKET").expect("run by a test").into()
}

/// Of which interface to lease, in a child.
pub(crate) fn interface() -> String {
    std::env::var("STEWARD_INTERFACE").expect("run by a test")
}

/// Which queue to lease, in a child.
pub(crate) fn queue() -> u32 {
    std::env::var("STEWARD_QUEUE")
        .expect("run by a test")
        .parse()
        .expect("a number")
}

/// An empty network namespace, the lessees' user, no capability and no way to one, 64 KiB of locked memory.
pub(crate) fn give_up_privileges() {
    limit_memory();
    // Before Linux 6.4 (PR_GET_AUXV) rustix reads it from /proc/self/auxv, which is root's once this process is
    // another's.
    let _ = rustix::param::page_size();
    let uid = lessee_uid();
    // SAFETY: system calls without memory of ours. The C library's calls are those that apply to all threads of the
    // process.
    unsafe {
        assert_eq!(
            libc::unshare(libc::CLONE_NEWNET),
            0,
            "{}",
            io::Error::last_os_error()
        );
        assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
        assert_eq!(libc::setresgid(uid, uid, uid), 0);
        assert_eq!(libc::setresuid(uid, uid, uid), 0);
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    }
    let status = std::fs::read_to_string("/proc/thread-self/status").expect("proc");
    for set in ["CapEff", "CapPrm", "CapInh"] {
        let line = status.lines().find(|line| line.starts_with(set)).expect("a line");
        assert!(line.ends_with("0000000000000000"), "{line}");
    }
    // A socket of its own it cannot have.
    let refused = rustix::net::socket(
        rustix::net::AddressFamily::XDP,
        rustix::net::SocketType::RAW,
        None,
    );
    assert_eq!(refused.err(), Some(rustix::io::Errno::PERM));
}

/// An ioctl of a tap device's descriptor (`_IOW('T', number, int)`), with a value where the kernel takes one.
pub(crate) fn tun_ioctl(tap: &File, number: u32, value: u64) -> io::Result<()> {
    let request = u64::from(1 << 30 | 4 << 16 | u32::from(b'T') << 8 | number);
    // SAFETY: what takes a pointer gets one that is no memory, and answers EFAULT.
    match unsafe { libc::ioctl(tap.as_raw_fd(), request as _, value) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Attaches a descriptor of /dev/net/tun to the device of that name, as one more queue (`TUNSETIFF`).
pub(crate) fn attach_tun(tun: &File, name: &str) -> io::Result<()> {
    let several = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
    tun_request(tun, 202, name, several)
}

/// Detaches a queue from its device, or attaches it again (`TUNSETQUEUE`).
pub(crate) fn detach_queue(tap: &File, detach: bool) -> io::Result<()> {
    let flags = if detach {
        libc::IFF_DETACH_QUEUE
    } else {
        libc::IFF_ATTACH_QUEUE
    };
    tun_request(tap, 217, "", flags)
}

/// An ioctl that takes name and flags of an interface.
fn tun_request(tun: &File, number: u32, name: &str, flags: i32) -> io::Result<()> {
    // SAFETY: all zeros are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, &from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = from.cast_signed() as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    tun_ioctl(tun, number, (&raw mut request) as u64)
}

fn limit_memory() {
    let limit = rustix::process::getrlimit(Resource::Memlock);
    let limit = Rlimit {
        current: Some(65_536),
        ..limit
    };
    rustix::process::setrlimit(Resource::Memlock, limit).expect("lower");
}

/// A lease of the queue that the test named.
pub(crate) fn lease() -> Lease {
    take(&socket(), &wanted(queue(), 1)).unwrap_or_else(|error| panic!("{error}"))
}

pub(crate) fn config(facts: &Facts, queue: u32) -> SocketConfig {
    let mut config = SocketConfig::new(facts.ifindex, QueueId(queue));
    config.attach = match facts.mode {
        Some(Mode::Skb) => AttachMode::Skb,
        _ => AttachMode::Native,
    };
    config.bind_timeout = testkit::wait::SOON;
    config
}

pub(crate) fn umem() -> Umem {
    let memory = OwnMemory::new(CHUNK as usize * CHUNKS).expect("memory");
    Umem::aligned(Arc::new(memory), CHUNK, 0).expect("a UMEM")
}

/// Memory for a queue's next socket.
pub(crate) fn register(lease: &Lease, queue: u32) -> Result<Prepared, LeaseError> {
    lease.register(&umem(), &config(&lease.facts(), queue))
}

/// A queue with its memory, which sends back what it receives.
pub(crate) struct Echo {
    socket: Socket,
    pool: FramePool,
}

impl Echo {
    /// Registers memory, binds, and lets frames come.
    pub(crate) fn open(lease: &Lease, queue: u32) -> Self {
        Self::try_open(lease, queue).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The same, where it may fail: the steward may be away.
    pub(crate) fn try_open(lease: &Lease, queue: u32) -> Result<Self, String> {
        let prepared = lease.register(&umem(), &config(&lease.facts(), queue));
        Self::of_registered(lease, prepared.map_err(|error| error.to_string())?, queue)
    }

    /// The same with memory that was registered for the queue.
    pub(crate) fn of_registered(lease: &Lease, prepared: Prepared, queue: u32) -> Result<Self, String> {
        let pool = prepared.umem().all_frames().expect("fresh").collect();
        let socket = lease.bind(prepared).map_err(|error| error.to_string())?;
        Self::of_bound(lease, socket, pool, queue)
    }

    /// The same with a socket that is bound, and these chunks of its memory.
    pub(crate) fn of_bound(
        lease: &Lease,
        socket: Socket,
        pool: FramePool,
        queue: u32,
    ) -> Result<Self, String> {
        let conf = super::bare(1518);
        lease.activate(queue, conf).map_err(|error| error.to_string())?;
        Ok(Self::of_socket(socket, pool))
    }

    /// The same with a socket that frames come to, whoever sees to that.
    pub(crate) fn of_socket(socket: Socket, pool: FramePool) -> Self {
        let mut echo = Self { socket, pool };
        echo.socket.fill.refill(&mut echo.pool, 512);
        echo
    }

    /// What others need who share its memory.
    pub(crate) fn lender(&self) -> Lender {
        self.socket.lender()
    }

    /// Sends back what came, for about so long; false when the interface does not send.
    pub(crate) fn run(&mut self, time: Duration) -> bool {
        let time = Timespec::try_from(time).expect("short");
        let _ = poll(
            &mut [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::IN)],
            Some(&time),
        );
        self.pool.extend(self.socket.completion.peek(64));
        let received = self.socket.rx.peek(64);
        let mut sending = self.socket.tx.reserve(64);
        for desc in received {
            sending.push(TxDesc {
                frame: desc.frame,
                offset: desc.data,
                len: desc.len,
                more: false,
                metadata: false,
            });
        }
        let sent = sending.submit() > 0;
        self.socket.fill.refill(&mut self.pool, 64);
        loop {
            match if sent {
                self.socket.kick_tx()
            } else {
                Ok(Kick::Done)
            } {
                Ok(Kick::Again) => self.pool.extend(self.socket.completion.peek(64)),
                Ok(_) => return true,
                Err(_) => return false,
            }
        }
    }
}
