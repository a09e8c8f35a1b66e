//! The control queue of a front end that passes it on: User-mode Linux, crosvm, QEMU's generic vhost-user device.
//! QEMU's net device serves its own and never sets this vring up.
//!
//! The thread that reads the VMM's connection waits for kicks, and serves one command at a time
//! ([`Session::serve_control`]); no worker reads this queue. The change of a command is in effect before the guest gets
//! its answer (VirtIO 1.3, 5.1.6.5). This thread itself writes to the call eventfd, as it does for a stopped lane: see
//! `supervision/interrupt.rs`.

use std::os::fd::OwnedFd;

use anyhow::Context;
use device::control::Change;
use device::net_device::NetDevice;
use device::offloads::Offloads;

use super::pairs::report;
use super::{PortContext, Session};
use crate::port::lanes::LaneError;

impl AsMut<NetDevice> for Session {
    fn as_mut(&mut self) -> &mut NetDevice {
        &mut self.device
    }
}

impl Session {
    /// The pair of a vring; `None`: it is the control queue's.
    pub(super) fn pair_of(&self, index: u32) -> Option<usize> {
        let pair = index as usize / 2;
        (!self.device.is_control(index) && pair < self.lanes.len()).then_some(pair)
    }

    /// A duplicate of a vring's kick eventfd, if it is the control queue's vring.
    pub(crate) fn control_kick(&self, index: u32) -> anyhow::Result<Option<OwnedFd>> {
        if !self.device.is_control(index) {
            return Ok(None);
        }
        let kick = self.device.vring(index)?.kick.as_ref();
        let kick = kick.with_context(|| {
            format!(
                "vring {index} is the control queue and has no kick eventfd: a control queue is not polled"
            )
        })?;
        Ok(Some(kick.try_clone().map_err(LaneError::Duplicate)?))
    }

    /// Starts the control queue, if there is one to start.
    /// Errors: a fault of the VMM or its guest.
    pub(super) fn start_control(&mut self) -> anyhow::Result<()> {
        let index = self.device.control_index();
        let ready = self.control.is_none()
            && self.device.is_control(index)
            && self.device.vring(index)?.started
            && self.device.memory().is_some();
        if ready {
            let mut queue = self.device.control_queue().map_err(LaneError::from)?;
            queue.vring.call.leave();
            self.control = Some(queue);
        }
        Ok(())
    }

    /// Stops the control queue; its position is kept.
    pub(super) fn stop_control(&mut self) {
        if let Some(queue) = self.control.take() {
            // Never fails: the queue was made from that vring.
            let _ = self.device.keep_control_base(&queue);
        }
    }

    /// Serves a command of the control queue, if one is there; returns whether there may be more.
    /// Errors: why a lane cannot be rebuilt for the change.
    pub(crate) fn serve_control(&mut self, context: &PortContext<'_>) -> anyhow::Result<bool> {
        let vring = self.device.vring(self.device.control_index());
        let enabled = vring.is_ok_and(|vring| vring.enabled);
        let Some(mut queue) = self.control.take_if(|_| enabled) else {
            return Ok(false);
        };
        let before = self.device.negotiated().offloads;
        let mut followed = Ok(());
        let served = queue.serve(self, 1, |session, change| {
            followed = session.follow(change, before, context);
            followed.is_ok()
        });
        if let Some(event) = queue.vring.call.take_due() {
            self.call(&event, context.workers);
            drop(queue.vring.call.replace(Some(event)));
        }
        match served {
            Ok(served) => {
                let more = queue.vring.queue.enable_kicks() || served > 0;
                self.control = Some(queue);
                followed.map(|()| more)
            }
            Err(fault) => {
                report(&self.fault, fault, &self.connection.alarm);
                Ok(false)
            }
        }
    }

    /// Applies the changes of a command to lanes.
    fn follow(&mut self, change: Change, before: Offloads, context: &PortContext<'_>) -> anyhow::Result<()> {
        match change {
            Change::Offloads if self.device.negotiated().offloads != before => self.rebuild_lanes(context),
            Change::Steering => {
                for index in (0..).take(2 * self.lanes.len()) {
                    self.follow_enabled(index, context)?;
                }
                self.settle(context)
            }
            _ => Ok(()),
        }
    }
}
