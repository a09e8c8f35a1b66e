//! A bus without KVM, and a guest that is a thread.

use std::io;
use std::sync::RwLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use notifier::address::NotifyAddress;
use notifier::bus::Ioeventfds;
use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

/// Which eventfd a write signals; a bound one is signalled under the lock, so that `deassign` waits for it as KVM's
/// does.
pub(crate) struct Board {
    bound: RwLock<Vec<(NotifyAddress, EventFd)>>,
    room: AtomicUsize,
}

impl Board {
    /// With room for so many ioeventfds.
    pub(crate) fn new(room: usize) -> Self {
        Self {
            bound: RwLock::default(),
            room: AtomicUsize::new(room),
        }
    }

    pub(crate) fn set_room(&self, room: usize) {
        self.room.store(room, Ordering::SeqCst);
    }

    pub(crate) fn bound(&self) -> usize {
        self.bound.read().unwrap().len()
    }

    /// A write of the guest; whether an eventfd took it. Otherwise the vCPU exits.
    pub(crate) fn write(&self, address: u64, data: &[u8]) -> bool {
        let bound = self.bound.read().unwrap();
        let hit = bound.iter().find(|(at, _)| at.is_hit(at.bus, address, data));
        if let Some((_, event)) = hit {
            event.write(1).unwrap();
        }
        hit.is_some()
    }
}

impl Ioeventfds for Board {
    fn assign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()> {
        let mut bound = self.bound.write().unwrap();
        if bound.len() >= self.room.load(Ordering::SeqCst) {
            return Err(Errno::NOSPC.into());
        }
        assert!(bound.iter().all(|(other, _)| other != at), "{at} is bound twice");
        bound.push((*at, event.try_clone()?));
        Ok(())
    }

    fn deassign(&self, at: &NotifyAddress, _: &EventFd) -> io::Result<()> {
        let mut bound = self.bound.write().unwrap();
        let place = bound.iter().position(|(other, _)| other == at);
        bound.remove(place.ok_or(Errno::NOENT)?);
        Ok(())
    }
}
