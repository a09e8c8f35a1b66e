//! A rule, as it was said.
//!
//! It is written as words `key=value`, one behind the other: so it stands in the table of a port, and so tables are
//! compared. Keys are those of the file and of the API.

use std::fmt;
use std::net::IpAddr;

use serde_json::{Map, Value};

use super::key::{ARP, DCCP, ICMP, IPV4, IPV6, LLC, SCTP, TCP, UDP, UDP_LITE};
use crate::switch::guard::{ICMP_V6, IpPrefix};

/// Where a frame has no port: behind all that it could have.
pub(super) const NO_PORT: u32 = 1 << 16;
/// Most ranges of ports of one rule and side.
const MOST_RANGES: usize = 15;

/// Intervals of values, first and last.
pub(super) type Intervals = Vec<(u32, u32)>;

/// Seen from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    FromGuest,
    ToGuest,
}

/// What becomes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    Allow,
    Deny,
}

/// See the module's head. What it does not name it does not look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) direction: Direction,
    pub(crate) action: Action,
    /// `None`: IPv4 and IPv6.
    ethertype: Option<u16>,
    protocol: Option<u8>,
    source: Option<IpPrefix>,
    destination: Option<IpPrefix>,
    source_ports: Option<Ports>,
    destination_ports: Option<Ports>,
    /// And code.
    icmp: Option<(u8, Option<u8>)>,
    /// That the NIC's queue has noted of the frame's flow; 0: any, and none.
    mark: u32,
}

/// Ranges of ports, first and last, in ascending order, apart from each other.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ports(Vec<(u16, u16)>);

/// Keys of a rule, in the order in which they are written.
pub(crate) const KEYS: [&str; 10] = [
    "direction",
    "action",
    "ethertype",
    "protocol",
    "source",
    "destination",
    "source-ports",
    "destination-ports",
    "icmp-type",
    "mark",
];

const ETHERTYPES: [(&str, u16); 4] = [("ipv4", IPV4), ("ipv6", IPV6), ("arp", ARP), ("llc", LLC)];
const PROTOCOLS: [(&str, u8); 11] = [
    ("tcp", TCP),
    ("udp", UDP),
    ("icmp", ICMP),
    ("icmpv6", ICMP_V6),
    ("sctp", SCTP),
    ("dccp", DCCP),
    ("udplite", UDP_LITE),
    ("igmp", 2),
    ("gre", 47),
    ("esp", 50),
    ("ah", 51),
];

impl Direction {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::FromGuest => "from-guest",
            Self::ToGuest => "to-guest",
        }
    }
}

impl Action {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }

    /// Errors: the words are neither.
    pub(crate) fn of(text: &str) -> Result<Self, String> {
        match text {
            "allow" => Ok(Self::Allow),
            "deny" => Ok(Self::Deny),
            _ => Err(format!("{text:?}: give one of allow, deny")),
        }
    }
}

impl Rule {
    /// One that is written as words.
    /// Errors: one line, which begins with the key.
    pub(crate) fn of_words(words: &str) -> Result<Self, String> {
        let pairs: Result<Vec<_>, String> = words
            .split_whitespace()
            .map(|word| {
                let no_pair = || format!("{word:?}: a rule is written as words key=value");
                word.split_once('=').ok_or_else(no_pair)
            })
            .collect();
        Self::of(&pairs?)
    }

    /// One with these keys.
    /// Errors: one line, which begins with the key.
    pub(crate) fn of(said: &[(&str, &str)]) -> Result<Self, String> {
        if let Some((key, _)) = said.iter().find(|(key, _)| !KEYS.contains(key)) {
            return Err(format!(
                "{key}: a rule has no such key; it has {}",
                KEYS.join(", ")
            ));
        }
        let get = |key: &str| {
            said.iter()
                .find(|(known, _)| *known == key)
                .map(|(_, value)| *value)
        };
        let needed = |key: &str, values| get(key).ok_or(format!("{key} is missing: say one of {values}"));
        let rule = Self {
            direction: match needed("direction", "from-guest, to-guest")? {
                "from-guest" => Direction::FromGuest,
                "to-guest" => Direction::ToGuest,
                other => {
                    return Err(format!("direction = {other:?}: give one of from-guest, to-guest"));
                }
            },
            action: Action::of(needed("action", "allow, deny")?).map_err(|why| format!("action = {why}"))?,
            ethertype: read(get, "ethertype", ethertype)?,
            protocol: read(get, "protocol", protocol)?,
            source: read(get, "source", IpPrefix::of_any)?,
            destination: read(get, "destination", IpPrefix::of_any)?,
            source_ports: read(get, "source-ports", Ports::read)?,
            destination_ports: read(get, "destination-ports", Ports::read)?,
            icmp: read(get, "icmp-type", icmp)?,
            mark: read(get, "mark", |text| number(text, "1 to 4294967295", 1, u32::MAX))?.unwrap_or(0),
        };
        rule.check()?;
        Ok(rule)
    }

    /// Errors: keys that cannot be together.
    fn check(&self) -> Result<(), String> {
        let version = |prefix: &Option<IpPrefix>| prefix.map(|prefix| version_of(&prefix));
        let versions = [version(&self.source), version(&self.destination)];
        if let [Some(source), Some(destination)] = versions
            && source != destination
        {
            return Err(
                "source and destination: one is IPv4 and the other IPv6: make it two rules".to_owned(),
            );
        }
        let by_addresses = versions.into_iter().flatten().next();
        let is_ip = self
            .ethertype
            .is_none_or(|ethertype| matches!(ethertype, IPV4 | IPV6));
        let names_ip = self.protocol.is_some() || by_addresses.is_some();
        if !is_ip && names_ip {
            return Err(
                "ethertype: only IPv4 and IPv6 have a protocol and addresses that are looked at: leave \
                        these out"
                    .to_owned(),
            );
        }
        if by_addresses.is_some_and(|version| self.ethertype.is_some_and(|ethertype| ethertype != version)) {
            return Err("ethertype: source and destination are not of it: leave it out".to_owned());
        }
        let icmp = match self.protocol {
            Some(ICMP) => Some(IPV4),
            Some(ICMP_V6) => Some(IPV6),
            _ => None,
        };
        let said = by_addresses.or(self.ethertype);
        if icmp.is_some_and(|version| said.is_some_and(|said| said != version)) {
            return Err("protocol: icmp is IPv4's, icmpv6 is IPv6's: give the other one".to_owned());
        }
        if self.mark != 0 && self.direction == Direction::FromGuest {
            return Err(
                "mark: frames have one that come from a NIC: give it to rules to-guest only".to_owned(),
            );
        }
        if self.icmp.is_some() && icmp.is_none() {
            return Err("icmp-type: goes with protocol icmp or icmpv6: name one".to_owned());
        }
        let ports = [
            ("source-ports", &self.source_ports),
            ("destination-ports", &self.destination_ports),
        ];
        let has_ports = matches!(self.protocol, Some(TCP | UDP | SCTP | DCCP | UDP_LITE));
        if let Some((key, _)) = ports.iter().find(|(_, ports)| ports.is_some() && !has_ports) {
            return Err(format!(
                "{key}: goes with protocol tcp, udp, sctp, dccp or udplite: name one"
            ));
        }
        Ok(())
    }

    /// Ethertype and IP protocol that it matches: `ethertype << 8 | protocol`.
    pub(super) fn kinds(&self) -> Intervals {
        let of = |ethertype: u16| {
            let first = u32::from(ethertype) << 8;
            match self.protocol {
                Some(protocol) => (first | u32::from(protocol), first | u32::from(protocol)),
                None => (first, first | 0xff),
            }
        };
        let by_address = self.source.or(self.destination).map(|prefix| version_of(&prefix));
        let by_protocol = match self.protocol {
            Some(ICMP) => Some(IPV4),
            Some(ICMP_V6) => Some(IPV6),
            _ => None,
        };
        match self.ethertype.or(by_address).or(by_protocol) {
            Some(ethertype) => vec![of(ethertype)],
            None => vec![of(IPV4), of(IPV6)],
        }
    }

    pub(super) fn sources(&self) -> (u128, u128) {
        self.source.map_or((0, u128::MAX), |prefix| prefix.range())
    }

    pub(super) fn destinations(&self) -> (u128, u128) {
        self.destination.map_or((0, u128::MAX), |prefix| prefix.range())
    }

    pub(super) fn source_ports(&self) -> Intervals {
        Ports::intervals(self.source_ports.as_ref())
    }

    /// Those of ICMP are type and code.
    pub(super) fn destination_ports(&self) -> Intervals {
        match self.icmp {
            Some((kind, code)) => {
                let first = u32::from(kind) << 8;
                let (low, high) = code.map_or((0, 0xff), |code| (code.into(), code.into()));
                vec![(first | low, first | high)]
            }
            None => Ports::intervals(self.destination_ports.as_ref()),
        }
    }

    /// Marks that it matches; `None`: any, and none.
    pub(super) fn mark(&self) -> Option<u64> {
        Some(u64::from(self.mark)).filter(|&mark| mark != 0)
    }

    /// What was said, key by key.
    pub(crate) fn said(&self) -> Vec<(&'static str, String)> {
        let ports = |ports: &Option<Ports>| ports.as_ref().map(Ports::to_string);
        let icmp = self.icmp.map(|(kind, code)| match code {
            Some(code) => format!("{kind}/{code}"),
            None => kind.to_string(),
        });
        let values = [
            Some(self.direction.name().to_owned()),
            Some(self.action.name().to_owned()),
            self.ethertype
                .map(|ethertype| name_of(&ETHERTYPES, ethertype).unwrap_or(format!("{ethertype:#06x}"))),
            self.protocol.map(protocol_name),
            self.source.map(|prefix| prefix.to_string()),
            self.destination.map(|prefix| prefix.to_string()),
            ports(&self.source_ports),
            ports(&self.destination_ports),
            icmp,
            Some(self.mark)
                .filter(|&mark| mark != 0)
                .map(|mark| mark.to_string()),
        ];
        let pairs = KEYS.into_iter().zip(values);
        pairs.filter_map(|(key, value)| Some((key, value?))).collect()
    }

    /// The same as a JSON object.
    pub(crate) fn json(&self) -> Map<String, Value> {
        let value = |key: &str, text: String| match text.parse::<u32>() {
            Ok(mark) if key == "mark" => mark.into(),
            _ => text.into(),
        };
        let said = self.said().into_iter();
        said.map(|(key, text)| (key.to_owned(), value(key, text)))
            .collect()
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self
            .said()
            .into_iter()
            .map(|(key, value)| format!("{key}={value}"));
        f.write_str(&words.collect::<Vec<_>>().join(" "))
    }
}

impl Ports {
    /// Numbers and ranges, joined by commas, or by `+` where commas have another meaning.
    fn read(text: &str) -> Result<Self, String> {
        let wrong = |_| format!("{text:?} is no list of ports such as 22,80,8000-8100");
        let mut ranges = Vec::new();
        for part in text.split([',', '+']).map(str::trim) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: u16 = first.trim().parse().map_err(wrong)?;
            let last: u16 = last.trim().parse().map_err(wrong)?;
            if last < first {
                return Err(format!(
                    "{part} ends before it begins: write the smaller one first"
                ));
            }
            ranges.push((first, last));
        }
        ranges.sort_unstable();
        ranges.dedup_by(|next, before| {
            let is_one = u32::from(next.0) <= u32::from(before.1) + 1;
            if is_one {
                before.1 = before.1.max(next.1);
            }
            is_one
        });
        match ranges.len() > MOST_RANGES {
            true => Err(format!(
                "{} ranges of ports, a rule has {MOST_RANGES} at most",
                ranges.len()
            )),
            false => Ok(Self(ranges)),
        }
    }

    fn intervals(ports: Option<&Self>) -> Intervals {
        ports.map_or(vec![(0, NO_PORT)], |Self(ranges)| {
            let wide = |&(first, last): &(u16, u16)| (first.into(), last.into());
            ranges.iter().map(wide).collect()
        })
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |&(first, last): &(u16, u16)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        f.write_str(&self.0.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

/// The value of a key, read.
fn read<'a, T>(
    get: impl Fn(&str) -> Option<&'a str>,
    key: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    get(key)
        .map(read)
        .transpose()
        .map_err(|why| format!("{key}: {why}"))
}

fn version_of(prefix: &IpPrefix) -> u16 {
    match prefix.first() {
        IpAddr::V4(_) => IPV4,
        IpAddr::V6(_) => IPV6,
    }
}

fn name_of<T: PartialEq + Copy>(names: &[(&str, T)], value: T) -> Option<String> {
    let known = names.iter().find(|(_, known)| *known == value);
    known.map(|(name, _)| (*name).to_owned())
}

fn ethertype(text: &str) -> Result<u16, String> {
    if let Some((_, number)) = ETHERTYPES.iter().find(|(name, _)| *name == text) {
        return Ok(*number);
    }
    let digits = text.strip_prefix("0x");
    let number = digits.map_or_else(|| text.parse(), |digits| u16::from_str_radix(digits, 16));
    number.ok().filter(|&number| number >= 0x0600).ok_or(format!(
        "{text:?} is neither one of ipv4, ipv6, arp, llc nor a number of 0x0600 or more"
    ))
}

/// As it is written: by its name, or its number.
pub(crate) fn protocol_name(protocol: u8) -> String {
    name_of(&PROTOCOLS, protocol).unwrap_or(protocol.to_string())
}

/// Errors: what would be one.
pub(crate) fn protocol(text: &str) -> Result<u8, String> {
    if let Some((_, number)) = PROTOCOLS.iter().find(|(name, _)| *name == text) {
        return Ok(*number);
    }
    let names: Vec<_> = PROTOCOLS.iter().map(|(name, _)| *name).collect();
    text.parse().map_err(|_| {
        format!(
            "{text:?} is neither one of {} nor a number up to 255",
            names.join(", ")
        )
    })
}

fn icmp(text: &str) -> Result<(u8, Option<u8>), String> {
    let wrong = |_| format!("{text:?} is no type, or type and code, such as 8 or 3/4");
    let (kind, code) = text.split_once('/').map_or((text, None), |(a, b)| (a, Some(b)));
    let code = code.map(str::parse).transpose().map_err(wrong)?;
    Ok((kind.parse().map_err(wrong)?, code))
}

fn number(text: &str, range: &str, least: u32, most: u32) -> Result<u32, String> {
    let digits = text.strip_prefix("0x");
    let number = digits.map_or_else(|| text.parse(), |digits| u32::from_str_radix(digits, 16));
    number
        .ok()
        .filter(|number| (least..=most).contains(number))
        .ok_or(format!("{text:?} is no number of {range}"))
}
