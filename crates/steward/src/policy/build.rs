//! Builds rules from a policy file: checks combinations of keys, looks up users and groups, sets defaults.

use std::path::Path;

use model::policy::{Allow, Flows, LAST_QUEUE, Macs, NameOrNumber, PolicyFile};
use program::users;
use steer::{HintSet, MAX_QUEUES};

use super::{CONNECTIONS, CONNECTIONS_MAX, Policy, PolicyError, Rule};
use crate::hardware::Names;
use steward_protocol::is_interface_name;

/// The number that means "no change" to chown(2), so no user or group has it.
const NO_NUMBER: u32 = u32::MAX;

const _: () = assert!(LAST_QUEUE + 1 == MAX_QUEUES);

impl Policy {
    /// Parses and checks a policy's text; `path` is used in errors.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, PolicyError> {
        let wrong = |line: Option<usize>, what: String| PolicyError::mistake(path, line, &what);
        let mut file = PolicyFile::parse(text).map_err(|error| wrong(error.line, error.what))?;
        let (mut rules, mut warnings) = (Vec::new(), Vec::new());
        for entry in &mut file.rules {
            let of_rule = |what: String| wrong(Some(entry.line_of(&what)), format!("{}: {what}", entry.name));
            let rule = rule(&entry.value).map_err(of_rule)?;
            let doubts = entry.value.doubts();
            warnings.extend(doubts.map(|what| of_rule(what).to_string()));
            let lessee = &mut entry.value.lessee;
            lessee.user = rule.user.map(NameOrNumber::Number);
            lessee.group = rule.group.map(NameOrNumber::Number);
            rules.push(rule);
        }
        let limits = &file.limits.value.sockets;
        let connections = limits.connections.map_or(CONNECTIONS, Into::into);
        if connections > CONNECTIONS_MAX {
            let what = format!(
                "connections = {connections}: a steward has {CONNECTIONS_MAX} in all: give {CONNECTIONS_MAX} or less, \
                 or leave it out"
            );
            return Err(wrong(Some(file.limits.line_of(&what)), what));
        }
        Ok(Self {
            connections,
            unbound: limits.unbound_sockets,
            rules,
            warnings,
            shown: file.to_string(),
        })
    }

    /// A policy of these rules, without a file, for a steward that serves one daemon.
    ///
    /// # Errors
    /// What is missing or does not fit together.
    pub fn for_one(rules: impl IntoIterator<Item = Allow>) -> Result<Self, String> {
        let rules: Result<_, _> = rules.into_iter().map(|allow| rule(&allow)).collect();
        Ok(Self {
            connections: u32::MAX,
            unbound: true,
            rules: rules?,
            warnings: Vec::new(),
            shown: String::new(),
        })
    }
}

/// Errors: what is missing or does not fit together.
fn rule(allow: &Allow) -> Result<Rule, String> {
    let (lessee, queues) = (&allow.lessee, &allow.queues);
    let (af_xdp, zcrx) = (&allow.af_xdp, &allow.zcrx);
    if lessee.user.is_none() && lessee.group.is_none() {
        return Err("neither user nor group: add `group = \"vhost-af-xdp\"`, or a `user`".to_owned());
    }
    allow.check_combination()?;
    let missing = |key: &str, example: &str| format!("{key} is missing: add `{key} = {example}`");
    let interface = queues.interface.clone();
    let interface = interface.ok_or_else(|| missing("interface", "\"eth1\""))?;
    if !is_interface_name(&interface) {
        return Err(format!(
            "interface = {interface:?}: not a name of an interface: `ip link` lists them"
        ));
    }
    let numbers = queues.queues.clone();
    let numbers = numbers.ok_or_else(|| missing("queues", "\"0-3\"` or `queues = \"all\""))?;
    let user = |name: &str| Some(users::user(name)?.uid.as_raw());
    let macs = af_xdp.macs.clone().map(|Macs(macs)| macs);
    let vlans = af_xdp.vlans.iter().flat_map(|vlans| &vlans.0);
    Ok(Rule {
        user: number_of(lessee.user.as_ref(), "user", user)?,
        group: number_of(lessee.group.as_ref(), "group", users::group_number)?,
        interface,
        queues: numbers.0.into_iter().collect(),
        af_xdp: zcrx.af_xdp.unwrap_or(true),
        at_most: queues.at_most.map_or(MAX_QUEUES, Into::into),
        memlock: queues.memlock.map(|memlock| memlock.0),
        names: Names {
            macs: macs.unwrap_or_default(),
            vlans: vlans.copied().map(u32::from).collect(),
        },
        network: af_xdp.network,
        host: af_xdp.network && af_xdp.host.unwrap_or(true),
        advertise: af_xdp.advertise,
        ips: af_xdp.ips.clone().unwrap_or_default(),
        netkit: af_xdp.netkit.unwrap_or(false),
        hints: match &af_xdp.hints {
            Some(words) => words.0.parse().map_err(|error| format!("hints: {error}"))?,
            None => HintSet::ALL,
        },
        busy_poll: af_xdp.busy_poll.map(Into::into),
        zcrx: zcrx.zcrx.clone().map(|Flows(flows)| flows).unwrap_or_default(),
        zcrx_setup: zcrx.zcrx_setup.unwrap_or(false),
    })
}

/// The number of a user or group; as chown(1) does, text is looked up as a name first.
fn number_of(
    name: Option<&NameOrNumber>,
    key: &str,
    find: impl Fn(&str) -> Option<u32>,
) -> Result<Option<u32>, String> {
    let number = match name {
        None => return Ok(None),
        Some(NameOrNumber::Number(NO_NUMBER)) => {
            return Err(format!("{key} {NO_NUMBER}: no {key} can have this number"));
        }
        Some(NameOrNumber::Number(number)) => *number,
        Some(NameOrNumber::Name(name)) => find(name)
            .or_else(|| name.parse().ok().filter(|&number| number != NO_NUMBER))
            .ok_or_else(|| format!("there is no {key} {name:?}: create it, or give its number"))?,
    };
    Ok(Some(number))
}
