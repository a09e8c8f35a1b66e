//! Who reaches whom on a network with ports of all kinds, its host and a LAN: everybody whom he may, and nobody else;
//! also while other ports are added, changed and removed.

use std::collections::BTreeMap;

use rstest::rstest;
use serde_json::{Value, json};
use testkit::api::{Api, open_dir, with_api};
use testkit::daemon::DIR;
use testkit::lan::{self, BROADCAST, STRANGER, is_ours, mac, port, tagged, telling};
use testkit::{Daemon, Driver, DriverConfig, Layout, PacketPort, Serve, VethPair, require, soak, wait};
use virtqueue::GuestAddr;

/// Of the uplink, hence the host's.
const HOST: [u8; 6] = [0x02, 0, 0, 0, 2, 0];
const HOST_TEXT: &str = "02:00:00:00:02:00";
/// VLANs of frames of the host and the LAN; in the last one is no port.
const VLANS: [u16; 4] = [0, 100, 101, 102];

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
    fn of_64(guest: usize) -> Self {
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

    fn is_in(self, vlan: u16) -> bool {
        self.vlans().contains(&vlan)
    }

    /// Whether frames of this one get to the other in a VLAN of its own.
    fn may_reach(self, to: Self, vlan: u16) -> bool {
        to.is_in(vlan) && !(self == Self::Isolated && to == Self::Isolated)
    }

    /// A frame of a VLAN as the guest has it.
    fn seen(self, frame: &[u8], vlan: u16) -> Vec<u8> {
        match self {
            Self::Trunk => tagged(frame, vlan),
            _ => frame.to_vec(),
        }
    }
}

/// A frame of a VLAN as the wire has it, and the host.
fn on_wire(frame: &[u8], vlan: u16) -> Vec<u8> {
    match vlan {
        0 => frame.to_vec(),
        _ => tagged(frame, vlan),
    }
}

/// Frames, each with how often there was one.
type Frames = BTreeMap<Vec<u8>, usize>;

fn note(frames: &mut Frames, frame: Vec<u8>) {
    *frames.entry(frame).or_default() += 1;
}

/// What everybody has to get of what somebody sends.
struct Wanted {
    guests: Vec<Frames>,
    wire: Frames,
    host: Frames,
}

/// Who sends beside guests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outside {
    Lan,
    Host,
}

impl Wanted {
    fn nothing(parts: &[Part]) -> Self {
        Self {
            guests: vec![Frames::new(); parts.len()],
            wire: Frames::new(),
            host: Frames::new(),
        }
    }

    /// What a guest sends to everybody by his address and by a group, in each of its VLANs, and what comes of it.
    fn of_guest(parts: &[Part], from: usize, number: u32) -> (Vec<Vec<u8>>, Self) {
        let (part, mut sent, mut wanted) = (parts[from], Vec::new(), Self::nothing(parts));
        for &vlan in part.vlans() {
            let mut telling = |to| {
                let frame = telling(to, mac(from), vlan, number);
                sent.push(part.seen(&frame, vlan));
                frame
            };
            let others = || parts.iter().enumerate().filter(|&(to, _)| to != from);
            for (to, other) in others() {
                let frame = telling(mac(to));
                if part.may_reach(*other, vlan) {
                    note(&mut wanted.guests[to], other.seen(&frame, vlan));
                } else if !other.is_in(vlan) {
                    // Nobody's address there.
                    note(&mut wanted.wire, on_wire(&frame, vlan));
                }
            }
            note(&mut wanted.host, on_wire(&telling(HOST), vlan));
            note(&mut wanted.wire, on_wire(&telling(STRANGER), vlan));
            let group = telling(BROADCAST);
            note(&mut wanted.host, on_wire(&group, vlan));
            note(&mut wanted.wire, on_wire(&group, vlan));
            for (to, other) in others().filter(|(_, other)| part.may_reach(**other, vlan)) {
                note(&mut wanted.guests[to], other.seen(&group, vlan));
            }
        }
        (sent, wanted)
    }

    /// The same of the host, or of the LAN, in a VLAN.
    fn of_outside(parts: &[Part], from: Outside, vlan: u16, number: u32) -> (Vec<Vec<u8>>, Self) {
        let (mut sent, mut wanted) = (Vec::new(), Self::nothing(parts));
        let (source, other) = match from {
            Outside::Lan => (STRANGER, HOST),
            Outside::Host => (HOST, STRANGER),
        };
        let mut telling = |to| {
            let frame = telling(to, source, vlan, number);
            sent.push(on_wire(&frame, vlan));
            frame
        };
        let beyond = match from {
            Outside::Lan => &mut wanted.host,
            Outside::Host => &mut wanted.wire,
        };
        for (to, part) in parts.iter().enumerate() {
            let frame = telling(mac(to));
            match part.is_in(vlan) {
                true => note(&mut wanted.guests[to], part.seen(&frame, vlan)),
                // The LAN's are the host's to look at, and the host's nobody's.
                false => note(beyond, on_wire(&frame, vlan)),
            }
        }
        note(beyond, on_wire(&telling(other), vlan));
        let group = telling(BROADCAST);
        note(beyond, on_wire(&group, vlan));
        for (to, part) in parts.iter().enumerate().filter(|(_, part)| part.is_in(vlan)) {
            note(&mut wanted.guests[to], part.seen(&group, vlan));
        }
        (sent, wanted)
    }
}

/// A network whose ports are of all kinds.
struct Many {
    parts: Vec<Part>,
    guests: Vec<Driver>,
    wire: PacketPort,
    host: PacketPort,
}

impl Many {
    fn new(parts: Vec<Part>, workers: usize, serve: &Serve) -> (Self, Daemon, VethPair) {
        let veth = VethPair::new();
        let near = &veth.near;
        // So that XDP sees tags.
        near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
        near.ip(&["link", "set", VethPair::NIC, "address", HOST_TEXT]);
        veth.await_near();
        let ports = parts.iter().enumerate();
        let ports: String = ports.map(|(guest, part)| port(guest, &part.keys())).collect();
        let network = lan::file(Some(VethPair::NIC), &[]);
        let keys = format!("[daemon]\nworkers = {workers}\nsocket-directories = [\"{DIR}\"]\n");
        let daemon = Daemon::start_file(near, serve, &[VethPair::NIC], &[keys, network, ports].concat());
        let guests = (0..parts.len()).map(|guest| connect(&daemon, &format!("vm{guest}.sock")));
        let guests = guests.collect();
        let all_run = || {
            let status = daemon.status();
            let ports = status["ports"].as_array().expect("ports");
            ports.iter().all(|port| port["lanes"][0]["running"] == true)
                && status["networks"][0]["host"]["macs"] == json!([HOST_TEXT])
        };
        assert!(wait::until(wait::SOON, all_run), "{}", daemon.said());
        let many = Self {
            parts,
            guests,
            wire: PacketPort::open(&veth.far, VethPair::WIRE),
            host: PacketPort::open(near, VethPair::NIC),
        };
        (many, daemon, veth)
    }

    /// Everybody sends to everybody.
    #[track_caller]
    fn assert_all_reach_whom_they_may(&mut self, number: u32) {
        for from in 0..self.parts.len() {
            let (sent, wanted) = Wanted::of_guest(&self.parts, from, number);
            let sent: Vec<_> = sent.iter().map(Vec::as_slice).collect();
            let pair = &mut self.guests[from].pairs[0];
            pair.send_batch(&sent, Layout::Whole);
            // When it has all of them back, other guests of its worker have theirs.
            pair.await_sent();
            self.assert_got(&format!("of guest {from}, {number}"), wanted);
        }
        for (from, vlan) in [Outside::Lan, Outside::Host]
            .into_iter()
            .flat_map(|from| VLANS.map(|vlan| (from, vlan)))
        {
            let (sent, wanted) = Wanted::of_outside(&self.parts, from, vlan, number);
            let port = match from {
                Outside::Lan => &self.wire,
                Outside::Host => &self.host,
            };
            sent.iter().for_each(|frame| port.send(frame));
            self.assert_got(&format!("of {from:?} in VLAN {vlan}, {number}"), wanted);
        }
    }

    /// All have got what they have to get, and nobody anything else.
    #[track_caller]
    fn assert_got(&mut self, what: &str, wanted: Wanted) {
        for (number, (guest, wanted)) in self.guests.iter_mut().zip(wanted.guests).enumerate() {
            // Frames of another worker's guests come when it has passed them on. One too many is seen now or next time.
            let (mut got, many) = (Frames::new(), wanted.values().sum());
            let due = std::iter::from_fn(|| guest.pairs[0].receive(wait::SOON)).take(many);
            due.for_each(|received| note(&mut got, received.frame));
            while let Some(received) = guest.pairs[0].poll() {
                note(&mut got, received.frame);
            }
            assert_eq!(got, wanted, "{what}: guest {number}");
        }
        for (end, port, wanted) in [
            ("the wire", &self.wire, wanted.wire),
            ("the host", &self.host, wanted.host),
        ] {
            let (mut got, many) = (Frames::new(), wanted.values().sum());
            let ours = std::iter::from_fn(|| port.receive(wait::SOON)).filter(|frame| is_ours(frame));
            ours.take(many).for_each(|frame| note(&mut got, frame));
            assert_eq!(got, wanted, "{what}: {end}");
        }
    }
}

fn connect(daemon: &Daemon, socket: &str) -> Driver {
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 4 << 20)],
        ..DriverConfig::default()
    };
    let mut driver = Driver::connect(&daemon.path(socket), &config).expect("accepted");
    driver.pairs[0].post(200, &[2048]);
    driver
}

/// By their addresses and by groups, in all VLANs: guests, the host, the LAN.
#[rstest]
fn of_64_guests_the_host_and_the_lan_each_reaches_whom_it_may_and_nobody_else(
    #[values(1, 3)] workers: usize,
) {
    require!(Root);
    let parts = (0..64).map(Part::of_64).collect();
    let (mut many, daemon, _veth) = Many::new(parts, workers, &Serve::file());
    // What came too many in the first round is seen in the second one.
    (0..2).for_each(|number| many.assert_all_reach_whom_they_may(number));
    let spoofed = daemon.counter("from_guest_source_address");
    assert_eq!(spoofed, 0);
}

/// One that is there for a while, with a guest now and then.
fn come_change_and_go(daemon: &Daemon, api: &Api, with_guest: bool) {
    let path = "/v1/ports/visitor";
    let ask = |method, body, status| {
        let answer = api.change(method, path, &body);
        assert_eq!(answer.status, status, "{method}: {answer:?}\n{}", daemon.said());
    };
    let socket = daemon.path("visitor.sock");
    let keys = json!({"network": "lan", "socket-path": socket, "mac": "02:00:00:00:03:00"});
    ask("PUT", keys, 201);
    let guest = with_guest.then(|| connect(daemon, "visitor.sock"));
    ask("PATCH", json!({"vlan": 100}), 200);
    ask(
        "PATCH",
        json!({"vlan": null, "isolated": true, "to-guest-bits": "1G"}),
        200,
    );
    ask("DELETE", Value::Null, 200);
    drop(guest);
}

#[rstest]
fn each_reaches_whom_it_may_while_ports_come_change_and_go(#[values(1, 2)] workers: usize) {
    require!(Root);
    let dir = open_dir();
    let (serve, api) = with_api(Serve::file(), &dir);
    // Of each kind two or three.
    let parts = [0, 1, 2, 24, 25, 32, 33, 44, 45, 56, 57].map(Part::of_64);
    let (mut many, daemon, _veth) = Many::new(parts.to_vec(), workers, &serve);
    let rounds = wait::rounds_during(
        || {
            let visits = 0..soak::count(10, 1000);
            visits.for_each(|visit| come_change_and_go(&daemon, &api, visit % 5 == 0));
        },
        |number| many.assert_all_reach_whom_they_may(number),
    );
    println!("{rounds} times all to all");
    assert_eq!(daemon.counter("from_guest_source_address"), 0);
}
