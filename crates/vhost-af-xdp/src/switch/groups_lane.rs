//! Frames to groups of stations that came to a network's uplink: copies, of which the host's stack has the frames
//! ([`steer::GroupReader`]). Each goes to all ports of its VLAN that have a buffer now.
//!
//! What a guest sends to a group is given to the host, too, as received by the uplink; where XDP is in skb mode that comes
//! here once more. The ports have it already.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use device::counters::PairCounters;
use device::meter;
use device::pair::QueuePair;
use steer::{Group, GroupReader};

use super::ethernet::Mac;
use super::lane::{Blame, Lane, Near, Stopped, Work};
use super::limits::BATCH;
use super::members::Members;
use super::table::{Destination, Station};
use super::to_group::Several;

/// Of one address.
const MAC_BYTES: usize = size_of::<Mac>();

/// See the module's head.
pub(crate) struct GroupsLane {
    reader: GroupReader,
    counters: Arc<PairCounters>,
    /// Frames may come from a stack on the same machine, which leaves checksums unfinished.
    partial_checksums: bool,
    members: Arc<Members>,
    /// The one in hand; its memory is used again.
    frame: Vec<u8>,
}

impl GroupsLane {
    pub(crate) fn new(reader: GroupReader, partial_checksums: bool, counters: Arc<PairCounters>) -> Self {
        Self {
            reader,
            counters,
            partial_checksums,
            members: Arc::default(),
            frame: Vec::new(),
        }
    }

    /// Whether a port of this network whose guest is here sent the frame in hand. One that has none here has moved, and
    /// what it sends there comes once.
    fn is_of_a_port(&self, vlan: u16) -> bool {
        let from = self.frame.get(MAC_BYTES..).and_then(|rest| rest.first_chunk());
        from.is_some_and(|&from| {
            let found = self.members.table.find(Station::new(vlan, from));
            matches!(found, Destination::Port(port) if !self.members.is_absent(port))
        })
    }
}

impl Lane for GroupsLane {
    fn breathe(&mut self, near: Near<'_>) -> Result<usize, Blame> {
        let Near::Network(network) = near else {
            return Ok(0);
        };
        let mut read = 0;
        while read < BATCH
            && let Some(Group { vlan, .. }) = self.reader.read(&mut self.frame)
        {
            read += 1;
            if self.is_of_a_port(vlan) {
                continue;
            }
            let several = Several {
                frame: &mut self.frame,
                vlan,
                may_be_partial: self.partial_checksums,
                counters: &self.counters,
            };
            several.give(self.members.ports_of(vlan, None), &self.members, network);
        }
        meter::took(read);
        Ok(read)
    }

    fn arm(&mut self, _near: Near<'_>) -> Work {
        // Whether there is something the epoll tells: it looks when it begins to watch the ring.
        Work::None
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

    fn nic(&self) -> Option<BorrowedFd<'_>> {
        Some(self.reader.as_fd())
    }

    fn awaits_nic(&self) -> bool {
        true
    }

    fn inject(&mut self, _frame: &[u8], _near: Near<'_>) {}

    fn stop(self: Box<Self>) -> Stopped {
        Stopped {
            pair: None,
            queue: None,
        }
    }
}
