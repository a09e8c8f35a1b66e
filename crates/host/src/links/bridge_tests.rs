//! See [`super`].

use super::*;

const BRIDGE: u32 = 9;
const UPLINK: u32 = 1;

fn mac(last: u16) -> [u8; 6] {
    let [high, low] = last.to_be_bytes();
    [2, 0, 0, 0, high, low]
}

fn station(vlan: u16, last: u16) -> Station {
    let mac = mac(last);
    Station { vlan, mac }
}

fn entry(port: u32, vlan: u16, last: u16) -> Entry {
    Entry {
        bridge: BRIDGE,
        port,
        vlan,
        mac: mac(last),
        is_configured: false,
    }
}

fn read(entries: impl IntoIterator<Item = Entry>) -> Read {
    Read {
        entries: entries.into_iter().collect(),
        ..Read::default()
    }
}

fn configured(port: u32, last: u16) -> Entry {
    Entry {
        is_configured: true,
        ..entry(port, 0, last)
    }
}

/// The interface is a port of a bridge with further ports 2 to 4.
fn port_of(pvid: Option<u16>, tag: Option<u16>) -> BridgeFdb {
    let membership = Membership {
        bridge: BRIDGE,
        bridge_name: "br0".to_owned(),
        port: UPLINK,
        tag,
        pvid,
        learns: true,
        has_stp: false,
    };
    BridgeFdb {
        memberships: vec![membership],
        ports: (1..=4).map(|port| (port, BRIDGE)).collect(),
        ..BridgeFdb::default()
    }
}

fn stations(behind: &BridgeFdb) -> Vec<Station> {
    behind.stations.keys().copied().collect()
}

#[test]
fn bridge_is_found_above_bonds_and_vlans() {
    let seen = |below, master, vlan| Seen {
        below,
        master,
        vlan,
        ..Seen::default()
    };
    let bridge = |filters_vlans| Seen {
        kind: "bridge".to_owned(),
        filters_vlans,
        ..Seen::default()
    };
    // In a bond, which has a VLAN in one bridge, and with a tag of its own in another one; a VLAN in a VLAN.
    let links = Links::from([
        (1, seen(None, Some(2), None)),
        (2, seen(None, Some(8), None)),
        (3, seen(Some(2), Some(9), Some(7))),
        (4, seen(Some(3), Some(9), Some(8))),
        (8, bridge(true)),
        (9, bridge(false)),
    ]);
    let found = memberships_of(&links, 1);
    let found: Vec<_> = found
        .iter()
        .map(|of| (of.bridge, of.port, of.tag, of.pvid))
        .collect();
    assert_eq!(found, [(8, 2, None, Some(0)), (9, 3, Some(7), None)]);
    assert!(memberships_of(&links, 9).is_empty());
    // A circle, which the kernel does not make, has an end.
    let circle = [(1, seen(None, Some(2), None)), (2, seen(None, Some(1), None))];
    assert!(memberships_of(&Links::from(circle), 1).is_empty());
}

#[test]
fn vlans_are_those_of_frames_on_the_interface() {
    let vlans = |pvid, tag, vlan| {
        let mut behind = port_of(pvid, tag);
        behind.take(&read([entry(2, vlan, 1)]));
        let stations = stations(&behind);
        stations.iter().map(|of| of.vlan).collect::<Vec<_>>()
    };
    assert_eq!(vlans(None, None, 0), [ANY_VLAN]);
    assert_eq!(vlans(None, Some(7), 0), [7]);
    assert_eq!(vlans(Some(1), None, 1), [0, 1]);
    assert_eq!(vlans(Some(1), None, 5), [5]);
    assert_eq!(vlans(Some(1), Some(7), 1), [7]);
    assert!(vlans(Some(1), Some(7), 5).is_empty());
}

#[test]
fn forgotten_address_stays_until_it_is_seen_at_the_interface_or_its_port_is_gone() {
    let mut behind = port_of(None, None);
    assert!(behind.take(&read([entry(2, 0, 1), entry(3, 0, 2), entry(UPLINK, 0, 3)])));
    let both = [station(ANY_VLAN, 1), station(ANY_VLAN, 2)];
    assert_eq!(stations(&behind), both);
    assert!(!behind.take(&read([entry(3, 0, 2)])), "silent");
    assert_eq!(stations(&behind), both);
    assert!(behind.take(&read([entry(UPLINK, 0, 1)])), "on the LAN");
    assert_eq!(stations(&behind), both[1..]);
    behind.ports.remove(&3);
    assert!(behind.take(&read([])));
    assert!(stations(&behind).is_empty());
}

#[test]
fn ports_have_equal_shares_and_configured_addresses_come_first() {
    let mut behind = port_of(None, None);
    let flood = (0..5000).map(|last| entry(2, 0, last));
    let few = (6000..6100).map(|last| entry(3, 0, last));
    let all: Vec<_> = flood.chain(few).chain([configured(2, 9000)]).collect();
    let len = all.len();
    let all = read(all);
    assert!(behind.take(&all) && !behind.take(&all));
    assert_eq!(behind.count(), BEHIND_MAX);
    assert_eq!(behind.left_out(), len - BEHIND_MAX);
    let has = |last| behind.stations.contains_key(&station(ANY_VLAN, last));
    assert!((6000..6100).all(has) && has(9000));
}

#[test]
fn configured_address_that_was_not_read_stays() {
    let mut behind = port_of(None, None);
    behind.take(&read([configured(2, 1), configured(3, 2)]));
    let cut = Read {
        cut: [2].into(),
        ..read([entry(2, 0, 3)])
    };
    assert!(behind.take(&cut));
    let stay = [1, 3].map(|last| station(ANY_VLAN, last));
    assert_eq!(
        stations(&behind),
        stay,
        "that of port 3, which was read, was removed"
    );
    assert!(!behind.take(&cut));
    behind.take(&read([]));
    assert_eq!(stations(&behind), [station(ANY_VLAN, 3)], "it was removed");
}

#[test]
fn vlan_of_untagged_frames_is_read_from_the_port() {
    let info = |flags: u16, vlan: u16| {
        let words = [8, VLAN_INFO, flags, vlan];
        words.map(u16::to_ne_bytes).concat()
    };
    assert_eq!(pvid_in(&[info(0, 4), info(IS_PVID, 7)].concat()), Some(7));
    assert_eq!(pvid_in(&info(0, 4)), None);
    assert_eq!(pvid_in(&[]), None);
    // Lengths that cannot be.
    for len in [0u16, 3, 9] {
        let bytes = [len, VLAN_INFO, IS_PVID, 7].map(u16::to_ne_bytes).concat();
        assert_eq!(pvid_in(&bytes), None);
    }
}
