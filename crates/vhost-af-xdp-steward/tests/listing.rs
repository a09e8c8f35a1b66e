//! Who is told of which lease.

use crate::common;

use common::{World, lessee, lessee_uid, take, wanted};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use steer::Filter;
use steward_client::LeaseError;
use steward_client::listing::{self, Listed};
use steward_protocol::{Reason, Steered, Wanted};
use testkit::{VethPair, assert_soon, require, wait};

#[test]
fn root_lists_all_leases_and_other_users_their_own() {
    require!(Root);
    let world = World::with(4, common::POLICY);
    let keep_tags = ["-K", testkit::VethPair::NIC, "rxvlan", "off"];
    world.veth.near.run("ethtool", &keep_tags);
    assert_eq!(listing::leases(&world.socket()).expect("it answers"), []);
    let wanted = Wanted {
        filter: Filter {
            macs: vec![[2, 0, 0, 0, 0, 1]],
            vlans: vec![0, 7],
        },
        ..wanted(2, 2)
    };
    let _lease = take(&world.socket(), &wanted).expect("allowed");
    let mut lessee = lessee::start(&world, "listing::child_leases_and_lists", 1);
    let all = listing::leases(&world.socket()).expect("it answers");
    let namespace = world.veth.near.enter(host::links::namespace);
    let ours = Listed {
        number: all[0].number,
        namespace,
        pid: std::process::id(),
        uid: 0,
        interface: VethPair::NIC.to_owned(),
        start_queue: 2,
        queues: 2,
        filter: wanted.filter,
        steered: Steered::ByProgram,
        impaired: false,
        orphaned: false,
        zcrx: false,
    };
    let theirs = Listed {
        number: all[1].number,
        pid: lessee.pid(),
        uid: lessee_uid(),
        start_queue: 1,
        queues: 1,
        filter: Filter::default(),
        steered: Steered::ByQueue,
        ..ours.clone()
    };
    assert_eq!(all, [ours, theirs]);
    world.veth.near.ip(&["link", "set", VethPair::NIC, "down"]);
    let impaired =
        || listing::leases(&world.socket()).is_ok_and(|all| all.iter().all(|lease| lease.impaired));
    assert_soon!(impaired());
    lessee.signal(rustix::process::Signal::KILL);
    lessee.wait(wait::SOON);
    assert_soon!(listing::leases(&world.socket()).is_ok_and(|all| all.len() == 1));
}

#[test]
#[ignore = "run in a process of its own"]
fn child_leases_and_lists() {
    lessee::give_up_privileges();
    let _lease = take(&lessee::socket(), &wanted(lessee::queue(), 1)).expect("allowed");
    let known = listing::leases(&lessee::socket()).expect("it answers");
    assert_eq!(known.len(), 1);
    assert_eq!((known[0].pid, known[0].start_queue), (std::process::id(), 1));
    println!("echoing");
    std::thread::sleep(20 * wait::SOON);
}

#[test]
fn users_without_a_rule_cannot_list_leases_but_root_can() {
    require!(Root);
    let world = World::with(1, "[[allow]]\nuser = 7\ninterface = \"nic0\"\nqueues = \"all\"\n");
    let mut child = lessee::spawn(&world, "listing::child_is_refused", 0);
    assert!(child.wait(wait::SOON).success(), "{child}");
    assert_eq!(listing::leases(&world.socket()).expect("root may ask"), []);
    let refused = common::refusal(world.lease(0, 1));
    assert_eq!(refused.reason, Reason::NotAllowed);
    let nowhere = listing::leases(&world.dir.path().join("none"));
    assert!(matches!(nowhere, Err(LeaseError::Connect { .. })));
}

#[test]
#[ignore = "run in a process of its own"]
fn child_is_refused() {
    lessee::give_up_privileges();
    let refused = common::refusal(listing::leases(&lessee::socket()));
    assert_eq!(refused.reason, Reason::NotAllowed);
    let user = format!("user {}", lessee_uid());
    assert!(refused.text.contains(&user), "{refused}");
}

#[test]
fn steward_that_does_not_accept_is_not_waited_for_without_end() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("steward.sock");
    let address = SocketAddrUnix::new(&path).expect("short");
    let socket =
        |flags| socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
    let listener = socket(SocketFlags::CLOEXEC);
    bind(&listener, &address).expect("free");
    listen(&listener, 0).expect("bound");
    let next = || {
        let socket = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        connect(&socket, &address).is_ok().then_some(socket)
    };
    let _queue: Vec<_> = std::iter::from_fn(next).collect();
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(listing::leases(&path).is_err()));
    assert_eq!(told.recv_timeout(2 * wait::SOON), Ok(true));
}
