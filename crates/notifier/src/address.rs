//! Where a driver writes to notify a queue: virtio-mmio and virtio-pci (VirtIO 1.3, 4.1.5.2 and 4.2.3.3).
//!
//! With `VIRTIO_F_NOTIFICATION_DATA` a driver writes more than the queue's index (2.9), which no datamatch can know. A
//! device that offers it gives each queue an address of its own, which is virtio-pci with a multiplier, and no
//! datamatch.

use std::fmt;

/// Offset of QueueNotify in the registers of virtio-mmio, in bytes (VirtIO 1.3, 4.2.2).
const MMIO_QUEUE_NOTIFY: u64 = 0x50;
/// Length of a notification over PCI, in bytes, without `VIRTIO_F_NOTIFICATION_DATA` (VirtIO 1.3, 4.1.4.4.1).
const PCI_NOTIFY_BYTES: u64 = 2;
/// Ports that x86 has.
const PIO_PORTS: u64 = 0x1_0000;

/// An address space of the guest, for which KVM keeps a separate list of devices (`enum kvm_bus`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bus {
    /// Memory-mapped I/O.
    Mmio,
    /// Ports of x86.
    Pio,
}

impl fmt::Display for Bus {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(match self {
            Self::Mmio => "MMIO",
            Self::Pio => "port I/O",
        })
    }
}

/// Which writes to an address are notifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Match {
    /// Any value of any length.
    Any,
    /// Two bytes with this value: the queue's index over PCI.
    U16(u16),
    /// Four bytes with this value: the queue's index over virtio-mmio.
    U32(u32),
}

impl Match {
    /// Whether one write can be both.
    fn overlaps(self, other: Self) -> bool {
        self == Self::Any || other == Self::Any || self == other
    }
}

/// Where a driver notifies one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NotifyAddress {
    /// The address space.
    pub bus: Bus,
    /// Guest-physical address, or the port.
    pub address: u64,
    /// Which writes there are notifications of this queue.
    pub matches: Match,
}

impl fmt::Display for NotifyAddress {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} {:#x}", self.bus, self.address)?;
        match self.matches {
            Match::Any => Ok(()),
            Match::U16(value) => write!(to, ", 2 bytes of value {value}"),
            Match::U32(value) => write!(to, ", 4 bytes of value {value}"),
        }
    }
}

impl NotifyAddress {
    /// Address of virtio-mmio: QueueNotify is at 0x50 of the device's registers, which begin at guest-physical address
    /// `base`. The driver writes four bytes, the queue's index (VirtIO 1.3, 4.2.2 and 4.2.3.3).
    ///
    /// # Errors
    /// [`AddressError::PastEnd`].
    pub fn mmio(base: u64, queue: u16) -> Result<Self, AddressError> {
        let address = base
            .checked_add(MMIO_QUEUE_NOTIFY)
            .filter(|address| address.checked_add(4).is_some())
            .ok_or(AddressError::PastEnd {
                bus: Bus::Mmio,
                base,
                offset_bytes: MMIO_QUEUE_NOTIFY,
            })?;
        Ok(Self {
            bus: Bus::Mmio,
            address,
            matches: Match::U32(queue.into()),
        })
    }

    /// Whether a write that arrived by an exit is a notification of this queue. KVM decides by the same rule whether it
    /// signals an eventfd (`ioeventfd_in_range` in virt/kvm/eventfd.c), so that both agree.
    #[must_use]
    pub fn is_hit(&self, bus: Bus, address: u64, data: &[u8]) -> bool {
        if (bus, address) != (self.bus, self.address) {
            return false;
        }
        match self.matches {
            Match::Any => true,
            Match::U16(value) => data == value.to_le_bytes(),
            Match::U32(value) => data == value.to_le_bytes(),
        }
    }

    /// Whether one write can notify both queues.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        (self.bus, self.address) == (other.bus, other.address) && self.matches.overlaps(other.matches)
    }
}

/// Notification capability of a virtio-pci device (`VIRTIO_PCI_CAP_NOTIFY_CFG`: VirtIO 1.3, 4.1.4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciNotify {
    /// The kind of the BAR.
    pub bus: Bus,
    /// Address of the BAR as the guest has set it, plus `cap.offset`.
    pub base: u64,
    /// `cap.length`, in bytes.
    pub length: u32,
    /// `notify_off_multiplier`, in bytes; with 0 all queues have one address.
    pub off_multiplier: u32,
}

impl PciNotify {
    /// Address of a queue: `base + queue_notify_off * off_multiplier`.
    ///
    /// With `datamatch` only a write of the queue's index, of two bytes, notifies it. Several queues at one address
    /// (multiplier 0, or the same `queue_notify_off`) need that. Without it any write does, of any length, which KVM
    /// handles without decoding the instruction where the hardware tells it the address.
    ///
    /// # Errors
    /// [`AddressError`], if that is not within the capability, or the capability is invalid.
    pub fn address(
        &self,
        queue: u16,
        queue_notify_off: u16,
        datamatch: bool,
    ) -> Result<NotifyAddress, AddressError> {
        let multiplier = self.off_multiplier;
        if multiplier != 0 && (multiplier == 1 || !multiplier.is_power_of_two()) {
            return Err(AddressError::Multiplier(multiplier));
        }
        if !self.base.is_multiple_of(PCI_NOTIFY_BYTES) {
            return Err(AddressError::Misaligned(self.base));
        }
        // Sixteen bits times 32: no overflow.
        let offset_bytes = u64::from(queue_notify_off) * u64::from(multiplier);
        if offset_bytes + PCI_NOTIFY_BYTES > u64::from(self.length) {
            return Err(AddressError::BeyondCapability {
                queue,
                offset_bytes,
                length: self.length,
            });
        }
        let last = match self.bus {
            Bus::Mmio => u64::MAX,
            Bus::Pio => PIO_PORTS - 1,
        };
        let address = self
            .base
            .checked_add(offset_bytes)
            .filter(|&address| address <= last - (PCI_NOTIFY_BYTES - 1))
            .ok_or(AddressError::PastEnd {
                bus: self.bus,
                base: self.base,
                offset_bytes,
            })?;
        let matches = if datamatch { Match::U16(queue) } else { Match::Any };
        Ok(NotifyAddress {
            bus: self.bus,
            address,
            matches,
        })
    }
}

/// An address that no queue can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Beyond the end of the address space.
    #[error(
        "{offset_bytes:#x} bytes after {base:#x} is past the end of {bus}: give the device a lower address"
    )]
    PastEnd {
        /// The address space.
        bus: Bus,
        /// Where the registers begin.
        base: u64,
        /// Offset of the queue's register.
        offset_bytes: u64,
    },
    /// Beyond the end of the capability (VirtIO 1.3, 4.1.4.4.1).
    #[error(
        "queue {queue} is notified {offset_bytes} bytes into a capability of {length}: it needs {} bytes",
        offset_bytes + PCI_NOTIFY_BYTES
    )]
    BeyondCapability {
        /// Index of the queue.
        queue: u16,
        /// `queue_notify_off * notify_off_multiplier`.
        offset_bytes: u64,
        /// `cap.length`, in bytes.
        length: u32,
    },
    /// `notify_off_multiplier` must be 0 or an even power of two (VirtIO 1.3, 4.1.4.4.1).
    #[error("notify_off_multiplier {0} is not 0 and not an even power of two: take 0, 2 or 4")]
    Multiplier(u32),
    /// `cap.offset` must be a multiple of two (VirtIO 1.3, 4.1.4.4.1).
    #[error("notifications begin at {0:#x}, an odd address: align the capability to two bytes")]
    Misaligned(u64),
}

#[cfg(test)]
#[path = "address_tests.rs"]
mod tests;
