//! What a hostile user tries on the children that the steward starts for it, and by them on others: mostly by files
//! that take for ever to close.
//!
//! These tests run one at a time, in one process, too ([`alone`]). A process that another test starts has our files
//! from its fork to its exec, which closes them: of such a file it would wait for ever, and with it who starts it; and
//! its server counts how often the file is closed.

use crate::common;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::hostile::{assert_serves, leased, lingering, memfd, registration};
use common::raw::Raw;
use common::{POLICY, World, wanted};
use rustix::process::Signal;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use steward_protocol::{Answer, Request};
use testkit::stalled::{LateFile, SilentFile};
use testkit::{kernel, procfs, require, wait};

/// The one test of this file that runs now, until it is dropped. What failed in another one is no matter.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A rule by which a user may lease, and pin as much as even a steward may count that cannot raise its own limit.
fn rule_for(uid: u32) -> String {
    format!("[[allow]]\nuser = {uid}\ninterface = \"nic0\"\nqueues = \"all\"\nmemlock = \"2 MiB\"\n")
}

/// What the kernel shows of the steward's child without capabilities, which registers memory.
fn registering_child(world: &World) -> PathBuf {
    let has_none = |&child: &u32| procfs::capabilities(child, "CapEff") == Some(0);
    let find = || procfs::children(world.steward.pid()).into_iter().find(has_none);
    let child = wait::until_some(wait::SOON, find).expect("it hangs");
    format!("/proc/{child}").into()
}

/// It is a copy of the steward, tokens of all leases included. Root without capabilities is a user like others, as in a
/// container.
#[test]
fn child_of_the_steward_cannot_be_looked_into_by_the_user_it_works_for() {
    require!(Root);
    let _alone = alone();
    let mut world = World::with(2, &rule_for(0));
    let connection = leased(&world);
    // Its child hangs when it drops what is no memory, and has it last.
    let (socket, peer) = lingering();
    world.steward.signal(Signal::STOP);
    connection.send_with(&registration(0, 1).encode(1), &socket, 1);
    drop(socket);
    world.steward.signal(Signal::CONT);
    let child = registering_child(&world);
    let look = || {
        let none = CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        };
        // This thread's.
        set_capabilities(None, none).expect("fewer");
        ["mem", "maps", "environ"].map(|name| File::open(child.join(name)).map_err(|error| error.kind()))
    };
    let seen = std::thread::scope(|scope| scope.spawn(look).join().expect("no panic"));
    for opened in seen {
        assert_eq!(opened.err(), Some(io::ErrorKind::PermissionDenied));
    }
    drop((connection, peer));
    assert_serves(&world);
}

/// What a connection has that nobody has read is closed with it, and whoever closes it may have to wait.
#[test]
fn steward_ends_at_once_whatever_lies_unread_in_its_connections() {
    require!(Root);
    let _alone = alone();
    let mut world = World::new();
    let (socket, _peer) = lingering();
    let _connection = leaves_unread(&world, 0, 0, &socket);
    drop(socket);
    world.end_steward(Signal::TERM);
}

/// Under a rule there may be as many jobs as hang here. A policy that is read again has other rules.
#[test]
fn request_that_waits_for_others_is_done_when_the_policy_changes() {
    require!(Root, Fuse);
    let _alone = alone();
    let users = [1_400_001, 1_400_002, 1_400_003];
    let rule = "[[allow]]\ngroup = 1400000\ninterface = \"nic0\"\nqueues = \"all\"\nmemlock = \"2 MiB\"\n";
    let mut world = World::with(2, &format!("{rule}{POLICY}"));
    let silent = SilentFile::new(2 << 20);
    let socket = world.socket();
    let connect = |uid| Raw::leased_as(&socket, uid, 1_400_000, &wanted(0, 1));
    for (before, uid) in [users[0], users[0], users[0], users[1]].into_iter().enumerate() {
        let hangs = connect(uid);
        hangs.send_with(&registration(0, 1).encode(1), &silent.file, 1);
        silent.await_closing(before + 1);
        // Its lease ends, and its child does not.
        drop(hangs);
    }
    let waits = connect(users[2]);
    waits.send_with(&registration(0, 1).encode(7), &memfd(2 << 20), 1);
    // What another asks for behind it is done.
    assert_serves(&world);
    let are_those = wait::until(wait::SOON, || world.children() == 4);
    assert!(are_those, "{} children", world.children());
    let seen = waits.receive(Duration::ZERO);
    assert_eq!(seen, None, "it waits for the others");
    world.steward.signal(Signal::HUP);
    assert_eq!(waits.receive(wait::SOON), Some((7, Answer::Done)));
}

/// What takes rings out of other processes has only the child that does it, although the steward has it for that.
#[test]
fn child_that_takes_no_rings_has_dropped_that_capability() {
    require!(Root, Fuse);
    let _alone = alone();
    let zcrx = "[[allow]]\nuser = 0\ninterface = \"lo\"\nqueues = \"0\"\nzcrx = [\"192.0.2.1:443\"]\n";
    let world = World::with(2, &format!("{zcrx}{POLICY}"));
    let takes_rings = |pid| {
        let permitted = procfs::capabilities(pid, "CapPrm")?;
        Some(permitted & CapabilitySet::SYS_PTRACE.bits() != 0)
    };
    let pid = world.steward.pid();
    assert_eq!(takes_rings(pid), Some(true));
    // Its child hangs when it looks at what is no memory.
    let silent = SilentFile::new(2 << 20);
    let connection = leased(&world);
    connection.send_with(&registration(0, 1).encode(1), &silent.file, 1);
    silent.await_closing(1);
    let find = || takes_rings(*procfs::children(pid).first()?).filter(|takes| !takes);
    let found = wait::until_some(wait::SOON, find);
    assert!(found.is_some());
    drop((connection, silent));
    assert_serves(&world);
}

/// In what a lessee leaves unread there may be files that nobody can close. Of the processes that try it there are few,
/// and what they do not close counts as the connections that it was.
#[test]
fn connections_that_hang_when_they_are_closed_count() {
    require!(Root, Fuse);
    let _alone = alone();
    if kernel::version() < (6, 16) {
        println!("SKIPPED: which files hang when they are closed is known from Linux 6.16 on only");
        return;
    }
    let uid = 1_400_004;
    let limits = format!("[limits]\nconnections = {CONNECTIONS}\n");
    let world = World::with(8, &format!("{limits}{}{POLICY}", rule_for(uid)));
    let before = world.descriptors();
    // Closed at last, when nobody waits any more.
    let writer;
    let late = LateFile::new(1 << 20);
    // Clean when we close it, and not when others do.
    let leave = |queue| leaves_unread(&world, uid, queue, &late.open());
    let connections: Vec<Raw> = (2..).take(CONNECTIONS).map(leave).collect();
    writer = late.open();
    (&writer).write_all(&[1; 4096]).expect("it is kept here");
    for (ended, connection) in (1..).zip(connections) {
        drop(connection);
        let hang = wait::until(wait::SOON, || world.children() == ended.min(CLOSING));
        assert!(hang, "{} of {ended} hang", world.children());
    }
    wait::a_moment();
    assert_eq!(world.children(), CLOSING);
    let mut come: Vec<Raw> = (0..CONNECTIONS)
        .map(|_| Raw::connect_as(&world.socket(), uid, uid))
        .collect();
    let has_refused = || {
        come.retain(|other| !other.is_over(Duration::ZERO));
        come.len() <= CLOSING
    };
    world.await_that(has_refused);
    wait::a_moment();
    come.retain(|other| !other.is_over(Duration::ZERO));
    assert_eq!(come.len(), CLOSING, "of {CONNECTIONS} others");
    assert_serves(&world);
    drop((late, come));
    world.await_descriptors(before);
}

/// Files of a file system that the sender serves (FUSE): whoever looks at one waits, and whoever closes it.
#[test]
fn files_that_hang_delay_only_their_sender() {
    require!(Root, Fuse);
    let _alone = alone();
    let world = World::new();
    let before = world.descriptors();
    let silent = SilentFile::new(2 << 20);
    let connection = leased(&world);
    connection.send_with(&registration(0, 1).encode(1), &silent.file, 1);
    for bytes in [Request::Facts.encode(1), registration(0, 1).encode(1), vec![1; 7]] {
        // Also where nobody asked for it.
        let stray = Raw::connect(&world.socket());
        let _ = stray.try_send_with(&bytes, &silent.file, 1);
        assert_serves(&world);
    }
    assert_serves(&world);
    // Its lease ends although its job does not.
    drop(connection);
    drop(leased(&world));
    drop(silent);
    world.await_descriptors(before);
}

/// Whoever closes the last descriptor of such a TCP socket waits until its peer has read what was sent, which it never
/// does (SO_LINGER). Also a user without any rule may send one.
#[test]
fn sockets_that_never_close_delay_no_other_lessee() {
    require!(Root);
    let _alone = alone();
    let world = World::new();
    let before = world.descriptors();
    for bytes in [Request::Facts.encode(1), registration(0, 1).encode(1), vec![1; 7]] {
        for uid in [0, 1_234_567] {
            let (lingering, peer) = lingering();
            let stray = Raw::connect_as(&world.socket(), uid, uid);
            // Who has no rule may be refused already; who has no lease cannot send it from Linux 6.16 on.
            if stray.try_send_with(&bytes, &lingering, 1).is_err() {
                drop(peer);
                continue;
            }
            drop(lingering);
            drop(stray);
            assert_serves(&world);
            drop(peer);
        }
    }
    world.await_descriptors(before);
}

/// Of a user, and how many processes close some of them.
const CONNECTIONS: usize = 5;
const CLOSING: usize = 3;

/// A connection with a lease that has a message with a file, which is not read.
fn leaves_unread(world: &World, uid: u32, queue: u32, file: &impl AsFd) -> Raw {
    let mut connection = Raw::connect_as(&world.socket(), uid, uid);
    connection.lease(wanted(queue, 1));
    // As long as these are not read no further request is.
    for serial in 1..100 {
        let asked = connection.send(&Request::Counters { queue }.encode(serial));
        asked.expect("room");
    }
    wait::a_moment();
    connection.send_with(&registration(queue, 1).encode(100), file, 1);
    connection
}
