//! Single queues that the guest resets (VIRTIO_F_RING_RESET), and the features that are offered on request.

use std::sync::Arc;
use std::time::Duration;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::driver::{self, F_ACCESS_PLATFORM, F_RING_PACKED, F_RING_RESET};
use testkit::{Bystander, Driver, DriverConfig, Layout, PacketPort, Rig, Serve, VethPair};
use testkit::{frame, require, skip_half, soak, wait};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Protocol};
use vhost::{VhostBackend, VringConfigData};
use virtqueue::driver::GuestRam;
use virtqueue::{GuestAddr, QueueSize};

/// Vrings of the first pair.
const TO_GUEST: usize = 0;
const FROM_GUEST: usize = 1;
const BUFFERS: usize = 64;
const BUFFER: u32 = 2048;
/// What memory is filled with that the device has no business with any more.
const FORBIDDEN: u8 = 0x5a;

fn config(ring: u64) -> DriverConfig {
    let mut config = DriverConfig::with(F_RING_RESET | ring);
    config.protocol |= Protocol::INFLIGHT_SHMFD;
    config
}

fn serve(placement: Placement) -> Serve {
    Serve::interface(VethPair::NIC)
        .placement(placement)
        .with("--offer", "ring-reset")
}

fn rig(placement: Placement, ring: u64) -> Rig {
    let mut rig = Rig::with(VethPair::new(), &serve(placement), &config(ring));
    assert_ne!(rig.driver.features() & F_RING_RESET, 0, "it is offered");
    rig.post(BUFFERS, &[BUFFER]);
    rig.assert_passes_both_ways();
    rig
}

/// Memory that was a ring's, and whose bytes are looked at.
struct Forbidden {
    ram: Arc<GuestRam>,
    places: Vec<(GuestAddr, usize)>,
}

impl Forbidden {
    /// Of a vring that is stopped: its ring, and what its buffers are. Fills it; the guest takes another ring, and no
    /// buffers yet.
    fn of(rig: &mut Rig, index: usize) -> Self {
        let pair = rig.pair();
        let driver = &pair.ring(index).driver;
        let addresses = driver.ring_guest_addresses();
        let entries = usize::from(driver.size().get());
        // The shortest of them, in either kind of ring.
        let mut places = vec![
            (GuestAddr(addresses.desc), 16 * entries),
            (GuestAddr(addresses.avail), 4),
            (GuestAddr(addresses.used), 4),
        ];
        if index == TO_GUEST {
            places.extend(pair.posted().map(|buffer| (buffer.addr, buffer.len as usize)));
        }
        if index == TO_GUEST {
            pair.forget_posted();
        }
        pair.renew(index);
        let ram = Arc::clone(pair.ram());
        for &(addr, len) in &places {
            ram.write(addr, &vec![FORBIDDEN; len]);
        }
        Self { ram, places }
    }

    #[track_caller]
    fn assert_untouched(&self) {
        for &(addr, len) in &self.places {
            let bytes = self.ram.read_vec(addr, len);
            let touched = bytes.iter().position(|&byte| byte != FORBIDDEN);
            assert_eq!(touched, None, "{addr}, of {len} bytes, was written to");
        }
    }
}

#[rstest]
fn queue_that_is_reset_is_left_alone_and_the_other_one_goes_on(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(0, F_RING_PACKED)] ring: u64,
    #[values(TO_GUEST, FROM_GUEST)] index: usize,
) {
    skip_half!(placement, ring, index);
    require!(Root);
    let mut rig = rig(placement, ring);
    let fallbacks = |rig: &Rig| rig.daemon.port(0)["lanes"][0]["fallbacks"].to_string();
    let before = fallbacks(&rig);
    for round in 0..3 {
        rig.driver.stop_vring(index).expect("it stops");
        let copies = fallbacks(&rig).contains("the guest has reset a queue");
        assert_eq!(copies, placement != Placement::Copy, "{}", fallbacks(&rig));
        let forbidden = Forbidden::of(&mut rig, index);
        for seed in 0..20 {
            let passing = frame::plain(200, seed);
            match index {
                TO_GUEST => {
                    rig.wire.send(&passing);
                    rig.assert_from_guest(&passing, Layout::Whole);
                }
                _ => {
                    rig.pair().from_guest.kick();
                    rig.wire.send(&passing);
                    assert!(arrives(&mut rig, &passing), "frames for the guest do not go on");
                }
            }
        }
        forbidden.assert_untouched();
        rig.driver.start_vring(index).expect("it starts");
        if index == TO_GUEST {
            // Others than those that are looked at.
            rig.pair().post(BUFFERS, &[BUFFER]);
        }
        rig.await_passes_both_ways();
        for seed in 0..40 {
            rig.assert_from_guest(&frame::plain(300, seed), Layout::HeaderApart);
            rig.assert_to_guest(&frame::plain(300, seed));
        }
        forbidden.assert_untouched();
        assert_eq!(fallbacks(&rig), before, "{round}");
    }
}

/// Whether that frame arrives; others may come before it.
fn arrives(rig: &mut Rig, sent: &[u8]) -> bool {
    wait::until(wait::SOON, || {
        rig.pair()
            .receive(wait::QUIET)
            .is_some_and(|got| got.frame == sent)
            || {
                rig.wire.send(sent);
                false
            }
    })
}

/// A storm: numbered frames both ways, and between them resets of one queue, or the other, or both. What the guest
/// sends arrives once and in order, but for what was in the ring still; what is sent to it arrives once at most, and in
/// order.
#[rstest]
fn no_frame_comes_twice_or_late_while_queues_are_reset_without_end(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(0, F_RING_PACKED)] ring: u64,
) {
    require!(Root);
    let mut rig = rig(placement, ring);
    let (mut number, mut wanted) = (0, Vec::new());
    let (mut received, mut seen) = (Vec::new(), Vec::new());
    for round in 0..soak::count(40, 1000) {
        for _ in 0..8 {
            number += 1;
            rig.pair().send(&frame::numbered(number), Layout::Whole);
            wanted.push(number);
            rig.wire.send(&frame::numbered(number));
        }
        for index in [&[TO_GUEST][..], &[FROM_GUEST], &[TO_GUEST, FROM_GUEST]][round % 3] {
            received.extend(arrived(&mut rig));
            rig.driver.stop_vring(*index).expect("it stops");
            received.extend(arrived(&mut rig));
            let left = rig.pair().renew(*index);
            wanted.truncate(wanted.len() - left);
            rig.driver.start_vring(*index).expect("it starts");
        }
        // Before the wire's socket is full.
        seen.extend(std::iter::from_fn(|| rig.wire.receive(Duration::ZERO)));
    }
    rig.await_to_guest();
    received.extend(arrived(&mut rig));
    assert!(received.is_sorted_by(|one, next| one < next), "{received:?}");
    seen.extend(rig.flush_from_guest());
    let sent: Vec<_> = seen.iter().filter_map(|frame| frame::number_of(frame)).collect();
    assert_eq!(sent, wanted);
    rig.assert_passes_both_ways();
}

/// Numbers of the frames that are in the guest's ring now.
fn arrived(rig: &mut Rig) -> Vec<u32> {
    let pair = rig.pair();
    std::iter::from_fn(|| pair.poll())
        .filter_map(|got| frame::number_of(&got.frame))
        .collect()
}

/// `ethtool -G` in a Linux guest. An inflight region is for so many entries as the queue had at first, at most.
#[rstest]
fn queue_comes_back_with_more_or_fewer_entries(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(0, F_RING_PACKED)] ring: u64,
    #[values(false, true)] inflight: bool,
) {
    skip_half!(placement, ring, inflight);
    require!(Root);
    let mut config = config(ring);
    config.protocol.set(Protocol::INFLIGHT_SHMFD, inflight);
    let mut rig = Rig::with(VethPair::new(), &serve(placement), &config);
    rig.post(BUFFERS, &[BUFFER]);
    for entries in [64, if inflight { config.queue_size } else { 1024 }, 128] {
        let size = QueueSize::new(entries).expect("a power of two");
        for index in [TO_GUEST, FROM_GUEST] {
            rig.driver.stop_vring(index).expect("it stops");
            rig.pair().resize(index, size);
            rig.driver.start_vring(index).expect("it starts");
        }
        rig.await_passes_both_ways();
        // More than there are entries.
        for seed in 0..=255 {
            rig.assert_from_guest(&frame::plain(80, seed), Layout::Pieces(30));
            rig.assert_to_guest(&frame::plain(80, seed));
        }
    }
}

/// The successor of a daemon that was killed finds a ring that was reset where it stands, by the inflight region or by
/// the ring.
#[rstest]
fn daemon_that_takes_over_goes_on_with_a_ring_that_was_reset(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
    #[values(0, F_RING_PACKED)] ring: u64,
) {
    require!(Root);
    let mut rig = rig(placement, ring);
    // So that the old rings stand elsewhere than the new ones.
    for seed in 0..100 {
        rig.assert_from_guest(&frame::plain(100, seed), Layout::Whole);
        rig.assert_to_guest(&frame::plain(100, seed));
    }
    for index in [TO_GUEST, FROM_GUEST] {
        rig.pair().await_sent();
        rig.driver.reset_vring(index).expect("it is reset");
        rig.await_passes_both_ways();
        rig.daemon.kill();
        rig.daemon.restart(&rig.veth.near, &serve(placement));
        rig.daemon.await_ready();
        rig = rig.exchange(|driver, daemon| {
            let socket = driver::connect(&daemon.socket());
            driver.resume(socket).expect("it takes over")
        });
        rig.await_passes_both_ways();
        rig.assert_passes_both_ways();
    }
}

/// What no guest does: none of it does anything but what it says, and the guest of another port does not notice.
#[rstest]
fn resets_in_the_wrong_order_hurt_nobody(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let bystander = Bystander::with(placement, 1, |serve| serve.with("--offer", "all"));
    let connect = || Driver::connect(&bystander.socket(1), &config(0)).expect("accepted");
    let mut guest = connect();
    for index in [TO_GUEST, FROM_GUEST] {
        // Twice, and the other one with it; on and off meanwhile; started twice; described while it runs.
        let first = guest.stop_vring(index).expect("it stops");
        assert_eq!(guest.stop_vring(index).expect("it stands"), first);
        guest.frontend().set_vring_enable(index, false).expect("taken");
        guest.frontend().set_vring_enable(index, true).expect("taken");
        guest.stop_vring(1 - index).expect("it stops");
        guest.start_vring(index).expect("it starts");
        guest.start_vring(index).expect("it starts again");
        guest.start_vring(1 - index).expect("it starts");
        guest.frontend().set_vring_base(index, 0).expect("taken");
        guest.reset_vring(index).expect("it is reset");
        guest.reset_vring(1 - index).expect("it is reset");
    }
    for round in 0..soak::count(60, 2000) {
        guest.reset_vring(round % 2).expect("it is reset");
    }
    let wire = bystander.hostile_wire();
    assert_sends(&mut guest, &wire);
    // It goes with a queue that is reset, and another one comes.
    guest.stop_vring(TO_GUEST).expect("it stops");
    drop(guest);
    let mut guest = connect();
    assert_sends(&mut guest, &wire);
    // Addresses of nothing.
    guest.stop_vring(FROM_GUEST).expect("it stops");
    let nowhere = VringConfigData {
        queue_max_size: 256,
        queue_size: 256,
        flags: 0,
        desc_table_addr: 1 << 40,
        used_ring_addr: 2 << 40,
        avail_ring_addr: 3 << 40,
        log_addr: None,
    };
    guest
        .frontend()
        .set_vring_addr(FROM_GUEST, &nowhere)
        .expect("looked at when it starts");
    let kick = vmm_sys_util::eventfd::EventFd::new(0).expect("a descriptor");
    let started = guest.frontend().set_vring_kick(FROM_GUEST, &kick);
    assert!(started.is_err(), "a ring that is nowhere");
    drop(guest);
    assert_sends(&mut connect(), &wire);
    drop(wire);
    bystander.assert_unharmed();
}

#[track_caller]
fn assert_sends(guest: &mut Driver, wire: &PacketPort) {
    let sent = frame::last();
    guest.pairs[0].send(&sent, Layout::Whole);
    let _ = wire.receive_before(&sent);
}

/// A guest behind no IOMMU that accepts ACCESS_PLATFORM is like any other; one behind an IOMMU is refused with the
/// remedy, and no other.
#[test]
fn platform_access_is_that_of_guest_memory_and_an_iommu_is_refused() {
    require!(Root);
    let bystander = Bystander::with(Placement::Copy, 1, |serve| {
        serve.with("--offer", "access-platform")
    });
    let config = DriverConfig::with(F_ACCESS_PLATFORM);
    let connect = || Driver::connect(&bystander.socket(1), &config).expect("accepted");
    let mut guest = connect();
    assert_ne!(guest.features() & F_ACCESS_PLATFORM, 0);
    let wire = bystander.hostile_wire();
    assert_sends(&mut guest, &wire);
    // An update: IOVA, size, user address, permission, type.
    let update = [
        &[0u64, 4096, 1 << 30].map(u64::to_ne_bytes).concat()[..],
        &[3, 2],
        &[0; 6],
    ]
    .concat();
    assert_eq!(guest.say(FrontendReq::IOTLB_MSG, &update, None), 1);
    assert!(guest.await_close(wait::SOON), "the device cannot go on");
    let words = ["IOTLB_MSG", "leave the IOMMU device out", "iommu_platform=on"];
    bystander.daemon.await_port(1, "closed with its reason", |port| {
        let why = port["last_closed"]["detail"].as_str().unwrap_or_default();
        words.iter().all(|word| why.contains(word))
    });
    drop(guest);
    assert_sends(&mut connect(), &wire);
    drop(wire);
    bystander.assert_unharmed();
}
