//! Two guests in one daemon, on one worker, one of them hostile: for tests of what the other one keeps, and for
//! `scripts/bench`, which measures it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use virtqueue::GuestAddr;
use virtqueue::layout::Descriptor;

use crate::daemon::Placement;
use crate::noise::Noise;
use crate::pair::Ring;
use crate::{Daemon, Driver, DriverConfig, Layout, PacketPort, Serve, VethPair, driver, frame, wait};

/// A frame of the guest that takes no calls.
const PACE: Duration = Duration::from_millis(1);

/// Does wrong at that socket until it is told to stop.
pub type Hostility = fn(&Path, &AtomicBool);

/// Acts until it is told to stop.
pub fn until(stop: &AtomicBool, mut act: impl FnMut()) {
    while !stop.load(Ordering::Relaxed) {
        act();
    }
}

fn bad(ring: &Ring, desc: Descriptor) {
    let split = ring.driver.split();
    split.write_descriptor(0, desc);
    split.set_avail_entry(split.avail_idx(), 0);
    split.set_avail_idx(split.avail_idx().wrapping_add(1));
    ring.kick();
}

/// Gives a descriptor outside of its memory, is closed, and comes again.
///
/// # Panics
/// If the daemon does not take it as it should.
pub fn lies_and_comes_back(socket: &Path, stop: &AtomicBool) {
    until(stop, || {
        let guest = Driver::connect(socket, &DriverConfig::small()).expect("it may come back");
        let desc = |addr, len, flags| Descriptor {
            addr,
            len,
            flags,
            next: 0,
        };
        bad(&guest.pairs[0].from_guest, desc(1 << 40, 100, 0));
        assert!(guest.await_close(wait::SOON), "the lie was believed");
        // Who came once without a lie is met without a pause the next time.
        drop(driver::connect(socket));
    });
}

/// Connects and goes again, without an end.
///
/// # Panics
/// If the daemon does not take it as it should.
pub fn comes_and_goes(socket: &Path, stop: &AtomicBool) {
    until(stop, || {
        drop(Driver::connect(socket, &DriverConfig::small()).expect("accepted"));
    });
}

/// Kicks both rings without an end.
///
/// # Panics
/// If the daemon does not take it as it should.
pub fn kicks_for_nothing(socket: &Path, stop: &AtomicBool) {
    let guest = Driver::connect(socket, &DriverConfig::small()).expect("accepted");
    until(stop, || {
        guest.pairs[0].from_guest.kick();
        guest.pairs[0].to_guest.kick();
    });
}

/// Writes anything anywhere into its rings.
///
/// # Panics
/// If the daemon does not take it as it should.
pub fn fills_rings_with_garbage(socket: &Path, stop: &AtomicBool) {
    let mut noise = Noise::new(0x9e37_79b9_7f4a_7c15);
    until(stop, || {
        let guest = Driver::connect(socket, &DriverConfig::small()).expect("accepted");
        let ring = &guest.pairs[0].from_guest;
        while !stop.load(Ordering::Relaxed) && !guest.await_close(Duration::ZERO) {
            let value = noise.number();
            // Rings are at the beginning of memory.
            guest
                .ram()
                .write(GuestAddr(value % (64 << 10)), &value.to_le_bytes());
            ring.kick();
        }
    });
}

/// Leaves its call eventfd full.
///
/// # Panics
/// If the daemon does not take it as it should.
pub fn takes_no_calls(socket: &Path, stop: &AtomicBool) {
    let mut guest = Driver::connect(socket, &DriverConfig::small()).expect("accepted");
    let pair = &mut guest.pairs[0];
    pair.from_guest.fill_call();
    until(stop, || {
        pair.send(&frame::plain(60, 1), Layout::Whole);
        while pair.from_guest.driver.in_flight() > 0 && !stop.load(Ordering::Relaxed) {
            pair.reap_sent();
            pair.from_guest.driver.enable_calls();
        }
        std::thread::sleep(PACE);
    });
}

/// Sends its memory table again and again.
///
/// # Panics
/// If the daemon does not take it as it should.
pub fn changes_its_memory(socket: &Path, stop: &AtomicBool) {
    let mut guest = Driver::connect(socket, &DriverConfig::small()).expect("accepted");
    until(stop, || guest.set_memory().expect("accepted"));
}

/// The honest guest on port 0 and queue 0, the other's socket on port 1, one worker for both.
pub struct Scene {
    /// The honest guest.
    pub honest: Driver,
    /// The other end of the interface.
    pub wire: PacketPort,
    /// Of both.
    pub daemon: Daemon,
    _veth: VethPair,
}

/// Starts all of it.
///
/// # Panics
/// If something of it does not come up.
pub fn scene(placement: Placement) -> Scene {
    let veth = VethPair::with(2, 1500);
    // All that the far end sends goes to queue 0.
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .with("--workers", "1");
    let daemon = Daemon::start_ports(&veth.near, &serve, &["start-queue=0", "start-queue=1"]);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let honest = Driver::connect(&daemon.path("port0.sock"), &DriverConfig::default()).expect("accepted");
    Scene {
        honest,
        wire,
        daemon,
        _veth: veth,
    }
}
