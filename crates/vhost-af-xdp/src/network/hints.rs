//! Changes of the hints of the uplink's frames while frames arrive ([`crate::nic::metadata`]).
//!
//! The steward gets several requests, and may not answer for a while: the state is not locked meanwhile, so that ports
//! can be changed and shown. If the uplink has another interface afterwards, the change is repeated for that one.

use std::sync::{Arc, TryLockError};

use super::{Network, Running, State};
use crate::config::HintsConfig;
use crate::nic::error::InterfaceError;
use crate::nic::interface::Interface;
use common::lock::Locked;
use dataplane::nic::hints::XdpMetadata;

impl State {
    /// The interface whose frames have hints, and the lanes of its queues: that of the underlay, if there is one.
    fn with_hints(&self) -> (&Option<Arc<Interface>>, &[Option<Running>]) {
        let uplink = self.uplink.as_ref();
        match uplink.is_some_and(|uplink| uplink.underlay.is_some()) {
            true => (&self.underlay.interface, &self.underlay.running),
            false => (&self.interface, &self.running),
        }
    }
}

impl Network {
    /// Changes the hints of frames of the uplink, now or as soon as the steward is back; no frame is lost.
    /// Errors: the steward rejects the hints; then nothing changes.
    pub(crate) fn set_hints(&self, hints: HintsConfig) -> Result<(), InterfaceError> {
        let _turn = self.hints.locked();
        loop {
            let interface = self.state().with_hints().0.clone();
            if let Some(interface) = &interface {
                interface.switch_hints(hints, &mut self.teller())?;
            }
            let mut state = self.state();
            // An interface that was opened meanwhile uses the earlier hints.
            let now = state.with_hints().0;
            if now.as_ref().map(Arc::as_ptr) != interface.as_ref().map(Arc::as_ptr) {
                continue;
            }
            if let Some(uplink) = &mut state.uplink {
                uplink.options_with_hints().hints = hints;
            }
            break;
        }
        self.wakers.retry();
        Ok(())
    }

    /// Sends the lanes the metadata of their frames. A change of hints that is in progress does that itself.
    pub(super) fn settle_hints(&self) {
        let _turn = match self.hints.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let interface = self.state().with_hints().0.clone();
        if let Some(interface) = interface.filter(|interface| !interface.steering.is_away()) {
            interface.settle_hints(&mut self.teller());
        }
    }

    /// A function that sends the lane of a queue the metadata of its frames.
    fn teller(&self) -> impl FnMut(u32, &XdpMetadata) {
        move |queue, metadata| {
            let at = {
                let state = self.state();
                let mut running = state.with_hints().1.iter().flatten();
                let its = running.find(|running| running.queue.number == queue);
                its.map(|running| running.at)
            };
            if let Some(at) = at {
                let metadata = metadata.clone();
                self.workers
                    .change(at, move |lane, _siblings| lane.set_metadata(&metadata));
            }
        }
    }
}
