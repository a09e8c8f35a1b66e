//! A node: the driver, a daemon with networks `lan` (on a veth) and `inner`, kubelet, and the API server.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use testkit::daemon::{DIR, private_dir};
use testkit::{Daemon, NetNs, Running, Serve, VethPair, wait};

use super::cluster::{Claim, Cluster, DRIVER, NODE};
use super::kubelet::Kubelet;

pub(crate) struct Scene<'a> {
    pub(crate) driver: Running,
    pub(crate) daemon: Daemon,
    pub(crate) kubelet: Kubelet,
    pub(crate) cluster: Cluster,
    netns: &'a NetNs,
    pub(crate) dir: TempDir,
}

/// Whether the daemon keeps its ports in a state file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum State {
    Kept,
    Lost,
}

/// Runs a test in the namespace of the NIC.
pub(crate) fn on_node(state: State, test: impl FnOnce(Scene<'_>, &VethPair) + Send) {
    let veth = VethPair::new();
    // So that XDP sees tags.
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    veth.near.enter(|| test(Scene::new(&veth.near, state), &veth));
}

impl<'a> Scene<'a> {
    fn new(netns: &'a NetNs, state: State) -> Self {
        let dir = private_dir();
        // The daemon's user has to reach the sockets.
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("ours");
        let sockets = dir.path().join("s");
        std::fs::create_dir(&sockets).expect("ours");
        let kept = match state {
            State::Kept => format!("state = \"{DIR}/added.toml\"\n"),
            State::Lost => String::new(),
        };
        let text = file(&sockets, &kept, &["lan", "inner"]);
        let daemon = Daemon::start_file(netns, &Serve::file(), &[VethPair::NIC], &text);
        let cluster = Cluster::start();
        let kubelet = Kubelet::new(dir.path().join("kubelet"));
        let driver = start(netns, &dir, &daemon, &cluster, &[]);
        let scene = Self {
            driver,
            daemon,
            kubelet,
            cluster,
            netns,
            dir,
        };
        scene.kubelet.register();
        scene
    }

    /// Starts the driver again after its end, with further options.
    pub(crate) fn restart_driver(&mut self, options: &[&str]) {
        assert!(self.driver.ended().is_some(), "it still runs");
        self.driver = start(self.netns, &self.dir, &self.daemon, &self.cluster, options);
        self.kubelet.register();
    }

    /// Ends the driver by a signal.
    pub(crate) fn end_driver(&mut self, signal: Signal) {
        self.driver.signal(signal);
        self.driver.wait(wait::SOON);
    }

    /// Ends the daemon.
    pub(crate) fn end_daemon(&mut self) {
        self.daemon.process().signal(Signal::TERM);
        self.daemon.process().wait(wait::SOON);
    }

    /// Starts the daemon again, with these networks.
    pub(crate) fn restart_daemon(&mut self, networks: &[&str]) {
        let before = std::fs::read_to_string(self.daemon.path("config.toml")).expect("ours");
        let kept = before.lines().find(|line| line.starts_with("state"));
        let kept = kept.map(|line| format!("{line}\n")).unwrap_or_default();
        self.daemon
            .write_file(&file(&self.dir.path().join("s"), &kept, networks));
        self.daemon.restart_file(self.netns, &Serve::file());
    }

    /// The directory of a claim's sockets.
    pub(crate) fn sockets(&self, claim: &Claim) -> PathBuf {
        let name: String = claim.uid.replace('-', "").chars().take(16).collect();
        self.dir.path().join("s").join(name)
    }

    /// The port of a claim's request.
    pub(crate) fn port(&self, claim: &Claim, request: &str) -> Option<Value> {
        let name: String = claim.uid.replace('-', "").chars().take(16).collect();
        self.daemon.port_named(&format!("dra-{name}-{request}"))
    }

    /// What the container runtime reads of a claim.
    pub(crate) fn cdi(&self, claim: &Claim) -> Option<Value> {
        let path = self
            .dir
            .path()
            .join("cdi")
            .join(format!("{DRIVER}-{}.json", claim.uid));
        let text = std::fs::read(path).ok()?;
        Some(serde_json::from_slice(&text).expect("JSON"))
    }

    pub(crate) fn checkpoint(&self, claim: &Claim) -> PathBuf {
        let claims = self.kubelet.dir.join("plugins").join(DRIVER).join("claims");
        claims.join(format!("{}.json", claim.uid))
    }

    /// Nothing of any claim is there.
    #[track_caller]
    pub(crate) fn assert_empty(&self) {
        let plugin = self.kubelet.dir.join("plugins").join(DRIVER);
        let s = self.dir.path().join("s");
        for directory in [
            plugin.join("claims"),
            plugin.join("metadata"),
            s,
            self.dir.path().join("cdi"),
        ] {
            let left: Vec<_> = std::fs::read_dir(&directory).expect("there").flatten().collect();
            assert!(left.is_empty(), "{left:?}");
        }
        let status = self.daemon.status();
        assert_eq!(
            status["ports"].as_array().map(Vec::len),
            Some(0),
            "{}",
            status["ports"]
        );
    }

    /// Waits until something is so.
    #[track_caller]
    pub(crate) fn await_that(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let holds = wait::until(wait::SOON, || holds(self));
        assert!(holds, "{what}\n{}\n{}", self.driver.said(), self.daemon.said());
    }
}

fn file(sockets: &std::path::Path, state: &str, networks: &[&str]) -> String {
    let mut text = format!(
        "[daemon]\nsocket-directories = [\"{}/*\"]\n{state}",
        sockets.display()
    );
    for network in networks {
        text += &match *network {
            "lan" => format!("[network.lan]\nuplink = \"{}\"\n", VethPair::NIC),
            other => format!("[network.{other}]\n"),
        };
    }
    text
}

fn start(netns: &NetNs, dir: &TempDir, daemon: &Daemon, cluster: &Cluster, options: &[&str]) -> Running {
    let mut command = netns.command(env!("CARGO_BIN_EXE_vhost-af-xdp-dra"));
    let control = daemon.path("control");
    for (option, path) in [
        ("--control", control),
        ("--kubeconfig", cluster.kubeconfig()),
        ("--kubelet-dir", dir.path().join("kubelet")),
        ("--cdi-dir", dir.path().join("cdi")),
        ("--sockets-dir", dir.path().join("s")),
    ] {
        command.arg(option).arg(path);
    }
    command
        .args(["--node-name", NODE, "--directory-group", "65534"])
        .args(options);
    Running::start(command)
}
