//! Guests of a network whose VMMs do what hurts who copies from and to their memory: it hurts their own port.

use std::fs::File;
use std::sync::Arc;

use rstest::rstest;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use testkit::daemon::DIR;
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Serve, driver, wait};
use virtqueue::driver::{Buffer, GuestRam};
use virtqueue::{GuestAddr, Region};

const MIB: u64 = 1 << 20;
/// Where the memory of a guest is that does wrong, beside that of its rings.
const LOST: u64 = 16 * MIB;

fn mac(guest: usize) -> [u8; 6] {
    [0x02, 0, 0, 0, 0, guest as u8]
}

fn frame(to: usize, from: usize, number: u32) -> Vec<u8> {
    let mut frame = [&mac(to)[..], &mac(from), &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.resize(1000, number as u8);
    frame
}

/// A network of three, of which the last one does wrong.
struct World {
    honest: [Driver; 2],
    daemon: Daemon,
    number: u32,
    _netns: NetNs,
}

const LIAR: usize = 2;

impl World {
    fn new() -> Self {
        let netns = NetNs::new("hostile");
        let port = |guest: usize| {
            format!(
                "[port.vm{guest}]\nnetwork = \"lan\"\nsocket-path = \"{DIR}/vm{guest}.sock\"\nmac = \
                 \"02:00:00:00:00:{guest:02x}\"\n"
            )
        };
        let text = format!("[network.lan]\n{}{}{}", port(0), port(1), port(LIAR));
        let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &text);
        let honest = [0, 1].map(|guest| {
            let path = daemon.path(&format!("vm{guest}.sock"));
            let mut driver = Driver::connect(&path, &DriverConfig::default()).expect("accepted");
            driver.pairs[0].post(64, &[2048]);
            driver
        });
        Self {
            honest,
            daemon,
            number: 0,
            _netns: netns,
        }
    }

    fn connect_liar(&self, ram: Arc<GuestRam>) -> Driver {
        let socket = driver::connect(&self.daemon.path("vm2.sock"));
        let config = DriverConfig::default();
        let liar = Driver::start_with(socket, &config, ram).expect("accepted");
        let runs = |port: &serde_json::Value| port["lanes"][0]["running"] == true;
        self.daemon.await_port(LIAR, "it runs", runs);
        liar
    }

    /// A frame from one honest guest to the other, behind one to the one that does wrong.
    #[track_caller]
    fn assert_goes_on(&mut self) {
        self.number += 1;
        let frames = [LIAR, 1].map(|to| frame(to, 0, self.number));
        let pair = &mut self.honest[0].pairs[0];
        pair.reap_sent();
        pair.send_batch(&[&frames[0], &frames[1]], Layout::Whole);
        loop {
            let got = self.honest[1].pairs[0].receive(wait::SOON);
            let got = got.unwrap_or_else(|| panic!("frame {} is lost: {}", self.number, self.daemon.said()));
            // What the other sends before its end may come, too.
            if got.frame[6..12] == mac(0) {
                assert!(got.frame == frames[1], "frame {}", self.number);
                return;
            }
        }
    }
}

/// Memory of a guest, of which a part can be lost, and that part's file.
fn memory() -> (Arc<GuestRam>, File) {
    let region = |name: &str, at: u64, flags: MemfdFlags| {
        let file = File::from(memfd_create(name, flags | MemfdFlags::CLOEXEC).expect("memory"));
        ftruncate(&file, LOST).expect("room");
        let region = Region {
            guest_addr: GuestAddr(at),
            user_addr: at,
            len: LOST,
            file: file.try_clone().expect("a descriptor").into(),
            file_offset: 0,
        };
        (region, file)
    };
    let (kept, _) = region("kept", 0, MemfdFlags::empty());
    let (lost, file) = region("lost", LOST, MemfdFlags::empty());
    let ram = GuestRam::from_regions(vec![kept, lost]).expect("memory");
    (Arc::new(ram), file)
}

/// Frames are being copied to it, or from it.
#[rstest]
fn memory_that_is_truncated_under_a_copy_closes_its_own_port(#[values(false, true)] sends: bool) {
    let mut world = World::new();
    let (ram, file) = memory();
    let mut liar = world.connect_liar(Arc::clone(&ram));
    let at = |number: u64| GuestAddr(LOST + number * 4096);
    for number in 0..64 {
        liar.pairs[0].post_buffers(vec![Buffer::writable(at(number), 2048)]);
    }
    liar.pairs[0].to_guest.publish();
    for number in 0..100u64 {
        if number == 20 {
            ftruncate(&file, 0).expect("not sealed");
        }
        if sends && number < 40 {
            // Header and the frame's first bytes are where they were; the rest is not.
            let header = [&[0; 12][..], &frame(1, LIAR, 0)[..88]].concat();
            let start = ram.alloc(header.len() as u64, 64).expect("room");
            ram.write(start, &header);
            let buffers = [
                Buffer::readable(start, 100),
                Buffer::readable(at(100 + number), 900),
            ];
            liar.pairs[0].from_guest.driver.add(&buffers);
            liar.pairs[0].from_guest.publish();
        }
        world.assert_goes_on();
    }
    assert!(liar.await_close(wait::SOON), "{}", world.daemon.said());
    world.daemon.await_port(LIAR, "its reason", |port| {
        port["last_closed"][0].as_str() == Some("memory-truncated")
    });
    for guest in &world.honest {
        assert!(!guest.await_close(wait::QUIET), "{}", world.daemon.said());
    }
    let _again = world.connect_liar(memory().0);
    world.assert_goes_on();
}

/// The table of a guest's memory is sent again and again, as VMMs do that plug memory, while frames are copied.
#[rstest]
fn memory_table_that_changes_under_copies_loses_no_frame_of_others() {
    let mut world = World::new();
    let (ram, _file) = memory();
    let mut liar = world.connect_liar(ram);
    liar.pairs[0].post(64, &[2048]);
    for _ in 0..200 {
        liar.set_memory().expect("the same");
        world.assert_goes_on();
        while liar.pairs[0].poll().is_some() {}
    }
    assert!(!liar.await_close(wait::QUIET), "{}", world.daemon.said());
}

/// It comes, has frames on the way to it and from it, and is gone.
#[rstest]
fn guest_that_comes_and_goes_in_a_storm_costs_others_no_frame() {
    let mut world = World::new();
    for round in 0..50 {
        let (ram, _file) = memory();
        let mut liar = world.connect_liar(ram);
        liar.pairs[0].post(round % 3, &[2048]);
        for number in 0..20 {
            liar.pairs[0].send(&frame(1, LIAR, number), Layout::Pieces(100));
        }
        world.assert_goes_on();
        drop(liar);
        world.assert_goes_on();
    }
}
