//! What ends and what lives on: lessees and stewards that are killed, interfaces that change under a lease.

use crate::common;

use std::os::fd::AsFd;
use std::time::Duration;

use common::{POLICY, World, await_facts, lessee};
use rustix::process::Signal;
use steer::Held;
use steward_client::LeaseError;
use steward_protocol::Step;
use testkit::{VethPair, assert_has, require, wait};

#[test]
fn lessee_is_notified_of_changes_of_its_interface() {
    require!(Root);
    let world = World::new();
    let lease = world.lease(0, 1).expect("allowed");
    assert!(lease.take_changes().expect("the lease is there").is_none());
    let before = lease.facts();
    let near = &world.veth.near;
    near.ip(&["link", "set", VethPair::NIC, "down"]);
    let down = await_facts(&lease, "down", |facts| !facts.up);
    assert!(down.impaired && down.note.contains("nic0 is down"), "{down:?}");
    near.ip(&["link", "set", VethPair::NIC, "mtu", "1400"]);
    await_facts(&lease, "MTU", |facts| facts.mtu == 1400);
    near.ip(&["link", "set", VethPair::NIC, "name", "other0"]);
    await_facts(&lease, "name", |facts| facts.name == "other0");
    near.ip(&["link set other0 name", VethPair::NIC, "mtu 1500 up"]);
    let after = await_facts(&lease, "as it was", |facts| {
        facts.up && facts.mtu == 1500 && facts.name == VethPair::NIC
    });
    assert_eq!(after, before, "same program, same generation");
}

#[test]
fn queue_is_waited_for_until_no_socket_has_it() {
    require!(Root);
    let world = World::new();
    let lease = world.lease(0, 2).expect("allowed");
    let free = |queue| lease.await_free(queue, Duration::ZERO);
    free(0).expect("nobody had it yet");
    let prepared = lessee::register(&lease, 0).expect("memory is left");
    let socket = lease.bind(prepared).expect("it is free");
    let again = socket.as_fd().try_clone_to_owned().expect("a descriptor is left");
    drop(socket);
    wait::a_moment();
    let busy = |queue| match free(queue) {
        Err(LeaseError::Failed { step, source }) => {
            (step, source.raw_os_error()) == (Step::Await, Some(libc::EBUSY))
        }
        _ => false,
    };
    assert!(busy(0), "a second descriptor keeps it");
    free(1).expect("nobody has the other one");
    drop(again);
    lease.await_free(0, wait::SOON).expect("the last one is closed");
    // Who asked has not taken it.
    let prepared = lessee::register(&lease, 0).expect("memory is left");
    lease.bind(prepared).expect("it is free");
    assert!(
        lease.await_free(2, Duration::ZERO).is_err(),
        "it is not of the lease"
    );
}

#[test]
fn lease_outlives_its_interface_and_goes_on_with_one_of_its_name() {
    require!(Root);
    let world = World::of_one_queue();
    let descriptors = world.descriptors();
    let lease = world.lease(0, 1).expect("allowed");
    let before = lease.facts();
    world.veth.near.ip(&["link", "delete", VethPair::NIC]);
    let gone = await_facts(&lease, "gone", |facts| facts.ifindex == 0);
    assert_eq!((gone.mode, gone.up), (None, false));
    assert_has(&gone.note, &["nic0 is gone"]);
    let prepared = lessee::register(&lease, 0).expect("memory needs no interface");
    common::assert_refused_with(lease.bind(prepared), "nic0 is gone");
    // Its queues stay its own meanwhile.
    world.veth.join(1, 1500);
    let back = await_facts(&lease, "back", |facts| facts.mode.is_some());
    assert_ne!(
        (back.ifindex, back.generation),
        (before.ifindex, before.generation)
    );
    assert!(world.program().is_some());
    lessee::register(&lease, 0).expect("a new one");
    // Gone once more, the lease ends like any other.
    world.veth.near.ip(&["link", "delete", VethPair::NIC]);
    await_facts(&lease, "gone", |facts| facts.ifindex == 0);
    drop(lease);
    world.await_descriptors(descriptors);
    world.veth.join(1, 1500);
    wait::a_moment();
    assert_eq!(world.program(), None, "nobody has a lease");
    world.lease(0, 1).expect("free");
}

/// Its name may be another interface's by then, which is nothing to the lease.
#[test]
fn detached_program_comes_back_to_a_renamed_interface() {
    require!(Root);
    let world = World::with(2, POLICY);
    let lease = world.lease(0, 1).expect("allowed");
    let (near, before) = (&world.veth.near, lease.facts());
    let attached = || steer::program_on(before.ifindex);
    near.ip(&["link", "set", VethPair::NIC, "name", "other0"]);
    await_facts(&lease, "renamed", |facts| facts.name == "other0");
    let mut others = Vec::new();
    for mtu in ["1400", "1401"] {
        let id = lease.facts().program;
        let held = || attached().map(|program| program.held(before.ifindex));
        let Some(Held::Link(link)) = near.enter(held) else {
            panic!("no link of the steward's");
        };
        detach_link(link);
        near.ip(&["link", "set", "other0", "mtu", mtu]);
        let after = await_facts(&lease, "attached again", |facts| {
            facts.mode.is_some() && facts.program != id
        });
        assert_eq!(after.ifindex, before.ifindex);
        assert_eq!(
            near.enter(attached).map(|program| program.id),
            Some(after.program)
        );
        if others.is_empty() {
            world.veth.join_as(VethPair::NIC, "wire1", 2, 1500);
            others.push(world.lease(0, 1).expect("another interface"));
        }
    }
    // Gone, it does not become the other one either, which is leased already.
    near.ip(&["link", "delete", "other0"]);
    await_facts(&lease, "gone", |facts| facts.impaired && facts.ifindex == 0);
    near.ip(&["link", "set", VethPair::NIC, "mtu", "1402"]);
    await_facts(&others[0], "looked at", |facts| facts.mtu == 1402);
    others.push(world.lease(1, 1).expect("beside the first"));
    assert_eq!(lease.facts().ifindex, 0);
}

/// `bpftool link detach id N`.
#[allow(unsafe_code)]
fn detach_link(id: u32) {
    use libbpf_rs::libbpf_sys;
    // SAFETY: no memory is passed; the descriptor is the one that the first call returned, and is closed once.
    unsafe {
        let fd = libbpf_sys::bpf_link_get_fd_by_id(id);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        assert_eq!(libbpf_sys::bpf_link_detach(fd), 0);
        libc::close(fd);
    }
}

#[test]
#[ignore = "run in a process of its own"]
fn child_echoes_until_killed() {
    lessee::give_up_privileges();
    let lease = lessee::lease();
    let mut echo = lessee::Echo::open(&lease, lessee::queue());
    println!("echoing");
    loop {
        echo.run(Duration::from_millis(100));
        if let Err(error) = lease.take_changes() {
            println!("lease over: {error}");
            return;
        }
    }
}

#[test]
fn steward_that_keeps_nothing_takes_its_program_along_and_lessees_learn_it_from_the_next() {
    require!(Root);
    let mut world = World::of_one_queue();
    for signal in [Signal::TERM, Signal::KILL] {
        let mut running = lessee::start(&world, "lifetime::child_echoes_until_killed", 0);
        world.await_echo();
        world.steward.signal(signal);
        let status = world.steward.wait(wait::SOON);
        assert_eq!(status.success(), signal == Signal::TERM);
        world.await_no_program();
        assert_eq!(world.socket().exists(), signal == Signal::KILL);
        // What a killed one left behind is no hindrance.
        world.restart();
        running.await_text("lease over: the steward refuses: no lease waits for this lessee");
        running.wait(wait::SOON);
    }
    let _running = lessee::start(&world, "lifetime::child_echoes_until_killed", 0);
    world.await_echo();
}
