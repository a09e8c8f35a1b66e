//! Networks of many guests, and what happens to them: who reaches whom of 64, ports that come and go by the hundred,
//! processes that are killed, and a guest that moves to another host.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rstest::rstest;
use rustix::process::Signal;
use testkit::daemon::DIR;
use testkit::{
    Daemon, Driver, DriverConfig, Layout, PacketPort, Serve, VethPair, driver, holdings, require, soak, wait,
};

/// A station of the LAN, behind the uplink.
const STRANGER: [u8; 6] = [0x02, 0, 0, 0, 1, 0];
const BROADCAST: [u8; 6] = [0xff; 6];
/// An EtherType for local experiments, so that no stack looks inside.
const LOCAL: [u8; 2] = [0x88, 0xb5];

fn mac(guest: usize) -> [u8; 6] {
    [0x02, 0, 0, 0, 0, guest as u8]
}

/// A frame that says who sends it, in which VLAN, and a number.
fn frame(to: [u8; 6], from: [u8; 6], vlan: u16, number: u32) -> Vec<u8> {
    let said = [&vlan.to_be_bytes()[..], &number.to_be_bytes(), &to].concat();
    let mut frame = [&to[..], &from, &LOCAL, &said].concat();
    frame.resize(60, 0x5a);
    frame
}

fn tagged(frame: &[u8], vlan: u16) -> Vec<u8> {
    let tag = [0x8100u16.to_be_bytes(), vlan.to_be_bytes()].concat();
    [&frame[..12], &tag, &frame[12..]].concat()
}

fn is_ours(frame: &[u8]) -> bool {
    frame[12..].starts_with(&LOCAL) || frame[16..].starts_with(&LOCAL)
}

/// What a port takes part in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Untagged,
    Isolated,
    Access(u16),
    /// VLANs 100 and 101.
    Trunk,
}

impl Part {
    /// 64 ports have all kinds.
    fn of(guest: usize) -> Self {
        match guest {
            0..24 => Self::Untagged,
            24..32 => Self::Isolated,
            32..44 => Self::Access(100),
            44..56 => Self::Access(101),
            _ => Self::Trunk,
        }
    }

    fn keys(self) -> String {
        match self {
            Self::Untagged => String::new(),
            Self::Isolated => "isolated = true\n".into(),
            Self::Access(vlan) => format!("vlan = {vlan}\n"),
            Self::Trunk => "trunk = \"100-101\"\n".into(),
        }
    }

    fn vlans(self) -> &'static [u16] {
        match self {
            Self::Untagged | Self::Isolated => &[0],
            Self::Access(100) => &[100],
            Self::Access(_) => &[101],
            Self::Trunk => &[100, 101],
        }
    }

    /// A frame of a VLAN as the guest has it.
    fn seen(self, frame: &[u8], vlan: u16) -> Vec<u8> {
        match self {
            Self::Trunk => tagged(frame, vlan),
            _ => frame.to_vec(),
        }
    }
}

/// A frame of a VLAN as the wire has it.
fn on_wire(frame: &[u8], vlan: u16) -> Vec<u8> {
    match vlan {
        0 => frame.to_vec(),
        _ => tagged(frame, vlan),
    }
}

fn port(guest: usize, keys: &str) -> String {
    let [.., last] = mac(guest);
    format!(
        "[port.vm{guest}]\nnetwork = \"lan\"\nsocket-path = \"{DIR}/vm{guest}.sock\"\nmac = \
         \"02:00:00:00:00:{last:02x}\"\n{keys}"
    )
}

/// Ports of these numbers, with their parts if there are parts, on an uplink.
fn file(guests: impl IntoIterator<Item = usize>, keys: impl Fn(usize) -> String) -> String {
    let mut text = format!("[network.lan]\nuplink = \"{}\"\n", VethPair::NIC);
    for guest in guests {
        write!(text, "{}", port(guest, &keys(guest))).expect("room");
    }
    text
}

fn config() -> DriverConfig {
    DriverConfig {
        regions: vec![(virtqueue::GuestAddr(0), 4 << 20)],
        ..DriverConfig::default()
    }
}

fn connect(daemon: &Daemon, guest: usize) -> Driver {
    let mut driver = Driver::connect(&daemon.path(&format!("vm{guest}.sock")), &config()).expect("accepted");
    driver.pairs[0].post(200, &[2048]);
    driver
}

/// Frames, each with how often there was one.
type Frames = BTreeMap<Vec<u8>, usize>;

fn note(frames: &mut Frames, frame: Vec<u8>) {
    *frames.entry(frame).or_default() += 1;
}

/// A network whose ports are of all kinds.
struct Many {
    guests: Vec<Driver>,
    daemon: Daemon,
    wire: PacketPort,
    _veth: VethPair,
}

impl Many {
    fn new(count: usize) -> Self {
        let veth = VethPair::new();
        // So that XDP sees tags.
        veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
        let text = file(0..count, |guest| Part::of(guest).keys());
        let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VethPair::NIC], &text);
        let guests: Vec<_> = (0..count).map(|guest| connect(&daemon, guest)).collect();
        let all_run = || {
            let status = daemon.status();
            let ports = status["ports"].as_array().expect("ports");
            ports.iter().all(|port| port["lanes"][0]["running"] == true)
        };
        assert!(wait::until(wait::SOON, all_run), "{}", daemon.said());
        Self {
            guests,
            daemon,
            wire: PacketPort::open(&veth.far, VethPair::WIRE),
            _veth: veth,
        }
    }

    /// A guest sends these; when it has all of them back, other guests have theirs.
    fn send(&mut self, guest: usize, frames: &[Vec<u8>]) {
        let frames: Vec<_> = frames.iter().map(Vec::as_slice).collect();
        let pair = &mut self.guests[guest].pairs[0];
        pair.send_batch(&frames, Layout::Whole);
        pair.await_sent();
    }

    /// What guests have got, and no other, and what the wire gets.
    #[track_caller]
    fn assert_got(&mut self, what: &str, wanted: &mut [Frames], wire: &mut Frames) {
        for (number, (guest, wanted)) in self.guests.iter_mut().zip(wanted).enumerate() {
            // Frames of another worker's guests come when it has passed them on. One too many is seen now or next time.
            let (mut got, many) = (Frames::new(), wanted.values().sum());
            let due = std::iter::from_fn(|| guest.pairs[0].receive(wait::SOON)).take(many);
            due.for_each(|received| note(&mut got, received.frame));
            while let Some(received) = guest.pairs[0].poll() {
                note(&mut got, received.frame);
            }
            assert_eq!(got, std::mem::take(wanted), "{what}: guest {number}");
        }
        let (mut got, many) = (Frames::new(), wire.values().sum());
        let ours = std::iter::from_fn(|| self.wire.receive(wait::SOON)).filter(|frame| is_ours(frame));
        ours.take(many).for_each(|frame| note(&mut got, frame));
        assert_eq!(got, std::mem::take(wire), "{what}: the wire");
    }

    /// Nothing is under way to anybody: each gets one more frame of its own next, and so does the wire.
    #[track_caller]
    fn assert_quiet(&mut self) {
        for guest in 0..self.guests.len() {
            let vlan = Part::of(guest).vlans()[0];
            let last = frame(mac(guest), STRANGER, vlan, u32::MAX);
            self.wire.send(&on_wire(&last, vlan));
            let got = self.guests[guest].pairs[0].receive(wait::SOON).expect("it comes");
            assert_eq!(got.frame, Part::of(guest).seen(&last, vlan), "guest {guest}");
        }
        let last = frame(STRANGER, mac(0), 0, u32::MAX);
        self.send(0, std::slice::from_ref(&last));
        let mut ours = std::iter::from_fn(|| self.wire.receive(wait::SOON)).filter(|frame| is_ours(frame));
        assert_eq!(ours.next(), Some(last));
    }
}

/// By unicast and by groups, from each to each, in each of its VLANs, and from the wire.
#[rstest]
fn of_64_guests_each_reaches_whom_it_may_and_nobody_else() {
    const GUESTS: usize = 64;
    require!(Root);
    let mut many = Many::new(GUESTS);
    let may = |from: Part, to: Part, vlan: u16| {
        to.vlans().contains(&vlan) && !(from == Part::Isolated && to == Part::Isolated)
    };
    for from in 0..GUESTS {
        let part = Part::of(from);
        let mut wanted = vec![Frames::new(); GUESTS];
        let mut wire = Frames::new();
        let mut sent = Vec::new();
        for &vlan in part.vlans() {
            for to in (0..GUESTS).filter(|&to| to != from) {
                let frame = frame(mac(to), mac(from), vlan, 1);
                sent.push(part.seen(&frame, vlan));
                let other = Part::of(to);
                if may(part, other, vlan) {
                    note(&mut wanted[to], other.seen(&frame, vlan));
                } else if !other.vlans().contains(&vlan) {
                    // Nobody's address there.
                    note(&mut wire, on_wire(&frame, vlan));
                }
            }
            let group = frame(BROADCAST, mac(from), vlan, 2);
            sent.push(part.seen(&group, vlan));
            note(&mut wire, on_wire(&group, vlan));
            for to in (0..GUESTS).filter(|&to| to != from && may(part, Part::of(to), vlan)) {
                note(&mut wanted[to], Part::of(to).seen(&group, vlan));
            }
        }
        many.send(from, &sent);
        many.assert_got(&format!("of guest {from}"), &mut wanted, &mut wire);
    }
    many.assert_quiet();
    for vlan in [0, 100, 101, 102] {
        for to in 0..GUESTS {
            let sent = frame(mac(to), STRANGER, vlan, 3);
            many.wire.send(&on_wire(&sent, vlan));
            if Part::of(to).vlans().contains(&vlan) {
                let got = many.guests[to].pairs[0].receive(wait::SOON).expect("it comes");
                assert_eq!(got.frame, Part::of(to).seen(&sent, vlan), "guest {to}");
            }
        }
        let group = frame(BROADCAST, STRANGER, vlan, 4);
        many.wire.send(&on_wire(&group, vlan));
        for to in (0..GUESTS).filter(|&to| Part::of(to).vlans().contains(&vlan)) {
            let got = many.guests[to].pairs[0].receive(wait::SOON).expect("it comes");
            assert_eq!(got.frame, Part::of(to).seen(&group, vlan), "guest {to}");
        }
    }
    many.assert_quiet();
    let spoofed = many.daemon.counter("from_guest_source_address");
    assert_eq!(spoofed, 0);
}

/// Raises a flag when it goes.
struct Raised<'a>(&'a AtomicBool);

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Frames from one guest to the other, to the wire and back, each waited for, as long as something lasts; how many.
fn none_is_lost(guests: &mut [Driver; 2], wire: &PacketPort, during: impl FnOnce() + Send) -> u32 {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Also if it panics.
            let _over = Raised(&over);
            during();
        });
        for number in 0.. {
            let last = over.load(Ordering::Acquire);
            let sent = [mac(1), STRANGER].map(|to| frame(to, mac(0), 0, number));
            let [sender, receiver] = guests;
            sender.pairs[0].reap_sent();
            let both: Vec<_> = sent.iter().map(Vec::as_slice).collect();
            sender.pairs[0].send_batch(&both, Layout::Whole);
            let got = receiver.pairs[0].receive(wait::SOON);
            assert_eq!(
                got.map(|got| got.frame).as_ref(),
                Some(&sent[0]),
                "frame {number}"
            );
            let ours = |frame: &Vec<u8>| is_ours(frame) && frame[6..12] == mac(0);
            let ours = std::iter::from_fn(|| wire.receive(wait::SOON)).find(ours);
            assert_eq!(ours.as_ref(), Some(&sent[1]), "frame {number} on the wire");
            let back = frame(mac(0), STRANGER, 0, number);
            wire.send(&back);
            let got = sender.pairs[0].receive(wait::SOON);
            assert_eq!(
                got.map(|got| got.frame),
                Some(back),
                "frame {number} from the wire"
            );
            if last {
                return number;
            }
        }
        unreachable!("numbers do not end")
    })
}

/// A thousand of them.
#[rstest]
fn ports_come_and_go_by_the_hundred_and_the_others_lose_no_frame(#[values(false, true)] leased: bool) {
    const AT_ONCE: usize = 20;
    require!(Root);
    let veth = VethPair::new();
    let serve = match leased {
        true => Serve::file().leased(),
        false => Serve::file().by_root(),
    };
    let none = |_| String::new();
    let two = file(0..2, none);
    let all = file(0..2 + AT_ONCE, none);
    let mut daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &two);
    let mut guests = [0, 1].map(|guest| connect(&daemon, guest));
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let round = |daemon: &Daemon, with_guest: bool| {
        daemon.reload_with(&all);
        let guest = with_guest.then(|| {
            let mut guest = connect(daemon, 2);
            let sent = frame(mac(3), mac(2), 0, 0);
            guest.pairs[0].send(&sent, Layout::Whole);
            guest.pairs[0].await_sent();
            guest
        });
        daemon.reload_with(&two);
        drop(guest);
    };
    (0..3).for_each(|_| round(&daemon, true));
    let (pid, keeper) = (daemon.process().pid(), (!leased).then(|| daemon.keeper()));
    let of = |pid| holdings::steady(pid, wait::QUIET);
    let before = (of(pid), keeper.map(of));
    // With a steward of its own it is the same, and takes as long.
    let rounds = soak::count(if leased { 200 } else { 1000 }, 5000) / AT_ONCE;
    let frames = none_is_lost(&mut guests, &wire, || {
        for number in 0..rounds {
            round(&daemon, number % 5 == 0);
        }
    });
    println!("{frames} frames each way");
    let now = || (holdings::of(pid), keeper.map(holdings::of));
    let same = wait::until(wait::SOON, || now() == before);
    assert!(same, "{before:?} became {:?}: {}", now(), daemon.said());
    let fdb = veth
        .near
        .output_of("bridge", &["fdb", "show", "dev", VethPair::NIC]);
    let known = (2..2 + AT_ONCE).find(|guest| fdb.contains(&format!("02:00:00:00:00:{guest:02x}")));
    assert_eq!(known, None, "addresses stay with the interface: {fdb}");
}

/// Numbers as they come from a seed (xorshift64*, Vigna).
struct Random(u64);

impl Random {
    /// A seed of its own, or VHOST_AF_XDP_SEED, which is told.
    fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        let said = std::env::var("VHOST_AF_XDP_SEED").ok();
        let seed = said.map_or(u64::from(now.subsec_nanos()), |text| {
            text.parse().expect("a number")
        });
        println!("VHOST_AF_XDP_SEED={seed}");
        Self(seed.max(1))
    }

    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }
}

/// A network whose processes are killed.
struct Mortal {
    guests: Vec<Driver>,
    daemon: Daemon,
    wire: PacketPort,
    veth: VethPair,
    serve: Serve,
    number: u32,
}

impl Mortal {
    /// Frames from everybody to everybody, which nobody waits for.
    fn burst(&mut self) {
        let all = self.guests.len();
        for from in 0..all {
            let pair = &mut self.guests[from].pairs[0];
            pair.reap_sent();
            for to in [mac((from + 1) % all), STRANGER, BROADCAST] {
                if pair.has_room() {
                    pair.send(&frame(to, mac(from), 0, 0), Layout::Whole);
                }
            }
            let _ = self.wire.try_send(&frame(mac(from), STRANGER, 0, 0));
        }
    }

    /// Everybody reaches everybody, after what was under way before.
    #[track_caller]
    fn await_all(&mut self, what: &str) {
        let all = self.guests.len();
        for from in 0..all {
            let to = (from + 1) % all;
            self.await_frame(
                what,
                from,
                |world, sent| {
                    world.guests[from].pairs[0].reap_sent();
                    if world.guests[from].pairs[0].has_room() {
                        world.guests[from].pairs[0].send(sent, Layout::Whole);
                    }
                },
                (mac(to), mac(from)),
                Some(to),
            );
            self.await_frame(
                what,
                from,
                |world, sent| {
                    world.guests[from].pairs[0].reap_sent();
                    if world.guests[from].pairs[0].has_room() {
                        world.guests[from].pairs[0].send(sent, Layout::Whole);
                    }
                },
                (STRANGER, mac(from)),
                None,
            );
            self.await_frame(
                what,
                from,
                |world, sent| {
                    let _ = world.wire.try_send(sent);
                },
                (mac(from), STRANGER),
                Some(from),
            );
        }
    }

    /// Sends a frame again and again until it arrives at a guest, or at the wire.
    #[track_caller]
    fn await_frame(
        &mut self,
        what: &str,
        guest: usize,
        send: impl Fn(&mut Self, &[u8]),
        (to, from): ([u8; 6], [u8; 6]),
        at: Option<usize>,
    ) {
        self.number += 1;
        let sent = frame(to, from, 0, self.number);
        let arrives = wait::until(wait::SOON, || {
            send(self, &sent);
            let deadline = std::time::Instant::now() + Duration::from_millis(20);
            let mut next = || match at {
                Some(at) => self.guests[at].pairs[0].poll().map(|got| got.frame),
                None => self.wire.receive(Duration::ZERO),
            };
            while std::time::Instant::now() < deadline {
                match next() {
                    Some(got) if got == sent => return true,
                    Some(_) => {}
                    None => std::thread::yield_now(),
                }
            }
            false
        });
        assert!(
            arrives,
            "{what}: guest {guest}, {to:x?} from {from:x?}: {}",
            self.daemon.said()
        );
    }

    /// Guests connect again, with their memory and rings as they are.
    fn reconnect(&mut self) {
        let guests = std::mem::take(&mut self.guests);
        let again = |(number, guest): (usize, Driver)| {
            let path = self.daemon.path(&format!("vm{number}.sock"));
            guest.resume(driver::connect(&path)).expect("accepted")
        };
        self.guests = guests.into_iter().enumerate().map(again).collect();
    }
}

/// All of it works again each time, and at the end nothing is left behind.
#[rstest]
fn whoever_is_killed_under_traffic_comes_back_and_leaves_nothing_behind() {
    const GUESTS: usize = 6;
    require!(Root);
    let mut random = Random::new();
    let veth = VethPair::new();
    let serve = Serve::file().leased();
    let text = file(0..GUESTS, |_| String::new());
    let daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &text);
    let guests = (0..GUESTS).map(|guest| connect(&daemon, guest)).collect();
    let mut world = Mortal {
        guests,
        daemon,
        wire: PacketPort::open(&veth.far, VethPair::WIRE),
        veth,
        serve,
        number: 0,
    };
    world.await_all("at first");
    for round in 0..soak::count(10, 100) {
        world.burst();
        std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
        let what = match random.below(4) {
            0 => {
                world.daemon.kill();
                world.burst();
                world.daemon.restart_file(&world.veth.near, &world.serve);
                world.reconnect();
                "daemon".to_owned()
            }
            1 => {
                let lessor = world.daemon.lessor.as_mut().expect("queues are leased");
                lessor.steward.signal(Signal::KILL);
                lessor.steward.wait(wait::SOON);
                world.burst();
                world.daemon.restart_lessor(&world.veth.near);
                "steward".to_owned()
            }
            _ => {
                let guest = random.below(GUESTS);
                drop(world.guests.remove(guest));
                world.guests.insert(guest, connect(&world.daemon, guest));
                format!("guest {guest}")
            }
        };
        world.await_all(&format!("round {round}, {what} was killed"));
    }
    let Mortal { mut daemon, veth, .. } = world;
    daemon.kill();
    let nic = || veth.near.output_of("ip", &["-d", "link", "show", VethPair::NIC]);
    let lessor = daemon.lessor.as_ref().expect("queues are leased");
    let links = || veth.near.output_of("ip", &["-o", "link", "show"]);
    // The loopback and the NIC.
    let nothing =
        || !nic().contains("xdp") && lessor.bpffs.pinned().is_empty() && links().lines().count() == 2;
    assert!(
        wait::until(wait::SOON, nothing),
        "{} {}: {:?}: {}",
        nic(),
        links(),
        lessor.bpffs.pinned(),
        lessor.steward
    );
}
