//! The notifiers on real KVM: real exits, real ioeventfds, a guest of ours that notifies without pause. Without
//! /dev/kvm the tests say SKIPPED.
#![cfg(target_arch = "x86_64")]

use crate::support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use kvm_ioctls::{IoEventAddress, VmFd};
use notifier::address::{Bus, Match, NotifyAddress};
use notifier::bus::Ioeventfds;
use notifier::notifiers::{By, Notifiers, QueueSetup};
use notifier::state::{Event, State};
use rustix::io::Errno;
use support::device::{Device, Side};
use support::guest::{self, SharedWords};
use support::switching;
use testkit::{require, wait};
use vmm_sys_util::eventfd::EventFd;

type Queue = Arc<Device<SharedWords>>;

/// `NR_IOBUS_DEVS` in include/linux/kvm_host.h: devices of a bus, its ioeventfds not counted.
const BUS_DEVICES: u64 = 1000;

fn machine(bus: Bus, by: By) -> (Arc<VmFd>, Notifiers<Arc<VmFd>>, Queue) {
    let (vm, words) = guest::vm(bus);
    let (vm, device) = (Arc::new(vm), Device::new(words));
    let queue = QueueSetup {
        address: guest::address(bus),
        by,
        serve: Box::new(Side(Arc::clone(&device))),
    };
    let notifiers = Notifiers::new(Arc::clone(&vm), vec![queue], true).unwrap();
    (vm, notifiers, device)
}

/// Runs the guest during `act`; returns the number of notifications that came by exits.
fn while_the_guest_runs(
    vm: &VmFd,
    notifiers: &Notifiers<Arc<VmFd>>,
    device: &Queue,
    act: impl FnOnce(),
) -> u64 {
    thread::scope(|scope| {
        let guest = scope.spawn(|| guest::run(guest::vcpu(vm), notifiers));
        {
            let _stopped = Stop(device);
            act();
        }
        guest.join().unwrap()
    })
}

/// Ends the guest, even if an assertion fails.
struct Stop<'a>(&'a Queue);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.counters.stop();
    }
}

fn switched_a_thousand_times(bus: Bus, by: By, answered: bool) {
    let (vm, notifiers, device) = machine(bus, by);
    device.counters.set_answered(answered);
    switching::start(&notifiers, 1);
    let exits = while_the_guest_runs(&vm, &notifiers, &device, || {
        switching::switch(&notifiers, &device, 1_000);
    });
    device.sees_all();
    assert_eq!(device.met.load(Ordering::SeqCst), 0);
    let status = &notifiers.status()[0];
    println!(
        "{bus}, {by:?}, answered {answered}: {exits} exits, {} by the eventfd",
        status.from_eventfd
    );
    assert_eq!(status.from_exits, exits);
}

#[test]
fn no_mmio_notification_is_lost_in_a_thousand_transitions() {
    require!(Kvm);
    switched_a_thousand_times(Bus::Mmio, By::Eventfd, true);
}

#[test]
fn no_port_notification_is_lost_in_a_thousand_transitions() {
    require!(Kvm);
    switched_a_thousand_times(Bus::Pio, By::Eventfd, true);
}

#[test]
fn a_guest_without_pause_does_not_hold_transitions_up() {
    require!(Kvm);
    for by in [By::Eventfd, By::Exit] {
        switched_a_thousand_times(Bus::Mmio, by, false);
    }
}

/// Stops and continues while the guest notifies; no other owner takes notifications, so all of them are counted.
#[test]
fn each_notification_is_counted_once_however_it_came() {
    require!(Kvm);
    for bus in [Bus::Mmio, Bus::Pio] {
        let (vm, notifiers, device) = machine(bus, By::Eventfd);
        switching::start(&notifiers, 1);
        while_the_guest_runs(&vm, &notifiers, &device, || {
            for _ in 0..500 {
                notifiers.event(Event::VmStop).unwrap();
                notifiers.event(Event::VmRun).unwrap();
            }
        });
        device.sees_all();
        notifiers.event(Event::VmStop).unwrap();
        let status = &notifiers.status()[0];
        let kicked = u64::from(support::device::Counters::kicked(&device.counters));
        println!(
            "{bus}: {} by exits, {} by the eventfd",
            status.from_exits, status.from_eventfd
        );
        assert_eq!(status.from_exits + status.from_eventfd, kicked);
    }
}

#[test]
fn an_assigned_queue_is_notified_without_exits() {
    require!(Kvm);
    for bus in [Bus::Mmio, Bus::Pio] {
        let (vm, notifiers, device) = machine(bus, By::Eventfd);
        device.counters.set_answered(true);
        switching::start(&notifiers, 1);
        let exits = while_the_guest_runs(&vm, &notifiers, &device, || {
            assert!(wait::until(wait::SOON, || notifiers.status()[0].from_eventfd > 100));
        });
        assert_eq!(exits, 0);
    }
}

/// Devices of the kernel's own fill the bus: zones of coalesced MMIO. Then KVM takes no ioeventfd, either.
#[test]
fn a_full_bus_leaves_the_queue_to_exits_until_there_is_room() {
    require!(Kvm);
    let (vm, notifiers, device) = machine(Bus::Mmio, By::Eventfd);
    device.counters.set_answered(true);
    let zone = |place: u64| IoEventAddress::Mmio(0x10_0000 + 8 * place);
    let filled = (0..BUS_DEVICES + 100)
        .take_while(|&place| vm.register_coalesced_mmio(zone(place), 8).is_ok())
        .count() as u64;
    println!("{filled} devices fill the bus");

    switching::start(&notifiers, 1);
    let status = notifiers.status().remove(0);
    let error = status.unbound.expect("there is no room");
    assert_eq!(
        (status.state, Errno::from_io_error(&error.source)),
        (State::Deassigned, Some(Errno::NOSPC))
    );
    let exits = while_the_guest_runs(&vm, &notifiers, &device, || {
        assert!(wait::until(wait::SOON, || notifiers.status()[0].from_exits > 100));
        for place in 0..filled {
            vm.unregister_coalesced_mmio(zone(place), 8).unwrap();
        }
        notifiers.event(Event::VmRun).unwrap();
        assert_eq!(notifiers.state(0), Some(State::Assigned));
        assert!(wait::until(wait::SOON, || notifiers.status()[0].from_eventfd > 100));
    });
    assert!(exits > 100);
}

/// Ioeventfds themselves are not counted: there may be more than a bus has devices.
#[test]
fn more_ioeventfds_than_a_bus_has_devices_are_taken() {
    require!(Kvm);
    let (vm, _words) = guest::vm(Bus::Mmio);
    let event = EventFd::new(0).unwrap();
    for place in 0..2 * BUS_DEVICES {
        let at = NotifyAddress {
            bus: Bus::Mmio,
            address: 0x10_0000 + 8 * place,
            matches: Match::Any,
        };
        Ioeventfds::assign(&vm, &at, &event).unwrap();
    }
}
