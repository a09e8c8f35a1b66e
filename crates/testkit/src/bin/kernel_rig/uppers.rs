//! An interface above a veth as the uplink of a guest, of each kind that the kernel has: the log, `status` and `check`
//! report which frames the guest loses and the remedy, whole packets are counted, and with the remedy they arrive.

use testkit::daemon::{DIR, binary};
use testkit::gso_packet::{GsoPacket, Ip};
use testkit::lan::guests;
use testkit::{Daemon, DriverConfig, PacketPort, Serve, VethPair, wait};

use crate::cases::Seen;

/// Its name, whatever it is.
const UPPER: &str = "upper0";
/// Payload of a whole packet, and of its segments.
const PACKET: usize = 8000;
const SEGMENT: u16 = 1448;

/// A kind of interface above others.
pub(crate) struct Kind {
    /// What it is called.
    pub(crate) name: &'static str,
    /// `ip link add` after its name and address; the interface below is linked, or is a port.
    make: &'static [&'static str],
    is_linked: bool,
    /// Tags of the frames below.
    tags: usize,
    /// Whether frames for guests come to it.
    has_frames: bool,
}

/// All of them. A team without a program that sets its mode passes no frames.
pub(crate) const KINDS: [Kind; 5] = [
    Kind {
        name: "macvlan",
        make: &["type", "macvlan", "mode", "bridge"],
        is_linked: true,
        tags: 0,
        has_frames: true,
    },
    Kind {
        name: "VLAN",
        make: &["type", "vlan", "id", "5"],
        is_linked: true,
        tags: 1,
        has_frames: true,
    },
    Kind {
        name: "bond",
        make: &["type", "bond", "mode", "active-backup", "miimon", "10"],
        is_linked: false,
        tags: 0,
        has_frames: true,
    },
    Kind {
        name: "team",
        make: &["type", "team"],
        is_linked: false,
        tags: 0,
        has_frames: false,
    },
    Kind {
        name: "bridge",
        make: &["type", "bridge"],
        is_linked: false,
        tags: 0,
        has_frames: false,
    },
];

impl Kind {
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
        let text = format!("[port.vm0]\nifname = \"{UPPER}\"\nsocket-path = \"{DIR}/vm0.sock\"\n");
        let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[UPPER], &text);
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

    /// A veth pair with the interface above its near end.
    fn lay(&self, address: &[u8]) -> VethPair {
        let veth = VethPair::new();
        let address: Vec<_> = address.iter().map(|byte| format!("{byte:02x}")).collect();
        let address = address.join(":");
        let below: &[&str] = if self.is_linked {
            &["link", VethPair::NIC]
        } else {
            &[]
        };
        let name = ["name", UPPER, "address", &address];
        veth.near
            .ip(&[&["link", "add"], below, &name, self.make].concat());
        if !self.is_linked {
            // A bond takes ports that are down.
            veth.near.ip(&["link", "set", VethPair::NIC, "down"]);
            veth.near.ip(&["link", "set", VethPair::NIC, "master", UPPER]);
            veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
        }
        veth.near.ip(&["link", "set", UPPER, "arp", "off", "up"]);
        veth
    }
}
