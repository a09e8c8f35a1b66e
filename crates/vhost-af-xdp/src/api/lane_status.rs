//! Reads the state of a queue pair, or of a queue of an uplink.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

use device::counters::{Kind, PairCounters};
use model::state::{LaneStatus, Named};
use xsk::NumaNode;

use crate::network::ShownLanes;
use crate::nic::interface::Interface;
use crate::nic::lane_facts::LaneFacts;

fn named(source: &str, name: &str, value: u64, drop: bool) -> Named {
    Named {
        name: name.to_owned(),
        source: source.to_owned(),
        drop,
        value,
    }
}

/// All counters of a lane.
pub(super) fn all_of(counters: &PairCounters) -> impl Iterator<Item = Named> {
    counters.read().into_iter().map(|reading| {
        let is_drop = reading.kind == Kind::Drop;
        named("lane", reading.name, reading.value, is_drop)
    })
}

/// Reads the state of queues of a network; `interface`: theirs, while it is open.
pub(super) fn read_all(shown: &ShownLanes, interface: Option<&Interface>) -> Vec<LaneStatus> {
    let lanes = shown.lanes.iter().enumerate();
    let read = lanes.map(|(at, lane)| {
        let facts = lane.facts.upgrade();
        read(at, lane.queue, &lane.counters, facts.as_deref(), interface)
    });
    read.collect()
}

/// Reads the state of a pair, or of a queue of an uplink.
pub(super) fn read(
    pair: usize,
    queue: Option<u32>,
    counters: &PairCounters,
    facts: Option<&LaneFacts>,
    interface: Option<&Interface>,
) -> LaneStatus {
    let socket = facts.and_then(|facts| facts.socket.as_ref());
    let of_socket = socket
        .and_then(|socket| xsk::Statistics::read(socket.as_fd()).ok())
        .into_iter()
        .flat_map(socket_counters);
    // As far as they are known.
    let of_program = queue
        .and_then(|queue| interface?.steering.counters(queue))
        .into_iter()
        .flat_map(|counted| counted.named())
        .map(|(name, value)| {
            named(
                "program",
                name,
                value,
                matches!(
                    name,
                    "too_long"
                        | "no_header_room"
                        | "group_limited"
                        | "group_lost"
                        | "unknown_sender"
                        | "malformed"
                ),
            )
        });
    LaneStatus {
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
        counters: all_of(counters).chain(of_socket).chain(of_program).collect(),
    }
}

/// In copy mode a frame for which no chunk is free is counted in `rx_dropped`, too (`__xsk_rcv`, net/xdp/xsk.c). In
/// zero-copy mode `rx_fill_ring_empty_descs` counts how often the driver found the fill ring empty, not frames. So that
/// counter alone shows no loss.
fn socket_counters(statistics: xsk::Statistics) -> impl Iterator<Item = Named> {
    // That the tx ring is empty is normal here.
    let shown = statistics
        .named()
        .into_iter()
        .filter(|(name, _)| *name != "tx_ring_empty_descs");
    shown.map(|(name, value)| named("socket", name, value, name != "rx_fill_ring_empty_descs"))
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
