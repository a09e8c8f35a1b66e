//! Leases for certain addresses and VLANs: what comes to the lessee, what goes to the host, what the policy says to it.
//!
//! No interface here has n-tuple rules; that a NIC without them is told of, and the program used, is tested for real.
//! What is done to one that has them is tested beside `crates/steward/src/hardware`, with a NIC that is played, and in
//! the kernel rig, with its own NIC (`nic/packets.rs`).

use crate::common;

use common::{World, bare, filtered, lessee, lessee_may, refusal, soon, take, to, wanted};
use steward_client::Lease;
use steward_protocol::{Facts, Reason, Steered, Wanted};
use testkit::{PacketPort, VethPair, assert_has, require, wait};

/// Root may lease for these addresses and VLANs only.
const NAMED: &str = r#"
[[allow]]
user = 0
interface = "nic0"
queues = "all"
macs = ["02:00:00:00:00:aa", "02:00:00:00:00:ab"]
vlans = ["0", "100-101"]
"#;
const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
const THEIRS: [u8; 6] = [2, 0, 0, 0, 0, 0xbb];

fn policy() -> String {
    lessee_may(VethPair::NIC, "0") + NAMED
}

/// On an interface that leaves tags in frames.
fn world(queues: u32, policy: &str) -> World {
    let world = World::with(queues, policy);
    set_rxvlan(&world, "off");
    world
}

fn set_rxvlan(world: &World, how: &str) {
    let near = &world.veth.near;
    near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", how]);
}

#[test]
fn lessee_gets_frames_of_its_address_and_the_host_the_others() {
    require!(Root);
    let world = world(1, &policy());
    let _running = lessee::start(&world, "steering::child_echoes_for_one_address", 0);
    let comes = || world.echo(&to(OURS, 1), std::time::Duration::from_millis(100));
    assert!(wait::until(wait::SOON, comes), "no echo");
    let last = to(OURS, 2);
    world.wire.try_send(&last).expect("sent");
    let _ = world.wire.receive_before(&last);
    for seed in 0..10 {
        assert!(world.echo(&to(OURS, seed), wait::SOON), "ours");
        assert!(world.echo(&to([0xff; 6], seed), wait::SOON), "everybody's");
        world.wire.try_send(&to(THEIRS, seed)).expect("sent");
        let last = to(OURS, seed + 100);
        world.wire.try_send(&last).expect("sent");
        assert!(world.wire.receive_before(&last).is_empty(), "somebody else's");
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_echoes_for_one_address() {
    lessee::give_up_privileges();
    let wanted = filtered(lessee::queue(), &[OURS], &[]);
    let lease = take(&lessee::socket(), &wanted).unwrap_or_else(|error| panic!("{error}"));
    let mut echo = lessee::Echo::open(&lease, lessee::queue());
    println!("echoing");
    loop {
        echo.run(std::time::Duration::from_millis(100));
    }
}

#[test]
fn nic_without_rules_is_reported_and_the_program_used() {
    require!(Root);
    let world = world(2, &policy());
    let lease = take(&world.socket(), &filtered(0, &[OURS], &[100, 101])).expect("allowed");
    let Facts {
        steered, steering, ..
    } = lease.facts();
    assert_eq!(steered, Steered::ByProgram);
    assert_has(&steering, &["n-tuple"]);
    assert!(!lease.facts().impaired);
    // Where the policy's rule names nothing the NIC is not even asked.
    drop(lease);
    let open = World::with(1, &common::POLICY.replace("HOLDER", "1"));
    let lease = take(&open.socket(), &filtered(0, &[OURS], &[])).expect("allowed");
    assert_has(
        &lease.facts().steering,
        &["a steward makes rules if its policy names them"],
    );
}

#[test]
fn interface_accepts_frames_to_the_stations_of_a_lease_for_as_long_as_it_lasts() {
    require!(Root);
    let world = world(1, &policy());
    let accepts = || world.accepts("02:00:00:00:00:aa");
    assert!(!accepts());
    let lease = take(&world.socket(), &filtered(0, &[OURS], &[100])).expect("allowed");
    assert!(accepts(), "{}", lease.facts().steering);
    world.veth.near.ip(&["link", "delete", VethPair::NIC]);
    world.veth.join(1, 1500);
    assert!(wait::until(wait::SOON, accepts), "made again");
    drop(lease);
    assert!(wait::until(wait::SOON, || !accepts()));
}

#[test]
fn lease_for_vlans_is_refused_where_their_tags_are_taken_off() {
    require!(Root);
    let world = World::with(1, &format!("{NAMED}{}", common::POLICY.replace("nic0", "mv0")));
    let near = &world.veth.near;
    for vlans in [&[0][..], &[100], &[0, 100]] {
        common::assert_refused(
            take(&world.socket(), &filtered(0, &[OURS], vlans)),
            Reason::NoInterface,
            "`ethtool -K nic0 rxvlan off`",
        );
    }
    assert_eq!((world.program(), world.attached(0)), (None, 0));
    set_rxvlan(&world, "off");
    let lease = take(&world.socket(), &filtered(0, &[OURS], &[0])).expect("allowed");
    // What the far end of a veth does cannot be seen from here.
    let Facts { steering, .. } = lease.facts();
    assert_has(&steering, &["txvlan off"]);
    // A macvlan's frames have lost their tags already; it has no say in it. All of its frames are no question of tags.
    near.ip(&["link add link", VethPair::NIC, "name mv0 type macvlan"]);
    let on_macvlan = |vlans: &[u16]| Wanted {
        interface: "mv0".to_owned(),
        ..filtered(0, &[], vlans)
    };
    common::assert_refused_with(take(&world.socket(), &on_macvlan(&[0])), "the interface below it");
    take(&world.socket(), &on_macvlan(&[])).expect("allowed");
}

#[test]
fn lease_for_vlans_gets_nothing_from_when_tags_are_taken_off_until_they_are_not() {
    require!(Root);
    let mut world = World::kept_for(&policy(), "60");
    set_rxvlan(&world, "off");
    let lease = take(&world.socket(), &filtered(0, &[OURS], &[0])).expect("allowed");
    let conf = bare(1518);
    let before = lease.facts();
    lease.activate(0, conf).expect("ours");
    let taken = || {
        let counters = lease.counters(0, soon()).expect("ours");
        counters.redirected + counters.no_socket
    };
    let arrives = |count| {
        world.wire.send(&to(OURS, 1));
        wait::until(wait::SOON, || taken() == count)
    };
    assert!(arrives(1));
    set_rxvlan(&world, "on");
    let impaired = |lease: &Lease| {
        lease
            .take_changes()
            .expect("it goes on")
            .map(|facts| facts.impaired)
    };
    world.await_that(|| impaired(&lease) == Some(true));
    let Facts { note, .. } = lease.facts();
    assert_has(&note, &["`ethtool -K nic0 rxvlan off`"]);
    let refused = refusal(lease.activate(0, conf));
    assert_eq!(refused.reason, Reason::Impaired, "{refused}");
    let host = PacketPort::open(&world.veth.near, VethPair::NIC);
    world.wire.send(&to(OURS, 2));
    let mut heard = std::iter::from_fn(|| host.receive(wait::SOON));
    assert!(
        heard.any(|frame| frame == to(OURS, 2)),
        "its frames go to the host"
    );
    assert_eq!(taken(), 1);
    // The same with the next steward.
    world.restart_after(rustix::process::Signal::KILL);
    common::await_lease(&lease, "back", |lease| !lease.is_away());
    assert!(lease.facts().impaired);
    let before = lease.facts().generation.max(before.generation);
    set_rxvlan(&world, "off");
    world.await_that(|| impaired(&lease) == Some(false));
    // Lessees set up their queues again.
    assert_ne!(lease.facts().generation, before);
    lease.activate(0, conf).expect("ours");
    world.wire.send(&to(OURS, 1));
    world.await_that(|| taken() == 2);
}

#[test]
fn addresses_of_a_lease_are_checked_against_the_policy() {
    require!(Root);
    let world = world(2, &policy());
    let take = |wanted: &Wanted| common::take(&world.socket(), wanted);
    let refused = |wanted: &Wanted, words: &str| {
        let refusal = refusal(take(wanted));
        assert_eq!(refusal.reason, Reason::NotAllowed);
        assert!(refusal.text.contains(words), "{words} in: {refusal}");
    };
    refused(&wanted(0, 1), "(mac)");
    refused(&filtered(0, &[OURS], &[]), "(vlan)");
    refused(&filtered(0, &[OURS, THEIRS], &[100]), "02:00:00:00:00:bb");
    refused(&filtered(0, &[OURS], &[100, 102]), "VLAN 102");
    assert_eq!(world.program(), None);
    take(&filtered(0, &[OURS], &[0, 101])).expect("allowed");
}

#[test]
fn lease_that_ends_leaves_the_queue_to_a_successor_without_its_entries() {
    require!(Root);
    let world = world(2, &common::POLICY.replace("0-1", "0"));
    let keep = world.lease(1, 1).expect("the program stays");
    let take = |wanted: &Wanted| common::take(&world.socket(), wanted);
    drop(take(&filtered(0, &[OURS], &[7])).expect("allowed"));
    let free = || take(&wanted(0, 1)).ok();
    let mut again = None;
    assert!(wait::until(wait::SOON, || {
        again = free();
        again.is_some()
    }));
    let lease = again.expect("free");
    assert_eq!(lease.facts().steered, Steered::ByQueue);
    let _echoes = [(&lease, 0), (&keep, 1)].map(|(lease, queue)| lessee::Echo::open(lease, queue));
    world.wire.send(&to(THEIRS, 1));
    let counted = || {
        let of = |lease: &Lease, queue| lease.counters(queue, soon()).expect("ours");
        let (first, second) = (of(&lease, 0), of(&keep, 1));
        assert_eq!((first.not_ours, second.not_ours), (0, 0));
        first.redirected + second.redirected
    };
    assert!(wait::until(wait::SOON, || counted() == 1));
}

#[test]
fn lease_for_an_address_takes_the_same_frames_over_a_restart_of_the_steward() {
    require!(Root);
    let mut world = World::kept_for(&policy(), "60");
    set_rxvlan(&world, "off");
    let accepts = |world: &World| world.accepts("02:00:00:00:00:aa");
    let lease = take(&world.socket(), &filtered(0, &[OURS], &[0])).expect("allowed");
    let before = lease.facts();
    let conf = bare(1518);
    lease.activate(0, conf).expect("ours");
    for (round, signal) in (1..).zip([rustix::process::Signal::KILL, rustix::process::Signal::TERM]) {
        world.end_steward(signal);
        // Nobody is there, and it is looked at each frame all the same.
        world.wire.send(&to(THEIRS, 1));
        world.wire.send(&to(OURS, 1));
        world.restart();
        let counters = || {
            let counters = lease.counters(0, soon()).ok()?;
            Some([counters.not_ours, counters.redirected + counters.no_socket])
        };
        let counted = wait::until(wait::SOON, || {
            let _ = lease.take_changes();
            counters() == Some([round; 2])
        });
        assert!(counted, "{:?}", counters());
        assert!(accepts(&world));
        // As before, but for who says it.
        assert_eq!(lease.facts().steered, before.steered);
        assert_eq!(lease.facts().steering, before.steering);
    }
    drop(lease);
    assert!(wait::until(wait::SOON, || !accepts(&world)));
    world.await_nothing();
}
