//! The device as its VMM sets it up: rejected requests, and the state after a reset.

use std::os::fd::AsFd;

use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, QueueDriver};
use virtqueue::{Chains, FileRange, GuestAddr, InflightShape, RingFormat, RingShape, TrustedFiles};

use super::*;
use crate::features::F_VERSION_1;

fn device() -> NetDevice {
    NetDevice::new(2, Offloads::NONE)
}

#[test]
fn feature_that_was_not_offered_is_refused_and_nothing_changes() {
    let mut device = device();
    device.acknowledge(F_VERSION_1).expect("offered");
    let csum = Offloads::named("csum").expect("one").features();
    let refused = device.acknowledge(F_VERSION_1 | csum);
    assert!(matches!(refused, Err(DeviceError::Features(bits)) if bits == csum));
    assert_eq!(device.features(), F_VERSION_1);
}

#[test]
fn inflight_region_is_for_the_vrings_that_it_has_a_part_for() {
    let mut device = device();
    assert!(!device.has_inflight(0), "there is none");
    let shape = InflightShape {
        queues: 2,
        entries: 16,
        packed: false,
    };
    let made = InflightRegion::create(shape).expect("memory is left");
    let range = FileRange {
        offset: 0,
        bytes: made.bytes,
    };
    let region = InflightRegion::open(made.file.as_fd(), range, shape, &TrustedFiles);
    device.set_inflight(Arc::new(region.expect("it fits")));
    let has = [0, 1, 2, 3].map(|index| device.has_inflight(index));
    assert_eq!(has, [true, true, false, false]);
}

#[test]
fn vring_that_does_not_exist_is_refused_by_every_message() {
    let mut device = device();
    let addresses = RingAddresses {
        desc: 0,
        avail: 0,
        used: 0,
    };
    for index in [4, u32::MAX] {
        let refused = [
            device.set_size(index, 256),
            device.set_addresses(index, addresses),
            device.set_base(index, 0),
            device.start(index, None),
            device.stop(index).map(drop),
            device.set_call(index, None),
            device.set_err(index, None),
            device.set_enabled(index, true),
        ];
        for result in refused {
            assert!(matches!(result, Err(VringError::Unknown { count: 4, .. })));
        }
    }
}

#[test]
fn pair_is_started_with_its_second_vring_and_has_no_data_path_without_memory() {
    let mut device = device();
    device.start(2, None).expect("there");
    assert!(!device.is_started(1));
    device.start(3, None).expect("there");
    assert!(device.is_started(1) && !device.is_started(0) && !device.is_started(usize::MAX / 4));
    let path = Path {
        frame_limit: 1514,
        partial_checksums: false,
        in_place: false,
    };
    assert!(matches!(device.queue_pair(1, path), Err(PairError::NoMemory)));
    device.stop(2).expect("there");
    assert!(!device.is_started(1));
}

#[test]
fn queue_pair_of_a_pair_that_was_not_started_has_no_rings_and_is_off() {
    let (mut device, _ram, _drivers) = resettable(false);
    let path = Path {
        frame_limit: 1514,
        partial_checksums: false,
        in_place: false,
    };
    let is_idle = |device: &NetDevice| {
        let mut pair = device.queue_pair(1, path).expect("without rings");
        let mut chains = Chains::default();
        assert_eq!(
            pair.to_guest.pop_buffers(&mut chains, 1).expect("nothing wrong"),
            0
        );
        !pair.to_guest.enabled && !pair.from_guest.enabled && pair.kicks().next().is_none()
    };
    assert!(is_idle(&device), "never set up");
    // Half of it, enabled and with a ring that lies nowhere.
    device.set_enabled(2, true).expect("there");
    device.start(2, None).expect("there");
    assert!(is_idle(&device), "its partner is waited for");
}

/// A device whose driver may reset single vrings, both vrings of its first pair started, in memory of its own.
fn resettable(packed: bool) -> (NetDevice, Arc<GuestRam>, [QueueDriver; 2]) {
    let ram = Arc::new(GuestRam::new(&[(GuestAddr(0), 1 << 20)]).expect("memory"));
    let mut device = device().offering(OnRequest::all());
    let memory = MemoryMap::new(ram.regions().expect("regions"), 0, &TrustedFiles).expect("a map");
    device.set_memory(Some(Arc::new(memory)));
    let ring = if packed { F_RING_PACKED } else { 0 };
    let features = F_VERSION_1 | F_RING_RESET | ring;
    device.acknowledge(features).expect("offered");
    let drivers = [0, 1].map(|index| start_afresh(&mut device, &ram, index));
    (device, ram, drivers)
}

/// Starts a vring with a fresh ring, as after a reset.
fn start_afresh(device: &mut NetDevice, ram: &Arc<GuestRam>, index: u32) -> QueueDriver {
    let shape = RingShape::new(
        RingFormat::of(device.has_packed_rings()),
        QueueSize::new(16).expect("a size"),
    );
    let driver = QueueDriver::new(ram, shape, DriverFeatures::default()).expect("room");
    device.set_size(index, 16).expect("a size");
    device
        .set_addresses(index, driver.ring_user_addresses())
        .expect("there");
    device.set_base(index, driver.base()).expect("a base");
    device.start(index, None).expect("there");
    device.set_enabled(index, true).expect("there");
    driver
}

const PATH: Path = Path {
    frame_limit: 1514,
    partial_checksums: false,
    in_place: true,
};

/// Takes a chain, as a lane would; returns how many there were.
fn pop(vring: &mut Vring) -> usize {
    let mut chains = Chains::default();
    let taken = vring.queue.pop(&mut chains, 4).expect("a sound ring");
    chains.iter().for_each(|chain| vring.queue.push_used(chain.id, 0));
    let _ = vring.queue.publish();
    taken
}

#[test]
fn vring_that_is_reset_leaves_its_partner_going_and_comes_back_at_base_0() {
    for packed in [false, true] {
        for reset in [0, 1] {
            let (mut device, ram, mut drivers) = resettable(packed);
            let buffer = ram.alloc(64, 64).expect("room");
            let mut show = |driver: &mut QueueDriver| {
                driver.add(&[Buffer::readable(buffer, 64)]).expect("room");
                driver.publish();
            };
            drivers.iter_mut().for_each(&mut show);
            let mut pair = device.queue_pair(0, PATH).expect("two rings");
            assert_eq!([pop(&mut pair.to_guest), pop(&mut pair.from_guest)], [1, 1]);
            device.keep_bases(0, pair.bases());
            let begun = device.stop(reset).expect("there");
            assert_ne!(begun, 0);
            assert!(device.is_started(0) && !device.is_whole(0), "the partner goes on");

            // Once more, without an effect; and the one without the other.
            drivers.iter_mut().for_each(&mut show);
            assert_eq!(device.stop(reset).expect("there"), begun);
            device.set_enabled(reset, true).expect("there");
            let mut pair = device.queue_pair(0, PATH).expect("one ring");
            let taken = [pop(&mut pair.to_guest), pop(&mut pair.from_guest)];
            assert_eq!(taken, [reset as usize, 1 - reset as usize], "packed: {packed}");
            let enabled = [pair.to_guest.enabled, pair.from_guest.enabled];
            assert_eq!(enabled, [reset == 1, reset == 0]);

            // Settings of the vring made meanwhile stay when the lane that runs without it stops.
            drivers[reset as usize] = start_afresh(&mut device, &ram, reset);
            device.stop(reset).expect("there");
            device
                .set_base(reset, drivers[reset as usize].base())
                .expect("a base");
            device.keep_bases(0, pair.bases());
            device.start(reset, None).expect("there");
            assert!(device.is_whole(0));
            let fresh = device.vring(reset).expect("there").base;
            assert_eq!(fresh, drivers[reset as usize].base());
            drivers.iter_mut().for_each(&mut show);
            let mut pair = device.queue_pair(0, PATH).expect("two rings");
            assert_eq!([pop(&mut pair.to_guest), pop(&mut pair.from_guest)], [1, 1]);
        }
    }
}

#[test]
fn without_the_feature_or_before_its_first_start_a_vring_is_waited_for() {
    let (mut device, _ram, _drivers) = resettable(false);
    // The second pair: its transmit vring was never started.
    device.start(2, None).expect("there");
    assert!(!device.is_started(1));
    device.stop(2).expect("there");
    device.start(3, None).expect("there");
    assert!(device.is_started(1) && !device.is_whole(1));
    // Both stopped: nothing is left to go on.
    device.stop(0).expect("there");
    device.stop(1).expect("there");
    assert!(!device.is_started(0));
    device.start(0, None).expect("there");
    assert!(device.is_started(0));
    device.acknowledge(F_VERSION_1).expect("offered");
    assert!(!device.is_started(0) && !device.is_started(1));
    // A reset of the device ends all that.
    device.acknowledge(F_VERSION_1 | F_RING_RESET).expect("offered");
    device.set_status(0).expect("valid");
    device.acknowledge(F_VERSION_1 | F_RING_RESET).expect("offered");
    device.start(0, None).expect("there");
    assert!(!device.is_started(0));
}

#[test]
fn features_on_request_are_refused_where_nobody_asked_for_them() {
    assert!(device().acknowledge(F_VERSION_1 | F_RING_RESET).is_err());
    let ring_reset = OnRequest::named("ring-reset").expect("a name");
    let mut device = device().offering(ring_reset);
    device.acknowledge(F_VERSION_1 | F_RING_RESET).expect("offered");
    assert!(device.acknowledge(F_ACCESS_PLATFORM).is_err());
}

#[test]
fn address_that_would_have_to_be_translated_is_refused_with_the_remedy() {
    let (mut device, _ram, drivers) = resettable(false);
    let guest = drivers[0].ring_guest_addresses();
    device
        .set_addresses(0, guest)
        .expect("only looked at when it is entered");
    let said = |device: &NetDevice| match device.queue_pair(0, PATH) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{guest:?} are no addresses of the VMM's"),
    };
    assert!(!said(&device).contains("IOTLB"), "{}", said(&device));
    let features = F_VERSION_1 | F_ACCESS_PLATFORM;
    device.acknowledge(features).expect("offered");
    assert!(said(&device).contains("leave the IOMMU out"), "{}", said(&device));
}

#[test]
fn reset_by_status_forgets_all_but_where_rings_stopped_and_reset_that_too() {
    let mut device = device();
    device.acknowledge(F_VERSION_1).expect("offered");
    device.start(0, None).expect("there");
    device.set_enabled(2, true).expect("there");
    device.keep_bases(
        0,
        Bases {
            from_guest: 7,
            to_guest: 9,
        },
    );
    assert!(matches!(
        device.set_status(0x100),
        Err(DeviceError::Status(0x100))
    ));
    device.set_status(15).expect("valid");
    assert!(!device.all_pairs_on(), "enabled, and not set up");
    device.start(2, None).expect("there");
    assert!(!device.all_pairs_on(), "its partner is waited for");
    device.start(3, None).expect("there");
    assert!(device.all_pairs_on());
    device.set_status(0).expect("valid");
    assert_eq!((device.features(), device.status()), (0, 0));
    assert!(!device.all_pairs_on());
    assert_eq!(device.stop(0).expect("there"), 9);
    device.reset();
    assert_eq!(device.stop(1).expect("there"), 0);
}

#[test]
fn base_beyond_16_bits_is_for_packed_rings_only() {
    let mut device = device();
    assert!(matches!(
        device.set_base(0, 1 << 16),
        Err(VringError::Base { .. })
    ));
    device.acknowledge(F_VERSION_1 | F_RING_PACKED).expect("offered");
    device.set_base(0, 1 << 16).expect("packed");
    assert!(matches!(device.set_size(0, 0), Err(VringError::Size { .. })));
}
