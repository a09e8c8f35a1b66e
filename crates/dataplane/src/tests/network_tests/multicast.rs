//! Copies of frames to groups that came to the uplink.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use steer::Group;

use super::*;
use crate::uplink::multicast_lane::{MulticastLane, ReadGroups};

/// What the XDP program has copied: frames with their VLANs.
pub(super) struct Copies {
    frames: VecDeque<(u16, Vec<u8>)>,
    event: OwnedFd,
}

impl Copies {
    pub(super) fn new(frames: impl IntoIterator<Item = (u16, Vec<u8>)>) -> Self {
        Self {
            frames: frames.into_iter().collect(),
            event: eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"),
        }
    }
}

impl AsFd for Copies {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl ReadGroups for Copies {
    fn read(&mut self, frame: &mut Vec<u8>) -> Option<Group> {
        let (vlan, copy) = self.frames.pop_front()?;
        *frame = copy;
        Some(Group { queue: 0, vlan })
    }

    fn has_record(&mut self) -> bool {
        !self.frames.is_empty()
    }
}

#[test]
fn unicast_only_port_receives_no_multicast_from_guests_or_the_uplink() {
    let unicast_only = fdb_port_with(0, |port| port.options.unicast_only = true);
    let mut world = World::of(vec![unicast_only, fdb_port(1), fdb_port(2)]).posting(16);
    let multicast = [BROADCAST, [0x33, 0x33, 0, 0, 0, 1]];
    let from_lan = multicast.map(|to| frame(to, STRANGER, 60));
    let copies = from_lan.clone().map(|frame| (0, frame));
    let lane = MulticastLane::new(Copies::new(copies), false, Arc::default());
    let network = NETWORK.into();
    world.add_slot(Box::new(lane), Role::Multicast { network });
    world.rebuild_forwarding();
    world.poll();
    let from_guest = multicast.map(|to| frame(to, mac(1), 60));
    let unicast = frame(mac(0), mac(1), 60);
    for frame in from_guest.iter().chain([&unicast]) {
        world.ports[1].send(frame);
    }
    world.poll();
    assert_eq!(world.ports[0].got(), [unicast]);
    assert_eq!(world.ports[2].got(), [from_lan, from_guest].concat());
    assert_eq!(world.ports[1].counters.from_guest_multicast_frames.get(), 2);
}

/// Of a guest that has moved to another host it is no returned one.
#[test]
fn returned_frame_is_dropped_and_counted() {
    let mut world = World::of_vlans(&[
        Vlans::Untagged,
        Vlans::Untagged,
        Vlans::Access(100),
        Vlans::Untagged,
    ]);
    world.lanes.slots.remove(3).lane.stop();
    let of_the_lan = frame(BROADCAST, STRANGER, 60);
    let of_moved = frame(BROADCAST, mac(3), 60);
    let copies = [
        (0, frame(BROADCAST, mac(0), 60)),
        (100, tagged(&frame(BROADCAST, mac(2), 60), 100)),
        (0, of_the_lan.clone()),
        (0, of_moved.clone()),
        // In another VLAN the address is nobody's.
        (0, frame(BROADCAST, mac(2), 61)),
    ];
    let counters = Arc::<PairCounters>::default();
    let lane = MulticastLane::new(Copies::new(copies), false, Arc::clone(&counters));
    let network = NETWORK.into();
    world.add_slot(Box::new(lane), Role::Multicast { network });
    world.rebuild_forwarding();
    world.poll();
    let wanted = [of_the_lan, of_moved, frame(BROADCAST, mac(2), 61)];
    assert_eq!(world.ports[0].got(), wanted);
    assert_eq!(world.ports[1].got(), wanted);
    assert!(world.ports[2].got().is_empty());
    assert_eq!(counters.returned_frames.get(), 2);
}
