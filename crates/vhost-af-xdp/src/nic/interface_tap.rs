//! The tap of an interface in tap mode, for a port that is of no network.
//!
//! It takes the place of the port's queues: it is opened once, and lanes borrow it. While the port's first pair has no
//! lane, frames go to the host: the program that moves them goes by the configuration of the port's first queue, as the
//! XDP program does.

use std::io;
use std::sync::{Arc, PoisonError};

use steer::{Mode, QueueConf};

use super::error::InterfaceError;
use super::interface::Interface;
use super::tap::{OpenTap, Tap};
use device::offloads::Offloads;

/// Frames that a tap holds (`TUN_READQ_SIZE`, drivers/net/tun.c).
const HELD: usize = 500;

/// A tap that a lane has.
pub(crate) struct LentTap {
    pub(crate) tap: Tap,
    /// Its kernel cuts UDP packets, too.
    pub(crate) cuts_udp: bool,
    /// Held while frames come by it; `None`: another lane has these.
    pub(crate) receiving: Option<Receiving>,
}

/// When this ends, the interface's frames go to the host.
pub(crate) struct Receiving(Arc<Interface>);

impl Drop for Receiving {
    fn drop(&mut self) {
        // Fails only when the interface or the steward is gone, or away.
        self.0.pass_to_host(self.0.first);
    }
}

impl Interface {
    /// Whether its frames come and go by a tap.
    pub(crate) fn is_by_tap(&self) -> bool {
        self.steering.mode() == Mode::Tap
    }

    /// Opens the tap, if it is not open or the steward has made another; whether it is another one than before.
    /// Errors: [`InterfaceError`].
    pub(crate) fn open_tap(&self) -> Result<bool, InterfaceError> {
        let mut open = self.tap.lock().unwrap_or_else(PoisonError::into_inner);
        let (changes, has) = (
            self.steering.changes(),
            open.as_ref().map_or(0, |open| open.index),
        );
        if open.as_ref().is_some_and(|open| open.changes == changes) {
            return Ok(false);
        }
        let asked = self.steering.uplink(has, 1);
        match asked.map(|asked| asked.map(|(end, mut taps)| (end, taps.pop()))) {
            // The tap works without the steward, and is asked for again when the steward is back.
            Err(error) if error.is_away() && has != 0 => Ok(false),
            Err(error) => Err(error),
            Ok(Some((end, Some(descriptor)))) => {
                *open = Some(OpenTap {
                    tap: Tap::new(descriptor),
                    name: end.interface,
                    index: end.index,
                    cuts_udp: end.cuts_udp,
                    changes,
                });
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

    /// Lends the tap to a lane whose guest takes these offloads. `receives`: frames go to that lane from now on; what
    /// came before is discarded.
    /// Errors: [`InterfaceError`].
    pub(crate) fn lend_tap(
        self: &Arc<Self>,
        offloads: &Offloads,
        receives: bool,
    ) -> Result<LentTap, InterfaceError> {
        self.open_tap()?;
        let open = self.tap.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.as_ref().ok_or(InterfaceError::InUse)?;
        let failed = |source: io::Error| InterfaceError::Tap {
            name: open.name.clone(),
            source: source.into(),
        };
        let mut receiving = None;
        if receives {
            open.tap.set_offloads(offloads, open.cuts_udp).map_err(failed)?;
            open.tap.discard(HELD);
            let conf = QueueConf {
                virtio_header: None,
                frame_limit: self.frame_limit(),
                hints: false,
            };
            self.steering.activate(self.first, conf)?;
            receiving = Some(Receiving(Arc::clone(self)));
        }
        Ok(LentTap {
            tap: open.tap.again().map_err(failed)?,
            cuts_udp: open.cuts_udp,
            receiving,
        })
    }
}
