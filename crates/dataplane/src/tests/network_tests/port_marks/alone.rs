//! Frames with nothing but the mark of their port before them.

use model::rates::{PortRates, Rate, Rates};

use super::*;
use crate::policy::rate_limit::PortLimits;

/// A port with this VLAN, whose queue receives frames of a program without hints.
fn world(vlans: Vlans) -> World {
    World::of(vec![port(mac(0), 3, vlans)]).with_hints(HintSet::NONE)
}

impl World {
    /// Such frames arrive, of an address that only the mark leads to the port; returns what the guest gets.
    fn got_of(&mut self, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
        for frame in frames {
            self.arrive_behind(&note(mark_of(0, 3)), frame);
        }
        self.poll();
        self.ports[0].got()
    }
}

#[test]
fn rules_apply() {
    let mut world = world(Vlans::Untagged).posting(16);
    filter(
        &mut world,
        "direction=to-guest action=allow protocol=udp source-ports=7",
    );
    let frames = [udp(7), udp(8), udp(7)];
    assert_eq!(world.got_of(&frames), [udp(7), udp(7)]);
    assert_eq!(world.ports[0].counters.to_guest_filter.get(), 1);
}

#[test]
fn limit_applies() {
    let mut world = world(Vlans::Untagged).posting(16);
    let packets = Some(Rate {
        per_second: 1,
        burst: 2,
    });
    let limits = PortLimits::new(PortRates {
        to_guest: Rates { bits: None, packets },
        ..PortRates::default()
    });
    world.lanes.change(0, |lane, _| lane.set_limits(&limits));
    world.rebuild_forwarding();
    let sent = frame(STRANGER, STRANGER, 60);
    assert_eq!(world.got_of(&vec![sent.clone(); 4]), [sent.clone(), sent]);
    assert_eq!(world.ports[0].counters.to_guest_limit.get(), 2);
}

#[test]
fn tag_is_removed_for_a_port_without_tags() {
    let sent = frame(STRANGER, STRANGER, 60);
    let tagged = [&sent[..12], &[0x81, 0, 0, 5], &sent[12..]].concat();
    for (vlans, got) in [(Vlans::Access(5), &sent), (Vlans::Untagged, &tagged)] {
        let mut world = world(vlans).posting(4);
        assert_eq!(
            world.got_of(std::slice::from_ref(&tagged)),
            std::slice::from_ref(got)
        );
    }
}

#[test]
fn guest_without_buffers_holds_half_of_the_chunks() {
    let mut world = world(Vlans::Untagged);
    let sent = frame(STRANGER, STRANGER, 60);
    for _ in 0..4 {
        assert!(world.got_of(&vec![sent.clone(); 60]).is_empty());
    }
    assert_eq!(world.given(), 64);
    assert_eq!(world.ports[0].counters.to_guest_no_buffer.get(), 240 - 64);
    world.ports[0].post(100);
    world.poll();
    assert_eq!(world.ports[0].got(), vec![sent; 64]);
}

#[test]
fn frames_in_pieces_arrive_whole() {
    let mut world = world(Vlans::Untagged).posting(4);
    let sent = frame(STRANGER, STRANGER, 1000);
    let (first, last) = sent.split_at(500);
    world.arrive_piece(first, true);
    world.leave(&note(mark_of(0, 3)));
    // The metadata of the last piece is that of nothing.
    world.arrive_piece(last, false);
    world.leave(&note(mark_of(7, 9)));
    assert_eq!(world.got_of(std::slice::from_ref(&sent)), [sent.clone(), sent]);
}
