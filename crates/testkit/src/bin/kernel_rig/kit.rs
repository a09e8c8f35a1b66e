//! What cases share: how a daemon and its guest are started, frames that must pass, and what must hold whatever happens.
//!
//! Receive buffers are as long as the longest frame with its header, or as a NIC may write, each with a guard behind it
//! that nobody may write to.

use std::fs::read_to_string;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use testkit::daemon::Mode;
use testkit::foreign::{self, Foreign, inherited, list};
use testkit::{Daemon, Driver, DriverConfig, Layout, Rig, Serve, VethPair, Wire, frame, wait};
use virtqueue::driver::{Buffer, GuestRam};
use virtqueue::{GuestAddr, Region};

use crate::setting::Setting;

/// Lengths of frames without a tag: the shortest, around what NICs and drivers cut at, the longest.
pub(crate) const PLAIN: [usize; 6] = [60, 64, 65, 1024, 1025, 1514];
/// Lengths of frames with a tag: 1518 is 1522 with the check sequence.
pub(crate) const TAGGED: [usize; 4] = [64, 1024, 1025, 1518];
/// MTU of the wire's far end while it sends frames that are too long.
pub(crate) const LONG_MTU: &str = "3000";

/// Memory of the guest, bytes.
pub(crate) const RAM: u64 = 8 << 20;
/// Receive buffers.
pub(crate) const BUFFERS: usize = 64;
/// What is behind a buffer, bytes, and its value.
const GUARD: usize = 2500;
const UNTOUCHED: u8 = 0x5a;

/// What is searched at a time, bytes.
const BLOCK: usize = 1024;

/// Another station than the guest.
pub(crate) const ELSEWHERE: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0c];

/// What `status` said meanwhile.
pub(crate) struct Seen {
    /// The mode in use.
    pub(crate) mode: String,
    /// Why no better one.
    pub(crate) note: String,
}

impl Seen {
    pub(crate) fn of(daemon: &Daemon) -> Self {
        let port = daemon.port(0);
        let lane = &port["lanes"][0];
        let fallbacks = lane["fallbacks"].as_array().into_iter().flatten();
        let fallbacks: Vec<_> = fallbacks.filter_map(|reason| reason.as_str()).collect();
        Self {
            mode: lane["mode"].as_str().unwrap_or("none").to_owned(),
            note: fallbacks.join("; "),
        }
    }
}

pub(crate) fn start(wire: &Wire, setting: Setting) -> (Rig, Option<Foreign>) {
    let veth = wire.lay();
    let (daemon, program) = match setting.passed_in {
        true => start_with_socket(&veth, setting),
        false => (Daemon::start(&veth.near, &setting.serve()), None),
    };
    (around(veth, daemon, &setting.guest()), program)
}

/// A daemon with these options, and its guest.
pub(crate) fn start_with(veth: VethPair, serve: &Serve, config: &DriverConfig) -> Rig {
    let daemon = Daemon::start(&veth.near, serve);
    around(veth, daemon, config)
}

fn around(veth: VethPair, daemon: Daemon, config: &DriverConfig) -> Rig {
    let socket = UnixStream::connect(daemon.socket()).expect("it listens");
    let driver = Driver::start_with(socket, config, memory());
    let driver = driver.unwrap_or_else(|refused| panic!("{refused}; the daemon said:\n{}", daemon.said()));
    Rig::of(veth, daemon, driver)
}

/// As docs/cli.md has it: a program, and a socket with its RX ring in the program's map. Both are this process's.
fn start_with_socket(veth: &VethPair, setting: Setting) -> (Daemon, Option<Foreign>) {
    let mode = setting.mode.unwrap_or(Mode::Native);
    let program = Foreign::attach(&veth.near, VethPair::NIC, mode, 0);
    let socket = foreign::socket(&veth.near);
    program.place(0, &socket);
    let serve = setting.serve().with("--sock-fds", list(&[&socket]));
    let mut daemon = inherited(&[&socket], || Daemon::spawn(&veth.near, &serve));
    daemon.await_listening();
    (daemon, Some(program))
}

/// The guest's, in huge pages where there are enough: what a NIC may write to by itself is not divided into pages
/// there.
pub(crate) fn memory() -> Arc<GuestRam> {
    let free = read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = free.map_or(0, |text| text.trim().parse().unwrap_or(0));
    let huge = match free >= RAM >> 21 {
        true => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        false => MemfdFlags::empty(),
    };
    let file = memfd_create("guest", MemfdFlags::CLOEXEC | huge).expect("a descriptor is left");
    ftruncate(&file, RAM).expect("memory is left");
    let region = Region {
        guest_addr: GuestAddr(0),
        user_addr: 0,
        len: RAM,
        file,
        file_offset: 0,
    };
    Arc::new(GuestRam::from_regions(vec![region]).expect("memory is left"))
}

/// Posts receive buffers of so many bytes; where their guards are.
pub(crate) fn post(rig: &mut Rig, bytes: u32) -> Vec<GuestAddr> {
    let pair = rig.pair();
    let guards = (0..BUFFERS).map(|_| {
        let addr = pair
            .ram()
            .alloc(u64::from(bytes) + GUARD as u64, 64)
            .expect("memory is left");
        let guard = addr.checked_add(u64::from(bytes)).expect("inside memory");
        pair.ram().write(guard, &[UNTOUCHED; GUARD]);
        pair.post_buffers(vec![Buffer::writable(addr, bytes)]);
        guard
    });
    let guards = guards.collect();
    rig.pair().to_guest.publish();
    guards
}

pub(crate) fn frames_pass_byte_exact(rig: &mut Rig) {
    for (seed, length) in (0..).zip(PLAIN) {
        rig.assert_from_guest(&frame::plain(length, seed), Layout::Whole);
        rig.assert_from_guest(&frame::plain(length, seed), Layout::Pieces(100));
        rig.assert_to_guest(&frame::plain(length, seed));
    }
    for (seed, length) in (0..).zip(TAGGED) {
        rig.assert_from_guest(&frame::tagged(length, 42, seed), Layout::Whole);
        rig.assert_to_guest(&frame::tagged(length, 42, seed));
    }
    rig.pair().await_sent();
}

/// No driver here names a buffer that it does not have.
pub(crate) fn assert_no_strays(daemon: &Daemon) {
    for name in ["to_guest_stray", "from_guest_strays"] {
        assert_eq!(daemon.counter(name), 0, "{name}: {:#}", daemon.status());
    }
}

/// Nothing behind a receive buffer has changed.
pub(crate) fn assert_untouched(rig: &mut Rig, guards: &[GuestAddr]) {
    for guard in guards {
        let found = rig.pair().ram().read_vec(*guard, GUARD);
        assert!(
            found == [UNTOUCHED; GUARD],
            "guest memory behind a receive buffer was written to"
        );
    }
}

/// So many pieces of memory are these 16 bytes.
pub(crate) fn places_of_16(memory: &[u8], wanted: &[u8]) -> usize {
    let pieces = blocks_with(memory, wanted[0]).flat_map(|(_, block)| block.chunks_exact(16));
    pieces.filter(|piece| *piece == wanted).count()
}

/// Blocks of memory in which there is such a byte, and where they begin. To search for one byte is fast also in a
/// program that is not optimised; whatever else is looked at piece by piece takes seconds in an interpreted guest.
pub(crate) fn blocks_with(memory: &[u8], byte: u8) -> impl Iterator<Item = (usize, &[u8])> {
    let blocks = memory.chunks(BLOCK).enumerate();
    blocks.filter_map(move |(number, block)| block.contains(&byte).then_some((number * BLOCK, block)))
}

/// All of them, after what else was sent.
pub(crate) fn frames_keep_coming_in_order(rig: &mut Rig) {
    for round in 0..5 {
        let numbers = 20 * round..20 * (round + 1);
        numbers
            .clone()
            .for_each(|number| rig.wire.send(&frame::numbered(number)));
        for number in numbers {
            let got = rig.pair().receive(wait::SOON);
            let got = got.unwrap_or_else(|| panic!("frame {number} of 100 does not arrive"));
            assert_eq!(
                frame::number_of(&got.frame),
                Some(number),
                "the next of 100 frames"
            );
        }
    }
}
