//! Frames with a service tag (802.1ad): of none of our VLANs, whatever number it has.

use super::*;

fn service_tagged(frame: &[u8], vlan: u8) -> Vec<u8> {
    [&frame[..12], &[0x88, 0xa8, 0, vlan], &frame[12..]].concat()
}

#[test]
fn service_tag_is_no_way_into_a_vlan() {
    let vlans = [Vlans::Untagged, Vlans::Access(100), Vlans::Trunk(vec![100])];
    let mut world = World::of_vlans(&vlans).with_uplink(256);
    world.poll();
    // Behind it may be a tag of ours, which is not looked at.
    let inner = |to| [frame(to, STRANGER, 60), tagged(&frame(to, STRANGER, 60), 100)];
    for to in [mac(0), mac(1), mac(2), BROADCAST] {
        for inner in inner(to) {
            world.arrive(&service_tagged(&inner, 100));
        }
    }
    world.poll();
    let wanted = [mac(0), BROADCAST].map(|to| inner(to).map(|inner| service_tagged(&inner, 100)));
    assert_eq!(world.ports[0].got(), wanted.concat(), "as they came");
    for port in [1, 2] {
        assert!(world.ports[port].got().is_empty(), "{port}");
    }
    assert_eq!(world.uplink.to_guest_no_port.get(), 4);
}

/// By tags of its own, whatever they are, and several of them.
#[test]
fn guest_gets_into_no_other_vlan_by_tags() {
    let trunk = Vlans::Trunk(vec![100, 102]);
    let vlans = [Vlans::Access(100), trunk, Vlans::Access(101), Vlans::Untagged];
    let mut world = World::of_vlans(&vlans);
    let mut uplink = world.add_sending_uplink();
    let other_kind = |frame: &[u8], kind: u16| {
        let mut frame = tagged(frame, 101);
        frame[12..14].copy_from_slice(&kind.to_be_bytes());
        frame
    };
    for port in [0, 1, 3] {
        let mut sent = 0;
        for to in [mac(2), mac(3), STRANGER, BROADCAST] {
            let plain = frame(to, mac(port as u8), 60);
            let mut hops = vec![
                tagged(&plain, 101),
                tagged(&tagged(&plain, 101), 100),
                tagged(&tagged(&plain, 100), 101),
                tagged(&tagged(&plain, 101), 0),
                service_tagged(&plain, 101),
                other_kind(&plain, 0x9100),
                tagged(&service_tagged(&plain, 101), 100),
                tagged(&other_kind(&plain, 0x9100), 100),
            ];
            if port == 1 {
                // A trunk has no frames without a VLAN.
                hops.extend([plain.clone(), tagged(&plain, 0)]);
            }
            hops.iter().for_each(|hop| _ = world.ports[port].send(hop));
            sent += hops.len() as u64;
        }
        world.poll();
        assert_eq!(world.ports[port].counters.from_guest_vlan.get(), sent, "{port}");
    }
    assert!(world.ports.iter_mut().all(|port| port.got().is_empty()));
    assert!(uplink.take().is_empty());
    // A priority is no VLAN: the frame is in that of the port.
    for to in [mac(1), STRANGER] {
        world.ports[0].send(&tagged(&frame(to, mac(0), 60), 7 << 13));
    }
    (0..2).for_each(|_| world.poll());
    let in_vlan = |to| tagged(&frame(to, mac(0), 60), 7 << 13 | 100);
    assert_eq!(world.ports[1].got(), [in_vlan(mac(1))]);
    assert_eq!(uplink.take(), [in_vlan(STRANGER)]);
}
