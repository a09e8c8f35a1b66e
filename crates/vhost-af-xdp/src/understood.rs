//! How a configuration was understood, as a person reads it: `serve --config FILE --check`.

use std::fmt::Write as _;

use steer::{ModeRequest, mac_text, ranges_text};
use steward::protocol::STATIONS_MAX;
use xsk::{BindRequest, BusyPoll};

use crate::config::{
    Control, Endpoint, ExternalProgram, NetworkConfig, NicConfig, PortConfig, Segments, ServeConfig,
    UplinkConfig, rules_of,
};
use crate::listener::Access;
use model::state::PortRules;
use model::text::received_frames;

/// Filter rules of a port that are shown.
const RULES_SHOWN: usize = 32;

/// What a thing is called, and what is said of it.
type Line = (&'static str, String);

/// All of it, with what was not said filled in; ends with a newline.
pub(crate) fn render(config: &ServeConfig) -> String {
    let mut text = String::new();
    block(&mut text, "daemon", daemon(config));
    for network in &config.networks {
        let lines = network_lines(config, network);
        block(&mut text, &format!("\nnetwork {}", network.name), lines);
    }
    for port in &config.ports {
        block(&mut text, &format!("\nport {}", port.name), port_lines(port));
    }
    if config.ports.is_empty() {
        text.push_str("\nno port\n");
    }
    text
}

fn block(text: &mut String, title: &str, lines: Vec<Line>) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{title}");
    for (what, said) in lines {
        let _ = writeln!(text, "  {what:<13} {said}");
    }
}

fn daemon(config: &ServeConfig) -> Vec<Line> {
    let cpus = match config.cpus.as_slice() {
        [] => "not pinned".to_owned(),
        cpus => {
            let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
            format!("on CPUs {}", cpus.join(", "))
        }
    };
    let spin = config.waits.spin.as_micros();
    let moderation = config.waits.moderation.as_micros();
    let user = config.user.as_ref();
    let off = match config.layers.off().as_slice() {
        [] => "all layers".to_owned(),
        off => format!("without {}", off.join(", ")),
    };
    let mut lines = vec![
        (
            "workers",
            format!(
                "{}, {cpus}, which poll {spin} us before they sleep, and let frames of busy guests gather {moderation} us",
                config.workers
            ),
        ),
        (
            "user",
            user.map_or_else(|| "nobody, or who starts it".to_owned(), ToString::to_string),
        ),
        ("sandbox", off),
        (
            "steward",
            match &config.steward {
                Some(path) => format!("the one at {}", path.display()),
                None => "of its own".to_owned(),
            },
        ),
        (
            "control",
            match &config.control {
                Control::Nowhere => "none".to_owned(),
                Control::Usual => "the usual place".to_owned(),
                Control::At(path) => path.display().to_string(),
            },
        ),
    ];
    let api = &config.api;
    let sockets = [("API", &api.all), ("API, to look", &api.read_only)];
    for (what, socket) in sockets {
        lines.extend(
            socket
                .iter()
                .map(|(path, access)| (what, format!("{}, {}", path.display(), who(access)))),
        );
    }
    lines.extend(api.metrics.map(|address| ("metrics", address.to_string())));
    let directories = config
        .file
        .iter()
        .flat_map(|file| &file.daemon.value.process.socket_directories);
    lines.extend(directories.map(|directory| ("later sockets", format!("in {}", directory.display()))));
    lines
}

fn network_lines(config: &ServeConfig, network: &NetworkConfig) -> Vec<Line> {
    let is_member = |port: &&PortConfig| port.nic.network() == Some(&network.name);
    let ports: Vec<_> = config.ports.iter().filter(is_member).collect();
    let count = match ports.len() {
        0 => "none yet".to_owned(),
        count => count.to_string(),
    };
    let Some(uplink) = &network.uplink else {
        let uplink = "none: its ports reach each other only";
        return vec![("uplink", uplink.to_owned()), ("ports", count)];
    };
    let stations: usize = ports.iter().map(|port| port.nic.stations().len()).sum();
    let kib = uplink.packet_bytes / 1024;
    let all_kib = u64::from(kib) * u64::from(uplink.queues);
    vec![
        ("uplink", queues(&uplink.name, uplink.start_queue, uplink.queues)),
        ("program", program(uplink.wanted().mode).to_owned()),
        ("frames", frames(uplink.bind, uplink.segments, uplink.busy_poll)),
        ("hints", uplink.hints.to_string()),
        (
            "packet memory",
            format!("{kib} KiB for each queue, {all_kib} KiB in all, which its ports share"),
        ),
        ("host", host(uplink)),
        (
            "ports",
            format!("{count}, with {stations} of {STATIONS_MAX} addresses (one in two VLANs counts twice)"),
        ),
    ]
}

fn host(uplink: &UplinkConfig) -> String {
    let keeps = format!("keeps {} and what is for no port", uplink.name);
    match uplink.host {
        true => keeps + "; it and the guests reach each other by its addresses there",
        false => keeps + "; it and the guests do not reach each other there",
    }
}

fn port_lines(port: &PortConfig) -> Vec<Line> {
    let rules = rules_of(port);
    let mut lines = vec![("on", place(port))];
    lines.extend(gets(port, &rules).map(|gets| ("gets", gets)));
    lines.push(("sends from", rules.sends_from()));
    let options = rules.options.names();
    lines.extend((!options.is_empty()).then(|| ("options", options.join(", "))));
    lines.extend(filter_lines(port, &rules));
    lines.push(("limits", port.rates.to_string()));
    if let (Some(own), Some(wanted)) = (port.nic.queues(), port.wanted()) {
        lines.push(match port.external {
            ExternalProgram::None => ("program", program(wanted.mode).to_owned()),
            _ => ("program", "another's, which is there".to_owned()),
        });
        lines.push(("frames", frames(own.bind, port.segments, port.busy_poll)));
    }
    lines.push(("memory", memory(port)));
    let most = port.memory.most_bytes >> 20;
    lines.push(("guest memory", format!("{most} MiB at most")));
    lines.push(("socket", socket(port)));
    let made_up = || "made up of socket and NIC, the same each time".to_owned();
    lines.push(("mac", port.mac.map_or_else(made_up, mac_text)));
    let not_offered = port.offloads_off();
    lines.extend((!not_offered.is_empty()).then(|| ("not offered", not_offered.join(" "))));
    let offered = port.offer.names();
    lines.extend((!offered.is_empty()).then(|| ("offered, too", offered.join(" "))));
    lines
}

/// Which frames it filters: by the first of these rules that matches.
fn filter_lines(port: &PortConfig, rules: &PortRules) -> Vec<Line> {
    let Some(summary) = &rules.filter else {
        return Vec::new();
    };
    let shown = port.filter.rule.iter().take(RULES_SHOWN);
    let mut lines: Vec<Line> = (1..)
        .zip(shown)
        .map(|(number, rule)| ("rule", format!("{number} {rule}")))
        .collect();
    if let Some(more @ 1..) = port.filter.rule.len().checked_sub(RULES_SHOWN) {
        lines.push(("rule", format!("and {more} more")));
    }
    let (from, to) = (&summary.from_guest_default, &summary.to_guest_default);
    lines.push(("else", format!("{from} from the guest, {to} to the guest")));
    lines
}

/// What its frames come from and go to.
fn place(port: &PortConfig) -> String {
    let pairs = match port.queues {
        1 => "1 queue pair".to_owned(),
        pairs => format!("{pairs} queue pairs"),
    };
    let own = port.nic.queues();
    let own = own.map(|own| queues(&own.name, own.start_queue, port.queues.into()));
    match (&port.nic, own) {
        (NicConfig::Network { name, .. }, Some(own)) => {
            format!("network {name}, {pairs} with queues of its own: {own}")
        }
        (NicConfig::Network { name, .. }, None) => format!("network {name}, {pairs}"),
        (_, Some(own)) => format!("{own}, {pairs}"),
        (NicConfig::Null { frame_bytes: 0 }, None) => {
            format!("null, {pairs}: frames are dropped, none are made")
        }
        (NicConfig::Null { frame_bytes }, None) => {
            format!("null, {pairs}: frames are dropped, and made of {frame_bytes} bytes")
        }
        (nic, None) => format!("{nic}, {pairs}"),
    }
}

/// Which frames its guest gets, where that is said of it.
fn gets(port: &PortConfig, rules: &PortRules) -> Option<String> {
    let macs: Vec<_> = port.mac.into_iter().map(mac_text).collect();
    match &port.nic {
        NicConfig::Interface(_) => Some(format!("frames {}", received_frames(&macs, &port.vlans))),
        NicConfig::Network { .. } => {
            let vlans = match (rules.vlan, &rules.trunk) {
                (Some(vlan), _) => format!("of VLAN {vlan}, without its tag"),
                (None, Some(trunk)) => format!("of VLANs {trunk}, with their tags"),
                (None, None) => "without a VLAN".to_owned(),
            };
            Some(format!("frames to its mac and to groups, {vlans}"))
        }
        NicConfig::Cable { .. } | NicConfig::Null { .. } => None,
    }
}

fn queues(interface: &str, first: u32, count: u32) -> String {
    let numbers = ranges_text(first..first.saturating_add(count));
    match count {
        1 => format!("{interface} queue {numbers}"),
        _ => format!("{interface} queues {numbers}"),
    }
}

fn program(mode: ModeRequest) -> &'static str {
    match mode {
        ModeRequest::Xdp => "native, skb where the driver refuses",
        ModeRequest::Native => "native",
        ModeRequest::Skb => "skb",
        ModeRequest::Tap => "none: frames come by a tap",
        ModeRequest::Auto => "native where the driver has zero-copy, else none: frames come by a tap",
    }
}

/// How they go between queues and memory.
fn frames(bind: BindRequest, segments: Segments, busy_poll: Option<BusyPoll>) -> String {
    let mut text = match bind {
        BindRequest::ForceCopy => "copied by the kernel".to_owned(),
        BindRequest::ForceZeroCopy => "zero-copy, or it does not begin".to_owned(),
        _ => "zero-copy where it works and does no harm, else copied by the kernel".to_owned(),
    };
    text.push_str(match segments {
        Segments::Auto => "",
        Segments::ByReference => "; segments by reference",
        Segments::Whole => "; segments whole",
    });
    if let Some(BusyPoll { usecs, budget, .. }) = busy_poll {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "; the driver is polled, {usecs} us and {budget} frames at a time"
        );
    }
    text
}

/// Where frames lie, and what was asked for if that is something else.
fn memory(port: &PortConfig) -> String {
    let mut text = port.placement.to_string();
    if port.placement != port.asked {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            " (for {}: frames of the other ports are received by a copy)",
            port.asked
        );
    }
    let kib = port.packet_bytes / 1024;
    match &port.nic {
        NicConfig::Network { own: None, .. } => text + ", no packet memory of its own: the network's",
        NicConfig::Cable { .. } => text + ", no packet memory: from guest to guest",
        _ if port.slices_from.is_some() => {
            text + &format!(", packet memory {kib} KiB for each pair, of one UMEM")
        }
        _ => text + &format!(", packet memory {kib} KiB for each pair"),
    }
}

fn socket(port: &PortConfig) -> String {
    match &port.endpoint {
        Endpoint::Server(_) => format!("{}, {}", port.endpoint, who(&port.access)),
        Endpoint::Client(_) | Endpoint::Fd(_) => port.endpoint.to_string(),
    }
}

/// Whose a socket is.
fn who(access: &Access) -> String {
    let number = |what: &str, number: Option<u32>| match number {
        Some(number) => format!("{what} {number}"),
        None => format!("the daemon's {what}"),
    };
    let (user, group) = (number("user", access.owner), number("group", access.group));
    format!("mode {:o} of {user}, {group}", access.mode)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::file;

    /// What is said of a file of this text, a line each, without padding.
    fn said(text: &str) -> Vec<String> {
        let file = file::parse(Path::new("c.toml"), text).expect("TOML");
        let config = file::judge(file).expect("possible");
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        render(&config).lines().map(words).collect()
    }

    /// That of a port or a network, up to the next one.
    #[track_caller]
    fn of<'a>(said: &'a [String], title: &str) -> Vec<&'a str> {
        let at = said.iter().position(|line| line == title).expect(title);
        let lines = said[at + 1..].iter().map(String::as_str);
        lines.take_while(|line| !line.is_empty()).collect()
    }

    #[track_caller]
    fn assert_has(lines: &[&str], wanted: &[&str]) {
        for line in wanted {
            assert!(lines.contains(line), "{line:?} is not in\n{}", lines.join("\n"));
        }
    }

    const LAN: &str = "[daemon]\nsocket-directories = [\"/run/vms\"]\napi = \"/run/api.sock\"\n[network.lan]\nuplink = \"eth0\"\nqueues = 4\n\
                       packet-memory = \"1MiB\"\n[network.inner]\n";

    fn port(name: &str, keys: &str) -> String {
        format!("[port.{name}]\nsocket-path = \"/run/vms/{name}.sock\"\n{keys}\n")
    }

    #[test]
    fn network_is_told_with_queues_memory_and_host() {
        let mac = "network = \"lan\"\nmac = \"02:00:00:00:00:01\"\ntrunk = \"1-9\"";
        let text = said(&format!("{LAN}{}", port("vm1", mac)));
        assert_has(
            &of(&text, "daemon"),
            &[
                "later sockets in /run/vms",
                "API /run/api.sock, mode 600 of the daemon's user, the daemon's group",
            ],
        );
        assert_has(
            &of(&text, "network lan"),
            &[
                "uplink eth0 queues 0-3",
                "program native where the driver has zero-copy, else none: frames come by a tap",
                "frames zero-copy where it works and does no harm, else copied by the kernel",
                "packet memory 1024 KiB for each queue, 4096 KiB in all, which its ports share",
                "host keeps eth0 and what is for no port; it and the guests reach each other by its addresses there",
                "ports 1, with 9 of 1024 addresses (one in two VLANs counts twice)",
            ],
        );
        assert_eq!(
            of(&text, "network inner"),
            ["uplink none: its ports reach each other only", "ports none yet"]
        );
        let other = "[network.b]\nuplink = \"eth1\"\nstart-queue = 2\nhost = false\nmode = \"skb\"\nforce-copy = true\n\
                     segments = \"whole\"\nbusy-poll-us = 20\n";
        let text = said(other);
        assert_has(
            &of(&text, "network b"),
            &[
                "uplink eth1 queue 2",
                "program skb",
                "frames copied by the kernel; segments whole; the driver is polled, 20 us and 64 frames at a time",
                "host keeps eth1 and what is for no port; it and the guests do not reach each other there",
            ],
        );
        assert!(text.contains(&"no port".to_owned()));
    }

    #[test]
    fn port_of_a_network_is_told_with_guards_vlans_and_limits() {
        let plain = "network = \"lan\"\nmac = \"02:00:00:00:00:01\"";
        let much = "network = \"lan\"\nmac = \"02:00:00:00:00:02\"\nvlan = 100\nisolated = true\nhairpin = true\n\
                    ips = \"192.0.2.10,2001:db8::/64\"\nrouter = true\nfrom-guest-bits = \"100M\"\nqueues = 2\n\
                    socket-mode = \"660\"\nsocket-group = 7\noffload = \"-uso\"";
        let trunk = "network = \"lan\"\nmac = \"02:00:00:00:00:03\"\ntrunk = [100, \"200-203\"]\nlearning = true\n\
                     promiscuous = true";
        let text = said(&[LAN, &port("a", plain), &port("b", much), &port("c", trunk)].concat());
        assert_has(
            &of(&text, "port a"),
            &[
                "on network lan, 1 queue pair",
                "gets frames to its mac and to groups, without a VLAN",
                "sends from its mac only, any IP address",
                "limits none",
                "memory copy, no packet memory of its own: the network's",
                "socket /run/vms/a.sock, mode 600 of the daemon's user, the daemon's group",
                "mac 02:00:00:00:00:01",
            ],
        );
        assert!(
            !text.join("\n").contains("any address"),
            "guards are on by themselves"
        );
        assert_has(
            &of(&text, "port b"),
            &[
                "on network lan, 2 queue pairs",
                "gets frames to its mac and to groups, of VLAN 100, without its tag",
                "sends from its mac only, of IP addresses 192.0.2.10, 2001:db8::/64; as a router, too",
                "options isolated, hairpin",
                "limits from guest 100M bits/s (burst 5M)",
                "socket /run/vms/b.sock, mode 660 of the daemon's user, group 7",
                "not offered uso",
            ],
        );
        assert_has(
            &of(&text, "port c"),
            &[
                "gets frames to its mac and to groups, of VLANs 100,200-203, with their tags",
                "sends from its mac, and further ones that are learned, any IP address",
                "options promiscuous, learning",
            ],
        );
    }

    #[test]
    fn queues_of_a_ports_own_are_told_in_and_out_of_networks() {
        let own = "network = \"lan\"\nmac = \"02:00:00:00:00:01\"\nifname = \"eth0\"\nstart-queue = 4\nqueues = 2\n\
                   memory = \"direct\"\nforce-copy = true";
        let alone = "ifname = \"eth1\"\nvlan = [0, 7]\npacket-memory = \"512KiB\"";
        let guarded = "cable = \"x\"\nguard = true\nmac = \"02:00:00:00:00:04\"";
        let text = said(
            &[
                LAN,
                &port("own", own),
                &port("alone", alone),
                &port("left", guarded),
                &port("right", "cable = \"x\""),
                &port("none", "null = true\nframe-size = 100"),
            ]
            .concat(),
        );
        assert_has(
            &of(&text, "port own"),
            &[
                "on network lan, 2 queue pairs with queues of its own: eth0 queues 4-5",
                "program native, skb where the driver refuses",
                "frames copied by the kernel",
                "memory send-direct (for direct: frames of the other ports are received by a copy), packet memory 6144 \
                 KiB for each pair",
            ],
        );
        assert_has(
            &of(&text, "port alone"),
            &[
                "on eth1 queue 0, 1 queue pair",
                "gets frames of VLAN 7 and without one",
                "sends from any address",
                "memory copy, packet memory 512 KiB for each pair",
                "mac made up of socket and NIC, the same each time",
            ],
        );
        assert_has(
            &of(&text, "port left"),
            &[
                "on cable x, 1 queue pair",
                "sends from its mac only, any IP address",
                "memory copy, no packet memory: from guest to guest",
            ],
        );
        assert_has(
            &of(&text, "port none"),
            &["on null, 1 queue pair: frames are dropped, and made of 100 bytes"],
        );
    }
}
