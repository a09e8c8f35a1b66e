//! Those with AF_XDP.

use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::{DriverConfig, Layout, Rig, Serve, VethPair, frame, require, wait};
use virtqueue::GuestAddr;

use super::BUFFER;

#[rstest]
fn starved_fill_ring_recovers(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = Rig::new(placement, Mode::Native);
    // More frames than all rings and buffers hold, three times over, and nobody who takes them.
    for _ in 0..3 {
        for seed in 0..6000u16 {
            let _ = rig.wire.try_send(&frame::plain(64, seed as u8));
        }
        wait::a_moment();
    }
    rig.daemon.process().check();
    // What waited comes first.
    rig.post(64, &[BUFFER]);
    for _ in 0..200 {
        rig.assert_to_guest(&frame::plain(300, 7));
    }
}

#[rstest]
fn sending_goes_on_without_another_kick_and_over_a_full_ring(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
) {
    require!(Root);
    let config = DriverConfig {
        // As many as fit a ring of 4096 of the kernel's twice and more over the rounds.
        queue_size: 4096,
        // A page each, and more.
        regions: vec![(GuestAddr(0), 32 << 20)],
        ..DriverConfig::default()
    };
    let serve = Serve::interface(VethPair::NIC).placement(placement).mode(mode);
    let mut rig = Rig::with(VethPair::new(), &serve, &config);
    let sent = frame::plain(64, 9);
    for _ in 0..3 {
        let frames = vec![&sent[..]; 4096];
        // One publication: one kick at most.
        rig.pair().send_batch(&frames, Layout::Whole);
        rig.pair().await_sent();
    }
    assert_eq!(rig.daemon.counter("from_guest_frames"), 3 * 4096);
    // More than the port here can hold has come out; what it kept goes first, or the last frame would find no room.
    while rig.wire.receive(wait::QUIET).is_some() {}
    let _ = rig.flush_from_guest();
}

#[rstest]
fn number_of_channels_that_changes_under_load_takes_no_queue_in_use(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC)
        .placement(placement)
        .with("--start-queue", "1");
    let veth = VethPair::with(4, 1500);
    // With XDP a veth needs as many receive queues as its peer has transmit queues.
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    let mut rig = Rig::with(veth, &serve, &DriverConfig::default());
    let channels = |rig: &Rig, count: &str| {
        let mut command = rig.veth.near.command("ethtool");
        command.args(["-L", VethPair::NIC, "rx", count, "tx", count]);
        command.output().expect("ethtool is there").status.success()
    };
    for (count, allowed) in [("2", true), ("1", false), ("3", true), ("4", true)] {
        for seed in 0..50 {
            rig.pair().send(&frame::plain(100, seed), Layout::Whole);
        }
        assert_eq!(channels(&rig, count), allowed, "{count} channels, queue 1 in use");
        rig.pair().await_sent();
        let _ = rig.flush_from_guest();
        assert!(rig.daemon.port(0)["impaired"].is_null());
    }
}

#[rstest]
fn umem_is_not_overrun_by_the_longest_frame(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
) {
    require!(Root);
    let mut rig = Rig::new(placement, mode);
    rig.post(128, &[BUFFER]);
    // Longest with a tag, so many at once that neighbouring chunks are in use.
    for round in 0..8 {
        let frames: Vec<_> = (0..16)
            .map(|at| frame::tagged(1518, 5, round * 16 + at))
            .collect();
        frames.iter().for_each(|sent| rig.wire.send(sent));
        for sent in &frames {
            let got = rig.pair().receive(wait::SOON).expect("it arrives");
            frame::assert_same(&got.frame, sent);
        }
    }
}
