//! Lanes that are asleep: they fall asleep with their worker, and do not wake with it.
//!
//! Theory of operation. A worker that sleeps has enabled the notifications of its lanes. Most wake-ups concern one or
//! two lanes, so the others stay asleep: the first round after a sleep polls only lanes with a NIC, lanes that the
//! epoll set reported, and lanes that other lanes deliver to. If the worker does not sleep again after that round, all
//! of them wake ([`Sleeping::end`]), because a polling worker does not see kicks.
//!
//! After [`LONG`] sleeps in a row a lane becomes idle, if it may, and leaves this list: then it costs nothing, however
//! often the worker sleeps and wakes. If it wakes without work in between, the sleeps count as empty polls. So of many
//! guests the list has only those that were busy recently.

use std::collections::VecDeque;

use crate::worker::progress::Progress;
use crate::worker::slots::{Lanes, Slot};

/// In sleeps; about as long as a lane is polled without a frame before it becomes idle.
const LONG: u32 = 256;

/// See the module's head.
#[derive(Default)]
pub(crate) struct Sleeping {
    /// The sleep in which a lane fell asleep, and its index. Entries of lanes that have woken since are skipped.
    lanes: VecDeque<(u32, usize)>,
    sleep: u32,
}

impl Sleeping {
    /// The worker falls asleep: lanes without work do, too, and leave `awake`.
    pub(crate) fn begin(&mut self, lanes: &mut Lanes) {
        self.sleep = self.sleep.wrapping_add(1);
        let Lanes { slots, awake, .. } = lanes;
        awake.retain(|&at| {
            let slot = &mut slots[at];
            if !slot.is_quiet {
                return true;
            }
            slot.is_idle = true;
            self.add(slot, at);
            false
        });
        while let Some(&(since, at)) = self.lanes.front()
            && self.sleep.wrapping_sub(since) > LONG
        {
            self.lanes.pop_front();
            let slot = &mut slots[at];
            if slot.asleep_since == Some(since) {
                match slot.role.may_idle() {
                    true => slot.asleep_since = None,
                    false => self.add(slot, at),
                }
            }
        }
    }

    /// Indices of lanes have changed: all of them wake. The caller recomputes `awake` afterwards.
    pub(crate) fn forget(&mut self, lanes: &mut Lanes, progress: &Progress) {
        self.lanes.clear();
        for slot in lanes.slots.iter_mut().filter(|slot| slot.asleep_since.is_some()) {
            progress.take_up(slot.id);
            slot.end_idle();
        }
    }

    fn add(&mut self, slot: &mut Slot, at: usize) {
        slot.asleep_since = Some(self.sleep);
        self.lanes.push_back((self.sleep, at));
    }

    /// Wakes all of them, and adds them to `awake`.
    #[inline]
    pub(crate) fn end(&mut self, lanes: &mut Lanes, progress: &Progress) {
        while let Some((since, at)) = self.lanes.pop_front() {
            let slot = &mut lanes.slots[at];
            if slot.asleep_since == Some(since) {
                progress.take_up(slot.id);
                let slept = self.sleep.wrapping_sub(since) + 1;
                slot.empty_polls = slot.empty_polls.saturating_add(slept);
                if slot.end_idle() {
                    lanes.awake.push(at);
                }
            }
        }
    }
}
