//! The daemon as a guard: the real binary in a process of its own, in a namespace.

mod file;
mod options;
mod status;

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};

use rustix::io::FdFlags;
use rustix::process::Signal;
use tempfile::TempDir;

pub use self::file::DIR;
use self::options::Privilege;
pub use self::options::{Mode, Placement, Serve};
pub use crate::directory::private_dir;
use crate::process::assert_complaint;
pub use crate::program::{daemon as binary, sandbox_attempt};
use crate::{Lessor, NetNs, Running, wait};

/// A running `vhost-af-xdp serve`. Killed on drop.
#[must_use]
pub struct Daemon {
    running: Running,
    /// If its queues are leased: who leases them.
    pub lessor: Option<Lessor>,
    /// Holds the sockets.
    dir: TempDir,
}

impl Daemon {
    /// Starts it in a namespace as a server, and waits for its socket.
    ///
    /// # Panics
    /// If it ends or makes no socket.
    pub fn start(netns: &NetNs, serve: &Serve) -> Self {
        let mut daemon = Self::spawn(netns, serve);
        daemon.await_listening();
        daemon.await_ready();
        daemon
    }

    /// Waits until it has set up what it listens for, which it does afterwards: then it answers.
    ///
    /// # Panics
    /// If it ends, or does not answer.
    pub fn await_ready(&mut self) {
        let ready = wait::until(wait::SOON, || {
            self.ask().is_ok_and(|text| !text.is_empty()) || self.running.ended().is_some()
        });
        self.running.check();
        assert!(ready, "no answer at its control socket: {}", self.running);
    }

    /// Waits until it has made its socket and its control socket.
    ///
    /// # Panics
    /// If it ends, or does not make them.
    pub fn await_listening(&mut self) {
        self.await_sockets(&[self.socket(), self.path("control")]);
    }

    /// Waits until these sockets are there.
    ///
    /// # Panics
    /// If it ends, or does not make them.
    pub fn await_sockets(&mut self, sockets: &[PathBuf]) {
        let all = || sockets.iter().all(|socket| socket.exists());
        let there = wait::until(wait::SOON, || all() || self.running.ended().is_some());
        self.running.check();
        assert!(there, "no sockets at {sockets:?}: {}", self.running);
    }

    /// Starts it, and waits for nothing.
    pub fn spawn(netns: &NetNs, serve: &Serve) -> Self {
        let dir = private_dir();
        let lessor = lessor_for(netns, &dir, serve, &[]);
        Self::spawn_with(netns, dir, lessor, serve)
    }

    /// Starts it with a lessor of the caller's, whose files are in `dir`; waits for nothing.
    pub fn spawn_with(netns: &NetNs, dir: TempDir, lessor: Option<Lessor>, serve: &Serve) -> Self {
        Self {
            running: spawn(netns, &dir, lessor.as_ref(), serve),
            lessor,
            dir,
        }
    }

    /// Starts it by a command of the caller's that runs its program; waits for nothing.
    pub fn spawn_by(mut command: Command, dir: TempDir, serve: &Serve) -> Self {
        command
            .arg("serve")
            .arg("--control")
            .arg(dir.path().join("control"));
        command
            .arg("--socket-path")
            .arg(dir.path().join("vm.sock"))
            .args(serve.args());
        Self {
            running: Running::start(command),
            lessor: None,
            dir,
        }
    }

    /// Starts it with a port for each of `ports` (what `--port` says beside the socket), options for all in `serve`.
    /// The socket of port N is [`path`](Self::path)`("portN.sock")`.
    pub fn start_ports(netns: &NetNs, serve: &Serve, ports: &[&str]) -> Self {
        let dir = private_dir();
        let sockets: Vec<_> = (0..ports.len())
            .map(|at| dir.path().join(format!("port{at}.sock")))
            .collect();
        let named = ports.iter().flat_map(|port| port.split(','));
        let further: Vec<_> = named.filter_map(|pair| pair.strip_prefix("ifname=")).collect();
        let lessor = lessor_for(netns, &dir, serve, &further);
        let mut command = serving(netns, &dir, lessor.as_ref(), serve);
        command.args(serve.args());
        // By AF_XDP, where nothing says otherwise.
        if !further.is_empty() && !serve.args().iter().any(|arg| arg == "--mode") {
            command.args(["--mode", "xdp"]);
        }
        for (socket, port) in sockets.iter().zip(ports) {
            command
                .arg("--port")
                .arg(format!("socket-path={},{port}", socket.display()));
        }
        let mut daemon = Self {
            running: Running::start(command),
            lessor,
            dir,
        };
        daemon.await_sockets(&sockets);
        daemon.await_ready();
        daemon
    }

    /// As [`spawn`](Self::spawn), on a descriptor that it inherits: a listener or a connection.
    ///
    /// # Panics
    /// If the descriptor cannot be handed on.
    pub fn spawn_on_fd(netns: &NetNs, fd: &OwnedFd, serve: &Serve) -> Self {
        let dir = private_dir();
        let lessor = lessor_for(netns, &dir, serve, &[]);
        let mut command = serving(netns, &dir, lessor.as_ref(), serve);
        command
            .args(["--fd", &fd.as_raw_fd().to_string()])
            .args(serve.args());
        // Whatever else is started meanwhile inherits it too, which does no harm in a test.
        rustix::io::fcntl_setfd(fd, FdFlags::empty()).expect("an open descriptor");
        let running = Running::start(command);
        rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC).expect("an open descriptor");
        Self { running, lessor, dir }
    }

    /// Starts it again after its end, at the same place.
    ///
    /// # Panics
    /// If it still runs.
    pub fn restart(&mut self, netns: &NetNs, serve: &Serve) {
        assert!(self.running.ended().is_some(), "it still runs: {}", self.running);
        self.running = spawn(netns, &self.dir, self.lessor.as_ref(), serve);
    }

    /// Sends a signal to its steward.
    ///
    /// # Panics
    /// If it has none.
    pub fn signal_steward(&mut self, signal: Signal) {
        let lessor = self.lessor.as_mut().expect("queues are leased");
        lessor.steward.signal(signal);
    }

    /// Ends its steward by a signal.
    ///
    /// # Panics
    /// If it has none.
    pub fn end_steward(&mut self, signal: Signal) {
        let lessor = self.lessor.as_mut().expect("queues are leased");
        lessor.steward.signal(signal);
        lessor.steward.wait(wait::SOON);
    }

    /// Starts its steward again, after that ended, and does not wait for it.
    pub fn start_lessor_again(&mut self, netns: &NetNs) {
        if let Some(lessor) = &mut self.lessor {
            lessor.start_again(netns, &self.dir);
        }
    }

    /// Starts its steward again, after that ended.
    pub fn restart_lessor(&mut self, netns: &NetNs) {
        if let Some(lessor) = &mut self.lessor {
            lessor.restart(netns, &self.dir);
        }
    }

    /// Where its vhost-user socket is, or where the VMM should listen in client mode.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("vm.sock")
    }

    /// Listens where a daemon in client mode connects, as a VMM does that lets the daemon's user.
    ///
    /// # Panics
    /// If the path is taken.
    pub fn listen(&self) -> UnixListener {
        let listener = UnixListener::bind(self.socket()).expect("a free path");
        std::fs::set_permissions(self.dir.path(), std::fs::Permissions::from_mode(0o755)).expect("ours");
        Lessor::admit(&self.socket());
        listener
    }

    /// A path beside its socket.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The process.
    pub fn process(&mut self) -> &mut Running {
        &mut self.running
    }

    /// Everything that it has said so far.
    pub fn said(&self) -> String {
        self.running.said()
    }

    /// Waits until something holds.
    ///
    /// # Panics
    ///
    /// If it never does, with what the daemon said.
    #[track_caller]
    pub fn await_that(&self, holds: impl FnMut() -> bool) {
        assert!(wait::until(wait::SOON, holds), "{}", self.said());
    }

    /// It cannot start: it ends with one line that contains all of `words`, and leaves no socket.
    ///
    /// # Panics
    /// If that is not so.
    #[track_caller]
    pub fn assert_complains(mut self, words: &[&str]) {
        let status = self.running.wait(wait::SOON);
        assert_complaint(status, &self.running.said(), words);
        let stays = self.socket().exists() || self.path("control").exists();
        assert!(!stays, "sockets stayed behind");
    }

    /// SIGTERM, and its status; it must end at once.
    ///
    /// # Panics
    /// If it does not.
    pub fn terminate(&mut self) -> ExitStatus {
        self.running.signal(Signal::TERM);
        self.running.wait(wait::SOON)
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.running.signal(Signal::KILL);
        self.running.wait(wait::SOON);
    }
}

/// Runs the daemon in a namespace to its end, with `args` as they are; returns its status and what it said.
///
/// # Panics
/// If it does not end.
pub fn run_to_end(netns: &NetNs, args: &[&str]) -> (ExitStatus, String) {
    let mut command = netns.command(binary());
    command.args(args);
    let mut running = Running::start(command);
    let status = running.wait(wait::SOON);
    (status, running.said())
}

fn spawn(netns: &NetNs, dir: &TempDir, lessor: Option<&Lessor>, serve: &Serve) -> Running {
    let mut command = serving(netns, dir, lessor, serve);
    command
        .arg("--socket-path")
        .arg(dir.path().join("vm.sock"))
        .args(serve.args());
    Running::start(command)
}

/// A lessor for the interfaces that the options name and for `further` ones, if queues are to be leased.
fn lessor_for(netns: &NetNs, dir: &TempDir, serve: &Serve, further: &[&str]) -> Option<Lessor> {
    let named = serve.args().windows(2).filter(|pair| pair[0] == "--ifname");
    let mut names: Vec<&str> = named
        .map(|pair| pair[1].as_str())
        .chain(further.iter().copied())
        .collect();
    names.dedup();
    (serve.privilege == Privilege::Leased).then(|| Lessor::start(netns, dir, &names))
}

/// `serve` with what all have in common.
fn serving(netns: &NetNs, dir: &TempDir, lessor: Option<&Lessor>, serve: &Serve) -> Command {
    let mut command = match (lessor, serve.privilege) {
        (Some(lessor), _) => lessor.command(),
        (None, Privilege::Nobody) => Lessor::nobody(netns, dir, &[]),
        (None, _) => netns.command(binary()),
    };
    command
        .arg("serve")
        .arg("--control")
        .arg(dir.path().join("control"));
    if lessor.is_some() {
        command.arg("--steward").arg(Lessor::socket(dir));
    }
    command
}
