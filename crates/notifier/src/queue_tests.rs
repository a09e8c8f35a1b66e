use super::*;

struct Nothing;

impl Serve for Nothing {
    fn look(&mut self) -> Left {
        Left::Nothing
    }
}

/// A bus with room for all.
struct Roomy;

impl Ioeventfds for Roomy {
    fn assign(&self, _: &NotifyAddress, _: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn deassign(&self, _: &NotifyAddress, _: &EventFd) -> io::Result<()> {
        Ok(())
    }
}

/// The guest may repeat its events without end: each would be another line in the VMM's log.
#[test]
fn an_eventfd_that_is_bound_but_cannot_be_watched_is_told_of_once() {
    let mut queue = Queue::new(By::Eventfd, true, Box::new(Nothing)).unwrap();
    let (epoll, address) = (Epoll::new().unwrap(), NotifyAddress::mmio(0, 0).unwrap());
    let wiring = Wiring {
        bus: &Roomy,
        epoll: &epoll,
        address: &address,
        index: 0,
    };
    // EEXIST, until it goes.
    queue.watch(&wiring).unwrap();
    let mut told = |event| queue.apply(event, &wiring).unwrap().unbound.is_some();
    let events = [Event::VmRun, Event::QueueEnable, Event::DriverOk, Event::DriverOk];
    assert_eq!(events.map(&mut told), [false, false, true, false]);
    queue.unwatch(&wiring);
    queue.apply(Event::DriverOk, &wiring).unwrap();
    assert_eq!((queue.state, queue.unbound.is_none()), (State::Assigned, true));
}
