//! Filter rules and capture of one direction of a lane: decides about frames, and passes frames and decisions to the
//! capture.

use std::sync::Arc;

use device::counters::PairCounters;
use packet::HEADERS_MAX;

use super::{Classifier, Facts, Rules, Verdict};
use crate::policy::capture::{About, Capture, Seen, Tap};

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Acl {
    /// `None`: all frames pass, with any headers.
    pub(crate) rules: Option<Classifier>,
    /// `None`: there is no capture.
    tap: Option<Tap>,
}

impl Acl {
    /// `None`: there are no rules, and there is no capture.
    pub(super) fn new(
        rules: Option<&Arc<Rules>>,
        capture: Option<&Arc<Capture>>,
        (to_guest, pair): (bool, u16),
    ) -> Option<Self> {
        let tap = capture.and_then(|capture| capture.tap(to_guest, pair));
        let acl = Self {
            rules: rules.cloned().map(Classifier::new),
            tap,
        };
        (acl.rules.is_some() || acl.tap.is_some()).then_some(acl)
    }

    /// See [`Classifier::admits`].
    #[inline]
    pub(crate) fn admits(
        &mut self,
        head: &[u8],
        facts: Facts,
        counters: &PairCounters,
    ) -> Result<Verdict, Option<Verdict>> {
        match &mut self.rules {
            Some(rules) => rules.admits(head, facts, counters),
            None => Ok(Verdict::UNFILTERED),
        }
    }

    /// The same for a frame that is not retried; returns whether it is allowed.
    #[inline]
    pub(crate) fn allows(&mut self, head: &[u8], facts: Facts, counters: &PairCounters) -> bool {
        let said = self.admits(head, facts, counters);
        self.settle(said, facts, head.len().min(HEADERS_MAX), |to| {
            to.copy_from_slice(&head[..to.len()]);
        });
        said.is_ok()
    }

    /// Counts and captures a frame that is done, with the decision on it. `most`: bytes of it that can be read.
    #[inline]
    pub(crate) fn settle(
        &self,
        said: Result<Verdict, Option<Verdict>>,
        facts: Facts,
        most: usize,
        read: impl FnOnce(&mut [u8]),
    ) {
        if let (Some(rules), Ok(verdict)) = (&self.rules, said) {
            rules.count(verdict);
        }
        self.show(said, facts, most, read);
    }

    /// Passes a frame and the decision to the capture.
    #[inline]
    pub(crate) fn show(
        &self,
        said: Result<Verdict, Option<Verdict>>,
        facts: Facts,
        most: usize,
        read: impl FnOnce(&mut [u8]),
    ) {
        let Some(tap) = &self.tap else { return };
        let seen = match (said, &self.rules) {
            (Ok(_), _) => Seen::Passed,
            (Err(Some(verdict)), Some(rules)) if !verdict.allows => Seen::Denied(rules.number_of(verdict)),
            (Err(_), _) => Seen::Refused,
        };
        let about = About {
            len: u32::try_from(facts.len).ok(),
            received: facts.received,
            seen,
        };
        tap.show(about, most.min(facts.len), read);
    }

    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        self.tap.is_some()
    }

    /// See [`Classifier::forget`].
    pub(crate) fn forget(&mut self) {
        if let Some(rules) = &mut self.rules {
            rules.forget();
        }
    }

    /// See [`Classifier::take_work`].
    #[inline]
    pub(crate) fn take_work(&mut self) -> u64 {
        self.rules.as_mut().map_or(0, Classifier::take_work)
    }
}
