//! What happens to an interface under a lease: the lessee is told, and why, and goes on when it is over.

use crate::common;

use common::{World, await_facts, bare, lessee, refusal, soon, take};
use steward_protocol::{Facts, Reason, Steered};
use testkit::{VethPair, require, wait};

fn channels(world: &World, near: &str, far: &str) {
    // A veth with a program refuses fewer queues than its far end sends to.
    if near < far {
        world.veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", near]);
    }
    world.veth.near.run("ethtool", &["-L", VethPair::NIC, "rx", near]);
    world.veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", near]);
}

#[test]
fn queue_that_channels_take_away_impairs_its_lease_until_it_is_back() {
    require!(Root);
    let world = World::new();
    let first = world.lease(0, 1).expect("allowed");
    let second = world.lease(1, 1).expect("allowed");
    let before = second.facts();
    assert_eq!((before.rx_queues, before.impaired), (2, false));
    channels(&world, "1", "2");
    let fewer = await_facts(&second, "impaired", |facts| facts.impaired);
    assert_eq!(fewer.rx_queues, 1);
    for words in ["nic0 has 1 receive queue(s) now, queue 1", "ethtool -L"] {
        assert!(fewer.note.contains(words), "{words} in: {}", fewer.note);
    }
    assert_eq!(fewer.generation, before.generation, "the program stays");
    // The other lease is told of the number, and not impaired.
    let other = await_facts(&first, "fewer", |facts| facts.rx_queues == 1);
    assert!(!other.impaired && other.note.is_empty(), "{other:?}");
    // It is not to be had again, and not lost.
    assert_eq!(refusal(world.lease(1, 1)).reason, Reason::NoInterface);
    channels(&world, "2", "1");
    let after = await_facts(&second, "as it was", |facts| !facts.impaired);
    assert_eq!(after, before);
    assert_eq!(refusal(world.lease(1, 1)).reason, Reason::Taken);
}

#[test]
fn interface_that_is_renamed_is_the_same_under_its_new_name() {
    require!(Root);
    let world = World::of_one_queue();
    let lease = world.lease(0, 1).expect("allowed");
    let before = lease.facts();
    world
        .veth
        .near
        .ip(&["link", "set", VethPair::NIC, "name", "other0"]);
    let renamed = await_facts(&lease, "renamed", |facts| facts.name == "other0");
    assert_eq!(
        renamed,
        Facts {
            name: "other0".to_owned(),
            ..before.clone()
        }
    );
    lessee::register(&lease, 0).expect("it goes on");
    // Another interface that gets the name is not taken for it, and may be leased beside it.
    world.veth.join_as(VethPair::NIC, "wire1", 1, 1500);
    let new = world.lease(0, 1).expect("another interface");
    assert_ne!(new.facts().ifindex, before.ifindex);
    world.veth.near.ip(&["link", "delete", VethPair::NIC]);
    await_facts(&new, "gone", |facts| {
        facts.impaired && facts.note.contains("gone")
    });
    assert!(!lease.facts().impaired);
    lessee::register(&lease, 0).expect("it goes on");
}

/// What the lease takes is told to the program that is attached again, before the lessee can use it.
#[test]
fn interface_that_is_made_again_or_moves_away_and_back_takes_the_same_frames() {
    require!(Root);
    let world = World::of_one_queue();
    let ours = [2, 0, 0, 0, 0, 0xaa];
    let wanted = common::filtered(0, &[ours], &[]);
    let lease = take(&world.socket(), &wanted).expect("allowed");
    let takes_what_is_ours = || {
        let conf = bare(1518);
        lease.activate(0, conf).expect("ours");
        let wire = testkit::PacketPort::open(&world.veth.far, VethPair::WIRE);
        let mut frame = testkit::frame::plain(100, 1);
        // No socket is bound; that the program would have given it one is what counts.
        let counters = || {
            let counters = lease.counters(0, soon()).expect("ours");
            (counters.not_ours, counters.redirected + counters.no_socket)
        };
        // An interface that has just come up may lose some.
        let arrives = |frame: &[u8], is_counted: &dyn Fn() -> bool| {
            wait::until(wait::SOON, || wire.try_send(frame).is_ok() && is_counted())
        };
        assert!(arrives(&frame, &|| counters().0 > 0), "{:?}", counters());
        assert_eq!(counters().1, 0);
        frame[..6].copy_from_slice(&ours);
        assert!(arrives(&frame, &|| counters().1 > 0), "{:?}", counters());
    };
    takes_what_is_ours();
    world.veth.near.ip(&["link", "delete", VethPair::NIC]);
    await_facts(&lease, "gone", |facts| facts.impaired);
    world.veth.join(1, 1500);
    await_facts(&lease, "made again", |facts| !facts.impaired);
    takes_what_is_ours();
    let (near, far) = (&world.veth.near, &world.veth.far);
    near.ip(&["link", "set", VethPair::NIC, "netns", far.name()]);
    let gone = await_facts(&lease, "moved", |facts| facts.impaired);
    assert_eq!((gone.ifindex, gone.mode), (0, None));
    let program = || {
        far.enter(|| {
            let link = host::links::Link::by_name(VethPair::NIC).expect("it moved there");
            steer::program_on(link.index)
        })
    };
    assert!(wait::until(wait::SOON, || program().is_none()), "{:?}", program());
    far.ip(&["link", "set", VethPair::NIC, "netns", near.name()]);
    near.ip(&["link", "set", VethPair::NIC, "up"]);
    let back = await_facts(&lease, "moved back", |facts| !facts.impaired && facts.up);
    assert_eq!(back.steered, Steered::ByProgram);
    takes_what_is_ours();
}
