//! How a configuration was understood, as a person reads it: `serve --config FILE --check`.

use std::fmt::Write as _;

use steer::{ModeRequest, mac_text};
use xsk::BindRequest;

use crate::api::status_view::{or_dash, table};
use crate::config::{
    Control, Endpoint, ExternalProgram, MemberVlans, NicConfig, PortConfig, PortQueues, ServeConfig,
};
use crate::rates::PortRates;

/// All of it, with what was not said filled in; ends with a newline.
pub(crate) fn render(config: &ServeConfig) -> String {
    let steward = match &config.steward {
        Some(path) => format!("the one at {}", path.display()),
        None => "of its own".to_owned(),
    };
    let control = match &config.control {
        Control::Nowhere => "none".to_owned(),
        Control::Usual => "the usual place".to_owned(),
        Control::At(path) => path.display().to_string(),
    };
    let cpus: Vec<String> = config.cpus.iter().map(usize::to_string).collect();
    let cpus = match cpus.as_slice() {
        [] => "not pinned".to_owned(),
        cpus => format!("on CPUs {}", cpus.join(", ")),
    };
    let off = match config.layers.off().as_slice() {
        [] => "all layers".to_owned(),
        off => format!("without {}", off.join(", ")),
    };
    let user = config
        .user
        .as_ref()
        .map_or_else(|| "nobody, or who starts it".to_owned(), ToString::to_string);
    let mut text = format!(
        "{} worker(s), {cpus}, that poll {} us before they sleep; user {user}; sandbox with {off}\nsteward: {steward}; \
         control socket: {control}\n",
        config.workers,
        config.spin.as_micros(),
    );
    let directories = config.file.iter().flat_map(|file| &file.directories);
    for directory in directories {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "sockets may be made later in {}", directory.display());
    }
    if config.ports.is_empty() {
        text.push_str("no port\n");
        return text;
    }
    let header = [
        "port",
        "socket",
        "may connect",
        "frames to and from",
        "queues",
        "memory, packet memory",
        "mac",
        "VLANs",
        "sends from",
        "not offered",
    ];
    let mut ports = table(header, |column| column == 4);
    for port in &config.ports {
        ports.add_row(row(port));
    }
    let _ = writeln!(text, "{ports}");
    let limited = config
        .ports
        .iter()
        .filter(|port| port.rates != PortRates::UNLIMITED);
    for port in limited {
        let _ = writeln!(text, "limits of {}: {}", port.name, port.rates);
    }
    text
}

fn row(port: &PortConfig) -> [String; 10] {
    let access = &port.access;
    let may_connect = match port.endpoint {
        Endpoint::Server(_) => {
            let number = |number: Option<u32>| number.map_or("own".to_owned(), |number| number.to_string());
            let (owner, group) = (number(access.owner), number(access.group));
            format!("{owner}:{group} {:o}", access.mode)
        }
        Endpoint::Client(_) | Endpoint::Fd(_) => "-".to_owned(),
    };
    let vlans: Vec<String> = port.vlans.iter().map(u16::to_string).collect();
    let vlans = if let NicConfig::Network {
        vlans,
        promiscuous,
        hairpin,
        learning,
        ..
    } = &port.nic
    {
        let promiscuous = promiscuous.then_some(", promiscuous").unwrap_or_default();
        let learning = learning.then_some(", learns").unwrap_or_default();
        let hairpin = hairpin.then_some(", hairpin").unwrap_or_default();
        member(vlans) + promiscuous + learning + hairpin
    } else if vlans.is_empty() {
        "all".to_owned()
    } else {
        vlans.join(",")
    };
    let not_offered = port.offloads_off();
    [
        port.name.to_string(),
        port.endpoint.to_string(),
        may_connect,
        nic(port),
        port.queues.to_string(),
        format!("{}, {} KiB", placement(port), port.packet_bytes / 1024),
        port.mac.map_or_else(|| "made up".to_owned(), mac_text),
        vlans,
        port.guard.to_string(),
        or_dash((!not_offered.is_empty()).then(|| not_offered.join(" "))),
    ]
}

/// VLANs of a port of a network.
fn member(vlans: &MemberVlans) -> String {
    match vlans {
        MemberVlans::Untagged => "untagged".to_owned(),
        MemberVlans::Access(vlan) => format!("VLAN {vlan}, untagged to the guest"),
        MemberVlans::Trunk(vlans) => {
            let vlans: Vec<_> = vlans.iter().map(u16::to_string).collect();
            format!("VLANs {}, tagged", vlans.join(","))
        }
    }
}

/// Where frames lie, and what was asked for if that is something else.
fn placement(port: &PortConfig) -> String {
    match port.placement == port.asked {
        true => port.placement.to_string(),
        false => format!("{} for {}", port.placement, port.asked),
    }
}

/// The other side of a port.
fn nic(port: &PortConfig) -> String {
    let Some(PortQueues {
        name,
        start_queue,
        mode,
        bind,
    }) = port.nic.queues()
    else {
        return port.nic.to_string();
    };
    let last = start_queue + u32::from(port.queues).saturating_sub(1);
    let mut text = match port.nic.network() {
        Some(network) => format!("network {network}, "),
        None => String::new(),
    };
    text += &match last == *start_queue {
        true => format!("{name} queue {start_queue}"),
        false => format!("{name} queues {start_queue}-{last}"),
    };
    text.push_str(match mode {
        ModeRequest::Auto => "",
        ModeRequest::Native => ", native",
        ModeRequest::Skb => ", skb",
    });
    text.push_str(match bind {
        BindRequest::ForceCopy => ", copy",
        BindRequest::ForceZeroCopy => ", zero-copy",
        _ => "",
    });
    if port.external != ExternalProgram::None {
        text.push_str(", by another's program");
    }
    text
}
