//! The policy file: who may lease what.
//!
//! ```toml
//! [limits]
//! connections = 64              # of one user at a time; 64 if not said
//! unconfined-sockets = false    # true: give leases also on a kernel that does not confine AF_XDP sockets to their interface
//!
//! [[allow]]
//! user = "vhost"                # name or number; or group, or both, then both must fit
//! group = "kvm"                 # the holder's group or one of its supplementary groups
//! interface = "eth1"
//! queues = "2-5,8"              # or "all"
//! at-most = 4                   # queues leased under this rule at a time; all of them if not said
//! memlock = "256 MiB"           # locked memory that a holder's process may be given in all; "unlimited"; nothing is raised if not said
//! macs = ["52:54:00:00:00:01"]  # a lease must be for addresses, all of them among these; any or none if not said
//! vlans = ["100", "200-299"]    # the same for VLANs; 0: frames without one
//! ```
//!
//! The NIC itself is told to bring frames to leased queues, away from others', only by rules for an address that the policy's
//! rule names, or for a VLAN that it names and that is not 0: otherwise a holder could take the host's own frames by asking for
//! the host's address (with VLAN 0 the NIC would bring it all of the host's frames, whatever VLANs are named beside).
//!
//! The first rule that allows the whole request counts, and the lease is charged to it. What no rule allows is refused; keys that are not
//! known are an error, so that a misspelt limit is not taken for none.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use steer::{Filter, LAST_VLAN, MAX_QUEUES};

use crate::hardware::Names;
use crate::protocol::{Reason, Refusal, Wanted};
use crate::sys::Credentials;
use crate::users;

/// Connections of one user at a time, if the policy does not say.
const CONNECTIONS: u32 = 64;

/// The number that chown(2) takes for none.
const NOBODY_AT_ALL: u32 = u32::MAX;

/// Connections of a rule beside those that have its queues.
const ASKING: usize = 16;

/// Longest file that is read, bytes: thousands of rules.
const LONGEST: u64 = 1 << 20;

/// Why there is no policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// Not readable.
    #[error("cannot read the policy {}{}", .path.display(), read_remedy(.source))]
    Read {
        /// As given.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// Others could change it.
    #[error(
        "the policy {} can be changed by others (owner {owner}, mode {mode:04o}): it must be owned by root or by the steward's user and be writable by \
         its owner only (`chown root PATH; chmod go-w PATH`)", .path.display()
    )]
    Unsafe {
        /// As given.
        path: PathBuf,
        /// Number of its owner.
        owner: u32,
        /// Its mode.
        mode: u32,
    },
    /// Others could put another one in its place.
    #[error(
        "the policy {} could be replaced by others, who may write to {} (owner {owner}, mode {mode:04o}): move it, or `chown root PATH; chmod go-w PATH` \
         for that directory", .path.display(), .dir.display()
    )]
    UnsafePlace {
        /// As given.
        path: PathBuf,
        /// The directory.
        dir: PathBuf,
        /// Number of its owner.
        owner: u32,
        /// Its mode.
        mode: u32,
    },
    /// Not TOML, or not of this form.
    #[error("{}{}: {what}", .path.display(), .line.map_or_else(String::new, |line| format!(" line {line}")))]
    Syntax {
        /// As given.
        path: PathBuf,
        /// Counted from 1.
        line: Option<usize>,
        /// What is wrong.
        what: String,
    },
    /// A rule that cannot be.
    #[error("{}: rule {rule}: {what}", .path.display())]
    Rule {
        /// As given.
        path: PathBuf,
        /// Counted from 1.
        rule: usize,
        /// What is wrong.
        what: String,
    },
}

/// What to do about a policy that cannot be read.
fn read_remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            " (write one, `vhost-af-xdp-steward --help` shows how, or name another with --policy)"
        }
        io::ErrorKind::PermissionDenied => {
            " (start the steward as root or as its owner, or name another with --policy)"
        }
        io::ErrorKind::InvalidData => " (TOML in UTF-8 is meant)",
        _ => " (name another with --policy)",
    }
}

/// Who may lease what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Connections of one user at a time.
    pub(crate) connections: u32,
    /// Leases are given also where the kernel does not confine sockets to their interface.
    pub(crate) unconfined: bool,
    pub(crate) rules: Vec<Rule>,
}

/// One `[[allow]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rule {
    user: Option<u32>,
    group: Option<u32>,
    pub(crate) interface: String,
    queues: BTreeSet<u32>,
    at_most: u32,
    /// Bytes; `None`: nothing is raised.
    pub(crate) memlock: Option<u64>,
    macs: Vec<[u8; 6]>,
    vlans: BTreeSet<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    limits: Limits,
    #[serde(default)]
    allow: Vec<Allow>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Limits {
    connections: Option<u32>,
    #[serde(default)]
    unconfined_sockets: bool,
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
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a user or group is meant: a name in quotes, or a number of 0 to 4294967294"
)]
enum NameOrNumber {
    Number(u32),
    Name(String),
}

impl Policy {
    /// Reads and checks the file.
    ///
    /// # Errors
    /// [`PolicyError`], naming the place.
    pub fn read(path: &Path) -> Result<Self, PolicyError> {
        let read = |source| PolicyError::Read {
            path: path.to_owned(),
            source,
        };
        // A FIFO would keep us waiting for somebody who writes to it, and with us all holders.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let opened = fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        if !metadata.is_file() {
            return Err(read(io::Error::other("it is not a regular file")));
        }
        let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
        if !is_trusted(owner) || mode & 0o022 != 0 {
            return Err(PolicyError::Unsafe {
                path: path.to_owned(),
                owner,
                mode,
            });
        }
        check_place(path)?;
        let mut text = String::new();
        file.take(LONGEST + 1).read_to_string(&mut text).map_err(read)?;
        if text.len() as u64 > LONGEST {
            return Err(read(io::Error::other(format!(
                "it is longer than {} KiB",
                LONGEST / 1024
            ))));
        }
        Self::parse(path, &text)
    }

    /// Whether leases are given also where the kernel does not confine sockets to their interface.
    #[must_use]
    pub fn accepts_unconfined(&self) -> bool {
        self.unconfined
    }

    /// Whether a rule lets locked-memory limits be raised.
    #[must_use]
    pub fn raises_memlock(&self) -> bool {
        self.rules.iter().any(|rule| rule.memlock.is_some())
    }

    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, PolicyError> {
        let file: File = toml::from_str(text).map_err(|error| PolicyError::Syntax {
            path: path.to_owned(),
            line: error
                .span()
                .map(|span| 1 + text[..span.start].matches('\n').count()),
            what: error.message().replace('\n', " "),
        })?;
        let mut rules = Vec::new();
        for (rule, allow) in (1..).zip(file.allow) {
            let checked = allow.check().map_err(|what| PolicyError::Rule {
                path: path.to_owned(),
                rule,
                what,
            })?;
            rules.push(checked);
        }
        if file.limits.connections == Some(0) {
            return Err(PolicyError::Syntax {
                path: path.to_owned(),
                line: None,
                what: "connections = 0: nobody could connect: give 1 or more, or leave it out".to_owned(),
            });
        }
        Ok(Self {
            connections: file.limits.connections.unwrap_or(CONNECTIONS),
            unconfined: file.limits.unconfined_sockets,
            rules,
        })
    }

    /// A policy without a file, for a steward that serves one daemon: these queues (interface, first, how many) to this user, and as much
    /// locked memory as it asks for.
    #[must_use]
    pub fn for_one(user: u32, queues: Vec<(String, u32, u32)>) -> Self {
        let rule = |(interface, first, count): (String, u32, u32)| Rule {
            user: Some(user),
            group: None,
            interface,
            queues: (first..first.saturating_add(count)).collect(),
            at_most: MAX_QUEUES,
            memlock: Some(u64::MAX),
            macs: Vec::new(),
            vlans: BTreeSet::new(),
        };
        Self {
            connections: u32::MAX,
            unconfined: true,
            rules: queues.into_iter().map(rule).collect(),
        }
    }

    /// The rules that are for this user.
    pub(crate) fn rules_for(&self, peer: &Credentials) -> impl Iterator<Item = usize> {
        let rules = self.rules.iter().enumerate();
        rules
            .filter(|(_, rule)| rule.is_for(peer))
            .map(|(index, _)| index)
    }

    /// Connections that a rule has room for: one for each queue that can be leased under it at a time, and some for those who
    /// only ask.
    pub(crate) fn places(&self, rule: usize) -> usize {
        let queues = |rule: &Rule| rule.queues.len().min(rule.at_most as usize);
        self.rules.get(rule).map_or(0, queues) + ASKING
    }

    /// What a rule names, of which the NIC may be told.
    pub(crate) fn names(&self, rule: usize) -> Names {
        let names = |rule: &Rule| Names {
            macs: rule.macs.clone(),
            vlans: rule.vlans.clone(),
        };
        self.rules.get(rule).map(names).unwrap_or_default()
    }

    /// The first rule that allows all that is wanted; `leased` says how many queues are leased under a rule.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn find(
        &self,
        peer: &Credentials,
        wanted: &Wanted,
        leased: impl Fn(usize) -> u32,
    ) -> Result<usize, Refusal> {
        let mut refusal = Refusal::new(
            Reason::NotAllowed,
            format!(
                "user {} may not lease queues of {}: the policy has no rule for that",
                peer.uid, wanted.interface
            ),
        );
        let filter = &wanted.filter;
        for (index, rule) in self.rules.iter().enumerate() {
            if !rule.is_for(peer) || rule.interface != wanted.interface {
                continue;
            }
            let (leased, may) = (leased(index), Ranges(&rule.queues));
            if let Some(queue) = wanted.range().find(|queue| !rule.queues.contains(queue)) {
                refusal.text = format!(
                    "user {} may not lease queue {queue} of {}: the policy allows it {may}",
                    peer.uid, wanted.interface
                );
            } else if let Some(why) = rule.check_macs(filter).or_else(|| rule.check_vlans(filter)) {
                refusal.text = format!("user {} on {}: {why}", peer.uid, wanted.interface);
            } else if leased.saturating_add(wanted.queues) > rule.at_most {
                refusal.text = format!(
                    "the policy allows {} queue(s) of {} at a time, {leased} are leased, {} more were asked for: raise `at-most` of rule {}",
                    rule.at_most,
                    wanted.interface,
                    wanted.queues,
                    index + 1
                );
            } else {
                return Ok(index);
            }
        }
        Err(refusal)
    }
}

impl Rule {
    fn is_for(&self, peer: &Credentials) -> bool {
        let in_group = |group| peer.gid == group || peer.groups.contains(&group);
        self.user.is_none_or(|user| user == peer.uid) && self.group.is_none_or(in_group)
    }

    /// Why not these addresses.
    fn check_macs(&self, filter: &Filter) -> Option<String> {
        if self.macs.is_empty() {
            return None;
        }
        let may = || {
            self.macs
                .iter()
                .map(|&mac| mac_text(mac))
                .collect::<Vec<_>>()
                .join(", ")
        };
        match filter.macs.iter().find(|mac| !self.macs.contains(mac)) {
            Some(&mac) => Some(format!(
                "the policy does not allow MAC {}, it allows {}",
                mac_text(mac),
                may()
            )),
            None if filter.macs.is_empty() => Some(format!(
                "the policy allows frames of certain addresses only: ask for one of {} (--mac)",
                may()
            )),
            None => None,
        }
    }

    /// Why not these VLANs.
    fn check_vlans(&self, filter: &Filter) -> Option<String> {
        if self.vlans.is_empty() {
            return None;
        }
        let may = Ranges(&self.vlans);
        match filter
            .vlans
            .iter()
            .find(|&&vlan| !self.vlans.contains(&vlan.into()))
        {
            Some(vlan) => Some(format!("the policy does not allow VLAN {vlan}, it allows {may}")),
            None if filter.vlans.is_empty() => Some(format!(
                "the policy allows frames of certain VLANs only: ask for one of {may} (--vlan)"
            )),
            None => None,
        }
    }
}

impl Allow {
    fn check(self) -> Result<Rule, String> {
        if self.user.is_none() && self.group.is_none() {
            return Err(
                "it says neither user nor group, and a rule for everybody is not meant to be".to_owned(),
            );
        }
        let missing = |what: &str, example: &str| format!("it says no {what}: add `{what} = {example}`");
        let interface = self.interface.ok_or_else(|| missing("interface", "\"eth1\""))?;
        let queues = self
            .queues
            .ok_or_else(|| missing("queues", "\"0-3\"` or `queues = \"all\""))?;
        if self.at_most == Some(0) {
            return Err(
                "at-most = 0: nothing could be leased: give 1 or more, or leave the rule out".to_owned(),
            );
        }
        let possible = (1..16).contains(&interface.len()) && !interface.contains(['/', ' ', ':']);
        if !possible {
            return Err(format!(
                "interface {interface:?} is not a name of one: `ip link` lists them"
            ));
        }
        let queues = match queues.as_str() {
            "all" => (0..MAX_QUEUES).collect(),
            list => ranges(list, MAX_QUEUES - 1).map_err(|what| format!("queues = {list:?}: {what}"))?,
        };
        let macs = named("macs", self.macs)?;
        let mut vlans = BTreeSet::new();
        for list in &named("vlans", self.vlans)? {
            let numbers =
                ranges(list, LAST_VLAN.into()).map_err(|what| format!("vlans: {list:?}: {what}"))?;
            vlans.extend(numbers);
        }
        Ok(Rule {
            user: self
                .user
                .map(|user| user.number("user", |name| Some(users::user_numbers(name)?.0)))
                .transpose()?,
            group: self
                .group
                .map(|group| group.number("group", users::group_number))
                .transpose()?,
            interface,
            at_most: self.at_most.unwrap_or(MAX_QUEUES),
            queues,
            memlock: self.memlock.map(|text| size(&text)).transpose()?,
            macs: macs.iter().map(|text| mac(text)).collect::<Result<_, _>>()?,
            vlans,
        })
    }
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

/// Whether files of this user may say what a steward does.
fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == rustix::process::geteuid().as_raw()
}

/// Whether nobody else can put another file in the place of this one: its directory must be writable for its owner only,
/// those above at least sticky.
fn check_place(path: &Path) -> Result<(), PolicyError> {
    let read = |source| PolicyError::Read {
        path: path.to_owned(),
        source,
    };
    // Both the name that was given and what it leads to.
    let given = std::path::absolute(path).map_err(read)?;
    let real = fs::canonicalize(path).map_err(read)?;
    let above = |path: &Path| {
        let dirs = path.ancestors().skip(1).map(Path::to_owned);
        dirs.collect::<Vec<_>>().into_iter().enumerate()
    };
    for (steps, dir) in above(&given).chain(above(&real)) {
        let metadata = fs::metadata(&dir).map_err(read)?;
        let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
        let sticky = steps > 0 && mode & 0o1000 != 0;
        if !is_trusted(owner) || (mode & 0o022 != 0 && !sticky) {
            return Err(PolicyError::UnsafePlace {
                path: path.to_owned(),
                dir,
                owner,
                mode,
            });
        }
    }
    Ok(())
}

/// What a list names; one that names nothing looks like "none", and without the list all are meant.
fn named(key: &str, list: Option<Vec<String>>) -> Result<Vec<String>, String> {
    match list {
        Some(list) if list.is_empty() => Err(format!(
            "{key} = []: nothing could be leased: name some, or leave `{key}` out, which allows all"
        )),
        list => Ok(list.unwrap_or_default()),
    }
}

/// Numbers and ranges such as `0-3,6`.
fn ranges(text: &str, last: u32) -> Result<BTreeSet<u32>, String> {
    let wrong = || format!("numbers and ranges such as 0-3,6 are meant, of 0 to {last}");
    let mut numbers = BTreeSet::new();
    for part in text.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let from: u32 = from.trim().parse().map_err(|_| wrong())?;
        let to: u32 = to.trim().parse().map_err(|_| wrong())?;
        if from > to || to > last {
            return Err(wrong());
        }
        numbers.extend(from..=to);
    }
    Ok(numbers)
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
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

fn mac(text: &str) -> Result<[u8; 6], String> {
    let digits = |part: &str| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2);
    let bytes: Option<Vec<u8>> = text.split(':').map(digits).collect();
    let mac = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    // Bit 0 of the first byte: a group of stations (IEEE 802).
    mac.filter(|mac| mac[0] & 1 == 0)
        .ok_or_else(|| format!("macs: {text:?} is not the address of one station, such as 52:54:00:00:00:01"))
}

/// An address as people write it.
pub(crate) fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// A set of numbers as `0-3,6`.
struct Ranges<'a>(&'a BTreeSet<u32>);

impl fmt::Display for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut numbers = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(from) = numbers.next() {
            let mut to = from;
            while let Some(next) = numbers.next_if_eq(&(to + 1)) {
                to = next;
            }
            match from == to {
                true => write!(f, "{comma}{from}")?,
                false => write!(f, "{comma}{from}-{to}")?,
            }
            comma = ",";
        }
        Ok(())
    }
}

impl fmt::Display for Policy {
    /// One line a rule, as it was understood.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} connection(s) of one user at a time", self.connections)?;
        if self.unconfined {
            writeln!(
                f,
                "sockets that the kernel does not confine to their interface are given away, too"
            )?;
        }
        for (number, rule) in (1..).zip(&self.rules) {
            writeln!(f, "rule {number}: {rule}")?;
        }
        match self.rules.is_empty() {
            true => writeln!(f, "no rule: nobody may lease anything"),
            false => Ok(()),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |f: &mut fmt::Formatter<'_>, what: &str, number: Option<u32>| match number {
            Some(number) => write!(f, "{what} {number}, "),
            None => Ok(()),
        };
        named(f, "user", self.user)?;
        named(f, "group", self.group)?;
        write!(f, "{} queues {}", self.interface, Ranges(&self.queues))?;
        if self.at_most < MAX_QUEUES {
            write!(f, ", at most {} at a time", self.at_most)?;
        }
        match self.memlock {
            None => {}
            Some(u64::MAX) => write!(f, ", locked memory without limit")?,
            Some(bytes) => write!(f, ", locked memory up to {} KiB", bytes / 1024)?,
        }
        for &mac in &self.macs {
            write!(f, ", MAC {}", mac_text(mac))?;
        }
        match self.vlans.is_empty() {
            true => Ok(()),
            false => write!(f, ", VLANs {}", Ranges(&self.vlans)),
        }
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
