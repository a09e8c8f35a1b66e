//! The server's queue, leased from the steward: for users without the privilege to register one.

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use anyhow::Context as _;
use steward_client::{Area, QueueLease, Refill, Waiting};
use steward_protocol::{Part, ZcrxWanted};
use zcrx::{Config, Offer, Prepared, Receiver, Registered};

/// The loopback has no queue of a device: the kernel copies.
const LOOPBACK: &str = "lo";

/// The queue to lease.
#[derive(Debug)]
pub(super) struct QueueRequest {
    /// The steward's socket.
    pub(super) steward: PathBuf,
    pub(super) interface: String,
    pub(super) queue: u32,
}

impl QueueRequest {
    /// Leases the queue for connections to `address`; returns a receiver, and the lease, which ends when it is dropped.
    /// Errors: those of the steward and of the receiver.
    pub(super) fn take(
        &self,
        address: SocketAddr,
        config: &Config,
    ) -> anyhow::Result<(Receiver, QueueLease)> {
        let wanted = ZcrxWanted {
            interface: self.interface.clone(),
            queue: self.queue,
            flows: vec![address],
        };
        let mut lease = QueueLease::take(&self.steward, &wanted, Waiting::default())?;
        let receiver = self.receiver(&mut lease, config)?;
        Ok((receiver, lease))
    }

    #[allow(unsafe_code)]
    fn receiver(&self, lease: &mut QueueLease, config: &Config) -> anyhow::Result<Receiver> {
        let prepared = Prepared::new(config)?;
        let offer = Offer::new(config)?;
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
        let said = lease.register(&[prepared.as_fd()], area, refill)?;
        let number = said
            .numbers
            .first()
            .copied()
            .context("the steward names no number of the queue: another version?")?;
        let registered = Registered {
            refill_entries: said.entries,
            buffer_bytes: said.buffer_bytes,
            offsets: said.offsets,
            map_offset: said.map_offset,
            map_bytes: said.map_bytes,
            no_device: self.interface == LOOPBACK,
        };
        // SAFETY: these are the steward's values for this memory and this ring.
        let leased = unsafe { offer.registered(&prepared, registered) }?;
        Ok(Receiver::start_leased(prepared, &leased, number, config)?)
    }
}
