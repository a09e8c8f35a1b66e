//! Guests that ask for what cannot be, or change their mind while they are read.

use super::*;

/// Requests that must be dropped, for a TCP GSO packet over IPv4 of 3054 bytes, with the counter of each.
fn malformed() -> Vec<(&'static str, [u8; 10], &'static str)> {
    const MALFORMED: &str = "from_guest_offload_malformed";
    let frame = GsoPacket {
        transport: Transport::Tcp(ACK, 0),
        ..GsoPacket::tcp(Ip::V4(0), 3000)
    };
    let good = frame.request(1000);
    let with = |at: usize, bytes: &[u8]| {
        let mut request = good;
        request[at..at + bytes.len()].copy_from_slice(bytes);
        request
    };
    vec![
        ("segments of no bytes", with(4, &[0, 0]), MALFORMED),
        (
            "the size that Linux takes for none",
            with(4, &[0xff, 0xff]),
            MALFORMED,
        ),
        ("unknown kind", with(1, &[2]), MALFORMED),
        ("UFO", with(1, &[3]), MALFORMED),
        ("unknown kind with ECN", with(1, &[0xff]), MALFORMED),
        ("ECN for UDP", with(1, &[0x85]), MALFORMED),
        ("no checksum", with(0, &[0]), MALFORMED),
        ("other flags than a checksum", with(0, &[0xfe]), MALFORMED),
        ("another IP", with(1, &[4]), MALFORMED),
        ("another transport", with(1, &[5]), MALFORMED),
        ("sum from elsewhere", with(6, &[33, 0]), MALFORMED),
        ("stored elsewhere", with(8, &[6, 0]), MALFORMED),
        ("sum from behind the end", with(6, &[0xff, 0xff]), MALFORMED),
        ("stored behind the end", with(8, &[0xff, 0xff]), MALFORMED),
        (
            "long segments",
            with(4, &1465u16.to_le_bytes()),
            "from_guest_segment_too_long",
        ),
        (
            "the longest segments",
            with(4, &[0xfe, 0xff]),
            "from_guest_segment_too_long",
        ),
        (
            "more segments than a GSO packet may have",
            with(4, &[1, 0]),
            "from_guest_too_many_segments",
        ),
        ("checksum behind the end", checksum_request(3053, 0), MALFORMED),
        (
            "checksum further behind the end",
            checksum_request(0xffff, 0xffff),
            MALFORMED,
        ),
        (
            "frame longer than the MTU",
            checksum_request(34, 16),
            "from_guest_too_long",
        ),
    ]
}

#[rstest]
fn malformed_requests_are_dropped_and_counted(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(Mode::Native, Mode::Skb)] mode: Mode,
    #[values(IN_SPLIT, IN_PACKED, BY_REFERENCE, UNSEGMENTED)] (ring, rig): (u64, MakeRig),
) {
    skip_half!(placement, mode, ring);
    require!(Root);
    let mut rig = rig(VethPair::new(), (placement, mode), ring | F_HOST_ALL);
    let bytes = GsoPacket {
        transport: Transport::Tcp(ACK, 0),
        ..GsoPacket::tcp(Ip::V4(0), 3000)
    }
    .bytes();
    for (at, (what, request, counter)) in malformed().into_iter().enumerate() {
        let before = rig.daemon.counter(counter);
        let layout = [Layout::Whole, Layout::Pieces(3), Layout::HeaderApart][at % 3];
        let layout = match layout {
            Layout::Pieces(_) => Layout::Indirect(100),
            layout => layout,
        };
        rig.pair().send_asking(&[(header(request), &bytes)], layout);
        rig.pair().await_sent();
        rig.daemon.await_counter(counter, before + 1);
        rig.assert_from_guest(&frame::plain(60, at as u8), Layout::Whole);
        assert_eq!(rig.daemon.counter(counter), before + 1, "{what}");
    }
    // Frames that are not what the request says, too.
    let good = GsoPacket {
        transport: Transport::Tcp(ACK, 0),
        ..GsoPacket::tcp(Ip::V4(0), 3000)
    }
    .request(1000);
    type Spoil = fn(&mut Vec<u8>);
    let spoiled: [(&str, Spoil); 6] = [
        ("IP's length is short", |frame| frame[17] -= 1),
        ("padding", |frame| frame.push(0)),
        ("a fragment", |frame| frame[21] = 1),
        ("TCP header longer than the packet", |frame| {
            frame.truncate(60);
            frame[46] = 0xf0;
        }),
        ("headers end early", |frame| frame.truncate(53)),
        ("version 5", |frame| frame[14] = 0x55),
    ];
    let before = rig.daemon.counter("from_guest_offload_malformed");
    for (_, spoil) in &spoiled {
        let mut frame = bytes.clone();
        spoil(&mut frame);
        rig.pair().send_asking(&[(header(good), &frame)], Layout::Whole);
    }
    rig.daemon
        .await_counter("from_guest_offload_malformed", before + spoiled.len() as u64);
    assert!(rig.flush_from_guest().is_empty());
    rig.assert_from_guest(&frame::plain(61, 1), Layout::Whole);
}

/// A line for each kind in each session, however many frames there are.
#[rstest]
fn first_lost_frame_of_a_kind_is_logged_with_what_was_wrong(
    #[values(Placement::Copy, Placement::SendDirect)] placement: Placement,
) {
    require!(Root);
    let mut rig = rig_of(VethPair::new(), (placement, Mode::Native), F_HOST_ALL);
    let packet = GsoPacket::tcp(Ip::V4(0), 3000);
    let send = |rig: &mut Rig, at: usize| {
        let mut request = packet.request(1000);
        request[at..at + 2].fill(0);
        rig.pair()
            .send_asking(&[(header(request), &packet.bytes())], Layout::Whole);
        rig.pair().await_sent();
    };
    let lines = |rig: &Rig, counter: &str| -> Vec<String> {
        let said = rig.daemon.said();
        let lines = said.lines().filter(|line| line.contains(counter));
        lines.map(str::to_owned).collect()
    };
    const MALFORMED: &str = "from_guest_offload_malformed";
    // Not all the same: the first one is told of.
    send(&mut rig, 8);
    (0..3).for_each(|_| send(&mut rig, 4));
    let is_logged = || lines(&rig, MALFORMED).len() == 1;
    rig.daemon.await_that(is_logged);
    let line = &lines(&rig, MALFORMED)[0];
    assert!(
        line.contains("a checksum from byte 34, stored 0 bytes behind"),
        "{line}"
    );
    // Another kind; and more of the first.
    rig.pair().send(&[0x55; 10], Layout::Whole);
    send(&mut rig, 4);
    let is_logged = || lines(&rig, "from_guest_runt").len() == 1;
    rig.daemon.await_that(is_logged);
    assert!(lines(&rig, "from_guest_runt")[0].contains("shorter than an Ethernet header"));
    assert_eq!(lines(&rig, MALFORMED).len(), 1);
    // The next session's are logged at its end at the latest.
    rig = rig.next_guest_with(&DriverConfig::with(F_HOST_ALL));
    send(&mut rig, 4);
    rig = rig.next_guest();
    rig.daemon.await_that(|| lines(&rig, MALFORMED).len() == 2);
    let line = &lines(&rig, MALFORMED)[1];
    assert!(line.contains("GSO with segments of 0 bytes."), "{line}");
}

#[rstest]
fn frames_longer_than_a_packet_can_be_are_dropped(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let mut rig = rig(placement, Mode::Native, SPLIT);
    let request = GsoPacket::tcp(Ip::V4(0), 0).request(1000);
    for len in [65_558, 67_000] {
        rig.pair()
            .send_asking(&[(header(request), &frame::plain(len, 1))], Layout::Whole);
    }
    rig.daemon.await_counter("from_guest_too_long", 2);
    rig.assert_from_guest(&frame::plain(60, 1), Layout::Whole);
}

#[rstest]
fn offloads_that_were_not_accepted_are_dropped_and_counted(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
) {
    require!(Root);
    let tcp4 = GsoPacket::tcp(Ip::V4(0), 3000);
    let ecn = GsoPacket {
        transport: Transport::Tcp(ACK | CWR, 0),
        ..tcp4.clone()
    };
    let asked = [
        tcp4,
        ecn,
        GsoPacket::tcp(Ip::V6(vec![]), 3000),
        GsoPacket::udp(Ip::V4(0), 3000),
    ];
    // How many of them each set of features leaves out.
    for (features, dropped) in [(0, 4), (F_CSUM, 4), (F_CSUM | F_HOST_TSO4, 3), (F_HOST_TSO4, 4)] {
        let mut rig = rig_of(VethPair::new(), (placement, Mode::Native), features);
        for frame in &asked {
            rig.pair()
                .send_asking(&[(header(frame.request(1000)), &frame.bytes())], Layout::Whole);
        }
        rig.pair().await_sent();
        rig.daemon
            .await_counter("from_guest_offload_not_negotiated", dropped);
        let arrived = rig.flush_from_guest().len() as u64;
        assert_eq!(arrived, (4 - dropped) * 3, "features {features:#x}");
        assert_eq!(rig.daemon.counter("from_guest_offload_malformed"), 0);
        rig.assert_from_guest(&frame::plain(60, 1), Layout::Whole);
    }
}

#[rstest]
fn header_that_changes_while_it_is_read_hurts_nobody(
    #[values(Placement::Copy, Placement::SendDirect, Placement::Direct)] placement: Placement,
    #[values(rig_of, rig_by_reference)] rig: MakeRig,
) {
    require!(Root);
    let mut rig = rig(VethPair::new(), (placement, Mode::Native), F_HOST_ALL);
    let frame = GsoPacket::tcp(Ip::V4(0), 20_000);
    let bytes = frame.bytes();
    let ram = std::sync::Arc::clone(rig.pair().ram());
    let addr = ram.alloc(66 << 10, 64).expect("room");
    let good = [&header(frame.request(1000))[..], &bytes].concat();
    ram.write(addr, &good);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Another request, and other headers behind it, in turn with the good ones.
            let mut bad = good[..100].to_vec();
            (bad[1], bad[4], bad[5], bad[6], bad[8]) = (5, 0xff, 0xff, 0xff, 0xff);
            (bad[12 + 14], bad[12 + 17], bad[12 + 46]) = (0x4f, 0xff, 0xff);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                ram.write(addr, &bad);
                ram.write(addr, &good[..100]);
            }
        });
        for _ in 0..500 {
            rig.driver.pairs[0].send_buffers(&[Buffer::readable(addr, good.len() as u32)], false);
            while let Some(got) = rig.wire.receive(Duration::ZERO) {
                assert!(got.len() <= 1518, "{} bytes", got.len());
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    rig.pair().await_sent();
    let _ = rig.flush_from_guest();
    assert_cut(&mut rig, &frame, 1000, Layout::Whole);
    rig.pair().await_sent();
    assert_eq!(rig.driver.pairs[0].from_guest.driver.in_flight(), 0);
}
