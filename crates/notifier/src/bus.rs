//! Binds eventfds to the guest's addresses.

use std::io;
use std::sync::Arc;

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;

use crate::address::{Bus, Match, NotifyAddress};

/// Binds eventfds to addresses: KVM does, a test's own bus may.
pub trait Ioeventfds: Send + Sync {
    /// From now on a write of the guest at `at` signals `event`, and the vCPU continues. A write that is under way may
    /// still cause an exit.
    ///
    /// # Errors
    /// Such as `ENOSPC` of a bus without room, `EEXIST` for an address that is taken.
    fn assign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()>;

    /// Undoes [`assign`](Ioeventfds::assign). Once it returns nothing signals `event` any more.
    ///
    /// # Errors
    /// `ENOENT`, if it is not assigned.
    fn deassign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()>;
}

/// `KVM_IOEVENTFD`. [`Match::Any`] needs `KVM_CAP_IOEVENTFD_ANY_LENGTH` (Linux 4.4).
///
/// `assign` publishes the new list of devices, and readers of the old one may still exit; `deassign` waits for them
/// (`kvm_io_bus_register_dev` and `kvm_io_bus_unregister_dev` in virt/kvm/kvm_main.c).
impl Ioeventfds for VmFd {
    fn assign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()> {
        let address = io_event_address(at);
        match at.matches {
            Match::Any => self.register_ioevent(event, &address, NoDatamatch),
            Match::U16(value) => self.register_ioevent(event, &address, value),
            Match::U32(value) => self.register_ioevent(event, &address, value),
        }
        .map_err(io::Error::from)
    }

    fn deassign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()> {
        let address = io_event_address(at);
        match at.matches {
            Match::Any => self.unregister_ioevent(event, &address, NoDatamatch),
            Match::U16(value) => self.unregister_ioevent(event, &address, value),
            Match::U32(value) => self.unregister_ioevent(event, &address, value),
        }
        .map_err(io::Error::from)
    }
}

impl<T: Ioeventfds> Ioeventfds for Arc<T> {
    fn assign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()> {
        T::assign(self, at, event)
    }

    fn deassign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()> {
        T::deassign(self, at, event)
    }
}

fn io_event_address(at: &NotifyAddress) -> IoEventAddress {
    match at.bus {
        Bus::Mmio => IoEventAddress::Mmio(at.address),
        Bus::Pio => IoEventAddress::Pio(at.address),
    }
}
