//! What a policy's text says: TOML, and rules that can be.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use steer::{HintSet, LAST_VLAN, MAX_QUEUES};
use toml::Spanned;

use super::{CONNECTIONS, CONNECTIONS_MAX, Policy, PolicyError, Rule, zcrx};
use crate::protocol::is_interface_name;
use model::mistakes::{cut, line_of, quoted};
use program::users;

/// The number that chown(2) takes for none.
const NOBODY_AT_ALL: u32 = u32::MAX;

/// What belongs to each key, told to who wrote something else.
const MEANT: [(&str, &str); 20] = [
    ("user", "a name in quotes, or a number of 0 to 4294967294"),
    ("group", "a name in quotes, or a number of 0 to 4294967294"),
    ("interface", "a name in quotes such as \"eth1\""),
    (
        "queues",
        "numbers and ranges in quotes such as \"0-3,6\", or \"all\"",
    ),
    ("at-most", "a number of queues such as 4"),
    ("memlock", "a size in quotes such as \"64 MiB\", or \"unlimited\""),
    (
        "macs",
        "a list of addresses in quotes such as [\"52:54:00:00:00:01\"]",
    ),
    (
        "vlans",
        "a list of numbers and ranges in quotes such as [\"100\", \"200-299\"]",
    ),
    ("busy-poll", "a number of frames, 1 to 65535, such as 64"),
    (
        "hints",
        "some of hash, vlan, timestamp and mark in quotes such as \"hash,vlan\", or \"none\"",
    ),
    ("network", "true or false"),
    (
        "zcrx",
        "a list of addresses and ports in quotes such as [\"192.0.2.1:443\"]",
    ),
    ("zcrx-setup", "true or false"),
    ("af-xdp", "true or false"),
    ("host", "true or false"),
    ("netkit", "true or false"),
    ("connections", "a number of 1 to 900"),
    ("unbound-sockets", "true or false"),
    ("allow", "a rule below each line `[[allow]]`"),
    ("limits", "keys and values below a line `[limits]`"),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    limits: Limits,
    #[serde(default)]
    allow: Vec<Spanned<Allow>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Limits {
    connections: Option<Spanned<u32>>,
    #[serde(default)]
    unbound_sockets: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Allow {
    user: Option<NameOrNumber>,
    group: Option<NameOrNumber>,
    interface: Option<String>,
    queues: Option<String>,
    at_most: Option<u32>,
    memlock: Option<String>,
    macs: Option<Vec<String>>,
    vlans: Option<Vec<String>>,
    #[serde(default)]
    network: bool,
    host: Option<bool>,
    netkit: Option<bool>,
    hints: Option<String>,
    busy_poll: Option<u16>,
    zcrx: Option<Vec<String>>,
    zcrx_setup: Option<bool>,
    af_xdp: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NameOrNumber {
    Number(u32),
    Name(String),
}

impl Policy {
    /// Reads and checks a policy's text; `path` is for errors.
    /// Errors: [`PolicyError`], naming the place.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, PolicyError> {
        let wrong = |place: Option<Range<usize>>, what| PolicyError::Syntax {
            path: path.to_owned(),
            line: place.map(|place| line_of(text, place.start)),
            what,
        };
        let file: File = toml::from_str(text).map_err(|error| wrong(error.span(), in_words(text, &error)))?;
        let (mut rules, mut warnings) = (Vec::new(), Vec::new());
        for (rule, allow) in (1..).zip(file.allow) {
            let place = allow.span();
            let of_rule = |what| wrong(Some(place.clone()), format!("rule {rule}: {what}"));
            let doubt = allow.get_ref().doubt();
            let checked = allow.into_inner().check().map_err(of_rule)?;
            let doubts = doubt.into_iter().chain(zcrx::double(&checked.zcrx));
            warnings.extend(doubts.map(|what| of_rule(what).to_string()));
            rules.push(checked);
        }
        Ok(Self {
            connections: match file.limits.connections {
                Some(said) => connections(&said).map_err(|what| wrong(Some(said.span()), what))?,
                None => CONNECTIONS,
            },
            unbound: file.limits.unbound_sockets,
            rules,
            warnings,
        })
    }
}

/// What is wrong with the text, with what is written there. Of a value of another kind the parser names neither its key
/// nor what belongs there.
fn in_words(text: &str, error: &toml::de::Error) -> String {
    let of_a_value = ["invalid type", "invalid value", "data did not match"];
    if let Some(span) = error.span()
        && of_a_value.iter().any(|kind| error.message().starts_with(kind))
        && let Some(words) = of_value(&text[..span.start], &text[span.clone()])
    {
        return words;
    }
    quoted(text, error.span(), error.message())
}

/// What belongs in the place of a value, by what is written before it.
fn of_value(before: &str, value: &str) -> Option<String> {
    let value = value.lines().next().unwrap_or_default().trim_end();
    match value {
        "[allow]" => {
            return Some("[allow]: a rule begins with `[[allow]]`, as there may be several".to_owned());
        }
        "[[limits]]" => {
            return Some("[[limits]]: limits begin with `[limits]`, as they are for all".to_owned());
        }
        _ => {}
    }
    let word = |until: usize| {
        let is_of_none = |c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
        before[..until]
            .trim_end()
            .rsplit(is_of_none)
            .next()
            .unwrap_or_default()
    };
    let key = |(at, _): (usize, &str)| MEANT.iter().find(|(key, _)| *key == word(at));
    let (key, meant) = before.rmatch_indices('=').find_map(key)?;
    let joint = if before.trim_end().ends_with('=') {
        " ="
    } else {
        ":"
    };
    Some(format!("{key}{joint} {}: give {meant}", cut(value)))
}

fn connections(said: &Spanned<u32>) -> Result<u32, String> {
    match *said.get_ref() {
        0 => Err("connections = 0: nobody could connect: give 1 or more, or leave it out".to_owned()),
        number @ 1..=CONNECTIONS_MAX => Ok(number),
        more => Err(format!(
            "connections = {more}: a steward has {CONNECTIONS_MAX} in all: give {CONNECTIONS_MAX} or less, or leave it \
             out"
        )),
    }
}

impl Allow {
    fn check(self) -> Result<Rule, String> {
        if self.user.is_none() && self.group.is_none() {
            return Err(
                "it names neither user nor group: add `group = \"vhost-af-xdp\"`, or a `user`".to_owned(),
            );
        }
        self.check_values()?;
        let missing = |what: &str, example: &str| format!("it says no {what}: add `{what} = {example}`");
        let interface = self.interface.ok_or_else(|| missing("interface", "\"eth1\""))?;
        let queues = self
            .queues
            .ok_or_else(|| missing("queues", "\"0-3\"` or `queues = \"all\""))?;
        if !is_interface_name(&interface) {
            return Err(format!(
                "interface = {interface:?}: it is not a name of one: `ip link` lists them"
            ));
        }
        let queues = queue_numbers(&queues)?;
        let macs = named("macs", "all", self.macs)?;
        let vlans = vlan_numbers(self.vlans)?;
        let zcrx = zcrx::flows(&named("zcrx", "no zero-copy receive", self.zcrx)?)?;
        Ok(Rule {
            user: self
                .user
                .map(|user| user.number("user", |name| Some(users::user_numbers(name)?.uid)))
                .transpose()?,
            group: self
                .group
                .map(|group| group.number("group", users::group_number))
                .transpose()?,
            interface,
            af_xdp: self.af_xdp.unwrap_or(true),
            at_most: self.at_most.unwrap_or(MAX_QUEUES),
            queues,
            memlock: self.memlock.map(|text| size(&text)).transpose()?,
            macs: macs.iter().map(|text| mac(text)).collect::<Result<_, _>>()?,
            vlans,
            network: self.network,
            host: self.network && self.host.unwrap_or(true),
            netkit: self.netkit.unwrap_or(false),
            hints: match self.hints {
                Some(text) => text.parse().map_err(|error| format!("hints: {error}"))?,
                None => HintSet::ALL,
            },
            busy_poll: self.busy_poll,
            zcrx,
            zcrx_setup: self.zcrx_setup.unwrap_or(false),
        })
    }

    /// Errors: what cannot be meant so.
    fn check_values(&self) -> Result<(), String> {
        if self.at_most == Some(0) {
            return Err(
                "at-most = 0: nothing could be leased: give 1 or more, or leave the rule out".to_owned(),
            );
        }
        if self.busy_poll == Some(0) {
            return Err(
                "busy-poll = 0: nothing could be polled for: give 1 or more, or leave it out".to_owned(),
            );
        }
        if self.zcrx_setup == Some(true) && self.zcrx.is_none() {
            return Err("zcrx-setup = true: it goes with `zcrx`: add that, or leave it out".to_owned());
        }
        if self.host == Some(true) && !self.network {
            return Err("host = true: it goes with network = true: add that, or leave it out".to_owned());
        }
        if self.af_xdp == Some(false) {
            if self.zcrx.is_none() {
                return Err(
                    "af-xdp = false: nothing could be leased: add `zcrx`, or leave the rule out".to_owned(),
                );
            }
            if let Some(key) = self.of_af_xdp().first() {
                return Err(format!(
                    "{key}: with af-xdp = false it means nothing: leave one of the two out"
                ));
            }
        }
        Ok(())
    }

    /// The keys in it that count for AF_XDP leases alone.
    fn of_af_xdp(&self) -> Vec<&'static str> {
        let keys = [
            ("macs", self.macs.is_some()),
            ("vlans", self.vlans.is_some()),
            ("network", self.network),
            ("host", self.host.is_some()),
            ("netkit", self.netkit.is_some()),
            ("hints", self.hints.is_some()),
            ("busy-poll", self.busy_poll.is_some()),
        ];
        let said = keys.into_iter().filter(|&(_, is_said)| is_said);
        said.map(|(key, _)| key).collect()
    }

    /// What may be meant otherwise: that keys limit zero-copy receive which do not.
    fn doubt(&self) -> Option<String> {
        let keys = self.of_af_xdp();
        (self.zcrx.is_some() && self.af_xdp.is_none() && !keys.is_empty()).then(|| {
            format!(
                "{}: beside `zcrx` this counts for AF_XDP leases of the queues, not for zero-copy receive: say \
                 `af-xdp = true` if both are meant, or give `zcrx` a rule of its own with `af-xdp = false`",
                keys.join(", ")
            )
        })
    }
}

fn queue_numbers(text: &str) -> Result<BTreeSet<u32>, String> {
    if text == "all" {
        return Ok((0..MAX_QUEUES).collect());
    }
    let numbers = ranges(text, MAX_QUEUES - 1)
        .map_err(|what| format!("queues = {text:?}: {what}; \"all\" for all of them"))?;
    Ok(numbers.into_iter().collect())
}

fn vlan_numbers(lists: Option<Vec<String>>) -> Result<BTreeSet<u32>, String> {
    let mut vlans = BTreeSet::new();
    for list in &named("vlans", "all", lists)? {
        let numbers = ranges(list, LAST_VLAN.into()).map_err(|what| format!("vlans: {list:?}: {what}"))?;
        vlans.extend(numbers);
    }
    Ok(vlans)
}

impl NameOrNumber {
    fn number(self, what: &str, find: impl Fn(&str) -> Option<u32>) -> Result<u32, String> {
        match self {
            Self::Number(NOBODY_AT_ALL) => {
                Err(format!("{what} {NOBODY_AT_ALL}: nobody can have this number"))
            }
            Self::Number(number) => Ok(number),
            // As chown(1) has it: a name first, then a number.
            Self::Name(name) => find(&name)
                .or_else(|| name.parse().ok().filter(|&number| number != NOBODY_AT_ALL))
                .ok_or_else(|| format!("there is no {what} {name:?}: make it, or give its number")),
        }
    }
}

/// What a list names; one that names nothing looks like "none". `without` says what it is to have no list.
fn named(key: &str, without: &str, list: Option<Vec<String>>) -> Result<Vec<String>, String> {
    match list {
        Some(list) if list.is_empty() => Err(format!(
            "{key} = []: nothing could be leased: name some, or leave `{key}` out, which allows {without}"
        )),
        list => Ok(list.unwrap_or_default()),
    }
}

/// Numbers and ranges such as `0-3,6`.
fn ranges(text: &str, last: u32) -> Result<Vec<u32>, String> {
    steer::ranges(text, last)
        .ok_or_else(|| format!("numbers and ranges such as 0-3,6 are meant, of 0 to {last}"))
}

/// Bytes, such as `64 MiB`.
fn size(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("memlock = {text:?}: a size such as \"64 MiB\" (KiB, MiB, GiB) or \"unlimited\" is meant");
    if text == "unlimited" {
        return Ok(u64::MAX);
    }
    let (number, unit) = text.trim().split_once(' ').ok_or_else(wrong)?;
    let shift = match unit.trim() {
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    if number == 0 {
        return Err(format!(
            "memlock = {text:?}: nothing could be locked: a queue pair takes 6 MiB (with memory=direct all guest RAM); \
             without `memlock` it is 16 MiB for each queue"
        ));
    }
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

fn mac(text: &str) -> Result<[u8; 6], String> {
    let why = match steer::mac_bytes(text) {
        None => "it is not an address",
        // Bit 0 of the first byte (IEEE 802).
        Some([first, ..]) if first & 1 != 0 => "it is the address of a group of stations, not of one",
        Some([0, 0, 0, 0, 0, 0]) => "no station can have it",
        Some(mac) => return Ok(mac),
    };
    Err(format!(
        "macs: {text:?}: {why}: name one such as 52:54:00:00:00:01"
    ))
}
