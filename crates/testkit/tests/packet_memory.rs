//! Less memory for frames (`--packet-memory`): every frame comes through it all the same, and it is as much as was
//! asked for, a queue pair.

use rstest::rstest;
use testkit::driver::F_RING_PACKED;
use testkit::{DriverConfig, Layout, Rig, Serve, VethPair, frame, require};

/// The least that there is.
const LEAST: (&str, u64) = ("512KiB", 512 << 10);

fn serve() -> Serve {
    Serve::interface(VethPair::NIC).with("--packet-memory", LEAST.0)
}

/// Many more frames than there are chunks, in batches that take all of them, and frames of several chunks.
#[rstest]
#[case::in_small_chunks(1500, 2048)]
#[case::in_large_chunks(9000, 4096)]
fn least_memory_carries_every_frame(
    #[case] mtu: u32,
    #[case] chunk_bytes: u64,
    #[values(0, F_RING_PACKED)] ring: u64,
) {
    require!(Root);
    let mut rig = Rig::with(VethPair::with(1, mtu), &serve(), &DriverConfig::with(ring));
    rig.post(48, &[12_000]);
    let lane = rig.daemon.port(0)["lanes"][0].clone();
    let chunks = LEAST.1 / chunk_bytes;
    // 136 bytes a chunk (struct xdp_buff_xsk).
    assert_eq!(
        [&lane["packet_bytes"], &lane["kernel_bytes"]],
        [LEAST.1, 136 * chunks]
    );
    assert_eq!(lane["backing"], "4 KiB pages");
    let longest = mtu as usize + 14;
    for len in [60, 1024, 1514, longest] {
        rig.assert_from_guest(&frame::plain(len, 0xa5), Layout::Whole);
        rig.assert_to_guest(&frame::plain(len, 0x5a));
    }
    for round in 0..4 {
        let frames: Vec<_> = (0..200)
            .map(|number| frame::numbered(1000 * round + number))
            .collect();
        for sent in &frames {
            rig.pair().send(sent, Layout::Whole);
        }
        for sent in &frames {
            frame::assert_same(&rig.wire.receive(testkit::wait::SOON).expect("it arrives"), sent);
        }
        // No more than are for receiving.
        let burst = &frames[..64];
        rig.burst_to_guest(burst);
        for sent in burst {
            let got = rig.pair().receive(testkit::wait::SOON).expect("it arrives");
            frame::assert_same(&got.frame, sent);
        }
    }
    rig.assert_passes_both_ways();
}

/// As many queue pairs as six times as much memory would be for.
#[test]
fn sixteen_queues_have_eight_mib() {
    require!(Root);
    const PAIRS: usize = 16;
    let veth = VethPair::with(PAIRS as u32, 1500);
    let config = DriverConfig::with_pairs(PAIRS);
    let mut rig = Rig::with(veth, &serve().with("--queues", PAIRS.to_string()), &config);
    for pair in 0..PAIRS {
        let sent = frame::plain(1514, pair as u8);
        rig.driver.pairs[pair].send(&sent, Layout::Whole);
        frame::assert_same(&rig.wire.receive(testkit::wait::SOON).expect("it arrives"), &sent);
    }
    let port = rig.daemon.port(0);
    let lanes = port["lanes"].as_array().expect("lanes");
    let in_all: u64 = lanes
        .iter()
        .filter_map(|lane| lane["packet_bytes"].as_u64())
        .sum();
    assert_eq!((lanes.len(), in_all), (PAIRS, 8 << 20));
}
