//! A guest that lies: each lie closes its own port, with a named reason, and no other.
//!
//! Two guests in one process, each on a queue of its own of a veth pair. The first lies; its connection must be closed
//! and the reason be told in the log and in `status`; the second goes on; the first may come back. All lies that a ring
//! can tell are in the unit tests of `virtqueue`, those about buffers in crate `dataplane` (`tests/request_tests.rs`).

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::driver::{F_EVENT_IDX, F_INDIRECT, F_MRG_RXBUF, F_RING_PACKED, F_VERSION_1};
use testkit::pair::Ring;
use testkit::{DriverConfig, TwoGuests, require};
use virtqueue::GuestAddr;
use virtqueue::layout::{DESC_WRITE, Descriptor, PACKED_AVAIL, PackedDescriptor};

const QUEUE: u16 = 64;
const MIB: u64 = 1 << 20;

/// The ring features of a split ring: none. For a packed one they are F_RING_PACKED.
const SPLIT: u64 = 0;

/// The place of an invalid value.
enum Queue {
    Transmit,
    Receive,
}

/// More chains than there are entries.
fn avail_index_jump(ring: &Ring) {
    let split = ring.driver.split();
    split.set_avail_idx(split.avail_idx().wrapping_add(QUEUE + 1));
    ring.kick();
}

fn address_outside_memory(ring: &Ring) {
    let split = ring.driver.split();
    let (addr, len, flags, next) = (1 << 40, 2048, DESC_WRITE, 0);
    split.write_descriptor(
        0,
        Descriptor {
            addr,
            len,
            flags,
            next,
        },
    );
    let index = split.avail_idx();
    split.set_avail_entry(index, 0);
    split.set_avail_idx(index.wrapping_add(1));
    ring.kick();
}

fn readable_in_receive(ring: &Ring) {
    let (addr, len, id, flags) = (MIB, 2048, 0, PACKED_AVAIL);
    let desc = PackedDescriptor { addr, len, id, flags };
    ring.driver.packed().write_slot(0, desc);
    ring.kick();
}

/// A guest tells a lie in a queue of that form, and its port is closed for this reason, and no other port.
#[rstest]
#[case(SPLIT, Queue::Transmit, "avail-index-jump", avail_index_jump)]
#[case(SPLIT, Queue::Receive, "outside-memory", address_outside_memory)]
#[case(F_RING_PACKED, Queue::Receive, "readable-in-receive", readable_in_receive)]
fn lie_closes_only_that_port(
    #[case] ring: u64,
    #[case] queue: Queue,
    #[case] reason: &str,
    #[case] lie: fn(&Ring),
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let config = DriverConfig {
        features: F_VERSION_1 | F_MRG_RXBUF | F_EVENT_IDX | F_INDIRECT | ring,
        queue_size: u32::from(QUEUE),
        regions: vec![(GuestAddr(0), 4 * MIB), (GuestAddr(1 << 32), 4 * MIB)],
        ..DriverConfig::default()
    };
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
