//! The decisions for a frame to the guest: whether the guest accepts it, its pair, and its hash report.
//!
//! [`Receive`] is the driver's state, prepared for the data path: it never changes. The data path gets a new
//! one after a change ([`crate::control`]), and calls [`Receive::place`] for each frame.

use std::sync::Arc;

use crate::counters::ReceiveCounters;
use crate::filter::Filter;
use crate::hash::nic::NicHash;
use crate::hash::{Hashing, Report, Source};

/// How the pair of a frame is chosen.
#[derive(Debug, Clone, Default)]
pub(crate) enum Steering {
    /// Multiqueue is off.
    #[default]
    FirstPair,
    /// The pair on which the guest sends the flow: automatic receive steering (VirtIO 1.3, 5.1.6.5.6).
    Automatic,
    /// By the driver's table: RSS (5.1.6.5.7).
    Table(Arc<Table>),
}

/// The indirection table of RSS; each entry was checked to be a pair of the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// A pair for each value of the hash's low bits; the length is a power of two.
    pub(crate) pairs: Vec<u16>,
    /// The pair for frames without a hash.
    pub(crate) unclassified: u16,
}

impl Table {
    /// A table that sends all frames to the first pair.
    pub(crate) fn first_pair() -> Self {
        Self {
            pairs: vec![0],
            unclassified: 0,
        }
    }

    #[inline]
    fn pair(&self, report: &Report) -> u16 {
        if report.kind.is_none() {
            return self.unclassified;
        }
        let mask = self.pairs.len() - 1;
        self.pairs[report.value as usize & mask]
    }
}

/// See the module's head.
#[derive(Debug, Clone)]
pub struct Receive {
    pub(crate) filter: Filter,
    pub(crate) steering: Steering,
    /// Calculates hashes, if they are needed for steering or reports.
    pub(crate) hashing: Option<Hashing>,
    /// VIRTIO_NET_F_HASH_REPORT: the guest gets reports.
    pub(crate) reports: bool,
}

/// Where a frame goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The pair of the receive queue for it. `None`: automatic receive steering by the caller, which sees the
    /// guest's frames. A frame for a pair that is not started, or is being reset, must be dropped (VirtIO
    /// 1.3, 5.1.6.5.7.2).
    pub pair: Option<u16>,
    /// The report for the virtio-net header.
    pub report: Report,
}

impl Receive {
    /// For a frame that begins with `head`: all its headers, or the first [`packet::HEADERS_MAX`] bytes. A
    /// VLAN tag that the NIC removed must be in its place again. `nic`: the hash that the NIC reported. `None`: the
    /// guest does not accept it, which is counted.
    #[inline]
    #[must_use]
    pub fn place(&self, head: &[u8], nic: Option<NicHash>, counters: &ReceiveCounters) -> Option<Place> {
        if !self.filter.accepts(head) {
            counters.to_guest_filtered.add(1);
            return None;
        }
        let report = match &self.hashing {
            Some(hashing) => hashed(hashing, head, nic, counters),
            None => Report::NONE,
        };
        let pair = match &self.steering {
            Steering::FirstPair => Some(0),
            Steering::Automatic => None,
            Steering::Table(table) => Some(table.pair(&report)),
        };
        let report = if self.reports { report } else { Report::NONE };
        Some(Place { pair, report })
    }

    /// How frames are hashed; `None`: they are not.
    #[must_use]
    pub fn hashing(&self) -> Option<&Hashing> {
        self.hashing.as_ref()
    }
}

#[inline]
fn hashed(hashing: &Hashing, head: &[u8], nic: Option<NicHash>, counters: &ReceiveCounters) -> Report {
    let (report, source) = hashing.report(head, nic);
    match source {
        Source::Nic => counters.hashes_of_nic.add(1),
        Source::Device => counters.hashes_computed.add(1),
        Source::Nobody => counters.hashes_none.add(1),
    }
    report
}
