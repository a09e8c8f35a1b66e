//! What a port may say otherwise without a new beginning: its guest stays connected, and no frame is lost.

use super::file::Table;
use super::is_guard;
use crate::rates::is_limit;

/// Keys of a port of a network that the switch's table has, beside those of its guard.
const OF_A_NETWORK: &[&str] = &["hairpin", "isolated", "link-control", "promiscuous"];
/// Keys of every port that its lanes have.
const OF_LANES: &[&str] = &["from-guest-default", HINTS, "rule", "to-guest-default"];
/// What the NIC tells of frames, of a port and of a network's uplink.
const HINTS: &str = "hints";
/// The same, but for ports that have learned addresses in these VLANs, or queues of their own.
const VLANS: &[&str] = &["trunk", "vlan"];

/// Those of these keys, in which two tables of a port differ, for which it has to begin anew.
pub(crate) fn needing_a_beginning(table: &Table, keys: &[String]) -> Vec<String> {
    let in_network = table.get("network").is_some();
    // One with a queue of its own has them in that queue's lease.
    let keeps_vlans = table.get("learning") == Some("true") || table.get("ifname").is_some();
    let is_live = |key: &String| {
        let key = key.as_str();
        is_limit(key)
            || is_guard(key)
            || OF_LANES.contains(&key)
            || (in_network && (OF_A_NETWORK.contains(&key) || (!keeps_vlans && VLANS.contains(&key))))
    };
    keys.iter().filter(|key| !is_live(key)).cloned().collect()
}

/// Whether a network in which these keys are others goes on with its uplink.
pub(crate) fn keeps_uplink(keys: &[String]) -> bool {
    keys == [HINTS]
}

#[cfg(test)]
mod tests {
    use super::super::file::Said;
    use super::*;

    fn table(keys: &[&str]) -> Table {
        let said = |key: &&str| {
            (
                (*key).to_owned(),
                Said {
                    value: String::new(),
                    line: 0,
                },
            )
        };
        Table {
            name: "vm1".to_owned(),
            line: 0,
            keys: keys.iter().map(said).collect(),
        }
    }

    #[test]
    fn vlan_is_changed_live_in_a_network_only() {
        let keys = ["vlan", "mac", "to-guest-bits", "rule", "hints"].map(str::to_owned);
        assert_eq!(needing_a_beginning(&table(&["network"]), &keys), ["mac"]);
        assert_eq!(needing_a_beginning(&table(&["ifname"]), &keys), ["vlan", "mac"]);
        let own = table(&["ifname", "network"]);
        assert_eq!(needing_a_beginning(&own, &keys), ["vlan", "mac"]);
    }
}
