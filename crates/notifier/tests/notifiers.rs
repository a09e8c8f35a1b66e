//! The notifiers on a bus of the tests' own: each transition, its owner and its looks; a full bus; a guest that
//! notifies without pause.

use crate::support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use notifier::address::{Bus, Match, NotifyAddress};
use notifier::notifiers::{By, NotifierError, Notifiers, QueueSetup, Saved, SavedQueue};
use notifier::state::{Event, Refusal, State};
use support::board::Board;
use support::device::{Counters, Device, Side, ThreadCounters};
use support::switching;
use testkit::wait;

type Queue = Arc<Device<ThreadCounters>>;

const BASE: u64 = 0xd000_0000;

fn device_of(board: &Arc<Board>, by: &[By]) -> (Notifiers<Arc<Board>>, Vec<Queue>) {
    let devices: Vec<_> = by
        .iter()
        .map(|_| Device::new(ThreadCounters::default()))
        .collect();
    let setups = by
        .iter()
        .zip(&devices)
        .zip(0..)
        .map(|((&by, device), queue)| QueueSetup {
            address: NotifyAddress::mmio(BASE, queue).unwrap(),
            by,
            serve: Box::new(Side(Arc::clone(device))),
        });
    let notifiers = Notifiers::new(Arc::clone(board), setups.collect(), true).unwrap();
    (notifiers, devices)
}

/// The guest counts, then writes.
fn kick(board: &Board, notifiers: &Notifiers<Arc<Board>>, device: &Queue, queue: u32) {
    device.counters.kicked.fetch_add(1, Ordering::SeqCst);
    if !board.write(BASE + 0x50, &queue.to_le_bytes()) {
        let hit = notifiers.exit(Bus::Mmio, BASE + 0x50, &queue.to_le_bytes());
        assert_eq!(hit.map(u32::from), Some(queue));
    }
}

fn looked_at_by(device: &Queue, act: impl FnOnce()) -> u64 {
    let before = device.looks();
    act();
    device.looks() - before
}

#[test]
fn a_queue_is_assigned_when_all_is_ready_and_looked_at_once() {
    let board = Arc::new(Board::new(9));
    let (notifiers, devices) = device_of(&board, &[By::Eventfd]);
    notifiers.event(Event::VmRun).unwrap();
    notifiers.queue_event(0, Event::QueueEnable).unwrap();
    assert_eq!(
        (notifiers.state(0), board.bound(), devices[0].looks()),
        (Some(State::Deassigned), 0, 0)
    );
    notifiers.event(Event::DriverOk).unwrap();
    assert_eq!((notifiers.state(0), board.bound()), (Some(State::Assigned), 1));
    assert!(wait::until(wait::SOON, || devices[0].looks() == 1));
    kick(&board, &notifiers, &devices[0], 0);
    devices[0].sees_all();
    let status = &notifiers.status()[0];
    assert_eq!(
        (status.from_exits, status.from_eventfd, status.by),
        (0, 1, By::Eventfd)
    );
}

#[test]
fn a_queue_by_exits_is_looked_at_in_the_thread_that_exits() {
    let board = Arc::new(Board::new(9));
    let (notifiers, devices) = device_of(&board, &[By::Exit]);
    kick(&board, &notifiers, &devices[0], 0);
    assert_eq!(devices[0].looks(), 0, "it is not ready");
    notifiers.event(Event::VmRun).unwrap();
    notifiers.queue_event(0, Event::QueueEnable).unwrap();
    assert_eq!(
        looked_at_by(&devices[0], || drop(notifiers.event(Event::DriverOk))),
        1
    );
    assert_eq!(
        devices[0].counters.seen(),
        1,
        "what was notified before counts, too"
    );
    assert_eq!(
        looked_at_by(&devices[0], || kick(&board, &notifiers, &devices[0], 0)),
        1
    );
    assert_eq!((board.bound(), notifiers.status()[0].from_exits), (0, 2));
    assert!(notifiers.status()[0].unbound.is_none());
}

#[test]
fn the_stop_of_the_vm_looks_once_more_and_nothing_does_until_it_runs() {
    let board = Arc::new(Board::new(9));
    let (notifiers, devices) = device_of(&board, &[By::Eventfd]);
    switching::start(&notifiers, 1);
    assert!(wait::until(wait::SOON, || devices[0].looks() == 1));
    assert_eq!(
        looked_at_by(&devices[0], || drop(notifiers.event(Event::VmStop))),
        1
    );
    assert_eq!((notifiers.state(0), board.bound()), (Some(State::Deassigned), 0));
    let quiet = looked_at_by(&devices[0], || {
        kick(&board, &notifiers, &devices[0], 0);
        for event in [
            Event::VmStop,
            Event::BusMasterOff,
            Event::BusMasterOn,
            Event::DriverOk,
        ] {
            notifiers.event(event).unwrap();
        }
    });
    assert_eq!(quiet, 0);
    notifiers.event(Event::VmRun).unwrap();
    devices[0].sees_all();
}

#[test]
fn rings_of_a_reset_queue_are_not_looked_at() {
    let board = Arc::new(Board::new(9));
    let (notifiers, devices) = device_of(&board, &[By::Eventfd]);
    switching::start(&notifiers, 1);
    assert!(wait::until(wait::SOON, || devices[0].looks() == 1));
    let looks = looked_at_by(&devices[0], || {
        notifiers.queue_event(0, Event::QueueReset).unwrap();
        kick(&board, &notifiers, &devices[0], 0);
        notifiers.event(Event::BusMasterOff).unwrap();
        notifiers.event(Event::Reset).unwrap();
        kick(&board, &notifiers, &devices[0], 0);
    });
    assert_eq!((looks, board.bound()), (0, 0));
}

#[test]
fn a_backend_has_the_queue_alone_until_it_gives_it_back() {
    let board = Arc::new(Board::new(9));
    let (notifiers, devices) = device_of(&board, &[By::Eventfd]);
    switching::start(&notifiers, 1);
    assert!(wait::until(wait::SOON, || devices[0].looks() == 1));
    let event = notifiers.eventfd(0).unwrap();
    notifiers.queue_event(0, Event::BackendStart).unwrap();
    assert_eq!(event.read().unwrap(), 1, "it looks once at first");
    kick(&board, &notifiers, &devices[0], 0);
    kick(&board, &notifiers, &devices[0], 0);
    // An exit that was under way when the ioeventfd was bound.
    assert_eq!(notifiers.exit(Bus::Mmio, BASE + 0x50, &[0; 4]), Some(0));
    assert_eq!(event.read().unwrap(), 3);
    assert_eq!((board.bound(), devices[0].looks()), (1, 1));
    notifiers.queue_event(0, Event::BackendStop).unwrap();
    devices[0].sees_all();
    assert_eq!((notifiers.state(0), board.bound()), (Some(State::Assigned), 1));
}

#[test]
fn the_eventfd_that_a_backend_keeps_is_nothing_any_more() {
    let board = Arc::new(Board::new(9));
    let (notifiers, devices) = device_of(&board, &[By::Eventfd]);
    switching::start(&notifiers, 1);
    let kept = notifiers.eventfd(0).unwrap();
    notifiers.queue_event(0, Event::BackendStart).unwrap();
    notifiers.event(Event::VmStop).unwrap();
    notifiers.queue_event(0, Event::BackendStop).unwrap();
    assert!(
        kept.read().unwrap() > 0,
        "what the backend has not taken stays there"
    );
    // Nobody reads the queue's own one while the VM stands.
    kept.write(5).unwrap();
    assert!(notifiers.eventfd(0).unwrap().read().is_err());
    notifiers.event(Event::VmRun).unwrap();
    kick(&board, &notifiers, &devices[0], 0);
    devices[0].sees_all();
    assert!(wait::until(wait::SOON, || notifiers.status()[0].from_eventfd == 1));
    assert_eq!(kept.read().unwrap(), 5);
}

#[test]
fn a_backend_is_told_of_when_its_queue_ends() {
    let board = Arc::new(Board::new(9));
    let (notifiers, devices) = device_of(&board, &[By::Eventfd, By::Eventfd]);
    switching::start(&notifiers, 2);
    notifiers.queue_event(1, Event::BackendStart).unwrap();
    for event in [Event::VmStop, Event::VmRun, Event::Reset] {
        assert_eq!(notifiers.event(event).unwrap().stop_backends, [1], "{event:?}");
        assert_eq!(notifiers.state(1), Some(State::OffLimits));
    }
    notifiers.queue_event(1, Event::BackendStop).unwrap();
    assert_eq!((notifiers.state(1), board.bound()), (Some(State::Deassigned), 0));
    assert_eq!(devices[1].met.load(Ordering::SeqCst), 0);
}

#[test]
fn what_the_vmm_may_not_do_is_refused_and_changes_nothing() {
    let board = Arc::new(Board::new(9));
    let (notifiers, _devices) = device_of(&board, &[By::Eventfd]);
    let refused = |result: Result<(), NotifierError>| match result {
        Err(NotifierError::Refused {
            queue: 0, refusal, ..
        }) => refusal,
        other => panic!("{other:?}"),
    };
    let event = |event| notifiers.queue_event(0, event).map(drop);
    assert!(matches!(
        refused(event(Event::BackendStart)),
        Refusal::NotReady { running: false, .. }
    ));
    assert_eq!(refused(event(Event::BackendStop)), Refusal::NoBackend);
    switching::start(&notifiers, 1);
    assert_eq!(refused(notifiers.save().map(drop)), Refusal::Running);
    event(Event::BackendStart).unwrap();
    assert_eq!(refused(event(Event::BackendStart)), Refusal::BackendOwns);
    notifiers.event(Event::VmStop).unwrap();
    assert_eq!(refused(notifiers.save().map(drop)), Refusal::BackendOwns);
    let none = Saved { queues: vec![] };
    assert!(matches!(
        notifiers.restore(&none),
        Err(NotifierError::SavedQueues { saved: 0, queues: 1 })
    ));
    let of_pci = SavedQueue {
        driver_ok: true,
        bus_master: false,
        enabled: true,
    };
    assert!(matches!(
        notifiers.restore(&Saved { queues: vec![of_pci] }),
        Err(NotifierError::SavedBusMaster)
    ));
    assert_eq!((notifiers.state(0), board.bound()), (Some(State::OffLimits), 1));
    assert!(matches!(
        notifiers.queue_event(1, Event::QueueEnable),
        Err(NotifierError::NoQueue { queue: 1, queues: 1 })
    ));
    assert_eq!(notifiers.state(1), None);
}

#[test]
fn a_restored_device_looks_when_its_vm_runs() {
    let board = Arc::new(Board::new(9));
    let (source, _devices) = device_of(&board, &[By::Eventfd, By::Exit]);
    switching::start(&source, 2);
    source.queue_event(1, Event::QueueReset).unwrap();
    source.event(Event::VmStop).unwrap();
    let saved = source.save().unwrap();
    drop(source);
    let queue = |enabled| SavedQueue {
        driver_ok: true,
        bus_master: true,
        enabled,
    };
    assert_eq!(
        saved,
        Saved {
            queues: vec![queue(true), queue(false)]
        }
    );

    let (target, devices) = device_of(&board, &[By::Eventfd, By::Exit]);
    devices[0].counters.kicked.store(5, Ordering::SeqCst);
    target.restore(&saved).unwrap();
    assert_eq!(
        (target.state(0), devices[0].looks(), board.bound()),
        (Some(State::Deassigned), 0, 0)
    );
    target.event(Event::VmRun).unwrap();
    devices[0].sees_all();
    assert_eq!((target.state(0), devices[1].looks()), (Some(State::Assigned), 0));
}

#[test]
fn queues_without_room_on_the_bus_are_notified_by_exits_and_that_is_said_once() {
    let board = Arc::new(Board::new(2));
    let (notifiers, devices) = device_of(&board, &[By::Eventfd; 4]);
    notifiers.event(Event::VmRun).unwrap();
    for queue in 0..4 {
        notifiers.queue_event(queue, Event::QueueEnable).unwrap();
    }
    let report = notifiers.event(Event::DriverOk).unwrap();
    let unbound: Vec<_> = report.unbound.iter().map(|error| error.queue).collect();
    assert_eq!(unbound, [2, 3]);
    assert!(
        report.unbound[0]
            .to_string()
            .contains("queue 2 is notified by exits")
    );
    assert!(notifiers.event(Event::DriverOk).unwrap().unbound.is_empty());
    let by: Vec<_> = notifiers.status().iter().map(|status| status.by).collect();
    assert_eq!(by, [By::Eventfd, By::Eventfd, By::Exit, By::Exit]);
    for (device, queue) in devices.iter().zip(0..) {
        kick(&board, &notifiers, device, queue);
        device.sees_all();
    }
    assert_eq!(notifiers.status()[3].from_exits, 1);
    // Its backend gets notifications by exits, too.
    let event = notifiers.eventfd(3).unwrap();
    notifiers.queue_event(3, Event::BackendStart).unwrap();
    kick(&board, &notifiers, &devices[3], 3);
    assert_eq!(event.read().unwrap(), 2);
    notifiers.queue_event(3, Event::BackendStop).unwrap();
    // There is room again.
    board.set_room(4);
    notifiers.event(Event::VmRun).unwrap();
    assert!(
        notifiers
            .status()
            .iter()
            .all(|status| status.by == By::Eventfd && status.unbound.is_none())
    );
}

#[test]
fn two_queues_that_one_write_notifies_are_refused() {
    let setup = |matches| QueueSetup {
        address: NotifyAddress {
            bus: Bus::Pio,
            address: 0x500,
            matches,
        },
        by: By::Eventfd,
        serve: Box::new(Side(Device::new(ThreadCounters::default()))),
    };
    let queues = vec![setup(Match::U16(0)), setup(Match::U16(1)), setup(Match::Any)];
    let error = Notifiers::new(Board::new(9), queues, true).err();
    assert!(matches!(
        error,
        Some(NotifierError::OneAddress {
            first: 0,
            second: 2,
            ..
        })
    ));
}

#[test]
fn nothing_stays_bound_when_the_device_goes() {
    let board = Arc::new(Board::new(9));
    let (notifiers, _devices) = device_of(&board, &[By::Eventfd; 3]);
    switching::start(&notifiers, 3);
    notifiers.queue_event(1, Event::BackendStart).unwrap();
    assert_eq!(board.bound(), 3);
    drop(notifiers);
    assert_eq!(board.bound(), 0);
}

#[test]
fn writes_that_are_no_notifications_are_nobodys() {
    let board = Arc::new(Board::new(9));
    let (notifiers, devices) = device_of(&board, &[By::Exit]);
    switching::start(&notifiers, 1);
    let looks = looked_at_by(&devices[0], || {
        for data in [&[][..], &[0], &[0; 2], &[0; 8], &[1, 0, 0, 0], &[0xff; 4]] {
            assert_eq!(notifiers.exit(Bus::Mmio, BASE + 0x50, data), None);
        }
        assert_eq!(notifiers.exit(Bus::Mmio, BASE + 0x54, &[0; 4]), None);
        assert_eq!(notifiers.exit(Bus::Pio, BASE + 0x50, &[0; 4]), None);
    });
    assert_eq!(looks, 0);
}

/// A guest with two queues: queue 0 goes through its transitions while queue 1 is served. `answered`: the guest waits
/// until a notification is seen before it notifies again, so that a single lost one fails the test.
fn guest_notifies_while_queue_0_is_switched(by: By, answered: bool) {
    let board = Arc::new(Board::new(9));
    let (notifiers, devices) = device_of(&board, &[by, By::Eventfd]);
    switching::start(&notifiers, 2);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                for (device, queue) in devices.iter().zip(0..) {
                    kick(&board, &notifiers, device, queue);
                }
                let unseen = || {
                    devices
                        .iter()
                        .any(|device| device.counters.seen() != device.counters.kicked())
                };
                while answered && unseen() && !stop.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
            }
        });
        let _stopped = Stop(&stop);
        switching::switch(&notifiers, &devices[0], 1_000);
    });
    for device in &devices {
        device.sees_all();
        assert_eq!(device.met.load(Ordering::SeqCst), 0);
    }
    assert!(devices[1].looks() > 1);
}

/// Ends the guest, even if an assertion fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn no_notification_is_lost_in_a_thousand_transitions() {
    guest_notifies_while_queue_0_is_switched(By::Eventfd, true);
}

#[test]
fn no_notification_by_an_exit_is_lost_in_a_thousand_transitions() {
    guest_notifies_while_queue_0_is_switched(By::Exit, true);
}

#[test]
fn a_guest_without_pause_does_not_hold_a_thousand_transitions_up() {
    guest_notifies_while_queue_0_is_switched(By::Eventfd, false);
}

#[test]
fn vcpus_that_exit_without_pause_do_not_hold_a_thousand_transitions_up() {
    guest_notifies_while_queue_0_is_switched(By::Exit, false);
}
