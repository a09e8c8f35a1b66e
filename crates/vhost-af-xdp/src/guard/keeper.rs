//! The keeper: a process of its own that does for a daemon what the daemon, in its sandbox, cannot do any more.
//!
//! # Theory of operation
//!
//! `serve` starts it (this program, with a hidden subcommand) after its sockets are bound and before it enters the
//! sandbox. It sees no byte of what a VMM sends; a guest's memory is mapped by a child of it only, which has it pinned
//! and reads nothing there either. It
//!  1. is the steward of this one daemon, if none was named: it attaches the XDP program, makes and binds the sockets
//!     and leases them by the same protocol, by a policy made of the command line: these interfaces and these queues,
//!     to the user that the daemon becomes, and nothing else. Its listening socket has no name in the file system: the
//!     daemon reaches it through a descriptor ([`Keeper::steward`]);
//!  2. removes the daemon's socket files when the daemon ends, however it ends, if they are still those that it bound;
//!  3. looks whether a VMM shares its guest's memory (/proc/PID/maps), which landlock keeps from the daemon. It is
//!     passed the VMM's connection, and looks at the process at its other end, and only if the connection is one of
//!     the daemon's vhost-user sockets. With each address comes the file that the VMM passed for it, and the answer is
//!     about private mappings of that file only: an attacker who took the daemon over, and has no other files, must not
//!     learn where a VMM has its program, its libraries or its heap. A VMM whose memory map cannot be read because it
//!     has locked it delays its own answer: each question is answered by a thread of its own, and
//!     the daemon waits for no answer longer than two seconds.
//!
//! Both hold an end of a socket pair, and each notices by it that the other is gone. The keeper then ends after its
//! work is done; a daemon whose keeper dies ends with an error if its queues were leased from it, because the program
//! went along.
//!
//! It runs as the daemon was started; root's is limited to the capabilities that it needs
//! ([`capabilities::OF_A_KEEPER`]).

mod questions;

use std::fs;
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use steward::capabilities;
use steward::policy::{Policy, Queues};
use steward::server::Server;

use crate::guard::handed::{close_all_on_exec, taken};
use crate::listener::{Access, ListenError, listen_as};

pub(crate) use questions::private_address;

/// How long the keeper may take to end after the daemon said so.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// What it is to do.
#[derive(Debug)]
pub(crate) struct Orders<'a> {
    /// What its steward gives, if there is anything.
    pub(crate) leases: &'a [Queues],
    /// To that user, with that group.
    pub(crate) user: u32,
    pub(crate) group: u32,
    /// Its sockets may poll the driver, so many frames at a time at most.
    pub(crate) busy_poll: Option<u16>,
    /// Sockets to remove in the end.
    pub(crate) files: &'a [PathBuf],
    /// Paths of the sockets to VMMs.
    pub(crate) vmm_sockets: &'a [PathBuf],
}

/// The socket of a private steward.
struct Private {
    listener: OwnedFd,
    /// Its file, which has no name any more.
    file: OwnedFd,
}

/// The daemon's side. Dropping it ends the keeper, and waits until its work is done.
pub(crate) struct Keeper {
    end: UnixStream,
    /// Keeps the way to the private steward open.
    steward: Option<OwnedFd>,
    ending: Arc<AtomicBool>,
}

impl Keeper {
    pub(crate) fn start(orders: &Orders<'_>) -> anyhow::Result<Self> {
        let (end, theirs) = UnixStream::pair().context("no socket pair")?;
        let (questions, answers) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let private = match orders.leases {
            [] => None,
            _ => {
                Some(Private::listen(orders.user, orders.group).context("no private socket for the leases")?)
            }
        };
        close_all_on_exec()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("vhost-af-xdp");
        command.arg("keeper").stdin(Stdio::null()).stdout(Stdio::null());
        let mut passed = vec![theirs.as_fd(), answers.as_fd()];
        command.args(["--end", &theirs.as_raw_fd().to_string()]);
        command.args(["--questions", &answers.as_raw_fd().to_string()]);
        if let Some(private) = &private {
            command.args(["--listener", &private.listener.as_raw_fd().to_string()]);
            command.args(["--user", &orders.user.to_string()]);
            passed.push(private.listener.as_fd());
        }
        if let Some(frames) = orders.busy_poll {
            command.args(["--busy-poll", &frames.to_string()]);
        }
        for lease in orders.leases {
            let text = format!("{}+{}@{}", lease.first, lease.count, lease.interface);
            command.arg("--lease").arg(text);
        }
        for file in orders.files {
            command.arg("--remove").arg(file);
        }
        for path in orders.vmm_sockets {
            command.arg("--vmm-socket").arg(path);
        }
        for fd in &passed {
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        // It outlives us on purpose; its end is seen by the socket pair.
        #[allow(clippy::zombie_processes)]
        command
            .spawn()
            .context("cannot start the keeper (/proc/self/exe)")?;
        questions::ask_by(questions);
        Ok(Self {
            end,
            steward: private.map(|private| private.file),
            ending: Arc::default(),
        })
    }

    /// Where its steward is reached, if it is one.
    pub(crate) fn steward(&self) -> Option<PathBuf> {
        let file = self.steward.as_ref()?;
        Some(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())))
    }

    /// Calls `gone` in a thread of its own when the keeper ends before it was told to.
    pub(crate) fn watch(&self, gone: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let (mut end, ending) = (self.end.try_clone()?, Arc::clone(&self.ending));
        let body = move || {
            let _ = end.read(&mut [0]);
            // Set before what makes the keeper end; see drop.
            if !ending.load(Ordering::Acquire) {
                gone();
            }
        };
        std::thread::Builder::new()
            .name("keeper".to_owned())
            .spawn(body)
            .map(|_| ())
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Published to the thread of `watch`, before it can see the end.
        self.ending.store(true, Ordering::Release);
        let _ = self.end.set_read_timeout(Some(END_TIMEOUT));
        let _ = self.end.shutdown(Shutdown::Write);
        let _ = self.end.read(&mut [0]);
    }
}

impl Private {
    /// Listens for this user, in a place that nobody else finds.
    fn listen(user: u32, group: u32) -> Result<Self, ListenError> {
        let directory = make_directory()?;
        let path = directory.join("steward");
        let access = Access {
            owner: Some(user),
            group: Some(group),
            mode: 0o600,
        };
        // connect(2) follows /proc/self/fd/N to the file itself, which is found by inode (unix_find_bsd,
        // net/unix/af_unix.c).
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let listened = listen_as(SocketType::SEQPACKET, &path, &access).and_then(|listener| {
            let file = rustix::fs::open(&path, flags, rustix::fs::Mode::empty())?;
            Ok(Self { listener, file })
        });
        let _ = fs::remove_file(&path);
        let _ = fs::remove_dir(&directory);
        listened
    }
}

/// A new directory that only this user can look into.
pub(crate) fn make_directory() -> io::Result<PathBuf> {
    use std::os::unix::fs::DirBuilderExt;
    let own = std::process::id();
    for attempt in 0..100 {
        let path = std::env::temp_dir().join(format!("vhost-af-xdp-{own}-{attempt}"));
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => return made.map(|()| path),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Options of the hidden subcommand; see [`Keeper::start`].
#[derive(Debug, clap::Args)]
pub(crate) struct KeeperArgs {
    #[arg(long)]
    end: RawFd,
    #[arg(long)]
    questions: RawFd,
    #[arg(long)]
    listener: Option<RawFd>,
    #[arg(long, default_value_t = 0)]
    user: u32,
    #[arg(long, value_parser = parse_lease)]
    lease: Vec<Queues>,
    #[arg(long)]
    busy_poll: Option<u16>,
    #[arg(long)]
    remove: Vec<PathBuf>,
    #[arg(long = "vmm-socket")]
    vmm_sockets: Vec<PathBuf>,
}

/// `FIRST+COUNT@NAME`.
fn parse_lease(text: &str) -> Result<Queues, String> {
    let wrong = || format!("{text:?} is no lease");
    let (numbers, interface) = text.split_once('@').ok_or_else(wrong)?;
    let (first, count) = numbers.split_once('+').ok_or_else(wrong)?;
    let number = |text: &str| text.parse().map_err(|_| wrong());
    Ok(Queues {
        interface: interface.to_owned(),
        first: number(first)?,
        count: number(count)?,
    })
}

/// The keeper's life.
pub(crate) fn run(args: KeeperArgs) -> anyhow::Result<()> {
    let (end, questions) = (taken(args.end)?, taken(args.questions)?);
    // The daemon ends in order, then we do; a signal for the whole group is the daemon's.
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT] {
        signal_hook::flag::register(signal, Arc::clone(&ignored)).context("cannot handle signals")?;
    }
    let _ = rustix::thread::set_name(c"keeper");
    let files = Files::of(args.remove);
    if rustix::process::geteuid().is_root() {
        capabilities::limit_to(capabilities::OF_A_KEEPER).context("cannot give up capabilities")?;
    }
    std::thread::Builder::new()
        .name("questions".to_owned())
        .spawn(move || questions::answer_all(&Arc::new(questions), &Arc::new(args.vmm_sockets)))
        .context("no thread")?;
    let served = match args.listener {
        Some(listener) => {
            steward::server::raise_descriptor_limit();
            let policy = Policy::for_one(args.user, args.lease);
            let policy = match args.busy_poll {
                Some(frames) => policy.with_busy_poll(frames),
                None => policy,
            };
            // The program goes with the server, and with the last lease: nobody else could ask for more.
            Server::new(policy, taken(listener)?)
                .map(|server| server.with_linger(Duration::ZERO))
                .and_then(|mut server| server.run(end.as_fd()))
        }
        None => wait_for(end.as_fd()),
    };
    drop(files);
    served.context("the keeper cannot wait for requests")
}

fn wait_for(end: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(end, PollFlags::IN)], None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(_) => return Ok(()),
        }
    }
}

/// Socket files, removed in the end if they are still the same.
struct Files(Vec<SocketFile>);

struct SocketFile {
    path: PathBuf,
    identity: Identity,
}

/// What tells a file from one that took its name.
#[derive(PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    /// Inode numbers are used again; none if the file system does not know.
    created: Option<SystemTime>,
}

impl Identity {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            created: metadata.created().ok(),
        })
    }
}

impl Files {
    fn of(paths: Vec<PathBuf>) -> Self {
        let known = |path: PathBuf| {
            let identity = Identity::of(&path).ok()?;
            Some(SocketFile { path, identity })
        };
        Self(paths.into_iter().filter_map(known).collect())
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        for SocketFile { path, identity } in &self.0 {
            if Identity::of(path).is_ok_and(|now| now == *identity) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

#[cfg(test)]
#[path = "keeper_tests.rs"]
mod tests;
