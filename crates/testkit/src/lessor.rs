//! A steward for one daemon, which then runs without privileges: as nobody, without a capability and without a way to
//! one, in an empty network namespace.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tempfile::TempDir;

use crate::directory::private_dir;
use crate::{BpfFs, NetNs, Running, program};

/// Number of the user and of the group that the daemon runs as: nobody.
pub const ID: u32 = 65_534;

/// See the module's head. Fields are dropped in this order.
#[must_use]
pub struct Lessor {
    /// The steward.
    pub steward: Running,
    /// Where the daemon lives; there is no interface in it.
    home: NetNs,
    /// Where programs are pinned, so that leases outlive the steward.
    pub bpffs: BpfFs,
    /// The daemon's program, where nobody may run it.
    program: PathBuf,
    /// The policy, where the daemon cannot change it.
    policy: TempDir,
}

impl Lessor {
    /// Starts a steward that lets the daemon lease all queues of these interfaces of a namespace; its files are in
    /// `dir`, which becomes the daemon's.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(netns: &NetNs, dir: &TempDir, interfaces: &[&str]) -> Self {
        let rule = |name: &&str| {
            format!(
                "[[allow]]\nuser = {ID}\ninterface = \"{name}\"\nqueues = \"all\"\nmemlock = \"unlimited\"\n\
                 busy-poll = 64\nnetwork = true\nadvertise = true\nips = [\"0.0.0.0/0\", \"::/0\"]\n"
            )
        };
        let policy: String = interfaces.iter().map(rule).collect();
        // What it takes before Linux 6.4.
        let policy = format!("[limits]\nunbound-sockets = true\n{policy}");
        let own = private_dir();
        fs::write(own.path().join("policy.toml"), policy).expect("writable");
        let bpffs = BpfFs::new();
        let mut lessor = Self {
            steward: start(netns, dir, &bpffs, &own),
            home: NetNs::new("empty"),
            bpffs,
            program: hand_over(dir),
            policy: own,
        };
        lessor.steward.await_text("ready");
        lessor
    }

    /// Another policy, for the next steward.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn change_policy(&self, policy: &str) {
        fs::write(self.policy.path().join("policy.toml"), policy).expect("writable");
    }

    /// Starts the steward again after its end.
    pub fn restart(&mut self, netns: &NetNs, dir: &TempDir) {
        self.start_again(netns, dir);
        self.steward.await_text("ready");
    }

    /// The same, and does not wait for it.
    pub fn start_again(&mut self, netns: &NetNs, dir: &TempDir) {
        self.steward = start(netns, dir, &self.bpffs, &self.policy);
    }

    /// Where the steward listens.
    pub fn socket(dir: &TempDir) -> PathBuf {
        dir.path().join("steward.sock")
    }

    /// Whether the steward has a request of the daemon that it has not read.
    pub fn is_asked(&self) -> bool {
        // The steward's end of a connection is listed in the namespace of the client.
        let said = self.home.output_of("ss", &["-xnH"]);
        let is_unread = |line: &str| {
            let words: Vec<_> = line.split_whitespace().collect();
            matches!(words[..], [_, _, unread, _, path, ..] if unread != "0" && path.ends_with("/steward.sock"))
        };
        said.lines().any(is_unread)
    }

    /// Where the steward keeps its records.
    pub fn state(dir: &TempDir) -> PathBuf {
        dir.path().join("state")
    }

    /// Lets the daemon connect to a socket of root's: for that one must be allowed to write to it (unix(7)).
    ///
    /// # Panics
    /// If it is not there.
    pub fn admit(socket: &Path) {
        chown(socket, None, Some(ID)).expect("we are root");
        fs::set_permissions(socket, fs::Permissions::from_mode(0o660)).expect("we are root");
    }

    /// The daemon's program, to be run as the daemon.
    pub fn command(&self) -> Command {
        as_nobody(&self.home, &self.program, "-all")
    }

    /// As a daemon that has no steward: its program, to be run in a namespace with as little privilege but for
    /// `further` capabilities (as setpriv(1) has them, such as `+net_raw`), and its files in `dir`.
    pub fn nobody(netns: &NetNs, dir: &TempDir, further: &[&str]) -> Command {
        let all = [&[memory_capabilities()], further].concat().join(",");
        as_nobody(netns, &hand_over(dir), &all)
    }
}

/// Makes a directory the daemon's, with its program in it; where that is.
fn hand_over(dir: &TempDir) -> PathBuf {
    chown(dir.path(), Some(ID), Some(ID)).expect("we are root");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("we are root");
    program::daemon_in(dir.path())
}

fn as_nobody(netns: &NetNs, program: &Path, capabilities: &str) -> Command {
    let mut command = netns.command("setpriv");
    let id = ID.to_string();
    command
        .args(["--reuid", &id, "--regid", &id, "--clear-groups"])
        .args(["--inh-caps", capabilities, "--ambient-caps", capabilities])
        .args(["--bounding-set", capabilities])
        .args(["--no-new-privs", "--pdeathsig", "KILL"])
        .arg(program);
    command
}

/// What a daemon needs that locks memory itself: where this machine does not let root raise the limit (no
/// CAP_SYS_RESOURCE), CAP_IPC_LOCK, which lets a process pin memory, and nothing else.
fn memory_capabilities() -> &'static str {
    if may_raise_limits() {
        "-all"
    } else {
        "-all,+ipc_lock"
    }
}

/// Whether root may raise limits here.
fn may_raise_limits() -> bool {
    let limit = getrlimit(Resource::Memlock);
    let none = Rlimit {
        current: limit.current,
        maximum: None,
    };
    setrlimit(Resource::Memlock, none).is_ok()
}

fn start(netns: &NetNs, dir: &TempDir, bpffs: &BpfFs, policy: &TempDir) -> Running {
    let mut command = netns.command(program::steward());
    command.arg("--policy").arg(policy.path().join("policy.toml"));
    command.arg("--socket").arg(Lessor::socket(dir));
    command.arg("--state").arg(Lessor::state(dir));
    command.arg("--pins").arg(bpffs.pins());
    // Long enough for a daemon to come back, however busy the machine is; who is dead is not waited for.
    command.args(["--grace", "60"]);
    // Each refusal, also of what was refused before.
    command.args(["--log-level", "debug"]);
    Running::start(command)
}
