//! What of a port can change while its guest stays connected: its rules and rates, and the hints of its frames.

use std::sync::Arc;

use super::ticket_lock::Task;
use super::{Port, PortState};
use crate::config::{HintsConfig, PortConfig};
use crate::nic::error::InterfaceError;
use common::lock::Locked;
use dataplane::fdb::FdbKey;
use dataplane::lane::Lane;
use dataplane::nic::hints::XdpMetadata;
use dataplane::policy::capture::Capture;
use dataplane::policy::filter::{LaneFilter, PortFilter};
use dataplane::policy::guard::Guard;
use dataplane::policy::rate_limit::PortLimits;
use model::config::{Policy, Port as Keys};
use model::rates::PortRates;

/// See the module's head.
#[derive(Clone)]
pub(crate) struct Live {
    /// The port as configured; the other fields but the hints and the capture follow from it.
    pub(super) keys: Arc<Keys>,
    pub(super) hints: HintsConfig,
    pub(super) limits: PortLimits,
    /// The source guard, outside of networks: in a network the FDB contains it.
    pub(super) guard: Option<Guard>,
    /// The compiled filter rules with their counters, and the capture.
    pub(super) filter: PortFilter,
}

impl Live {
    pub(super) fn new(config: &PortConfig) -> Self {
        Self {
            keys: Arc::clone(&config.keys),
            hints: config.hints(),
            limits: PortLimits::new(config.rates),
            guard: config.guard(),
            filter: PortFilter::new(&config.keys.filter),
        }
    }

    /// Applies rates, source guard and `filter`, the part of [`Self::filter`] for this lane. Returns the earlier filter.
    pub(super) fn apply(&self, lane: &mut dyn Lane, filter: LaneFilter) -> LaneFilter {
        lane.set_limits(&self.limits);
        lane.set_guard(self.guard.as_ref());
        lane.set_filter(filter)
    }
}

impl Port {
    pub(super) fn live(&self) -> Live {
        self.live.locked().clone()
    }

    /// The configured rates.
    pub(crate) fn rates(&self) -> PortRates {
        self.live.locked().limits.rates
    }

    /// The filter rules as configured, and the compiled filter, which has the counters.
    pub(crate) fn filter_rules(&self) -> (Arc<Keys>, PortFilter) {
        let Live { keys, filter, .. } = self.live();
        (keys, filter)
    }

    /// Sets rates, source guard and filter rules; the guest stays connected. On return they apply to every frame.
    /// Counters of filter rules restart at 0, unless the rules are the same.
    pub(crate) fn set_rules(self: &Arc<Self>, config: &PortConfig) {
        let (keys, filter) = (&config.keys, &config.keys.filter);
        let compiled = (self.live().keys.filter != *filter).then(|| PortFilter::new(filter));
        self.change_live(|live| {
            (live.keys, live.guard) = (Arc::clone(keys), config.guard());
            live.limits = PortLimits::new(config.rates);
            if let Some(compiled) = compiled {
                let capture = live.filter.capture.take();
                live.filter = PortFilter { capture, ..compiled };
            }
        });
    }

    /// Sets where the guest's frames are captured to; `None`: ends the capture. On return it applies to every frame.
    /// The filter rules do not change.
    pub(crate) fn set_capture(self: &Arc<Self>, capture: Option<Arc<Capture>>) {
        self.change_live(|live| live.filter.capture = capture);
    }

    fn change_live(self: &Arc<Self>, change: impl FnOnce(&mut Live)) {
        // A port that has ended has no lanes.
        let _ = self.ask(Task::Change, |port, state| {
            change(&mut port.live.locked());
            if let Some(session) = &state.session {
                session.set_rules(&port.live(), &port.workers);
            }
        });
    }

    /// Sets the hints of its frames; the guest stays connected, and no frame is lost. On return they are in effect, or
    /// will be as soon as the steward is back.
    /// Errors: the steward refuses them; then nothing changes.
    pub(crate) fn set_hints(self: &Arc<Self>, hints: HintsConfig) -> Result<(), InterfaceError> {
        let change = move |port: &Arc<Self>, state: &mut PortState| {
            if let Some(interface) = &state.interface {
                interface.switch_hints(hints, &mut port.teller(state))?;
            }
            port.live.locked().hints = hints;
            if state.interface.is_none() {
                // With these hints the interface may open.
                port.look_again();
            }
            Ok(())
        };
        // A port that has ended has none.
        self.ask(Task::Change, change).unwrap_or(Ok(()))
    }

    /// The requested hints.
    pub(crate) fn hints(&self) -> HintsConfig {
        self.live.locked().hints
    }

    /// A function that sends the lane of a queue the metadata of its frames.
    pub(super) fn teller(&self, state: &PortState) -> impl FnMut(u32, &XdpMetadata) {
        move |queue, metadata| {
            let first = self.config.nic.queues().map(|queues| queues.start_queue);
            let pair = first.and_then(|first| queue.checked_sub(first));
            if let (Some(session), Some(pair)) = (&state.session, pair) {
                session.set_metadata(pair as usize, metadata, &self.workers);
            }
        }
    }

    /// Learned addresses of the port in its network, in order.
    pub(crate) fn learned(&self) -> Vec<FdbKey> {
        self.attached.learned()
    }

    /// The rules for its guest's frames, as `status` shows them.
    pub(crate) fn rules(&self) -> Policy {
        self.live.locked().keys.policy()
    }
}
