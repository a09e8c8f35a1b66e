//! Receive buffers at the borders of a guest's memory: of regions, of huge pages, between them and small ones; in
//! regions that begin and end amidst a huge page; one that is posted many times, and such as overlap. Each comes back
//! once, and nothing beside them changes, also while the memory table is said anew.

use std::sync::Arc;
use std::time::Instant;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use testkit::Daemon;
use testkit::{Driver, Rig, Wire, driver, frame, wait};
use virtqueue::driver::{Buffer, GuestRam};
use virtqueue::{GuestAddr, Region};

use crate::kit::{self, Seen};
use crate::setting::Setting;

const MIB: u64 = 1 << 20;
/// Where regions begin for the guest, how long they are, where they begin in their file, and whether that is of huge
/// pages.
const REGIONS: [(u64, u64, u64, bool); 4] = [
    (0, 6 * MIB, 0, true),
    (16 * MIB, 3 * MIB, 0, true),
    (32 * MIB, 2 * MIB, MIB, true),
    (48 * MIB, 2 * MIB, 0, false),
];
/// Borders, and how much memory is before each and behind it.
const BORDERS: [(u64, bool, bool); 10] = [
    (2 * MIB, true, true),
    (4 * MIB, true, true),
    (6 * MIB, true, false),
    (16 * MIB, false, true),
    (18 * MIB, true, true),
    (19 * MIB, true, false),
    (32 * MIB, false, true),
    (33 * MIB, true, true),
    (34 * MIB, true, false),
    (48 * MIB, false, true),
];
/// Where buffers begin or end, bytes from a border: on it, and so far behind that a chunk with a frame's place in it
/// may begin there on igb, and on virtio_net.
const SHIFTS: [u64; 9] = [0, 1, 12, 2035, 2036, 2037, 2547, 2548, 2549];
/// What is looked at before a border and behind it, bytes.
const AROUND: u64 = 16 << 10;
const UNTOUCHED: u8 = 0x3c;
/// Buffers elsewhere: so many that a driver always has enough of them to take some.
const OTHERS: usize = 64;
/// How often the same one is posted, or one that overlaps with the last one.
const OFTEN: u64 = 24;

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire, setting: Setting) -> Seen {
    let veth = wire.lay();
    let daemon = Daemon::start(&veth.near, &setting.serve());
    let guest = guest(&daemon, setting);
    let mut rig = Rig::of(veth, daemon, guest);
    let len = setting.buffer(wire.driver());
    rig.pair().post(OTHERS, &[len]);
    rig.await_to_guest();
    let seen = Seen::of(&rig.daemon);
    assert_eq!(seen.mode, setting.expected(wire.driver()), "{}", seen.note);
    for shift in SHIFTS {
        for before in [true, false] {
            let buffers = at_borders(len, shift, before);
            come_back(&mut rig, &buffers, &format!("{shift} bytes, before: {before}"));
        }
    }
    let at = |offset: u64| Buffer::writable(GuestAddr(5 * MIB + offset), len);
    come_back(
        &mut rig,
        &(0..OFTEN).map(|_| at(0)).collect::<Vec<_>>(),
        "the same",
    );
    come_back(
        &mut rig,
        &(0..OFTEN).map(|number| at(64 * number)).collect::<Vec<_>>(),
        "overlapping",
    );
    kit::assert_no_strays(&rig.daemon);
    println!("borders: {} frames bounced", rig.daemon.counter("bounced_frames"));
    seen
}

fn guest(daemon: &Daemon, setting: Setting) -> Driver {
    let region = |(start, len, file_offset, is_huge): (u64, u64, u64, bool)| {
        let huge = match is_huge {
            true => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            false => MemfdFlags::empty(),
        };
        let file = memfd_create("guest", MemfdFlags::CLOEXEC | huge).expect("a descriptor is left");
        ftruncate(&file, (file_offset + len).next_multiple_of(2 * MIB)).expect("memory is left");
        Region {
            guest_addr: GuestAddr(start),
            user_addr: 0,
            len,
            file,
            file_offset,
        }
    };
    let ram = GuestRam::from_regions(REGIONS.map(region).into()).expect("memory is left");
    let socket = driver::connect(&daemon.socket());
    Driver::start_with(socket, &setting.guest(), Arc::new(ram)).expect("accepted")
}

/// One at each border, which ends so far before it or begins so far behind, or, if it has no such side, on the other.
fn at_borders(len: u32, shift: u64, before: bool) -> Vec<Buffer> {
    let place = |(border, has_before, has_behind): (u64, bool, bool)| {
        let start = match (before && has_before) || !has_behind {
            // Also across it, where there is memory behind.
            true if has_behind && shift < 1024 => border - u64::from(len) + shift,
            true => border - u64::from(len) - shift,
            false => border + shift,
        };
        Buffer::writable(GuestAddr(start), len)
    };
    BORDERS.map(place).into()
}

/// Posts them, and sends frames until each has come back, once with a frame in it that was sent.
fn come_back(rig: &mut Rig, buffers: &[Buffer], what: &str) {
    let ram = Arc::clone(rig.pair().ram());
    for around in surroundings(buffers) {
        ram.write(GuestAddr(around.0), &vec![UNTOUCHED; around.1]);
    }
    let pair = rig.pair();
    buffers.iter().for_each(|&buffer| pair.post_buffers(vec![buffer]));
    pair.to_guest.publish();
    rig.driver.set_memory().expect("said anew");
    let mut out = buffers.to_vec();
    let deadline = Instant::now() + wait::SOON;
    let mut number = 0;
    while !out.is_empty() {
        assert!(Instant::now() < deadline, "{what}: not back: {out:?}");
        number += 1;
        rig.wire.send(&frame::plain(1514, number));
        wait::until(std::time::Duration::from_millis(20), || {
            let pair = rig.pair();
            let Some((chain, bytes)) = pair.take_chain() else {
                return false;
            };
            let [buffer] = chain[..] else { panic!("{chain:?}") };
            let known = out.iter().position(|other| *other == buffer);
            match known.filter(|_| !bytes.is_empty()) {
                Some(at) => drop(out.swap_remove(at)),
                // Overtaken by others when the lane was built anew.
                None => {
                    pair.post_buffers(chain);
                    pair.to_guest.publish();
                }
            }
            let whole = [0, driver::HEADER + 1514].contains(&bytes.len());
            assert!(whole, "{what}: {} bytes at {buffer:?}", bytes.len());
            true
        });
    }
    for (start, bytes) in surroundings(buffers) {
        let found = ram.read_vec(GuestAddr(start), bytes);
        for (at, byte) in (start..).zip(found) {
            let is_in = |buffer: &Buffer| {
                (buffer.addr.get()..buffer.addr.get() + u64::from(buffer.len)).contains(&at)
            };
            assert!(
                byte == UNTOUCHED || buffers.iter().any(is_in),
                "{what}: written to beside a buffer: {at:#x}"
            );
        }
    }
}

/// Memory around them: where it begins, and how long it is.
fn surroundings(buffers: &[Buffer]) -> Vec<(u64, usize)> {
    let around = |buffer: &Buffer| {
        let at = buffer.addr.get();
        let region = REGIONS
            .iter()
            .find(|region| (region.0..region.0 + region.1).contains(&at));
        let region = region.expect("in one");
        let start = at.saturating_sub(AROUND).max(region.0);
        let end = (at + AROUND).min(region.0 + region.1);
        (start, (end - start) as usize)
    };
    buffers.iter().map(around).collect()
}
