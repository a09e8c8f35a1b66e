//! Those with AF_XDP.

use rstest::rstest;
use testkit::daemon::{Mode, Placement};
use testkit::{DriverConfig, Layout, Rig, Serve, VethPair, frame, require, soak, wait};
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
#[case::finished(false)]
#[case::partial(true)]
fn partial_checksums_of_veth_are_completed_for_a_guest_that_does_not_take_them(
    #[case] partial: bool,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    if soak::leaves_out_half(&[usize::from(partial), mode as usize, placement as usize]) {
        return;
    }
    require!(Root);
    let mut rig = Rig::new(placement, mode);
    rig.post(64, &[BUFFER]);
    // The far end's own stack sends; on an interface without ARP it needs no neighbour.
    let far = &rig.veth.far;
    far.ip(&["addr", "add", "192.0.2.1/24", "dev", VethPair::WIRE]);
    far.run(
        "ethtool",
        &["-K", VethPair::WIRE, "tx", if partial { "on" } else { "off" }],
    );
    far.run("bash", &["-c", "echo -n payload >/dev/udp/192.0.2.2/9"]);
    let is_udp = |frame: &[u8]| frame.len() > 42 && frame[12..14] == [8, 0] && frame[23] == 17;
    let got = wait::until_some(wait::SOON, || {
        rig.driver.pairs[0]
            .receive(wait::QUIET)
            .filter(|got| is_udp(&got.frame))
    });
    let got = got.expect("it arrives").frame;
    assert_eq!(got[42..], *b"payload", "all else is as it was sent");
    assert_eq!(udp_sum(&got), 0xffff, "the checksum is whole");
    let completed = rig.daemon.counter("to_guest_checksums_completed");
    assert_eq!(completed > 0, partial, "{completed} were completed");
}

/// One's complement sum of the pseudo header and the datagram: 0xffff if the checksum is right (RFC 768).
fn udp_sum(frame: &[u8]) -> u16 {
    let datagram = &frame[34..];
    let mut bytes = frame[26..34].to_vec();
    bytes.extend([0, 17]);
    bytes.extend(u16::try_from(datagram.len()).expect("short").to_be_bytes());
    bytes.extend(datagram);
    bytes.resize(bytes.len().next_multiple_of(2), 0);
    let sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ((folded & 0xffff) + (folded >> 16)) as u16
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
