//! Hints that are switched while frames wait for their lane.

use device::counters::Counter;

use super::*;

fn tell(world: &mut World, hints: HintSet) {
    let uplink = world.lanes.slots.last_mut().expect("it was made last");
    uplink
        .lane
        .set_metadata(&XdpMetadata::of(hints, &[note_layout(), layout()]));
}

#[test]
fn frames_that_wait_are_read_by_what_was_left_before_them() {
    let vlans = [Vlans::Access(100), Vlans::Trunk(vec![100])];
    let known = (0..).zip(vlans).map(|(at, vlans)| port(mac(at), 5, vlans));
    let without = XdpMetadata::of(HintSet::NONE, &[note_layout()]);
    let mut world = World::of(known.collect()).with_uplink_of(256, |queue| queue.set_metadata(&without));
    world.poll();
    world.ports.iter_mut().for_each(|port| port.post(64));
    let to = |port: u8, len| frame(mac(port), STRANGER, len);
    let tag = Left::tag(0x8100, 100).bytes();
    for len in [60, 70, 80] {
        // Of the plain program, which finds tags in frames only; of the other one; and of the plain one again.
        world.arrive_behind(&note(mark_of(0, 5)), &tagged(&to(0, len), 100));
        world.arrive_behind(&note(mark_of(1, 5)), &tagged(&to(1, len), 100));
        tell(&mut world, HintSet::VLAN);
        world.arrive_behind(&tag, &to(0, len + 1));
        world.arrive_behind(&tag, &to(1, len + 1));
        tell(&mut world, HintSet::NONE);
        world.arrive_behind(&note(mark_of(0, 5)), &tagged(&to(0, len + 2), 100));
        world.arrive_behind(&note(mark_of(1, 5)), &tagged(&to(1, len + 2), 100));
        world.poll();
        let all = |port: u8| [len, len + 1, len + 2].map(|len| to(port, len));
        assert_eq!(world.ports[0].got(), all(0));
        assert_eq!(world.ports[1].got(), all(1).map(|frame| tagged(&frame, 100)));
    }
    let uplink = &world.uplink;
    let unknown = [&uplink.to_guest_hints_unknown, &uplink.to_guest_tag_unknown];
    assert_eq!(unknown.map(Counter::get), [0, 0]);
}
