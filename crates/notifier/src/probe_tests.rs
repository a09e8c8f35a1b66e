use std::collections::HashSet;
use std::sync::Mutex;

use super::*;

/// A bus with so much room.
struct Narrow {
    room: usize,
    full: Errno,
    bound: Mutex<HashSet<u64>>,
    most: Mutex<usize>,
}

impl Narrow {
    fn new(room: usize, full: Errno) -> Self {
        Self {
            room,
            full,
            bound: Mutex::default(),
            most: Mutex::default(),
        }
    }
}

impl Ioeventfds for Narrow {
    fn assign(&self, at: &NotifyAddress, _: &EventFd) -> io::Result<()> {
        let mut bound = self.bound.lock().unwrap();
        if bound.len() == self.room {
            return Err(self.full.into());
        }
        assert!(bound.insert(at.address));
        let mut most = self.most.lock().unwrap();
        *most = (*most).max(bound.len());
        Ok(())
    }

    fn deassign(&self, at: &NotifyAddress, _: &EventFd) -> io::Result<()> {
        assert!(self.bound.lock().unwrap().remove(&at.address));
        Ok(())
    }
}

#[test]
fn the_room_of_a_bus_is_found_and_left_as_it_was() {
    for (room, expected) in [
        (0, Room::Few(0)),
        (3, Room::Few(3)),
        (6, Room::Few(6)),
        (7, Room::Many),
        (900, Room::Many),
    ] {
        let bus = Narrow::new(room, Errno::NOSPC);
        assert_eq!(room_on(&bus, Bus::Mmio, 0x1000).unwrap(), expected);
        assert_eq!(*bus.most.lock().unwrap(), room.min(7));
        assert!(bus.bound.lock().unwrap().is_empty());
    }
}

#[test]
fn an_address_that_is_taken_is_an_error_and_no_lack_of_room() {
    let bus = Narrow::new(4, Errno::EXIST);
    let error = room_on(&bus, Bus::Pio, 0x1000).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::EXIST));
    assert!(bus.bound.lock().unwrap().is_empty());
}

#[test]
fn addresses_past_the_end_are_an_error_and_nothing_stays_assigned() {
    let bus = Narrow::new(900, Errno::NOSPC);
    assert!(room_on(&bus, Bus::Mmio, u64::MAX - 8).is_err());
    assert!(bus.bound.lock().unwrap().is_empty());
}

/// A bus that keeps the first address.
struct Sticky(Narrow);

impl Ioeventfds for Sticky {
    fn assign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()> {
        self.0.assign(at, event)
    }

    fn deassign(&self, at: &NotifyAddress, event: &EventFd) -> io::Result<()> {
        if at.address == 0x1000 {
            return Err(Errno::NOENT.into());
        }
        self.0.deassign(at, event)
    }
}

#[test]
fn one_address_that_is_not_given_back_keeps_no_other() {
    let bus = Sticky(Narrow::new(900, Errno::NOSPC));
    let error = room_on(&bus, Bus::Mmio, 0x1000).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::NOENT));
    assert_eq!(bus.0.bound.lock().unwrap().len(), 1);
}
