//! A wire that loses, doubles and reorders frames, and a switch at its end that takes VLAN tags off.
//!
//! ```text
//!   near namespace        the wire's namespace                         peer namespace
//!   nic0 ═══════════ mid0 ── threads of this process ─┬─ mid1 ═══════ wire0      untagged frames
//!                                                     └─ mid5 ═══════ wire5      frames of VLAN 5, without their tag
//! ```
//!
//! What netem and a VLAN interface would do, of which many kernels have neither; and it can count. Frames go through
//! packet sockets with PACKET_VNET_HDR (packet(7)), so that a checksum that the sender left to the hardware arrives
//! as unfinished as it was sent, as on a veth without anything between. The NIC and the peer's ends have `tso off`, so
//! that the kernel cuts a GSO packet before it is on the wire. No segment may be longer than a frame: `longest_bytes`
//! tells.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{NetNs, Noise, PacketPort, VethPair};

/// Length of the header before each frame: `struct virtio_net_hdr` (`linux/virtio_net.h`), in the byte order of the
/// host.
const HEADER: usize = 10;
/// In its first byte: the checksum is partial, from byte 6 on follow where it starts and where it goes.
const NEEDS_CSUM: u8 = 1;
const LONGEST: usize = 65_536 + HEADER;
/// How long a frame is held back at most, when none comes that could overtake it.
const HELD: Duration = Duration::from_millis(3);
/// Frames that overtake one that is held back.
const OVERTAKERS: u32 = 3;
/// The VLAN behind `wire5`.
pub const VLAN: u16 = 5;

/// What a wire does to frames, each way: in thousandths of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Lost.
    pub lost: u64,
    /// Sent twice.
    pub doubled: u64,
    /// Overtaken by the next three.
    pub late: u64,
}

/// What it has done so far in one direction.
#[derive(Debug, Default)]
pub struct Tally {
    /// Frames that came.
    pub frames: AtomicU64,
    /// Frames that it lost.
    pub lost: AtomicU64,
    /// Frames that it sent twice.
    pub doubled: AtomicU64,
    /// Frames that it held back.
    pub late: AtomicU64,
    /// Frames whose checksum was left to the hardware.
    pub unfinished: AtomicU64,
    /// Length of the longest frame.
    pub longest_bytes: AtomicU64,
    /// Frames that the next interface did not take.
    pub refused: AtomicU64,
}

struct Shared {
    stop: AtomicBool,
    faults: [AtomicU64; 3],
    from_nic: Tally,
    to_nic: Tally,
}

/// A bad wire, and the two ends that it joins. Removed on drop.
#[must_use]
pub struct BadWire {
    /// `near` is the daemon's namespace, `far` the wire's own.
    pub veth: VethPair,
    /// The device at the other end.
    pub peer: NetNs,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl BadWire {
    /// The peer's interface for untagged frames.
    pub const WIRE: &str = "wire0";
    /// The peer's interface for those of [`VLAN`].
    pub const TAGGED: &str = "wire5";

    /// One without faults for now. The NIC has `queues` queues.
    ///
    /// # Panics
    /// If namespaces or interfaces cannot be made.
    pub fn new(queues: u32) -> Self {
        let veth = VethPair::with(queues, 1500);
        // Unlike elsewhere in these tests: unfinished checksums stay so.
        veth.far.run("ethtool", &["-K", VethPair::WIRE, "tx", "on"]);
        veth.carry_no_gso_packets();
        let peer = NetNs::new("peer");
        for (middle, end) in [("mid1", Self::WIRE), ("mid5", Self::TAGGED)] {
            join(&veth.far, middle, &peer, end);
        }
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            faults: Default::default(),
            from_nic: Tally::default(),
            to_nic: Tally::default(),
        });
        let routes: [(&str, &[&str], Option<u16>); 3] = [
            (VethPair::WIRE, &["mid1", "mid5"], None),
            ("mid1", &[VethPair::WIRE], None),
            ("mid5", &[VethPair::WIRE], Some(VLAN)),
        ];
        let threads = routes.into_iter().enumerate().map(|(at, (from, to, tag))| {
            let lane = Lane {
                input: PacketPort::open_to_read_with_header(&veth.far, from),
                outputs: to
                    .iter()
                    .map(|name| PacketPort::open_with_header(&veth.far, name))
                    .collect(),
                tag,
                from_nic: at == 0,
                random: Noise::new(0x9e37_79b9_7f4a_7c15 ^ at as u64),
                held: None,
                shared: Arc::clone(&shared),
            };
            std::thread::spawn(move || lane.run())
        });
        let threads = threads.collect();
        Self {
            veth,
            peer,
            shared,
            threads,
        }
    }

    /// What it does to frames from now on.
    pub fn set(&self, faults: Faults) {
        for (kept, new) in self
            .shared
            .faults
            .iter()
            .zip([faults.lost, faults.doubled, faults.late])
        {
            kept.store(new, Relaxed);
        }
    }

    /// Of frames from the NIC to the peer.
    pub fn from_nic(&self) -> &Tally {
        &self.shared.from_nic
    }

    /// Of frames from the peer to the NIC.
    pub fn to_nic(&self) -> &Tally {
        &self.shared.to_nic
    }
}

impl Drop for BadWire {
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn join(wire: &NetNs, middle: &str, peer: &NetNs, end: &str) {
    let peer_name = peer.name();
    wire.ip(&["link add", middle, "type veth peer name", end, "netns", peer_name]);
    wire.ip(&["link", "set", middle, "arp", "off", "up"]);
    peer.run("ethtool", &["-K", end, "tso", "off"]);
    peer.ip(&["link", "set", end, "up"]);
}

/// One direction between one interface and the one or two behind the wire.
struct Lane {
    input: PacketPort,
    outputs: Vec<PacketPort>,
    /// The tag that frames of this input get.
    tag: Option<u16>,
    from_nic: bool,
    random: Noise,
    held: Option<Held>,
    shared: Arc<Shared>,
}

/// A frame that is held back, with its header.
struct Held {
    frame: Vec<u8>,
    output: usize,
    since: Instant,
    overtakers: u32,
}

impl Lane {
    fn run(mut self) {
        let mut buffer = vec![0; LONGEST];
        while !self.shared.stop.load(Relaxed) {
            if let Some(held) = &self.held
                && (held.overtakers >= OVERTAKERS || held.since.elapsed() > HELD)
            {
                let held = self.held.take().expect("just seen");
                self.send(held.output, &held.frame);
            }
            // Ends after a few milliseconds without a frame, or when the interface goes down.
            let Ok((length, tag)) = self.input.read_into(&mut buffer, HELD) else {
                continue;
            };
            self.forward(buffer[..length].to_vec(), tag);
        }
    }

    fn tally(&self) -> &Tally {
        if self.from_nic {
            &self.shared.from_nic
        } else {
            &self.shared.to_nic
        }
    }

    /// True in `thousandths` of all cases.
    fn happens(&mut self, fault: usize) -> bool {
        self.random.below(1000) < self.shared.faults[fault].load(Relaxed)
    }

    fn forward(&mut self, mut frame: Vec<u8>, came_with: Option<[u8; 4]>) {
        let tag_bytes = if came_with.is_some() { 4 } else { 0 };
        let tally = self.tally();
        tally.frames.fetch_add(1, Relaxed);
        let length = (frame.len() - HEADER + tag_bytes) as u64;
        tally.longest_bytes.fetch_max(length, Relaxed);
        tally
            .unfinished
            .fetch_add(u64::from(frame[0] & NEEDS_CSUM), Relaxed);
        // The socket has taken the tag off, which is what the switch does; frames of other VLANs have no way to go.
        let output = match came_with {
            None => 0,
            Some([_, _, high, low]) if u16::from_be_bytes([high, low]) & 0xfff == VLAN => 1,
            Some(_) => return,
        };
        if output >= self.outputs.len() {
            return;
        }
        if let Some(tag) = self.tag {
            insert_tag(&mut frame, tag);
        }
        if self.happens(0) {
            self.tally().lost.fetch_add(1, Relaxed);
            return;
        }
        if self.held.is_none() && self.happens(2) {
            self.tally().late.fetch_add(1, Relaxed);
            self.held = Some(Held {
                frame,
                output,
                since: Instant::now(),
                overtakers: 0,
            });
            return;
        }
        self.send(output, &frame);
        if self.happens(1) {
            self.tally().doubled.fetch_add(1, Relaxed);
            self.send(output, &frame);
        }
        if let Some(held) = &mut self.held {
            held.overtakers += 1;
        }
    }

    fn send(&self, output: usize, frame: &[u8]) {
        if self.outputs[output].try_send(frame).is_err() {
            self.tally().refused.fetch_add(1, Relaxed);
        }
    }
}

/// Puts an 802.1Q tag into a frame that has a header before it.
fn insert_tag(frame: &mut Vec<u8>, vlan: u16) {
    let [high, low] = vlan.to_be_bytes();
    frame.splice(HEADER + 12..HEADER + 12, [0x81, 0x00, high, low]);
    if frame[0] & NEEDS_CSUM != 0 {
        let start = u16::from_ne_bytes([frame[6], frame[7]]) + 4;
        frame[6..8].copy_from_slice(&start.to_ne_bytes());
    }
}
