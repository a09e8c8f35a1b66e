//! The tap by which frames arrive for a network, or for a port outside of networks, in tap mode.
//!
//! The queues only send then ([`super::interface_queue`]). The program that moves a port's frames to the tap uses the
//! configuration of the port's first queue: while that queue is not lent, the frames go to the host.

use anyhow::Context;
use device::counters::PairCounters;
use device::offloads::Offloads;
use steer::Mode;

use super::error::InterfaceError;
use super::interface::Interface;
use super::open_tap::OpenTap;
use common::lock::Locked;
use dataplane::nic::tap::Tap;

/// Most earlier frames of a queue that are discarded: it holds 1000, or as many as the user set (`ip link set
/// txqueuelen`).
const HELD_MOST: usize = 1 << 16;

impl Interface {
    /// Whether its frames arrive by a tap, and not in its queues.
    pub(crate) fn is_by_tap(&self) -> bool {
        self.steering.mode() == Mode::Tap
    }

    /// Opens the tap, if it is not open or the steward has made another one; returns whether it replaced an open tap.
    /// Errors: [`InterfaceError`].
    pub(crate) fn open_tap(&self) -> Result<bool, InterfaceError> {
        let mut open = self.tap.locked();
        let (changes, has) = (
            self.steering.changes(),
            open.as_ref().map_or(0, |open| open.index),
        );
        if open.as_ref().is_some_and(|open| open.changes == changes) {
            return Ok(false);
        }
        match self
            .steering
            .ask(|lease| lease.uplink(has, self.queue_count()).map(Some))
        {
            // The tap works without the steward, and is requested again when the steward is back.
            Err(error) if error.is_away() && has != 0 => Ok(false),
            Err(error) => {
                if error.is_refusal() {
                    // The tap does not exist any more.
                    *open = None;
                }
                Err(error)
            }
            Ok(Some((end, taps))) if !taps.is_empty() => {
                *open = Some(OpenTap::new(end, taps, changes));
                Ok(has != 0)
            }
            Ok(_) => {
                if let Some(open) = &mut *open {
                    open.changes = changes;
                }
                Ok(false)
            }
        }
    }

    /// In tap mode: discards, and counts, frames that arrived by the tap before a guest's lane starts.
    /// Errors: [`InterfaceError`].
    pub(crate) fn forget_frames_of_tap(&self, counters: &PairCounters) -> Result<(), InterfaceError> {
        if !self.is_by_tap() {
            return Ok(());
        }
        // An open tap is not replaced here: the port checks for another one, and restarts all lanes then.
        if self.tap.locked().is_none() {
            self.open_tap()?;
        }
        if let Some(open) = &*self.tap.locked() {
            let frames = open.queues.iter().map(|tap| tap.discard(HELD_MOST));
            let frames = frames.sum::<usize>() as u64;
            counters.to_guest_queue_stopped.add(frames);
        }
        Ok(())
    }

    /// The open tap, with descriptors of its own.
    /// Errors: [`InterfaceError`].
    pub(crate) fn tap_again(&self) -> Result<OpenTap, InterfaceError> {
        let open = self.tap.locked();
        let open = open.as_ref().ok_or(InterfaceError::InUse)?;
        open.again().map_err(InterfaceError::Duplicate)
    }

    /// Sets a pair's queue of the tap to the guest's offloads, and returns it; `None`: the tap has fewer queues.
    /// Errors: [`InterfaceError`].
    pub(crate) fn receive_by_tap(
        &self,
        pair: u16,
        offloads: &Offloads,
    ) -> Result<Option<Tap>, InterfaceError> {
        let open = self.tap.locked();
        let open = open.as_ref().ok_or(InterfaceError::InUse)?;
        let Some(tap) = open.queues.get(usize::from(pair)) else {
            return Ok(None);
        };
        let set = tap.set_offloads(offloads, open.segments_udp);
        let tap = set.and_then(|()| tap.again());
        Ok(Some(
            tap.with_context(|| format!("{} cannot be served", open.name))?,
        ))
    }
}
