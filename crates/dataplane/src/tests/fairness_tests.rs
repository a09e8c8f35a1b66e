//! Guests of a network beside one that makes all the work it can: what is counted is frames, or bytes, of each in the
//! same rounds.

use packet::checksum::{self, ChecksumAt};
use packet::ethernet::Mac;
use virtqueue::GuestAddr;
use virtqueue::driver::Buffer;

use crate::tests::network_tests::{World, frame, mac};
use crate::tests::test_port::Port;
use device::offloads::Offloads;

const ROUNDS: usize = 500;
/// Least share of the guest that is like others, of what moves.
const LEAST: f64 = 0.4;

/// What a guest sends, over and over, from the same place.
pub(crate) struct Flood {
    port: usize,
    addr: GuestAddr,
    len: u32,
}

impl Flood {
    fn new(world: &mut World, port: usize, header: [u8; 10], frame: &[u8]) -> Self {
        let bytes = [&header[..], &[0, 0], frame].concat();
        let ram = &world.ports[port].memory.ram;
        let addr = ram.alloc(bytes.len() as u64, 64).expect("memory is left");
        ram.write(addr, &bytes);
        Self {
            port,
            addr,
            len: bytes.len() as u32,
        }
    }

    /// Frames that ask for nothing.
    pub(crate) fn plain(world: &mut World, port: usize, frame: &[u8]) -> Self {
        Self::new(world, port, [0; 10], frame)
    }

    /// TCP in so many bytes of payload, to be cut into segments of `size`.
    fn packets(world: &mut World, port: usize, to: Mac, payload: usize, size: u16) -> Self {
        let (header, frame) = gso_packet(to, mac(port as u8), payload, size);
        Self::new(world, port, header, &frame)
    }

    /// Fills the queue up.
    fn go_on(&self, world: &mut World) {
        let driver = &mut world.ports[self.port].from_guest;
        while driver.take_used().is_some() {}
        while driver.add(&[Buffer::readable(self.addr, self.len)]).is_some() {}
        driver.publish();
    }
}

/// TCP over IPv4 with its virtio-net header.
pub(crate) fn gso_packet(to: Mac, from: Mac, payload: usize, size: u16) -> ([u8; 10], Vec<u8>) {
    let mut ip = vec![0x45, 0, 0, 0, 0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    ip[2..4].copy_from_slice(&(40 + payload as u16).to_be_bytes());
    checksum::complete(&mut ip, ChecksumAt { start: 0, offset: 10 }).expect("inside");
    let mut tcp = vec![
        0,
        80,
        0,
        80,
        0,
        0,
        0,
        1,
        0,
        0,
        0,
        1,
        5 << 4,
        0x10,
        0xff,
        0xff,
        0,
        0,
        0,
        0,
    ];
    let sum = 10 * 256 + 1 + 10 * 256 + 2 + 6 + 20 + payload;
    tcp[16..18].copy_from_slice(&(sum as u16).to_be_bytes());
    let frame = [&to[..], &from, &[8, 0], &ip, &tcp, &vec![7; payload]].concat();
    let [low, high] = size.to_le_bytes();
    // VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4.
    ([1, 1, 54, 0, low, high, 34, 0, 16, 0], frame)
}

pub(crate) fn with_offloads(world: &mut World, port: usize, offloads: Offloads) {
    world.lanes.change(port, |lane, _| {
        lane.change_vrings(&mut |_, vring| vring.guest.offloads = offloads);
    });
}

/// Lets both send for some rounds; buffers with frames that came to anybody, by who sent them.
pub(crate) fn compete(world: &mut World, floods: [&Flood; 2]) -> [usize; 2] {
    let mut came = [0, 0];
    for _ in 0..ROUNDS {
        floods.iter().for_each(|flood| flood.go_on(world));
        world.poll();
        for frame in world.ports.iter_mut().flat_map(Port::take) {
            let is_from = |flood: &Flood| frame[6..12] == mac(flood.port as u8);
            // What goes on in further buffers has no addresses.
            if let Some(from) = floods.iter().position(|flood| is_from(flood)) {
                came[from] += 1;
            }
        }
    }
    came
}

#[track_caller]
pub(crate) fn assert_fair(noisy: usize, usual: usize) {
    let share = usual as f64 / (noisy + usual) as f64;
    assert!(
        share >= LEAST,
        "{usual} of the usual guest, {noisy} of the other: {share:.2}"
    );
    assert!(share < 0.9, "the other one gets nothing: {share:.2}");
}

#[test]
fn segments_of_one_byte_for_a_guest_that_takes_no_packets_leave_others_their_share() {
    // To the same guest, and to another one.
    for to in [2, 3] {
        let mut world = World::new(&[0, 0, 128, 128]);
        with_offloads(&mut world, 0, Offloads::all());
        // As many segments as a packet may have.
        let noisy = Flood::packets(&mut world, 0, mac(2), 2048, 1);
        let usual = Flood::plain(&mut world, 1, &frame(mac(to), mac(1), 1514));
        let [noisy, usual] = compete(&mut world, [&noisy, &usual]);
        assert_fair(noisy, usual);
        let lost = |port: usize| world.ports[port].counters.to_guest_no_buffer.get();
        assert_eq!(
            (lost(2), lost(3)),
            (0, 0),
            "nobody is so slow that frames are lost"
        );
    }
}

#[test]
fn packets_of_64_kib_take_as_many_bytes_as_frames() {
    let mut world = World::new(&[0, 0, 200, 128]);
    with_offloads(&mut world, 0, Offloads::all());
    with_offloads(&mut world, 2, Offloads::all());
    let noisy = Flood::packets(&mut world, 0, mac(2), 65_000, 1448);
    let usual = Flood::plain(&mut world, 1, &frame(mac(3), mac(1), 1514));
    compete(&mut world, [&noisy, &usual]);
    let bytes = |port: usize| world.ports[port].counters.to_guest_bytes.get() as usize;
    assert_fair(bytes(2), bytes(3));
}

#[test]
fn packets_of_several_senders_are_segmented_round_robin() {
    // Senders before and behind the receiver in the round, and one that leaves while it waits.
    for gone in 0..3 {
        let mut world = World::new(&[0, 0, 0, 128]);
        let mut floods: Vec<_> = (0..3)
            .map(|port| {
                with_offloads(&mut world, port, Offloads::all());
                Flood::packets(&mut world, port, mac(3), 20_000, 1000)
            })
            .collect();
        floods.iter().for_each(|flood| flood.go_on(&mut world));
        world.poll();
        world.lanes.slots.remove(gone).lane.stop();
        world.rebuild_forwarding();
        floods.remove(gone);
        let came = compete(&mut world, [&floods[0], &floods[1]]);
        assert_fair(came[0], came[1]);
        assert_fair(came[1], came[0]);
    }
}
