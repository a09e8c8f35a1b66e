//! A queue whose socket and memory stay when a guest goes, for sockets that can be had only once.
//!
//! Between guests the [`Resident`] waits in its [`Home`]; a lane of copy placement takes it from there and puts it
//! back when it is stopped. Chunks that the kernel has meanwhile stay where they are: those to receive into in the
//! fill ring, those sent in the TX or completion ring. All others are in the pool again, whatever the lane had in
//! hand. So what the next lane gives the NIC to receive into is what is missing there: of all chunks those that are
//! neither in the pool nor being sent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use xsk::{FramePool, Umem};

use super::xdp::XdpNic;
use crate::nic::queue::Nic;
use crate::switch::copy::References;

/// See the module's head.
pub(crate) struct Resident<N> {
    pub(crate) nic: N,
    pub(crate) umem: Umem,
    /// The chunks that the kernel does not have.
    pub(crate) pool: FramePool,
    /// Of descriptors that are still being sent.
    pub(crate) references: References,
    pub(crate) share: Share,
}

/// A resident's memory: what it is, and how its chunks are divided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Share {
    /// What backs it, in words.
    pub(crate) backing: String,
    /// How many there are.
    pub(crate) all: usize,
    /// How many of them that the NIC is to have to receive into.
    pub(crate) to_receive: usize,
}

/// Where a resident is while no lane has it.
pub(crate) type Home<N = XdpNic> = Arc<Mutex<Option<Resident<N>>>>;

/// What is in a home.
pub(crate) fn look<N>(home: &Home<N>) -> MutexGuard<'_, Option<Resident<N>>> {
    home.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<N: Nic> Resident<N> {
    /// Chunks that are still to be given to the NIC to receive into.
    pub(crate) fn missing(&self) -> usize {
        let with_nic = self.share.all.saturating_sub(self.pool.len());
        let being_sent = self.nic.unsent().saturating_sub(self.references.total());
        let to_receive = with_nic.saturating_sub(being_sent);
        self.share.to_receive.saturating_sub(to_receive)
    }

    /// Drops what was received for nobody; how many frames that were.
    pub(crate) fn drain(&mut self) -> u64 {
        let mut frames = 0;
        for piece in self.nic.from_nic(usize::MAX) {
            frames += u64::from(!piece.more);
            self.pool.put(piece.frame);
        }
        frames
    }
}

#[cfg(test)]
mod tests {
    use xsk::{OwnMemory, TxDesc, UmemOffset};

    use super::*;
    use crate::switch::test_nic::{TestNic, Wire};

    #[test]
    fn next_lane_gives_the_nic_what_it_lacks_and_no_more() {
        let memory = OwnMemory::new(16 * 2048).expect("memory");
        let umem = Umem::aligned(Arc::new(memory), 2048, 0).expect("good");
        let mut pool: FramePool = umem.all_frames().expect("ours").collect();
        let share = Share {
            backing: String::new(),
            all: pool.len(),
            to_receive: 10,
        };
        let mut nic = TestNic(Arc::new(Mutex::new(Wire::new(umem.clone(), 8, 1))));
        let sent = |frame| TxDesc {
            frame,
            offset: UmemOffset::new(0),
            len: 60,
            more: false,
            metadata: false,
        };
        // Two are being sent, seven are with the NIC to receive into.
        let sending: Vec<_> = (0..2).filter_map(|_| pool.take()).map(sent).collect();
        nic.to_nic(sending.into_iter());
        let mut with_nic: Vec<_> = (0..7).filter_map(|_| pool.take()).collect();
        let references = References::new(&umem);
        let mut resident = Resident {
            nic,
            umem,
            pool,
            references,
            share,
        };
        assert_eq!(resident.missing(), 3);
        with_nic.extend((0..4).filter_map(|_| resident.pool.take()));
        assert_eq!(resident.missing(), 0, "never more than its share");
    }
}
