//! Frames with equal heads are classified by that alone, and those between them by themselves.

use virtqueue::GuestAddr;
use virtqueue::driver::Buffer;

use super::{World, frame, mac};
use crate::tests::test_guest::HEADER;
use device::counters::Counter;

#[test]
fn frames_with_equal_heads_arrive_whole_with_any_lengths_between_others() {
    let mut world = World::new(&[0, 128, 128]);
    let mut wanted = [Vec::new(), Vec::new(), Vec::new()];
    let asks = |at: usize, bits: u8| {
        let mut header = [0; HEADER as usize];
        header[at] = bits;
        header
    };
    for (at, len) in (0..).zip((14..70).step_by(7).chain([1514])) {
        for to in [1, 1, 2, 1] {
            let sent = frame(mac(to), mac(0), len);
            world.ports[0].send(&sent);
            wanted[usize::from(to)].push(sent);
        }
        // It begins as the one before it; the guest was not offered what this one asks for, or it is no frame.
        let alike = frame(mac(1), mac(0), len);
        match at % 4 {
            0 => world.ports[0].send_with(asks(0, 1), &alike),
            1 => world.ports[0].send_with(asks(1, 1), &alike),
            2 => world.ports[0].send(&alike[..13]),
            _ => world.ports[0].send(&frame(mac(1), mac(0), 1523)),
        };
        // In two buffers.
        let bytes = [&[0; HEADER as usize][..], &alike].concat();
        let addr = world.ports[0].memory.put(&bytes);
        let first = HEADER + len as u32 / 2;
        let buffers = [
            Buffer::readable(addr, first),
            Buffer::readable(GuestAddr(addr.0 + u64::from(first)), bytes.len() as u32 - first),
        ];
        world.ports[0].from_guest.add(&buffers).expect("room");
        world.ports[0].from_guest.publish();
        wanted[1].push(alike);
        world.poll();
    }
    for to in [1, 2] {
        assert_eq!(world.ports[to].got(), wanted[to]);
    }
    let counters = &world.ports[0].counters;
    let dropped = [
        &counters.from_guest_offload_not_negotiated,
        &counters.from_guest_runt,
        &counters.from_guest_too_long,
    ];
    assert_eq!(dropped.map(Counter::get), [5, 2, 2]);
    assert_eq!(counters.from_guest_frames.get(), 9 * 5);
}
