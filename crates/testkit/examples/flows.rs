//! Sends UDP frames of many flows out of an interface of this network namespace, in turn, until it is ended.
//!
//! ```text
//! flows INTERFACE BYTES FLOWS PAUSE_US     frames of so many bytes without FCS; a pause after each 64 of them
//! ```
//!
//! The kernel chooses the queue of a frame by a hash of its addresses and ports (`skb_tx_hash`, net/core/dev.c), as a
//! NIC does for frames that come (RSS). A veth delivers to the queue of that number at its other end (`veth_xmit`,
//! drivers/net/veth.c).

use std::thread::sleep;
use std::time::Duration;

use testkit::PacketPort;

/// Frames between two pauses.
const BURST: usize = 64;
/// Port of the first flow's source; of the next one the next.
const FIRST_PORT: u16 = 10_000;
/// Ethernet, IPv4 from 198.18.0.1 to 198.18.0.2 (RFC 2544) without options, UDP to port 9 (discard) without checksum.
const HEADERS: [u8; 42] = [
    2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, // to, from, IPv4
    0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2, //
    0, 0, 0, 9, 0, 0, 0, 0,
];

/// A frame of a flow.
fn frame(len: u16, flow: u16) -> Vec<u8> {
    let mut frame = HEADERS.to_vec();
    frame.resize(len.into(), 0);
    frame[16..18].copy_from_slice(&(len - 14).to_be_bytes());
    let mut sum: u32 = frame[14..34]
        .chunks(2)
        .map(|word| u32::from(word[0]) << 8 | u32::from(word[1]))
        .sum();
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    frame[24..26].copy_from_slice(&(!sum as u16).to_be_bytes());
    frame[34..36].copy_from_slice(&(FIRST_PORT + flow).to_be_bytes());
    frame[38..40].copy_from_slice(&(len - 34).to_be_bytes());
    frame
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [interface, numbers @ ..] = arguments.as_slice() else {
        panic!("flows INTERFACE BYTES FLOWS PAUSE_US");
    };
    let numbers: Vec<u16> = numbers.iter().filter_map(|text| text.parse().ok()).collect();
    let [len @ 60..=9000, flows @ 1..=50_000, pause_us] = numbers[..] else {
        panic!("flows: 60 to 9000 bytes, 1 to 50000 flows, a pause of up to 65535 us: {arguments:?}");
    };
    let frames: Vec<_> = (0..flows).map(|flow| frame(len, flow)).collect();
    let port = PacketPort::open_here(interface);
    let mut sent = 0;
    for frame in frames.iter().cycle() {
        // What finds no room is lost, as on any wire.
        let _ = port.try_send(frame);
        sent += 1;
        if sent % BURST == 0 && pause_us > 0 {
            sleep(Duration::from_micros(pause_us.into()));
        }
    }
}
