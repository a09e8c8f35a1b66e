//! XDP metadata of an interface's queues, and how it changes while frames arrive.
//!
//! A lane reads the metadata that it expects ([`NicQueue::set_metadata`]). Three parts have to agree: the lane, the
//! queue's word in the program's map (whether the program leaves metadata before its frames), and the program (which
//! metadata). They change one after the other, and a frame may be in flight from each state in between. Metadata names
//! its layout, so to read in vain only costs time, but unread metadata would be lost. So:
//!
//! ```text
//!     on:   the lane reads ─▶ the queue's word ─▶ the program
//!     off:  the program ─▶ the queue's word;  the lane reads on
//! ```
//!
//! The word is set before a program is there that reports tags: that program distinguishes frames by tags that are not
//! in them, and a guest that should get the tags would not get them. During a change a lane expects only the hints that
//! are there both before and after it: a missing expected hint is counted, and if it is the tag the frame is dropped
//! ([`dataplane::backend`], `metadata_reader.rs`).
//!
//! A lane keeps reading earlier layouts until its queue is lent again: frames of an earlier program may wait for any
//! time. That costs it a check before each frame.
//!
//! [`NicQueue::set_metadata`]: dataplane::nic::endpoint::NicQueue::set_metadata

use model::state::HintsStatus;
use steer::{HintSet, note_layout};
use steward_client::LeaseError;
use steward_protocol::Hinted;

use super::error::InterfaceError;
use super::interface::Interface;
use super::queue_state::{Opened, QueueState};
use crate::config::HintsConfig;
use common::lock::Locked;
use dataplane::nic::hints::XdpMetadata;

/// Called with the new metadata of a queue's frames; when it returns the lane has it.
pub(crate) type Tell<'a> = dyn FnMut(u32, &XdpMetadata) + 'a;

/// The names of a set's hints.
pub(crate) fn names(hints: HintSet) -> Vec<String> {
    hints.names().map(str::to_owned).collect()
}

impl Interface {
    /// The metadata of a queue that is lent from now on.
    pub(super) fn metadata(&self, queue: u32) -> XdpMetadata {
        let metadata = self.metadata_now(false);
        self.metadata_state.locked().of.insert(queue, metadata.clone());
        metadata
    }

    /// A queue is not lent any more.
    pub(super) fn forget_metadata(&self, queue: u32) {
        self.metadata_state.locked().of.remove(&queue);
    }

    /// The requested hints.
    fn asked(&self) -> HintsConfig {
        self.metadata_state.locked().asked
    }

    /// Changes the hints of its queues' frames, now or as soon as the steward is back; lanes keep running. `tell` sends
    /// the lane of a queue the metadata to read.
    /// Errors: the steward refuses them; then nothing changes.
    pub(crate) fn switch_hints(&self, asked: HintsConfig, tell: &mut Tell<'_>) -> Result<(), InterfaceError> {
        let before = std::mem::replace(&mut self.metadata_state.locked().asked, asked);
        if before == asked {
            return Ok(());
        }
        self.tell(true, tell);
        let switched = match self.steering.ask(|lease| lease.ask_for_hints(asked.request())) {
            // It gets the request when it is back.
            Err(InterfaceError::Lease(LeaseError::Away { .. })) => Ok(()),
            switched => switched,
        };
        if switched.is_err() {
            self.metadata_state.locked().asked = before;
        }
        self.settle_hints(tell);
        switched
    }

    /// Sends lanes the present metadata, if it has changed.
    pub(crate) fn settle_hints(&self, tell: &mut Tell<'_>) {
        self.tell(false, tell);
    }

    /// Sends lanes the present metadata, if it has changed. `soon`: a change to the requested hints is in progress.
    fn tell(&self, soon: bool, tell: &mut Tell<'_>) {
        let now = self.metadata_now(soon);
        let lent: Vec<(u32, XdpMetadata)> = self.metadata_state.locked().of.clone().into_iter().collect();
        // A steward that does not answer is waited for once, not for each queue.
        let mut answers = true;
        for (queue, before) in lent {
            let mut next = now.clone().after(&before);
            if soon {
                next.hints = next.hints.among(before.hints);
                next.leaves |= before.leaves;
            }
            if next == before {
                continue;
            }
            let next = next.follow(&before, &mut |metadata| tell(queue, metadata), |leaves| {
                answers = answers && self.let_leave(queue, leaves);
                answers
            });
            let mut metadata_state = self.metadata_state.locked();
            // Not if the queue was lent again meanwhile.
            if let Some(metadata) = metadata_state.of.get_mut(&queue).filter(|now| **now == before) {
                *metadata = next;
            }
        }
    }

    /// Sets whether the program leaves metadata before frames of a lent queue; false: it could not be set.
    fn let_leave(&self, queue: u32, leaves: bool) -> bool {
        let Ok(mut state) = self.state(queue) else {
            return false;
        };
        let QueueState::Lent { opened, .. } = state.now() else {
            return false;
        };
        let told = Opened { leaves, ..*opened };
        let is_told = self.steering.activate(queue, told.conf()).is_ok();
        if is_told {
            *opened = told;
        }
        is_told
    }

    /// The present metadata of the queues' frames. `soon`: the program may leave the requested hints at any time.
    fn metadata_now(&self, soon: bool) -> XdpMetadata {
        let asked = self.asked();
        let hinted = self.steering.hinted();
        let knows = hinted.is_some();
        let hinted = hinted.unwrap_or_default();
        let hints = asked.among(hinted.on);
        let may_come = match asked {
            HintsConfig::Auto => self.is_of_network || self.is_for_vlans,
            HintsConfig::Only(named) => soon && !named.is_empty(),
            HintsConfig::OfProgram => false,
        };
        let leaves = knows && (may_come || !hints.is_empty());
        let mut layouts = match leaves {
            true => hinted.layouts,
            false => Vec::new(),
        };
        if self.is_of_network {
            // What the plain program leaves before frames of a network's queue.
            let at = if hints.is_empty() { 0 } else { layouts.len() };
            layouts.insert(at, note_layout());
        }
        XdpMetadata {
            hints,
            layouts,
            leaves,
        }
    }

    /// Its hints, for `status`; `None`: none are known or requested.
    pub(crate) fn hints_status(&self) -> Option<HintsStatus> {
        let (hinted, asked) = (self.steering.hinted(), self.asked());
        if hinted.is_none() && asked.named().is_empty() {
            return None;
        }
        let hinted = hinted.unwrap_or_default();
        Some(HintsStatus {
            asked: asked.to_string(),
            possible: names(hinted.possible),
            on: names(asked.among(hinted.on)),
            seen: names(self.seen.get()),
            why: self.lacks_hints(),
        })
    }

    /// Why frames lack hints that were requested by name; `None`: they have them.
    pub(crate) fn lacks_hints(&self) -> Option<String> {
        let Hinted { on, why, .. } = self.steering.hinted().unwrap_or_default();
        let missing = self.asked().named().without(on);
        (!missing.is_empty()).then(|| match why.is_empty() {
            true => format!("no {missing}"),
            false => why,
        })
    }
}
