//! Commands for one running daemon: `port`, `network`, `events`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{anyhow, bail};
use jiff::Timestamp;
use model::config::{NamedTable, Network, Port, TableKind};
use model::control::{Change, Changed};
use model::events::Event;
use model::state::{NetworkStatus, PortStatus, Source, documents};
use serde_json::Value;

use crate::cli::ask::{
    AtArgs, EventsArgs, ListArgs, NetworkCommand, PortCommand, RulesArgs, SetArgs, keys_of,
};
use crate::output::{print, print_json};
use client::connection::{self, Error, no_answer};
use client::text::tree::tree;
use client::text::views::attachment;
use client::text::{or_dash, table};
use model::text::received_frames;

/// Pause before a daemon that has ended is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// Runs the command `port`.
/// Errors: why the daemon rejected it, with the remedy.
pub(crate) fn port(command: &PortCommand) -> anyhow::Result<()> {
    match command {
        PortCommand::Add(args) => add::<Port>(&args.at, &args.name, &args.keys),
        PortCommand::Set(SetArgs { keys, disconnect }) => {
            set::<Port>(&keys.at, &keys.name, &keys.keys, *disconnect)
        }
        PortCommand::Remove(args) => remove(&args.at, TableKind::Port, &args.name),
        PortCommand::List(args) => list_ports(args),
        PortCommand::Rules(args) => rules(args),
    }
}

/// Runs the command `network`.
/// Errors: why the daemon rejected it, with the remedy.
pub(crate) fn network(command: &NetworkCommand) -> anyhow::Result<()> {
    match command {
        NetworkCommand::Add(args) => add::<Network>(&args.at, &args.name, &args.network_keys),
        NetworkCommand::Set(args) => set::<Network>(&args.at, &args.name, &args.network_keys, false),
        NetworkCommand::Remove(args) => remove(&args.at, TableKind::Network, &args.name),
        NetworkCommand::List(args) => list_networks(args),
    }
}

fn add<T: NamedTable>(at: &AtArgs, name: &str, words: &[String]) -> anyhow::Result<()> {
    let put = Change::Put {
        table: T::KIND,
        name: name.to_owned(),
        keys: keys_of::<T>(name, words)?,
        only_new: true,
    };
    change(at, &put)
}

fn set<T: NamedTable>(at: &AtArgs, name: &str, words: &[String], disconnect: bool) -> anyhow::Result<()> {
    let patch = Change::Patch {
        table: T::KIND,
        name: name.to_owned(),
        keys: keys_of::<T>(name, words)?,
        disconnect,
    };
    change(at, &patch)
}

fn remove(at: &AtArgs, table: TableKind, name: &str) -> anyhow::Result<()> {
    let name = name.to_owned();
    change(at, &Change::Remove { table, name })
}

fn change(at: &AtArgs, change: &Change) -> anyhow::Result<()> {
    change_all(&[socket(at)?], change, "nothing changed\n")
}

/// Makes a change at each of these daemons, and prints what each did, or `nothing`.
/// Errors: what failed, a line each.
pub(crate) fn change_all(daemons: &[PathBuf], change: &Change, nothing: &str) -> anyhow::Result<()> {
    let mut all_failed = Vec::new();
    for path in daemons {
        match connection::change(path, change.clone()) {
            Ok(Changed { done, failed, .. }) => {
                all_failed.extend(failed);
                let text: String = done.iter().map(|line| format!("{line}\n")).collect();
                print(if text.is_empty() { nothing } else { &text })?;
            }
            Err(error) => all_failed.push(no_answer(path, &error)),
        }
    }
    match all_failed.as_slice() {
        [] => Ok(()),
        failed => bail!("{}", failed.join("\n")),
    }
}

fn list_ports(args: &ListArgs) -> anyhow::Result<()> {
    let status = asked(&socket(&args.at)?, connection::status)?;
    if args.json {
        return print_json(&documents::ports(&status));
    }
    let header = [
        "port",
        "network or NIC",
        "socket",
        "mac",
        "VLANs",
        "options",
        "from",
        "guest",
        "impaired",
    ];
    let mut listed = table(header, |_| false);
    for port in &status.ports {
        listed.add_row(port_row(port));
    }
    print(&format!("{listed}\n")).map(drop)
}

fn list_networks(args: &ListArgs) -> anyhow::Result<()> {
    let status = asked(&socket(&args.at)?, connection::status)?;
    if args.json {
        return print_json(&documents::networks(&status));
    }
    let header = [
        "network",
        "uplink",
        "queues",
        "attached",
        "link",
        "ports",
        "advertised",
        "from",
        "impaired",
    ];
    let mut listed = table(header, |_| false);
    for network in &status.networks {
        listed.add_row(network_row(network));
    }
    print(&format!("{listed}\n")).map(drop)
}

/// Prints events until the output is closed.
/// Errors: no daemon answers.
pub(crate) fn events(args: &EventsArgs) -> anyhow::Result<()> {
    let path = socket(&args.at)?;
    let line_of = |event: &Event| match args.json {
        true => serde_json::to_string(event).map(|text| text + "\n"),
        false => Ok(event_line(event)),
    };
    let mut last = args.after;
    loop {
        let mut printed = Ok(true);
        let ended = connection::events(&path, last, |read| {
            last = read.events.last().map_or(last, |event| event.sequence);
            let lost = match read.lost {
                0 => String::new(),
                lost if args.json => format!("{{\"lost\":{lost}}}\n"),
                lost => format!("{lost} events are lost\n"),
            };
            let lines: serde_json::Result<String> = read.events.iter().map(line_of).collect();
            printed = lines
                .map_err(Into::into)
                .and_then(|lines| print(&(lost + &lines)));
            !args.no_wait && matches!(printed, Ok(true))
        });
        match ended {
            Ok(()) => return printed.map(drop),
            // A daemon that was restarted answers; one that is gone is an error at the next attempt.
            Err(Error::Io(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                std::thread::sleep(AGAIN);
            }
            Err(error) => bail!(no_answer(&path, &error)),
        }
    }
}

/// Prints the filter rules of a port.
fn rules(args: &RulesArgs) -> anyhow::Result<()> {
    let rules = asked(&socket(&args.list.at)?, |path| {
        connection::rules(path, &args.name)
    })?;
    let mut document = serde_json::to_value(&rules)?;
    if args.list.json {
        return print_json(&document);
    }
    let rules = document["rules"].as_array_mut().into_iter().flatten();
    for (number, rule) in (1..).zip(rules.filter_map(Value::as_object_mut)) {
        rule.shift_insert(0, "rule".to_owned(), number.into());
    }
    print(&tree(&document)?).map(drop)
}

fn asked<T>(path: &Path, ask: impl Fn(&Path) -> Result<T, Error>) -> anyhow::Result<T> {
    ask(path).map_err(|error| anyhow!(no_answer(path, &error)))
}

/// The control socket of `--control`, or that of the only running daemon.
fn socket(at: &AtArgs) -> anyhow::Result<PathBuf> {
    if let Some(path) = &at.control {
        return Ok(path.clone());
    }
    let found = connection::found().into_iter();
    // Killed daemons leave their sockets behind.
    let found = found.filter(|(_, status)| !matches!(status, Err(Error::Io(_))));
    let found: Vec<_> = found.map(|(path, _)| path).collect();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => bail!(
            "no daemon found: start one with `serve --config FILE`, or name its socket with --control PATH"
        ),
        several => {
            let names: Vec<_> = several.iter().map(|path| path.display().to_string()).collect();
            bail!(
                "several daemons run: choose with --control one of {}",
                names.join(", ")
            )
        }
    }
}

fn port_row(port: &PortStatus) -> [String; 9] {
    let guest = match (port.connected, port.peer) {
        (true, Some(peer)) => format!("process {peer}"),
        (true, None) => "connected".to_owned(),
        (false, _) => "-".to_owned(),
    };
    let network = port.network.as_ref();
    let learned: Vec<_> = port.learned.iter().map(ToString::to_string).collect();
    let mut options = vec![port.rules.short(network.is_some())];
    if !learned.is_empty() {
        options.push(format!("learned {}", learned.join(", ")));
    }
    options.retain(|words| !words.is_empty());
    let options = Some(options.join(", ")).filter(|options| !options.is_empty());
    // VLANs of a port that does not share its queues.
    let of_own_queues = || {
        let is_of_own = network.is_none() && !port.vlans.is_empty();
        is_of_own.then(|| {
            received_frames(&[], &port.vlans)
                .trim_start_matches("of ")
                .to_owned()
        })
    };
    [
        port.name.clone(),
        attachment(port),
        port.endpoint.clone(),
        port.mac.clone(),
        or_dash(port.rules.vlans().or_else(of_own_queues)),
        or_dash(options),
        source_word(port.source),
        guest,
        or_dash(port.impaired.as_ref()),
    ]
}

fn source_word(source: Option<Source>) -> String {
    or_dash(source.map(|source| match source {
        Source::File => "file",
        Source::Api => "api",
    }))
}

fn network_row(network: &NetworkStatus) -> [String; 9] {
    [
        network.name.clone(),
        or_dash(network.uplink.as_ref()),
        network.queues.len().to_string(),
        or_dash(network.attached.as_ref()),
        if network.up { "up" } else { "down" }.to_owned(),
        network.ports.join(" "),
        or_dash(Some(network.advertised).filter(|&count| count > 0)),
        source_word(network.source),
        or_dash(network.impaired.as_ref()),
    ]
}

/// `TIME PORT EVENT: why`.
fn event_line(event: &Event) -> String {
    let of = match (&event.port, &event.network) {
        (Some(port), _) => format!("port {port}"),
        (None, network) => format!("network {}", or_dash(network.as_ref())),
    };
    let why: Vec<_> = [&event.reason, &event.detail]
        .into_iter()
        .flatten()
        .cloned()
        .collect();
    let colon = if why.is_empty() { "" } else { ": " };
    let what = serde_json::to_value(event.event).unwrap_or_default();
    format!(
        "{} {of} {}{colon}{}\n",
        clock(event.unix_ms),
        what.as_str().unwrap_or("?"),
        why.join(": ")
    )
}

/// A time in the format of the log, in UTC.
fn clock(unix_ms: u64) -> String {
    let since = i64::try_from(unix_ms)
        .ok()
        .and_then(|ms| Timestamp::from_millisecond(ms).ok());
    format!("{:.3}", since.unwrap_or(Timestamp::MAX))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn event_is_a_line() {
        let event = json!({
            "sequence": 3, "unix_ms": 1_795_474_111_166_u64, "port": "vm1", "network": null,
            "event": "closed", "reason": "disconnected", "detail": "the VMM went",
        });
        assert_eq!(
            event_line(&serde_json::from_value(event).expect("an event")),
            "2026-11-23T22:48:31.166Z port vm1 closed: disconnected: the VMM went\n"
        );
        assert_eq!(clock(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(clock(0), "1970-01-01T00:00:00.000Z");
    }

    #[test]
    fn network_is_a_row() {
        let mut network = json!({
            "name": "blue", "uplink": "vx100", "attached": "tap", "driver": null, "up": true, "mtu": 1450,
            "impaired": null, "ports": ["vm1", "vm2"], "queues": [], "groups": [], "host": null,
        });
        for (advertised, cell) in [(0, "-"), (2, "2")] {
            network["advertised"] = advertised.into();
            let network = serde_json::from_value(network.clone()).expect("a network");
            let row = network_row(&network).join("|");
            assert_eq!(row, format!("blue|vx100|0|tap|up|vm1 vm2|{cell}|-|-"));
        }
    }

    #[test]
    fn port_is_a_row_with_what_is_not_as_usual() {
        let port = json!({
            "name": "vm1", "nic": "network lan", "network": "lan", "endpoint": "/run/vm1.sock", "macs": [], "vlans": [],
            "mac": "02:00:00:00:00:01", "connected": true, "peer": 7, "vlan": 100, "guard": true, "isolated": true,
            "ips": ["192.0.2.10"], "memory": "copy", "mtu": 1500, "features": "0x0", "offload_offered": [],
            "offload": [], "sessions": 1, "limits": {"from_guest": {}, "to_guest": {}}, "lanes": [],
        });
        let mut port: PortStatus = serde_json::from_value(port).expect("a port");
        let row = |port: &PortStatus| port_row(port).join("|");
        port.source = Some(Source::File);
        assert_eq!(
            row(&port),
            "vm1|network lan|/run/vm1.sock|02:00:00:00:00:01|VLAN 100|isolated, ips 192.0.2.10|file|process 7|-"
        );
        port.nic = "eth0".to_owned();
        assert!(row(&port).contains("|network lan, eth0|"), "it is there by both");
        (port.network, port.vlans) = (None, vec![0, 5, 6, 7]);
        (port.rules.vlan, port.rules.options.isolated, port.rules.guard.ips) = (None, false, None);
        assert!(row(&port).contains("|VLAN 5-7 and without one|guard|file|"));
    }
}
