//! Who gets how much where several guests of a worker send more than there is room for: on the uplink's transmit ring,
//! and in the queue of a guest that takes no GSO packets.
//!
//! Two guests have their transmit queues full before the first frame leaves, and fill them up again. Who gets how much
//! is told by the order in which frames arrive, and by no clock: of what came between the usual guest's first frame and
//! its last one, how much is of whom.

use std::sync::Arc;

use rstest::rstest;
use testkit::driver::{F_HOST_ALL, HEADER};
use testkit::gso_packet::Ip;
use testkit::lan::{STRANGER, file, frame, mac};
use testkit::{
    Daemon, Driver, DriverConfig, GsoPacket, Layout, NetNs, PacketPort, Serve, VethPair, require, wait,
};
use virtqueue::GuestAddr;
use virtqueue::driver::Buffer;

/// Entries of the queues.
const QUEUE: usize = 1024;
/// Queues are filled up when so many frames have arrived.
const FILL: usize = 16;
/// The guest that sends what everybody does, and the other one.
const USUAL: usize = 0;
const NOISY: usize = 1;
/// Who gets it, where it is a guest.
const RECEIVER: usize = 2;

/// What a guest sends, over and over.
struct Flood {
    header: [u8; HEADER],
    frame: Vec<u8>,
    /// Bytes of each descriptor.
    piece: usize,
}

impl Flood {
    /// Frames to the LAN that ask for nothing, of so many bytes.
    fn frames(bytes: usize) -> Self {
        Self {
            header: [0; HEADER],
            frame: frame(STRANGER, mac(USUAL), bytes, 1),
            piece: usize::MAX,
        }
    }

    /// The same of another guest.
    fn of(&self, guest: usize) -> Self {
        let mut frame = self.frame.clone();
        frame[6..12].copy_from_slice(&mac(guest));
        Self { frame, ..*self }
    }

    /// TCP in so many bytes of payload, to be cut into segments of `size`.
    fn packets(to: [u8; 6], from: usize, payload: usize, size: u16) -> Self {
        let packet = GsoPacket::tcp(Ip::V4(0), payload);
        let mut frame = packet.bytes();
        frame[..6].copy_from_slice(&to);
        frame[6..12].copy_from_slice(&mac(from));
        let header = [&packet.request(size)[..], &[0; 2]].concat();
        Self {
            header: header.try_into().expect("its length"),
            frame,
            piece: usize::MAX,
        }
    }

    /// Puts it into a guest's memory: the buffers of a chain.
    fn lay(&self, guest: &Driver) -> Vec<Buffer> {
        let bytes = [&self.header[..], &self.frame].concat();
        let ram = Arc::clone(guest.ram());
        let start = ram.alloc(bytes.len() as u64, 64).expect("memory is left");
        ram.write(start, &bytes);
        let starts = (0..bytes.len()).step_by(self.piece.min(bytes.len()));
        let buffer = |at: usize| {
            let len = self.piece.min(bytes.len() - at);
            Buffer::readable(GuestAddr(start.get() + at as u64), len as u32)
        };
        starts.map(buffer).collect()
    }
}

/// Fills a guest's transmit queue with that, again and again; it is not shown yet.
fn fill(guest: &mut Driver, buffers: &[Buffer]) {
    let queue = &mut guest.pairs[0].from_guest.driver;
    while queue.take_used().is_some() {}
    loop {
        let added = match buffers.len() {
            1 => queue.add(buffers),
            _ => queue.add_indirect(buffers),
        };
        if added.is_none() {
            return;
        }
    }
}

fn config(features: u64, queue: usize) -> DriverConfig {
    DriverConfig {
        queue_size: queue as u32,
        regions: vec![(GuestAddr(0), 64 << 20)],
        ..DriverConfig::with(features)
    }
}

/// What came of each between the usual guest's first frame and its last one.
#[derive(Clone, Copy, Debug, Default)]
struct Came {
    frames: [usize; 2],
    bytes: [usize; 2],
}

impl Came {
    /// All fill their queues, and begin; those behind the first two send what the usual one does. `next`: what arrives
    /// next, until so many of the usual guest's have: its source, and its length.
    fn between(
        guests: &mut [Driver],
        [usual, noisy]: [&Flood; 2],
        most: usize,
        mut next: impl FnMut() -> Option<([u8; 6], usize)>,
    ) -> Self {
        let chains: Vec<_> = (guests.iter().enumerate())
            .map(|(at, guest)| match at {
                NOISY => noisy.lay(guest),
                _ => usual.of(at).lay(guest),
            })
            .collect();
        let fill_all = |guests: &mut [Driver]| {
            for (guest, chain) in guests.iter_mut().zip(&chains) {
                fill(guest, chain);
            }
            // The usual one last: the noisy one has nothing to lose by being the first.
            for guest in guests.iter_mut().rev() {
                guest.pairs[0].from_guest.publish();
            }
        };
        fill_all(guests);
        let (mut came, mut all) = (Self::default(), 0);
        while came.frames[USUAL] < most {
            all += 1;
            if all % FILL == 0 {
                fill_all(guests);
            }
            let (source, len) = next().unwrap_or_else(|| panic!("no more comes: {came:?}"));
            let from = [USUAL, NOISY].into_iter().find(|&from| source == mac(from));
            if let Some(from) = from
                && (from == USUAL || came.frames[USUAL] > 0)
            {
                came.frames[from] += 1;
                came.bytes[from] += len;
            }
        }
        println!("{came:?}");
        came
    }
}

/// The noisy guest has no more than so many times what the usual one has.
#[track_caller]
fn assert_share([usual, noisy]: [usize; 2], most: f64) {
    let times = noisy as f64 / usual as f64;
    assert!(times <= most, "{noisy} of the noisy guest, {usual} of the other");
}

/// One NIC queue that guests share, and nobody beside them.
struct Shared {
    guests: Vec<Driver>,
    daemon: Daemon,
    wire: PacketPort,
    queue: usize,
    _veth: VethPair,
}

impl Shared {
    /// So many guests, with queues of so many entries; further keys of the network.
    fn new(guests: usize, queue: usize, keys: &str) -> Self {
        let veth = VethPair::new();
        veth.carry_no_gso_packets();
        let text = file(Some(VethPair::NIC), &vec![""; guests]);
        let text = text.replacen("uplink", &format!("host = false\n{keys}\nuplink"), 1);
        let text = format!("[daemon]\nworkers = 1\n{text}");
        let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VethPair::NIC], &text);
        let guests: Vec<_> = (0..guests)
            .map(|at| connect(&daemon, at, F_HOST_ALL, queue))
            .collect();
        Self {
            guests,
            daemon,
            wire: PacketPort::open(&veth.far, VethPair::WIRE),
            queue,
            _veth: veth,
        }
    }

    /// Until most of what the usual guest had in its queue at first has come.
    fn compete(&mut self, floods: [&Flood; 2]) -> Came {
        let mut frame = vec![0; 2048];
        let came = Came::between(&mut self.guests, floods, self.queue / 4 * 3, || {
            let (len, _) = self.wire.read_into(&mut frame, wait::SOON).ok()?;
            Some((frame[6..12].try_into().ok()?, len))
        });
        self.daemon.process().check();
        (0..self.guests.len()).for_each(|at| assert_stays(&self.daemon, at));
        came
    }
}

/// A guest did nothing wrong.
#[track_caller]
fn assert_stays(daemon: &Daemon, guest: usize) {
    let closed = daemon.port(guest)["last_closed"].clone();
    assert!(closed.is_null(), "guest {guest}: {closed}");
}

/// The guest of that number. Guests have their turns in the order in which they connect.
fn connect(daemon: &Daemon, number: usize, features: u64, queue: usize) -> Driver {
    let path = daemon.path(&format!("vm{number}.sock"));
    let guest = Driver::connect(&path, &config(features, queue)).expect("accepted");
    daemon.await_port(number, "a lane runs", |port| port["lanes"][0]["running"] == true);
    guest
}

#[rstest]
fn uplink_is_shared_by_segments(
    #[values((2000, 1), (65_000, 32), (65_000, 1448))] (payload, size): (usize, u16),
    #[values("", "mode = \"tap\"")] mode: &str,
) {
    require!(Root);
    let mut shared = Shared::new(2, QUEUE, mode);
    let usual = Flood::frames(1514);
    let noisy = Flood::packets(STRANGER, NOISY, payload, size);
    let came = shared.compete([&usual, &noisy]);
    assert_share(came.frames, 1.5);
    assert_share(came.bytes, 1.5);
    assert!(came.frames[NOISY] > QUEUE / 8, "it has its share, too");
}

/// Four guests, each of which would fill half of the memory for frames in a turn: most find it full, and none always.
#[rstest]
fn ring_without_room_is_shared_by_segments(
    #[values((2000, 1), (65_000, 1448))] (payload, size): (usize, u16),
) {
    require!(Root);
    let mut shared = Shared::new(4, 16_384, "packet-memory = \"512KiB\"");
    let usual = Flood::frames(200);
    let noisy = Flood::packets(STRANGER, NOISY, payload, size);
    let came = shared.compete([&usual, &noisy]);
    assert_share(came.frames, 2.0);
    assert!(
        came.frames[NOISY] > came.frames[USUAL] / 4,
        "it has its share, too"
    );
    assert!(
        shared.daemon.counter("from_guest_waits") > 0,
        "there is always room"
    );
}

/// One frame of the noisy guest is as much work as many of the other's.
#[rstest]
fn uplink_is_shared_by_descriptors(#[values(2, 16)] piece: usize) {
    require!(Root);
    const BYTES: usize = 1514;
    let mut shared = Shared::new(2, 2 * QUEUE, "");
    let usual = Flood::frames(BYTES);
    let noisy = Flood {
        piece,
        ..Flood::frames(BYTES).of(NOISY)
    };
    let came = shared.compete([&usual, &noisy]);
    let descriptors_a_frame = (BYTES + HEADER).div_ceil(piece);
    assert_share(came.frames, 1.5 * 4.0 / descriptors_a_frame as f64);
    assert!(came.frames[NOISY] > 0, "it has its share, too");
}

/// Packets with more segments than may be are dropped, and take nothing from the other one.
#[rstest]
fn packets_of_64_kib_in_segments_of_one_byte_take_nothing_of_the_uplink() {
    require!(Root);
    let mut shared = Shared::new(2, QUEUE, "");
    let usual = Flood::frames(60);
    let noisy = Flood::packets(STRANGER, NOISY, 65_000, 1);
    let came = shared.compete([&usual, &noisy]);
    assert_eq!(came.frames[NOISY], 0);
    let dropped = "from_guest_too_many_segments";
    shared.daemon.await_counter(dropped, QUEUE as u64);
}

/// A guest takes no GSO packets of two others: neither keeps the other one's from being cut, whoever has its turn
/// behind that guest's.
#[rstest]
fn guest_without_tso_gets_packets_of_both_who_send_it_some(
    #[values([USUAL, NOISY], [NOISY, USUAL])] order: [usize; 2],
    #[values((64_000, 1000), (2000, 1))] (payload, size): (usize, u16),
) {
    const SEGMENTS: usize = 20;
    let netns = NetNs::new("shares");
    let text = format!("[daemon]\nworkers = 1\n{}", file(None, &["", "", ""]));
    let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &text);
    let mut guests = order.map(|number| connect(&daemon, number, F_HOST_ALL, QUEUE));
    if order[0] == NOISY {
        guests.reverse();
    }
    let mut receiver = connect(&daemon, RECEIVER, 0, QUEUE);
    receiver.pairs[0].post(QUEUE, &[2048]);
    let usual = Flood::packets(mac(RECEIVER), USUAL, SEGMENTS * 1000, 1000);
    let noisy = Flood::packets(mac(RECEIVER), NOISY, payload, size);
    let came = Came::between(&mut guests, [&usual, &noisy], 20 * SEGMENTS, || {
        let frame = receiver.pairs[0].receive(wait::SOON)?.frame;
        Some((frame[6..12].try_into().ok()?, frame.len()))
    });
    // A packet of each in turn; of short ones several are in a turn.
    let segments = payload.div_ceil(size.into());
    assert_share(came.frames, 1.5 * segments as f64 / SEGMENTS as f64);
    assert!(came.frames[NOISY] > 2 * segments, "it has its share, too");
    (0..3).for_each(|at| assert_stays(&daemon, at));
}

/// The packets of a burst are cut as they come, also those of another worker's guest, for which nothing waits.
#[rstest]
fn guest_without_tso_gets_all_of_a_burst_that_it_has_buffers_for(#[values(1, 2)] workers: usize) {
    const PACKETS: usize = 30;
    const SEGMENTS: usize = 30;
    let netns = NetNs::new("shares");
    let text = format!("[daemon]\nworkers = {workers}\n{}", file(None, &["", ""]));
    let daemon = Daemon::start_file(&netns, &Serve::file(), &[], &text);
    let [mut sender, mut receiver] =
        [F_HOST_ALL, 0].map(|features| connect(&daemon, usize::from(features == 0), features, QUEUE));
    receiver.pairs[0].post(QUEUE, &[2048]);
    let Flood { header, frame, .. } = Flood::packets(mac(1), 0, SEGMENTS * 1000, 1000);
    let all = vec![(header, &frame[..]); PACKETS];
    sender.pairs[0].send_asking(&all, Layout::Whole);
    for number in 0..PACKETS * SEGMENTS {
        let got = receiver.pairs[0].receive(wait::SOON);
        let got = got.unwrap_or_else(|| panic!("segment {number} is lost: {:#}", daemon.status()));
        assert_eq!(got.frame[..12], [mac(1), mac(0)].concat(), "segment {number}");
    }
}
