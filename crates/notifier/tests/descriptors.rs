//! A process at its limit of descriptors. The test runs alone in its process, because it sets that limit.

use crate::support;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use notifier::address::{Bus, NotifyAddress};
use notifier::notifiers::{By, NotifierError, Notifiers, QueueSetup};
use notifier::state::{Event, State};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::board::Board;
use support::device::{Counters, Device, Side, ThreadCounters};
use support::switching;

/// The backend returns the queue but keeps the eventfd, and no new one can be created.
#[test]
fn without_another_descriptor_the_eventfd_of_the_last_backend_is_not_used_again() {
    let board = Arc::new(Board::new(9));
    let device = Device::new(ThreadCounters::default());
    let setup = QueueSetup {
        address: NotifyAddress::mmio(0, 0).unwrap(),
        by: By::Eventfd,
        serve: Box::new(Side(Arc::clone(&device))),
    };
    let notifiers = Notifiers::new(Arc::clone(&board), vec![setup], true).unwrap();
    switching::start(&notifiers, 1);
    let kept = notifiers.eventfd(0).unwrap();
    notifiers.queue_event(0, Event::BackendStart).unwrap();

    let limit = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        ..limit
    };
    setrlimit(Resource::Nofile, none).unwrap();
    let report = notifiers.queue_event(0, Event::BackendStop);
    let kick = notifiers.eventfd(0);
    let again = notifiers.event(Event::DriverOk);
    let state = notifiers.state(0);
    device.counters.kicked.fetch_add(1, Ordering::SeqCst);
    let hit = notifiers.exit(Bus::Mmio, 0x50, &[0; 4]);
    setrlimit(Resource::Nofile, limit).unwrap();

    assert_eq!(report.unwrap().unbound.len(), 1, "it is said");
    assert!(matches!(kick, Err(NotifierError::Resources { .. })));
    assert!(again.unwrap().unbound.is_empty(), "once");
    assert_eq!((state, hit), (Some(State::Deassigned), Some(0)));
    assert_eq!(device.counters.seen(), 1);

    notifiers.event(Event::DriverOk).unwrap();
    assert_eq!(notifiers.state(0), Some(State::Assigned));
    kept.read().unwrap_or(0);
    device.counters.kicked.fetch_add(1, Ordering::SeqCst);
    assert!(board.write(0x50, &[0; 4]));
    assert!(kept.read().is_err(), "the backend of before is notified");
    device.sees_all();
}
