//! The control queue (VirtIO 1.3, 5.1.6.5), for a device that is embedded in a VMM and serves the queue itself.
//!
//! For a vhost-user back end the VMM may serve it (QEMU's net device does) and send the results by messages; or it
//! passes the queue on like the others ([`with_passed_control`](crate::net_device::NetDevice::with_passed_control)). A
//! device created [with one](crate::net_device::NetDevice::with_control) offers the features that need it
//! ([`OFFERED`]): receive modes and address filters, VLAN filters, the device's address, automatic receive steering and
//! RSS, hash reports, and offloads that change while the device runs.
//!
//! # How it is served
//! [`ControlQueue::serve`] takes commands off the queue. Each is read once from guest memory into a
//! [`command::Command`], checked against the negotiated features, and applied to the device's [`State`]. Then
//! a callback applies the new state to the data path; only after it has returned, the guest gets its answer.
//! VirtIO requires this order: after the answer no frame may go to a queue that was disabled (5.1.6.5.6.2).
//!
//! ```text
//!     guest: command ─▶ read, check ─▶ State ─▶ caller: Change ─▶ data path has a new Receive ─▶ ack ─▶ guest
//!                            │ no                          │ cannot
//!                            └──── VIRTIO_NET_ERR ◀────────┘ (State is as before)
//! ```
//!
//! The data path never sees the state itself, only a [`Receive`](crate::receive::Receive), which is computed
//! from it and does not change: [`NetDevice::receive`](crate::net_device::NetDevice::receive).
//!
//! # Migration of a VM
//! The driver's state is saved as the commands that set it
//! ([`NetDevice::control_commands`](crate::net_device::NetDevice::control_commands)), and another device, in another
//! process, [executes these](crate::net_device::NetDevice::restore_control) like a driver's.
//!
//! # What a hostile guest can do
//! A command that is too short, too long, unknown or not negotiated is answered with VIRTIO_NET_ERR, and
//! nothing changes. One that leaves no byte for the answer is a [`Fault`]. No command allocates more than a
//! table's limit, and one call of `serve` handles at most `most` commands, however many the guest sends.
//!
//! ```
//! use std::sync::Arc;
//!
//! use device::control::{self, Change};
//! use device::counters::ReceiveCounters;
//! use device::features::{F_CTRL_VLAN, F_CTRL_VQ, F_VERSION_1};
//! use device::net_device::NetDevice;
//! use device::offloads::Offloads;
//! use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, QueueDriver};
//! use virtqueue::{GuestAddr, MemoryMap, QueueSize, RingFormat, RingShape, TrustedFiles};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The VMM: a device that serves its control queue itself.
//! let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 1 << 20)])?);
//! let mac = [0x52, 0x54, 0, 0, 0, 1];
//! let mut device = NetDevice::new(1, Offloads::NONE).with_control(mac, control::OFFERED);
//! device.set_memory(Some(Arc::new(MemoryMap::new(ram.regions()?, 0, &TrustedFiles)?)));
//!
//! // The guest's driver: features, and the control queue.
//! device.acknowledge(F_VERSION_1 | F_CTRL_VQ | F_CTRL_VLAN)?;
//! let shape = RingShape::new(RingFormat::Split, QueueSize::new(64)?);
//! let mut driver = QueueDriver::new(&ram, shape, DriverFeatures::default())?;
//! let index = device.control_index();
//! device.set_size(index, 64)?;
//! device.set_addresses(index, driver.ring_user_addresses())?;
//! device.start(index, None)?;
//!
//! // It accepts VLAN 7: VIRTIO_NET_CTRL_VLAN, VIRTIO_NET_CTRL_VLAN_ADD, and the number.
//! let (at, ack) = (ram.alloc(4, 4)?, ram.alloc(1, 1)?);
//! ram.write(at, &[2, 0, 7, 0]);
//! driver.add(&[Buffer::readable(at, 4), Buffer::writable(ack, 1)]);
//! driver.publish();
//!
//! // The VMM serves the queue, and updates its data path before the guest gets the answer.
//! let mut receive = device.receive(None);
//! let mut queue = device.control_queue()?;
//! queue.serve(&mut device, 16, |device, change| {
//!     assert_eq!(change, Change::Filter);
//!     receive = device.receive(None);
//!     true
//! })?;
//! assert!(driver.take_used().is_some());
//! assert_eq!(ram.read_vec(ack, 1), [0], "VIRTIO_NET_OK");
//!
//! // Frames of that VLAN are for the guest, and others are not.
//! let frame = |vlan| [&mac[..], &[2; 6], &[0x81, 0, 0, vlan], &[8, 0]].concat();
//! let counters = ReceiveCounters::default();
//! assert!(receive.place(&frame(7), None, &counters).is_some());
//! assert!(receive.place(&frame(8), None, &counters).is_none());
//! assert_eq!(counters.to_guest_filtered.get(), 1);
//! # Ok(())
//! # }
//! ```

pub mod command;
mod state;

use std::sync::Arc;

use virtio_bindings::bindings::virtio_net as net;
use virtqueue::{Chains, DirtyLog, MemoryMap};

use crate::counters::PairCounters;
pub use crate::driver_state::State;
use crate::features::{
    F_CTRL_GUEST_OFFLOADS, F_CTRL_MAC_ADDR, F_CTRL_RX, F_CTRL_RX_EXTRA, F_CTRL_VLAN, F_HASH_REPORT, F_RSS,
};
use crate::net_device::NetDevice;
use crate::pair::{Fault, Vring};
pub use command::Refusal;
use command::{Command, Rules};
pub use state::{Change, RestoreError};

/// Additional features that a device may offer if it serves the control queue.
pub const OFFERED: u64 = F_CTRL_RX
    | F_CTRL_RX_EXTRA
    | F_CTRL_VLAN
    | F_CTRL_MAC_ADDR
    | F_CTRL_GUEST_OFFLOADS
    | F_RSS
    | F_HASH_REPORT;

/// Longest indirection table, entries (`rss_max_indirection_table_length`). VirtIO requires at least 128.
pub const MOST_TABLE_ENTRIES: u16 = 512;

const ACK_OK: u8 = net::VIRTIO_NET_OK as u8;
const ACK_ERR: u8 = net::VIRTIO_NET_ERR as u8;

/// The control queue of a running device, from [`NetDevice::control_queue`].
pub struct ControlQueue {
    /// Its ring and eventfds.
    pub vring: Vring,
    memory: Arc<MemoryMap>,
    log: Option<Arc<DirtyLog>>,
    chains: Chains,
}

impl ControlQueue {
    pub(crate) fn new(vring: Vring, memory: &Arc<MemoryMap>, log: Option<Arc<DirtyLog>>) -> Self {
        Self {
            vring,
            memory: Arc::clone(memory),
            log,
            chains: Chains::default(),
        }
    }

    /// Serves at most `most` pending commands of `owner`'s device; returns how many. Calls `apply` for each
    /// that changed the device; it returns true once the data path uses the change, or false if that is
    /// impossible: then the change is undone, and the guest gets an error.
    ///
    /// # Errors
    /// The guest's fault; the queue must not be used any more.
    pub fn serve<O: AsMut<NetDevice>>(
        &mut self,
        owner: &mut O,
        most: usize,
        mut apply: impl FnMut(&mut O, Change) -> bool,
    ) -> Result<usize, Fault> {
        let mut served = 0;
        while served < most {
            // One at a time: a command may change what the next one may do.
            let popped = self.vring.queue.pop(&mut self.chains, 1);
            match popped
                .map_err(Fault::from)
                .and_then(|_| self.answer(owner, &mut apply))
            {
                Ok(true) => served += 1,
                Ok(false) => break,
                Err(fault) => {
                    self.publish();
                    return Err(fault);
                }
            }
        }
        self.publish();
        Ok(served)
    }

    /// Answers the popped command, if there is one.
    fn answer<O: AsMut<NetDevice>>(
        &mut self,
        owner: &mut O,
        apply: &mut impl FnMut(&mut O, Change) -> bool,
    ) -> Result<bool, Fault> {
        let Some(chain) = self.chains.iter().next() else {
            return Ok(false);
        };
        let Some(ack) = self.chains.writable(chain).first() else {
            return Err(Fault::ControlWithoutAck { head: chain.id.head });
        };
        let command = Command::read(
            &self.memory,
            self.chains.readable(chain),
            &Rules::of(owner.as_mut()),
        );
        let done = command.is_ok_and(|command| state::change(owner, command, apply));
        let answer = if done { ACK_OK } else { ACK_ERR };
        // Inside the map, as checked when the descriptor was read.
        let _ = self.memory.copy_to_guest(ack.offset, &[answer]);
        if let Some(log) = &self.log {
            self.memory.log(log, ack.offset, 1);
        }
        self.vring.queue.push_used(chain.id, 1);
        Ok(true)
    }

    fn publish(&mut self) {
        // Calls of this queue are not counted in any pair's counters.
        self.vring.publish(&PairCounters::default());
    }

    /// Logs later writes in `log`; `None` stops that.
    pub fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) {
        self.log = log.cloned();
        self.vring.queue.set_log(log.cloned());
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
