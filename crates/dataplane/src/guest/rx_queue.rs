//! A guest's receive queue, and what decides which frames the guest gets. Lanes of all workers deliver into it, one at
//! a time: each locks it ([`crate::lane::shared`]) for a run of frames.

use std::sync::Arc;

use device::counters::PairCounters;
use device::pair::{Fault, Vring};
use virtqueue::Chains;

use crate::guest::pending::Pending;
use crate::guest::to_guest::Delivery;
use crate::lane::shared::Waits;
use crate::policy::filter::{Acl, Facts};
use crate::policy::rate_limit::{Policer, RateLimit};

/// See the module's head.
pub struct RxQueue {
    pub(crate) vring: Vring,
    /// Room for its buffers.
    pub(crate) buffers: Chains,
    pub(crate) counters: Arc<PairCounters>,
    /// Frames of other guests that wait for its buffers.
    pub(crate) pending: Pending,
    /// Its own lane must be polled: to deliver `pending`, or, if the queue is a tap's, to write its frames to the tap.
    pub(crate) waits: Waits,
    /// It is the queue of a tap.
    pub(crate) is_tap: bool,
    /// Rate limit of what the guest gets.
    pub(crate) limit: Option<Arc<RateLimit>>,
    /// Which frames it may get; `None`: all.
    pub(crate) filter: Option<Box<Acl>>,
}

impl RxQueue {
    pub(crate) fn new(vring: Vring, counters: Arc<PairCounters>) -> Self {
        Self {
            vring,
            buffers: Chains::default(),
            counters,
            pending: Pending::default(),
            waits: Waits::default(),
            is_tap: false,
            limit: None,
            filter: None,
        }
    }

    /// Delivers frames that wait; returns how many.
    /// Errors: the guest's fault.
    #[cold]
    pub(crate) fn deliver_pending(&mut self) -> Result<usize, Fault> {
        let delivered = match self.vring.enabled {
            true => self
                .pending
                .deliver(&mut self.vring, &mut self.buffers, &self.counters),
            false => Ok(0),
        };
        self.waits.looked(self.pending.is_some());
        delivered
    }

    /// Whether the filter rules admit a frame that is not retried; counts a denied one. `head`: its first bytes, all of
    /// the frame or as many as the rules read.
    #[inline]
    pub(crate) fn allows(&mut self, head: &[u8], facts: Facts) -> bool {
        match &mut self.filter {
            Some(filter) => filter.allows(head, facts, &self.counters),
            None => true,
        }
    }

    /// Like [`Self::allows`], without charging the work to a budget: such frames are few.
    pub(crate) fn allows_once(&mut self, frame: &[u8]) -> bool {
        let admits = self.allows(frame, Facts::of_len(frame.len()));
        let _ = self.take_work();
        admits
    }

    /// Takes the cost of the look-ups since the last call, in frames of a budget.
    #[inline]
    pub(crate) fn take_work(&mut self) -> usize {
        let work = self.filter.as_mut().map_or(0, |filter| filter.take_work());
        usize::try_from(work).unwrap_or(usize::MAX)
    }

    /// Its rate limit, for a burst.
    #[inline]
    pub(crate) fn policer(&self) -> Policer<'_> {
        Policer::new(self.limit.as_ref())
    }

    /// Begins a batch of received frames, with at most `most` buffers at first.
    /// Errors: the guest's fault.
    #[inline]
    pub(crate) fn begin(&mut self, most: usize) -> Result<(Delivery<'_>, Admission<'_>), Fault> {
        let delivery = Delivery::begin_with(&mut self.vring, &mut self.buffers, &self.counters, most)?;
        let admission = Admission {
            policer: Policer::new(self.limit.as_ref()),
            filter: self.filter.as_deref_mut(),
        };
        Ok((delivery, admission))
    }
}

/// Rate limit and filter rules of frames to the guest; the caller of [`RxQueue::begin`] applies them to each.
pub(crate) struct Admission<'a> {
    pub(crate) policer: Policer<'a>,
    pub(crate) filter: Option<&'a mut Acl>,
}

impl Admission<'_> {
    #[inline]
    pub(crate) fn admits_all(&self) -> bool {
        self.policer.limit.is_none() && self.filter.is_none()
    }
}
