//! The overview that `status` shows: a line for each network and each port, and what is wrong.

use std::fmt::Write as _;
use std::path::Path;

use model::state::{HostStatus, NetworkStatus, PortStatus, Status, UnderlayStatus};
use serde::Serialize;

use super::views::{self, Readings};

/// Renders the overview of a daemon, ending with a newline; with rates if there is an earlier reading.
#[must_use]
pub fn overview(readings: Readings<'_>) -> String {
    let status = readings.now;
    let file = status.configuration.as_ref().map(|read| read.path.as_path());
    let mut text = format!(
        "vhost-af-xdp {}, process {}{}, running for {}\n",
        status.version,
        status.pid,
        file.map(Path::display)
            .map_or_else(String::new, |path| format!(", {path}")),
        duration(status.age().as_secs()),
    );
    // Writing to a String cannot fail.
    for network in &status.networks {
        let _ = writeln!(text, "{}", network_line(network));
    }
    if !status.ports.is_empty() {
        let _ = write!(text, "{}", views::ports(&[readings]));
    }
    for problem in problems(status) {
        let _ = writeln!(text, "! {problem}");
    }
    text
}

/// All problems, one line each.
fn problems(status: &Status) -> Vec<String> {
    let failed = status
        .configuration
        .iter()
        .flat_map(|read| read.failed.iter().cloned());
    let workers = status.workers.iter().enumerate();
    let hangs =
        workers.filter_map(|(index, worker)| Some(format!("worker {index} {}", worker.hangs.as_ref()?)));
    let networks = status.networks.iter().flat_map(|network| {
        let of_network = |why: &Option<String>| why.iter().map(|why| format!("network {}: {why}", network.name)).next();
        let host = network.host.as_ref();
        let bridge = host.and_then(|host| host.bridge.as_ref());
        let not_advertised = network.not_advertised.as_ref();
        let not_advertised =
            not_advertised.map(|why| format!("addresses of guests are not advertised to other hosts: {why}"));
        let left_out = bridge.filter(|bridge| bridge.left_out > 0).map(|bridge| {
            let (name, left_out) = (&bridge.name, bridge.left_out);
            format!("{left_out} addresses behind bridge {name} are not reached: `bridge fdb show br {name}` lists them")
        });
        let underlay = network.underlay.as_ref();
        let unresolved = underlay.filter(|underlay| underlay.resolved < underlay.vteps).map(|underlay| {
            let (unresolved, name) = (underlay.vteps - underlay.resolved, &underlay.interface);
            format!("{unresolved} other host(s) have no resolved next hop on {name}, and the kernel encapsulates frames to \
                     them: see `ip neighbour show dev {name}`")
        });
        let no_room = underlay.filter(|underlay| underlay.left_out > 0).map(|underlay| {
            format!("{} addresses of other hosts are too many for the daemon, and the kernel encapsulates frames to them: \
                     use smaller networks", underlay.left_out)
        });
        let underlay = underlay.and_then(|underlay| underlay.impaired.as_ref());
        let underlay = underlay.map(|why| format!("the underlay is not used, the kernel encapsulates: {why}"));
        let evicted = network.learned_evicted;
        let evicted = (evicted > 0).then(|| format!("{evicted} learned addresses were evicted"));
        let host = host.and_then(|host| host.impaired.as_ref()).map(|why| format!("the host is not reached: {why}"));
        [of_network(&network.impaired), of_network(&host), of_network(&left_out), of_network(&not_advertised),
            of_network(&underlay), of_network(&unresolved), of_network(&no_room), of_network(&network.steering_note),
            of_network(&evicted)]
    });
    let ports = status.ports.iter().flat_map(|port| {
        let busy = port
            .busy
            .as_ref()
            .map(|busy| format!("busy: {busy}; only its counters are current"));
        let reasons = [port.impaired.clone(), busy, port.turned_away.clone()];
        reasons.map(|why| why.map(|why| format!("port {}: {why}", port.name)))
    });
    failed
        .chain(hangs)
        .chain(networks.flatten())
        .chain(ports.flatten())
        .collect()
}

fn network_line(network: &NetworkStatus) -> String {
    let state = match (&network.impaired, network.up) {
        (Some(_), _) => "impaired",
        (None, true) => "up",
        (None, false) => "its uplink is down",
    };
    let uplink = match (&network.uplink, &network.attached) {
        (None, _) => "no uplink".to_owned(),
        (Some(uplink), Some(mode)) => format!("uplink {uplink} ({mode})"),
        (Some(uplink), None) => format!("uplink {uplink} (no program attached)"),
    };
    let host = network
        .host
        .as_ref()
        .map_or_else(String::new, |host| format!(", {}", host_words(host)));
    let advertised = match network.advertised {
        0 => String::new(),
        count => format!(", {count} address(es) advertised to other hosts"),
    };
    let underlay = match &network.underlay {
        Some(underlay) => {
            let UnderlayStatus {
                interface,
                attached,
                addresses,
                vteps,
                ..
            } = underlay;
            let mode = attached.as_deref().unwrap_or("no program attached");
            let addresses = match (addresses, vteps) {
                // The host at the other end of a Geneve tunnel.
                (0, 1..) => "all other addresses".to_owned(),
                _ => format!("{addresses} address(es)"),
            };
            format!(" over {interface} ({mode}: {addresses} on {vteps} other host(s))")
        }
        None => String::new(),
    };
    let ports = network.ports.len();
    format!(
        "network {}: {state}, {uplink}{underlay}, {ports} port(s){host}{advertised}",
        network.name
    )
}

fn host_words(host: &HostStatus) -> String {
    match (&host.impaired, &host.interface) {
        (Some(_), _) => "host not reached".to_owned(),
        (None, Some(interface)) => format!("host reached at {} by {interface}", host.macs.join(", ")),
        (None, None) => "host not reached yet".to_owned(),
    }
}

/// A port or a network of these daemons.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(untagged)]
pub enum Part<'a> {
    /// A port.
    Port(&'a PortStatus),
    /// A network.
    Network(&'a NetworkStatus),
}

impl<'a> Part<'a> {
    /// The ports and networks of that name; a port is also found by its socket.
    #[must_use]
    pub fn find(daemons: &'a [Status], name: &str) -> Vec<Self> {
        let ports = daemons.iter().flat_map(|status| &status.ports);
        let ports = ports.filter(|port| port.name == name || port.endpoint == name);
        let networks = daemons.iter().flat_map(|status| &status.networks);
        let networks = networks.filter(|network| network.name == name);
        ports.map(Self::Port).chain(networks.map(Self::Network)).collect()
    }
}

/// The two largest units of a time.
fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {} min", minutes % 60),
        (1, ..) => format!("1 day {} h", hours % 24),
        _ => format!("{days} days {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_other_addresses_are_on_the_only_host_of_a_tunnel() {
        let text = |addresses, vteps| {
            let underlay = UnderlayStatus {
                addresses,
                vteps,
                ..UnderlayStatus::default()
            };
            network_line(&NetworkStatus {
                underlay: Some(underlay),
                ..NetworkStatus::default()
            })
        };
        assert!(text(0, 1).contains("all other addresses on 1 other host(s)"));
        assert!(text(0, 0).contains("0 address(es) on 0 other host(s)"));
    }

    #[test]
    fn times_have_two_units() {
        let texts = [59, 61, 3_700, 90_000, 900_000].map(duration);
        assert_eq!(
            texts,
            ["59 s", "1 min 1 s", "1 h 1 min", "1 day 1 h", "10 days 10 h"]
        );
    }
}
