//! How many ioeventfds a bus takes.
//!
//! A bus of old kernels had room for six devices, the kernel's own and ioeventfds together, and `KVM_CAP_IOEVENTFD` did
//! not say so. A kernel that accepts seven does not have that limit. Today ioeventfds are not counted against the
//! limit of a bus (`NR_IOBUS_DEVS`, 1,000), but none is taken while devices of the kernel's own fill it
//! (`kvm_io_bus_register_dev` in virt/kvm/kvm_main.c).

use std::io;

use kvm_ioctls::{Cap, VmFd};
use rustix::io::Errno;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::address::{Bus, Match, NotifyAddress};
use crate::bus::Ioeventfds;

/// One more than the old limit.
const ENOUGH: usize = 7;
/// Distance between the addresses that are tried.
const STEP_BYTES: u64 = 8;

/// How many ioeventfds a bus takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// This KVM has no ioeventfds: all queues are notified by exits.
    None,
    /// So many more, zero to six: a VMM gives them to the queues that are notified most, transmit queues first, and
    /// chooses exits for the others.
    Few(usize),
    /// Seven at least: no limit that matters.
    Many,
}

/// Asks KVM for `KVM_CAP_IOEVENTFD`, then assigns and deassigns up to seven ioeventfds at `unused` and every 8 bytes
/// from there: addresses that no device uses.
///
/// # Errors
/// Errors of KVM except `ENOSPC`, and of eventfds; nothing stays assigned.
pub fn room(vm: &VmFd, bus: Bus, unused: u64) -> io::Result<Room> {
    if !vm.check_extension(Cap::Ioeventfd) {
        return Ok(Room::None);
    }
    room_on(vm, bus, unused)
}

/// [`room`] on a bus that has ioeventfds.
///
/// # Errors
/// As [`room`].
pub fn room_on<B: Ioeventfds>(ioeventfds: &B, bus: Bus, unused: u64) -> io::Result<Room> {
    let event = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
    let mut taken = Vec::new();
    let mut found = Ok(Room::Many);
    for place in 0..ENOUGH {
        let Some(address) = unused.checked_add(STEP_BYTES * place as u64) else {
            found = Err(Errno::RANGE.into());
            break;
        };
        // Two bytes: kernels before Linux 4.4 accept that, too.
        let at = NotifyAddress {
            bus,
            address,
            matches: Match::U16(0),
        };
        match ioeventfds.assign(&at, &event) {
            Ok(()) => taken.push(at),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NOSPC) => {
                found = Ok(Room::Few(place));
                break;
            }
            Err(error) => {
                found = Err(error);
                break;
            }
        }
    }
    for at in &taken {
        // Deassigns all, even if one fails.
        let gone = ioeventfds.deassign(at, &event);
        found = found.and_then(|room| gone.map(|()| room));
    }
    found
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
