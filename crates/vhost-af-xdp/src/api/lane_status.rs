//! One queue pair, or one queue of an uplink, as `status` shows it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use std::os::fd::AsFd;

use device::counters::{Kind, PairCounters};
use serde::{Deserialize, Serialize};
use xsk::NumaNode;

use crate::nic::hints::HintsStatus;
use crate::nic::interface::Interface;
use crate::nic::lane_facts::LaneFacts;

/// A number with its name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Named {
    /// Counter, as the source names it.
    pub(crate) name: String,
    /// `lane` (this daemon), `socket` (XDP_STATISTICS), or `program` (steering program).
    pub(crate) source: String,
    /// A loss, and not work.
    pub(crate) drop: bool,
    /// Since the start of what counts it.
    pub(crate) value: u64,
}

impl Named {
    /// What this daemon counts.
    pub(super) fn all_of(counters: &PairCounters) -> impl Iterator<Item = Self> {
        counters.read().into_iter().map(|reading| {
            let is_drop = reading.kind == Kind::Drop;
            Self::new("lane", reading.name, reading.value, is_drop)
        })
    }

    /// The same of several, together; none of none.
    pub(super) fn sum_of(all: &[Arc<PairCounters>]) -> Vec<Self> {
        let mut sums: Vec<Self> = Vec::new();
        for counters in all {
            for (at, named) in Self::all_of(counters).enumerate() {
                match sums.get_mut(at) {
                    Some(sum) => sum.value = sum.value.wrapping_add(named.value),
                    None => sums.push(named),
                }
            }
        }
        sums
    }

    fn new(source: &str, name: &str, value: u64, drop: bool) -> Self {
        Self {
            name: name.to_owned(),
            source: source.to_owned(),
            drop,
            value,
        }
    }
}

/// One queue pair.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct LaneStatus {
    /// Queue pair, from 0.
    pub(crate) pair: usize,
    /// NIC queue; none without an interface.
    pub(crate) queue: Option<u32>,
    /// A guest uses it now.
    pub(crate) running: bool,
    /// The data path in use: `zero-copy`, `copy (native)`, `copy (skb)`, `cable`, `network`, `tap`, `null`.
    pub(crate) mode: Option<String>,
    /// Why not a better one, in the order tried.
    pub(crate) fallbacks: Vec<String>,
    /// Frames may span several descriptors.
    pub(crate) multi_buffer: bool,
    /// Who completes checksums that the guest leaves to us: `daemon`, `kernel (TX metadata)`, `NIC (TX metadata)`.
    pub(crate) checksums: Option<String>,
    /// Packet memory in the daemon, bytes.
    pub(crate) packet_bytes: u64,
    /// What the kernel keeps for it, bytes (estimated).
    pub(crate) kernel_bytes: u64,
    /// How many sockets have theirs in the same UMEM (`--shared-umem`); none: it has one of its own.
    pub(crate) umem_sockets: Option<usize>,
    /// `hugetlb`, `transparent huge pages`, `4 KiB pages`, or `guest memory`.
    pub(crate) backing: Option<String>,
    /// NUMA node that most of it is on, see [`PortStatus::node`].
    pub(crate) node: Option<u16>,
    /// What the NIC tells of its frames; none without an interface, or with a steward that knows of no hints.
    #[serde(default)]
    pub(crate) hints: Option<HintsStatus>,
    /// Everything counted.
    pub(crate) counters: Vec<Named>,
}

impl LaneStatus {
    /// Of a pair, or of a queue of an uplink.
    pub(crate) fn read(
        pair: usize,
        queue: Option<u32>,
        counters: &PairCounters,
        facts: Option<&LaneFacts>,
        interface: Option<&Interface>,
    ) -> Self {
        let socket = facts.and_then(|facts| facts.socket.as_ref());
        let of_socket = socket
            .and_then(|socket| xsk::Statistics::read(socket.as_fd()).ok())
            .into_iter()
            .flat_map(socket_counters);
        // As far as it is known.
        let of_program = queue
            .and_then(|queue| interface?.steering.counters(queue))
            .into_iter()
            .flat_map(|counted| counted.named())
            .map(|(name, value)| {
                Named::new(
                    "program",
                    name,
                    value,
                    matches!(
                        name,
                        "too_long" | "no_header_room" | "group_limited" | "group_lost"
                    ),
                )
            });
        Self {
            pair,
            queue,
            running: facts.is_some_and(|facts| !facts.is_idle.load(Relaxed)),
            mode: facts.map(|facts| facts.mode.to_string()),
            fallbacks: facts.map_or_else(Vec::new, |facts| {
                facts.fallbacks().map(ToString::to_string).collect()
            }),
            multi_buffer: facts.is_some_and(|facts| facts.multi_buffer),
            checksums: facts.and_then(|facts| Some(facts.checksums?.to_string())),
            packet_bytes: facts.map_or(0, |facts| facts.packet_bytes),
            kernel_bytes: facts.map_or(0, |facts| facts.kernel_bytes),
            umem_sockets: facts.and_then(|facts| Some(facts.shared.as_ref()?.sockets())),
            backing: facts.map(|facts| facts.backing.clone()),
            node: facts.and_then(|facts| facts.node).map(NumaNode::number),
            hints: interface.and_then(Interface::hints_status),
            counters: Named::all_of(counters)
                .chain(of_socket)
                .chain(of_program)
                .collect(),
        }
    }

    /// Frames lost, whatever the reason.
    pub(crate) fn drops(&self) -> u64 {
        self.sum(|counter| counter.drop)
    }

    /// A counter by name, 0 if it is not there.
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.sum(|counter| counter.name == name)
    }

    fn sum(&self, is_meant: impl Fn(&Named) -> bool) -> u64 {
        let meant = self.counters.iter().filter(|counter| is_meant(counter));
        meant.map(|counter| counter.value).sum()
    }
}

/// Where the kernel copies, a frame for which no chunk is free is counted in `rx_dropped`, too (`__xsk_rcv`,
/// net/xdp/xsk.c); where the NIC writes, `rx_fill_ring_empty_descs` counts how often the driver asked for chunks. No
/// loss is seen by it alone.
fn socket_counters(statistics: xsk::Statistics) -> impl Iterator<Item = Named> {
    // An empty tx ring is no event here.
    let shown = statistics
        .named()
        .into_iter()
        .filter(|(name, _)| *name != "tx_ring_empty_descs");
    shown.map(|(name, value)| Named::new("socket", name, value, name != "rx_fill_ring_empty_descs"))
}

#[cfg(test)]
mod tests {
    use super::socket_counters;

    #[test]
    fn empty_fill_ring_is_no_loss_and_the_frame_that_found_it_empty_is_counted_once() {
        let statistics = xsk::Statistics {
            rx_dropped: 3,
            rx_fill_ring_empty_descs: 96,
            ..xsk::Statistics::default()
        };
        let lost: u64 = socket_counters(statistics)
            .filter(|counter| counter.drop)
            .map(|counter| counter.value)
            .sum();
        assert_eq!(lost, 3);
    }
}
