//! Checks each frame of a guest outside of networks just before it is passed on: source guard, rules, rate limit.
//! (In a network the FDB has the guards, and a batch is checked before its first frame is passed on.)
//!
//! As in a network the first bytes of a frame are copied out of guest memory, checked, and sent in place of those in
//! guest memory, which the guest may have changed meanwhile, even where the rest is sent from guest memory. A frame
//! without room is retried and checked again: its verdict is counted once, when it is done.

use device::counters::{Counter, PairCounters};
use device::pair::{Fault, Vring};
use virtqueue::{Buffer, Chain};

use super::classified::Classified;
use super::known::apply_rules_to_any;
use crate::guest::from_guest::Budget;
use crate::policy::filter::Acl;
use crate::policy::guard::Guard;
use crate::policy::rate_limit::{Cost, Throttle};

/// The batch's budget, and, if no frame can be sent now, the counter of the dropped ones.
pub(super) type Charges<'a> = (&'a mut Budget, Option<&'a Counter>);

/// See the module's head.
pub(super) struct Checks<'a> {
    pub(super) guard: Option<&'a Guard>,
    pub(super) acl: Option<&'a mut Acl>,
    pub(super) throttle: &'a mut Throttle,
    /// By chain: its cost to the rate limit, if there is one.
    pub(super) costs: &'a mut Vec<Cost>,
    pub(super) counters: &'a PairCounters,
}

impl Checks<'_> {
    /// Checks the next chain, whose result is stored in `entry`; false: it has to wait for the rate limit.
    /// Errors: the guest's fault.
    // Runs once per frame.
    #[inline(always)]
    pub(super) fn check(
        &mut self,
        vring: &mut Vring,
        (chain, buffers): (&Chain, &[Buffer]),
        entry: &mut Classified,
        (budget, unsendable): Charges<'_>,
    ) -> Result<bool, Fault> {
        entry.known = 0;
        entry.is_sent = vring.check_into(chain, buffers, unsendable, self.counters, &mut entry.sending)?;
        if self.guard.is_some() || self.acl.is_some() {
            entry.verdict = None;
            if entry.is_sent {
                entry.is_sent = self.allows(vring, buffers, entry, budget);
            }
        }
        if !self.throttle.is_on() {
            return Ok(true);
        }
        let cost = match (entry.is_sent, entry.sending.request.gso) {
            (false, _) => Cost::default(),
            (true, None) => Cost::frame(entry.sending.len),
            (true, Some(_)) => entry.any_frame(vring, buffers).cost(),
        };
        if entry.is_sent && self.throttle.holds(|| Some(cost), self.counters) {
            return Ok(false);
        }
        self.costs.push(cost);
        Ok(true)
    }

    /// Whether guard and rules allow the frame; counts one that the guard rejects.
    #[inline(never)]
    fn allows(
        &mut self,
        vring: &Vring,
        buffers: &[Buffer],
        entry: &mut Classified,
        budget: &mut Budget,
    ) -> bool {
        let has_ips = self.guard.is_some_and(|guard| guard.source_guard.is_some());
        entry.read_head(vring, buffers, has_ips || self.acl.is_some());
        if let Some(guard) = self.guard
            && let Err(refusal) = guard.check(&entry.head, entry.known.into(), &entry.sending)
        {
            refusal.counter(self.counters).add(1);
            return false;
        }
        let Some(rules) = self.acl.as_mut().and_then(|acl| acl.rules.as_mut()) else {
            return true;
        };
        let allowed = apply_rules_to_any(None, (entry, rules), self.counters);
        budget.charge_look_ups(rules.take_work());
        allowed.is_some()
    }
}
