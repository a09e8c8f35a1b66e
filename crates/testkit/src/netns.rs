//! Network namespaces and the veth pairs between them, as guards.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::process::{output_of, run};
use crate::{sweep, wait};

/// A network namespace of the test's own. Removed on drop, with the interfaces in it.
#[derive(Debug)]
#[must_use]
pub struct NetNs {
    name: String,
}

impl NetNs {
    /// Makes one whose name contains `label`. IPv6 is off in it, so that nothing is sent by itself.
    ///
    /// # Panics
    /// If that is not allowed.
    pub fn new(label: &str) -> Self {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        sweep::once();
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let ns = Self {
            name: format!("{}{serial}-{label}", sweep::prefix()),
        };
        run("ip", &["netns", "add", &ns.name]);
        ns.enter(|| {
            for of in ["default", "all"] {
                let setting = format!("/proc/sys/net/ipv6/conf/{of}/disable_ipv6");
                std::fs::write(&setting, "1").unwrap_or_else(|error| panic!("{setting}: {error}"));
            }
            run("ip", &["link", "set", "lo", "up"]);
        });
        ns
    }

    /// Its name, as ip(8) knows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A command that will run in it, with its own /sys. `ip netns exec` becomes the command, so the child's number is the
    /// command's.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// Runs a command in this namespace and waits for it. /sys stays that of the caller: for the namespace's own `ip netns
    /// exec` and `ip -n` make a mount namespace, which costs more than most commands ([`Self::with_sysfs`]).
    ///
    /// # Panics
    /// If it fails.
    pub fn run(&self, program: &str, args: &[&str]) {
        let _ = self.output_of(program, args);
    }

    /// As [`run`](Self::run); returns what it printed.
    ///
    /// # Panics
    /// If it fails.
    pub fn output_of(&self, program: &str, args: &[&str]) -> String {
        self.enter(|| output_of(program, args))
    }

    /// Runs `ip` on its interfaces; each argument is a word or several.
    ///
    /// # Panics
    /// If it fails.
    pub fn ip(&self, args: &[&str]) {
        let words: Vec<_> = args.iter().flat_map(|words| words.split(' ')).collect();
        self.run("ip", &words);
    }

    /// Runs many commands of `ip` or `bridge`, as fast as it can.
    ///
    /// # Panics
    /// If one fails.
    pub fn batch(&self, program: &str, lines: impl IntoIterator<Item = String>) {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let text: String = lines.into_iter().map(|line| line + "\n").collect();
        file.write_all(text.as_bytes()).expect("writable");
        self.run(program, &["-batch", &file.path().to_string_lossy()]);
    }

    /// Runs commands of a shell that look into /sys, and returns what they printed.
    ///
    /// # Panics
    /// If one fails.
    pub fn with_sysfs(&self, commands: &str) -> String {
        output_of("ip", &["netns", "exec", &self.name, "sh", "-ec", commands])
    }

    /// The number of an interface in it.
    ///
    /// # Panics
    /// If there is none of that name.
    pub fn index_of(&self, interface: &str) -> u32 {
        self.enter(|| {
            let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
            netdevice::name_to_index(socket, interface)
        })
        .unwrap_or_else(|error| panic!("{interface}: {error}"))
    }

    /// Waits until the stack can send by an interface: until the kernel has seen that its peer is there (linkwatch),
    /// frames are lost without a word (`noop_qdisc`, net/sched/sch_generic.c). AF_XDP sockets do not pass a qdisc.
    ///
    /// # Panics
    /// If that never comes.
    pub fn await_sender(&self, interface: &str) {
        let can_send = || {
            self.link(interface)["qdisc"]
                .as_str()
                .is_some_and(|qdisc| qdisc != "noop")
        };
        assert!(wait::until(wait::SOON, can_send), "{}", self.link(interface));
    }

    /// What ip(8) tells of an interface.
    fn link(&self, interface: &str) -> serde_json::Value {
        let said = self.output_of("ip", &["-s", "-j", "link", "show", interface]);
        let links: serde_json::Value = serde_json::from_str(&said).expect("JSON");
        links[0].clone()
    }

    /// Moves the calling thread into it, for as long as the thread lives.
    ///
    /// # Panics
    /// If that is not allowed.
    pub fn move_here(&self) {
        let file = File::open(format!("/run/netns/{}", self.name)).expect("it has not been removed");
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).expect("we are root");
    }

    /// Runs a closure in it, on a thread made for it: a socket belongs to the namespace in which it was opened.
    ///
    /// # Panics
    /// If the closure does, or if the namespace cannot be entered.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                self.move_here();
                work()
            });
            inside
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for NetNs {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.name]).output();
    }
}

/// A veth pair between two namespaces: the daemon's NIC is the near end, the world is the far end.
#[derive(Debug)]
#[must_use]
pub struct VethPair {
    /// Namespace of the near end.
    pub near: NetNs,
    /// Namespace of the far end.
    pub far: NetNs,
}

impl VethPair {
    /// Name of the near end: the daemon's NIC.
    pub const NIC: &str = "nic0";
    /// Name of the far end.
    pub const WIRE: &str = "wire0";

    /// Both ends up, with one queue and an MTU of 1500 bytes.
    pub fn new() -> Self {
        Self::with(1, 1500)
    }

    /// Both ends up; `queues` each way, `mtu` in bytes. The far end does not leave checksums to the hardware: there is
    /// none, and AF_XDP would show the unfinished sums.
    ///
    /// # Panics
    /// If that is not allowed.
    pub fn with(queues: u32, mtu: u32) -> Self {
        let pair = Self {
            near: NetNs::new("near"),
            far: NetNs::new("far"),
        };
        pair.join(queues, mtu);
        pair
    }

    /// Makes the pair of interfaces in the namespaces: again, after one was deleted.
    ///
    /// # Panics
    /// If it is there.
    pub fn join(&self, queues: u32, mtu: u32) {
        self.join_as(Self::NIC, Self::WIRE, queues, mtu);
    }

    /// Makes a further pair, with other names: of the near end and of the far end.
    ///
    /// # Panics
    /// If it is there.
    pub fn join_as(&self, nic: &str, wire: &str, queues: u32, mtu: u32) {
        let (queues, mtu) = (queues.to_string(), mtu.to_string());
        let end = ["mtu", &mtu, "numrxqueues", &queues, "numtxqueues", &queues];
        let mut args = vec!["link", "add", nic, "netns", self.near.name()];
        args.extend(end);
        args.extend(["type", "veth", "peer", "name", wire, "netns", self.far.name()]);
        args.extend(end);
        run("ip", &args);
        self.far.run("ethtool", &["-K", wire, "tx", "off"]);
        self.near.ip(&["link", "set", nic, "arp", "off", "up"]);
        // The second end can send at once; the first one when the kernel has seen that its peer is there (linkwatch).
        self.far.ip(&["link", "set", wire, "arp", "off", "up"]);
    }

    /// Lets the kernel cut GSO packets that leave by the near end, as a wire would have it. By itself a veth hands them on
    /// as they are.
    ///
    /// # Panics
    /// If there is no near end.
    pub fn carry_no_gso_packets(&self) {
        let off = ["-K", Self::NIC, "tso", "off", "tx-udp-segmentation", "off"];
        self.near.run("ethtool", &off);
    }

    /// Waits until the near end's own stack can send, see [`NetNs::await_sender`].
    ///
    /// # Panics
    /// If that never comes.
    pub fn await_near(&self) {
        self.near.await_sender(Self::NIC);
    }

    /// Frames that the near end's queues have taken up so far.
    ///
    /// # Panics
    /// If there is no near end.
    pub fn received_by_nic(&self) -> u64 {
        self.near.link(Self::NIC)["stats64"]["rx"]["packets"]
            .as_u64()
            .expect("a number")
    }
}

impl Default for VethPair {
    fn default() -> Self {
        Self::new()
    }
}
