//! Guests that ask for what cannot be. What is dropped is tested in crate `dataplane` (`tests/request_tests.rs`).

use super::*;
use testkit::assert_has;

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
    assert_has(line, &["a checksum from byte 34, stored 0 bytes behind"]);
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
    assert_has(line, &["GSO with segments of 0 bytes."]);
}
