//! A lane for a tap device that the steward made, to the host or to the uplink.

use std::sync::Arc;

use anyhow::Context;
use device::counters::PairCounters;
use steer::TapTo;
use xsk::NumaNode;

use super::Network;
use crate::nic::error::InterfaceError;
use dataplane::host::tap_lane::TapLane;
use dataplane::lane::new_lane::NewLane;
use dataplane::lane::role::Role;
use dataplane::nic::tap::Tap;
use dataplane::worker::workers::LaneAt;

impl Network {
    /// Makes a lane for a tap, and gives it to a worker. `node`: the NUMA node of the uplink, for a tap to the uplink.
    pub(super) fn serve_tap(
        &self,
        (name, tap, segments_udp): (&str, Tap, bool),
        to: TapTo,
        node: Option<NumaNode>,
        counters: Arc<PairCounters>,
    ) -> Result<LaneAt, InterfaceError> {
        let lane = TapLane::new(tap, segments_udp, counters);
        let lane = lane.with_context(|| format!("{name} cannot be served"))?;
        let network = Arc::clone(&self.owner);
        let lane = NewLane {
            lane: Box::new(lane),
            role: match to {
                TapTo::Host => Role::Host { network },
                TapTo::Uplink => Role::UplinkTap { network },
            },
            node,
            // No guest can cause a fault here: the daemon has both ends of the lane's queues.
            on_fault: Box::new(move |fault| tracing::error!(?fault, ?to, "the lane of a tap ended")),
        };
        Ok(self.workers.add(lane, &self.owner))
    }
}
