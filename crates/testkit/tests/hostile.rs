//! A guest that lies: each lie closes its own port, with a named reason, and no other.
//!
//! Two guests in one process, each on a queue of its own of a veth pair. The first lies; its connection must be closed
//! and the reason be told in the log and in `status`; the second goes on; the first may come back. All lies that a ring
//! can tell are in the unit tests of `virtqueue`; here is one of each part of the daemon that finds some.

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::driver::{F_EVENT_IDX, F_INDIRECT, F_MRG_RXBUF, F_RING_PACKED, F_VERSION_1};
use testkit::pair::Ring;
use testkit::{DriverConfig, TwoGuests, require, soak};
use virtqueue::GuestAddr;
use virtqueue::layout::{
    DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor, PACKED_AVAIL, PACKED_USED, PackedDescriptor,
};

const QUEUE: u16 = 64;
const MIB: u64 = 1 << 20;

/// The ring features of a split ring: none. For a packed one they are F_RING_PACKED.
const SPLIT: u64 = 0;

/// The place of an invalid value.
enum Queue {
    Transmit,
    Receive,
}

fn config(ring: u64) -> DriverConfig {
    DriverConfig {
        features: F_VERSION_1 | F_MRG_RXBUF | F_EVENT_IDX | F_INDIRECT | ring,
        queue_size: u32::from(QUEUE),
        regions: vec![(GuestAddr(0), 4 * MIB), (GuestAddr(1 << 32), 4 * MIB)],
        ..DriverConfig::default()
    }
}

fn next(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor {
        addr,
        len,
        flags,
        next,
    }
}

/// Shows the device a chain that begins at descriptor 0, where a lie is.
fn show(ring: &Ring) {
    let index = ring.driver.split().avail_idx();
    ring.driver.split().set_avail_entry(index, 0);
    ring.driver.split().set_avail_idx(index.wrapping_add(1));
    ring.kick();
}

/// A chain of one descriptor.
fn one(ring: &Ring, desc: Descriptor) {
    ring.driver.split().write_descriptor(0, desc);
    show(ring);
}

/// A table of the given entries, in guest memory at 3 MiB.
fn table(ring: &Ring, entries: &[Descriptor]) -> u64 {
    let table = GuestAddr(3 * MIB);
    (0..)
        .zip(entries)
        .for_each(|(at, &entry)| ring.driver.split().write_table_entry(table, at, entry));
    table.get()
}

/// A guest tells a lie in a queue of that form, and its port is closed for this reason, and no other port.
#[rstest]
#[case::descriptor_loop(SPLIT, Queue::Transmit, "descriptor-loop", |r: &Ring| {
    r.driver.split().write_descriptor(1, next(MIB, 100, DESC_NEXT, 0));
    one(r, next(MIB, 100, DESC_NEXT, 1));
})]
#[case::address_outside_memory(SPLIT, Queue::Transmit, "outside-memory", |r: &Ring| one(r, next(1 << 40, 100, 0, 0)))]
#[case::avail_index_jump(SPLIT, Queue::Transmit, "avail-index-jump", |r: &Ring| {
    r.driver.split().set_avail_idx(r.driver.split().avail_idx().wrapping_add(QUEUE + 1));
    r.kick();
})]
#[case::shorter_than_the_header(SPLIT, Queue::Transmit, "chain-shorter-than-header", |r: &Ring| one(r, next(MIB, 11, 0, 0)))]
#[case::writable_in_transmit(SPLIT, Queue::Transmit, "writable-in-transmit", |r: &Ring| one(r, next(MIB, 100, DESC_WRITE, 0)))]
#[case::indirect_in_indirect(SPLIT, Queue::Transmit, "nested-indirect", |r: &Ring| {
    let inner = table(r, &[next(MIB, 32, DESC_INDIRECT, 0)]);
    one(r, next(inner, 16, DESC_INDIRECT, 0));
})]
#[case::address_outside_memory(SPLIT, Queue::Receive, "outside-memory", |r: &Ring| one(r, next(1 << 40, 2048, DESC_WRITE, 0)))]
#[case::shorter_than_the_header(SPLIT, Queue::Receive, "chain-shorter-than-header", |r: &Ring| one(r, next(MIB, 11, DESC_WRITE, 0)))]
#[case::readable_in_receive(SPLIT, Queue::Receive, "readable-in-receive", |r: &Ring| one(r, next(MIB, 2048, 0, 0)))]
#[case::list_that_goes_on_nowhere(F_RING_PACKED, Queue::Transmit, "chain-incomplete", |r: &Ring| lay(r, &[(MIB, 100, DESC_NEXT)]))]
#[case::address_outside_memory(F_RING_PACKED, Queue::Transmit, "outside-memory", |r: &Ring| lay(r, &[(1 << 40, 100, 0)]))]
#[case::readable_in_receive(F_RING_PACKED, Queue::Receive, "readable-in-receive", |r: &Ring| lay(r, &[(MIB, 2048, 0)]))]
fn lie_closes_only_that_port(
    #[case] ring: u64,
    #[case] queue: Queue,
    #[case] reason: &str,
    #[case] lie: fn(&Ring),
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    // The short form tests each lie in copy placement, and `outside-memory` alone in the other placements, too.
    if soak::leaves_out(placement == Placement::Copy || reason == "outside-memory") {
        return;
    }
    require!(Root);
    let config = config(ring);
    let guests = TwoGuests::new(placement, &config);
    let pair = &guests.liar.pairs[0];
    match queue {
        Queue::Transmit => lie(&pair.from_guest),
        Queue::Receive => {
            lie(&pair.to_guest);
            // What arrives makes the daemon look at the receive queue, should the kick not do.
            guests.send_to_every_queue();
        }
    }
    guests.assert_closed_alone(reason, &config);
}

#[rstest]
fn used_buffers_named_twice_harm_only_the_guest_that_named_them(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut guests = TwoGuests::new(placement, &config(SPLIT));
    let ring = &guests.liar.pairs[0].from_guest;
    ring.driver.split().write_descriptor(0, next(MIB, 112, 0, 0));
    for at in 0..QUEUE {
        ring.driver.split().set_avail_entry(at, 0);
    }
    ring.driver.split().set_avail_idx(QUEUE);
    ring.kick();
    // Sixty-four times the same frame, or a closed port: both are an answer. The daemon and the other guest live.
    guests.assert_honest_guest_sends();
    guests.daemon.process().check();
}

/// Shows the device descriptors from slot 0 of a packed ring on, the first one last; all available in the first lap.
fn lay(ring: &Ring, descs: &[(u64, u32, u16)]) {
    for (slot, &(addr, len, flags)) in (0..QUEUE).zip(descs).collect::<Vec<_>>().into_iter().rev() {
        let (id, flags) = (slot, flags | PACKED_AVAIL);
        ring.driver
            .packed()
            .write_slot(slot, PackedDescriptor { addr, len, id, flags });
    }
    ring.kick();
}

/// The packed form of an index jump: descriptors that the device still holds are made available once more.
#[test]
fn packed_descriptors_made_available_twice_close_only_that_port() {
    require!(Root);
    let config = config(F_RING_PACKED);
    let guests = TwoGuests::new(Placement::Direct, &config);
    let ring = &guests.liar.pairs[0].to_guest;
    // Held until frames come, of which there are none.
    guests
        .daemon
        .await_rest_after(|| lay(ring, &[(MIB, 2048, DESC_WRITE); QUEUE as usize]));
    let again = PackedDescriptor {
        addr: MIB,
        len: 2048,
        id: 0,
        flags: DESC_WRITE | PACKED_USED,
    };
    (0..QUEUE).for_each(|slot| ring.driver.packed().write_slot(slot, again));
    ring.kick();
    guests.assert_closed_alone("ring-overrun", &config);
}
