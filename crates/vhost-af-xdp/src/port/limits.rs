//! How much a port's guest may send and get: changed while it runs.

use std::sync::{Arc, PoisonError};

use super::mailbox::Task;
use super::{Port, PortState};
use crate::rates::PortRates;
use crate::switch::rate_limit::PortLimits;

impl Port {
    /// As its lanes have them.
    pub(super) fn limits(&self) -> PortLimits {
        self.limits.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How much its guest may send and get.
    pub(crate) fn rates(&self) -> PortRates {
        self.limits().rates
    }

    /// Its guest may send and get that much from now on; it stays connected. When this returns that is so.
    pub(crate) fn set_rates(self: &Arc<Self>, rates: PortRates) {
        let change = move |port: &Arc<Self>, state: &mut PortState| {
            let limits = PortLimits::new(rates);
            *port.limits.lock().unwrap_or_else(PoisonError::into_inner) = limits.clone();
            if let Some(session) = &state.session {
                session.set_limits(&limits, &port.workers);
            }
        };
        // A port that has ended has no lanes.
        let _ = self.ask(Task::Change, change);
    }
}
