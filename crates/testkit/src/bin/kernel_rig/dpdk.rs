//! A guest that is DPDK's: testpmd on virtio-user, its memory in huge pages, sends every frame back with its addresses
//! swapped. A driver that polls, keeps its buffers in another order than ours does, and posts larger ones.
//!
//! Frames of all lengths come back byte by byte, and many in a row in order. Then such a guest goes, and another one
//! comes, with packed rings: the same holds for that.

use std::time::Duration;

use testkit::testpmd::Testpmd;
use testkit::{Daemon, PacketPort, VethPair, Wire, frame, wait};

use crate::kit::{self, PLAIN, Seen, TAGGED};
use crate::setting::Setting;

/// Options of virtio-user: of one guest, and of the next one.
const GUESTS: [&str; 2] = [
    "packed_vq=0,mrg_rxbuf=1,in_order=0",
    "packed_vq=1,mrg_rxbuf=1,in_order=0",
];
/// Frames in a row, so many times: more than there are buffers.
const BATCH: u32 = 32;
const BATCHES: u32 = 20;

/// Goes through it; panics if it does not go well.
pub(crate) fn run(wire: &Wire, setting: Setting) -> Seen {
    let veth = wire.lay();
    let daemon = Daemon::start(&veth.near, &setting.serve());
    let port = PacketPort::open(&veth.far, VethPair::WIRE);
    let seen = GUESTS.map(|options| {
        let mut guest = Testpmd::start(&daemon.socket(), options, "macswap");
        await_return(&port, &daemon);
        let seen = Seen::of(&daemon);
        assert_eq!(
            seen.mode,
            setting.expected(wire.driver()),
            "{options}: {}",
            seen.note
        );
        frames_come_back(&port);
        guest.process().check();
        seen
    });
    kit::assert_no_strays(&daemon);
    let [first, _] = seen;
    first
}

/// Sends until a frame comes back, and then what else was sent has, too.
fn await_return(port: &PacketPort, daemon: &Daemon) {
    let first = frame::plain(60, 0xff);
    let up = wait::until(3 * wait::SOON, || {
        let _ = port.try_send(&first);
        port.receive(Duration::from_millis(200)).is_some()
    });
    assert!(up, "nothing comes back: {:#}\n{}", daemon.status(), daemon.said());
    let last = frame::last();
    port.send(&last);
    let _ = port.receive_before(&frame::swapped(&last));
}

fn frames_come_back(port: &PacketPort) {
    let plain = PLAIN.map(|length| frame::plain(length, length as u8));
    let tagged = TAGGED.map(|length| frame::tagged(length, 42, length as u8));
    for sent in plain.iter().chain(&tagged) {
        port.send(sent);
        let got = port.receive(wait::SOON);
        let got = got.unwrap_or_else(|| panic!("a frame of {} bytes does not come back", sent.len()));
        frame::assert_same(&got, &frame::swapped(sent));
    }
    for batch in 0..BATCHES {
        let numbers = batch * BATCH..(batch + 1) * BATCH;
        numbers
            .clone()
            .for_each(|number| port.send(&frame::numbered(number)));
        for number in numbers {
            let got = port.receive(wait::SOON);
            let got = got.unwrap_or_else(|| panic!("frame {number} does not come back"));
            frame::assert_same(&got, &frame::swapped(&frame::numbered(number)));
        }
    }
}
