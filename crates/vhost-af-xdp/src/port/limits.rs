//! Changes at run time: what a port's guest may send, its rates, and the hints of its frames.

use std::sync::Arc;

use super::ticket_lock::Task;
use super::{Port, PortState};
use crate::config::{HintsConfig, PortConfig};
use crate::nic::error::InterfaceError;
use common::lock::Locked;
use dataplane::fdb::FdbKey;
use dataplane::nic::hints::XdpMetadata;
use dataplane::policy::capture::Capture;
use dataplane::policy::filter::PortFilter;
use dataplane::policy::guard::Guard;
use dataplane::policy::rate_limit::PortLimits;
use model::config::Filter;
use model::config::Policy;
use model::rates::PortRates;

impl Port {
    /// The rate limits of its lanes.
    pub(super) fn limits(&self) -> PortLimits {
        self.limits.locked().clone()
    }

    /// The configured rates.
    pub(crate) fn rates(&self) -> PortRates {
        self.limits().rates
    }

    /// Sets the rates; the guest stays connected. On return they are in effect.
    pub(crate) fn set_rates(self: &Arc<Self>, rates: PortRates) {
        let change = move |port: &Arc<Self>, state: &mut PortState| {
            let limits = PortLimits::new(rates);
            *port.limits.locked() = limits.clone();
            if let Some(session) = &state.session {
                session.set_limits(&limits, &port.workers);
            }
        };
        // A port that has ended has no lanes.
        let _ = self.ask(Task::Change, change);
    }

    /// The compiled filter of its lanes.
    pub(super) fn filter(&self) -> PortFilter {
        self.filter.locked().1.clone()
    }

    /// The filter rules as configured, and the compiled filter, which has the counters.
    pub(crate) fn filter_rules(&self) -> (Filter, PortFilter) {
        self.filter.locked().clone()
    }

    /// Sets the filter rules; the guest stays connected. On return they apply to every frame. Counters restart at 0,
    /// unless the rules are the same.
    pub(crate) fn set_filter(self: &Arc<Self>, config: &Filter) {
        if self.filter.locked().0 == *config {
            return;
        }
        let compiled = PortFilter::new(config);
        let config = config.clone();
        self.change_filter(move |before| {
            let capture = before.1.capture.take();
            *before = (config, PortFilter { capture, ..compiled });
        });
    }

    /// Sets where the guest's frames are captured to; `None`: ends the capture. On return it applies to every frame.
    /// The filter rules do not change.
    pub(crate) fn set_capture(self: &Arc<Self>, capture: Option<Arc<Capture>>) {
        self.change_filter(move |before| before.1.capture = capture);
    }

    fn change_filter(self: &Arc<Self>, change: impl FnOnce(&mut (Filter, PortFilter)) + Send + 'static) {
        let change = move |port: &Arc<Self>, state: &mut PortState| {
            let filter = {
                let mut filter = port.filter.locked();
                change(&mut filter);
                filter.1.clone()
            };
            if let Some(session) = &state.session {
                session.set_filter(&filter, &port.workers);
            }
        };
        // A port that has ended has no lanes.
        let _ = self.ask(Task::Change, change);
    }

    /// Sets the hints of its frames; the guest stays connected, and no frame is lost. On return they are in effect, or
    /// will be as soon as the steward is back.
    /// Errors: the steward refuses them; then nothing changes.
    pub(crate) fn set_hints(self: &Arc<Self>, hints: HintsConfig) -> Result<(), InterfaceError> {
        let change = move |port: &Arc<Self>, state: &mut PortState| {
            if let Some(interface) = &state.interface {
                interface.switch_hints(hints, &mut port.teller(state))?;
            }
            *port.hints.locked() = hints;
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
        *self.hints.locked()
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
        self.rules.locked().clone()
    }

    /// The source guard of its lanes, outside of networks.
    pub(super) fn guard(&self) -> Option<Guard> {
        self.guard.locked().clone()
    }

    /// Sets the source guard; the guest stays connected. On return it is in effect. In a network the FDB contains it.
    pub(crate) fn set_guard(self: &Arc<Self>, config: &PortConfig) {
        let (guard, rules) = (config.guard(), config.keys.policy());
        let change = move |port: &Arc<Self>, state: &mut PortState| {
            (*port.guard.locked()).clone_from(&guard);
            *port.rules.locked() = rules.clone();
            if let Some(session) = &state.session {
                session.set_guard(guard.as_ref(), &port.workers);
            }
        };
        // A port that has ended has no lanes.
        let _ = self.ask(Task::Change, change);
    }
}
