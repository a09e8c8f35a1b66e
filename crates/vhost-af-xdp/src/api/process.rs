//! The process that answers HTTP: neither the one that has guests' data nor the keeper, which is root.
//!
//! # Theory of operation
//!
//! `serve` binds the sockets and starts this program once more, with a hidden subcommand, before it enters its sandbox.
//! The new process has the listening sockets and one end of a socket pair, and nothing else of the daemon's. It enters
//! a [sandbox](crate::sandbox) of its own, reads nothing from anybody, and starts a child by fork(2), which alone talks
//! to clients: without any path, network, capability or privilege, and with [the calls](crate::sandbox::limit_calls)
//! that HTTP on sockets that listen already takes.
//!
//! For each child there are new connections to the daemon ([`link`](super::link)). Their far ends are sent to the
//! daemon through the pair, since its sandbox lets it make none. So no half of a question of a child that died is left.
//!
//! A child that ends is followed by another one, at once if it lived long, later and later if not: a client that knows
//! how to end it costs others the API, and nobody a frame. When the daemon ends, however that happens, both see their
//! connections closed and end; when the parent ends, the kernel ends the child. The daemon goes on without them.
#![allow(unsafe_code)]

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions, WaitStatus, pidfd_open,
    set_parent_process_death_signal, setrlimit, waitpid,
};
use rustix::thread::CapabilitySet;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use steward::log::{self, LogArgs};

use super::http;
pub(crate) use super::http::Changers;
use crate::guard::handed::{close_all_on_exec, taken};
use crate::sandbox::{self, Calls, Layer, Layers, Plan, Reach, User};

/// A child that lived for so long is followed by another one at once.
const LONG: Duration = Duration::from_secs(60);
/// Pause after the first child that did not, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// So long after its child the daemon may end.
const DAEMON_ENDS: Duration = Duration::from_millis(100);
/// Descriptors: all clients at a time and what the process has itself.
const DESCRIPTORS: u64 = 160;
/// Bytes of memory that one of the processes may have mapped, its program included: who took it over is not to take the
/// machine's from the daemon. It has a few MiB, and a few hundred with answers about a thousand ports for clients that
/// are slow to read them.
const MEMORY: u64 = 1 << 30;

/// Sockets that listen.
#[derive(Debug, Default)]
pub(crate) struct Listeners {
    pub(crate) all: Option<OwnedFd>,
    pub(crate) read_only: Option<OwnedFd>,
    pub(crate) metrics: Option<OwnedFd>,
    /// Who may change something by the first; `None`: all who can connect.
    pub(crate) changers: Option<Changers>,
    /// Of the first two.
    pub(crate) owner: u32,
}

impl Listeners {
    fn named(&self) -> impl Iterator<Item = (&'static str, &OwnedFd)> {
        let named = [
            ("--all", &self.all),
            ("--read-only", &self.read_only),
            ("--metrics", &self.metrics),
        ];
        named
            .into_iter()
            .filter_map(|(name, fd)| Some((name, fd.as_ref()?)))
    }
}

/// Starts it for these sockets, if there are any; the daemon's end of the pair.
/// Errors: it cannot be started.
pub(crate) fn start(
    listeners: Listeners,
    user: Option<&User>,
    layers: &Layers,
) -> anyhow::Result<Option<UnixStream>> {
    if listeners.named().next().is_none() {
        return Ok(None);
    }
    let (ours, theirs) = UnixStream::pair().context("no socket pair")?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("vhost-af-xdp");
    command.arg("api").stdin(Stdio::null()).stdout(Stdio::null());
    command.args(["--link", &theirs.as_raw_fd().to_string()]);
    command.args(["--sandbox", &layers.to_string()]);
    log::pass_on(&mut command);
    if let Some(user) = user {
        // Without its groups, of which nothing is needed.
        command.args(["--user", &format!("{}:{}", user.uid, user.gid)]);
    }
    if let Some(Changers { user, group }) = listeners.changers {
        command.args(["--changers", &format!("{user}:{group}")]);
    }
    command.args(["--owner", &listeners.owner.to_string()]);
    for (name, fd) in listeners.named() {
        command.args([name, &fd.as_raw_fd().to_string()]);
    }
    close_all_on_exec()?;
    fcntl_setfd(&theirs, FdFlags::empty())?;
    for (_, fd) in listeners.named() {
        fcntl_setfd(fd, FdFlags::empty())?;
    }
    // It outlives us on purpose; its end is seen by the socket pair.
    #[allow(clippy::zombie_processes)]
    let started = command.spawn();
    started.context("cannot start what answers HTTP (/proc/self/exe)")?;
    // Nobody is to connect to sockets that nobody accepts from any more.
    drop(listeners);
    Ok(Some(ours))
}

/// Options of the hidden subcommand; see [`start`].
#[derive(Debug, clap::Args)]
pub(crate) struct ProcessArgs {
    #[arg(long)]
    link: RawFd,
    #[arg(long, default_value = "all", allow_hyphen_values = true)]
    sandbox: String,
    #[arg(long)]
    user: Option<String>,
    #[arg(long)]
    all: Option<RawFd>,
    #[arg(long)]
    read_only: Option<RawFd>,
    #[arg(long)]
    metrics: Option<RawFd>,
    #[arg(long, value_parser = parse_changers)]
    changers: Option<Changers>,
    #[arg(long, default_value_t = 0)]
    owner: u32,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// `UID:GID`.
fn parse_changers(text: &str) -> Result<Changers, String> {
    let numbers = text.split_once(':').and_then(|(user, group)| {
        Some(Changers {
            user: user.parse().ok()?,
            group: group.parse().ok()?,
        })
    });
    numbers.ok_or_else(|| format!("{text:?} is no user and group"))
}

/// The life of the parent.
/// Errors: there is no sandbox, or no child.
pub(crate) fn run(args: &ProcessArgs) -> anyhow::Result<()> {
    let link = UnixStream::from(taken(args.link)?);
    let take = |fd: Option<RawFd>| fd.map(taken).transpose();
    let listeners = Listeners {
        all: take(args.all)?,
        read_only: take(args.read_only)?,
        metrics: take(args.metrics)?,
        changers: args.changers,
        owner: args.owner,
    };
    // The daemon ends in order, then we do; a signal for the whole group is the daemon's.
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT] {
        signal_hook::flag::register(signal, Arc::clone(&ignored)).context("cannot handle signals")?;
    }
    let _ = rustix::thread::set_name(c"api");
    for (of, most) in [(Resource::Nofile, DESCRIPTORS), (Resource::As, MEMORY)] {
        let most = Some(most);
        setrlimit(
            of,
            Rlimit {
                current: most,
                maximum: most,
            },
        )?;
    }
    let layers = Layers::parse(&args.sandbox)?;
    let plan = Plan {
        user: args.user.as_deref().map(User::parse).transpose()?,
        reach: Reach::Only(Vec::new()),
        external: false,
        calls: Calls::Later,
        keeps: CapabilitySet::empty(),
        layers: layers.clone(),
    };
    let in_force = sandbox::enter(&plan)?;
    tracing::debug!("API: sandbox: {in_force}");
    keep_running(&link, &listeners, layers.has(Layer::Calls))
}

/// Starts one child after the other, until the daemon ends.
fn keep_running(link: &UnixStream, listeners: &Listeners, limited: bool) -> anyhow::Result<()> {
    let mut pause = FIRST_PAUSE;
    loop {
        let begun = Instant::now();
        let life = Child::start(link, listeners, limited).and_then(|child| child.wait(link));
        let how = match life {
            Ok(None) => return Ok(()),
            Ok(Some(how)) => how,
            // Of what the machine lacks now it may have enough later.
            Err(error) => format!("{error:#}"),
        };
        if begun.elapsed() >= LONG {
            pause = FIRST_PAUSE;
        }
        // Of a daemon that ends the child hears first, and nothing is wrong with that.
        if ends_within(link, DAEMON_ENDS)? {
            return Ok(());
        }
        tracing::warn!(
            "API: {how}; another process answers after {} ms",
            pause.as_millis()
        );
        if ends_within(link, pause.saturating_sub(DAEMON_ENDS))? {
            return Ok(());
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Whether the daemon ends meanwhile.
fn ends_within(link: &UnixStream, time: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + time;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut [PollFd::new(link, PollFlags::IN)], Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(ready) => return Ok(ready > 0),
        }
    }
}

/// What answers.
struct Child {
    pid: Pid,
    handle: OwnedFd,
}

impl Child {
    fn start(link: &UnixStream, listeners: &Listeners, limited: bool) -> anyhow::Result<Self> {
        let (questions, far_questions) = UnixStream::pair()?;
        let (events, far_events) = UnixStream::pair()?;
        let (changes, far_changes) = UnixStream::pair()?;
        let parent = rustix::process::getpid();
        // SAFETY: this process has one thread, so the child may do whatever this one may.
        let forked = unsafe { libc::fork() };
        let Some(pid) = Pid::from_raw(forked) else {
            drop((far_questions, far_events, far_changes));
            // SAFETY: it is this process's copy, and nothing here uses it any more: the end of `serve` is its own.
            unsafe { libc::close(link.as_raw_fd()) };
            let served = serve(parent, listeners, [questions, events, changes], limited);
            let failed = served.map_err(|error| tracing::error!("API: {error:#}")).is_err();
            std::process::exit(i32::from(failed));
        };
        if forked < 0 {
            return Err(io::Error::last_os_error()).context("no process (ulimit -u, systemd: TasksMax=)");
        }
        let child = Self {
            pid,
            handle: pidfd_open(pid, PidfdFlags::empty())?,
        };
        send_ends(link, [&far_questions, &far_events, &far_changes]);
        Ok(child)
    }

    /// Waits for its end, and says how it ended; `None`: the daemon ended first.
    fn wait(self, link: &UnixStream) -> anyhow::Result<Option<String>> {
        loop {
            let mut sources = [
                PollFd::new(&self.handle, PollFlags::IN),
                PollFd::new(link, PollFlags::IN),
            ];
            match poll(&mut sources, None) {
                Err(rustix::io::Errno::INTR) => continue,
                result => result?,
            };
            if !sources[1].revents().is_empty() {
                return Ok(None);
            }
            if !sources[0].revents().is_empty() {
                let status = waitpid(Some(self.pid), WaitOptions::empty())?.map(|(_, status)| status);
                let signal = status.and_then(WaitStatus::terminating_signal);
                let how = signal.map_or("has ended".to_owned(), |signal| {
                    format!("was ended by signal {signal}")
                });
                return Ok(Some(format!("process {} {how}", self.pid)));
            }
        }
    }
}

/// Sends the daemon its ends. Should it be gone, the child sees that as well.
fn send_ends(link: &UnixStream, ends: [&UnixStream; 3]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = ends.map(AsFd::as_fd);
    if control.push(SendAncillaryMessage::ScmRights(&rights)) {
        let _ = sendmsg(link, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL);
    }
}

/// The life of the child.
fn serve(
    parent: Pid,
    listeners: &Listeners,
    [questions, events, changes]: [UnixStream; 3],
    limited: bool,
) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() != Some(parent) {
        return Ok(());
    }
    let copy = |fd: &Option<OwnedFd>| fd.as_ref().map(OwnedFd::try_clone).transpose();
    let sockets = http::Sockets {
        all: copy(&listeners.all)?.map(UnixListener::from),
        read_only: copy(&listeners.read_only)?.map(UnixListener::from),
        metrics: copy(&listeners.metrics)?.map(TcpListener::from),
        questions,
        events,
        changes,
        changers: listeners.changers,
        owner: listeners.owner,
    };
    let limit = || -> anyhow::Result<()> {
        if limited {
            sandbox::limit_calls()?;
        }
        Ok(())
    };
    http::serve(sockets, limit)
}
