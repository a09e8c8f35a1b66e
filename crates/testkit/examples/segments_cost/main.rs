//! What a segment of a guest's GSO packet costs the daemon on a veth pair: built whole, or by reference (`--segments`),
//! in copy and in direct placement.
//!
//! `cargo run --release -p testkit --example segments_cost -- [SIZE [ROUNDS]]`, as root; VHOST_AF_XDP_BIN names a
//! daemon that was built for release.
//!
//! A driver in this process hands over the same TCP GSO packet of 65,160 bytes (or the next less that SIZE divides)
//! again and again; on the wire is a packet socket that nobody reads. CPU time is that of all threads of the daemon, in
//! which the kernel sends, too. The contenders take turns within seconds. Prints median, least and most of the rounds,
//! in ns a segment, and what share of the segments was sent by reference.

use std::fs;

use testkit::daemon::{Mode, Placement};
use testkit::driver::{F_HOST_ALL, HEADER};
use testkit::gso_packet::{GsoPacket, Ip};
use testkit::{DriverConfig, Rig, Serve, VethPair};
use virtqueue::GuestAddr;
use virtqueue::driver::Buffer;

/// Most payload of a GSO packet.
const PAYLOAD_MAX: usize = 65_160;
/// GSO packets of a round, and those that are under way at most.
const EACH_ROUND: usize = 2000;
const UNDER_WAY: usize = 40;

struct Contender {
    name: String,
    rig: Rig,
    /// Where the GSO packet is, header in front, and its bytes with it.
    frame: (GuestAddr, u32),
    ns: Vec<f64>,
}

impl Contender {
    fn new((placement, segments): (Placement, &str), size: u16) -> Self {
        let serve = Serve::interface(VethPair::NIC).by_root().placement(placement);
        let serve = serve.mode(Mode::Native).with("--segments", segments);
        let mtu = if size > 1448 { 9000 } else { 1500 };
        let mut rig = Rig::with(VethPair::with(1, mtu), &serve, &DriverConfig::with(F_HOST_ALL));
        let frame = GsoPacket::tcp(Ip::V4(0), PAYLOAD_MAX / usize::from(size) * usize::from(size));
        let mut bytes = vec![0; HEADER];
        bytes[..10].copy_from_slice(&frame.request(size));
        bytes.extend(frame.bytes());
        let ram = std::sync::Arc::clone(rig.pair().ram());
        let addr = ram.alloc(bytes.len() as u64, 4096).expect("room");
        ram.write(addr, &bytes);
        Self {
            name: format!("{placement:?} {segments}"),
            rig,
            frame: (addr, bytes.len() as u32),
            ns: Vec::new(),
        }
    }

    fn round(&mut self) {
        let pid = self.rig.daemon.process().pid();
        let segments = |rig: &Rig| rig.daemon.counter("from_guest_frames");
        let before = (cpu_ns(pid), segments(&self.rig));
        let pair = self.rig.pair();
        for _ in 0..EACH_ROUND {
            pair.send_buffers(&[Buffer::readable(self.frame.0, self.frame.1)], false);
            while pair.from_guest.driver.in_flight() > UNDER_WAY {
                pair.reap_sent();
                std::thread::yield_now();
            }
        }
        pair.await_sent();
        let sent = segments(&self.rig) - before.1;
        self.ns.push((cpu_ns(pid) - before.0) as f64 / sent as f64);
    }

    fn report(&mut self) {
        self.ns.sort_by(f64::total_cmp);
        let (median, least, most) = (self.ns[self.ns.len() / 2], self.ns[0], self.ns[self.ns.len() - 1]);
        let counter = |name| self.rig.daemon.counter(name) as f64;
        let referred = counter("from_guest_referred_segments") / counter("from_guest_frames");
        println!(
            "{:20} {median:6.0} ns a segment ({least:.0} to {most:.0}), {:.0} % by reference",
            self.name,
            referred * 100.0
        );
    }
}

/// CPU time of a process, all threads.
fn cpu_ns(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
    threads
        .map(|thread| {
            let path = thread.expect("readable").path().join("schedstat");
            let text = fs::read_to_string(path).expect("a kernel with schedstat");
            let spent = text.split(' ').next().expect("three numbers");
            spent.parse::<u64>().expect("a number")
        })
        .sum()
}

fn main() {
    let mut numbers = std::env::args()
        .skip(1)
        .map(|text| text.parse::<u16>().expect("a number"));
    let (size, rounds) = (numbers.next().unwrap_or(1448), numbers.next().unwrap_or(7));
    let ways = [
        (Placement::Copy, "whole"),
        (Placement::Copy, "by-reference"),
        (Placement::Direct, "whole"),
        (Placement::Direct, "by-reference"),
    ];
    // Direct placement refuses an MTU that a chunk does not hold.
    let ways = &ways[..if size > 1448 { 2 } else { 4 }];
    let mut contenders: Vec<_> = ways.iter().map(|&way| Contender::new(way, size)).collect();
    for _ in 0..rounds {
        contenders.iter_mut().for_each(Contender::round);
    }
    contenders.iter_mut().for_each(Contender::report);
}
