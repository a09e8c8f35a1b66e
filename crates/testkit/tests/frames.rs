//! Frames between a guest and a wire, byte for byte, in every placement and mode.
//!
//! The guest is a driver in this process, the NIC one end of a veth pair, the wire a packet socket on the other end.
//! Merged buffers and chains of several are tested in crate `dataplane` (`tests/join_tests.rs`).

use std::time::Duration;

use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::driver::{F_EVENT_IDX, F_IN_ORDER, F_INDIRECT, F_MRG_RXBUF, F_RING_PACKED, F_VERSION_1, HEADER};
use testkit::{DriverConfig, Layout, Rig, Serve, VethPair, frame, require, skip_half, wait};
use virtqueue::GuestAddr;
use virtqueue::driver::Buffer;

/// Around what is special to virtio, to Ethernet and to the MTU of 1500.
const SIZES: [usize; 11] = [14, 15, 42, 59, 60, 64, 65, 128, 1513, 1514, 1518];
const LAYOUTS: [Layout; 7] = [
    Layout::Whole,
    Layout::HeaderApart,
    Layout::Pieces(5),
    Layout::Pieces(HEADER + 1),
    Layout::Pieces(100),
    Layout::Indirect(64),
    Layout::Indirect(4096),
];
/// The ring features of a split ring: none. For a packed one they are F_RING_PACKED.
const SPLIT: u64 = 0;

fn rig_with(ring: u64, placement: Placement, mode: Mode) -> Rig {
    let serve = Serve::interface(VethPair::NIC).placement(placement).mode(mode);
    Rig::with(VethPair::new(), &serve, &DriverConfig::with(ring))
}

/// A receive buffer that holds any frame here, with its header.
const BUFFER: u32 = 2048;

#[rstest]
fn frames_of_all_sizes_arrive_byte_exact_both_ways(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(SPLIT, F_RING_PACKED)] ring: u64,
) {
    skip_half!(placement, mode, ring);
    require!(Root);
    let mut rig = rig_with(ring, placement, mode);
    rig.post(64, &[BUFFER]);
    let before = rig.daemon.counter("to_guest_frames");
    for (seed, size) in SIZES.into_iter().enumerate() {
        let sent = frame::plain(size, seed as u8);
        for layout in LAYOUTS {
            if layout == Layout::Pieces(5) && size > 500 {
                continue; // more pieces than the ring has descriptors
            }
            rig.assert_from_guest(&sent, layout);
        }
        // 1518 bytes without a tag are more than a packet socket sends at this MTU.
        if size <= 1514 {
            rig.assert_to_guest(&sent);
        }
    }
    rig.pair().await_sent();
    assert_eq!(
        rig.daemon.counter("to_guest_frames") - before,
        SIZES.len() as u64 - 1
    );
    for size in [64, 1514, 1518] {
        rig.assert_from_guest(&frame::tagged(size, 42, 7), Layout::Whole);
        rig.assert_from_guest(&frame::tagged(size, 4094, 8), Layout::HeaderApart);
        rig.assert_to_guest(&frame::tagged(size, 42, 9));
    }
}

#[rstest]
fn buffers_at_region_edges_are_used_and_nothing_beside_them_is_touched(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(SPLIT, F_RING_PACKED)] ring: u64,
) {
    skip_half!(placement, mode, ring);
    require!(Root);
    // Far from each other for the guest, side by side in the daemon's map.
    let (low, high, len) = (GuestAddr(0), GuestAddr(4 << 30), 4 << 20);
    let config = DriverConfig {
        regions: vec![(low, len), (high, len)],
        ..DriverConfig::with(ring)
    };
    let serve = Serve::interface(VethPair::NIC).placement(placement).mode(mode);
    let mut rig = Rig::with(VethPair::new(), &serve, &config);
    // The rings are at the beginning of the lower region, the end of it and the upper one are free.
    let buffer = 1600u32;
    let at = |addr: GuestAddr, offset: u64| GuestAddr(addr.get() + offset);
    let places = [
        at(high, 0),
        at(high, 243), // one byte less than the kernel's headroom needs
        at(high, 4096 - 244),
        at(high, 8192),
        at(high, len - u64::from(buffer)),
        at(low, len - u64::from(buffer)),
    ];
    let ram = rig.driver.ram().clone();
    for (seed, place) in places.into_iter().enumerate() {
        let canary = [0xc3u8; 300];
        let before = place
            .get()
            .checked_sub(300)
            .map(GuestAddr)
            .filter(|&addr| addr >= high || place < high);
        before.iter().for_each(|&addr| ram.write(addr, &canary));
        rig.pair().post_buffers(vec![Buffer::writable(place, buffer)]);
        rig.pair().to_guest.publish();
        wait::a_moment();
        let sent = frame::plain(1000 + seed, seed as u8);
        // In direct placement one that comes before the NIC has the buffer is lost; then there is another.
        let limit = match placement {
            Placement::Direct => Duration::from_secs(1),
            _ => wait::SOON,
        };
        let used = wait::until_some(wait::SOON, || {
            rig.wire.send(&sent);
            rig.pair().to_guest.await_used(limit)
        });
        let used = used.unwrap_or_else(|| panic!("{place}: nothing arrived"));
        let bytes = ram.read_vec(place, used.len as usize);
        assert_eq!(used.len as usize, HEADER + sent.len());
        frame::assert_same(&bytes[HEADER..], &sent);
        before
            .iter()
            .for_each(|&addr| assert_eq!(ram.read_vec(addr, 300), canary, "before {place}"));
        let mut out = vec![0; HEADER];
        out.extend(&sent);
        ram.write(place, &out);
        rig.pair()
            .send_buffers(&[Buffer::readable(place, out.len() as u32)], false);
        frame::assert_same(&rig.wire.receive(wait::SOON).expect("it arrives"), &sent);
    }
}

#[rstest]
fn thousands_of_frames_keep_their_order_and_their_bytes(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(0, F_IN_ORDER, F_EVENT_IDX, F_IN_ORDER | F_EVENT_IDX)] features: u64,
    #[values(SPLIT, F_RING_PACKED)] ring: u64,
) {
    skip_half!(placement, features & F_IN_ORDER, features & F_EVENT_IDX, ring);
    require!(Root);
    let features = F_VERSION_1 | F_MRG_RXBUF | F_INDIRECT | features | ring;
    let config = DriverConfig {
        features,
        // Packed rings may have any size.
        queue_size: if ring == SPLIT { 64 } else { 67 },
        ..DriverConfig::default()
    };
    let serve = Serve::interface(VethPair::NIC).placement(placement);
    let mut rig = Rig::with(VethPair::new(), &serve, &config);
    rig.post(64, &[BUFFER]);
    let make = |i: usize| frame::plain(60 + i * 37 % 1455, i as u8);
    for batch in 0..200 {
        let frames: Vec<_> = (0..20).map(|i| make(batch * 20 + i)).collect();
        let slices: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
        rig.pair().send_batch(
            &slices,
            if batch % 2 == 0 {
                Layout::Whole
            } else {
                Layout::Indirect(700)
            },
        );
        for sent in &frames {
            frame::assert_same(&rig.wire.receive(wait::SOON).expect("it arrives"), sent);
        }
        frames.iter().for_each(|sent| rig.wire.send(sent));
        for sent in &frames {
            frame::assert_same(&rig.pair().receive(wait::SOON).expect("it arrives").frame, sent);
        }
    }
}

#[rstest]
fn frames_without_a_posted_buffer_wait_or_are_lost_and_the_next_ones_arrive(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = Rig::new(placement, Mode::Native);
    for seed in 0..50 {
        rig.wire.send(&frame::plain(100, seed));
    }
    rig.post(128, &[BUFFER]);
    rig.assert_passes_both_ways();
}

/// Sends a frame of any length, header in front, in descriptors of so many bytes.
fn send_long(rig: &mut Rig, sent: &[u8], piece: usize) {
    let bytes = [&[0; HEADER][..], sent].concat();
    let addr = rig
        .pair()
        .ram()
        .alloc(bytes.len() as u64, 64)
        .expect("guest memory is left");
    rig.pair().ram().write(addr, &bytes);
    let at = |start: usize| GuestAddr(addr.get() + start as u64);
    let buffers: Vec<_> = (0..bytes.len())
        .step_by(piece)
        .map(|start| Buffer::readable(at(start), piece.min(bytes.len() - start) as u32))
        .collect();
    rig.pair().send_buffers(&buffers, false);
}

#[rstest]
fn jumbo_frame_spans_chunks_and_buffers(#[values(Mode::Native, Mode::Skb)] mode: Mode) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC)
        .placement(Placement::Copy)
        .mode(mode);
    let mut rig = Rig::with(VethPair::with(1, 9000), &serve, &DriverConfig::default());
    rig.post(32, &[2048]);
    for bytes in [1514, 1515, 3840, 3841, 4096, 4097, 8_900, 9_014] {
        let sent = frame::plain(bytes, 0x31);
        for piece in [usize::MAX, 4096, 1000] {
            send_long(&mut rig, &sent, piece.min(bytes + HEADER));
            let got = rig.wire.receive(wait::SOON);
            frame::assert_same(&got.expect("the frame on the wire"), &sent);
        }
        rig.assert_to_guest(&sent);
    }
}
