//! Faults that others had, in vhost back ends and with AF_XDP: each is a test here, named after it, or elsewhere.

use std::sync::Arc;

use rstest::rstest;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use testkit::daemon::Placement;
use testkit::{Driver, DriverConfig, Layout, TwoGuests, driver, frame, require, wait};
use virtqueue::driver::GuestRam;
use virtqueue::{GuestAddr, Region};

const MIB: u64 = 1 << 20;

#[rstest]
fn memory_that_the_vmm_truncates_closes_only_its_port_and_the_neighbour_loses_nothing(
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let config = DriverConfig {
        regions: vec![(GuestAddr(0), 4 * MIB)],
        ..DriverConfig::default()
    };
    let mut guests = TwoGuests::new(placement, &config);
    // The liar comes back with memory that is not sealed.
    let file = memfd_create("unsealed", MemfdFlags::CLOEXEC).expect("memfd");
    ftruncate(&file, 4 * MIB).expect("room");
    let region = Region {
        guest_addr: GuestAddr(0),
        user_addr: 0,
        len: 4 * MIB,
        file: file.try_clone().expect("a descriptor"),
        file_offset: 0,
    };
    let ram = Arc::new(GuestRam::from_regions(vec![region]).expect("memory"));
    let TwoGuests {
        liar,
        honest,
        daemon,
        wire,
        veth,
    } = guests;
    drop(liar);
    let liar = Driver::start_with(driver::connect(&daemon.path("port0.sock")), &config, ram);
    let liar = liar.expect("accepted");
    guests = TwoGuests {
        liar,
        honest,
        daemon,
        wire,
        veth,
    };
    for number in 0..600u16 {
        if number == 200 {
            ftruncate(&file, 0).expect("not sealed");
            // From here on nobody in this process may touch the liar's memory.
            guests.liar.pairs[0].from_guest.kick();
        }
        let mut sent = frame::plain(100, number as u8);
        sent[20..22].copy_from_slice(&number.to_be_bytes());
        guests.honest.pairs[0].send(&sent, Layout::Whole);
        let got = guests.wire.receive(wait::SOON);
        frame::assert_same(&got.unwrap_or_else(|| panic!("frame {number} is lost")), &sent);
    }
    guests.assert_closed_alone("memory-truncated", &config);
}
