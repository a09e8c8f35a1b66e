//! Queues of the NIC that netkits have: in another network namespace, frames both ways, and nothing left whoever dies.

mod changes;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use host::nic::bound::Bound;
use rustix::process::Signal;
use steer::SocketMap;
use steward_client::{Lease, LeaseError};
use steward_protocol::{Facts, NetkitEnd, NetkitWanted, Reason, Wanted};
use testkit::{
    Daemon, Driver, DriverConfig, Layout, NetNs, PacketPort, Running, Serve, assert_has, daemon, require,
    wait,
};
use xsk::{BindRequest, QueueId, Socket, SocketConfig};

use super::{NIC, QUEUE, Rig, WIRE, common, kills};
use common::lessee::{self, Echo};

/// The address of who is behind the netkit.
const MAC: [u8; 6] = [2, 0, 0, 0, 0x6e, 0x6b];
const NAME: &str = "pod0";

/// Rules for lessees and root, with more keys.
fn rules(keys: &str) -> String {
    let rule = |user: &str| {
        format!(
            "[[allow]]\nuser = {user}\ninterface = \"{NIC}\"\nqueues = \"2-3\"\n\
             macs = [\"02:00:00:00:6e:6b\"]\n{keys}\n"
        )
    };
    [rule("HOLDER"), rule("0")].concat()
}

fn rig() -> Option<Rig> {
    Rig::with(&rules("netkit = true"))
}

fn wanted() -> Wanted {
    Wanted {
        interface: NIC.to_owned(),
        ..common::filtered(QUEUE, &[MAC], &[])
    }
}

fn netkit(name: &str) -> NetkitWanted {
    NetkitWanted {
        queue: QUEUE,
        name: name.to_owned(),
    }
}

fn file_of(ns: &NetNs) -> File {
    File::open(format!("/run/netns/{}", ns.name())).expect("it is there")
}

/// Names of the interfaces in a namespace.
fn interfaces(ns: &NetNs) -> Vec<String> {
    let report = ns.output_of("ip", &["-o", "link"]);
    let names = report.lines().filter_map(|line| line.split(": ").nth(1));
    names
        .map(|name| name.split('@').next().unwrap_or(name).to_owned())
        .collect()
}

impl Rig {
    fn lease_of_a_netkit(&self) -> Lease {
        common::take(&self.world.socket(), &wanted())
            .unwrap_or_else(|error| panic!("{error}: {}", self.world.steward))
    }

    /// A netkit in a namespace, with the map for its socket.
    fn netkit_in(&self, lease: &Lease, pod: &NetNs) -> (NetkitEnd, OwnedFd) {
        lease
            .netkit(netkit(NAME), Some(file_of(pod).as_fd()))
            .unwrap_or_else(|error| panic!("{error}: {}", self.world.steward))
    }

    /// Has the steward read another policy.
    fn read_again(&mut self, policy: &str) {
        let count = |rig: &Self| {
            rig.world
                .steward
                .said()
                .matches("the policy was read again")
                .count()
        };
        let before = count(self);
        self.world.set_policy(policy);
        self.world.await_that(|| count(self) > before);
    }

    /// The lease goes on with the steward that is there now.
    #[track_caller]
    fn await_steward(&self, lease: &Lease) {
        self.await_facts(lease, |_| !lease.is_away());
    }

    /// The lease goes on, and its facts become like this.
    #[track_caller]
    fn await_facts(&self, lease: &Lease, are_so: impl Fn(&Facts) -> bool) {
        let became = || {
            let changed = lease.take_changes();
            let changed = changed.unwrap_or_else(|error| panic!("{error}: {}", self.world.steward));
            are_so(&changed.unwrap_or_else(|| lease.facts()))
        };
        self.world.await_that(became);
    }

    /// Nothing of a netkit is anywhere.
    #[track_caller]
    fn assert_no_netkit(&self, pod: &NetNs) {
        let here = || interfaces(&self.world.veth.near);
        let left = || {
            let is_ours = |name: &String| name.starts_with("vaxk") || name == NAME;
            here()
                .into_iter()
                .chain(interfaces(pod))
                .filter(is_ours)
                .collect::<Vec<_>>()
        };
        assert!(wait::until(wait::SOON, || left().is_empty()), "{:?}", left());
        self.assert_untouched();
    }

    /// A frame that goes to the netkit's address comes back from there.
    #[track_caller]
    fn assert_echo(&self, wire: &PacketPort, seed: u8) {
        let sent = frame(seed);
        let comes = wait::until(wait::SOON, || {
            wire.send(&sent);
            wire.receive(Duration::from_millis(200))
                .is_some_and(|got| got == sent)
        });
        assert!(
            comes,
            "no echo: {}\n{}",
            self.world.steward,
            self.ethtool(&["-S", NIC])
        );
    }
}

fn frame(seed: u8) -> Vec<u8> {
    let mut frame = [&MAC[..], &[2, 0, 0, 0, 0, 9, 0x88, 0xb5]].concat();
    frame.extend((0..200u8).map(|byte| byte.wrapping_mul(7).wrapping_add(seed)));
    frame
}

/// Sends back what comes to a netkit's queue, until that is enough.
fn echo(end: &NetkitEnd, map: OwnedFd, is_enough: &AtomicBool) {
    let umem = lessee::umem();
    let mut config = SocketConfig::new(end.ifindex, QueueId(end.queue));
    config.bind = BindRequest::ForceZeroCopy;
    config.bind_timeout = wait::SOON;
    let socket =
        Socket::open(&umem, &config).unwrap_or_else(|error| panic!("{}", steer::with_sources(&error)));
    let map = SocketMap::from_fd(map).expect("it is one of sockets");
    map.insert(0, socket.as_fd()).expect("its place");
    let mut echo = Echo::of_socket(socket, umem.all_frames().expect("fresh").collect());
    while !is_enough.load(Relaxed) {
        echo.run(Duration::from_millis(20));
    }
}

/// Has what comes to the netkit sent back while something is done.
fn while_echoing(pod: &NetNs, (end, map): (NetkitEnd, OwnedFd), act: impl FnOnce()) {
    let is_enough = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| pod.enter(|| echo(&end, map, &is_enough)));
        let _enough = wait::Raised(&is_enough);
        act();
    });
}

#[test]
fn frames_pass_both_ways_by_a_netkit_in_another_namespace_and_all_goes_with_the_lease() {
    require!(Root);
    let Some(rig) = rig() else { return };
    let pod = NetNs::new("pod");
    let wire = PacketPort::open(&rig.world.veth.far, WIRE);
    let lease = rig.lease_of_a_netkit();
    let made = rig.netkit_in(&lease, &pod);
    let link = pod.output_of("ip", &["-d", "link", "show", "dev", NAME]);
    assert_has(&link, &["02:00:00:00:6e:6b", ",UP"]);
    assert_eq!(made.0.name, NAME);
    let bound = rig.bound();
    let is_there = matches!(bound, Some(Bound::Lease(to)) if (to.ifindex, to.queue) == (made.0.ifindex, made.0.queue)
        && to.namespace.is_some());
    assert!(is_there, "{bound:?}, {:?}", made.0);
    assert_eq!(rig.rules(), 1);
    while_echoing(&pod, made, || {
        (0..4).for_each(|seed| rig.assert_echo(&wire, seed));
        assert!(
            lease
                .counters(QUEUE, common::soon())
                .expect("counters")
                .redirected
                >= 4
        );
        // The socket is there yet.
        drop(lease);
        rig.assert_no_netkit(&pod);
    });
    rig.world.await_nothing();
}

#[test]
fn lease_and_netkit_go_on_when_the_steward_is_another_one() {
    require!(Root);
    let Some(mut rig) = rig() else { return };
    let pod = NetNs::new("pod");
    let wire = PacketPort::open(&rig.world.veth.far, WIRE);
    let lease = rig.lease_of_a_netkit();
    let made = rig.netkit_in(&lease, &pod);
    let end = made.0.clone();
    while_echoing(&pod, made, || {
        rig.assert_echo(&wire, 1);
        for signal in [Signal::TERM, Signal::KILL] {
            rig.world.end_steward(signal);
            rig.assert_echo(&wire, 2);
            rig.world.restart();
            rig.await_steward(&lease);
            rig.assert_echo(&wire, 3);
            // Asked once more, it says the same.
            let again = rig.netkit_in(&lease, &pod).0;
            assert_eq!(again, end);
        }
    });
    drop(lease);
    rig.assert_no_netkit(&pod);
    rig.world.await_nothing();
}

#[test]
fn netkit_that_cannot_be_is_refused_with_the_reason_and_leaves_nothing() {
    require!(Root);
    let Some(rig) = rig() else { return };
    let pod = NetNs::new("pod");
    pod.ip(&["link", "add", "other0", "type", "veth", "peer", "name", "other1"]);
    let lease = rig.lease_of_a_netkit();
    let refused = |name: &str, file: Option<&File>, reason, words: &str| {
        let refusal = common::refusal(lease.netkit(netkit(name), file.map(AsFd::as_fd)));
        assert!(
            refusal.reason == reason && refusal.text.contains(words),
            "{refusal}"
        );
        let left = interfaces(&pod)
            .into_iter()
            .chain(interfaces(&rig.world.veth.near));
        assert!(!left.into_iter().any(|name| name.starts_with("vaxk")));
        assert!(!matches!(rig.bound(), Some(Bound::Lease(_))));
    };
    refused("other0", Some(&file_of(&pod)), Reason::Taken, "another name");
    refused(NIC, None, Reason::Taken, "another name");
    let no_namespace = File::open("/dev/null").expect("it is there");
    refused(NAME, Some(&no_namespace), Reason::NotAllowed, "/run/netns/NAME");
    let not_of_network = File::open("/proc/self/ns/mnt").expect("it is there");
    refused(
        NAME,
        Some(&not_of_network),
        Reason::NotAllowed,
        "not one network namespace",
    );
    rig.world.veth.near.ip(&["link", "set", NIC, "down"]);
    refused(NAME, Some(&file_of(&pod)), Reason::Impaired, "is down");
    rig.world.veth.near.ip(&["link", "set", NIC, "up"]);
    refused("pod%d", Some(&file_of(&pod)), Reason::NotAllowed, "pod%d");
    // The lessee has the queue itself, and goes on with it.
    let mut own = Echo::open(&lease, QUEUE);
    refused(NAME, None, Reason::Taken, "is taken");
    let wire = PacketPort::open(&rig.world.veth.far, WIRE);
    let comes = || {
        wire.send(&frame(7));
        own.run(Duration::from_millis(20));
        wire.receive(Duration::from_millis(20))
            .is_some_and(|got| got == frame(7))
    };
    rig.world.await_that(comes);
    lease.deactivate(QUEUE).expect("its own");
    drop(own);
    lease.await_free(QUEUE, wait::SOON).expect("it is closed");
    // A process without a lease has it.
    let index = rig.world.veth.near.index_of(NIC);
    rig.world.veth.near.enter(|| {
        let mut config = SocketConfig::new(index, QueueId(QUEUE));
        config.bind = BindRequest::ForceZeroCopy;
        let umem = lessee::umem();
        let socket =
            Socket::open(&umem, &config).unwrap_or_else(|error| panic!("{}", steer::with_sources(&error)));
        let refusal = common::refusal(lease.netkit(netkit(NAME), None));
        assert!(refusal.reason == Reason::Taken, "{refusal}");
        drop(socket);
    });
    // After all that it can be had, once the kernel has let go of that socket.
    let made = || match lease.netkit(netkit(NAME), Some(file_of(&pod).as_fd())) {
        Err(LeaseError::Refused(refusal)) if refusal.reason == Reason::Taken => None,
        made => Some(made.unwrap_or_else(|error| panic!("{error}"))),
    };
    assert!(wait::until_some(wait::SOON, made).is_some());
    drop(lease);
    let two = common::take(
        &rig.world.socket(),
        &Wanted {
            start_queue: 2,
            queues: 2,
            ..wanted()
        },
    )
    .expect("free");
    common::assert_refused(two.netkit(netkit(NAME), None), Reason::Lease, "one queue");
    drop(two);
    rig.assert_no_netkit(&pod);
    rig.world.await_nothing();
}

#[test]
fn rule_without_netkit_rejects_one_and_ends_one_that_exists() {
    require!(Root);
    let Some(mut rig) = Rig::with(&rules("")) else {
        return;
    };
    let pod = NetNs::new("pod");
    let lease = rig.lease_of_a_netkit();
    common::assert_refused(
        lease.netkit(netkit(NAME), None),
        Reason::NotAllowed,
        "netkit = true",
    );
    rig.read_again(&rules("netkit = true"));
    let _made = rig.netkit_in(&lease, &pod);
    rig.read_again(&rules(""));
    rig.assert_no_netkit(&pod);
    rig.world.await_that(|| lease.take_changes().is_err());
    rig.world.await_nothing();
}

#[test]
fn lessee_without_privileges_has_no_netkit_in_the_namespace_of_others_or_of_the_steward() {
    require!(Root);
    let Some(rig) = rig() else { return };
    let pod = NetNs::new("pod");
    let mut running = lessee::spawn_on(&rig.world, "netkits::child_asks_for_others", pod.name());
    running.await_text("it has none");
    // Its lease goes on.
    let here = interfaces(&rig.world.veth.near);
    let is_netkit = |name: &String| name == NAME || name.starts_with("vaxk");
    assert!(!here.iter().any(is_netkit), "{here:?}");
    running.signal(Signal::KILL);
    running.wait(wait::SOON);
    rig.assert_no_netkit(&pod);
}

#[test]
fn daemon_serves_a_guest_on_a_netkit_of_the_command() {
    require!(Root);
    let Some(rig) = rig() else { return };
    let pod = NetNs::new("pod");
    let wire = PacketPort::open(&rig.world.veth.far, WIRE);
    let bpffs = rig.world.bpffs.as_ref().expect("its leases are kept");
    let pin = bpffs.pins().with_file_name("pod0");
    let file = format!("/run/netns/{}", pod.name());
    let (queue, socket) = (QUEUE.to_string(), rig.world.socket());
    let mut command = Command::new(daemon::binary());
    command.args([
        "netkit",
        NIC,
        &queue,
        NAME,
        "--netns",
        &file,
        "--mac",
        "02:00:00:00:6e:6b",
    ]);
    command.arg("--pin").arg(&pin).arg("--steward").arg(&socket);
    let mut held = Running::start(command);
    held.await_text("its queue 1 is queue 3 of rig1");
    let ask = |ns: &NetNs, args: &[&str]| {
        let report = ns.command(daemon::binary()).args(args).output().expect("it runs");
        String::from_utf8_lossy(&report.stdout).into_owned()
    };
    let at_nic = ask(&rig.world.veth.near, &["queues", NIC]);
    assert_has(&at_nic, &[", queue 1, network namespace "]);
    let at_netkit = ask(&pod, &["queues", NAME]);
    assert_has(&at_netkit, &["lease of a NIC in another network namespace"]);
    let checked = ask(&pod, &["check", NAME]);
    assert_has(&checked, &["--start-queue 1 --inhibit --map-path"]);
    pod.enter(|| {
        let serve = Serve::interface(NAME).by_root().flag("--inhibit");
        let serve = serve
            .with("--start-queue", "1")
            .with("--map-path", pin.display().to_string());
        let command = Command::new(daemon::binary());
        let mut served = Daemon::spawn_by(command, daemon::private_dir(), &serve);
        served.await_ready();
        let mut guest = Driver::connect(&served.socket(), &DriverConfig::default()).expect("accepted");
        let pair = &mut guest.pairs[0];
        pair.post(64, &[2048]);
        for seed in 0..20 {
            let sent = frame(seed);
            let comes = wait::until_some(wait::SOON, || {
                wire.send(&sent);
                pair.receive(Duration::from_millis(200))
                    .filter(|got| got.frame == sent)
            });
            assert!(comes.is_some(), "{}", served.said());
            pair.send(&sent, Layout::Whole);
            // Among what the host says by the NIC.
            let is_back = || {
                wire.receive(Duration::from_millis(200))
                    .is_some_and(|got| got == sent)
            };
            assert!(wait::until(wait::SOON, is_back), "{}", served.said());
            pair.post(1, &[2048]);
        }
        assert_eq!(
            served.port(0)["lanes"][0]["mode"],
            "zero-copy",
            "{}",
            served.status()
        );
    });
    held.signal(Signal::TERM);
    assert!(held.wait(wait::SOON).success());
    rig.assert_no_netkit(&pod);
    rig.world.await_nothing();
}

#[test]
fn kills_leave_no_netkit() {
    require!(Root);
    let Some(mut rig) = rig() else { return };
    let kills = kills();
    let pod = NetNs::new("pod");
    for kill in 0..kills {
        let mut running = lessee_of(&rig, &pod);
        assert!(interfaces(&pod).contains(&NAME.to_owned()));
        // The lessee alone; both, the steward first; both, with the NIC down in between; the steward for good, and what
        // it left is taken back by a command.
        let last = kill % 4 == 3;
        if kill % 4 > 0 {
            rig.world.end_steward(Signal::KILL);
        }
        running.signal(Signal::KILL);
        running.wait(wait::SOON);
        if kill % 4 == 2 {
            rig.world.veth.near.ip(&["link", "set", NIC, "down"]);
        }
        if last {
            rig.world.take_back();
            rig.assert_no_netkit(&pod);
        }
        if kill % 4 > 0 {
            rig.world.restart();
        }
        rig.assert_gone_when_up(&pod);
    }
    println!("killed {kills} times");
    rig.world.await_nothing();
}

impl Rig {
    /// Also of a NIC that is down; then it comes up.
    fn assert_gone_when_up(&self, pod: &NetNs) {
        self.world
            .await_that(|| !interfaces(pod).contains(&NAME.to_owned()));
        self.world.veth.near.ip(&["link", "set", NIC, "up"]);
        self.assert_no_netkit(pod);
    }
}

#[test]
fn steward_that_dies_at_any_point_leaves_no_netkit() {
    require!(Root);
    let Some(mut rig) = rig() else { return };
    let pod = NetNs::new("pod");
    for point in [
        "netkit-saved",
        "netkit-made",
        "netkit-leased",
        "netkit-moved",
        "netkit-settled",
        "netkit-deleted",
        "taken-back",
    ] {
        rig.world.end_steward(Signal::TERM);
        rig.world.restart_to_crash(point);
        rig.world.steward.await_text("ready");
        let mut running = spawn_lessee(&rig, &pod);
        // Where it dies before it has answered, the lessee ends by itself.
        if matches!(point, "netkit-deleted" | "taken-back") {
            running.await_text("it has it");
            running.signal(Signal::KILL);
        }
        running.wait(wait::SOON);
        rig.world.steward.wait(wait::SOON);
        rig.world.restart();
        rig.assert_no_netkit(&pod);
    }
    rig.world.await_nothing();
}

fn spawn_lessee(rig: &Rig, pod: &NetNs) -> Running {
    lessee::spawn_on(&rig.world, "netkits::child_has_a_netkit", pod.name())
}

fn lessee_of(rig: &Rig, pod: &NetNs) -> Running {
    let mut running = spawn_lessee(rig, pod);
    running.await_text("it has it");
    running
}

/// Holds a netkit in the namespace that the test names, as root.
#[test]
#[ignore = "run by another test"]
fn child_has_a_netkit() {
    let lease = common::take(&lessee::socket(), &wanted()).unwrap_or_else(|it| panic!("{it}"));
    let file = File::open(format!("/run/netns/{}", lessee::interface())).expect("it is there");
    let _made = lease
        .netkit(netkit(NAME), Some(file.as_fd()))
        .unwrap_or_else(|it| panic!("{it}"));
    println!("it has it");
    std::thread::sleep(Duration::from_secs(3600));
}

/// Asks for one in a namespace of root's, and then for one in the steward's, and has its lease yet.
#[test]
#[ignore = "run by another test"]
fn child_asks_for_others() {
    let file = File::open(format!("/run/netns/{}", lessee::interface())).expect("it is there");
    lessee::give_up_privileges();
    let lease = common::take(&lessee::socket(), &wanted()).unwrap_or_else(|it| panic!("{it}"));
    common::assert_refused(
        lease.netkit(netkit(NAME), Some(file.as_fd())),
        Reason::NotAllowed,
        "another user's",
    );
    common::assert_refused(lease.netkit(netkit(NAME), None), Reason::NotAllowed, "--netns");
    println!("it has none");
    std::thread::sleep(Duration::from_secs(3600));
}
