//! Less memory for frames (`--packet-memory`): every frame comes through it all the same, and it is as much as was
//! asked for, a queue pair.

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::driver::F_RING_PACKED;
use testkit::{Bystander, Driver, DriverConfig, Layout, Rig, Serve, VethPair, frame, require};

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

/// One worker, two queues: each has its own share, and what one guest does takes nothing from the other's.
#[test]
fn guest_that_comes_and_goes_takes_no_memory_from_its_neighbour() {
    require!(Root);
    let bystander = Bystander::with(Placement::Copy, 1, |serve| serve.with("--packet-memory", LEAST.0));
    let wire = bystander.hostile_wire();
    for round in 0..5 {
        let config = DriverConfig::default();
        let mut guest = Driver::connect(&bystander.socket(1), &config).expect("accepted");
        // It posts no receive buffers, so what comes for it fills its share.
        for number in 0..400 {
            let _ = wire.try_send(&frame::numbered(number));
        }
        let last = frame::last();
        guest.pairs[0].send(&last, Layout::Whole);
        let _ = wire.receive_before(&last);
        bystander.await_frames(20);
        let in_all: u64 = (0..2)
            .map(|port| {
                bystander.daemon.port(port)["lanes"][0]["packet_bytes"]
                    .as_u64()
                    .expect("bytes")
            })
            .sum();
        assert_eq!(in_all, 2 * LEAST.1, "{round}");
    }
    drop(wire);
    bystander.assert_unharmed();
}

/// As many queue pairs as six times as much memory would be for.
#[test]
fn sixteen_queues_have_eight_mib() {
    require!(Root);
    const PAIRS: usize = 16;
    let veth = VethPair::with(PAIRS as u32, 1500);
    let config = DriverConfig {
        pairs: PAIRS,
        ..DriverConfig::default()
    };
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
