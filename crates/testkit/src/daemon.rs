//! The daemon as a guard: the real binary in a process of its own, in a namespace.

use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::FdFlags;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::process::output_of;
use crate::{Lessor, NetNs, Running, sweep, wait};

/// The binary: `$VHOST_AF_XDP_BIN`, or what `cargo build` makes of this tree, once a test process.
///
/// # Panics
/// If it does not build.
#[must_use]
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../vhost-af-xdp/Cargo.toml");
    BINARY.get_or_init(|| std::env::var_os("VHOST_AF_XDP_BIN").map_or_else(|| build(manifest), PathBuf::from))
}

/// Builds the program of a crate; where it is.
pub(crate) fn build(manifest: &str) -> PathBuf {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let messages = output_of(
        &cargo,
        &[
            "build",
            "--quiet",
            "--message-format=json",
            "--manifest-path",
            manifest,
        ],
    );
    let executable = |line: &str| {
        serde_json::from_str::<Value>(line).ok()?["executable"]
            .as_str()
            .map(PathBuf::from)
    };
    messages
        .lines()
        .filter_map(executable)
        .next_back()
        .expect("the crate has a binary")
}

/// Where frames lie while they are with the NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// `--memory copy`.
    Copy,
    /// `--memory direct`.
    Direct,
}

impl Placement {
    /// As the option has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Direct => "direct",
        }
    }
}

/// How the steering program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `--mode native`.
    Native,
    /// `--mode skb`.
    Skb,
}

impl Mode {
    /// As the option has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Skb => "skb",
        }
    }
}

/// What a daemon may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Nothing; a steward leases queues to it.
    Leased,
    /// Nothing, and it has no queues.
    Nobody,
    /// Everything.
    Root,
}

impl Way {
    /// This one, unless `TESTKIT_STEWARD=0` says root.
    fn or_root(self) -> Self {
        match std::env::var("TESTKIT_STEWARD").as_deref() {
            Ok("0") => Self::Root,
            _ => self,
        }
    }
}

/// Options of `serve`, without the socket.
#[derive(Clone, Debug)]
pub struct Serve {
    args: Vec<String>,
    way: Way,
}

impl Serve {
    /// With an interface, without privileges: its queues are leased from a steward. `TESTKIT_STEWARD=0`: as root, without one.
    #[must_use]
    pub fn interface(name: &str) -> Self {
        Self {
            args: vec!["--ifname".to_owned(), name.to_owned()],
            way: Way::Leased.or_root(),
        }
    }

    /// With the null NIC, without privileges.
    #[must_use]
    pub fn null() -> Self {
        Self {
            args: vec!["--null".to_owned()],
            way: Way::Nobody.or_root(),
        }
    }

    /// Queues are leased from a steward, whatever `TESTKIT_STEWARD` says.
    #[must_use]
    pub fn leased(mut self) -> Self {
        self.way = Way::Leased;
        self
    }

    /// Started by root, without a steward, whatever `TESTKIT_STEWARD` says.
    #[must_use]
    pub fn by_root(mut self) -> Self {
        self.way = Way::Root;
        self
    }

    /// With a cable between two ports, without privileges.
    #[must_use]
    pub fn cable(name: &str) -> Self {
        Self {
            args: vec!["--cable".to_owned(), name.to_owned()],
            way: Way::Nobody.or_root(),
        }
    }

    /// One more option, with its value.
    #[must_use]
    pub fn with(mut self, option: &str, value: impl Into<String>) -> Self {
        self.args.extend([option.to_owned(), value.into()]);
        self
    }

    /// One more option that has no value.
    #[must_use]
    pub fn flag(mut self, option: &str) -> Self {
        self.args.push(option.to_owned());
        self
    }

    /// `--memory`.
    #[must_use]
    pub fn placement(self, placement: Placement) -> Self {
        self.with("--memory", placement.name())
    }

    /// `--mode`.
    #[must_use]
    pub fn mode(self, mode: Mode) -> Self {
        self.with("--mode", mode.name())
    }

    /// `--offload`: `all`, `none`, or names joined by commas.
    #[must_use]
    pub fn offload(self, list: &str) -> Self {
        self.with("--offload", list)
    }

    /// The options, as they go on the command line.
    #[must_use]
    pub fn args(&self) -> &[String] {
        &self.args
    }
}

/// A running `vhost-af-xdp serve`. Killed on drop.
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
    #[must_use]
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
        let control = self.path("control");
        let answers = || {
            let mut stream = UnixStream::connect(&control).ok()?;
            stream.set_read_timeout(Some(wait::SOON)).ok()?;
            stream
                .read_to_end(&mut Vec::new())
                .ok()
                .filter(|&bytes| bytes > 0)
        };
        let ready = wait::until(wait::SOON, || {
            answers().is_some() || self.running.ended().is_some()
        });
        self.running.check();
        assert!(ready, "no answer at {}: {}", control.display(), self.running);
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
    #[must_use]
    pub fn spawn(netns: &NetNs, serve: &Serve) -> Self {
        let dir = private_dir();
        let lessor = lessor(netns, &dir, serve);
        Self::spawn_with(netns, dir, lessor, serve)
    }

    /// Starts it with a lessor of the caller's, whose files are in `dir`; waits for nothing.
    #[must_use]
    pub fn spawn_with(netns: &NetNs, dir: TempDir, lessor: Option<Lessor>, serve: &Serve) -> Self {
        let socket = dir.path().join("vm.sock");
        Self {
            running: spawn(netns, (&dir, lessor.as_ref()), &socket, serve),
            lessor,
            dir,
        }
    }

    /// Starts it by a command of the caller's that runs its program; waits for nothing.
    #[must_use]
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

    /// Starts it with a port for each of `ports` (what `--port` says beside the socket), options for all in `serve`. The socket
    /// of port N is [`path`](Self::path)`("portN.sock")`.
    #[must_use]
    pub fn start_ports(netns: &NetNs, serve: &Serve, ports: &[&str]) -> Self {
        let dir = private_dir();
        let sockets: Vec<_> = (0..ports.len())
            .map(|at| dir.path().join(format!("port{at}.sock")))
            .collect();
        let named = ports.iter().flat_map(|port| port.split(','));
        let further: Vec<_> = named.filter_map(|pair| pair.strip_prefix("ifname=")).collect();
        let lessor = lessor_of(netns, &dir, (serve, &further));
        let mut command = serving(netns, (&dir, lessor.as_ref()), serve);
        command.args(serve.args());
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
    #[must_use]
    pub fn spawn_on_fd(netns: &NetNs, fd: &OwnedFd, serve: &Serve) -> Self {
        let dir = private_dir();
        let lessor = lessor(netns, &dir, serve);
        let mut command = serving(netns, (&dir, lessor.as_ref()), serve);
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
        let place = (&self.dir, self.lessor.as_ref());
        self.running = spawn(netns, place, &self.socket(), serve);
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
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("vm.sock")
    }

    /// Listens where a daemon in client mode connects, as a VMM does that lets the daemon's user.
    ///
    /// # Panics
    /// If the path is taken.
    #[must_use]
    pub fn listen(&self) -> UnixListener {
        let listener = UnixListener::bind(self.socket()).expect("a free path");
        std::fs::set_permissions(self.dir.path(), std::fs::Permissions::from_mode(0o755)).expect("ours");
        Lessor::admit(&self.socket());
        listener
    }

    /// A path beside its socket.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The process.
    pub fn process(&mut self) -> &mut Running {
        &mut self.running
    }

    /// Everything that it has said so far.
    #[must_use]
    pub fn said(&self) -> String {
        self.running.said()
    }

    /// What `vhost-af-xdp status --json` tells of it.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn status(&self) -> Value {
        let control = self.dir.path().join("control");
        let control = control.to_str().expect("made of ASCII");
        let text = output_of(
            binary().to_str().expect("a path in UTF-8"),
            &["status", "--json", "--control", control],
        );
        let status: Value = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("status is not JSON ({error}): {text}"));
        // One document for all daemons; this is the only one that was asked.
        if let Value::Array(mut daemons) = status {
            daemons.remove(0)
        } else {
            status
        }
    }

    /// What `status` tells of a port.
    #[must_use]
    pub fn port(&self, port: usize) -> Value {
        self.status()["ports"][port].clone()
    }

    /// Waits until `condition` holds for what `status` tells of a port.
    ///
    /// # Panics
    /// If it never does.
    pub fn await_port(&self, port: usize, what: &str, condition: impl Fn(&Value) -> bool) {
        let became = wait::until(wait::SOON, || condition(&self.port(port)));
        assert!(
            became,
            "{what} did not come true: {:#}\nThe daemon said:\n{}",
            self.port(port),
            self.said()
        );
    }

    /// Waits until a port says that it is impaired, and why, in text that contains `words`.
    ///
    /// # Panics
    /// If it never does.
    pub fn await_impaired(&self, port: usize, words: &str) {
        let is_why = |why: &str| why.contains(words);
        self.await_port(port, words, |port| port["impaired"].as_str().is_some_and(is_why));
    }

    /// Waits until a port is not impaired any more.
    ///
    /// # Panics
    /// If it stays so.
    pub fn await_recovered(&self, port: usize) {
        self.await_port(port, "recovered", |port| port["impaired"].is_null());
    }

    /// It cannot start: it ends with one line that contains all of `words`, and leaves no socket.
    ///
    /// # Panics
    /// If that is not so.
    #[track_caller]
    pub fn assert_complains(mut self, words: &[&str]) {
        let status = self.running.wait(wait::SOON);
        assert_complaint((status, &self.running.said()), words);
        let stays = self.socket().exists() || self.path("control").exists();
        assert!(!stays, "sockets stayed behind");
    }

    /// Sum, over all ports and lanes, of a counter with that name in `status`.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        sum_named(&self.status(), name)
    }

    /// Waits until a counter has that value at least.
    ///
    /// # Panics
    /// If it does not.
    pub fn await_counter(&self, name: &str, value: u64) {
        let reached = wait::until(wait::SOON, || self.counter(name) >= value);
        assert!(reached, "{name} is below {value}: {:#}", self.status());
    }

    /// Does something that wakes a worker, a kick say, and returns when it has been awake for it and all sleep again.
    ///
    /// # Panics
    /// If that never comes about.
    pub fn await_rest_after(&self, act: impl FnOnce()) {
        let before = self.sleeps_at_rest();
        act();
        let woken = wait::until(wait::SOON, || self.sleeps_at_rest() > before);
        assert!(woken, "nobody woke: {:#}", self.status());
    }

    /// How often workers have fallen asleep, as soon as that stays the same for a while.
    fn sleeps_at_rest(&self) -> u64 {
        let sleeps = || sum_named(&self.status()["workers"], "sleeps");
        let steady = wait::until_some(wait::SOON, || {
            let seen = sleeps();
            std::thread::sleep(Duration::from_millis(30));
            (sleeps() == seen).then_some(seen)
        });
        steady.unwrap_or_else(|| panic!("workers do not come to rest: {:#}", self.status()))
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

/// A short directory for sockets: their paths have at most 107 bytes.
///
/// # Panics
/// If it cannot be made.
#[must_use]
pub fn private_dir() -> TempDir {
    sweep::once();
    tempfile::Builder::new()
        .prefix(&sweep::prefix())
        .tempdir_in(sweep::DIRECTORIES)
        .expect("/tmp is writable")
}

/// Runs the daemon in a namespace to its end, with `args` as they are; returns its status and what it said.
///
/// # Panics
/// If it does not end.
#[must_use]
pub fn run_to_end(netns: &NetNs, args: &[&str]) -> (ExitStatus, String) {
    let mut command = netns.command(binary());
    command.args(args);
    let mut running = Running::start(command);
    let status = running.wait(wait::SOON);
    (status, running.said())
}

/// What ended like this, and said that, failed with one line that contains all of `words`.
///
/// # Panics
/// If that is not so.
#[track_caller]
pub fn assert_complaint((status, said): (ExitStatus, &str), words: &[&str]) {
    assert!(!status.success(), "it should have failed: {said}");
    assert_eq!(said.trim_end().lines().count(), 1, "one line, and not: {said}");
    for word in words {
        assert!(said.contains(word), "{word:?} is missing in: {said}");
    }
}

fn spawn(netns: &NetNs, (dir, lessor): (&TempDir, Option<&Lessor>), socket: &Path, serve: &Serve) -> Running {
    let mut command = serving(netns, (dir, lessor), serve);
    command.arg("--socket-path").arg(socket).args(serve.args());
    Running::start(command)
}

/// A lessor for the interfaces that the options name, if queues are to be leased.
fn lessor(netns: &NetNs, dir: &TempDir, serve: &Serve) -> Option<Lessor> {
    lessor_of(netns, dir, (serve, &[]))
}

/// A lessor for these interfaces, too.
fn lessor_of(netns: &NetNs, dir: &TempDir, (serve, further): (&Serve, &[&str])) -> Option<Lessor> {
    let named = serve.args.windows(2).filter(|pair| pair[0] == "--ifname");
    let mut names: Vec<&str> = named
        .map(|pair| pair[1].as_str())
        .chain(further.iter().copied())
        .collect();
    names.dedup();
    (serve.way == Way::Leased).then(|| Lessor::start(netns, dir, &names))
}

/// `serve` with what all have in common.
fn serving(netns: &NetNs, (dir, lessor): (&TempDir, Option<&Lessor>), serve: &Serve) -> Command {
    let mut command = match (lessor, serve.way) {
        (Some(lessor), _) => lessor.command(),
        (None, Way::Nobody) => Lessor::nobody(netns, dir, &[]),
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

/// Counters appear as `"name": number` or as an object with `"name"` and `"value"`.
fn sum_named(value: &Value, name: &str) -> u64 {
    match value {
        Value::Object(map) if map.get("name").and_then(Value::as_str) == Some(name) => {
            map.get("value").and_then(Value::as_u64).unwrap_or(0)
        }
        Value::Object(map) => {
            let own = map.get(name).and_then(Value::as_u64).unwrap_or(0);
            own + map.values().map(|inner| sum_named(inner, name)).sum::<u64>()
        }
        Value::Array(items) => items.iter().map(|inner| sum_named(inner, name)).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_wherever_they_are() {
        let status = serde_json::json!({
            "ports": [{"drops": {"runt": 2}}, {"lanes": [{"counters": [{"name": "runt", "value": 3}]}]}]
        });
        assert_eq!((sum_named(&status, "runt"), sum_named(&status, "other")), (5, 0));
    }
}
