//! An interface that is no NIC, above a veth most of them, as the uplink of a guest, of each kind that the kernel has: the log, `status` and `check`
//! report which frames the guest loses and the remedy, whole packets are counted, and with the remedy they arrive. In tap
//! mode no frame is lost: they pass both ways, whole packets among them.

use std::time::Duration;

use testkit::daemon::{DIR, binary};
use testkit::driver::{F_GUEST_ALL, F_HOST_ALL, HEADER};
use testkit::gso_packet::{GsoPacket, Ip};
use testkit::lan::{BROADCAST, STRANGER, file, frame, guests, mac, tagged};
use testkit::{Daemon, Driver, DriverConfig, Layout, PacketPort, Serve, VethPair, kernel, wait};

use crate::kit::Seen;
use crate::made;

/// Its name, whatever it is.
const UPPER: &str = "upper0";
/// Payload of a whole packet, and of its segments.
const PACKET: usize = 8000;
const SEGMENT: u16 = 1448;
/// Payload of one in tap mode.
const WHOLE: usize = 60_000;
/// The VLAN of its frames, where it has one.
const VLAN: u16 = 5;

/// A kind of interface above others.
pub(crate) struct Kind {
    /// What it is called.
    pub(crate) name: &'static str,
    /// `ip link add` after its name and address.
    make: &'static [&'static str],
    below: Below,
    /// Tags of the frames below.
    tags: usize,
    /// Whether frames for guests come to it.
    has_frames: bool,
    /// Whether it accepts further addresses, so that frames to these come to it, too.
    accepts: bool,
}

/// The veth below an interface.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Below {
    Linked,
    Port,
    /// There is none: the interface has a peer of its own.
    None,
}

/// All of them.
const KINDS: [Kind; 7] = [
    Kind {
        name: "macvlan",
        make: &["type", "macvlan", "mode", "bridge"],
        below: Below::Linked,
        tags: 0,
        has_frames: true,
        accepts: false,
    },
    Kind {
        name: "macvlan that has all frames",
        make: &["type", "macvlan", "mode", "passthru"],
        below: Below::Linked,
        tags: 0,
        has_frames: true,
        accepts: true,
    },
    Kind {
        name: "VLAN",
        make: &["type", "vlan", "id", "5"],
        below: Below::Linked,
        tags: 1,
        has_frames: true,
        accepts: true,
    },
    Kind {
        name: "bond",
        make: &["type", "bond", "mode", "active-backup", "miimon", "10"],
        below: Below::Port,
        tags: 0,
        has_frames: true,
        accepts: true,
    },
    Kind {
        name: "team",
        make: &["type", "team"],
        below: Below::Port,
        tags: 0,
        has_frames: true,
        accepts: true,
    },
    Kind {
        name: "bridge",
        make: &["type", "bridge"],
        below: Below::Port,
        tags: 0,
        has_frames: false,
        accepts: true,
    },
    Kind {
        name: "netkit",
        make: &[],
        below: Below::None,
        tags: 0,
        has_frames: true,
        accepts: true,
    },
];

/// Those that this kernel has.
pub(crate) fn kinds() -> impl Iterator<Item = &'static Kind> {
    KINDS
        .iter()
        .filter(|kind| kind.name != "netkit" || kernel::version() >= (6, 7))
}

/// A guest that has the interface alone, with these keys.
fn lone(keys: &str) -> String {
    format!("[port.vm0]\nifname = \"{UPPER}\"\nsocket-path = \"{DIR}/vm0.sock\"\n{keys}")
}

impl Kind {
    /// Whether it is above others.
    pub(crate) fn is_above(&self) -> bool {
        self.below != Below::None
    }

    /// How it is tried in tap mode: with a network, and with a guest that has none.
    pub(crate) fn in_tap_mode(&self) -> impl Iterator<Item = (bool, String)> {
        let ways = [(true, "a network"), (false, "a guest alone")];
        let tried = ways
            .into_iter()
            .filter(|(with_network, _)| self.accepts || !with_network);
        tried.map(|(with_network, what)| (with_network, format!("{}, {what} in tap mode", self.name)))
    }

    /// Goes through it; panics if it does not go well.
    pub(crate) fn run(&self) -> Seen {
        let packet = GsoPacket {
            tags: self.tags,
            ..GsoPacket::tcp(Ip::V4(0), PACKET)
        };
        let whole = [&packet.request(SEGMENT)[..], &packet.bytes()].concat();
        let veth = self.lay(&whole[10..16]);
        let remedy = match self.name {
            "bridge" => format!("use a port of it ({})", VethPair::NIC),
            _ => format!("`ethtool -K {} gro off`", VethPair::NIC),
        };
        let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[UPPER], &lone(""));
        let mut guest = guests(&daemon, 1, &DriverConfig::default()).remove(0);
        let note = daemon.port(0)["steering_note"].to_string();
        assert!(note.contains(&remedy), "status: {note}");
        assert!(daemon.said().contains(&remedy), "log: {}", daemon.said());
        let checked = veth.near.command(binary()).args(["check", UPPER]).output();
        let checked = String::from_utf8(checked.expect("it runs").stdout).expect("text");
        assert!(checked.contains(&remedy), "check: {checked}");
        let seen = Seen {
            note,
            ..Seen::of(&daemon)
        };
        assert_eq!(seen.mode, "copy (skb)", "{}", seen.note);
        assert!(!seen.note.contains("further queues"), "{}", seen.note);
        if self.has_frames {
            veth.far.run(
                "ethtool",
                &["-K", VethPair::WIRE, "tx", "on", "tso", "on", "sg", "on"],
            );
            let wire = PacketPort::open_with_header(&veth.far, VethPair::WIRE);
            let counted = || daemon.counter("too_long") > 0;
            // A bond passes frames once it has seen its link.
            let comes = wait::until(wait::SOON, || {
                wire.send(&whole);
                counted()
            });
            assert!(comes, "no whole packet comes: {:#}", daemon.status());
            veth.far.run("ethtool", &["-K", VethPair::WIRE, "tx", "off"]);
            wire.send(&whole);
            let first = guest.pairs[0].receive(wait::SOON).expect("a segment");
            assert!(first.frame.len() <= 1514, "{} bytes", first.frame.len());
        }
        seen
    }

    /// Goes through it in tap mode, with a network or with a guest that has none; panics if it does not go well.
    pub(crate) fn run_tap(&self, with_network: bool) -> Seen {
        // The guest's address is one of its own, or that of the interface.
        let (own, keys) = match self.accepts {
            true => ([0x02, 0, 0, 0, 2, 0], "mac = \"02:00:00:00:00:00\"\n"),
            false => (mac(0), ""),
        };
        let veth = self.lay(&own);
        let text = match with_network {
            true => file(Some(UPPER), &[""]).replacen("[port.vm0]", "mode = \"tap\"\n[port.vm0]", 1),
            false => lone(&format!("mode = \"tap\"\n{keys}")),
        };
        let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[UPPER], &text);
        let guest = guests(&daemon, 1, &DriverConfig::with(F_HOST_ALL | F_GUEST_ALL)).remove(0);
        let wire = PacketPort::open(&veth.far, VethPair::WIRE);
        let mut tried = Tapped {
            guest,
            daemon,
            wire,
            tags: self.tags,
        };
        tried.frames_pass();
        tried.whole_packets_pass(&veth);
        Seen::of(&tried.daemon)
    }

    /// A veth pair with the interface above its near end, or in its place.
    fn lay(&self, address: &[u8]) -> VethPair {
        let veth = VethPair::new();
        let (near, far) = (&veth.near, &veth.far);
        let address: Vec<_> = address.iter().map(|byte| format!("{byte:02x}")).collect();
        let address = address.join(":");
        let add = |below: &[&str]| {
            let name = ["name", UPPER, "address", &address];
            near.ip(&[&["link", "add"], below, &name, self.make].concat());
        };
        match self.below {
            Below::Linked => add(&["link", VethPair::NIC]),
            Below::Port => {
                add(&[]);
                if self.name == "team" {
                    made::set_team_mode(near, UPPER, "roundrobin");
                }
                // A bond takes ports that are down.
                near.ip(&["link", "set", VethPair::NIC, "down"]);
                near.ip(&["link", "set", VethPair::NIC, "master", UPPER]);
                near.ip(&["link", "set", VethPair::NIC, "up"]);
            }
            Below::None => {
                near.ip(&["link", "delete", VethPair::NIC]);
                made::make_netkit(near, UPPER);
                let peer = ["link", "set", "nk0", "netns", far.name(), "name", VethPair::WIRE];
                near.ip(&peer);
                near.ip(&["link", "set", UPPER, "address", &address]);
                far.ip(&["link", "set", VethPair::WIRE, "arp", "off", "up"]);
            }
        }
        near.ip(&["link", "set", UPPER, "arp", "off", "up"]);
        veth
    }
}

/// A guest in tap mode on an interface above another one.
struct Tapped {
    guest: Driver,
    daemon: Daemon,
    wire: PacketPort,
    /// Of frames on the wire.
    tags: usize,
}

impl Tapped {
    /// The frame that is on the wire where the guest has this one.
    fn on_wire(&self, frame: &[u8]) -> Vec<u8> {
        match self.tags {
            0 => frame.to_vec(),
            _ => tagged(frame, VLAN),
        }
    }

    fn comes_to_guest(&mut self, frame: &[u8], limit: Duration) -> bool {
        self.wire.send(&self.on_wire(frame));
        let pair = &mut self.guest.pairs[0];
        std::iter::from_fn(|| pair.receive(limit)).any(|got| got.frame == frame)
    }

    fn frames_pass(&mut self) {
        let first = frame(mac(0), STRANGER, 100, 0);
        // A bond passes frames once it has seen its link.
        let comes = wait::until(wait::SOON, || self.comes_to_guest(&first, wait::QUIET));
        assert!(comes, "nothing comes to the guest: {:#}", self.daemon.status());
        for (number, len) in (1..).zip([60, 61, 700, 1514]) {
            for to in [mac(0), BROADCAST] {
                let sent = frame(to, STRANGER, len, number);
                assert!(self.comes_to_guest(&sent, wait::SOON), "{len} bytes to {to:x?}");
            }
            for to in [STRANGER, BROADCAST] {
                let sent = frame(to, mac(0), len, number);
                self.guest.pairs[0].send(&sent, Layout::Whole);
                let wanted = self.on_wire(&sent);
                let mut got = std::iter::from_fn(|| self.wire.receive(wait::SOON));
                assert!(
                    got.any(|got| got == wanted),
                    "{len} bytes from the guest to {to:x?}"
                );
            }
        }
    }

    fn whole_packets_pass(&mut self, veth: &VethPair) {
        let (packet, below) = (
            GsoPacket::tcp(Ip::V4(0), WHOLE),
            GsoPacket {
                tags: self.tags,
                ..GsoPacket::tcp(Ip::V4(0), WHOLE)
            },
        );
        let between =
            |to: [u8; 6], from: [u8; 6], packet: &GsoPacket| [&to[..], &from, &packet.bytes()[12..]].concat();
        let mouth = PacketPort::open_gso_sender(veth);
        let sent = between(mac(0), STRANGER, &below);
        mouth.send(&[&below.request(SEGMENT)[..], &sent].concat());
        let wanted = between(mac(0), STRANGER, &packet);
        let pair = &mut self.guest.pairs[0];
        let mut got = std::iter::from_fn(|| pair.receive(wait::SOON)).map(|got| got.frame);
        assert!(got.any(|got| got == wanted), "no whole packet comes to the guest");

        let ear = PacketPort::open_to_read_with_header(&veth.far, VethPair::WIRE);
        let sent = between(STRANGER, mac(0), &packet);
        let mut asked = [0; HEADER];
        asked[..10].copy_from_slice(&packet.request(SEGMENT));
        self.guest.pairs[0].send_asking(&[(asked, &sent)], Layout::Pieces(9000));
        let mut bytes = vec![0; 70_000];
        let comes = wait::until(wait::SOON, || {
            // The tag is beside it.
            let (len, tag) = ear.read_into(&mut bytes, wait::QUIET).unwrap_or_default();
            bytes.get(10..len).is_some_and(|got| got == sent) && tag.is_some() == (self.tags > 0)
        });
        assert!(comes, "no whole packet comes from the guest");
    }
}
