//! What may happen to the daemon, to its NIC and to its guest while buffers are with the NIC: frames are under way both
//! ways meanwhile, a numbered one each millisecond.
//!
//! After each of them frames pass again, in the mode that was in use before. At the end no number has come twice, none
//! before a lower one (the first ones of a session are among them), every receive buffer of the guest is still used,
//! and the queue is free when the daemon has ended. The testkit's driver itself sees that a buffer is used twice.
//!
//! QEMU itself lets one frame overtake others in front of virtio-net: those that came while the NIC had no buffers
//! wait, and the next one that comes when it has some again is delivered before they are (`qemu_net_queue_send`,
//! net/queue.c in QEMU). So each time that the NIC is without buffers, which is when a program is attached or a
//! socket bound, one number may come too early there.

use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::kit::{self, BUFFERS, Seen};
use crate::setting::Setting;
use testkit::traffic::Flow;
use testkit::{Daemon, Driver, DriverConfig, NetNs, Rig, Serve, Traffic, VethPair, Wire, driver, wait};
use vhost::vhost_user::message::VhostUserProtocolFeatures;

const PACE: Duration = Duration::from_millis(1);
/// Frames that the guest sends just before it happens.
const BURST: usize = 48;
/// Frames that arrive each way before the next thing happens.
const STEADY: usize = 20;

/// Times that a NIC may be without buffers by one of the things: three guests come, each with a bind of its own in
/// placements that register its memory, and one while a queue copies.
const EARLY_IN_QEMU: usize = 6;

/// One of the things that may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Upset {
    /// SIGKILL, and another daemon in its place, to which the guest comes back.
    Kill,
    /// SIGTERM, and another daemon in its place.
    End,
    /// The guest goes without a word, and another one comes.
    Guest,
    /// The interface goes down and comes up.
    Down,
    /// The interface goes to another network namespace and comes back.
    Away,
    /// `ethtool -L`: one queue more, and one less again.
    Channels,
    /// Another MTU, and the first one again.
    Mtu,
}

impl Upset {
    pub(crate) const FEW: [Self; 2] = [Self::Kill, Self::Guest];
    pub(crate) const MOST: [Self; 6] = [
        Self::Kill,
        Self::End,
        Self::Guest,
        Self::Down,
        Self::Channels,
        Self::Mtu,
    ];
    pub(crate) const ALL: [Self; 7] = [
        Self::Kill,
        Self::End,
        Self::Guest,
        Self::Down,
        Self::Away,
        Self::Channels,
        Self::Mtu,
    ];

    /// In words.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::End => "end",
            Self::Guest => "guest",
            Self::Down => "down",
            Self::Away => "away",
            Self::Channels => "channels",
            Self::Mtu => "mtu",
        }
    }
}

/// All of it, with traffic on it.
struct Scene<'a> {
    traffic: Traffic,
    daemon: Daemon,
    veth: VethPair,
    serve: Serve,
    /// Length of the guest's receive buffers, bytes.
    buffer: u32,
    expected: &'a str,
    /// How many numbers may come too early to the guest.
    early: usize,
    /// What that grows by with each thing that happens.
    early_each: usize,
}

/// Goes through them; panics if it does not go well.
pub(crate) fn run(wire: &Wire, setting: Setting, upsets: &[Upset]) -> Seen {
    let mut scene = Scene::new(wire, setting);
    let seen = scene.await_mode();
    for &upset in upsets {
        scene.suffer(upset);
    }
    scene.end();
    seen
}

impl<'a> Scene<'a> {
    fn new(wire: &Wire, setting: Setting) -> Self {
        let veth = wire.lay();
        let serve = setting.serve();
        let daemon = Daemon::start(&veth.near, &serve);
        let buffer = setting.buffer(wire.driver());
        let guest = guest(driver::connect(&daemon.socket()), buffer);
        let mut rig = Rig::of(veth, daemon, guest);
        rig.await_to_guest();
        let (driver, daemon, port, veth) = rig.into_parts();
        Self {
            traffic: Traffic::start(driver, port, PACE),
            daemon,
            veth,
            serve,
            buffer,
            expected: setting.expected(wire.driver()),
            early: 0,
            early_each: match wire.driver() {
                "virtio_net" => EARLY_IN_QEMU,
                _ => 0,
            },
        }
    }

    /// Waits until frames pass in the mode that is to be in use.
    fn await_mode(&mut self) -> Seen {
        let expected = self.expected;
        self.daemon
            .await_port(0, expected, |port| port["lanes"][0]["mode"] == expected);
        self.await_frames(Instant::now(), "at the start");
        Seen::of(&self.daemon)
    }

    fn suffer(&mut self, upset: Upset) {
        self.traffic.burst(BURST);
        match upset {
            Upset::Kill => self.kill(),
            Upset::End => self.end_daemon(),
            Upset::Guest => self.next_guest(),
            Upset::Down => self.down_and_up(),
            Upset::Away => self.away_and_back(),
            Upset::Channels => self.channels(),
            Upset::Mtu => self.mtu(),
        }
        self.early += self.early_each;
        self.await_frames(Instant::now(), upset.name());
        let seen = Seen::of(&self.daemon);
        assert_eq!(seen.mode, self.expected, "after {}: {}", upset.name(), seen.note);
        let [to_guest, from_guest] = self.traffic.flows();
        assert_ascends(&to_guest, self.early, &format!("{}, to the guest", upset.name()));
        assert_ascends(&from_guest, 0, &format!("{}, from the guest", upset.name()));
    }

    fn kill(&mut self) {
        self.daemon.kill();
        self.begin_again();
    }

    /// It waits until drivers have let go, which it says where it does not know.
    fn end_daemon(&mut self) {
        assert!(self.daemon.terminate().success(), "{}", self.daemon.said());
        self.assert_let_go();
        self.begin_again();
    }

    fn assert_let_go(&self) {
        let said = self.daemon.said();
        assert!(!said.contains("nobody knows"), "{said}");
    }

    fn begin_again(&mut self) {
        self.daemon.restart(&self.veth.near, &self.serve);
        self.daemon.await_ready();
        let socket = driver::connect(&self.daemon.socket());
        let again = |guest: Driver| guest.resume(socket).expect("accepted again");
        self.traffic.replace_guest(again);
    }

    fn next_guest(&mut self) {
        let path = self.daemon.socket();
        for _ in 0..3 {
            self.traffic.replace_guest(|goes| {
                drop(goes);
                guest(driver::connect(&path), self.buffer)
            });
            self.await_frames(Instant::now(), "a guest that came");
        }
    }

    fn down_and_up(&mut self) {
        self.set(&["down"]);
        self.daemon
            .await_port(0, "that it is down", |port| !port["impaired"].is_null());
        self.traffic.burst(BURST);
        self.set(&["up"]);
        self.daemon
            .await_port(0, "that it is up", |port| port["impaired"].is_null());
    }

    fn away_and_back(&mut self) {
        let to = |ns: &NetNs| ["link", "set", VethPair::NIC, "netns", ns.name()].map(str::to_owned);
        let (away, back) = (to(&self.veth.far), to(&self.veth.near));
        self.veth.near.ip(&away.each_ref().map(String::as_str));
        self.daemon
            .await_port(0, "that it is gone", |port| !port["impaired"].is_null());
        self.traffic.burst(BURST);
        self.veth.far.ip(&back.each_ref().map(String::as_str));
        self.set(&["up"]);
        self.daemon
            .await_port(0, "that it is back", |port| port["impaired"].is_null());
        self.assert_let_go();
    }

    /// A driver with one queue refuses it, and one may refuse it while an XDP program is there.
    fn channels(&mut self) {
        for count in ["2", "1"] {
            let mut command = self.veth.near.command("ethtool");
            command.args(["-L", VethPair::NIC, "combined", count]);
            let taken = succeeds(&mut command);
            println!(
                "ethtool -L combined {count}: {}",
                if taken { "taken" } else { "refused" }
            );
            self.await_frames(Instant::now(), "after ethtool -L");
        }
    }

    fn mtu(&mut self) {
        for mtu in [1400, 1500] {
            self.set(&["mtu", &mtu.to_string()]);
            self.daemon
                .await_port(0, "the MTU", |port| port["mtu"].as_u64() == Some(mtu));
            self.await_frames(Instant::now(), "with another MTU");
        }
    }

    fn set(&self, what: &[&str]) {
        self.veth
            .near
            .ip(&[&["link", "set", VethPair::NIC], what].concat());
    }

    /// Waits until some have arrived each way that were sent since.
    fn await_frames(&self, since: Instant, what: &str) {
        let steady = wait::until(wait::SOON, || {
            let counts = self.traffic.flows().map(|flow| flow.arrived_since(since));
            counts.into_iter().all(|count| count >= STEADY)
        });
        assert!(
            steady,
            "frames pass no more: {what}: {:?} have arrived; {:#}\n{}",
            self.traffic.flows().map(|flow| flow.arrived_since(since)),
            self.daemon.port(0),
            self.daemon.said()
        );
    }

    /// No buffer is lost, and no queue stays busy.
    fn end(self) {
        let Self {
            traffic,
            daemon,
            veth,
            serve,
            ..
        } = self;
        let mut rig = Rig::after(traffic, daemon, veth);
        let _ = rig.flush_to_guest();
        // More than there are buffers.
        kit::frames_keep_coming_in_order(&mut rig);
        rig.pair().await_sent();
        kit::assert_no_strays(&rig.daemon);
        assert!(rig.daemon.terminate().success(), "{}", rig.daemon.said());
        rig.daemon.restart(&rig.veth.near, &serve);
        rig.daemon.await_ready();
        rig.daemon.await_recovered(0);
    }
}

/// A guest with inflight tracking, all its receive buffers posted.
fn guest(socket: UnixStream, buffer: u32) -> Driver {
    let mut config = DriverConfig::default();
    config.protocol |= VhostUserProtocolFeatures::INFLIGHT_SHMFD;
    let mut driver = Driver::start_with(socket, &config, kit::memory()).expect("accepted");
    driver.pairs[0].post(BUFFERS, &[buffer]);
    driver
}

fn succeeds(command: &mut Command) -> bool {
    command.output().expect("it is there").status.success()
}

/// Numbers come in the order in which they were sent, each once; `early` of them may be before lower ones.
fn assert_ascends(flow: &Flow, early: usize, what: &str) {
    assert_eq!(flow.repeated(), [0; 0], "{what}: came twice");
    let pairs = flow.arrived.windows(2);
    let too_early: Vec<_> = pairs
        .filter(|pair| pair[0].0 > pair[1].0)
        .map(|pair| (pair[0].0, pair[1].0))
        .collect();
    if !too_early.is_empty() {
        println!("{what}: came before a lower number: {too_early:?}");
    }
    assert!(
        too_early.len() <= early,
        "{what}: came before a lower number: {too_early:?}"
    );
}
