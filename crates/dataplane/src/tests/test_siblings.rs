//! What a lane sees of other lanes in tests.

use device::pair::Fault;

use crate::host::to_tap::ToTap;
use crate::lane::{Lane, RxTarget, Siblings, SlotAt};
use crate::nic::endpoint::NicQueue;
use crate::nic::xdp::XdpNic;

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

    fn guest(&mut self, _at: SlotAt) -> Option<RxTarget<'_>> {
        self.target.as_mut()?.rx_target()
    }

    fn uplink(&mut self, _at: SlotAt) -> Option<&mut NicQueue<XdpNic>> {
        None
    }

    fn tap(&mut self, _at: SlotAt) -> Option<&mut ToTap> {
        None
    }

    fn blame(&mut self, _at: SlotAt, fault: Fault) {
        // As the worker does.
        if let Some(pair) = self.target.as_mut().and_then(|target| target.pair_mut()) {
            (pair.from_guest.enabled, pair.to_guest.enabled) = (false, false);
        }
        self.fault = Some(fault);
    }
}
