//! Copies of what came to the uplink for promiscuous ports.
//!
//! A frame is copied as it comes, before its tag is taken off and its chunks are gone, and given to those who listen
//! when its last piece is there. Only while there is somebody who does.

use device::counters::PairCounters;
use xsk::{RxDesc, Umem};

use crate::switch::arrivals::Origin;
use crate::switch::ethernet::{self, Head, LOOK_BYTES};
use crate::switch::lane::Network;
use crate::switch::members::Members;
use crate::switch::table::{Destination, Station};
use crate::switch::to_group::Several;

/// Bytes that no frame is longer than.
const LONGEST: usize = 1 << 16;

#[derive(Default)]
pub(super) struct Mirror {
    /// The one in hand; its memory is used again.
    frame: Vec<u8>,
    /// A piece of it is missing.
    spoiled: bool,
}

impl Mirror {
    /// A piece came.
    #[cold]
    pub(super) fn take(&mut self, umem: &Umem, piece: &RxDesc, is_first: bool) {
        if is_first {
            self.frame.clear();
            self.spoiled = false;
        }
        let before = self.frame.len();
        if before > LONGEST {
            self.spoiled = true;
            return;
        }
        self.frame.resize(before + piece.len as usize, 0);
        self.spoiled |= umem.read(piece.data, &mut self.frame[before..]).is_none();
    }

    /// A piece of the frame in hand is none.
    pub(super) fn spoil(&mut self) {
        self.spoiled = true;
    }

    /// The frame is whole. Groups go to all anyway. What asking the listeners' filter rules was work for, in frames of a
    /// turn.
    #[cold]
    pub(super) fn give(
        &mut self,
        origin: Origin,
        members: &Members,
        counters: &PairCounters,
        network: &mut dyn Network,
    ) -> usize {
        let Some(bytes) = self.frame.first_chunk::<LOOK_BYTES>() else {
            return 0;
        };
        let Head { to, tags, .. } = ethernet::head(bytes);
        let vlan = tags.vlan();
        let port = match members.table.find(Station::new(vlan, to)) {
            _ if self.spoiled => return 0,
            Destination::Group => return 0,
            Destination::Port(port) => Some(port),
            Destination::Host | Destination::Unknown | Destination::Nobody => None,
        };
        let several = Several {
            frame: &mut self.frame,
            vlan,
            may_be_partial: origin.partial_checksums,
            counters,
        };
        let way = port.and_then(|port| members.lanes(port).first().copied());
        several.give(members.listeners(vlan, None, port, way), members, network)
    }
}
