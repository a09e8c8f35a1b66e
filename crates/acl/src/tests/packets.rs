//! Frames and rules with known fields, and few values for each field, so that rules match often.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;
use proptest::sample::select;

use crate::{Action, Direction, Rule};

/// Which of a packet's fragments a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fragment {
    Whole,
    First,
    Later,
}

/// A frame.
#[derive(Debug, Clone)]
pub(super) struct Packet {
    pub(super) vlan: Option<u16>,
    /// For a frame other than IP; `None`: by the version of the addresses.
    pub(super) ethertype: Option<u16>,
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) protocol: u8,
    /// For ICMP, the second one is type and code.
    pub(super) ports: (u16, u16),
    pub(super) fragment: Fragment,
    /// Hop limit (IPv6).
    pub(super) hops: u8,
    /// Bytes of options (IPv4, in steps of four), or of a hop-by-hop header (IPv6, in steps of eight).
    pub(super) further: usize,
    /// The mark of its flow; 0: none.
    pub(super) mark: u32,
}

impl Packet {
    pub(super) fn version(&self) -> u16 {
        match (self.ethertype, self.source) {
            (Some(ethertype), _) => ethertype,
            (None, IpAddr::V4(_)) => 0x0800,
            (None, IpAddr::V6(_)) => 0x86dd,
        }
    }

    pub(super) fn has_ports(&self) -> bool {
        matches!(self.protocol, 6 | 17 | 33 | 132 | 136)
    }

    pub(super) fn is_icmp(&self) -> bool {
        (self.version(), self.protocol) == (0x0800, 1) || (self.version(), self.protocol) == (0x86dd, 58)
    }

    /// As it is on the wire.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        if let Some(vlan) = self.vlan {
            bytes.extend([0x81, 0]);
            bytes.extend(vlan.to_be_bytes());
        }
        bytes.extend(self.version().to_be_bytes());
        if self.ethertype.is_some() {
            bytes.extend([0; 46]);
            return bytes;
        }
        let payload = self.payload();
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let options = self.further / 4 * 4;
                let total = u16::try_from(20 + options + payload.len()).expect("short");
                let fragment: u16 = match self.fragment {
                    Fragment::Whole => 0x4000,
                    Fragment::First => 0x2000,
                    Fragment::Later => 3,
                };
                bytes.extend([0x45 + u8::try_from(options / 4).expect("few"), 0]);
                bytes.extend(total.to_be_bytes());
                bytes.extend([0, 1]);
                bytes.extend(fragment.to_be_bytes());
                bytes.extend([64, self.protocol, 0, 0]);
                bytes.extend(source.octets());
                bytes.extend(destination.octets());
                bytes.extend(vec![1; options]);
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                let mut behind = Vec::new();
                let inner = match self.fragment {
                    Fragment::Whole => self.protocol,
                    _ => 44,
                };
                let hop_by_hop = self.further / 8 * 8;
                if hop_by_hop > 0 {
                    behind.extend([inner, u8::try_from(hop_by_hop / 8 - 1).expect("few")]);
                    behind.extend(vec![0; hop_by_hop - 2]);
                }
                if self.fragment != Fragment::Whole {
                    let at: u16 = if self.fragment == Fragment::First {
                        1
                    } else {
                        3 << 3
                    };
                    behind.extend([self.protocol, 0]);
                    behind.extend(at.to_be_bytes());
                    behind.extend([0, 0, 0, 1]);
                }
                let first = if hop_by_hop > 0 { 0 } else { inner };
                bytes.extend([0x60, 0, 0, 0]);
                bytes.extend(
                    u16::try_from(behind.len() + payload.len())
                        .expect("short")
                        .to_be_bytes(),
                );
                bytes.extend([first, self.hops]);
                bytes.extend(source.octets());
                bytes.extend(destination.octets());
                bytes.extend(behind);
            }
            _ => unreachable!("two of one version"),
        }
        bytes.extend(payload);
        bytes
    }

    fn payload(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if self.fragment == Fragment::Later {
            // Not to be taken for ports.
            return vec![0, 1, 0, 1, 0, 0, 0, 0];
        }
        match self.is_icmp() {
            true => bytes.extend(self.ports.1.to_be_bytes()),
            false => {
                bytes.extend(self.ports.0.to_be_bytes());
                bytes.extend(self.ports.1.to_be_bytes());
            }
        }
        bytes.resize(12, 0);
        bytes
    }
}

/// A rule as the tests understand it.
#[derive(Debug, Clone, Default)]
pub(super) struct Wanted {
    pub(super) deny: bool,
    pub(super) ethertype: Option<u16>,
    pub(super) protocol: Option<u8>,
    pub(super) source: Option<(IpAddr, u32)>,
    pub(super) destination: Option<(IpAddr, u32)>,
    pub(super) source_ports: Vec<(u16, u16)>,
    pub(super) destination_ports: Vec<(u16, u16)>,
    pub(super) icmp: Option<(u8, Option<u8>)>,
    pub(super) fragment: Option<bool>,
    pub(super) mark: u32,
}

impl Wanted {
    /// The rule in the form of the configuration; `None`: its keys exclude each other.
    pub(super) fn rule(&self, direction: Direction) -> Option<Rule> {
        let ports = |ranges: &[(u16, u16)]| {
            let text = ranges.iter().map(|(first, last)| format!("{first}-{last}"));
            Some(text.collect::<Vec<_>>().join(",")).filter(|text| !text.is_empty())
        };
        let prefix =
            |prefix: Option<(IpAddr, u32)>| prefix.map(|(address, bits)| format!("{address}/{bits}"));
        let pairs = [
            (
                "direction",
                Some(match direction {
                    Direction::FromGuest => "from-guest".to_owned(),
                    Direction::ToGuest => "to-guest".to_owned(),
                }),
            ),
            (
                "action",
                Some(if self.deny { "deny" } else { "allow" }.to_owned()),
            ),
            (
                "ethertype",
                self.ethertype.map(|ethertype| match ethertype {
                    0x0800 => "ipv4".to_owned(),
                    ethertype => format!("{ethertype:#x}"),
                }),
            ),
            ("protocol", self.protocol.map(|protocol| protocol.to_string())),
            ("source", prefix(self.source)),
            ("destination", prefix(self.destination)),
            ("source-ports", ports(&self.source_ports)),
            ("destination-ports", ports(&self.destination_ports)),
            (
                "icmp-type",
                self.icmp.map(|(kind, code)| match code {
                    Some(code) => format!("{kind}/{code}"),
                    None => kind.to_string(),
                }),
            ),
            ("fragment", self.fragment.map(|fragment| fragment.to_string())),
            (
                "mark",
                Some(self.mark)
                    .filter(|&mark| mark != 0)
                    .map(|mark| mark.to_string()),
            ),
        ];
        let words = pairs
            .iter()
            .filter_map(|(key, value)| Some(format!("{key}={}", value.as_deref()?)));
        words.collect::<Vec<_>>().join(" ").parse().ok()
    }

    /// Whether it matches a frame, computed in the slow and obvious way.
    pub(super) fn matches(&self, packet: &Packet) -> bool {
        match (self.ethertype, packet.ethertype) {
            (Some(ethertype), _) if ethertype != packet.version() => return false,
            // Without an ethertype it matches IP only.
            (None, Some(_)) => return false,
            _ => {}
        }
        if self
            .protocol
            .is_some_and(|protocol| packet.ethertype.is_some() || protocol != packet.protocol)
        {
            return false;
        }
        // icmp is IPv4's, icmpv6 is IPv6's.
        if matches!(self.protocol, Some(1 | 58)) && !packet.is_icmp() {
            return false;
        }
        let is_fragment = packet.fragment != Fragment::Whole;
        if self
            .fragment
            .is_some_and(|wanted| packet.ethertype.is_some() || wanted != is_fragment)
        {
            return false;
        }
        if self.mark != 0 && self.mark != packet.mark {
            return false;
        }
        if !is_in(self.source, packet.source) || !is_in(self.destination, packet.destination) {
            return false;
        }
        let has_ports = packet.has_ports() && packet.fragment != Fragment::Later;
        let is_one = |ranges: &[(u16, u16)], port: u16| {
            ranges.is_empty()
                || (has_ports && ranges.iter().any(|&(first, last)| (first..=last).contains(&port)))
        };
        if !is_one(&self.source_ports, packet.ports.0) || !is_one(&self.destination_ports, packet.ports.1) {
            return false;
        }
        let [kind, code] = packet.ports.1.to_be_bytes();
        self.icmp.is_none_or(|(wanted, with)| {
            packet.fragment != Fragment::Later && wanted == kind && with.is_none_or(|with| with == code)
        })
    }
}

/// Bit by bit.
fn is_in(prefix: Option<(IpAddr, u32)>, address: IpAddr) -> bool {
    let Some((network, bits)) = prefix else {
        return true;
    };
    let bit = |address: IpAddr, at: u32| match address {
        IpAddr::V4(address) => u128::from(address.to_bits()) >> (31 - at) & 1,
        IpAddr::V6(address) => address.to_bits() >> (127 - at) & 1,
    };
    network.is_ipv4() == address.is_ipv4() && (0..bits).all(|at| bit(network, at) == bit(address, at))
}

/// Which rule decides, and how; `None`: none.
pub(super) fn reference(rules: &[Wanted], packet: &Packet) -> Option<(usize, Action)> {
    let at = rules.iter().position(|rule| rule.matches(packet))?;
    Some((
        at,
        if rules[at].deny {
            Action::Deny
        } else {
            Action::Allow
        },
    ))
}

fn v4() -> impl Strategy<Value = u32> {
    prop_oneof![0x0a00_0000..0x0a00_0010u32, Just(0), Just(u32::MAX), any::<u32>()]
}

fn v6() -> impl Strategy<Value = u128> {
    let low = (0x2001_0db8_u128 << 96)..(0x2001_0db8_u128 << 96) + 16;
    prop_oneof![low, Just(0), Just(u128::MAX), any::<u128>()]
}

fn port() -> impl Strategy<Value = u16> {
    prop_oneof![
        0u16..6,
        0xfffc..=0xffffu16,
        Just(0x0800),
        Just(0x0304),
        any::<u16>()
    ]
}

fn protocol() -> impl Strategy<Value = u8> {
    select(vec![1, 6, 6, 17, 17, 33, 47, 58, 132, 136])
}

fn addresses() -> impl Strategy<Value = (IpAddr, IpAddr)> {
    let four = |address: u32| IpAddr::V4(Ipv4Addr::from_bits(address));
    let six = |address: u128| IpAddr::V6(Ipv6Addr::from_bits(address));
    prop_oneof![
        (v4(), v4()).prop_map(move |(a, b)| (four(a), four(b))),
        (v6(), v6()).prop_map(move |(a, b)| (six(a), six(b))),
    ]
}

/// A network that an address is in.
fn prefix(address: IpAddr, bits: u32) -> (IpAddr, u32) {
    match address {
        IpAddr::V4(address) => {
            let bits = bits.min(32);
            let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
            (IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & mask)), bits)
        }
        IpAddr::V6(address) => {
            let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
            (IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask)), bits)
        }
    }
}

pub(super) fn packet() -> impl Strategy<Value = Packet> {
    let fragment = select(vec![
        Fragment::Whole,
        Fragment::Whole,
        Fragment::First,
        Fragment::Later,
    ]);
    let ethertype = prop_oneof![
        9 => Just(None),
        1 => select(vec![Some(0x0806), Some(0x88cc), Some(0x8847)]),
    ];
    let vlan = select(vec![None, None, Some(100)]);
    let further = select(vec![0, 0, 0, 8, 40]);
    let hops = select(vec![1, 64, 255]);
    let of_ip = (addresses(), protocol(), (port(), port()), fragment, hops);
    (vlan, ethertype, of_ip, further, mark()).prop_map(|(vlan, ethertype, of_ip, further, mark)| {
        let ((source, destination), protocol, ports, fragment, hops) = of_ip;
        Packet {
            vlan,
            ethertype,
            source,
            destination,
            protocol,
            ports,
            fragment,
            hops,
            further,
            mark,
        }
    })
}

fn mark() -> impl Strategy<Value = u32> {
    prop_oneof![3 => Just(0), 3 => 1u32..4, 1 => Just(u32::MAX)]
}

fn ranges() -> impl Strategy<Value = Vec<(u16, u16)>> {
    let range = (port(), port()).prop_map(|(a, b)| (a.min(b), a.max(b)));
    prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec(range, 1..4)]
}

/// Any rules; some have keys that exclude each other.
pub(super) fn wanted() -> impl Strategy<Value = Wanted> {
    let some_of = |some: bool, prefix| Some(prefix).filter(|_| some);
    let bits = || prop_oneof![Just(128), Just(0), 24u32..=32, 0u32..=128];
    let prefixes = (addresses(), bits(), bits(), any::<[bool; 2]>()).prop_map(
        move |((source, destination), of_source, of_destination, [with_source, with_destination])| {
            (
                some_of(with_source, prefix(source, of_source)),
                some_of(with_destination, prefix(destination, of_destination)),
            )
        },
    );
    let ethertype = prop_oneof![8 => Just(None), 1 => select(vec![Some(0x0800), Some(0x0806), Some(0x88cc)])];
    let icmp = prop_oneof![
        2 => Just(None),
        1 => select(vec![Some((8, None)), Some((8, Some(0))), Some((3, Some(4))), Some((0, None))]),
    ];
    let what = (
        any::<bool>(),
        ethertype,
        prop::option::of(protocol()),
        icmp,
        prop_oneof![4 => Just(None), 1 => any::<bool>().prop_map(Some)],
        mark(),
    );
    (what, prefixes, ranges(), ranges()).prop_map(|(what, (source, destination), from_ports, to_ports)| {
        let (deny, ethertype, protocol, icmp, fragment, mark) = what;
        let has_ports = matches!(protocol, Some(6 | 17 | 33 | 132 | 136));
        Wanted {
            deny,
            ethertype,
            protocol,
            source,
            destination,
            source_ports: if has_ports { from_ports } else { Vec::new() },
            destination_ports: if has_ports { to_ports } else { Vec::new() },
            icmp: icmp.filter(|_| matches!(protocol, Some(1 | 58))),
            fragment,
            mark,
        }
    })
}

/// Valid rules, with the fields that they were made from.
pub(super) fn rules(most: usize) -> impl Strategy<Value = Vec<(Wanted, Rule)>> {
    let one = wanted().prop_filter_map("keys that cannot be together", |wanted| {
        let rule = wanted.rule(Direction::ToGuest)?;
        Some((wanted, rule))
    });
    prop::collection::vec(one, 0..most)
}
