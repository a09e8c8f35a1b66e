//! Filter rules of a port: which frames its guest may send, and which it receives.
//!
//! A rule is a table in a file and in JSON, and words `KEY=VALUE` on a command line. A rule ignores every field of a
//! frame that it does not name.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::sync::LazyLock;

use packet::ethertype::{ARP, FIRST, IPV4, IPV6, LLC};
use packet::protocol::{DCCP, ICMP, ICMP_V6, SCTP, TCP, UDP, UDP_LITE};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use super::prefix::IpPrefix;
use super::table::{keys_of_words, reason, schema};
use super::values::{Written, joined, written};

/// Most rules of a port, of both directions together. This bounds the lookup for a frame of an unknown flow to about a
/// microsecond, and the memory of the compiled rules.
pub const MOST_RULES: usize = 10_000;
/// Most port ranges in one list (source or destination) of a rule.
const MOST_RANGES: usize = 15;
/// The port of a frame that has none: above all possible ports.
pub const NO_PORT: u32 = 1 << 16;

/// Intervals of values, first and last.
pub type Intervals = Vec<(u32, u32)>;

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

/// Direction of a frame, seen from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
pub enum Direction {
    /// Frames that the guest sends.
    FromGuest,
    /// Frames that the guest receives.
    ToGuest,
}

/// What happens to a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
pub enum Action {
    /// It passes.
    Allow,
    /// It is dropped.
    Deny,
}

impl Action {
    /// Its name in files and requests.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

/// A filter rule of a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, remote = "Self")]
#[schemars(inline)]
pub struct Rule {
    /// Frames of this direction.
    pub direction: Direction,
    /// What happens to frames that the rule matches.
    pub action: Action,
    /// `ipv4`, `ipv6`, `arp`, `llc`, or a number of 0x0600 or more [default: IPv4 and IPv6].
    #[serde(skip_serializing_if = "Option::is_none")]
    ethertype: Option<Ethertype>,
    /// IP protocol, by name or number.
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<Protocol>,
    /// Source address or network.
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<IpPrefix>,
    /// Destination address or network.
    #[serde(skip_serializing_if = "Option::is_none")]
    destination: Option<IpPrefix>,
    /// Source ports, such as 22,80,8000-8100.
    #[serde(skip_serializing_if = "Option::is_none")]
    source_ports: Option<Ports>,
    /// Destination ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    destination_ports: Option<Ports>,
    /// ICMP type, or type and code, such as 8 or 3/4.
    #[serde(skip_serializing_if = "Option::is_none")]
    icmp_type: Option<IcmpType>,
    /// true: fragments of IP packets only; false: unfragmented IP packets only.
    #[serde(skip_serializing_if = "Option::is_none")]
    fragment: Option<bool>,
    /// Mark of the frame's flow, which `mark set` writes into the NIC's program.
    #[serde(skip_serializing_if = "Option::is_none")]
    mark: Option<FlowMark>,
    /// Frames that the rule decided about; a GSO packet counts as one. The API shows it and ignores it in requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    frames: Option<u64>,
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, to)
    }
}

/// Required keys of a rule, and their possible values.
const REQUIRED: [(&str, &str); 2] = [
    ("direction", "from-guest or to-guest"),
    ("action", "allow or deny"),
];

/// The schema of a rule's keys, made once: a port may have thousands of rules.
static SCHEMA: LazyLock<Map<String, Value>> = LazyLock::new(schema::<Rule>);

impl<'de> Deserialize<'de> for Rule {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct TableOrWords;

        impl<'de> Visitor<'de> for TableOrWords {
            type Value = Rule;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table of keys such as direction and action, or words key=value")
            }

            fn visit_map<A: MapAccess<'de>>(self, keys: A) -> Result<Rule, A::Error> {
                Rule::deserialize(MapAccessDeserializer::new(keys))
            }

            fn visit_str<E: serde::de::Error>(self, words: &str) -> Result<Rule, E> {
                let words: Vec<&str> = words.split_whitespace().collect();
                if let Some(word) = words.iter().find(|word| !word.contains('=')) {
                    return Err(E::custom(format!(
                        "{word:?}: a rule is written as words key=value"
                    )));
                }
                let keys = keys_of_words(words, &SCHEMA).map_err(|mistake| E::custom(mistake.what))?;
                serde_path_to_error::deserialize(Value::Object(keys)).map_err(|error| {
                    let key = error.path().to_string();
                    let reason = reason(&error.into_inner().to_string());
                    match key.as_str() {
                        "." => E::custom(reason),
                        key => E::custom(format!("{key}: {reason}")),
                    }
                })
            }
        }

        let rule = from.deserialize_any(TableOrWords).map_err(|error: D::Error| {
            let text = error.to_string();
            // The message of serde, or that of `reason` for words.
            let is_missing = |key: &str| {
                [
                    format!("missing field `{key}`"),
                    format!("{key} is missing: add it"),
                ]
                .contains(&text)
            };
            match REQUIRED.iter().find(|(key, _)| is_missing(key)) {
                Some((key, values)) => D::Error::custom(format!("{key} is missing: give {values}")),
                None => error,
            }
        })?;
        rule.check().map_err(D::Error::custom)?;
        Ok(Self { frames: None, ..rule })
    }
}

impl Rule {
    /// Checks that the keys can be combined.
    fn check(&self) -> Result<(), String> {
        let version_of = |prefix: &Option<IpPrefix>| prefix.map(|prefix| version(&prefix));
        let versions = [version_of(&self.source), version_of(&self.destination)];
        if let [Some(source), Some(destination)] = versions
            && source != destination
        {
            return Err(
                "source and destination: one is IPv4 and the other IPv6: make it two rules".to_owned(),
            );
        }
        let by_addresses = versions.into_iter().flatten().next();
        let ethertype = self.ethertype.map(|Ethertype(number)| number);
        let protocol = self.protocol.map(|Protocol(number)| number);
        let is_ip = ethertype.is_none_or(|ethertype| matches!(ethertype, IPV4 | IPV6));
        let names_ip = protocol.is_some() || by_addresses.is_some() || self.fragment.is_some();
        if !is_ip && names_ip {
            return Err(
                "ethertype: only IPv4 and IPv6 have a protocol, addresses and fragments: leave these out"
                    .to_owned(),
            );
        }
        if by_addresses.is_some_and(|version| ethertype.is_some_and(|ethertype| ethertype != version)) {
            return Err("ethertype: contradicts source or destination: leave it out".to_owned());
        }
        let icmp = match protocol {
            Some(ICMP) => Some(IPV4),
            Some(ICMP_V6) => Some(IPV6),
            _ => None,
        };
        let named = by_addresses.or(ethertype);
        if icmp.is_some_and(|version| named.is_some_and(|named| named != version)) {
            return Err("protocol: icmp is IPv4's, icmpv6 is IPv6's: give the other one".to_owned());
        }
        if self.mark.is_some() && self.direction == Direction::FromGuest {
            return Err("mark: only frames from a NIC have one: use it in to-guest rules only".to_owned());
        }
        if self.icmp_type.is_some() && icmp.is_none() {
            return Err("icmp-type: needs protocol icmp or icmpv6: name one".to_owned());
        }
        let ports = [
            ("source-ports", &self.source_ports),
            ("destination-ports", &self.destination_ports),
        ];
        let has_ports = matches!(protocol, Some(TCP | UDP | SCTP | DCCP | UDP_LITE));
        match ports.iter().find(|(_, ports)| ports.is_some() && !has_ports) {
            Some((key, _)) => Err(format!(
                "{key}: needs protocol tcp, udp, sctp, dccp or udplite: name one"
            )),
            None => Ok(()),
        }
    }

    /// Ethertype and IP protocol that it matches: `ethertype << 8 | protocol`.
    #[must_use]
    pub fn kinds(&self) -> Intervals {
        let protocol = self.protocol.map(|Protocol(number)| number);
        let of = |ethertype: u16| {
            let first = u32::from(ethertype) << 8;
            match protocol {
                Some(protocol) => (first | u32::from(protocol), first | u32::from(protocol)),
                None => (first, first | 0xff),
            }
        };
        let by_address = self.source.or(self.destination).map(|prefix| version(&prefix));
        let by_protocol = match protocol {
            Some(ICMP) => Some(IPV4),
            Some(ICMP_V6) => Some(IPV6),
            _ => None,
        };
        match self
            .ethertype
            .map(|Ethertype(number)| number)
            .or(by_address)
            .or(by_protocol)
        {
            Some(ethertype) => vec![of(ethertype)],
            None => vec![of(IPV4), of(IPV6)],
        }
    }

    /// First and last source address that it matches.
    #[must_use]
    pub fn sources(&self) -> (u128, u128) {
        self.source.map_or((0, u128::MAX), |prefix| prefix.range())
    }

    /// First and last destination address that it matches.
    #[must_use]
    pub fn destinations(&self) -> (u128, u128) {
        self.destination.map_or((0, u128::MAX), |prefix| prefix.range())
    }

    /// Source ports that it matches.
    #[must_use]
    pub fn source_ports(&self) -> Intervals {
        Ports::intervals(self.source_ports.as_ref())
    }

    /// Destination ports that it matches; for ICMP `type << 8 | code`.
    #[must_use]
    pub fn destination_ports(&self) -> Intervals {
        match self.icmp_type {
            Some(IcmpType(kind, code)) => {
                let first = u32::from(kind) << 8;
                let (low, high) = code.map_or((0, 0xff), |code| (code.into(), code.into()));
                vec![(first | low, first | high)]
            }
            None => Ports::intervals(self.destination_ports.as_ref()),
        }
    }

    /// Whether it matches fragments only, or unfragmented packets only; `None`: both.
    #[must_use]
    pub fn fragment(&self) -> Option<bool> {
        self.fragment
    }

    /// The mark that it matches; `None`: any, and none.
    #[must_use]
    pub fn mark(&self) -> Option<u64> {
        self.mark.map(|FlowMark(mark)| mark.into())
    }

    /// Its keys as JSON.
    #[must_use]
    pub fn json(&self) -> Map<String, Value> {
        // Includes `fragment = false`, which differs from an absent key.
        match serde_json::to_value(self) {
            Ok(Value::Object(keys)) => keys,
            _ => Map::new(),
        }
    }
}

/// As words `KEY=VALUE`.
impl Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = self.json();
        let words = keys.iter().map(|(key, value)| match value {
            Value::String(text) => format!("{key}={text}"),
            other => format!("{key}={other}"),
        });
        f.write_str(&words.collect::<Vec<_>>().join(" "))
    }
}

impl FromStr for Rule {
    type Err = String;

    fn from_str(words: &str) -> Result<Self, String> {
        <Self as Deserialize>::deserialize(serde::de::value::StrDeserializer::<serde::de::value::Error>::new(
            words,
        ))
        .map_err(|error| error.to_string())
    }
}

/// Reads rules in order: a list of tables, or text with one rule on a line or `;` between rules.
pub(super) fn rules<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Rule>, D::Error> {
    struct ListOrText;

    impl<'de> Visitor<'de> for ListOrText {
        type Value = Vec<Rule>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of tables, or `[[port.NAME.rule]]` each")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vec<Rule>, E> {
            let lines = text
                .split(['\n', ';'])
                .map(str::trim)
                .filter(|line| !line.is_empty());
            let rule = |(number, line): (usize, &str)| {
                line.parse()
                    .map_err(|what: String| E::custom(format!("rule {number}: {what}")))
            };
            check_count(
                (1..)
                    .zip(lines)
                    .take(MOST_RULES + 1)
                    .map(rule)
                    .collect::<Result<_, _>>()?,
            )
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<Rule>, A::Error> {
            let mut rules = Vec::new();
            while rules.len() <= MOST_RULES
                && let Some(rule) = list.next_element()?
            {
                rules.push(rule);
            }
            check_count(rules)
        }
    }

    from.deserialize_any(ListOrText)
}

fn check_count<E: serde::de::Error>(rules: Vec<Rule>) -> Result<Vec<Rule>, E> {
    match rules.len() > MOST_RULES {
        true => Err(E::custom(format!(
            "a port has {MOST_RULES} rules at most: one rule can name a network, or a list of ports"
        ))),
        false => Ok(rules),
    }
}

written!(Ethertype, Protocol, Ports, IcmpType, FlowMark);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ethertype(u16);

impl Written for Ethertype {
    const MEANT: &'static str = "one of ipv4, ipv6, arp, llc, or a number of 0x0600 or more";
    const NUMBER: bool = true;
    const WRITES_NUMBER: bool = false;

    fn read(text: &str) -> Result<Self, String> {
        if let Some((_, number)) = ETHERTYPES.iter().find(|(name, _)| *name == text) {
            return Ok(Self(*number));
        }
        let digits = text.strip_prefix("0x");
        let number = digits.map_or_else(|| text.parse(), |digits| u16::from_str_radix(digits, 16));
        let number = number.ok().filter(|&number| number >= FIRST);
        number
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not an ethertype: give {}", Self::MEANT))
    }

    fn text(&self) -> String {
        let known = ETHERTYPES.iter().find(|(_, known)| *known == self.0);
        known.map_or_else(|| format!("{:#06x}", self.0), |(name, _)| (*name).to_owned())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Protocol(u8);

impl Written for Protocol {
    const MEANT: &'static str = "a name such as tcp, or a number up to 255";
    const NUMBER: bool = true;
    const WRITES_NUMBER: bool = false;

    fn read(text: &str) -> Result<Self, String> {
        protocol(text).map(Self)
    }

    fn text(&self) -> String {
        protocol_name(self.0)
    }
}

/// The ethertype of the prefix's IP version.
fn version(prefix: &IpPrefix) -> u16 {
    match prefix.first().is_ipv4() {
        true => IPV4,
        false => IPV6,
    }
}

/// The name of an IP protocol, or its number if it has no name here.
#[must_use]
pub fn protocol_name(protocol: u8) -> String {
    let known = PROTOCOLS.iter().find(|(_, known)| *known == protocol);
    known.map_or_else(|| protocol.to_string(), |(name, _)| (*name).to_owned())
}

/// The IP protocol of that name or number.
///
/// # Errors
/// The text is neither a known name nor a number up to 255.
pub fn protocol(text: &str) -> Result<u8, String> {
    if let Some((_, number)) = PROTOCOLS.iter().find(|(name, _)| *name == text) {
        return Ok(*number);
    }
    let names: Vec<_> = PROTOCOLS.iter().map(|(name, _)| *name).collect();
    text.parse().map_err(|_| {
        format!(
            "{text:?} is not a protocol: give one of {}, or a number up to 255",
            names.join(", ")
        )
    })
}

/// Port ranges (first, last), in ascending order, disjoint and not adjacent.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Ports(Vec<(u16, u16)>);

impl Written for Ports {
    const MEANT: &'static str = "a list such as [22, \"8000-8100\"], or text in quotes";
    const NUMBER: bool = true;
    const WRITES_NUMBER: bool = false;
    const JOINT: Option<char> = Some(',');

    /// Numbers and ranges, joined by commas, or by `+` where commas have another meaning.
    fn read(text: &str) -> Result<Self, String> {
        let wrong = |_| format!("{text:?} is not a list of ports such as 22,80,8000-8100, of 0 to 65535");
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
                "{} ranges of ports, a rule has {MOST_RANGES} at most: make it two rules",
                ranges.len()
            )),
            false => Ok(Self(ranges)),
        }
    }

    fn text(&self) -> String {
        let range = |&(first, last): &(u16, u16)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        joined(self.0.iter().map(range), ",")
    }
}

impl Ports {
    fn intervals(ports: Option<&Self>) -> Intervals {
        ports.map_or(vec![(0, NO_PORT)], |Self(ranges)| {
            let wide = |&(first, last): &(u16, u16)| (first.into(), last.into());
            ranges.iter().map(wide).collect()
        })
    }
}

/// ICMP type, and code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct IcmpType(u8, Option<u8>);

impl Written for IcmpType {
    const MEANT: &'static str = "a type such as 8, or type and code in quotes such as \"3/4\"";
    const NUMBER: bool = true;
    const WRITES_NUMBER: bool = false;

    fn read(text: &str) -> Result<Self, String> {
        let wrong = |_| format!("{text:?} is not an ICMP type, or type and code, such as 8 or 3/4");
        let (kind, code) = text.split_once('/').map_or((text, None), |(a, b)| (a, Some(b)));
        let code = code.map(str::parse).transpose().map_err(wrong)?;
        Ok(Self(kind.parse().map_err(wrong)?, code))
    }

    fn text(&self) -> String {
        match self.1 {
            Some(code) => format!("{}/{code}", self.0),
            None => self.0.to_string(),
        }
    }
}

/// The mark of a flow; never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FlowMark(u32);

impl Written for FlowMark {
    const MEANT: &'static str = "a number of 1 to 4294967295";
    const NUMBER: bool = true;

    fn read(text: &str) -> Result<Self, String> {
        let digits = text.strip_prefix("0x");
        let number = digits.map_or_else(|| text.parse(), |digits| u32::from_str_radix(digits, 16));
        let number = number.ok().filter(|&number| number > 0).map(Self);
        number.ok_or_else(|| format!("{text:?} is not {}", Self::MEANT))
    }

    fn text(&self) -> String {
        self.0.to_string()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Vec<Rule>, String> {
        rules(value).map_err(|error| error.to_string())
    }

    #[test]
    fn rules_are_the_same_however_they_are_written() {
        let tables = json!([
            {
                "direction": "from-guest", "action": "allow", "protocol": "tcp",
                "destination-ports": [443, "80-81"], "frames": 7,
            },
            {"action": "deny", "direction": "to-guest", "source": "10.0.0.0/8", "mark": 9},
        ]);
        let text = "direction=from-guest action=allow protocol=tcp destination-ports=80-81,443\n\
                    direction=to-guest action=deny source=10.0.0.0/8 mark=9";
        let rules = read(tables).expect("possible");
        let words: Vec<String> = rules.iter().map(Rule::to_string).collect();
        assert_eq!(words.join("\n"), text);
        assert_eq!(read(json!(text.replace('\n', " ; "))), Ok(rules.clone()));
        assert_eq!(read(json!(rules)), Ok(rules));
    }

    #[test]
    fn too_many_rules_are_refused() {
        let rule = json!({"direction": "from-guest", "action": "allow"});
        for rules in [
            json!(vec![rule; MOST_RULES + 1]),
            json!("direction=from-guest action=allow;".repeat(MOST_RULES + 1)),
        ] {
            let error = read(rules).expect_err("too many");
            assert!(error.contains("10000 rules at most"), "{error}");
        }
    }
}
