//! What lessees of leased queues have in common: memory offered and registered, streams received.
#![allow(unsafe_code)]

use std::net::TcpStream;
use std::os::fd::AsFd;

use steward_client::{Area, LeaseError, QueueLease, Refill};
use steward_protocol::{Part, ZcrxRegistered};
use testkit::wait;
use zcrx::{Event, Leased, Offer, Prepared, Receiver, Registered};

/// Has the queue registered with these rings and this memory.
pub(crate) fn register(
    lease: &mut QueueLease,
    prepared: &[Prepared],
    offer: &Offer,
) -> Result<ZcrxRegistered, LeaseError> {
    let rings: Vec<_> = prepared.iter().map(AsFd::as_fd).collect();
    let area = Area {
        file: offer.file(),
        part: Part {
            file_offset: offer.file_offset(),
            len: offer.bytes(),
        },
    };
    let refill = Refill {
        entries: offer.refill_entries(),
        buffer_bytes: offer.buffer_bytes(),
    };
    lease.register(&rings, area, refill)
}

/// What the steward registered, taken up.
pub(crate) fn taken_up(
    offer: Offer,
    first: &Prepared,
    registered: &ZcrxRegistered,
    no_device: bool,
) -> Leased {
    let report = Registered {
        refill_entries: registered.entries,
        buffer_bytes: registered.buffer_bytes,
        offsets: registered.offsets,
        map_offset: registered.map_offset,
        map_bytes: registered.map_bytes,
        no_device,
    };
    // SAFETY: what the steward report of it.
    unsafe { offer.registered(first, report) }.expect("mapped")
}

/// What is sent to a receiver of that number.
pub(crate) fn bytes_of(seed: usize) -> Vec<u8> {
    // Computed once: an interpreted guest takes a second for each few megabytes. The period's length is a prime.
    let period: Vec<u8> = (seed..seed + 65_521)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let mut bytes = period.repeat((2 << 20) / period.len() + 1);
    bytes.truncate(2 << 20);
    bytes
}

/// All that comes until the peer is done.
pub(crate) fn all_of(receiver: &mut Receiver, socket: TcpStream) -> Vec<u8> {
    let mut received = Vec::new();
    receiver.add(socket).expect("a connection");
    loop {
        while let Some(event) = receiver.next_event() {
            match event {
                Event::Received { piece, .. } => received.extend_from_slice(&piece),
                Event::Ended { error, .. } => {
                    assert!(error.is_none(), "{error:?}");
                    return received;
                }
                _ => {}
            }
        }
        receiver.wait(Some(wait::SOON)).expect("it goes on");
    }
}
