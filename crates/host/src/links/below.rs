//! Interfaces on top of others (macvlan, VLAN, bridge, bond, team), and the frames that they lose.
//!
//! Their frames come from an interface below, after that has joined packets (GRO) or received them unsegmented (a
//! veth, a tap). XDP on the interface above sees packets of up to 64 KiB then, which are longer than any frame of its
//! MTU, and drops them (`too_long`): ping works, TCP towards a guest does not. On the interface with the program
//! itself the kernel joins nothing (`netif_elide_gro`, include/linux/netdevice.h).

use std::io;

use super::Link;
use super::all::{Links, read_links};
use super::routes::device_numbered;
use super::tunnel::too_long;
use crate::nic::Ethtool;

/// Kinds of interfaces whose frames come from others (`IFLA_INFO_KIND`).
const UPPER: [&str; 8] = [
    "bond", "bridge", "ipvlan", "ipvtap", "macvlan", "macvtap", "team", "vlan",
];

/// An interface whose frames come to one above it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Lowest {
    /// Empty: it is in another network namespace.
    name: String,
    /// Its peer passes it unsegmented packets.
    is_virtual: bool,
}

/// A note about frames that are lost because of interfaces below, with the remedy; empty: none are lost.
///
/// # Errors
/// An error of the kernel.
pub fn losses_above(link: &Link) -> io::Result<String> {
    let links = read_links()?;
    let Some(seen) = links.get(&link.index) else {
        return Ok(String::new());
    };
    if link.is_tunnel() {
        let device = device_numbered(link.index);
        return too_long(link, device.ok().map(|device| device.tunnel.local));
    }
    let lowest = lowest(&links, link.index);
    if seen.kind == "bridge" {
        let ports: Vec<&str> = lowest.iter().map(|one| one.name.as_str()).collect();
        return Ok(format!(
            "{} is a bridge, which gives frames for guests to its ports, not here: use a port of it ({})",
            seen.name,
            ports.join(", ")
        ));
    }
    let joins = |one: &Lowest| {
        let joined = Ethtool::open(&one.name).and_then(|driver| driver.joins());
        one.name.is_empty() || one.is_virtual || joined.unwrap_or(false)
    };
    Ok(explanation(
        &seen.name,
        &lowest.into_iter().filter(joins).collect::<Vec<_>>(),
    ))
}

/// Receive queues of a bond or team that its frames can arrive on: a frame keeps the number of its queue below. None:
/// it is neither, or what is below is not seen.
pub(crate) fn queues_from_below(link: &Link) -> Option<u32> {
    if !matches!(link.driver.as_str(), "bonding" | "team") {
        return None;
    }
    let below = lowest(&read_links().ok()?, link.index);
    let queues = below
        .iter()
        .map(|one| Link::by_name(&one.name).map(|below| below.rx_queues));
    let most = queues.collect::<Result<Vec<_>, _>>().ok()?.into_iter().max()?;
    Some(most.min(link.rx_queues))
}

/// The note for an interface that receives unsegmented packets from these.
fn explanation(name: &str, lowest: &[Lowest]) -> String {
    let Some(first) = lowest.first() else {
        return String::new();
    };
    let remedies = lowest
        .iter()
        .map(|Lowest { name, is_virtual }| match (name.as_str(), is_virtual) {
            ("", _) => "`ethtool -K LOWER gro off` in its network namespace".to_owned(),
            (name, false) => format!("`ethtool -K {name} gro off`"),
            (name, true) => format!("`ethtool -K {name} gro off`, at its other end `ethtool -K PEER tx off`"),
        });
    let below = match (first.name.as_str(), lowest.len()) {
        ("", _) => "the interface below",
        (name, 1) => name,
        _ => "those below",
    };
    format!(
        "{name} may get packets of up to 64 KiB from {below}, whole, and drops them (too_long): TCP stalls: use \
         mode = \"tap\", or {}",
        remedies.collect::<Vec<_>>().join(", ")
    )
}

/// Interfaces whose frames come to that one, in order; none, if they are its own.
fn lowest(links: &Links, index: u32) -> Vec<Lowest> {
    let (mut found, mut above, mut next) = (Vec::new(), vec![index], 0);
    while let Some(at) = above.get(next).copied() {
        next += 1;
        let Some(seen) = links.get(&at) else { continue };
        if !UPPER.contains(&seen.kind.as_str()) {
            if at != index {
                found.push(Lowest {
                    name: seen.name.clone(),
                    is_virtual: matches!(seen.kind.as_str(), "veth" | "tun" | "netkit"),
                });
            }
            continue;
        }
        if seen.is_below_elsewhere {
            found.push(Lowest {
                name: String::new(),
                is_virtual: false,
            });
        }
        let parts = links.iter().filter(|(_, part)| part.master == Some(at));
        let below = seen.below.into_iter().chain(parts.map(|(&part, _)| part));
        let fresh: Vec<u32> = below.filter(|one| !above.contains(one)).collect();
        above.extend(fresh);
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::all::Seen;

    fn seen(name: &str, kind: &str, below: Option<u32>, master: Option<u32>) -> Seen {
        Seen {
            name: name.to_owned(),
            kind: kind.to_owned(),
            below,
            master,
            ..Seen::default()
        }
    }

    #[test]
    fn frames_come_from_the_lowest_interfaces_whatever_stands_between() {
        let mut links = Links::from([
            (1, seen("eth0", "", None, Some(3))),
            (2, seen("eth1", "", None, Some(3))),
            (3, seen("bond0", "bond", None, None)),
            (4, seen("bond0.7", "vlan", Some(3), None)),
            (5, seen("mv0", "macvlan", Some(4), None)),
            (6, seen("veth0", "veth", Some(1), None)),
            (7, seen("mv1", "macvlan", Some(6), None)),
        ]);
        let names = |links: &_, index| {
            lowest(links, index)
                .into_iter()
                .map(|one| one.name)
                .collect::<Vec<_>>()
        };
        for index in [3, 4, 5] {
            assert_eq!(names(&links, index), ["eth0", "eth1"]);
        }
        assert!(names(&links, 1).is_empty() && names(&links, 6).is_empty());
        assert_eq!(names(&links, 7), ["veth0"]);
        // A container's, and a circle, which the kernel does not make.
        let is_on = (None, true);
        links
            .entry(5)
            .and_modify(|seen| (seen.below, seen.is_below_elsewhere) = is_on);
        assert_eq!(names(&links, 5), [""]);
        links.insert(3, seen("bond0", "bond", Some(4), None));
        assert_eq!(names(&links, 4), ["eth0", "eth1"]);
    }

    #[test]
    fn remedy_names_the_interfaces_below() {
        let lowest = |name: &str, is_virtual| Lowest {
            name: name.to_owned(),
            is_virtual,
        };
        assert_eq!(explanation("mv0", &[]), "");
        let one = explanation("mv0", &[lowest("eth0", false)]);
        assert!(
            one.contains("from eth0, whole") && one.ends_with("`ethtool -K eth0 gro off`"),
            "{one}"
        );
        let two = explanation("mv0", &[lowest("eth0", false), lowest("eth1", false)]);
        assert!(
            two.contains("those below") && two.ends_with("`ethtool -K eth1 gro off`"),
            "{two}"
        );
        assert!(explanation("mv0", &[lowest("veth0", true)]).contains("PEER"));
        assert!(explanation("mv0", &[lowest("", false)]).contains("in its network namespace"));
    }
}
