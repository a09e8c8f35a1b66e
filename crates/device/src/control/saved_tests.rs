//! The driver's state, saved as commands, and another device that restores it.

use super::*;

const FIRST: [u8; 6] = [2, 0, 0, 0, 0, 7];

/// All offloads for the guest.
fn guest_offloads() -> u64 {
    Offloads::all().for_guest().features()
}

/// The state, without the address after a reset, and which vrings are enabled, of pairs that can be switched.
fn said(device: &NetDevice) -> (String, Vec<bool>) {
    let state = device.control_state().map(|state| State {
        first_mac: MAC,
        ..state.clone()
    });
    let vrings = 2..u32::from(PAIRS) * 2;
    let enabled = vrings.map(|index| device.vring(index).expect("there").enabled);
    (format!("{state:?}"), enabled.collect())
}

fn fresh(mac: [u8; 6], pairs: u16, features: u64) -> NetDevice {
    let mut device = NetDevice::new(pairs, Offloads::all()).with_control(mac, OFFERED);
    device.acknowledge(features).expect("offered");
    device
}

/// Another device with the restored state of this one; created with another address, if the driver can set it.
fn restored(device: &NetDevice) -> NetDevice {
    let mac = device.control_state().expect("one").mac();
    let first = if device.features() & F_CTRL_MAC_ADDR == 0 {
        mac
    } else {
        FIRST
    };
    let mut other = fresh(first, PAIRS, device.features());
    let commands = device.control_commands();
    other.restore_control(&commands).expect("a driver said it");
    other
}

fn mode(number: u32, on: u8) -> Vec<u8> {
    command(net::VIRTIO_NET_CTRL_RX, number, &[on])
}

fn vlan(number: u16) -> Vec<u8> {
    let data = number.to_le_bytes();
    command(net::VIRTIO_NET_CTRL_VLAN, net::VIRTIO_NET_CTRL_VLAN_ADD, &data)
}

fn offloads(features: u64) -> Vec<u8> {
    let data = features.to_le_bytes();
    command(
        net::VIRTIO_NET_CTRL_GUEST_OFFLOADS,
        net::VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET,
        &data,
    )
}

#[test]
fn another_device_goes_on_with_what_the_driver_said_by_each_command_and_by_all() {
    let features = ALL | guest_offloads();
    let many: Vec<_> = (0..70).map(|last| [2, 0, 0, 0, 1, last]).collect();
    let mut more = commands();
    more.extend((0..6).map(|number| (mode(number, 1), F_CTRL_RX_EXTRA)));
    more.extend([
        (table(&many, &[]), F_CTRL_RX),
        (table(&[], &many[..64]), F_CTRL_RX),
        (table(&[], &many[..65]), F_CTRL_RX),
        (vlan(0), F_CTRL_VLAN),
        (vlan(4095), F_CTRL_VLAN),
        (pairs(1), F_MQ),
        (pairs(PAIRS), F_MQ),
        (hash_config(0, &[]), F_HASH_REPORT),
        (hash_config(3, &KEY[..7]), F_HASH_REPORT),
        (offloads(guest_offloads()), F_CTRL_GUEST_OFFLOADS),
    ]);
    // With all features, and without RSS, so that HASH_CONFIG sets the hash types.
    for features in [features, features & !F_RSS] {
        let mut all = Rig::new(features);
        for (bytes, _) in &more {
            let mut rig = Rig::new(features);
            let _ = (rig.send(bytes), all.send(bytes));
            assert_eq!(said(&restored(&rig.device)), said(&rig.device), "{bytes:x?}");
            assert_eq!(said(&restored(&all.device)), said(&all.device), "{bytes:x?}");
        }
        assert_ne!(said(&all.device), said(&Rig::new(features).device));
    }
    // For a driver that negotiated only one of the features.
    for (bytes, feature) in more {
        let mut rig = Rig::new(F_VERSION_1 | F_CTRL_VQ | feature);
        rig.send(&bytes);
        assert_eq!(said(&restored(&rig.device)), said(&rig.device), "{bytes:x?}");
    }
}

#[test]
fn longest_table_is_saved_and_a_key_survives_the_table() {
    let mut rig = Rig::new(ALL);
    let mut most = Rss::right();
    (most.mask, most.table) = (MOST_TABLE_ENTRIES - 1, vec![1; usize::from(MOST_TABLE_ENTRIES)]);
    (most.unclassified, most.send_pairs) = (0, PAIRS);
    assert!(rig.send(&pairs(2)) && rig.send(&most.command()));
    assert_eq!(said(&restored(&rig.device)), said(&rig.device));
    let longest = rig.device.control_commands().iter().map(Vec::len).max();
    assert_eq!(longest, Some(1077), "as the documentation says");
    for count in [1, 3] {
        assert!(rig.send(&pairs(count)));
        let other = restored(&rig.device);
        assert_eq!(said(&other), said(&rig.device), "{count}");
        let hashing = other.receive(None).hashing().map(crate::hash::Hashing::types);
        assert_eq!(hashing, Some(HashTypes::ALL), "reported as before");
    }
}

#[test]
fn every_vlan_mode_and_list_is_said_in_as_many_commands_as_the_documentation_promises() {
    let mut rig = Rig::new(ALL | guest_offloads());
    for bytes in (0..4096).map(vlan).chain((0..6).map(|number| mode(number, 1))) {
        assert!(rig.send(&bytes));
    }
    for bytes in [
        table(&[OTHER], &[]),
        Rss::right().command(),
        pairs(2),
        offloads(0),
    ] {
        assert!(rig.send(&bytes));
    }
    assert_eq!(rig.device.control_commands().len(), 4096 + 11);
    assert_eq!(said(&restored(&rig.device)), said(&rig.device));
}

#[test]
fn what_was_said_before_is_forgotten_and_what_is_the_devices_own_stays() {
    let mut rig = Rig::new(ALL);
    assert!(rig.send(&command(1, 1, &OTHER)) && rig.send(&vlan(7)) && rig.send(&pairs(3)));
    let mut other = Rig::new(ALL);
    for (bytes, _) in commands() {
        other.send(&bytes);
    }
    other.device.announce();
    other
        .device
        .restore_control(&rig.device.control_commands())
        .expect("a driver said it");
    assert!(other.device.control_state().expect("one").announce());
    rig.device.announce();
    assert_eq!(said(&other.device), said(&rig.device));
    let mut other = restored(&rig.device);
    assert_eq!(other.control_state().expect("one").mac(), OTHER);
    assert!(!other.control_state().expect("one").announce());
    other.set_status(0).expect("valid");
    assert_eq!(other.control_state().expect("one").mac(), FIRST);
}

#[test]
fn device_whose_address_is_no_stations_can_be_restored() {
    let mut device = NetDevice::new(1, Offloads::NONE).with_control([0; 6], OFFERED);
    device
        .acknowledge(F_VERSION_1 | F_CTRL_VQ | F_CTRL_MAC_ADDR)
        .expect("offered");
    assert!(device.control_commands().is_empty());
}

#[test]
fn command_that_is_wrong_is_named_and_nothing_has_changed() {
    let mut wrong_entry = Rss::right();
    wrong_entry.table[1] = PAIRS;
    let cases = [
        (vec![], Refusal::Length),
        (vec![0], Refusal::Length),
        (vec![0, 0], Refusal::Length),
        (mode(0, 2), Refusal::Value),
        (mode(6, 1), Refusal::Unknown),
        (vec![0, 0, 1, 0], Refusal::Length),
        (vec![9, 0, 0], Refusal::Unknown),
        (vlan(4096), Refusal::Value),
        (command(1, 1, &GROUP), Refusal::Value),
        (command(1, 0, &[0xff; 40]), Refusal::Length),
        (pairs(0), Refusal::Value),
        (pairs(PAIRS + 1), Refusal::Pair),
        (wrong_entry.command(), Refusal::Pair),
        (hash_config(1, &KEY), Refusal::Features),
        (offloads(guest_offloads()), Refusal::Features),
    ];
    let mut rig = Rig::new(ALL);
    for (bytes, _) in commands() {
        rig.send(&bytes);
    }
    let before = said(&rig.device);
    for (bytes, source) in cases {
        let begins = bytes[..bytes.len().min(2)].to_vec();
        let refused = RestoreError::Refused {
            at: 1,
            begins,
            source,
        };
        let result = rig.device.restore_control(&[pairs(2), bytes.clone(), vlan(9)]);
        assert_eq!(result, Err(refused), "{bytes:x?}");
        assert_eq!(said(&rig.device), before, "{bytes:x?}");
    }
    // All of the state, for a device with fewer pairs, or without acknowledged features.
    let saved = rig.device.control_commands();
    for (mut other, source) in [
        (fresh(MAC, 1, ALL & !F_MQ), Refusal::Pair),
        (fresh(MAC, PAIRS, 0), Refusal::Features),
    ] {
        let before = format!("{:?}", other.control_state());
        let error = other.restore_control(&saved).expect_err("it cannot");
        assert!(
            matches!(error, RestoreError::Refused { source: why, .. } if why == source),
            "{error}"
        );
        assert_eq!(format!("{:?}", other.control_state()), before);
    }
    let mut vmms = NetDevice::new(2, Offloads::NONE);
    assert!(vmms.control_commands().is_empty());
    let error = vmms.restore_control(&saved).expect_err("it has none");
    assert_eq!(error, RestoreError::NoControlQueue);
}

/// A command that a driver with all features may send; few VLANs, so that some repeat.
fn valid() -> impl Strategy<Value = Vec<u8>> {
    let macs = || {
        let of = |count| prop::collection::vec(any::<[u8; 6]>(), count);
        prop_oneof![of(0..4), of(62..68)]
    };
    let rss = (
        0u32..0x200,
        0u32..10,
        0..PAIRS,
        prop::collection::vec(0..PAIRS, 512),
        1..=PAIRS,
        1..=40usize,
        any::<u8>(),
    );
    let rss = rss.prop_map(
        |(types, bits, unclassified, mut table, send_pairs, key_bytes, byte)| {
            table.truncate(1 << bits);
            let rss = Rss {
                types,
                mask: (1 << bits) - 1,
                unclassified,
                table,
                send_pairs,
                key: vec![byte; key_bytes],
            };
            rss.command()
        },
    );
    prop_oneof![
        (0u32..6, 0u8..2).prop_map(|(number, on)| mode(number, on)),
        (macs(), macs()).prop_map(|(unicast, multicast)| table(&unicast, &multicast)),
        any::<[u8; 5]>().prop_map(|rest| command(1, 1, &[&[2], &rest[..]].concat())),
        (0u32..2, 0u16..9).prop_map(|(what, number)| command(2, what, &[number as u8, 15])),
        Just(command(3, 0, &[])),
        (1..=PAIRS).prop_map(pairs),
        rss,
        (0u32..0x200, any::<u8>(), 1..=40usize)
            .prop_map(|(types, byte, len)| hash_config(types, &vec![byte; len])),
        any::<u64>().prop_map(|bits| offloads(bits & guest_offloads())),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any commands of a driver, in any order, with any negotiated features.
    #[test]
    fn saved_commands_say_what_the_driver_said(
        commands in prop::collection::vec(valid(), 0..20),
        (rss, reports) in any::<(bool, bool)>(),
    ) {
        let without = if rss { 0 } else { F_RSS } | if reports { 0 } else { F_HASH_REPORT };
        let mut rig = Rig::new((ALL | guest_offloads()) & !without);
        for command in commands {
            // HASH_CONFIG and RSS_CONFIG are refused in turn.
            rig.send(&command);
        }
        let other = restored(&rig.device);
        prop_assert_eq!(said(&other), said(&rig.device));
        prop_assert_eq!(other.control_commands(), rig.device.control_commands());
        prop_assert_eq!(
            format!("{:?}", other.negotiated()),
            format!("{:?}", rig.device.negotiated())
        );
    }

    /// Any bytes: all commands are applied, or none.
    #[test]
    fn commands_from_anywhere_leave_the_device_sound(
        commands in prop::collection::vec((0u8..7, 0u8..7, prop::collection::vec(any::<u8>(), 0..90)), 1..4),
    ) {
        let commands: Vec<_> = commands
            .into_iter()
            .map(|(class, what, data)| command(class.into(), what.into(), &data))
            .collect();
        let mut device = fresh(MAC, PAIRS, ALL);
        let before = said(&device);
        let mut rig = Rig::new(ALL);
        let all_right = commands.iter().all(|command| rig.send(command));
        prop_assert_eq!(device.restore_control(&commands).is_ok(), all_right);
        if !all_right {
            prop_assert_eq!(said(&device), before);
        }
    }
}
