//! Multicast frames that arrived at a network's uplink: copies of frames that go to the host's stack
//! ([`steer::MulticastReader`]). Each is delivered to all ports of its VLAN that have a buffer now.
//!
//! Multicast of a guest goes to the host, too, as if the uplink had received it. Where XDP is in skb mode, such frames
//! arrive here again. The ports have them already, so they are counted (`returned_frames`) and dropped.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use acl::FlowHints;
use device::counters::PairCounters;
use device::meter;
use device::pair::Fault;
use packet::ethernet::Mac;
use steer::{Group, MulticastReader};

use crate::fdb::FdbKey;
use crate::fdb::forwarding::Forwarding;
use crate::guest::copies::Several;
use crate::lane::limits::BATCH;
use crate::lane::{Lane, Siblings, Stopped, Work};

/// Bytes of an address.
const MAC_BYTES: usize = size_of::<Mac>();

/// See the module's head.
pub struct MulticastLane<R = MulticastReader> {
    reader: R,
    counters: Arc<PairCounters>,
    /// Frames may come from a stack on the same machine, which leaves checksums unfinished.
    partial_checksums: bool,
    forwarding: Arc<Forwarding>,
    /// The current frame; the memory is reused.
    frame: Vec<u8>,
    /// Work beyond earlier budgets, in frames: the next batches are shorter. One frame costs a look-up for each port
    /// that has filter rules.
    deficit: usize,
}

/// A source of multicast frames.
pub trait ReadGroups: AsFd + Send {
    /// Reads the next frame into `frame`.
    fn read(&mut self, frame: &mut Vec<u8>) -> Option<Group>;
    /// Whether a frame waits; if not, the descriptor reports the next one.
    fn has_record(&mut self) -> bool;
}

impl ReadGroups for MulticastReader {
    fn read(&mut self, frame: &mut Vec<u8>) -> Option<Group> {
        Self::read(self, frame)
    }

    fn has_record(&mut self) -> bool {
        Self::has_record(self)
    }
}

impl<R: ReadGroups> MulticastLane<R> {
    /// A lane that reads there.
    pub fn new(reader: R, partial_checksums: bool, counters: Arc<PairCounters>) -> Self {
        Self {
            reader,
            counters,
            partial_checksums,
            forwarding: Arc::default(),
            frame: Vec::new(),
            deficit: 0,
        }
    }

    /// Whether a guest of this network sent the current frame.
    fn is_of_a_guest(&self, vlan: u16) -> bool {
        let from = self.frame.get(MAC_BYTES..).and_then(|rest| rest.first_chunk());
        from.is_some_and(|&from| self.forwarding.has_guest(FdbKey::new(vlan, from)))
    }
}

impl<R: ReadGroups> Lane for MulticastLane<R> {
    fn poll(&mut self, siblings: &mut dyn Siblings) -> Result<usize, Fault> {
        let budget = BATCH.saturating_sub(self.deficit);
        self.deficit = self.deficit.saturating_sub(BATCH);
        let (mut read, mut looked_up) = (0, 0);
        while read + looked_up < budget
            && let Some(Group { vlan, .. }) = self.reader.read(&mut self.frame)
        {
            read += 1;
            if self.is_of_a_guest(vlan) {
                self.counters.returned_frames.add(1);
                continue;
            }
            let several = Several {
                frame: &mut self.frame,
                vlan,
                may_be_partial: self.partial_checksums,
                flow: FlowHints::NONE,
                counters: &self.counters,
            };
            looked_up += several.give(self.forwarding.ports_of(vlan, None), &self.forwarding, siblings);
        }
        self.deficit += (read + looked_up).saturating_sub(budget);
        meter::count_taken(read);
        Ok(read)
    }

    fn enable_notifications(&mut self, _network: &mut dyn Siblings) -> Work {
        match self.reader.has_record() {
            true => Work::Now,
            false => Work::None,
        }
    }

    fn set_forwarding(&mut self, forwarding: &Arc<Forwarding>) {
        self.forwarding = Arc::clone(forwarding);
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.reader.as_fd())
    }

    fn stop(self: Box<Self>) -> Stopped {
        Stopped {
            pair: None,
            queue: None,
        }
    }
}
