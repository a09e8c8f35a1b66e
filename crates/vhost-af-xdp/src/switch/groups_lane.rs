//! Frames to groups of stations that came to a network's uplink: copies, of which the host's stack has the frames
//! ([`steer::GroupReader`]). Each goes to all ports of its VLAN that have a buffer now.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use device::counters::PairCounters;
use device::pair::QueuePair;
use offload::checksum;
use offload::coalesce::NetHeader;
use offload::packet::{self, HEADERS_MAX};
use offload::verify;
use steer::{Group, GroupReader};

use super::ethernet::{ADDRESS_BYTES, TAG_BYTES};
use super::lane::{Blame, Lane, Near, Network, Peer, Stopped, Work};
use super::limits::BATCH;
use super::members::Members;
use super::to_group::write_copy;
use super::to_guest::NO_OFFLOAD;

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

    /// Gives the frame in hand to all ports of its VLAN, each as it takes it; how many got it.
    fn deliver(&mut self, vlan: u16, network: &mut dyn Network) -> usize {
        let (mut header, mut frames) = (self.unfinished(), 0);
        frames += self.deliver_to(vlan, header, true, network);
        if let Some(unfinished) = header.take() {
            self.finish(&unfinished);
            self.counters.to_guest_checksums_completed.add(1);
            frames += self.deliver_to(vlan, Some(unfinished), false, network);
        }
        frames
    }

    /// The same to those who take partial checksums, or to the others, if there is one in the frame; else to all.
    fn deliver_to(
        &mut self,
        vlan: u16,
        unfinished: Option<NetHeader>,
        takes_partial: bool,
        network: &mut dyn Network,
    ) -> usize {
        let mut frames = 0;
        for (port, guest) in self.members.ports_of(vlan, None) {
            let Some(peer) = network.guest(guest.at) else {
                continue;
            };
            if unfinished.is_some() && peer.pair.offloads.guest_csum != takes_partial {
                continue;
            }
            let tag_off = vlan != 0 && !self.members.is_tagged(port);
            let offload = match unfinished.filter(|_| takes_partial) {
                Some(header) if tag_off => moved_up(header).to_bytes(),
                Some(header) => header.to_bytes(),
                None => NO_OFFLOAD,
            };
            match write(peer, &self.frame, tag_off, offload) {
                Ok(delivered) => frames += delivered,
                Err(fault) => network.blame(guest.at, fault),
            }
        }
        frames
    }

    /// Where the frame's checksum is, if it has a partial one.
    fn unfinished(&self) -> Option<NetHeader> {
        if !self.partial_checksums {
            return None;
        }
        let headers = &self.frame[..HEADERS_MAX.min(self.frame.len())];
        let layers = packet::parse(headers, u32::try_from(self.frame.len()).ok()?)?;
        let header = NetHeader::of_frame(&layers, verify::is_partial(headers, &layers));
        (header.flags != 0).then_some(header)
    }

    /// Completes it.
    fn finish(&mut self, header: &NetHeader) {
        let at = checksum::ChecksumAt {
            start: header.csum_start,
            offset: header.csum_offset,
        };
        // In the headers, which were parsed.
        let _ = checksum::complete(&mut self.frame, at);
    }
}

/// The same of a frame whose tag is taken off.
fn moved_up(header: NetHeader) -> NetHeader {
    NetHeader {
        csum_start: header.csum_start.saturating_sub(TAG_BYTES as u16),
        ..header
    }
}

fn write(
    peer: Peer<'_>,
    frame: &[u8],
    tag_off: bool,
    offload: [u8; 10],
) -> Result<usize, device::pair::Fault> {
    let (addresses, rest) = frame.split_at(ADDRESS_BYTES.min(frame.len()));
    let rest = match tag_off {
        true => rest.get(TAG_BYTES..).unwrap_or(&[]),
        false => rest,
    };
    let len = u32::try_from(addresses.len() + rest.len()).unwrap_or(u32::MAX);
    write_copy(peer, len, offload, &mut TwoParts(addresses, rest))
}

/// A frame in two parts.
struct TwoParts<'a>(&'a [u8], &'a [u8]);

impl super::to_guest::Bytes for TwoParts<'_> {
    fn copy_to(&mut self, memory: &virtqueue::MemoryMap, to: device::pair::Piece) {
        let first = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        let (now, later) = to.split(to.len.min(first));
        self.0.copy_to(memory, now);
        self.1.copy_to(memory, later);
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
            self.deliver(vlan, network);
            read += 1;
        }
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
