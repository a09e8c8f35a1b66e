//! Counters and capture of filtered frames.

use super::PortLane;
use crate::backend::own_queue::OwnQueue;
use crate::policy::filter::{Acl, Facts, Verdict};

impl<O: OwnQueue> PortLane<O> {
    /// Counts the verdicts on the first `done` chains, and passes their frames to the capture. Chains that were put
    /// back are checked again later.
    #[cold]
    pub(super) fn count_filtered(&self, done: usize) {
        let Some(filter) = self.filter.as_deref() else {
            return;
        };
        if let Some(rules) = &filter.rules {
            for verdict in self.chains[..done].iter().filter_map(|entry| entry.verdict) {
                rules.count(verdict);
                self.counters.from_guest_filter.add((!verdict.allows).into());
            }
        }
        if filter.is_watched() {
            self.show(filter, done);
        }
    }

    /// Passes the frames of the first `done` chains, as the guest sent them, to the capture.
    fn show(&self, to: &Acl, done: usize) {
        let chains = &self.sender.chains;
        // Nothing was read of chains without a frame.
        let frames = self.chains[..done]
            .iter()
            .zip(&chains.chains)
            .filter(|(it, _)| it.known > 0);
        for (entry, chain) in frames {
            let buffers = chains.buffers(chain);
            let frame = entry.any_frame(&self.from_guest, buffers);
            let facts = Facts::of_len(entry.sending.len as usize);
            let value = match entry.is_sent {
                true => Ok(entry.verdict.unwrap_or(Verdict::UNFILTERED)),
                false => Err(entry.verdict),
            };
            to.show(value, facts, facts.len, |bytes| frame.read_start(bytes));
        }
    }
}
