//! Decides which frames a guest outside of networks may send, one with its own NIC queue or cable: first by its source
//! guard, then by its filter rules. (In a network the FDB has the guards.)
//!
//! As in a network the first bytes of a frame are copied out of guest memory, checked, and sent in place of those in
//! guest memory, which the guest may have changed meanwhile, even where the rest is sent from guest memory. A frame
//! without room is retried and checked again: rules count it when it is done ([`Policy::settle`]).

use device::counters::PairCounters;
use packet::HEADERS_MAX;

use super::fdb::Destination;
use super::filter::{Acl, Classifier, Facts, FlowKey, LaneFilter, Looked, Verdict, is_long};
use super::guard::{Guard, Guarded, SHORT_LOOK_BYTES};
use super::guest_frame::GuestFrame;

/// See the module's head. The policy of one lane.
#[derive(Debug)]
pub(crate) struct Policy {
    guarded: Option<Box<Guarded>>,
    filter: Option<Box<LaneFilter>>,
    /// Verdict of the rules on the last frame, until it is counted.
    verdict: Option<Verdict>,
    head: [u8; HEADERS_MAX],
    captured: Captured,
}

/// A frame for the capture, kept until it is done.
#[derive(Debug)]
struct Captured {
    /// The decision about it; `None`: there is no frame.
    outcome: Option<Result<Verdict, Option<Verdict>>>,
    len: usize,
    /// Valid bytes of `head`.
    known: usize,
    head: [u8; HEADERS_MAX],
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            guarded: None,
            filter: None,
            verdict: None,
            head: [0; HEADERS_MAX],
            captured: Captured {
                outcome: None,
                len: 0,
                known: 0,
                head: [0; HEADERS_MAX],
            },
        }
    }
}

impl Policy {
    /// Sets which source addresses the guest may use; `None`: any.
    pub(crate) fn set_guard(&mut self, guard: Option<&Guard>) {
        self.guarded = guard.map(|guard| Box::new(Guarded::new(guard.clone())));
    }

    /// Sets the filter rules, and returns the previous ones.
    pub(crate) fn set_filter(&mut self, filter: Option<Box<LaneFilter>>) -> Option<Box<LaneFilter>> {
        self.verdict = None;
        self.captured.outcome = None;
        std::mem::replace(&mut self.filter, filter)
    }

    /// The filter rules of frames to the guest; `None`: it gets all.
    #[inline]
    pub(crate) fn to_guest(&mut self) -> Option<&mut Acl> {
        self.filter.as_mut().and_then(|filter| filter.to_guest.as_mut())
    }

    /// Whether all frames of the guest pass unchecked.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.guarded.is_none()
            && self
                .filter
                .as_ref()
                .is_none_or(|filter| filter.from_guest.is_none())
    }

    /// Checks a frame. Returns it with its checked first bytes in place of those in guest memory; `None`: it may not be
    /// sent, which is counted, now or when it is done.
    #[cold]
    #[inline(never)]
    pub(super) fn check<'a>(
        &'a mut self,
        frame: GuestFrame<'a>,
        counters: &PairCounters,
    ) -> Option<GuestFrame<'a>> {
        let Self {
            guarded,
            filter,
            verdict,
            head,
            captured,
        } = self;
        let acl = filter.as_mut().and_then(|filter| filter.from_guest.as_mut());
        let is_watched = acl.as_ref().is_some_and(|acl| acl.is_watched());
        let Captured {
            outcome,
            len,
            known,
            head: captured,
        } = captured;
        let frame = match is_watched {
            true => read_captured(frame, captured, (len, known)),
            false => frame,
        };
        *verdict = None;
        let rules = acl.and_then(|acl| acl.rules.as_mut());
        let classified = check_all(frame, (guarded.as_deref_mut(), rules), (verdict, head), counters);
        *outcome = is_watched.then(|| match &classified {
            Some(_) => Ok(verdict.unwrap_or(Verdict::UNFILTERED)),
            None => Err(*verdict),
        });
        classified
    }

    /// Takes the cost of the last frame's look-up, in frames of a budget.
    #[inline]
    pub(super) fn take_work(&mut self) -> u64 {
        let filter = self.filter.as_mut().and_then(|filter| filter.from_guest.as_mut());
        filter.map_or(0, Acl::take_work)
    }

    /// Counts and captures the last frame if it is done; otherwise it is retried, and forgotten here.
    #[inline]
    pub(super) fn settle(&mut self, is_done: bool, counters: &PairCounters) {
        let verdict = self.verdict.take().filter(|_| is_done);
        let outcome = self.captured.outcome.take().filter(|_| is_done);
        let Some(acl) = self.filter.as_ref().and_then(|filter| filter.from_guest.as_ref()) else {
            return;
        };
        if let (Some(rules), Some(verdict)) = (&acl.rules, verdict) {
            rules.count(verdict);
            counters.from_guest_filter.add((!verdict.allows).into());
        }
        if let Some(outcome) = outcome {
            let Captured { len, known, head, .. } = &self.captured;
            acl.show(outcome, Facts::of_len(*len), *known, |to| {
                to.copy_from_slice(&head[..to.len()]);
            });
        }
    }
}

/// Checks a frame by the guard and the rules; stores the rules' verdict. See [`Policy::check`].
fn check_all<'a>(
    frame: GuestFrame<'a>,
    (guarded, rules): (Option<&'a mut Guarded>, Option<&mut Classifier>),
    (verdict, head): (&mut Option<Verdict>, &'a mut [u8; HEADERS_MAX]),
    counters: &PairCounters,
) -> Option<GuestFrame<'a>> {
    let frame = match guarded {
        Some(guarded) => guarded.check(frame, counters)?,
        None => frame,
    };
    let Some(rules) = rules else {
        return Some(frame);
    };
    let frame = with_head(frame, head);
    let Ok(Looked { key, bytes }) = FlowKey::of(frame.head, frame.sending.len as usize) else {
        counters.from_guest_headers.add(1);
        return None;
    };
    // Stored there, the checksum would change the checked bytes.
    if frame.sending.request.csum.is_some_and(|at| at.field() < bytes) {
        counters.from_guest_checksum_in_headers.add(1);
        return None;
    }
    let decision = rules.decide((&key, 0, key.hash()), counters, || Destination::Unknown);
    *verdict = Some(decision.verdict);
    decision.verdict.allows.then_some(frame)
}

/// Copies the first bytes of a frame for the capture. From here on, the part of them that checks read replaces the
/// bytes in guest memory: the captured bytes are the checked ones.
fn read_captured<'a>(
    frame: GuestFrame<'a>,
    head: &'a mut [u8; HEADERS_MAX],
    (len, known): (&mut usize, &mut usize),
) -> GuestFrame<'a> {
    *len = frame.sending.len as usize;
    *known = HEADERS_MAX.min(*len);
    frame.read_start(&mut head[..*known]);
    let is_long = head.first_chunk().is_some_and(is_long);
    let looked = if is_long { HEADERS_MAX } else { SHORT_LOOK_BYTES };
    frame.headed(&head[..looked.min(*known)])
}

/// Copies as many first bytes of a frame as rules read into `head`, to be sent in place of those in guest memory. Bytes
/// that an earlier check has copied keep their values.
pub(super) fn with_head<'a>(frame: GuestFrame<'a>, head: &'a mut [u8; HEADERS_MAX]) -> GuestFrame<'a> {
    let len = frame.sending.len as usize;
    let mut known = SHORT_LOOK_BYTES.max(frame.head.len()).min(len).min(HEADERS_MAX);
    frame.read_start(&mut head[..known]);
    if known < HEADERS_MAX && head.first_chunk().is_some_and(is_long) {
        // Reads all of it again: no byte of the first read is used.
        known = HEADERS_MAX.min(len);
        frame.read_start(&mut head[..known]);
    }
    frame.headed(&head[..known])
}
