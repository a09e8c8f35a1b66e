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

#[test]
fn guest_sends_no_service_tag() {
    let vlans = [Vlans::Untagged, Vlans::Access(100), Vlans::Trunk(vec![100])];
    let mut world = World::of_vlans(&vlans).with_uplink(256);
    for port in 0..3 {
        let sent = service_tagged(&frame(mac(0), mac(port), 60), 100);
        world.ports[usize::from(port)].send(&sent);
    }
    world.poll();
    for port in &mut world.ports {
        assert_eq!((port.got().len(), port.counters.from_guest_vlan.get()), (0, 1));
    }
}
