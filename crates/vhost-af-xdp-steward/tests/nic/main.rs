//! Leases of a NIC's queue for io_uring zero-copy receive, and for packets ([`packets`]), on a NIC that has all that
//! leases ask for: that of tests/nic, which the kernel rig loads (scripts/kernels --wire nic). Elsewhere there is none,
//! and these tests say so.
//!
//! The NIC is in the steward's network namespace, the other end of its wire in the peers'. Each test finds it as it
//! comes up, which is how it shows that the one before has left nothing.

#[path = "../common/mod.rs"]
mod common;
mod netkits;
mod packets;

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use common::{World, lessee, receiving};
use host::nic::bound::{self, Bound};
use host::nic::rings::{self, Split};
use netlink_bindings::{ethtool, netdev};
use netlink_socket2::NetlinkSocket;
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::process::{Resource, Rlimit, Signal};
use steward_client::listing;
use steward_client::{LeaseError, QueueLease, Waiting};
use steward_protocol::{Reason, ZcrxWanted};
use testkit::daemon::Mode;
use testkit::foreign::Foreign;
use testkit::{Running, assert_soon, require, wait};
use zcrx::{Config, Memory, Offer, Prepared, QueueId, Receiver, Request, Source};

const NIC: &str = "rig1";
const WIRE: &str = "rig0";
/// The queue that is leased, the last one of four.
const QUEUE: u32 = 3;
/// Where lessees listen.
const FLOWS: [&str; 2] = ["192.0.2.1:443", "[fd00::1]:443"];
/// So often a lessee and the steward are killed, and the queue changes hands.
const KILLS: &str = "STEWARD_KILLS";
const FEW_KILLS: usize = 4;
/// `ETHTOOL_MSG_RINGS_SET`, include/uapi/linux/ethtool_netlink_generated.h.
const RINGS_SET: u8 = 16;
/// `ETHTOOL_TCP_DATA_SPLIT_DISABLED`, `_ENABLED`, include/uapi/linux/ethtool.h.
const SPLIT: [u8; 2] = [1, 2];

/// A rule for lessees and one for root; `setup`: the steward may set up the NIC.
fn rules(setup: bool) -> String {
    let rule = |user: &str| {
        format!(
            "[[allow]]\nuser = {user}\ninterface = \"{NIC}\"\nqueues = \"{QUEUE}\"\nmemlock = \"8 MiB\"\n\
             zcrx = {FLOWS:?}\nzcrx-setup = {setup}\n"
        )
    };
    [rule("HOLDER"), rule("0")].concat()
}

/// A steward, and the NIC in its namespace.
struct Rig {
    world: World,
}

impl Rig {
    /// `None` where there is no such NIC.
    fn with(policy: &str) -> Option<Self> {
        if std::env::var_os("STEWARD_NIC").is_none() {
            println!(
                "SKIPPED: no NIC of tests/nic; the kernel rig has one: scripts/kernels --suite sid --wire nic"
            );
            return None;
        }
        // Where it was before comes to its end a little later than that says.
        let is_there = || {
            [NIC, WIRE]
                .iter()
                .all(|it| std::path::Path::new("/sys/class/net").join(it).exists())
        };
        assert_soon!(is_there(), "{NIC} and {WIRE} are away");
        let rig = Self {
            world: World::kept_for(policy, "10"),
        };
        let pair = &rig.world.veth;
        for (name, ns, host) in [(NIC, &pair.near, 1), (WIRE, &pair.far, 2)] {
            testkit::process::run("ip", &["link", "set", name, "netns", ns.name()]);
            let setting = format!("net.ipv6.conf.{name}.disable_ipv6=0");
            ns.run("sysctl", &["-qw", &setting]);
            ns.ip(&["addr", "add", &format!("192.0.2.{host}/24"), "dev", name]);
            ns.ip(&["addr", "add", &format!("fd00::{host}/64"), "dev", name, "nodad"]);
            ns.ip(&["link", "set", name, "up"]);
        }
        rig.set_split(false);
        rig.assert_untouched();
        Some(rig)
    }

    /// One whose steward may set up the NIC.
    fn new() -> Option<Self> {
        Self::with(&rules(true))
    }

    fn ethtool(&self, args: &[&str]) -> String {
        self.world.veth.near.output_of("ethtool", args)
    }

    /// The same, where it may be refused: whether it was done.
    fn try_ethtool(&self, args: &[&str]) -> bool {
        let mut command = self.world.veth.near.command("ethtool");
        let output = command.args(args).output().expect("it runs");
        print!("{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.status.success()
    }

    /// Makes a rule for a kind of flow, as ethtool(8) says it.
    fn add_rule(&self, flow: &str) {
        let words = ["-N", NIC, "flow-type"].into_iter().chain(flow.split(' '));
        self.ethtool(&words.collect::<Vec<_>>());
    }

    fn set_split(&self, is_on: bool) {
        let index = self.world.veth.near.index_of(NIC);
        self.world.veth.near.enter(|| {
            let mut socket = NetlinkSocket::new();
            let mut request = ethtool::Request::new().op_rings_set_do();
            // netlink-bindings has another number.
            request.header_mut().cmd = RINGS_SET;
            let rings = request.encode();
            let rings = rings.nested_header().push_dev_index(index).end_nested();
            rings.push_tcp_data_split(SPLIT[usize::from(is_on)]);
            let mut replies = socket.request(&request).expect("sent");
            replies.recv_ack().unwrap_or_else(|error| panic!("{error}"));
        });
    }

    /// Queues that the main RSS table names.
    fn table(&self) -> Vec<u32> {
        let report = self.ethtool(&["-x", NIC]);
        // The key behind it looks alike.
        let lines = report
            .lines()
            .take_while(|line| !line.starts_with("RSS hash key"));
        let lines = lines.filter_map(|line| line.trim().split_once(':'));
        let entries = lines.filter(|(first, _)| first.parse::<u32>().is_ok());
        let mut named: Vec<u32> = entries
            .flat_map(|(_, queues)| queues.split_whitespace().map(|it| it.parse().expect("a queue")))
            .collect();
        named.sort_unstable();
        named.dedup();
        named
    }

    /// How many rules the NIC has. ethtool reads each after it has printed the number, and fails if one has been removed
    /// meanwhile.
    fn rules(&self) -> usize {
        let mut ethtool = self.world.veth.near.command("ethtool");
        let output = ethtool.args(["-n", NIC]).output().expect("it runs");
        let printed = String::from_utf8_lossy(&output.stdout);
        let mut words = printed.split_whitespace().skip_while(|word| *word != "Total");
        let number = words.nth(1).and_then(|number| number.parse().ok());
        number.unwrap_or_else(|| panic!("{output:?}"))
    }

    fn bound(&self) -> Option<Bound> {
        let index = self.world.veth.near.index_of(NIC);
        self.world
            .veth
            .near
            .enter(|| bound::to(index, QUEUE).expect("it tells"))
    }

    /// How many pools of pages there are for the NIC's queues, those that wait for the last of their pages included.
    fn pools(&self) -> usize {
        let index = self.world.veth.near.index_of(NIC);
        self.world.veth.near.enter(|| {
            let request = netdev::Request::new().op_page_pool_get_dump();
            let mut socket = NetlinkSocket::new();
            let mut replies = socket.request(&request).expect("sent");
            let mut count = 0;
            while let Some(pool) = replies.recv() {
                let pool = pool.unwrap_or_else(|error| panic!("{error}"));
                count += usize::from(pool.get_ifindex().ok() == Some(index));
            }
            count
        })
    }

    /// What the NIC has counted of the leased queue.
    fn counted(&self, what: &str) -> u64 {
        self.counted_of(QUEUE, what)
    }

    fn counted_of(&self, queue: u32, what: &str) -> u64 {
        let report = self.ethtool(&["-S", NIC]);
        let name = format!("rx{queue}_{what}: ");
        let line = report.lines().find_map(|line| line.trim().strip_prefix(&name));
        line.expect("a counter").parse().expect("a number")
    }

    /// Header split is off again.
    #[track_caller]
    fn await_no_split(&self) {
        let near = &self.world.veth.near;
        let index = near.index_of(NIC);
        self.world.await_that(|| {
            near.enter(|| matches!(rings::of(index), Ok(rings) if rings.split == Split::Off(0)))
        });
    }

    fn is_untouched(&self) -> bool {
        self.rules() == 0 && self.bound().is_none() && self.table() == [0, 1, 2, 3]
    }

    #[track_caller]
    fn assert_untouched(&self) {
        assert_soon!(
            self.is_untouched(),
            "{} rules, {:?}, table of {:?}",
            self.rules(),
            self.bound(),
            self.table()
        );
    }

    /// A lease of this process, which is root's.
    fn take(&self) -> Result<QueueLease, LeaseError> {
        QueueLease::take(&self.world.socket(), &wanted(), Waiting::default())
    }

    #[track_caller]
    fn assert_refused(&self, reason: Reason, words: &str) {
        let refusal = common::refusal(self.take());
        assert!(
            refusal.reason == reason && refusal.text.contains(words),
            "{refusal}"
        );
    }

    /// Memory of io_uring for the queue, by nobody's leave.
    fn receiver(&self) -> Receiver {
        let source = Source::Queue {
            ifindex: self.world.veth.near.index_of(NIC),
            queue: QueueId(QUEUE),
        };
        let receiver = Receiver::open(&config(1 << 20, source)).expect("root may");
        assert_eq!(receiver.mode(), zcrx::Mode::Zcrx);
        receiver
    }

    /// A lessee that has its queue and listens.
    fn lessee(&self) -> Running {
        let mut running = lessee::spawn_beside(&self.world, "child_receives", QUEUE);
        running.await_text("it listens");
        running
    }

    /// Sends a stream to each of a lessee's flows, from the other end of the wire, at the same time.
    fn send(&self) {
        self.world.veth.far.enter(|| {
            let sockets = FLOWS.map(|flow| TcpStream::connect(flow).expect("it listens"));
            std::thread::scope(|scope| {
                for (seed, mut socket) in sockets.into_iter().enumerate() {
                    scope.spawn(move || socket.write_all(&receiving::bytes_of(seed)).expect("sent"));
                }
            });
        });
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        // What a test that failed may have left is nothing to the next one.
        self.try_ethtool(&["-X", NIC, "default"]);
        self.try_ethtool(&["-L", NIC, "combined", "4"]);
        // Back at once: a namespace gives them back later.
        for (name, ns) in [(NIC, &self.world.veth.near), (WIRE, &self.world.veth.far)] {
            let args = ["-n", ns.name(), "link", "set", name, "netns", "1"];
            let _ = Command::new("ip").args(args).output();
        }
    }
}

fn kills() -> usize {
    std::env::var(KILLS).map_or(FEW_KILLS, |kills| kills.parse().expect("a number"))
}

fn wanted() -> ZcrxWanted {
    ZcrxWanted {
        interface: NIC.to_owned(),
        queue: QUEUE,
        flows: flows().to_vec(),
    }
}

fn flows() -> [SocketAddr; 2] {
    FLOWS.map(|flow| flow.parse().expect("an address and a port"))
}

fn config(memory: usize, source: Source) -> Config {
    Config {
        memory: Memory::Own { bytes: memory },
        request: Request::ForceZcrx,
        ..Config::new(source)
    }
}

#[test]
fn two_threads_without_privileges_receive_by_a_leased_queue_and_nothing_is_copied() {
    require!(Root);
    let Some(rig) = Rig::new() else { return };
    let before = rig.counted("split_bytes");
    let mut running = rig.lessee();
    assert_eq!(
        (rig.bound(), rig.rules(), rig.table()),
        (Some(Bound::IoUring), 2, vec![0, 1, 2])
    );
    let all = listing::leases(&rig.world.socket()).expect("it answers");
    assert!(
        all.len() == 1 && all[0].zcrx && all[0].interface == NIC,
        "{all:?}"
    );
    rig.send();
    running.await_text("all bytes are there");
    let sent = 2 * receiving::bytes_of(0).len() as u64;
    assert!(
        rig.counted("split_bytes") - before >= sent,
        "they came another way: {running}"
    );
    running.signal(Signal::KILL);
    running.wait(wait::SOON);
    rig.assert_untouched();
    rig.await_no_split();
    rig.world.await_nothing();
}

#[test]
fn kills_leave_no_rule_no_table_and_no_queue() {
    require!(Root);
    let Some(mut rig) = Rig::new() else { return };
    let kills = kills();
    for kill in 0..kills {
        let mut running = rig.lessee();
        assert_eq!(
            (rig.bound(), rig.rules(), rig.table()),
            (Some(Bound::IoUring), 2, vec![0, 1, 2])
        );
        // The steward first, or the lessee alone; with a stream under way, or not.
        if kill % 4 < 2 {
            rig.world.veth.far.enter(|| {
                let mut socket = TcpStream::connect(FLOWS[kill % 2]).expect("it listens");
                socket.write_all(&[1; 10_000]).expect("sent");
            });
        }
        if kill % 2 == 0 {
            rig.world.restart_after(Signal::KILL);
        }
        running.signal(Signal::KILL);
        running.wait(wait::SOON);
        rig.assert_untouched();
        rig.await_no_split();
        rig.world
            .await_that(|| listing::leases(&rig.world.socket()).is_ok_and(|all| all.is_empty()));
    }
    println!("killed {kills} times");
    rig.world.await_nothing();
}

#[test]
fn queue_that_frames_of_others_may_come_to_is_refused() {
    require!(Root);
    let Some(rig) = Rig::with(&rules(false)) else {
        return;
    };
    rig.assert_refused(Reason::Nic, "tcp-data-split");
    rig.set_split(true);
    rig.assert_refused(Reason::Nic, "the main RSS table names queue 3");
    rig.ethtool(&["-X", NIC, "equal", "3"]);
    drop(rig.take().expect("it is apart"));
    // Each is in the way alone.
    rig.ethtool(&["-X", NIC, "context", "new", "start", "2", "equal", "2"]);
    rig.assert_refused(Reason::Nic, "RSS context 1 names queue 3");
    rig.ethtool(&["-X", NIC, "context", "1", "delete"]);
    rig.add_rule("udp4 dst-port 53 action 3 loc 7");
    rig.assert_refused(Reason::Nic, "n-tuple rule 7");
    rig.ethtool(&["-N", NIC, "delete", "7"]);
    rig.add_rule("tcp4 dst-ip 192.0.2.1 dst-port 443 action 1 loc 5");
    rig.assert_refused(Reason::Nic, "n-tuple rule 5 is for TCP to 192.0.2.1:443");
    rig.ethtool(&["-N", NIC, "delete", "5"]);
    drop(rig.take().expect("it is apart again"));
    rig.ethtool(&["-X", NIC, "default"]);
    rig.set_split(false);
    rig.assert_untouched();
}

#[test]
fn taken_queue_is_rejected_and_leased_when_it_is_free() {
    require!(Root);
    let Some(rig) = Rig::new() else { return };
    rig.set_split(true);
    // Memory of io_uring, registered by somebody who asked no steward.
    rig.world.veth.near.enter(|| {
        let _receiver = rig.receiver();
        rig.assert_refused(Reason::Taken, "io_uring");
    });
    assert_soon!(rig.bound().is_none(), "it stays bound");
    // A lease of somebody else's.
    let lease = rig.take().expect("it is free");
    rig.assert_refused(Reason::Taken, "another lease");
    drop(lease);
    rig.assert_untouched();
    rig.set_split(false);
}

#[test]
fn program_on_the_nic_is_in_the_way_of_a_lease_and_a_lease_in_the_way_of_a_program() {
    require!(Root);
    let Some(rig) = Rig::new() else { return };
    for mode in [Mode::Skb, Mode::Native] {
        let attach = || Foreign::attach(&rig.world.veth.near, NIC, mode, 0);
        let program = attach();
        rig.assert_refused(Reason::Program, "an XDP program is on rig1");
        drop(program);
        let mut running = rig.lessee();
        let attached = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(attach())));
        assert!(attached.is_err(), "the kernel has one or the other");
        let for_packets = common::take(&rig.world.socket(), &common::wanted_of(NIC, QUEUE, 1));
        assert_eq!(common::refusal(for_packets).reason, Reason::Taken);
        running.signal(Signal::KILL);
        running.wait(wait::SOON);
        rig.assert_untouched();
        rig.await_no_split();
    }
}

#[test]
fn number_of_queues_changes_under_a_lease_and_bytes_come_all_the_same() {
    require!(Root);
    let Some(rig) = Rig::new() else { return };
    let mut running = rig.lessee();
    let channels = |count: &str| rig.try_ethtool(&["-L", NIC, "combined", count]);
    assert!(!channels("3"), "the leased queue is the last one");
    assert!(channels("6"), "no matter");
    assert!(!channels("4"), "the kernel wants one more than the leased ones");
    assert!(channels("5"), "no matter");
    // All rings are made again by that, and by this, too.
    rig.world.veth.near.ip(&["link", "set", NIC, "down"]);
    rig.world.veth.near.ip(&["link", "set", NIC, "up"]);
    rig.world
        .veth
        .near
        .ip(&["addr", "replace", "fd00::1/64", "dev", NIC, "nodad"]);
    assert_eq!(
        (rig.bound(), rig.rules(), rig.table()),
        (Some(Bound::IoUring), 2, vec![0, 1, 2])
    );
    rig.send();
    running.await_text("all bytes are there");
    running.signal(Signal::KILL);
    running.wait(wait::SOON);
    assert_soon!(rig.bound().is_none() && rig.rules() == 0);
    assert!(channels("4"), "nobody has it any more");
    rig.assert_untouched();
}

#[test]
fn table_is_as_before_whichever_of_two_leased_queues_is_given_back_first() {
    require!(Root);
    let flow = |queue: u32| format!("192.0.2.1:{}", 8000 + queue);
    let rules = [QUEUE, 2].map(|queue| {
        format!(
            "[[allow]]\nuser = 0\ninterface = \"{NIC}\"\nqueues = \"{queue}\"\nzcrx = [\"{}\"]\nzcrx-setup = true\n",
            flow(queue)
        )
    });
    let Some(rig) = Rig::with(&rules.concat()) else {
        return;
    };
    let table = || rig.ethtool(&["-x", NIC]);
    let before = table();
    let take = |queue| {
        let wanted = ZcrxWanted {
            queue,
            flows: vec![flow(queue).parse().expect("an address and a port")],
            ..wanted()
        };
        QueueLease::take(&rig.world.socket(), &wanted, Waiting::default()).expect("it is free")
    };
    for queues in [[QUEUE, 2], [2, QUEUE]] {
        // What was queue 3's goes to queue 2, among others, and on from there.
        let mut leases = [QUEUE, 2].map(|queue| (queue, take(queue)));
        assert_eq!(rig.table(), [0, 1]);
        leases.sort_by_key(|&(queue, _)| queue != queues[0]);
        for (queue, lease) in leases {
            drop(lease);
            assert_soon!(rig.table().contains(&queue), "{queue}");
        }
        assert_soon!(table() == before, "{before} is {}", table());
    }
    rig.await_no_split();
}

/// Receives over a queue of the NIC as a user without privileges, a stream of each flow in a thread of its own, and
/// says what came of it.
#[test]
#[ignore = "run by another test"]
fn child_receives() {
    let listeners = flows().map(|flow| TcpListener::bind(flow).expect("the NIC has the address"));
    // What came out of order must not take all buffers of the queue: what is missing would find none.
    for listener in &listeners {
        set_socket_recv_buffer_size(listener, 64 << 10).expect("a socket");
    }
    lessee::give_up_privileges();
    let limit = Rlimit {
        current: Some(4 << 20),
        ..rustix::process::getrlimit(Resource::Memlock)
    };
    rustix::process::setrlimit(Resource::Memlock, limit).expect("below the maximum");
    let mut lease = QueueLease::take(&lessee::socket(), &wanted(), Waiting::default())
        .unwrap_or_else(|it| panic!("{it}"));
    let config = Config {
        memory: Memory::Own { bytes: 1 << 20 },
        requests: 8,
        completions: 64,
        ..Config::new(Source::NoDevice)
    };
    let prepare = || wait::until_some(wait::SOON, || Prepared::new(&config).ok()).expect("memory for a ring");
    let prepared: Vec<_> = listeners.iter().map(|_| prepare()).collect();
    let offer = Offer::new(&config).expect("memory");
    let registered = receiving::register(&mut lease, &prepared, &offer).unwrap_or_else(|it| panic!("{it}"));
    let leased = receiving::taken_up(offer, &prepared[0], &registered, false);
    println!("it listens");
    std::thread::scope(|scope| {
        let rings = prepared.into_iter().zip(registered.numbers);
        for (seed, ((ring, number), listener)) in rings.zip(&listeners).enumerate() {
            let (config, leased) = (&config, &leased);
            scope.spawn(move || {
                let mut receiver = Receiver::start_leased(ring, leased, number, config).expect("a ring");
                assert_eq!(receiver.mode(), zcrx::Mode::Zcrx);
                let socket = listener.accept().expect("a connection").0;
                let received = receiving::all_of(&mut receiver, socket);
                assert!(
                    received == receiving::bytes_of(seed),
                    "{} bytes came",
                    received.len()
                );
            });
        }
    });
    println!("all bytes are there");
    std::thread::sleep(Duration::from_secs(3600));
}
