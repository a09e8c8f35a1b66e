//! Commands that ask a running daemon by its API: `port`, `network`, `events`.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use hyper::Method;
use model::config::RULE_KEYS;
use serde_json::Value;

use crate::api::client::{Ask, Client};
use crate::api::control_socket::{ask_all, find_all, without_control_characters};
use crate::api::status::LearnedStation;
use crate::api::status_view::{or_dash, table, takes};
use crate::cli::ask::{
    AtArgs, EventsArgs, KeysArgs, ListArgs, NetworkCommand, PortCommand, RulesArgs, SetArgs,
};
use crate::config::PortRules;

/// Pause before a stream of events that ended is asked for again.
const AGAIN: Duration = Duration::from_secs(1);

/// Prints, and says whether anybody reads.
pub(crate) type Print = fn(&str) -> anyhow::Result<bool>;

/// Does what `port` was called for.
/// Errors: what was refused, with the remedy.
pub(crate) fn port(command: &PortCommand, print: Print) -> anyhow::Result<()> {
    let done = match command {
        PortCommand::Add(keys) => change(keys, Method::PUT, "")?,
        PortCommand::Set(SetArgs { keys, disconnect }) => {
            let query = if *disconnect { "?disconnect=true" } else { "" };
            change(keys, Method::PATCH, query)?
        }
        PortCommand::Remove(args) => {
            let method = Method::DELETE;
            client(&args.at)?.ask(&Ask {
                method,
                ..Ask::get(&path_of(&args.name))
            })?
        }
        PortCommand::List(args) => {
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
            return list(args, print, "ports", &header, port_row);
        }
        PortCommand::Rules(args) => return rules(args, print),
    };
    let lines = done["done"].as_array().into_iter().flatten();
    let mut text: String = lines
        .filter_map(Value::as_str)
        .fold(String::new(), |text, line| text + line + "\n");
    if text.is_empty() {
        text.push_str("nothing changed\n");
    }
    print(&clean(&text)).map(drop)
}

/// Does what `network` was called for.
/// Errors: what was refused, with the remedy.
pub(crate) fn network(command: &NetworkCommand, print: Print) -> anyhow::Result<()> {
    let NetworkCommand::List(args) = command;
    let header = [
        "network", "uplink", "queues", "attached", "link", "ports", "impaired",
    ];
    list(args, print, "networks", &header, network_row)
}

/// Prints events, until nobody reads.
/// Errors: nobody answers.
pub(crate) fn events(args: &EventsArgs, print: Print) -> anyhow::Result<()> {
    let client = client(&args.at)?;
    let line_of = |event: &Value| match args.json {
        true => format!("{event}\n"),
        false => clean(&event_line(event)),
    };
    let mut last = args.after;
    if args.no_wait {
        let read = client.ask(&Ask::get(&format!("/v1/events?after={last}")))?;
        let events = read["events"].as_array().into_iter().flatten();
        let text: String = events.map(line_of).collect();
        return print(&text).map(drop);
    }
    loop {
        let mut printed = Ok(true);
        client.stream(&format!("/v1/events?after={last}"), |line| {
            let Some(event) = line.strip_prefix("data: ") else {
                return true;
            };
            let Ok(event) = serde_json::from_str::<Value>(event) else {
                return true;
            };
            last = event["sequence"].as_u64().unwrap_or(last);
            printed = print(&line_of(&event));
            matches!(printed, Ok(true))
        })?;
        if !printed? {
            return Ok(());
        }
        // Connections last for a while only; a daemon that has gone is an error next.
        std::thread::sleep(AGAIN);
    }
}

/// Prints the filter rules of a port.
fn rules(args: &RulesArgs, print: Print) -> anyhow::Result<()> {
    let document = client(&args.list.at)?.ask(&Ask::get(&(path_of(&args.name) + "/rules")))?;
    if args.list.json {
        return print(&(serde_json::to_string_pretty(&document)? + "\n")).map(drop);
    }
    let mut listed = table(["", "direction", "action", "frames", "of"], |_| false);
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let rules = document["rules"].as_array().into_iter().flatten();
    for (number, rule) in (1..).zip(rules) {
        let keys = RULE_KEYS
            .iter()
            .skip(2)
            .filter_map(|&key| Some((key, rule.get(key)?)));
        let words: Vec<_> = keys
            .map(|(key, value)| format!("{key}={}", text(value)))
            .collect();
        let of = if words.is_empty() {
            "IPv4 and IPv6".to_owned()
        } else {
            words.join(" ")
        };
        let [direction, action, frames] = ["direction", "action", "frames"].map(|key| text(&rule[key]));
        listed.add_row([number.to_string(), direction, action, frames, of].map(|cell| clean(&cell)));
    }
    for (key, direction) in [("from_guest", "from-guest"), ("to_guest", "to-guest")] {
        let of = &document[key];
        let [action, frames] = ["default", "default_frames"].map(|key| text(&of[key]));
        let rest = "what no rule matches".to_owned();
        listed.add_row(["-".to_owned(), direction.to_owned(), action, frames, rest].map(|cell| clean(&cell)));
        if of["link_frames"].as_u64().is_some_and(|frames| frames > 0) {
            let (frames, of) = (
                text(&of["link_frames"]),
                "of that: ARP and neighbour discovery".to_owned(),
            );
            listed.add_row(
                [
                    "-".to_owned(),
                    direction.to_owned(),
                    "allow".to_owned(),
                    frames,
                    of,
                ]
                .map(|cell| clean(&cell)),
            );
        }
    }
    print(&format!("{listed}\n")).map(drop)
}

fn change(keys: &KeysArgs, method: Method, query: &str) -> anyhow::Result<Value> {
    let path = path_of(&keys.name) + query;
    let only_new = method == Method::PUT;
    let body = Some(Value::Object(keys.json()?));
    client(&keys.at)?.ask(&Ask {
        method,
        path: &path,
        body,
        only_new,
    })
}

/// A name is percent-encoded there (RFC 3986, 2.3).
fn path_of(name: &str) -> String {
    let mut path = "/v1/ports/".to_owned();
    for byte in name.bytes() {
        match byte {
            byte if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => path.push(byte.into()),
            // Writing to a String cannot fail.
            byte => drop(write!(path, "%{byte:02X}")),
        }
    }
    path
}

fn client(at: &AtArgs) -> anyhow::Result<Client> {
    let socket = match &at.api {
        Some(socket) => socket.clone(),
        None => the_one()?,
    };
    Client::new(&socket)
}

/// The API of the one daemon that has one.
fn the_one() -> anyhow::Result<PathBuf> {
    let mut found: Vec<PathBuf> = ask_all(&find_all())
        .into_iter()
        .filter_map(|status| status.api)
        .collect();
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => bail!(
            "no daemon with an API found: start one with `serve --config FILE --api PATH`, or name its socket \
                    with --api SOCKET"
        ),
        _ => {
            let names: Vec<_> = found.iter().map(|path| path.display().to_string()).collect();
            bail!(
                "several daemons have an API: choose with --api one of {}",
                clean(&names.join(", "))
            )
        }
    }
}

fn list<const N: usize>(
    args: &ListArgs,
    print: Print,
    what: &str,
    header: &[&str; N],
    row: fn(&Value) -> [String; N],
) -> anyhow::Result<()> {
    let document = client(&args.at)?.ask(&Ask::get(&format!("/v1/{what}")))?;
    if args.json {
        return print(&(serde_json::to_string_pretty(&document)? + "\n")).map(drop);
    }
    let mut listed = table(*header, |_| false);
    for entry in document[what].as_array().into_iter().flatten() {
        listed.add_row(row(entry).map(|cell| clean(&cell)));
    }
    print(&format!("{listed}\n")).map(drop)
}

fn port_row(port: &Value) -> [String; 9] {
    let guest = match (port["connected"].as_bool(), port["peer"].as_i64()) {
        (Some(true), Some(peer)) => format!("process {peer}"),
        (Some(true), None) => "connected".to_owned(),
        _ => "-".to_owned(),
    };
    let text = |key: &str| port[key].as_str().unwrap_or("-").to_owned();
    // An older daemon says less.
    let rules: PortRules = serde_json::from_value(port.clone()).unwrap_or_default();
    let network = port["network"].as_str();
    let place = match network.filter(|_| !text("nic").starts_with("network ")) {
        Some(network) => format!("network {network}, {}", text("nic")),
        None => text("nic"),
    };
    let options = [rules.short(network.is_some()), learned(port)];
    let options = options
        .into_iter()
        .filter(|said| !said.is_empty())
        .collect::<Vec<_>>()
        .join(", ");
    [
        text("name"),
        place,
        text("endpoint"),
        text("mac"),
        or_dash(rules.vlans().or_else(|| of_own_queues(port))),
        or_dash(Some(options).filter(|options| !options.is_empty())),
        text("source"),
        guest,
        text("impaired"),
    ]
}

/// Addresses that a port has beside its own.
fn learned(port: &Value) -> String {
    let stations: Vec<LearnedStation> = serde_json::from_value(port["learned"].clone()).unwrap_or_default();
    let stations: Vec<_> = stations.iter().map(ToString::to_string).collect();
    match stations.is_empty() {
        true => String::new(),
        false => format!("learned {}", stations.join(", ")),
    }
}

/// VLANs whose frames a port gets that has its queues for itself.
fn of_own_queues(port: &Value) -> Option<String> {
    let vlans = port["vlans"].as_array().filter(|_| port["network"].is_null())?;
    let vlans: Vec<u16> = vlans
        .iter()
        .filter_map(|vlan| vlan.as_u64()?.try_into().ok())
        .collect();
    (!vlans.is_empty()).then(|| takes(&[], &vlans).trim_start_matches("of ").to_owned())
}

fn network_row(network: &Value) -> [String; 7] {
    let text = |key: &str| network[key].as_str().unwrap_or("-").to_owned();
    let ports: Vec<_> = network["ports"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    [
        text("name"),
        text("uplink"),
        network["queues"].as_array().map_or(0, Vec::len).to_string(),
        text("attached"),
        if network["up"] == true { "up" } else { "down" }.to_owned(),
        ports.join(" "),
        text("impaired"),
    ]
}

/// `TIME PORT EVENT: why`.
fn event_line(event: &Value) -> String {
    if let Some(lost) = event["lost"].as_u64() {
        return format!("{lost} events are lost\n");
    }
    let text = |key: &str| event[key].as_str();
    let of = match (text("port"), text("network")) {
        (Some(port), _) => format!("port {port}"),
        (None, network) => format!("network {}", network.unwrap_or("-")),
    };
    let time = event["unix_ms"].as_u64().map_or(String::new(), clock);
    let why: Vec<_> = [text("reason"), text("detail")].into_iter().flatten().collect();
    let colon = if why.is_empty() { "" } else { ": " };
    format!(
        "{time} {of} {}{colon}{}\n",
        text("event").unwrap_or("?"),
        why.join(": ")
    )
}

/// A time as the log has it, in UTC.
fn clock(unix_ms: u64) -> String {
    let (days, ms) = (unix_ms / 86_400_000, unix_ms % 86_400_000);
    // Years from March on, in eras of 400 (Howard Hinnant, chrono-compatible low-level date algorithms).
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (date, month) = (
        of_year - (153 * month + 2) / 5 + 1,
        if month < 10 { month + 3 } else { month - 9 },
    );
    let year = year + era * 400 + u64::from(month <= 2);
    let (hours, minutes, seconds) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60);
    format!(
        "{year:04}-{month:02}-{date:02}T{hours:02}:{minutes:02}:{seconds:02}.{:03}Z",
        ms % 1000
    )
}

/// A terminal must not obey what a daemon says.
fn clean(text: &str) -> String {
    let lines = text.split_inclusive('\n').map(|line| {
        let (text, end) = line.strip_suffix('\n').map_or((line, ""), |text| (text, "\n"));
        let mut value = Value::String(text.to_owned());
        without_control_characters(&mut value);
        value.as_str().unwrap_or_default().to_owned() + end
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn event_is_a_line() {
        let event = json!({
            "sequence": 3, "unix_ms": 1_795_474_111_166_u64, "port": "vm1", "network": null,
            "event": "closed", "reason": "disconnected", "detail": "the VMM\u{1b}[2J went",
        });
        assert_eq!(
            clean(&event_line(&event)),
            "2026-11-23T22:48:31.166Z port vm1 closed: disconnected: the VMM?[2J went\n"
        );
        assert_eq!(event_line(&json!({"lost": 7})), "7 events are lost\n");
        assert_eq!(clock(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(clock(0), "1970-01-01T00:00:00.000Z");
    }

    #[test]
    fn port_is_a_row_with_what_is_not_as_usual() {
        let row = |port: Value| port_row(&port).join("|");
        let of_network = json!({
            "name": "vm1", "nic": "network lan", "network": "lan", "endpoint": "/run/vm1.sock", "vlans": [],
            "mac": "02:00:00:00:00:01", "connected": true, "peer": 7, "source": "file", "vlan": 100, "guard": true,
            "isolated": true, "ips": ["192.0.2.10"],
        });
        assert_eq!(
            row(of_network.clone()),
            "vm1|network lan|/run/vm1.sock|02:00:00:00:00:01|VLAN 100|isolated, ips 192.0.2.10|file|process 7|-"
        );
        let mut own = of_network;
        (own["nic"], own["vlan"], own["trunk"]) = (json!("eth0"), Value::Null, json!("100,200-203"));
        assert!(row(own).contains("|network lan, eth0|"), "it is there by both");
        let alone = json!({
            "name": "/a", "nic": "eth0", "network": null, "endpoint": "/a", "vlans": [0, 5, 6, 7], "guard": true,
        });
        assert!(row(alone.clone()).contains("|VLAN 5-7 and without one|guard|"));
        // Of a daemon that says nothing of all this.
        let mut old = alone;
        (old["guard"], old["vlans"]) = (Value::Null, json!([]));
        assert!(row(old).contains("|-|-|-|-|-"));
    }

    #[test]
    fn name_is_one_part_of_a_path() {
        assert_eq!(path_of("/run/a b.sock"), "/v1/ports/%2Frun%2Fa%20b.sock");
    }
}
