//! Frames to groups of stations that came to a network's uplink: copies, of which the host's stack has the frames
//! ([`steer::GroupReader`]). Each goes to all ports of its VLAN that have a buffer now.
//!
//! What a guest sends to a group is given to the host, too, as received by the uplink; where XDP is in skb mode that
//! comes here once more. The ports have it already: it is counted (`returned_frames`), and goes to nobody.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use device::counters::PairCounters;
use device::meter;
use device::pair::QueuePair;
use steer::{Group, GroupReader};

use super::ethernet::Mac;
use super::lane::{Blame, Lane, Near, Stopped, Work};
use super::limits::BATCH;
use super::link_note::LinkNote;
use super::members::Members;
use super::table::{Destination, Station};
use super::to_group::Several;

/// Of one address.
const MAC_BYTES: usize = size_of::<Mac>();

/// See the module's head.
pub(crate) struct GroupsLane<R = GroupReader> {
    reader: R,
    counters: Arc<PairCounters>,
    /// Frames may come from a stack on the same machine, which leaves checksums unfinished.
    partial_checksums: bool,
    members: Arc<Members>,
    /// The one in hand; its memory is used again.
    frame: Vec<u8>,
    /// What was done for frames beyond turns so far, in frames: the next turns are shorter. One is a look-up for each
    /// port that has filter rules.
    owed: usize,
}

/// Where frames to groups come from.
pub(crate) trait ReadGroups: AsFd + Send {
    /// The next one, into `frame`.
    fn read(&mut self, frame: &mut Vec<u8>) -> Option<Group>;
    /// Whether there is one; if not, the descriptor tells of it.
    fn has_record(&mut self) -> bool;
}

impl ReadGroups for GroupReader {
    fn read(&mut self, frame: &mut Vec<u8>) -> Option<Group> {
        Self::read(self, frame)
    }

    fn has_record(&mut self) -> bool {
        Self::has_record(self)
    }
}

impl<R: ReadGroups> GroupsLane<R> {
    pub(crate) fn new(reader: R, partial_checksums: bool, counters: Arc<PairCounters>) -> Self {
        Self {
            reader,
            counters,
            partial_checksums,
            members: Arc::default(),
            frame: Vec::new(),
            owed: 0,
        }
    }

    /// Whether a guest of this network sent the frame in hand.
    fn is_of_a_guest(&self, vlan: u16) -> bool {
        let from = self.frame.get(MAC_BYTES..).and_then(|rest| rest.first_chunk());
        from.is_some_and(|&from| self.members.has_guest(Station::new(vlan, from)))
    }
}

impl<R: ReadGroups> Lane for GroupsLane<R> {
    fn breathe(&mut self, near: Near<'_>) -> Result<usize, Blame> {
        let Near::Network(network) = near else {
            return Ok(0);
        };
        let turn = BATCH.saturating_sub(self.owed);
        self.owed = self.owed.saturating_sub(BATCH);
        let (mut read, mut looked_up) = (0, 0);
        while read + looked_up < turn
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
                note: LinkNote::new(Destination::Group, None, &self.members.table),
                counters: &self.counters,
            };
            looked_up += several.give(self.members.ports_of(vlan, None), &self.members, network);
        }
        self.owed += (read + looked_up).saturating_sub(turn);
        meter::took(read);
        Ok(read)
    }

    fn arm(&mut self, _near: Near<'_>) -> Work {
        match self.reader.has_record() {
            true => Work::Now,
            false => Work::None,
        }
    }

    fn pair(&self) -> Option<&QueuePair> {
        None
    }

    fn pair_mut(&mut self) -> Option<&mut QueuePair> {
        None
    }

    fn meet(&mut self, members: &Arc<Members>) {
        self.members = Arc::clone(members);
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.reader.as_fd())
    }

    fn inject(&mut self, _frame: &[u8], _near: Near<'_>) {}

    fn stop(self: Box<Self>) -> Stopped {
        Stopped {
            pair: None,
            queue: None,
        }
    }
}
