//! A guest takes its queues back while frames come, as when its driver ends: once the daemon has answered, its memory
//! is its own. It writes to every receive buffer that was with the NIC, and finds it so later.
//!
//! The kernel takes the memory of a closed socket from the NIC some 20 ms later, and frames come all that time. Between
//! them come such as are too long for the MTU: the NIC has written them when the program drops them, and the driver
//! keeps their buffers while later ones are used. Those come back with nothing in them, before the answer does, and are
//! written to at once.
//!
//! The guest also writes to all that is with the NIC meanwhile. What the kernel reads from there is for nobody: a frame
//! that it gave to the host's stack then could be the guest's, and would seem to come from the wire.

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use testkit::{Driver, PacketPort, Pair, Rig, Traffic, VethPair, Wire, assert_soon, frame};
use virtqueue::driver::{Buffer, GuestRam};

use crate::kit::{self, Seen};
use crate::setting::Setting;

const PACE: Duration = Duration::from_micros(500);
const ROUNDS: usize = 5;
/// Frames that arrive before each.
const STEADY: usize = 20;
/// Length of frames that fit what the NIC may write, and not the MTU.
const TOO_LONG: usize = 1530;
/// Several times as long as the kernel takes.
const AFTERWARDS: Duration = Duration::from_millis(200);
/// What the guest writes, which no frame has so often.
const MINE: u8 = 0xd7;
const RUN: usize = 32;

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire, setting: Setting) -> Seen {
    let (mut rig, _program) = kit::start(wire, setting);
    let guards = kit::post(&mut rig, setting.buffer(wire.driver()));
    rig.await_to_guest();
    let seen = Seen::of(&rig.daemon);
    assert_eq!(seen.mode, setting.expected(wire.driver()), "{}", seen.note);
    let (driver, daemon, wire, veth) = rig.into_parts();
    veth.far
        .ip(&["link", "set", VethPair::WIRE, "mtu", kit::LONG_MTU]);
    let disturber = PacketPort::open(&veth.far, VethPair::WIRE);
    let disturb = || drop(disturber.try_send(&frame::plain(TOO_LONG, 0)));
    let host = PacketPort::open(&veth.near, VethPair::NIC);
    let traffic = Traffic::start(driver, wire, PACE);
    let (mut empty, mut passed) = (0, 0);
    for round in 0..ROUNDS {
        let since = Instant::now();
        let arrive = || {
            disturb();
            traffic.flows()[0].arrived_since(since) >= STEADY
        };
        assert_soon!(arrive(), "round {round}: {:#}", daemon.status());
        (0..3).for_each(|_| disturb());
        empty += traffic.with_guest(|guest| take_back(guest, round));
        while let Some(frame) = host.receive(Duration::ZERO) {
            passed += 1;
            let is_mine = frame.windows(RUN).any(|bytes| bytes == [MINE; RUN]);
            assert!(!is_mine, "round {round}: the host got what the guest wrote");
        }
    }
    println!("taken back: {empty} buffers came back empty; the host got {passed} frames");
    // Where the kernel copies it takes a buffer for a frame only once that is to be delivered.
    assert!(empty > 0 || seen.mode != "zero-copy", "no buffer was overtaken");
    let mut rig = Rig::after(traffic, daemon, veth);
    let _ = rig.flush_to_guest();
    kit::frames_keep_coming_in_order(&mut rig);
    kit::assert_untouched(&mut rig, &guards);
    kit::assert_no_strays(&rig.daemon);
    seen
}

/// Returns how many buffers came back empty.
fn take_back(guest: &mut Driver, round: usize) -> usize {
    // They come back before the answer does.
    let mut empty: Vec<Buffer> = Vec::new();
    let ram = Arc::clone(guest.ram());
    let mut seize = |pair: &mut Pair| {
        while let Some((mut buffers, bytes)) = pair.take_chain() {
            if bytes.is_empty() {
                buffers.iter().for_each(|buffer| make_mine(&ram, buffer));
                empty.append(&mut buffers);
            } else {
                pair.post_buffers(buffers);
            }
        }
        for buffer in pair.posted() {
            make_mine(&ram, buffer);
        }
    };
    guest.stop_vring_while(0, &mut seize).expect("taken back");
    guest.stop_vring(1).expect("taken back");
    let pair = &mut guest.pairs[0];
    seize(pair);
    let posted: Vec<Buffer> = pair.posted().copied().collect();
    posted.iter().for_each(|buffer| make_mine(&ram, buffer));
    sleep(AFTERWARDS);
    for buffer in posted.iter().chain(&empty) {
        let found = ram.read_vec(buffer.addr, buffer.len as usize);
        let is_mine = found == vec![MINE; found.len()];
        assert!(is_mine, "round {round}: written to after it was taken back");
    }
    let count = empty.len();
    empty
        .into_iter()
        .for_each(|buffer| pair.post_buffers(vec![buffer]));
    pair.to_guest.publish();
    guest.start_pair(0).expect("started again");
    count
}

fn make_mine(ram: &GuestRam, buffer: &Buffer) {
    ram.write(buffer.addr, &vec![MINE; buffer.len as usize]);
}
