//! A guest alone on an interface without an XDP program (`--mode tap`): frames come and go by a tap device, GSO packets
//! whole, read straight into the guest's buffers.

use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use testkit::control_queue::{self, ControlQueue, guest_offloads};
use testkit::daemon::{Mode, run_to_end};
use testkit::driver::{F_CTRL_GUEST_OFFLOADS, F_CTRL_VQ, F_GUEST_ALL, F_GUEST_CSUM, F_HOST_ALL, connect};
use testkit::frame;
use testkit::gso_packet::{GsoPacket, Ip, fold, header};
use testkit::{Driver, DriverConfig, Layout, NetNs, PacketPort, Rig, Serve, VethPair, kernel, require, wait};

fn serve() -> Serve {
    Serve::interface(VethPair::NIC).mode(Mode::Tap)
}

/// With the guest's usual buffers.
fn rig(serve: &Serve, features: u64) -> Rig {
    rig_with(serve, features, 64, &[1536])
}

fn rig_with(serve: &Serve, features: u64, buffers: usize, lengths: &[u32]) -> Rig {
    let mut rig = Rig::with(VethPair::new(), serve, &DriverConfig::with(features));
    rig.post(buffers, lengths);
    rig
}

/// The devices by which guests reach the wire.
fn taps(netns: &NetNs) -> String {
    netns.output_of("ip", &["-o", "link", "show", "type", "tun"])
}

/// A packet of a guest's, with its request.
fn packets() -> Vec<GsoPacket> {
    // UDP packets that are to be cut pass whole since Linux 6.2.
    let udp = (kernel::version() >= (6, 2)).then(|| GsoPacket::udp(Ip::V4(0), 40_000));
    let tcp = [
        GsoPacket::tcp(Ip::V4(0), 60_000),
        GsoPacket::tcp(Ip::V6(Vec::new()), 30_001),
    ];
    tcp.into_iter().chain(udp).collect()
}

/// The next frame of that many bytes that the guest gets.
#[track_caller]
fn got_of(rig: &mut Rig, len: usize) -> testkit::pair::Received {
    let pair = &mut rig.driver.pairs[0];
    let mut got = std::iter::from_fn(|| pair.receive(wait::SOON));
    let got = got.find(|got| got.frame.len() == len);
    got.unwrap_or_else(|| panic!("{:#}\n{}", rig.daemon.port(0), rig.daemon.said()))
}

#[rstest]
fn frames_pass_both_ways_and_status_says_how() {
    require!(Root);
    let mut rig = rig(&serve(), 0);
    for len in [14, 60, 1514] {
        for layout in [Layout::Whole, Layout::HeaderApart, Layout::Pieces(100)] {
            rig.assert_from_guest(&frame::plain(len, 1), layout);
            rig.assert_to_guest(&frame::plain(len, 2));
        }
    }
    let port = rig.daemon.port(0);
    assert_eq!(port["attached"], "tap");
    assert_eq!(port["lanes"][0]["mode"], "tap");
    let shown = rig
        .veth
        .near
        .output_of("ip", &["-d", "link", "show", VethPair::NIC]);
    assert!(!shown.contains("prog/xdp"), "{shown}");
    assert!(rig.daemon.counter("redirected") > 0, "the program's");
    rig.daemon.terminate();
    let left = || taps(&rig.veth.near);
    assert!(wait::until(wait::SOON, || left().is_empty()), "{}", left());
}

#[rstest]
fn gso_packets_pass_whole_both_ways(
    #[values((64, 1536), (20, 4096), (2, 65_562))] (buffers, len): (usize, u32),
) {
    require!(Root);
    let mut rig = rig_with(&serve(), F_HOST_ALL | F_GUEST_ALL, buffers, &[len]);
    let ear = PacketPort::open_to_read_with_header(&rig.veth.far, VethPair::WIRE);
    let mouth = PacketPort::open_gso_sender(&rig.veth);
    let mut sent = 0;
    for packet in packets() {
        let (frame, request) = (&packet.bytes(), packet.request(1000));
        // The second one is expected, and needs no other buffers than what it is read into.
        for piece in [9000, 4000] {
            rig.pair()
                .send_asking(&[(header(request), frame)], Layout::Pieces(piece));
            let mut bytes = vec![0; 70_000];
            let got = wait::until_some(wait::SOON, || {
                let (len, _) = ear.read_into(&mut bytes, Duration::from_millis(100)).ok()?;
                (bytes[10..len] == *frame).then(|| bytes[..10].to_vec())
            });
            let got = got.expect("whole");
            assert_eq!((got[1], &got[4..6]), (request[1], &request[4..6]));
            sent += 1;

            mouth.send(&[&request[..], frame].concat());
            let got = got_of(&mut rig, frame.len());
            assert!(got.frame == *frame);
            assert_eq!((got.header[1], &got.header[4..6]), (request[1], &request[4..6]));
        }
    }
    let whole = rig.daemon.counter("from_guest_super_frames_unsegmented");
    assert_eq!(whole, sent, "{:#}", rig.daemon.port(0));
}

#[rstest]
fn guest_gets_what_it_accepted_and_changes_its_mind() {
    require!(Root);
    let features = F_GUEST_ALL | F_CTRL_VQ | F_CTRL_GUEST_OFFLOADS;
    let mut rig = rig(&serve(), features);
    let mut control = ControlQueue::new(&rig.driver, 2);
    assert_eq!(control.start(&mut rig.driver), [0; 6]);
    let mouth = PacketPort::open_gso_sender(&rig.veth);
    let packet = GsoPacket::tcp(Ip::V4(0), 20_000);
    let all = rig.driver.features() & F_GUEST_ALL;
    for (on, arrive) in [(all, 1), (F_GUEST_CSUM, 20), (0, 20), (all, 1)] {
        assert_eq!(control.ask(&guest_offloads(on)), control_queue::OK);
        rig.await_to_guest();
        mouth.send(&[&packet.request(1000)[..], &packet.bytes()].concat());
        let headers = packet.header_len();
        let mut payload = Vec::new();
        for _ in 0..arrive {
            let got = got_of(&mut rig, headers + 20_000 / arrive);
            payload.extend(&got.frame[headers..]);
            if on == 0 {
                assert_eq!(got.header[..10], [0; 10]);
                let len = (got.frame.len() - 34) as u16;
                let pseudo = [&got.frame[26..34], &[0, 6], &len.to_be_bytes()].concat();
                assert_eq!(
                    fold(&[&pseudo, &got.frame[34..]].concat()),
                    0xffff,
                    "its checksum"
                );
            }
        }
        frame::assert_same(&payload, &packet.bytes()[headers..]);
    }
}

#[rstest]
fn steward_and_daemon_restart_under_a_guest() {
    require!(Root);
    // Each has a tap to send by.
    let serve = serve().leased().with("--queues", "2");
    let mut rig = Rig::with(VethPair::with(2, 1500), &serve, &DriverConfig::default());
    rig.post(64, &[1536]);
    rig.assert_passes_both_ways();
    let before = taps(&rig.veth.near);
    for signal in [Signal::TERM, Signal::KILL] {
        rig.daemon.end_steward(signal);
        rig.assert_passes_both_ways();
        rig.daemon.restart_lessor(&rig.veth.near);
        rig.assert_passes_both_ways();
    }
    assert_eq!(taps(&rig.veth.near), before, "others than before");
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "mtu", "1400"]);
    rig.daemon.await_port(0, "the MTU", |port| port["mtu"] == 1400);
    rig.assert_passes_both_ways();
    rig.daemon.terminate();
    rig.daemon.restart(&rig.veth.near, &serve);
    let mut rig = rig.exchange(|driver, daemon| {
        let resumed = driver.resume(connect(&daemon.socket()));
        resumed.expect("the guest goes on with its rings")
    });
    rig.await_passes_both_ways();
}

#[rstest]
fn host_has_the_frames_while_there_is_no_guest() {
    require!(Root);
    let rig = rig(&serve(), 0);
    let host = PacketPort::open(&rig.veth.near, VethPair::NIC);
    let (driver, daemon, wire, veth) = rig.into_parts();
    drop(driver);
    daemon.await_port(0, "no guest", |port| port["connected"] == false);
    let passed = wait::until(wait::SOON, || {
        wire.send(&frame::plain(60, 7));
        daemon.counter("passed") > 0
    });
    assert!(passed, "{:#}", daemon.port(0));
    drop(host);
    let driver = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    let mut rig = Rig {
        driver,
        daemon,
        wire,
        veth,
    };
    rig.post(64, &[1536]);
    rig.assert_passes_both_ways();
}

/// The kernel spreads flows over the tap's queues. What is for a pair that is off the first one gets.
#[rstest]
fn all_pairs_of_a_guest_send_and_receive(#[values(true, false)] sets_up_both: bool) {
    require!(Root);
    let serve = serve().with("--queues", "2");
    let config = DriverConfig::with_pairs(if sets_up_both { 2 } else { 1 });
    let mut rig = Rig::with(VethPair::with(2, 1500), &serve, &config);
    for pair in &mut rig.driver.pairs {
        pair.post(64, &[1536]);
    }
    for pair in 0..config.pairs {
        let sent = frame::plain(200, pair as u8);
        rig.driver.pairs[pair].send(&sent, Layout::Whole);
        let mut got = std::iter::from_fn(|| rig.wire.receive(wait::SOON));
        assert!(got.any(|got| got == sent), "pair {pair}");
    }
    // A frame of another flow each.
    let mut got = vec![0; config.pairs];
    for port in 0..100u16 {
        let sent = frame::udp(port, 100);
        rig.wire.send(&sent);
        let came = wait::until_some(wait::SOON, || {
            let mut pairs = rig.driver.pairs.iter_mut().enumerate();
            pairs.find_map(|(at, pair)| {
                let came = pair.receive(Duration::ZERO)?;
                pair.post(1, &[1536]);
                (came.frame == sent).then_some(at)
            })
        });
        got[came.expect("it reaches the guest")] += 1;
    }
    assert!(got.iter().all(|&frames| frames > 0), "{got:?}");
}

#[rstest]
fn what_tap_mode_has_no_queue_for_is_refused() {
    require!(Root);
    let veth = VethPair::new();
    for option in [
        &["--memory", "direct"][..],
        &["--force-zero-copy"],
        &["--memory", "send-direct"],
    ] {
        let args = [
            &[
                "serve",
                "--ifname",
                VethPair::NIC,
                "--mode",
                "tap",
                "--socket-path",
                "/tmp/none",
            ],
            option,
        ]
        .concat();
        let (status, said) = run_to_end(&veth.near, &args);
        assert!(!status.success() && said.contains("leave one out"), "{said}");
    }
}
