//! Takes a queue through its states while its guest notifies.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use notifier::bus::Ioeventfds;
use notifier::notifiers::{By, Notifiers};
use notifier::state::{Event, State};

use super::backend::Backend;
use super::device::{Counters, Device};

/// A VM that runs, with a driver that is ready.
pub(crate) fn start<B: Ioeventfds>(notifiers: &Notifiers<B>, queues: u16) {
    notifiers.event(Event::VmRun).unwrap();
    for queue in 0..queues {
        notifiers.queue_event(queue, Event::QueueEnable).unwrap();
    }
    notifiers.event(Event::DriverOk).unwrap();
}

/// Makes at least `transitions` transitions of queue 0, always in the same order. After about every other one it waits
/// until all notifications are seen. Checks that owners never look at once, never at closed rings, and miss nothing.
pub(crate) fn switch<B: Ioeventfds, C: Counters + 'static>(
    notifiers: &Notifiers<B>,
    device: &Arc<Device<C>>,
    transitions: u32,
) {
    let mut random = 1u32;
    let mut done = 0;
    while done < transitions {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let wait = random >> 31 == 0;
        done += match (random >> 16) % 5 {
            0 => pause(notifiers, Event::VmStop, Event::VmRun),
            1 => pause(notifiers, Event::BusMasterOff, Event::BusMasterOn),
            2 => queue_reset(notifiers, device),
            3 => backend(notifiers, device, wait),
            _ => reset_under_a_backend(notifiers, device),
        };
        let status = notifiers.status().remove(0);
        let by_us = if status.chosen == By::Eventfd {
            State::Assigned
        } else {
            State::Deassigned
        };
        assert_eq!(status.state, by_us, "{:?}", status.unbound);
        if wait {
            device.sees_all();
        }
    }
    assert_eq!(device.met.load(Ordering::SeqCst), 0, "two owners looked at once");
    assert_eq!(
        device.looks_at_closed.load(Ordering::SeqCst),
        0,
        "rings of a reset queue were touched"
    );
}

fn pause<B: Ioeventfds>(notifiers: &Notifiers<B>, off: Event, on: Event) -> u32 {
    notifiers.event(off).unwrap();
    assert_eq!(notifiers.state(0), Some(State::Deassigned));
    notifiers.event(on).unwrap();
    2
}

fn queue_reset<B: Ioeventfds, C: Counters>(notifiers: &Notifiers<B>, device: &Device<C>) -> u32 {
    notifiers.queue_event(0, Event::QueueReset).unwrap();
    device.closed.store(true, Ordering::SeqCst);
    assert_eq!(notifiers.state(0), Some(State::Deassigned));
    device.closed.store(false, Ordering::SeqCst);
    notifiers.queue_event(0, Event::QueueEnable).unwrap();
    2
}

fn backend<B: Ioeventfds, C: Counters + 'static>(
    notifiers: &Notifiers<B>,
    device: &Arc<Device<C>>,
    wait: bool,
) -> u32 {
    let kick = notifiers.eventfd(0).unwrap();
    notifiers.queue_event(0, Event::BackendStart).unwrap();
    let backend = Backend::start(device, kick);
    assert_eq!(notifiers.state(0), Some(State::OffLimits));
    if wait {
        device.sees_all();
    }
    backend.stop();
    notifiers.queue_event(0, Event::BackendStop).unwrap();
    2
}

fn reset_under_a_backend<B: Ioeventfds, C: Counters + 'static>(
    notifiers: &Notifiers<B>,
    device: &Arc<Device<C>>,
) -> u32 {
    let kick = notifiers.eventfd(0).unwrap();
    notifiers.queue_event(0, Event::BackendStart).unwrap();
    let backend = Backend::start(device, kick);
    let report = notifiers.event(Event::Reset).unwrap();
    assert_eq!(report.stop_backends, [0]);
    backend.stop();
    device.closed.store(true, Ordering::SeqCst);
    notifiers.queue_event(0, Event::BackendStop).unwrap();
    assert_eq!(notifiers.state(0), Some(State::Deassigned));
    device.closed.store(false, Ordering::SeqCst);
    // The device's reset has disabled all of its queues.
    for status in notifiers.status() {
        notifiers.queue_event(status.queue, Event::QueueEnable).unwrap();
    }
    notifiers.event(Event::DriverOk).unwrap();
    5
}
