//! Multicast that arrived at the uplink's queue: a copy for each port of its VLAN that has a buffer now.
//!
//! Each frame costs a look-up for each port that has filter rules. So a batch may be very much work: frames beyond a
//! budget wait for the next round, and nothing more is received meanwhile.

use packet::HEADERS_MAX;
use packet::ethernet::{self, LOOK_BYTES};
use xsk::{RxDesc, Umem};

use super::UplinkLane;
use crate::fdb::FdbPort;
use crate::frame::bytes::{UmemRange, read_start};
use crate::frame::retag::untag;
use crate::guest::copies::write_copy;
use crate::guest::to_guest::{NO_OFFLOAD, UmemBytes};
use crate::lane::Siblings;
use crate::lane::limits::BATCH;
use crate::nic::endpoint::NicQueue;
use crate::nic::lent::Lent;
use crate::policy::filter::Facts;

impl<N: Lent> UplinkLane<N> {
    /// Whether a whole multicast frame waits.
    pub(super) fn has_multicast(&self) -> bool {
        self.multicast.iter().any(|piece| !piece.more)
    }

    /// Delivers waiting frames, as far as the round's budget allows; returns how many copies were written.
    pub(super) fn deliver_multicast(
        &mut self,
        queue: &mut NicQueue<N>,
        siblings: &mut dyn Siblings,
    ) -> usize {
        let mut frames = 0;
        while self.multicast_work < BATCH
            && let Some(end) = self.multicast.iter().position(|piece| !piece.more)
        {
            frames += self.deliver_to_all(queue, end + 1, siblings);
            queue
                .empty
                .extend(self.multicast.drain(..=end).map(|piece| piece.frame));
        }
        frames
    }

    /// Delivers the first waiting frame, of `pieces` pieces, to all guests that have buffers now; returns the copies.
    fn deliver_to_all(
        &mut self,
        queue: &mut NicQueue<N>,
        pieces: usize,
        siblings: &mut dyn Siblings,
    ) -> usize {
        let umem = &queue.umem;
        let vlan = vlan_of(umem, &self.multicast[0]);
        let mut frames = 0;
        // Ports with tags first: for the others the tag is removed from the frame itself.
        for is_tagged in [true, false] {
            if !is_tagged && vlan != 0 {
                untag(umem, &mut self.multicast[0]);
            }
            self.ranges.clear();
            self.ranges
                .extend(self.multicast[..pieces].iter().map(UmemRange::of));
            let len: u32 = self.ranges.iter().map(|range| range.len).sum();
            for (at, inbox) in self.inboxes.iter_mut().enumerate() {
                // Multicast arrives at uplinks only.
                let known = self.forwarding.fdb.port(inbox.port);
                // Multicast goes to the first pair.
                if self.inbox_of[usize::from(inbox.port.0)].index.first() != Some(at) {
                    continue;
                }
                let takes = |port: &FdbPort| {
                    !port.options.unicast_only
                        && port.vlans.carries(vlan)
                        && port.vlans.is_tagged() == is_tagged
                };
                if !known.is_some_and(takes) {
                    continue;
                }
                let delivered = siblings.deliver_to(inbox.guest.at, |target| {
                    if inbox.is_filtered {
                        let mut head = [0; HEADERS_MAX];
                        let head = read_start(umem, &self.multicast[0], &mut head);
                        let admits = target.allows(head, Facts::of_len(len as usize));
                        let work = target.take_work();
                        self.deficit += work;
                        self.multicast_work += work;
                        if !admits {
                            return Ok(0);
                        }
                    }
                    let offload = match (&mut inbox.look, &self.ranges[..]) {
                        (Some(look), &[range]) => look.look(umem, range, &target.counters),
                        _ => NO_OFFLOAD,
                    };
                    write_copy(target, len, offload, &mut UmemBytes::new(umem, &self.ranges))
                });
                frames += delivered.unwrap_or(0);
            }
        }
        frames
    }
}

/// The VLAN of a frame, by its first piece; 0: none.
fn vlan_of(umem: &Umem, piece: &RxDesc) -> u16 {
    let mut bytes = [0; LOOK_BYTES];
    read_start(umem, piece, &mut bytes);
    ethernet::head(&bytes).tags.vlan()
}
