//! A lane for a tap device of the steward's, to the host or to the wire.

use std::sync::Arc;

use device::counters::PairCounters;
use steer::TapTo;
use xsk::NumaNode;

use super::Network;
use crate::nic::error::InterfaceError;
use crate::nic::tap::Tap;
use crate::switch::new_lane::NewLane;
use crate::switch::role::Role;
use crate::switch::tap_lane::TapLane;
use crate::switch::workers::LaneAt;

impl Network {
    /// Has a worker serve a device. `node`: of the uplink, if frames go there.
    pub(super) fn serve_tap(
        &self,
        (name, tap, segments_udp): (&str, Tap, bool),
        to: TapTo,
        node: Option<NumaNode>,
        counters: Arc<PairCounters>,
    ) -> Result<LaneAt, InterfaceError> {
        let lane = TapLane::new(tap, segments_udp, counters);
        let lane = lane.map_err(|source| InterfaceError::Tap {
            name: name.to_owned(),
            source: source.into(),
        })?;
        let network = Arc::clone(&self.owner);
        let lane = NewLane {
            lane: Box::new(lane),
            role: match to {
                TapTo::Host => Role::Host { network },
                TapTo::Uplink => Role::UplinkTap { network },
            },
            node,
            // The daemon has both ends of its queues.
            on_fault: Box::new(move |fault| tracing::error!(?fault, ?to, "the lane of a tap ended")),
        };
        Ok(self.workers.add(lane, &self.owner))
    }
}
