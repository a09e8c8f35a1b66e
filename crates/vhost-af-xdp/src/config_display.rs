//! The text of a configuration: `serve --config FILE --check`.
//!
//! Keys, their values and their defaults are those of the [model](model::config). Lines that are no keys show what
//! follows from several of them.

use model::config::{ConfigFile, Daemon, Network, Port, Size, Table, write_block};
use model::rates::PortRates;
use steward_protocol::STATIONS_MAX;

use crate::config::{NetworkConfig, PortConfig, ServeConfig};

/// Most filter rules that are shown of a port.
const RULES_SHOWN: usize = 32;

/// Lines: each a key with its value, or another name with a text.
type Lines = Vec<(String, String)>;

/// The whole configuration, ending with a newline.
pub(crate) fn render(config: &ServeConfig) -> String {
    let mut text = String::new();
    block(&mut text, "daemon", &daemon(config));
    for network in &config.networks {
        let title = format!("\nnetwork {}", network.name);
        block(&mut text, &title, &network_lines(config, network));
    }
    for port in &config.ports {
        block(&mut text, &format!("\nport {}", port.name), &port_lines(port));
    }
    if config.ports.is_empty() {
        text.push_str("\nno port\n");
    }
    if config.networks.iter().any(|network| network.uplink.is_some()) {
        block(&mut text, "\ndefaults of networks", &Network::defaults());
    }
    if !config.ports.is_empty() {
        block(&mut text, "\ndefaults of ports", &Port::defaults());
    }
    text
}

fn block(text: &mut String, title: &str, lines: &[(String, String)]) {
    // Writing to a String cannot fail.
    let _ = write_block(text, title, lines);
}

/// Adds a line that is no key.
fn add(lines: &mut Lines, what: &str, value: &impl ToString) {
    lines.push((what.to_owned(), value.to_string()));
}

fn daemon(config: &ServeConfig) -> Lines {
    let mut keys = config.keys.clone();
    keys.process.workers = Some(config.workers);
    let mut lines = keys.lines();
    let set = keys.keys();
    let others = Daemon::defaults()
        .into_iter()
        .filter(|(key, _)| !set.contains_key(key));
    lines.extend(others.map(|(key, default)| (key, format!("default: {default}"))));
    lines
}

fn network_lines(config: &ServeConfig, network: &NetworkConfig) -> Lines {
    let entries = config.file.iter().flat_map(ConfigFile::all::<Network>);
    let keys = entries.filter(|entry| entry.name == network.name);
    let mut lines: Lines = keys.flat_map(|entry| entry.value.lines()).collect();
    let is_member = |port: &&PortConfig| port.nic.network() == Some(&network.name);
    let ports: Vec<_> = config.ports.iter().filter(is_member).collect();
    let Some(uplink) = &network.uplink else {
        add(&mut lines, "uplink", &"none: its ports reach each other only");
        add(&mut lines, "ports", &ports.len());
        return lines;
    };
    let stations: usize = ports.iter().map(|port| port.nic.stations().len()).sum();
    let all = Size(u64::from(uplink.options.packet_bytes) * u64::from(uplink.queues));
    add(&mut lines, "memory of all queues", &all);
    let addresses = format!("{stations} of {STATIONS_MAX} addresses (one in two VLANs counts twice)");
    add(&mut lines, "ports", &format!("{}, with {addresses}", ports.len()));
    lines
}

fn port_lines(port: &PortConfig) -> Lines {
    let mut keys = Port::clone(&port.keys);
    keys.filter.rule.clear();
    keys.memory.max_memory = Some(Size(port.memory.most_bytes));
    let mut lines = keys.lines();
    if port.options.placement != port.asked {
        let why = format!(
            "{}: frames of other ports are received by a copy",
            port.options.placement
        );
        add(&mut lines, "memory, in a network", &why);
    }
    if port.options.slices_from.is_some() {
        let slice = Size(port.options.packet_bytes.into());
        add(
            &mut lines,
            "packet memory",
            &format!("{slice} for each pair, of one UMEM"),
        );
    }
    add(&mut lines, "sends from", &port.keys.policy().sends_from());
    let rules = &port.keys.filter.rule;
    for (number, rule) in (1..).zip(rules.iter().take(RULES_SHOWN)) {
        add(&mut lines, "rule", &format!("{number} {rule}"));
    }
    if let Some(more @ 1..) = rules.len().checked_sub(RULES_SHOWN) {
        add(&mut lines, "rule", &format!("and {more} more"));
    }
    if let Some(filter) = port.keys.policy().filter {
        add(&mut lines, "filter", &filter);
    }
    if port.rates != PortRates::default() {
        add(&mut lines, "limits", &port.rates);
    }
    let not_offered = port.offloads_off();
    if !not_offered.is_empty() {
        add(&mut lines, "not offered", &not_offered.join(" "));
    }
    lines
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::file;

    /// The output for a file with this text, line by line, without padding.
    fn shown(text: &str) -> Vec<String> {
        let file = file::parse(Path::new("c.toml"), text).expect("TOML");
        let config = file::judge(file).expect("possible");
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        render(&config).lines().map(words).collect()
    }

    /// The lines of a port or network.
    #[track_caller]
    fn of<'a>(shown: &'a [String], title: &str) -> Vec<&'a str> {
        let at = shown.iter().position(|line| line == title).expect(title);
        let lines = shown[at + 1..].iter().map(String::as_str);
        lines.take_while(|line| !line.is_empty()).collect()
    }

    #[track_caller]
    fn assert_has(lines: &[&str], wanted: &[&str]) {
        for line in wanted {
            assert!(lines.contains(line), "{line:?} is not in\n{}", lines.join("\n"));
        }
    }

    const LAN: &str = "[daemon]\nsocket-directories = [\"/run/vms\"]\napi = \"/run/api.sock\"\nworkers = 3\n\
                       [network.lan]\nuplink = \"eth0\"\nqueues = 4\npacket-memory = \"1MiB\"\n[network.inner]\n";

    fn port(name: &str, keys: &str) -> String {
        format!("[port.{name}]\nsocket-path = \"/run/vms/{name}.sock\"\n{keys}\n")
    }

    #[test]
    fn daemon_and_networks_are_shown_with_keys_defaults_and_sums() {
        let mac = "network = \"lan\"\nmac = \"02:00:00:00:00:01\"\ntrunk = \"1-9\"";
        let text = shown(&format!("{LAN}{}", port("vm1", mac)));
        assert_has(
            &of(&text, "daemon"),
            &[
                "api /run/api.sock",
                "workers 3",
                "socket-directories /run/vms",
                "spin-us default: 50",
                "api-mode default: 600, with --api-group 660",
            ],
        );
        assert_has(
            &of(&text, "network lan"),
            &[
                "uplink eth0",
                "queues 4",
                "packet-memory 1MiB",
                "memory of all queues 4MiB",
                "ports 1, with 9 of 1024 addresses (one in two VLANs counts twice)",
            ],
        );
        assert_eq!(
            of(&text, "network inner"),
            ["uplink none: its ports reach each other only", "ports 0"]
        );
        assert_has(&of(&text, "defaults of networks"), &["host true", "mode auto"]);
        assert_has(
            &of(&text, "defaults of ports"),
            &["queues 1", "socket-mode 600, with --socket-group 660"],
        );
        assert!(shown("").contains(&"no port".to_owned()));
    }

    #[test]
    fn port_is_shown_with_keys_and_what_follows_from_them() {
        let much = "network = \"lan\"\nmac = \"02:00:00:00:00:02\"\nvlan = 100\nisolated = true\n\
                    ips = \"192.0.2.10,2001:db8::/64\"\nrouter = true\nfrom-guest-bits = \"100M\"\n\
                    offload = \"-uso\"\nmax-memory = \"4GiB\"\nifname = \"eth0\"\nstart-queue = 4\nmemory = \"direct\"\n\
                    rule = [\"direction=from-guest action=deny protocol=tcp\"]";
        let text = shown(
            &[
                LAN,
                &port("a", "cable = \"x\""),
                &port("b", "cable = \"x\""),
                &port("c", much),
            ]
            .concat(),
        );
        assert_has(&of(&text, "port a"), &["cable x", "sends from any address"]);
        assert_has(
            &of(&text, "port c"),
            &[
                "vlan 100",
                "isolated true",
                "ips 192.0.2.10,2001:db8::/64",
                "max-memory 4GiB",
                "sends from its mac only, of IP addresses 192.0.2.10, 2001:db8::/64; as a router, too",
                "memory direct",
                "memory, in a network send-direct: frames of other ports are received by a copy",
                "rule 1 direction=from-guest action=deny protocol=tcp",
                "filter 1 filter rule(s), else from guest deny, to guest allow",
                "limits from guest 100M bits/s (burst 5M)",
                "not offered uso",
            ],
        );
    }
}
