//! See [`super`].

use std::io::Write;
use std::os::fd::AsFd;
use std::process::Stdio;
use std::thread;

use host::links::netlink_socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use testkit::netns::NetNs;

use super::*;

const STATION: Mac = [2, 0, 0, 0, 3, 1];
const HOP: Mac = [2, 0, 0, 0, 0, 2];

fn run(ns: &NetNs, line: &str) {
    let words: Vec<_> = line.split(' ').collect();
    ns.run(words[0], &words[1..]);
}

/// A host with a vxlan device, and an entry for a station behind a VTEP whose next hop is not resolved.
fn host() -> (NetNs, Follower) {
    let ns = NetNs::new("follower");
    for line in [
        "ip link add u0 type veth peer name far",
        "ip link set far up",
        "ip link set u0 up",
        "ip address add 10.9.0.1/24 dev u0",
        "ip link add vx100 type vxlan id 100 dstport 4789 nolearning local 10.9.0.1",
        "ip link set vx100 up",
        "bridge fdb add 02:00:00:00:03:01 dev vx100 dst 10.9.0.2",
    ] {
        run(&ns, line);
    }
    let follower = begin(&ns);
    (ns, follower)
}

fn begin(ns: &NetNs) -> Follower {
    ns.enter(|| {
        let sockets = [(); 2].map(|()| netlink_socket(None).expect("a socket"));
        let vxlan = Link::by_name("vx100").expect("it is there").index;
        TableChanges::prepare(sockets[1].as_fd(), vxlan).expect("prepared");
        let underlay = Link::by_name("u0").expect("it is there");
        Follower::begin(sockets, "vx100", &underlay, false).expect("it follows")
    })
}

/// Waits for a change of the tables, or until one is due to be applied; false: neither is the case now.
fn wait(follower: &Follower, longest: Duration) -> bool {
    let due = follower.due();
    let until_due = due.map(|due| due.saturating_duration_since(Instant::now()));
    let longest = Timespec::try_from(until_due.unwrap_or(longest)).expect("short");
    let changed = poll(
        &mut [PollFd::new(&*follower.changes, PollFlags::IN)],
        Some(&longest),
    );
    changed == Ok(1) || due.is_some()
}

/// Applies all changes until now, without the pauses before all tables are read again.
fn settle(follower: &mut Follower) {
    loop {
        follower.follow();
        follower.not_before = Instant::now();
        if !wait(follower, Duration::ZERO) {
            break;
        }
    }
}

/// VTEPs of [`command`], all behind one next hop.
const VTEPS: u32 = 1000;

fn add_next_hop(ns: &NetNs) {
    run(ns, "ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev u0");
    run(ns, "ip route add 10.10.0.0/16 via 10.9.0.2");
}

fn numbered(number: u32) -> Mac {
    let [_, high, middle, low] = number.to_be_bytes();
    [2, 0, 1, high, middle, low]
}

fn vtep_of(number: u32) -> IpAddr {
    let number = number % VTEPS;
    [10, 10, (number / 250) as u8, (number % 250) as u8].into()
}

/// A command of bridge(8) about an entry.
fn command(act: &str, number: u32, vtep: IpAddr) -> String {
    format!(
        "fdb {act} {} dev vx100 dst {vtep}",
        steer::mac_text(numbered(number))
    )
}

fn batch(ns: &NetNs, act: &str, numbers: std::ops::Range<u32>) {
    ns.batch(
        "bridge",
        numbers.map(|number| command(act, number, vtep_of(number))),
    );
}

/// Where frames to an address are sent.
fn sent_to(follower: &Follower, number: u32) -> Option<IpAddr> {
    let number = follower.remotes.find(numbered(number))?;
    Some(ends(follower.published.0.get(usize::from(number.0))?.as_ref()?).1)
}

#[test]
fn no_entry_is_lost_when_notifications_are_and_more_than_fit_are_counted() {
    testkit::require!(Root);
    let (ns, mut follower) = host();
    add_next_hop(&ns);
    settle(&mut follower);
    let assert_has = |follower: &Follower, numbers: std::ops::Range<u32>| {
        for number in numbers {
            assert_eq!(sent_to(follower, number), Some(vtep_of(number)), "{number}");
        }
    };
    // More at once than there is room for notifications of.
    batch(&ns, "add", 0..100_000);
    settle(&mut follower);
    assert_has(&follower, 0..100_000);
    let counted = |follower: &Follower| {
        let counts = follower.counts;
        [counts.addresses, counts.vteps, counts.resolved, counts.left_out]
    };
    // And the first one.
    assert_eq!(counted(&follower), [100_001, 1001, 1001, 0]);
    batch(&ns, "add", 100_000..135_000);
    settle(&mut follower);
    let [addresses, _, _, left_out] = counted(&follower);
    assert_eq!((addresses, left_out), (REMOTES_MAX, 135_001 - REMOTES_MAX));
    // Those that were left out get the room of others.
    batch(&ns, "del", 0..10_000);
    settle(&mut follower);
    assert_eq!(counted(&follower), [125_001, 1001, 1001, 0]);
    assert_has(&follower, 10_000..135_000);
    assert!((0..10_000).all(|number| sent_to(&follower, number).is_none()));
}

/// Prints how long changes take (docs/overlay.md, "Scale"), from when the kernel reports them.
#[test]
#[ignore = "measures"]
fn time_until_changes_are_in_force() {
    testkit::require!(Root);
    let (ns, follower) = host();
    drop(follower);
    add_next_hop(&ns);
    batch(&ns, "add", 0..100_000);
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").expect("readable");
        let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
        (pages.expect("a number") * 4096) >> 20
    };
    let (before, begun) = (resident(), Instant::now());
    let mut follower = begin(&ns);
    println!("read in {:?}, {} MiB more", begun.elapsed(), resident() - before);
    settle(&mut follower);
    let (remotes, numbers) = (Arc::clone(&follower.remotes), follower.numbers.clone());
    let reported = ns.enter(|| {
        let socket = netlink_socket(None).expect("a socket");
        TableChanges::prepare(socket.as_fd(), follower.device.tunnel.device).expect("prepared");
        TableChanges::subscribe(socket).expect("subscribed")
    });
    let is_done = AtomicBool::new(false);
    let mut times: Vec<Duration> = thread::scope(|scope| {
        let followed = scope.spawn(|| {
            while !is_done.load(Relaxed) {
                wait(&follower, Duration::from_millis(100));
                follower.follow();
            }
            rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime)
        });
        let mut bridge = ns.command("bridge");
        let bridge = bridge.args(["-batch", "-"]).stdin(Stdio::piped());
        let mut bridge = bridge.spawn().expect("it runs");
        let mut to = bridge.stdin.take().expect("piped");
        let begun = Instant::now();
        let times = (0..5000u32).map(|change| {
            let due = begun + Duration::from_millis(change.into());
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let (number, vtep) = (change * 7919 % 100_000, vtep_of(change * 31 + 1));
            let line = command("replace", number, vtep) + "\n";
            to.write_all(line.as_bytes()).expect("it runs");
            let _ = poll(&mut [PollFd::new(&reported, PollFlags::IN)], None);
            let at = Instant::now();
            while reported.read(&mut |_| ()) {}
            while remotes.find(numbered(number)) != numbers.get(&vtep).copied() {
                thread::sleep(Duration::from_micros(10));
            }
            at.elapsed()
        });
        let times = times.collect();
        println!("5,000 changes in {:?}", begun.elapsed());
        is_done.store(true, Relaxed);
        drop(to);
        bridge.wait().expect("it ends");
        println!(
            "CPU time of the follower: {:?}",
            followed.join().expect("no panic")
        );
        times
    });
    times.sort_unstable();
    println!(
        "median {:?}, 99 % {:?}, longest {:?}",
        times[2500], times[4950], times[4999]
    );
}

/// Applies pending changes, and waits until they are published; returns whether there are other VTEPs.
fn follow(follower: &mut Follower) -> bool {
    let mut is_other = follower.follow();
    while follower.is_unpublished {
        std::thread::sleep(PUBLISH_PAUSE);
        is_other |= follower.follow();
    }
    is_other
}

/// The VTEP that frames to the station go to.
fn vtep(follower: &Follower) -> Option<Arc<Vtep>> {
    let number = follower.remotes.find(STATION)?;
    follower.published.0.get(usize::from(number.0))?.clone()
}

/// Destination addresses of the frame and the packet to it.
fn ends(vtep: &Vtep) -> (Mac, IpAddr) {
    let headers = vtep.outer.headers(&[0; 14], 14, 0, 0);
    let bytes: &[u8] = headers.as_ref();
    let field = |at: usize| *bytes[at..].first_chunk::<4>().expect("it is whole");
    (
        *bytes.first_chunk().expect("it is whole"),
        IpAddr::from(field(30)),
    )
}

#[test]
fn address_is_at_its_vtep_once_the_next_hop_is_resolved() {
    testkit::require!(Root);
    let (ns, mut follower) = host();
    assert!(vtep(&follower).is_none());
    let neighbour = "ip neighbour replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev u0 nud";
    run(&ns, &format!("{neighbour} reachable"));
    assert!(follow(&mut follower), "there is another VTEP");
    let before = vtep(&follower).expect("resolved");
    assert_eq!(ends(&before), (HOP, [10, 9, 0, 2].into()));
    assert!(!before.confirm.load(Relaxed));
    run(&ns, &format!("{neighbour} stale"));
    assert!(!follow(&mut follower), "the address is the same");
    assert!(before.confirm.load(Relaxed));
    run(&ns, "ip neighbour del 10.9.0.2 dev u0");
    assert!(follow(&mut follower) && vtep(&follower).is_none());
}

#[test]
fn address_follows_its_entry_to_another_vtep() {
    testkit::require!(Root);
    let (ns, mut follower) = host();
    for last in [2, 3] {
        run(
            &ns,
            &format!("ip neighbour add 10.9.0.{last} lladdr 02:00:00:00:00:0{last} dev u0"),
        );
    }
    follow(&mut follower);
    let to = |follower: &Follower| vtep(follower).map(|vtep| ends(&vtep).1);
    assert_eq!(to(&follower), Some([10, 9, 0, 2].into()));
    let first = follower.remotes.find(STATION);
    run(&ns, "bridge fdb replace 02:00:00:00:03:01 dev vx100 dst 10.9.0.3");
    assert!(follow(&mut follower));
    assert_eq!(to(&follower), Some([10, 9, 0, 3].into()));
    assert_ne!(
        follower.remotes.find(STATION),
        first,
        "workers may know the first one's VTEP"
    );
    assert_eq!(follower.vteps.len(), 1);
    run(&ns, "bridge fdb del 02:00:00:00:03:01 dev vx100 dst 10.9.0.3");
    assert!(follow(&mut follower));
    assert_eq!((follower.remotes.find(STATION), follower.vteps.len()), (None, 0));
}

#[test]
fn packets_to_a_vtep_behind_a_vlan_of_the_underlay_have_its_tag() {
    testkit::require!(Root);
    let (ns, mut follower) = host();
    for line in [
        "ip link add u1 type veth peer name far1",
        "ip link set u1 up",
        "ip link set far1 up",
        "ip address add 10.8.0.1/24 dev u1",
        "ip neighbour add 10.8.0.2 lladdr 02:00:00:00:00:02 dev u1",
        "ip route add 10.9.0.2 via 10.8.0.2",
    ] {
        run(&ns, line);
    }
    settle(&mut follower);
    assert!(vtep(&follower).is_none() && follower.take_vtep_changes().is_empty());
    // As if it were a VLAN device: not all kernels have any.
    let from = [2, 0, 0, 0, 0, 1];
    follower.interfaces.insert(ns.index_of("u1"), (5, from));
    let number = follower.remotes.find(STATION).expect("listed");
    follower.route(number);
    follower.resolve_hops(|_, _| true);
    follow(&mut follower);
    let headers = vtep(&follower)
        .expect("resolved")
        .outer
        .headers(&[0; 14], 14, 0, 0);
    let wanted = [&HOP[..], &from, &[0x81, 0, 0, 5, 8, 0, 0x45]].concat();
    assert!(headers.as_ref().starts_with(&wanted), "{headers:?}");
    assert_eq!(follower.take_vtep_changes().len(), 1, "its packets are expected");
    // The next look at interfaces finds that it is none.
    run(&ns, "ip link set u1 alias none");
    settle(&mut follower);
    assert!(vtep(&follower).is_none());
}

#[test]
fn vtep_is_left_to_the_kernel_without_a_route_on_the_underlay() {
    testkit::require!(Root);
    let (ns, mut follower) = host();
    run(&ns, "ip neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev u0");
    run(&ns, "ip neighbour add 10.9.0.254 lladdr 02:00:00:00:00:fe dev u0");
    let settle = |follower: &mut Follower| {
        settle(follower);
        vtep(follower).map(|vtep| ends(&vtep).0)
    };
    assert_eq!(settle(&mut follower), Some(HOP));
    run(&ns, "ip route add 10.9.0.2 via 10.9.0.254");
    assert_eq!(settle(&mut follower), Some([2, 0, 0, 0, 0, 0xfe]));
    run(&ns, "ip route replace 10.9.0.2 dev lo");
    assert_eq!(settle(&mut follower), None);
}
