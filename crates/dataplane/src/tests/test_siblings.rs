//! What a lane sees of other lanes in tests.

use device::pair::Fault;

use crate::guest::rx_queue::RxQueue;
use crate::host::to_tap::ToTap;
use crate::lane::shared::SharedGuard;
use crate::lane::{Lane, Siblings, SlotAt, Uplink};

/// No other lane, or one that gets frames.
#[derive(Default)]
pub(crate) struct Others<'a> {
    pub(crate) target: Option<&'a mut dyn Lane>,
    /// The fault of its guest.
    pub(crate) fault: Option<Fault>,
}

impl<'a> Others<'a> {
    /// One lane that gets frames.
    pub(crate) fn one(target: &'a mut dyn Lane) -> Self {
        Self {
            target: Some(target),
            fault: None,
        }
    }
}

impl Siblings for Others<'_> {
    fn target(&self) -> Option<SlotAt> {
        self.target.as_ref().map(|_| SlotAt(0))
    }

    fn guest(&mut self, _at: SlotAt) -> Option<SharedGuard<'_, RxQueue>> {
        self.target.as_mut()?.rx()?.lock()
    }

    fn uplink(&mut self, _at: SlotAt) -> Uplink<'_> {
        Uplink::None
    }

    fn tap(&mut self, _at: SlotAt) -> Option<SharedGuard<'_, ToTap>> {
        None
    }

    fn blame(&mut self, _at: SlotAt, fault: Fault) {
        // As the worker does.
        if let Some(target) = &mut self.target {
            target.change_vrings(&mut |_, vring| vring.enabled = false);
        }
        self.fault = Some(fault);
    }
}
