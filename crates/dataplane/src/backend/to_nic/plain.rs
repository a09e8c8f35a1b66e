//! Copies frames that need nothing but a copy, each into one chunk, in one loop. Most frames are of that kind.

use device::pair::{Piece, Sending, Vring};
use packet::checksum::ChecksumAt;
use virtqueue::{Chains, MemoryMap};
use xsk::{Frame, TxDesc, Umem};

use super::{NicSink, fill_up};
use crate::frame::bytes::{guest_to_umem, head_and_rest_to_umem};
use crate::guest::from_guest::{Budget, Sink};
use crate::nic::endpoint::NicQueue;
use crate::nic::queue::{Nic, Sends};

impl<N: Nic> NicSink<'_, N> {
    /// Copies the frames of these chains, from the first on, as long as they are plain and there is room; returns how
    /// many. The caller marks them used.
    #[inline]
    pub(crate) fn put_plain(&mut self, vring: &Vring, chains: &Chains, budget: &mut Budget) -> usize {
        if self.transmit.uses_tap || self.unsendable(self.counters).is_some() {
            return 0;
        }
        let NicQueue {
            umem, pool, sends, ..
        } = &mut *self.queue;
        let (most, most_bytes) = budget.left();
        let longest = umem.max_sent_bytes();
        let before = self.transmit.outgoing.len();
        let room = self.ring.saturating_sub(before).min(most);
        let mut bytes = 0;
        let copied = chains.iter().take(room).map_while(|chain| {
            let buffers = chains.buffers(chain);
            let Sending { start, len, .. } = vring.plain(chain, buffers)?;
            if len > longest || bytes >= most_bytes {
                return None;
            }
            let chunk = pool.take()?;
            let frame = Piece {
                offset: buffers[0].offset + u64::from(start.within),
                len,
            };
            guest_to_umem(&vring.guest.memory, frame, umem, umem.send_offset(&chunk))?;
            bytes += u64::from(len);
            Some(whole(umem, *sends, chunk, len))
        });
        self.transmit.outgoing.extend(copied);
        let done = self.transmit.outgoing.len() - before;
        budget.charge_plain(done, bytes);
        done
    }

    /// Does the same for classified frames: the head is in the daemon's memory, and the rest in guest memory. `outer`
    /// makes the headers in front of each, of its head and length. Stops once it has copied `most_bytes`. Returns the number
    /// of frames that it copied, and of their bytes.
    #[inline]
    pub(crate) fn copy_classified<'f, H: AsRef<[u8]>>(
        &mut self,
        memory: &MemoryMap,
        frames: impl Iterator<Item = (Option<ChecksumAt>, &'f [u8], Piece)>,
        most_bytes: u64,
        mut outer: impl FnMut(&[u8], u32) -> H,
    ) -> (usize, u64) {
        if self.transmit.uses_tap || self.unsendable(self.counters).is_some() {
            return (0, 0);
        }
        let NicQueue {
            umem, pool, sends, ..
        } = &mut *self.queue;
        let longest = umem.max_sent_bytes();
        let before = self.transmit.outgoing.len();
        let mut bytes = 0;
        let copied = frames
            .take(self.ring.saturating_sub(before))
            .map_while(|(asked, head, rest)| {
                if asked.is_some() || bytes >= most_bytes {
                    return None;
                }
                let len = rest.len + head.len() as u32;
                let outer = outer(head, len);
                let outer = outer.as_ref();
                let len = len + outer.len() as u32;
                if len > longest {
                    return None;
                }
                let chunk = pool.take()?;
                let to = umem.send_offset(&chunk);
                head_and_rest_to_umem(memory, (outer, head), rest, umem, to)?;
                bytes += u64::from(len);
                Some(whole(umem, *sends, chunk, len))
            });
        self.transmit.outgoing.extend(copied);
        (self.transmit.outgoing.len() - before, bytes)
    }
}

/// The descriptor that sends a frame of `len` bytes, which was copied into a chunk.
#[inline(always)]
pub(super) fn whole(umem: &Umem, sends: Sends, chunk: Frame, len: u32) -> TxDesc {
    let data = umem.send_offset(&chunk);
    TxDesc {
        frame: chunk,
        offset: data,
        len: fill_up(umem, data, len, sends),
        more: false,
        metadata: false,
    }
}
