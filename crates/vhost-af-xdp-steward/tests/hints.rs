//! Hints of the NIC: what leases of an interface ask for together, how it changes while they live, and what those are
//! told who know nothing of hints.

use crate::common;

use std::path::Path;
use std::time::Instant;

use common::{World, change, filtered, network, take, wanted};
use rustix::process::Signal;
use steer::{HintSet, Mode, ModeRequest, QueueConf};
use steward_client::{Lease, LeaseError, Waiting};
use steward_protocol::{HintRequest, Hinted, Reason, Wanted};
use testkit::{VethPair, require, wait};

const POLICY: &str =
    "[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\nnetwork = true\nmemlock = \"64 MiB\"\n";

fn set(text: &str) -> HintSet {
    text.parse().expect("hints")
}

fn hint_request(text: &str) -> HintRequest {
    HintRequest {
        asked: set(text),
        tags: false,
    }
}

fn hinted(path: &Path, wanted: &Wanted, hint_request: HintRequest) -> Result<Lease, LeaseError> {
    Lease::take_hinted(path, wanted, hint_request, Waiting::default())
}

fn told(lease: &Lease) -> Hinted {
    lease.hinted().expect("the steward knows of hints")
}

/// Whether veth tells hints here at all.
fn has_hints() -> bool {
    let kernel = HintSet::of_kernel();
    let has = kernel.has(set("hash,vlan"));
    if !has {
        println!("SKIPPED: this kernel has no hints but {kernel}");
    }
    has
}

/// Goes on with a lease until it is told what is waited for.
#[track_caller]
fn await_hints(lease: &Lease, what: &str, holds: impl Fn(&Hinted) -> bool) -> Hinted {
    common::await_lease(lease, what, |lease| {
        lease.hinted().is_some_and(|hinted| holds(&hinted))
    });
    lease.hinted().expect("it has them")
}

fn rxvlan(world: &World, on: &str) {
    world
        .veth
        .near
        .run("ethtool", &["-K", VethPair::NIC, "rxvlan", on]);
}

#[test]
fn program_writes_the_hints_of_all_leases_together() {
    require!(Root);
    if !has_hints() {
        return;
    }
    let world = World::with(4, POLICY);
    let first = hinted(&world.socket(), &wanted(0, 1), hint_request("hash")).expect("allowed");
    let of_first = told(&first);
    assert_eq!((of_first.on, of_first.why.as_str()), (set("hash"), ""));
    assert_eq!(of_first.possible, HintSet::ALL, "veth");
    assert_eq!(of_first.layouts.len(), 15);

    let second = hinted(&world.socket(), &wanted(1, 1), hint_request("mark")).expect("allowed");
    assert_eq!(told(&second).on, set("hash,mark"));
    let of_first = await_hints(&first, "the other's hints", |hints| hints.on == set("hash,mark"));
    assert_eq!(of_first.layouts.len(), 15, "all were known before");

    // Who knows nothing of hints is told nothing, and changes nothing.
    let old = take(&world.socket(), &wanted(2, 1)).expect("allowed");
    assert_eq!(old.hinted(), None);
    second
        .ask_for_hints(hint_request("none"))
        .expect("as often as that");
    assert_eq!(told(&second).on, set("hash,mark"), "it goes later");
    await_hints(&second, "what is left", |hints| hints.on == set("hash"));
    await_hints(&first, "what is left", |hints| hints.on == set("hash"));
    second
        .ask_for_hints(hint_request("vlan,timestamp"))
        .expect("as often as that");
    await_hints(&first, "other ones", |hints| {
        hints.on == set("hash,vlan,timestamp")
    });
    drop(second);
    await_hints(&first, "its own alone", |hints| hints.on == set("hash"));
    old.take_changes().expect("its lease goes on");
    assert_eq!(old.facts().generation, first.facts().generation);
    assert_eq!(world.attached(1), 1);
}

#[test]
fn impossible_hints_are_reported_and_the_lease_continues_without() {
    require!(Root);
    if !has_hints() {
        return;
    }
    let mut world = World::with(2, &format!("{POLICY}hints = \"hash\"\n"));
    let lease = hinted(&world.socket(), &wanted(0, 1), hint_request("hash,mark")).expect("allowed");
    let hints = told(&lease);
    assert_eq!(hints.on, set("hash"));
    assert!(hints.why.contains("no mark: the policy"), "{}", hints.why);
    // Another policy counts at once.
    world.set_policy(POLICY);
    let hints = await_hints(&lease, "what the new policy allows", |hints| {
        hints.on == set("hash,mark")
    });
    assert_eq!(hints.why, "");
    drop(lease);

    let world = World::with(2, POLICY);
    let skb = Wanted {
        mode: ModeRequest::Skb,
        ..wanted(0, 1)
    };
    let lease = hinted(&world.socket(), &skb, hint_request("hash")).expect("allowed");
    let hints = told(&lease);
    assert_eq!((lease.facts().mode, hints.on), (Some(Mode::Skb), HintSet::NONE));
    assert_eq!(hints.possible, HintSet::NONE);
    assert!(hints.why.contains("native mode"), "{}", hints.why);
}

/// A queue whose frames may have hints before them.
struct HintedQueue {
    socket: xsk::Socket,
    umem: xsk::Umem,
    pool: xsk::FramePool,
}

impl HintedQueue {
    fn open(lease: &Lease, queue: u32) -> Self {
        let prepared = common::lessee::register(lease, queue).expect("memory");
        let umem = prepared.umem().clone();
        let pool = umem.all_frames().expect("fresh").collect();
        let socket = lease.bind(prepared).expect("bound");
        let conf = QueueConf {
            virtio_header: None,
            frame_limit: 1518,
            hints: true,
        };
        lease.activate(queue, conf).expect("allowed");
        Self { socket, umem, pool }
    }

    /// Whether the next frame that the far end sends has hints: their layout's number is the last four bytes before it.
    fn next_has_hints(&mut self, world: &World) -> bool {
        self.socket.fill.refill(&mut self.pool, 1);
        world.wire.send(&testkit::frame::plain(200, 7));
        let desc = wait::until_some(wait::SOON, || self.socket.rx.peek(1).next()).expect("a frame");
        let mut number = [0; 4];
        let at = desc.data.get() - 4;
        self.umem
            .read(xsk::UmemOffset::new(at), &mut number)
            .expect("inside");
        number != [0; 4]
    }
}

#[test]
fn who_may_have_no_hints_gets_none_that_others_have() {
    require!(Root);
    if !has_hints() {
        return;
    }
    let policy = |hints: &str| {
        let first = POLICY.replace("\"all\"", "\"0\"");
        format!(
            "{first}hints = \"{hints}\"\n{}",
            POLICY.replace("\"all\"", "\"1\"")
        )
    };
    let mut world = World::with(2, &policy("none"));
    // All frames come by queue 0.
    world.veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    let other = hinted(&world.socket(), &wanted(1, 1), hint_request("hash,mark")).expect("allowed");
    let lease = hinted(&world.socket(), &wanted(0, 1), hint_request("none")).expect("allowed");
    assert_eq!(told(&other).on, set("hash,mark"));
    assert_eq!(told(&lease).on, HintSet::NONE, "what its frames have");
    let mut queue = HintedQueue::open(&lease, 0);
    assert!(!queue.next_has_hints(&world), "of others");
    for (hints, on) in [("mark", "hash,mark"), ("none", "none")] {
        world.set_policy(&policy(hints));
        await_hints(&lease, hints, |told| told.on == set(on));
        assert_eq!(queue.next_has_hints(&world), hints != "none", "{hints}");
    }
}

#[test]
fn vlans_are_known_where_the_driver_strips_tags() {
    require!(Root);
    if !has_hints() {
        return;
    }
    let world = World::with(2, POLICY);
    rxvlan(&world, "on");
    let tagged = filtered(0, &[], &[100]);
    let where_needed = HintRequest {
        asked: HintSet::NONE,
        tags: true,
    };
    for hint_request in [None, Some(hint_request("hash"))] {
        let lease = match hint_request {
            None => take(&world.socket(), &tagged),
            Some(hint_request) => hinted(&world.socket(), &tagged, hint_request),
        };
        common::assert_refused_with(lease, "hints with vlan");
    }
    let lease = hinted(&world.socket(), &tagged, where_needed).expect("the program is told of tags");
    assert_eq!(told(&lease).on, set("vlan"));
    // Only where it is needed.
    rxvlan(&world, "off");
    await_hints(&lease, "tags are in frames", |hints| hints.on.is_empty());
    rxvlan(&world, "on");
    await_hints(&lease, "tags are taken off", |hints| hints.on == set("vlan"));
    assert!(!lease.facts().impaired, "{:?}", lease.facts());
    drop(lease);

    let network = network(0, 1);
    let change = |vlan, port| change(vlan, [2, 0, 0, 0, 0, 9], port);
    // The queue is taken back when the steward sees the end of the lease before.
    let again = || hinted(&world.socket(), &network, where_needed).ok();
    let lease = wait::until_some(wait::SOON, again).expect("allowed");
    lease.set_stations(&[change(0, Some(1))]).expect("allowed");
    assert_eq!(told(&lease).on, HintSet::NONE, "no VLANs yet");
    assert!(lease.facts().strips_tags);
    lease
        .set_stations(&[change(7, Some(1))])
        .expect("the program is told of tags");
    await_hints(&lease, "a station of a VLAN", |hints| hints.on == set("vlan"));
}

#[test]
fn tags_for_other_leases_are_no_use_to_a_lease_without_hints() {
    require!(Root);
    if !has_hints() {
        return;
    }
    let world = World::with(4, POLICY);
    rxvlan(&world, "on");
    let first = hinted(&world.socket(), &wanted(0, 1), hint_request("vlan")).expect("allowed");
    assert_eq!(told(&first).on, set("vlan"));
    let network = |queue, asked| {
        let wanted = common::network(queue, 1);
        let lease = hinted(&world.socket(), &wanted, hint_request(asked)).expect("allowed");
        let change = change(7, [2, 0, 0, 0, 0, queue as u8], Some(1));
        let strips = lease.facts().strips_tags;
        let changed = lease.set_stations(&[change]).map(|()| lease.facts());
        (strips, changed)
    };
    let (strips, refused) = network(1, "hash");
    assert!(strips, "its frames come without tags");
    let refused = match refused {
        Err(LeaseError::Refused(refusal)) => refusal,
        other => panic!("{other:?}"),
    };
    assert!(refused.text.contains("hints with vlan"), "{refused}");
    let (strips, allowed) = network(2, "hash,vlan");
    assert!(!strips && allowed.is_ok(), "{allowed:?}");
}

#[test]
fn hints_outlive_the_steward() {
    require!(Root);
    if !has_hints() {
        return;
    }
    let mut world = World::kept_for(POLICY, "60");
    let lease = hinted(&world.socket(), &wanted(0, 1), hint_request("hash,mark")).expect("allowed");
    let (before, program, facts) = (told(&lease), world.program(), lease.facts());
    for signal in [Signal::TERM, Signal::KILL] {
        world.restart_after(signal);
        assert_eq!(world.program(), program);
        await_hints(&lease, "back", |hints| !lease.is_away() && hints.on == before.on);
        assert_eq!(told(&lease), before);
        assert_eq!(lease.facts().generation, facts.generation);
    }
    lease
        .ask_for_hints(hint_request("vlan"))
        .expect("as with any steward");
    let hints = await_hints(&lease, "what is left", |hints| hints.on == set("vlan"));
    assert_eq!(hints.layouts.len(), 15);
    let program = world.program();
    world.restart_after(Signal::KILL);
    await_hints(&lease, "back", |hints| {
        !lease.is_away() && hints.on == set("vlan")
    });
    assert_eq!(world.program(), program);
    assert_eq!(lease.facts().generation, facts.generation, "the same sockets");
}

#[test]
fn other_hints_cannot_be_asked_for_without_end() {
    require!(Root);
    let world = World::with(2, POLICY);
    let lease = hinted(&world.socket(), &wanted(0, 1), HintRequest::default()).expect("allowed");
    let refused = (0..1000).find_map(|n| {
        let hint_request = hint_request(["mark", "none"][n % 2]);
        lease.ask_for_hints(hint_request).err()
    });
    match refused {
        Some(LeaseError::Refused(refusal)) => assert_eq!(refusal.reason, Reason::Limit, "{refusal}"),
        other => panic!("{other:?}"),
    }
    lease.deactivate(0).expect("the lease goes on");
}

#[test]
fn leases_that_come_and_go_do_not_have_programs_loaded_without_end() {
    require!(Root);
    let world = World::with(2, POLICY);
    let kept = hinted(&world.socket(), &wanted(0, 1), HintRequest::default()).expect("allowed");
    let (begun, mut given) = (Instant::now(), 0);
    // A lease that ends is taken back by a steward that may wait for a CPU.
    let mut tries = 0;
    while tries < 200 || (given < 2 && begun.elapsed() < wait::SOON) {
        tries += 1;
        match hinted(&world.socket(), &wanted(1, 1), hint_request("mark")) {
            Ok(_) => given += 1,
            // The one before is being taken back.
            Err(LeaseError::Refused(refusal)) if refusal.reason == Reason::Taken => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(given > 1, "{given} leases");
    // It comes and goes once in the time that it stays, 5 s.
    let most = 2 * (1 + begun.elapsed().as_secs() / 5);
    let loaded = world.steward.said().matches(" hints=").count();
    assert!(
        (1..=most).contains(&(loaded as u64)),
        "{loaded} programs, {most} at most"
    );
    await_hints(&kept, "what nobody asks for goes", |hints| hints.on.is_empty());
}
