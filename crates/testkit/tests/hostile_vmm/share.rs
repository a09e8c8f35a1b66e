//! Two guests on one worker both have work at any time, and one of them makes as much of it as it can: the other keeps
//! its share.
//!
//! The worker is held while the guests fill their rings, so that it finds all of it at once; then frames are counted on
//! the wire, in the order in which they come, up to the last one of the honest guest. How fast the machine is, and who
//! was scheduled when, is nothing to that.

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::driver::{F_HOST_ALL, HEADER};
use testkit::gso_packet::Ip;
use testkit::{
    Daemon, Driver, DriverConfig, Frozen, GsoPacket, Layout, PacketPort, Serve, VethPair, frame, require,
};
use virtqueue::GuestAddr;

/// Frames of the honest guest: eight turns of a lane.
const FRAMES: usize = 512;
/// Length of each, unlike that of any other.
const LENGTH: usize = 200;
/// So many times the honest guest's work may the other one's be meanwhile. A fair worker does as much of both.
const FACTOR: usize = 4;
/// Descriptors that are as much work as a frame.
const DESCRIPTORS: usize = 4;
/// Payload of a packet of 64 KiB.
const PAYLOAD: usize = 65_000;

/// What the other guest sends, again and again.
struct Packet {
    header: [u8; HEADER],
    bytes: Vec<u8>,
    layout: Layout,
    /// What becomes of it.
    frames: usize,
    /// What it is given in.
    descriptors: usize,
}

impl Packet {
    /// One frame.
    fn frame(length: usize, layout: Layout) -> Self {
        Self::new([0; HEADER], frame::plain(length, 0x33), (layout, 1))
    }

    /// 64 KiB, to be cut into segments of so many bytes.
    fn segments(bytes: u16, layout: Layout) -> Self {
        let packet = GsoPacket::tcp(Ip::V4(0), PAYLOAD);
        let mut header = [0; HEADER];
        header[..10].copy_from_slice(&packet.request(bytes));
        Self::new(header, packet.bytes(), (layout, PAYLOAD.div_ceil(bytes.into())))
    }

    fn new(header: [u8; HEADER], bytes: Vec<u8>, (layout, frames): (Layout, usize)) -> Self {
        let descriptors = match layout {
            Layout::Indirect(piece) => (HEADER + bytes.len()).div_ceil(piece),
            _ => 1,
        };
        Self {
            header,
            bytes,
            layout,
            frames,
            descriptors,
        }
    }

    /// How many frames it is as much work as.
    fn work(&self) -> usize {
        self.frames.max(self.descriptors / DESCRIPTORS)
    }

    /// So many of them that there is more to do than may be done; at least two.
    fn count(&self) -> usize {
        (2 * FACTOR * FRAMES).div_ceil(self.work()) + 2
    }
}

fn connect(daemon: &Daemon, port: u32, queue_size: u32) -> Driver {
    let config = DriverConfig {
        queue_size,
        // No more than is registered at once.
        regions: vec![(GuestAddr(0), 60 << 20)],
        ..DriverConfig::with(F_HOST_ALL)
    };
    Driver::connect(&daemon.path(&format!("port{port}.sock")), &config).expect("accepted")
}

#[rstest]
#[case::frames(8192, Packet::frame(100, Layout::Whole))]
#[case::packets_in_the_smallest_segments(256, Packet::segments(32, Layout::Whole))]
#[case::packets_in_segments_that_leave_in_one_go(256, Packet::segments(255, Layout::Whole))]
#[case::frames_in_a_descriptor_for_each_byte(32768, Packet::frame(1514, Layout::Indirect(1)))]
#[case::packets_in_the_longest_chains(32768, Packet::segments(1448, Layout::Indirect(2)))]
fn guest_keeps_its_share_beside_a_flood_of(
    #[case] queue_size: u32,
    #[case] packet: Packet,
    #[values(Placement::Copy, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .with("--workers", "1");
    let mut daemon = Daemon::start_ports(&veth.near, &serve, &["start-queue=0", "start-queue=1"]);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let (mut honest, mut other) = (connect(&daemon, 0, 1024), connect(&daemon, 1, queue_size));
    let held = Frozen::thread(daemon.process().pid(), "worker-0");
    let flood = vec![(packet.header, &packet.bytes[..]); packet.count()];
    other.pairs[0].send_asking(&flood, packet.layout);
    let (plain, last) = (frame::plain(LENGTH, 0x11), frame::last());
    honest.pairs[0].send_batch(&vec![&plain[..]; FRAMES - 1], Layout::Whole);
    honest.pairs[0].send(&last, Layout::Whole);
    drop(held);
    let sent = wire.receive_before(&last);
    let own = sent.iter().filter(|frame| frame.len() == LENGTH).count();
    assert_eq!(own, FRAMES - 1, "frames of the honest guest are lost");
    let others = sent.len() - own;
    assert!(
        others <= FACTOR * FRAMES,
        "{others} frames were sent beside {FRAMES}"
    );
    // The one that is begun counts, and a turn ends behind a packet.
    let packets = others.div_ceil(packet.frames);
    let most = FACTOR * FRAMES + packet.work();
    println!("beside {FRAMES} frames {others}, of {packets} packets");
    assert!(
        packets * packet.work() <= most,
        "{packets} packets that are as much work as {} frames each were sent beside {FRAMES} frames",
        packet.work()
    );
    assert!(
        packets < packet.count(),
        "the other guest had nothing more to send"
    );
}
