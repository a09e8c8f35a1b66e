//! The policy of the steward: who may lease which queues.
//!
//! ```toml
//! [limits]
//! connections = 64
//!
//! [[allow]]
//! user = "vhost"
//! interface = "eth1"
//! queues = "2-5,8"
//! ```
//!
//! Each key is described once, by its field here: docs/keys.md is generated from these types. Combinations of keys
//! are checked here; the steward resolves names of users and groups.

use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::num::{NonZeroU16, NonZeroU32};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use toml::de::{DeTable, DeValue};

use crate::config::Prefixes;
use crate::config::Table;
use crate::config::file::{Entry, WrongLine, entry, tables, wrong_at};
use crate::config::table::{table, write_block};
use crate::config::values::{Account, Mac, Size, Vlans, Words, Written, joined, written};
use crate::text::{ranges, ranges_text};

/// The highest queue of an interface that can be leased.
pub const LAST_QUEUE: u32 = 255;

/// A policy file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicyFile {
    /// `[limits]`.
    pub limits: Entry<Limits>,
    /// Each `[[allow]]`, in the order of the file.
    pub rules: Vec<Entry<Allow>>,
}

impl PolicyFile {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// [`WrongLine`]: the text is not TOML, a key is unknown, or its value is not possible.
    pub fn parse(text: &str) -> Result<Self, WrongLine> {
        let mut file = Self::default();
        for (key, value) in tables(text)?.get_ref() {
            let wrong = |what: &str| Err(wrong_at(text, &key.span(), what.to_owned()));
            match (key.get_ref().as_ref(), value.get_ref()) {
                ("limits", DeValue::Table(table)) => file.limits = entry(text, "", key.span(), table)?,
                ("limits", _) => return wrong("limits: give keys and values below one line `[limits]`"),
                ("allow", DeValue::Array(rules)) => {
                    for (number, rule) in (1..).zip(rules) {
                        let DeValue::Table(table) = rule.get_ref() else {
                            return wrong("allow: give each rule below a line `[[allow]]`");
                        };
                        file.rules.push(rule_of(text, number, rule.span().start, table)?);
                    }
                }
                ("allow", _) => return wrong("allow: give each rule below a line `[[allow]]`"),
                (other, _) => return wrong(&format!("unknown table {other:?}: one of [limits], [[allow]]")),
            }
        }
        Ok(file)
    }
}

impl Display for PolicyFile {
    /// All keys that are set, and the defaults of others.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_block(f, "limits", &self.limits.value.lines())?;
        for rule in &self.rules {
            write_block(f, &format!("\n{}", rule.name), &rule.value.lines())?;
        }
        if self.rules.is_empty() {
            return writeln!(f, "\nno rule: nobody may lease anything");
        }
        write_block(f, "\ndefaults of limits", &Limits::defaults())?;
        write_block(f, "\ndefaults of rules", &Allow::defaults())
    }
}

fn rule_of(text: &str, number: usize, start: usize, table: &DeTable<'_>) -> Result<Entry<Allow>, WrongLine> {
    let name = format!("rule {number}");
    entry(text, &name, start..start, table).map_err(|wrong| WrongLine {
        what: format!("{name}: {}", wrong.what),
        ..wrong
    })
}

/// Limits of one user.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub struct Limits {
    /// Connections and sockets.
    #[serde(flatten)]
    pub sockets: SocketLimits,
}

table! {
    Limits { sockets }

    fn table_with(key: &str) -> Option<&'static str> {
        Allow::schema().contains_key(key).then_some("[[allow]]")
    }
}

/// Connections to the steward, and the sockets that lessees get.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default)]
pub struct SocketLimits {
    /// Connections of one user at a time, 1 to 900; all users together have 900 [default: 64]
    pub connections: Option<NonZeroU32>,
    /// Give leases also before Linux 6.4, where lessees bind their sockets themselves: a lessee could bind such a
    /// socket to another free queue
    pub unbound_sockets: bool,
}

/// A rule. The first rule that allows the whole request counts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
pub struct Allow {
    /// The processes that may lease.
    #[serde(flatten)]
    pub lessee: Lessee,
    /// Which queues.
    #[serde(flatten)]
    pub queues: QueueRule,
    /// AF_XDP leases.
    #[serde(flatten)]
    pub af_xdp: AfXdpRule,
    /// Leases for zero-copy receive.
    #[serde(flatten)]
    pub zcrx: ZcrxRule,
}

table! {
    Allow { lessee, queues, af_xdp, zcrx }

    fn table_with(key: &str) -> Option<&'static str> {
        Limits::schema().contains_key(key).then_some("[limits]")
    }
}

/// How keys fit together.
impl Allow {
    /// Checks that no key excludes another one, or needs one that is missing.
    ///
    /// # Errors
    /// The keys that do not fit together, and the remedy.
    pub fn check_combination(&self) -> Result<(), String> {
        let zcrx = &self.zcrx;
        let wrong = match (&zcrx.zcrx, zcrx.af_xdp) {
            (None, Some(false)) => {
                "af-xdp = false: nothing could be leased: add `zcrx`, or leave the rule out"
            }
            (None, _) if zcrx.zcrx_setup == Some(true) => {
                "zcrx-setup = true: it needs `zcrx`: add that, or leave it out"
            }
            _ if self.af_xdp.host == Some(true) && !self.af_xdp.network => {
                "host = true: it needs `network = true`: add that, or leave it out"
            }
            _ if self.af_xdp.advertise && (!self.af_xdp.network || self.af_xdp.host == Some(false)) => {
                "advertise = true: it needs `network = true`, without `host = false`: change that, or leave it out"
            }
            _ if self.af_xdp.ips.is_some() && !self.af_xdp.advertise => {
                "ips: it needs `advertise = true`: add that, or leave it out"
            }
            (Some(_), Some(false)) => match self.keys_of_af_xdp().first() {
                Some(key) => {
                    return Err(format!(
                        "{key}: with af-xdp = false it has no effect: leave one of the two out"
                    ));
                }
                None => return Ok(()),
            },
            _ => return Ok(()),
        };
        Err(wrong.to_owned())
    }

    /// Warnings about keys that may not do what their author expects.
    pub fn doubts(&self) -> impl Iterator<Item = String> {
        self.doubt_about_af_xdp()
            .into_iter()
            .chain(self.flow_named_twice())
    }

    /// The keys that apply to AF_XDP leases only.
    fn keys_of_af_xdp(&self) -> Vec<String> {
        let of_others = Self {
            af_xdp: Default::default(),
            ..self.clone()
        };
        self.differences(&of_others)
    }

    /// A warning about keys that do not limit zero-copy receive, though their author may expect it.
    fn doubt_about_af_xdp(&self) -> Option<String> {
        let keys = self.keys_of_af_xdp();
        (self.zcrx.zcrx.is_some() && self.zcrx.af_xdp.is_none() && !keys.is_empty()).then(|| {
            format!(
                "{}: with `zcrx` this limits AF_XDP leases of the queues, not zero-copy receive: add `af-xdp = true` \
                 if both are wanted, or give `zcrx` a rule of its own with `af-xdp = false`",
                keys.join(", ")
            )
        })
    }

    /// A warning about a flow that the rule names more than once.
    fn flow_named_twice(&self) -> Option<String> {
        let Flows(flows) = self.zcrx.zcrx.as_ref()?;
        let mut named = BTreeSet::new();
        let flow = flows.iter().find(|&flow| !named.insert(flow))?;
        Some(format!("zcrx: {flow} is there twice: leave one out"))
    }
}

/// Who may lease; with both keys a process must match both.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default)]
pub struct Lessee {
    /// User of the lessee, a name, or a number of 0 to 4294967294
    #[schemars(with = "Option<Account>")]
    pub user: Option<NameOrNumber>,
    /// Group of the lessee or one of its (at most 4096) supplementary groups, a name, or a number of 0 to 4294967294
    #[schemars(with = "Option<Account>")]
    pub group: Option<NameOrNumber>,
}

/// Queues that may be leased.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default)]
pub struct QueueRule {
    /// Network interface
    pub interface: Option<String>,
    /// Queues of the interface, for instance 2-5,8, or all
    pub queues: Option<QueueNumbers>,
    /// Most queues that are leased under this rule at a time [default: all of them]
    pub at_most: Option<NonZeroU32>,
    /// Memory of a user's sockets, for instance 256 MiB, or unlimited. It must cover 6 MiB for each queue pair, with
    /// memory=direct and send-direct guest RAM and 768 KiB or 4.4 MiB for each pair. Lessees of one user share it
    /// [default: 16 MiB for each leased queue]
    pub memlock: Option<Memlock>,
}

/// AF_XDP leases of the queues.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default)]
pub struct AfXdpRule {
    /// Unicast addresses: a lease must name some, and only these [default: any or none]
    pub macs: Option<Macs>,
    /// VLANs: a lease must name some, and only these; 0: untagged frames [default: any or none]
    pub vlans: Option<Vlans>,
    /// Allow leases of networks. If the rule has `macs` or `vlans`, guests of such a network may only use these MAC
    /// addresses and VLANs. The host's own addresses are rejected unless `macs` names them
    pub network: bool,
    /// Allow these networks to reach the host [default: as `network`]
    pub host: Option<bool>,
    /// Allow these networks to advertise MAC addresses of their guests to other hosts. Needs `network`, and the host
    pub advertise: bool,
    /// With `advertise`: IP addresses and networks that may be advertised, too [default: none]
    pub ips: Option<Prefixes>,
    /// Allow queues to be leased to netkit devices [default: false]
    pub netkit: Option<bool>,
    /// Hints of the NIC that leases may use, as option --hints names them; or none [default: all]
    pub hints: Option<Words>,
    /// Allow sockets to busy-poll the driver, at most this many frames at a time [default: no]
    pub busy_poll: Option<NonZeroU16>,
}

/// Leases of the queues for io_uring zero-copy receive.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", default)]
pub struct ZcrxRule {
    /// Allow zero-copy receive of connections to these addresses, for instance 192.0.2.1:443 [default: none]
    pub zcrx: Option<Flows>,
    /// With `zcrx`: allow the steward to set up the NIC: split headers from data, change the main RSS table [default:
    /// false]
    pub zcrx_setup: Option<bool>,
    /// With `zcrx`: false: no AF_XDP leases of these queues [default: true]
    pub af_xdp: Option<bool>,
}

/// A user or a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "give a name in quotes, or a number of 0 to 4294967294")]
pub enum NameOrNumber {
    /// By number.
    Number(u32),
    /// By name, or by number in quotes.
    Name(String),
}

written!(QueueNumbers, Memlock, Macs, Flows);

/// Queues of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueNumbers(pub Vec<u32>);

impl Written for QueueNumbers {
    const MEANT: &'static str = "numbers and ranges in quotes such as \"0-3,6\", or \"all\"";

    fn read(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Self((0..=LAST_QUEUE).collect()));
        }
        let numbers = ranges(text, LAST_QUEUE).map(Self);
        numbers.ok_or_else(|| {
            format!(
                "not a list of queues: give numbers and ranges such as 0-3,6, of 0 to {LAST_QUEUE}, or \"all\""
            )
        })
    }

    fn text(&self) -> String {
        ranges_text(self.0.iter().copied())
    }
}

/// How much memory may be locked, bytes; `u64::MAX`: any amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memlock(pub u64);

impl Written for Memlock {
    const MEANT: &'static str = "a size in quotes such as \"64 MiB\", or \"unlimited\"";

    fn read(text: &str) -> Result<Self, String> {
        let wrong = || format!("give {}", Self::MEANT);
        match text.trim() {
            "unlimited" => Ok(Self(u64::MAX)),
            bytes if bytes.ends_with(|c: char| c.is_ascii_digit()) => Err(wrong()),
            size => match size.parse() {
                Ok(Size(0)) => Err(
                    "nothing could be locked: a queue pair takes 6 MiB (with memory=direct all guest RAM); without \
                     `memlock` it is 16 MiB for each queue"
                        .to_owned(),
                ),
                Ok(Size(bytes)) => Ok(Self(bytes)),
                Err(_) => Err(wrong()),
            },
        }
    }

    fn text(&self) -> String {
        match self.0 {
            u64::MAX => "unlimited".to_owned(),
            bytes => Size(bytes).text(),
        }
    }
}

/// Unicast MAC addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Macs(pub Vec<[u8; 6]>);

impl Written for Macs {
    const MEANT: &'static str = "a list such as [\"52:54:00:00:00:01\"], or text in quotes";
    const JOINT: Option<char> = Some(',');

    fn read(text: &str) -> Result<Self, String> {
        list(text, |word| word.parse().map(|Mac(mac)| mac)).map(Self)
    }

    fn text(&self) -> String {
        joined(self.0.iter().map(|&mac| Mac(mac)), ",")
    }
}

/// Local ends of TCP connections.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flows(pub Vec<SocketAddr>);

impl Written for Flows {
    const MEANT: &'static str = "a list such as [\"192.0.2.1:443\"], or text in quotes";
    const JOINT: Option<char> = Some(',');

    fn read(text: &str) -> Result<Self, String> {
        list(text, flow).map(Self)
    }

    fn text(&self) -> String {
        joined(&self.0, ",")
    }
}

fn flow(text: &str) -> Result<SocketAddr, String> {
    let wrong =
        |why: &str| format!("{why}: give an address and a port such as 192.0.2.1:443 or [2001:db8::1]:443");
    let flow: SocketAddr = text.parse().map_err(|_| wrong("not an address with a port"))?;
    let ip = flow.ip();
    match () {
        () if flow.port() == 0 => Err(wrong("no connection ends at port 0")),
        () if ip.is_unspecified() => Err(wrong("a NIC finds frames by one address")),
        () if ip.is_multicast() => Err(wrong("TCP has no multicast")),
        // Drops the IPv6 scope, which a lease does not have.
        () => Ok(SocketAddr::new(ip, flow.port())),
    }
}

/// Reads words joined by commas. An empty list is rejected: it does not mean "any".
fn list<T>(text: &str, one: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    if text.is_empty() {
        return Err("nothing could be leased: give some, or leave the key out".to_owned());
    }
    let one = |word: &str| one(word.trim()).map_err(|what| format!("{word:?}: {what}"));
    text.split(',').map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Table;

    #[test]
    fn keys_are_read_as_they_are_written() {
        for (key, value) in [
            ("queues", "0-3,6"),
            ("memlock", "unlimited"),
            ("memlock", "64MiB"),
            ("macs", "52:54:00:00:00:01,52:54:00:00:00:02"),
            ("zcrx", "192.0.2.1:443,[2001:db8::1]:443"),
        ] {
            let keys = serde_json::Map::from_iter([(key.to_owned(), value.into())]);
            let rule = Allow::read(keys.clone()).expect(value);
            assert_eq!(rule.keys(), keys);
        }
    }
}
