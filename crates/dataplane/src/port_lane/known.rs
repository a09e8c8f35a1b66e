//! Checks frames of a port, and finds their destinations.

use device::counters::PairCounters;
use packet::ethernet::{self, ADDRESS_BYTES, Head, LinkControl, Tags};

use super::classified::Classified;
use super::learning;
use crate::fdb::learned::Learned;
use crate::fdb::{Destination, Fdb, FdbKey, FdbPort};
use crate::policy::filter::{Classifier, FlowKey, Looked};
use crate::policy::guard::check_content;

/// Results for the last frame: the next one most often has the same header.
#[derive(Default)]
pub(super) struct Known {
    /// The last source that the port may use.
    source: Option<FdbKey>,
    destination: Option<(FdbKey, Destination)>,
    /// The last plain frame that may be sent.
    plain: Option<Plain>,
    /// The last frame began as the one before it did.
    repeats: bool,
}

/// An untagged frame of a port that checks the Ethernet header only: a frame with the same header, and without a
/// request for a checksum (so without segmentation, too), is classified alike.
struct Plain {
    start: [u64; 2],
    vlan: u16,
    source: FdbKey,
    destination: FdbKey,
}

/// The two addresses and the type of a frame that begins with these bytes: two words, which overlap.
#[inline]
fn start_of(head: &[u8; ethernet::LOOK_BYTES]) -> [u64; 2] {
    [0, ADDRESS_BYTES + 2 - 8].map(|at| {
        let mut word = [0; 8];
        word.copy_from_slice(&head[at..at + 8]);
        u64::from_ne_bytes(word)
    })
}

/// Applies the filter rules to a frame, and stores the verdict; `None`: it may not be sent, which is counted, now or
/// later. `to`: the destination address, in a network.
// Inlined into both callers: otherwise the key would be passed through memory.
#[inline(always)]
fn apply_rules(
    Looked { key, bytes }: Looked,
    to: Option<(&Fdb, &FdbPort, FdbKey)>,
    (chain, filter): (&mut Classified, &mut Classifier),
    counters: &PairCounters,
) -> Option<()> {
    // Stored there, the checksum would change the bytes that the rules read.
    if chain.sending.request.csum.is_some_and(|at| at.field() < bytes) {
        counters.from_guest_checksum_in_headers.add(1);
        return None;
    }
    let flow = (&key, to.map_or(0, |(.., to)| to.bits()), key.hash());
    let find = || to.map_or(Destination::Unknown, |(fdb, port, to)| fdb.find_for(port, to));
    let decision = filter.decide(flow, counters, find);
    chain.verdict = Some(decision.verdict);
    chain.to = decision.destination;
    decision.verdict.allows.then_some(())
}

/// The same for a frame with any headers.
#[inline(never)]
pub(super) fn apply_rules_to_any(
    to: Option<(&Fdb, &FdbPort, FdbKey)>,
    (chain, filter): (&mut Classified, &mut Classifier),
    counters: &PairCounters,
) -> Option<()> {
    let head = &chain.head[..chain.known.into()];
    let Ok(looked) = FlowKey::of(head, chain.sending.len as usize) else {
        counters.from_guest_headers.add(1);
        return None;
    };
    apply_rules(looked, to, (chain, filter), counters)
}

/// The destination of untagged frames that begin with these bytes, addresses and type, and request nothing. The port
/// has no source guard and no rules, and their source was accepted, so nothing else is read.
#[derive(Clone, Copy)]
pub(super) struct Alike {
    start: [u64; 2],
    vlan: u16,
    to: Destination,
}

impl Alike {
    /// If the frame begins with these bytes, sets its destination; returns whether it does.
    #[inline(always)]
    pub(super) fn apply(&self, chain: &mut Classified) -> bool {
        if chain.head.first_chunk().map(start_of) != Some(self.start) {
            return false;
        }
        (chain.is_sent, chain.to) = (true, self.to);
        (chain.vlan, chain.is_tagged) = (self.vlan, false);
        true
    }
}

#[derive(Clone, Copy)]
struct Source<'a> {
    key: FdbKey,
    /// Where to record the source, if it is not the port's own.
    learned: Option<&'a Learned>,
}

impl Known {
    /// Finds the destination of a port's frame; `None`: it may not be sent, which is counted.
    // Runs once per frame: a call would cost more than the work for a frame that is like the last one.
    #[inline(always)]
    pub(super) fn find(
        &mut self,
        fdb: &Fdb,
        port: &FdbPort,
        chain: &mut Classified,
        counters: &PairCounters,
    ) -> Option<()> {
        let known = self.recall(chain);
        self.repeats = known.is_some();
        let (destination, source) = known.or_else(|| self.check(fdb, port, chain, counters))?;
        self.note_source(source, counters)?;
        chain.to = match self.destination {
            Some((known, found)) if known == destination => found,
            _ => fdb.find_for(port, destination),
        };
        self.destination = Some((destination, chain.to));
        Some(())
    }

    /// The same with filter rules; their verdict is stored and counted later.
    #[inline]
    pub(super) fn find_filtered(
        &mut self,
        fdb: &Fdb,
        port: &FdbPort,
        (chain, filter): (&mut Classified, &mut Classifier),
        counters: &PairCounters,
    ) -> Option<()> {
        let known = self.recall(chain);
        let (destination, source) = known.or_else(|| self.check(fdb, port, chain, counters))?;
        let (head, len) = (&chain.head[..chain.known.into()], chain.sending.len as usize);
        let looked = FlowKey::of_plain(head, len);
        let to = Some((fdb, port, destination));
        let may_pass = match looked {
            Some(looked) => apply_rules(looked, to, (chain, filter), counters),
            None => apply_rules_to_any(to, (chain, filter), counters),
        };
        may_pass?;
        self.note_source(source, counters)
    }

    /// Records the source of a frame that may be sent, if it has to be learned.
    #[inline]
    fn note_source(&mut self, source: Source<'_>, counters: &PairCounters) -> Option<()> {
        if let Some(learned) = source.learned
            && let Err(counter) = learning::record(learned, source.key)
        {
            counter(counters).add(1);
            return None;
        }
        self.source = Some(source.key);
        Some(())
    }

    /// The destination of frames that begin as the last two did, and request nothing; `None`: each has to be checked.
    #[inline]
    pub(super) fn alike(&self) -> Option<Alike> {
        let &Plain {
            start,
            vlan,
            destination,
            ..
        } = self.plain.as_ref().filter(|_| self.repeats)?;
        let (_, to) = self.destination.filter(|&(known, _)| known == destination)?;
        Some(Alike { start, vlan, to })
    }

    /// The result of [`Self::check`] for a frame that begins as the last one did; `None`: call it.
    #[inline(always)]
    fn recall<'a>(&self, chain: &mut Classified) -> Option<(FdbKey, Source<'a>)> {
        let alike = self.plain.as_ref()?;
        let is_alike = chain.head.first_chunk().map(start_of) == Some(alike.start);
        if !is_alike || chain.sending.request.csum.is_some() {
            return None;
        }
        (chain.vlan, chain.is_tagged) = (alike.vlan, false);
        let source = Source {
            key: alike.source,
            learned: None,
        };
        Some((alike.destination, source))
    }

    /// Checks a port's frame by all but filter rules; returns its destination and source. `None`: it may not be sent,
    /// which is counted.
    #[inline(never)]
    fn check<'a>(
        &mut self,
        fdb: &Fdb,
        port: &'a FdbPort,
        chain: &mut Classified,
        counters: &PairCounters,
    ) -> Option<(FdbKey, Source<'a>)> {
        let bytes = chain.head.first_chunk()?;
        let Head { to, from, tags } = ethernet::head(bytes);
        if let Some(kind) = ethernet::link_control(bytes, tags)
            && (kind == LinkControl::Mac || !port.options.link_control)
        {
            counters.from_guest_link_control.add(1);
            return None;
        }
        let Some(vlan) = port.vlans.of_guests(tags) else {
            counters.from_guest_vlan.add(1);
            return None;
        };
        if vlan != 0 && !chain.may_be_retagged(tags) {
            counters.drop_malformed(chain.not_retagged());
            return None;
        }
        let source = FdbKey::new(vlan, from);
        let mut learned = None;
        if self.source != Some(source) && from != port.mac {
            match learning::may_learn(fdb, port, source) {
                Ok(its) => learned = Some(its),
                Err(counter) => {
                    counter(counters).add(1);
                    return None;
                }
            }
        }
        let head = &chain.head[..chain.known.into()];
        if let Err(refusal) = check_content(port.source_guard.as_deref(), from, (head, tags), &chain.sending)
        {
            refusal.counter(counters).add(1);
            return None;
        }
        let destination = FdbKey::new(vlan, to);
        // A source that is being learned is checked for each frame until it is recorded.
        let is_plain = tags == Tags::None && port.source_guard.is_none() && learned.is_none();
        self.plain = is_plain.then(|| Plain {
            start: start_of(bytes),
            vlan,
            source,
            destination,
        });
        // A priority tag stays in a network without VLANs, and becomes the tag of the port's VLAN otherwise.
        if tags == Tags::One(0) && vlan != 0 {
            ethernet::set_vlan(&mut chain.head, vlan);
        }
        (chain.vlan, chain.is_tagged) = (vlan, vlan != 0 && tags != Tags::None);
        let key = source;
        Some((destination, Source { key, learned }))
    }
}

#[cfg(test)]
#[path = "known_tests.rs"]
mod tests;
