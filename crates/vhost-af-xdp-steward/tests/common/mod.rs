//! What the tests of this crate stand on: the real steward on the near end of a veth pair, lessees without privileges
//! in processes of their own, a packet socket on the far end.
#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod hostile;
pub(crate) mod lessee;
pub(crate) mod netkit;
pub(crate) mod raw;
pub(crate) mod receiving;
pub(crate) mod ring;

use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use steer::{Filter, ModeRequest, Station};
use steward_client::{Lease, LeaseError, Waiting};
use steward_protocol::{Facts, Reason, Refusal, StationChange, Wanted};
use tempfile::TempDir;
use testkit::{BpfFs, PacketPort, Running, VethPair, assert_soon, procfs, wait};

/// The steward's program.
const STEWARD: &str = env!("CARGO_BIN_EXE_vhost-af-xdp-steward");
/// In a child: who it is to be.
const HOLDER: &str = "STEWARD_HOLDER";

/// Who lessees of this test's program are, and no other process, since the kernel counts locked memory by user.
pub(crate) fn lessee_uid() -> u32 {
    std::env::var(HOLDER).map_or_else(
        |_| 100_000 + std::process::id(),
        |number| number.parse().expect("a number"),
    )
}

/// A policy, in which HOLDER stands for [`lessee_uid`], where stewards find it.
pub(crate) fn write_policy(dir: &TempDir, policy: &str) {
    let mut policy = policy.replace("HOLDER", &lessee_uid().to_string());
    if !host::maps_bound_rings() && !policy.contains("[limits]") {
        policy.insert_str(0, "[limits]\nunbound-sockets = true\n");
    }
    fs::write(dir.path().join("policy.toml"), policy).expect("writable");
}

/// A rule by which lessees may lease these queues.
pub(crate) fn lessee_may(interface: &str, queues: &str) -> String {
    format!(
        "[[allow]]\nuser = HOLDER\ninterface = \"{interface}\"\nqueues = \"{queues}\"\nmemlock = \"64 MiB\"\n"
    )
}

/// What lessees and root may lease, unless a test says otherwise.
pub(crate) const POLICY: &str = r#"
[[allow]]
user = HOLDER
interface = "nic0"
queues = "0-1"
memlock = "64 MiB"
[[allow]]
user = 0
interface = "nic0"
queues = "all"
"#;

/// For tests to which the program without a lease is of no interest: it goes at once.
const BRIEFLY: &str = "0";

/// Takes a lease from the steward at `path`, as a lessee does that waits as long as most do.
pub(crate) fn take(path: &Path, wanted: &Wanted) -> Result<Lease, LeaseError> {
    Lease::take(path, wanted, Waiting::default())
}

/// Waits until the steward reports facts like these.
#[track_caller]
pub(crate) fn await_facts(lease: &Lease, what: &str, holds: impl Fn(&Facts) -> bool) -> Facts {
    await_lease(lease, what, |lease| holds(&lease.facts()));
    lease.facts()
}

/// Takes changes of a lease whenever its descriptor reports some, until it has what is waited for.
#[track_caller]
pub(crate) fn await_lease(lease: &Lease, what: &str, holds: impl Fn(&Lease) -> bool) {
    let (deadline, second) = (soon(), Timespec::try_from(Duration::from_secs(1)));
    while Instant::now() < deadline {
        lease
            .take_changes()
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        if holds(lease) {
            return;
        }
        let mut fds = [PollFd::from_borrowed_fd(lease.as_fd(), PollFlags::IN)];
        let _ = poll(&mut fds, Some(&second.expect("short")));
    }
    panic!("never: {what}; last: {:?}", lease.facts());
}

/// Until when a test waits for what comes at once, as a rule.
pub(crate) fn soon() -> Instant {
    Instant::now() + wait::SOON
}

/// All of it. Fields are dropped in this order.
pub(crate) struct World {
    pub(crate) steward: Running,
    pub(crate) wire: PacketPort,
    pub(crate) veth: VethPair,
    pub(crate) dir: TempDir,
    /// Where the steward keeps leases over its own end, if it does.
    pub(crate) bpffs: Option<BpfFs>,
    /// For how long it waits for lessees then, seconds.
    pub(crate) grace: &'static str,
    /// For how long the program stays without a lease, seconds.
    linger: &'static str,
}

impl World {
    /// A steward with [`POLICY`] on an interface of two queues.
    pub(crate) fn new() -> Self {
        Self::with(2, POLICY)
    }

    /// The same on an interface of one queue, which all frames go to.
    pub(crate) fn of_one_queue() -> Self {
        Self::with(1, POLICY)
    }

    pub(crate) fn with(queues: u32, policy: &str) -> Self {
        Self::start(queues, policy, None, ["0", BRIEFLY])
    }

    /// On an interface of one queue, with a steward whose leases outlive it; lessees have long enough to come back,
    /// however busy the machine is.
    pub(crate) fn kept() -> Self {
        Self::kept_for(POLICY, "60")
    }

    /// The same with another policy, and so many seconds.
    pub(crate) fn kept_for(policy: &str, grace: &'static str) -> Self {
        Self::start(1, policy, Some(BpfFs::new()), [grace, BRIEFLY])
    }

    /// A steward whose program stays so many seconds after its last lease, two queues.
    pub(crate) fn lingering(policy: &str, linger: &'static str) -> Self {
        Self::start(2, policy, None, ["0", linger])
    }

    /// The same, and its leases outlive it.
    pub(crate) fn kept_lingering(policy: &str, linger: &'static str) -> Self {
        Self::start(2, policy, Some(BpfFs::new()), ["60", linger])
    }

    fn start(queues: u32, policy: &str, bpffs: Option<BpfFs>, [grace, linger]: [&'static str; 2]) -> Self {
        let veth = VethPair::with(queues, 1500);
        let dir = testkit::daemon::private_dir();
        // Lessees are of another user.
        Command::new("chmod")
            .arg("755")
            .arg(dir.path())
            .status()
            .expect("chmod(1)");
        write_policy(&dir, policy);
        let mut world = Self {
            steward: Running::start(with_places(
                veth.near.command(STEWARD),
                &dir,
                bpffs.as_ref().map(|bpffs| (bpffs, grace)),
                linger,
            )),
            wire: PacketPort::open(&veth.far, VethPair::WIRE),
            veth,
            dir,
            bpffs,
            grace,
            linger,
        };
        world.steward.await_text("ready");
        world
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("steward.sock")
    }

    /// Starts the steward again after its end, with these capabilities at most (setpriv(1)).
    pub(crate) fn restart_with(&mut self, capabilities: &str) {
        let mut command = self.veth.near.command("setpriv");
        command.args([
            "--inh-caps",
            "-all",
            "--bounding-set",
            capabilities,
            "--no-new-privs",
        ]);
        command.arg(STEWARD);
        self.steward = Running::start(self.with_places(command));
        self.steward.await_text("ready");
    }

    /// Starts the steward again after its end, to die at a point.
    pub(crate) fn restart_to_crash(&mut self, point: &str) {
        let mut command = self.veth.near.command(STEWARD);
        command.env("STEWARD_CRASH_AT", point);
        self.steward = Running::start(self.with_places(command));
    }

    /// Ends the steward.
    pub(crate) fn end_steward(&mut self, signal: Signal) {
        self.steward.signal(signal);
        self.steward.wait(wait::SOON);
    }

    /// Has the steward read another policy.
    pub(crate) fn set_policy(&mut self, policy: &str) {
        write_policy(&self.dir, policy);
        self.steward.signal(Signal::HUP);
    }

    /// Takes back what is left, by a command of its own; what that complains of.
    pub(crate) fn take_back(&self) -> String {
        let mut command = self.with_places(self.veth.near.command(STEWARD));
        let output = command.arg("--take-back").output();
        let output = output.expect("it runs");
        String::from_utf8(output.stderr).expect("text")
    }

    /// Waits until nothing is pinned, recorded or attached.
    #[track_caller]
    pub(crate) fn await_nothing(&self) {
        self.await_no_program();
        let left = || {
            let pinned = self.bpffs.as_ref().map(BpfFs::pinned).unwrap_or_default();
            let state = fs::read_dir(self.dir.path().join("state"));
            let files = state.into_iter().flatten().flatten().map(|entry| entry.path());
            files.chain(pinned).collect::<Vec<_>>()
        };
        assert_soon!(left().is_empty(), "{:?} stay", left());
    }

    /// Starts the steward again after its end.
    pub(crate) fn restart(&mut self) {
        self.start_again();
        self.steward.await_text("ready");
    }

    /// Ends the steward and starts it again.
    pub(crate) fn restart_after(&mut self, signal: Signal) {
        self.end_steward(signal);
        self.restart();
    }

    /// Starts the steward again after its end, and does not wait for it.
    pub(crate) fn start_again(&mut self) {
        self.steward = Running::start(self.with_places(self.veth.near.command(STEWARD)));
    }

    /// The steward's command line, so far.
    pub(crate) fn command(&self) -> Command {
        self.veth.near.command(STEWARD)
    }

    /// The same with a listener as a service manager passes it (sd_listen_fds(3)).
    pub(crate) fn command_with_listener(&self, listener: &OwnedFd) -> Command {
        self.command_with("listener", listener)
    }

    /// With a descriptor that the service manager passes under that name.
    pub(crate) fn command_with(&self, name: &str, listener: &OwnedFd) -> Command {
        rustix::io::fcntl_setfd(listener, rustix::io::FdFlags::empty()).expect("open");
        let mut command = self.veth.near.command("bash");
        let number = listener.as_raw_fd();
        let script =
            format!("LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES={name} exec \"$@\" 3<&{number} {number}<&-");
        command.args(["-c", &script, "bash", STEWARD]);
        command
    }

    /// Starts the steward again after its end by such a command, and does not wait for it.
    pub(crate) fn start_as(&mut self, command: Command) {
        self.steward = Running::start(self.with_places(command));
    }

    fn with_places(&self, command: Command) -> Command {
        let kept = self.bpffs.as_ref().map(|bpffs| (bpffs, self.grace));
        with_places(command, &self.dir, kept, self.linger)
    }

    /// A lease of this process, which is root's.
    pub(crate) fn lease(&self, start_queue: u32, queues: u32) -> Result<Lease, LeaseError> {
        take(&self.socket(), &wanted(start_queue, queues))
    }

    /// The program on the interface, by a look that does not go through the steward.
    pub(crate) fn program(&self) -> Option<u32> {
        self.veth.near.enter(|| {
            let link = host::links::Link::by_name(VethPair::NIC).ok()?;
            steer::program_on(link.index).map(|program| program.id)
        })
    }

    /// How often the steward has attached its program, as it says: it says each. What it says comes here a little
    /// later, so this waits until it has done so as often as it must have.
    pub(crate) fn attached(&self, at_least: usize) -> usize {
        let count = || self.steward.said().matches("program attached interface=").count();
        wait::until(wait::SOON, || count() >= at_least);
        count()
    }

    /// Waits until something holds.
    #[track_caller]
    pub(crate) fn await_that(&self, holds: impl FnMut() -> bool) {
        assert!(wait::until(wait::SOON, holds));
    }

    /// Waits until there is no program on the interface.
    #[track_caller]
    pub(crate) fn await_no_program(&self) {
        assert_soon!(self.program().is_none(), "the program stays");
    }

    /// Whether the interface accepts frames to this address, too, not only to its own.
    pub(crate) fn accepts(&self, mac: &str) -> bool {
        let near = &self.veth.near;
        near.output_of("bridge", &["fdb", "show", "dev", VethPair::NIC])
            .contains(mac)
    }

    /// Open descriptors of the steward.
    pub(crate) fn descriptors(&self) -> usize {
        procfs::descriptors(self.steward.pid())
    }

    /// Children that the steward has at work.
    pub(crate) fn children(&self) -> usize {
        procfs::children(self.steward.pid()).len()
    }

    /// Waits until the steward has no more descriptors than it had.
    #[track_caller]
    pub(crate) fn await_descriptors(&self, before: usize) {
        assert_soon!(
            self.descriptors() <= before,
            "{before} descriptors became {}",
            self.descriptors()
        );
    }

    /// A frame that the far end sends must come back from the lessee that echoes.
    #[track_caller]
    pub(crate) fn assert_echo(&self, seed: u8) {
        let sent = testkit::frame::plain(200, seed);
        assert!(self.echo(&sent, wait::SOON), "no echo");
    }

    pub(crate) fn echo(&self, sent: &[u8], limit: Duration) -> bool {
        self.wire.try_send(sent).is_ok() && self.wire.receive(limit).is_some_and(|got| got == sent)
    }

    /// Waits until frames come back.
    #[track_caller]
    pub(crate) fn await_echo(&self) {
        let sent = testkit::frame::plain(100, 0xec);
        let comes = wait::until(wait::SOON, || {
            // What earlier lessees sent back, thousands of frames perhaps.
            while self.wire.receive(Duration::ZERO).is_some() {}
            self.echo(&sent, Duration::from_millis(100))
        });
        assert!(comes, "no echo");
        let last = testkit::frame::last();
        self.wire.try_send(&last).expect("it is up");
        let _ = self.wire.receive_before(&last);
    }
}

/// A lease of queues of an interface.
pub(crate) fn wanted_of(interface: &str, start_queue: u32, queues: u32) -> Wanted {
    Wanted {
        interface: interface.to_owned(),
        ..wanted(start_queue, queues)
    }
}

/// The same for frames to these addresses and VLANs only.
pub(crate) fn filtered(start_queue: u32, macs: &[[u8; 6]], vlans: &[u16]) -> Wanted {
    Wanted {
        filter: Filter {
            macs: macs.to_vec(),
            vlans: vlans.to_vec(),
        },
        ..wanted(start_queue, 1)
    }
}

/// The same for a network.
pub(crate) fn network(start_queue: u32, queues: u32) -> Wanted {
    Wanted {
        network: true,
        ..wanted(start_queue, queues)
    }
}

/// A station gets a port, or has none any more.
pub(crate) fn change(vlan: u16, mac: [u8; 6], port: Option<u32>) -> StationChange {
    let station = Station { vlan, mac };
    StationChange { station, port }
}

pub(crate) fn wanted(start_queue: u32, queues: u32) -> Wanted {
    Wanted {
        interface: VethPair::NIC.to_owned(),
        start_queue,
        queues,
        mode: ModeRequest::Xdp,
        filter: Filter::default(),
        network: false,
    }
}

/// What the steward refused for.
#[track_caller]
pub(crate) fn refusal<T>(result: Result<T, LeaseError>) -> Refusal {
    match result {
        Err(LeaseError::Refused(refusal)) => refusal,
        Err(error) => panic!("it should have been refused by the steward, and not: {error}"),
        Ok(_) => panic!("it should have been refused"),
    }
}

/// The steward refuses it for this reason, in these words.
#[track_caller]
pub(crate) fn assert_refused<T>(result: Result<T, LeaseError>, reason: Reason, words: &str) {
    let refusal = refusal(result);
    assert!(
        refusal.reason == reason && refusal.text.contains(words),
        "{reason:?}, {words}: {refusal}"
    );
}

/// The same for any reason.
#[track_caller]
pub(crate) fn assert_refused_with<T>(result: Result<T, LeaseError>, words: &str) {
    let refusal = refusal(result);
    assert!(refusal.text.contains(words), "{words}: {refusal}");
}

fn with_places(mut command: Command, dir: &TempDir, kept: Option<(&BpfFs, &str)>, linger: &str) -> Command {
    command.args(["--linger", linger]);
    command.arg("--policy").arg(dir.path().join("policy.toml"));
    command.arg("--socket").arg(dir.path().join("steward.sock"));
    if let Some((bpffs, grace)) = kept {
        command.arg("--state").arg(dir.path().join("state"));
        command.arg("--pins").arg(bpffs.pins());
        command.args(["--grace", grace]);
    }
    command
}

/// Of a queue whose frames have no header and no hints.
pub(crate) fn bare(frame_limit: u32) -> steer::QueueConf {
    steer::QueueConf {
        virtio_header: None,
        frame_limit,
        hints: false,
    }
}

/// A frame to that station.
pub(crate) fn to(mac: [u8; 6], seed: u8) -> Vec<u8> {
    let mut frame = testkit::frame::plain(200, seed);
    frame[..6].copy_from_slice(&mac);
    frame
}
