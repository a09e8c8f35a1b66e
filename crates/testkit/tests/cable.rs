//! Two guests of one process on one cable: packets pass as they are, and a guest that comes back gets the next frame.
//! Requests of frames are tested in crate `dataplane` (`tests/policy_tests.rs`).

use testkit::driver::{F_GUEST_ALL, F_HOST_ALL};
use testkit::gso_packet::{GsoPacket, Ip, header};
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Serve, frame, require, wait};

#[test]
fn packets_pass_whole_and_a_guest_that_comes_back_gets_the_next_frame() {
    require!(Root);
    let netns = NetNs::new("cable");
    let serve = Serve::cable("x").offload("all");
    let daemon = Daemon::start_ports(&netns, &serve, &["queues=2", "queues=1"]);
    let config = DriverConfig::with(F_HOST_ALL | F_GUEST_ALL);
    let guest = |name| {
        let mut guest = Driver::connect(&daemon.path(name), &config).expect("accepted");
        guest.pairs[0].post(128, &[1526]);
        guest
    };
    let [mut a, mut b] = ["port0.sock", "port1.sock"].map(guest);
    let packet = GsoPacket::tcp(Ip::V4(0), 60_000);
    let request = packet.request(1448);
    a.pairs[0].send_asking(&[(header(request), &packet.bytes())], Layout::Pieces(16 << 10));
    let got = b.pairs[0].receive(wait::SOON).expect("it arrives");
    frame::assert_same(&got.frame, &packet.bytes());
    assert_eq!(got.header[..10], request);
    drop(b);
    daemon.await_port(1, "no VMM is connected", |port| port["connected"] == false);
    let sent = frame::plain(300, 7);
    a.pairs[0].send(&sent, Layout::Whole);
    a.pairs[0].await_sent();
    daemon.await_counter("from_guest_no_peer", 1);
    let mut back = guest("port1.sock");
    a.pairs[0].send(&sent, Layout::Whole);
    let got = back.pairs[0].receive(wait::SOON).expect("it arrives");
    frame::assert_same(&got.frame, &sent);
}
