//! Starts and restarts the processes of the gateway.
//!
//! # Theory of operation
//!
//! The daemon binds the sockets and starts this program before it enters its own sandbox. The new process has the
//! listening sockets and one end of a socket pair, and nothing else of the daemon. It enters a
//! [sandbox](program::sandbox) of its own, reads no data of clients, and forks a child (fork(2)). Only the child talks
//! to clients: without any path, network, capability or privilege, and with [the calls](program::sandbox::limit_calls)
//! that HTTP on listening sockets takes.
//!
//! Each child has new control connections to the daemon. Their far ends are sent to the daemon through the socket pair,
//! since the sandboxes allow neither side to connect. So a child that died leaves no partial request.
//!
//! A child that ends is replaced: after a short pause if it lived long, after longer and longer ones if not. A client
//! that crashes it interrupts the API, but no traffic. When the daemon ends, however that happens, parent and child see
//! their connections closed and end; when the parent ends, the kernel ends the child. The daemon runs on without them.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use model::gateway::{GatewayOptions, Listeners};
use program::descriptors;
use program::handed::taken;
use program::log::LogArgs;
use program::sandbox::{self, Calls, Layer, Layers, Plan, Reach, User};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::SendFlags;
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, WaitOptions, WaitStatus, pidfd_open,
    set_parent_process_death_signal, setrlimit, waitpid,
};
use rustix::thread::CapabilitySet;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::server;

/// A child that lived for this long is replaced after the shortest pause.
const LONG: Duration = Duration::from_secs(60);
/// The shortest pause, which doubles with each child that lived shorter, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long after its child's end the parent waits for the daemon's end before it logs a failure.
const DAEMON_ENDS: Duration = Duration::from_millis(100);
/// Most descriptors: those of all clients, and the process's own.
const DESCRIPTORS: u64 = 160;
/// Bytes of memory that one of the processes may map, its program included, so that an attacker who took it over cannot
/// exhaust the host. It uses a few MiB, and a few hundred with answers about a thousand ports for slow clients.
const MEMORY: u64 = 1 << 30;

/// HTTP and metrics of vhost-af-xdp. `vhost-af-xdp serve` starts it; it cannot be started by hand.
#[derive(Debug, clap::Parser)]
#[command(name = "vhost-af-xdp-gateway", version)]
pub(crate) struct Args {
    #[arg(long, hide = true, value_parser = |text: &str| serde_json::from_str::<GatewayOptions>(text))]
    options: GatewayOptions,
    #[command(flatten)]
    pub(crate) log: LogArgs,
}

/// Runs the parent.
/// Errors: the sandbox cannot be set up, or the link to the daemon fails.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let options = &args.options;
    let link = UnixStream::from(taken(options.link)?);
    let listeners = options.listeners.try_map(|fd| taken(*fd))?;
    // A signal for the process group is for the daemon: this process ends after the daemon.
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGQUIT] {
        signal_hook::flag::register(signal, Arc::clone(&ignored)).context("cannot handle signals")?;
    }
    let _ = rustix::thread::set_name(c"gateway");
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
    let layers = Layers::parse(&options.sandbox)?;
    let plan = Plan {
        user: options.user.as_deref().map(User::parse).transpose()?,
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
fn keep_running(link: &UnixStream, listeners: &Listeners<OwnedFd>, limited: bool) -> anyhow::Result<()> {
    let mut pause = FIRST_PAUSE;
    loop {
        let begun = Instant::now();
        let life = Child::start(link, listeners, limited).and_then(|child| child.wait(link));
        let how = match life {
            Ok(None) => return Ok(()),
            Ok(Some(how)) => how,
            // A resource that the machine lacks now may be available later.
            Err(error) => format!("{error:#}"),
        };
        if begun.elapsed() >= LONG {
            pause = FIRST_PAUSE;
        }
        // When the daemon ends, the child may end first: that is no failure.
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

/// Whether the daemon ends within this time.
fn ends_within(link: &UnixStream, time: Duration) -> io::Result<bool> {
    descriptors::await_readable(link, Some(Instant::now() + time))
}

/// The process that answers clients.
struct Child {
    pid: Pid,
    handle: OwnedFd,
}

impl Child {
    fn start(link: &UnixStream, listeners: &Listeners<OwnedFd>, limited: bool) -> anyhow::Result<Self> {
        let (questions, far_questions) = UnixStream::pair()?;
        let (events, far_events) = UnixStream::pair()?;
        let (changes, far_changes) = UnixStream::pair()?;
        let parent = rustix::process::getpid();
        // SAFETY: this process has one thread, so the child may do whatever this one may.
        let forked = unsafe { libc::fork() };
        let Some(pid) = Pid::from_raw(forked) else {
            drop((far_questions, far_events, far_changes));
            // SAFETY: this process's copy of the descriptor, which nothing uses after the fork.
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
        for end in [&far_questions, &far_events, &far_changes] {
            send_end(link, end);
        }
        Ok(child)
    }

    /// Waits for its end, and returns how it ended; `None`: the daemon ended first.
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

/// Sends the daemon its end of a connection. If the daemon is gone, the child sees that, too.
fn send_end(link: &UnixStream, end: &UnixStream) {
    let _ = descriptors::send(link, &[0], &[end.as_fd()], SendFlags::empty());
}

/// Runs the child.
fn serve(
    parent: Pid,
    listeners: &Listeners<OwnedFd>,
    [questions, events, changes]: [UnixStream; 3],
    limited: bool,
) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() != Some(parent) {
        return Ok(());
    }
    let sockets = server::Sockets {
        listeners: listeners.try_map(OwnedFd::try_clone)?,
        questions,
        events,
        changes,
    };
    let limit = || -> anyhow::Result<()> {
        if limited {
            sandbox::limit_calls()?;
        }
        Ok(())
    };
    server::serve(sockets, limit)
}
