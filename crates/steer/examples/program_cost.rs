//! What the program costs a frame that it passes to the host, compared with a program that passes everything: the
//! lowest of some runs by BPF_PROG_TEST_RUN, loaded with the capabilities of a steward. As root:
//! `cargo run --release -p steer --example program_cost`.
//!
//! The overhead of a run, some nanoseconds, is in all figures, and cancels out in the differences.
//!
//! BPF_PROG_TEST_RUN rejects programs that are bound to an interface. So the cost of hints is measured by the kernel's
//! statistics, on frames that a veth passes to a socket, and compared with the plain program: for each set of hints
//! the median of some rounds, with the sets in turn.

#[path = "../tests/common/mod.rs"]
mod common;

use std::os::fd::AsFd;

use common::{ForeignProgram, Pair, as_a_steward, frame_to, ns_a_run, test_runs};
use steer::{Filter, ModeRequest, MulticastLimit, MulticastRing, Program, QueueConf, Station};

const RUNS: u32 = 300_000;
const ROUNDS: usize = 15;
/// Frames a round in the measurement of hints.
const SENT: u32 = 20_000;
const STATIONS: u8 = 64;
const NOBODY: [u8; 6] = [2, 0, 0, 0, 0, 200];
const GROUP: [u8; 6] = [0xff; 6];

fn station(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, number]
}

fn attach(pair: &Pair) -> Program {
    let ifindex = pair.ifindex();
    let attached = as_a_steward(|| Program::attach(ifindex, ModeRequest::Native, false));
    attached.expect("veth takes XDP")
}

fn cost(id: u32, frame: &[u8]) -> (u32, u32) {
    let runs = (0..ROUNDS).map(|_| test_runs(id, 0, frame, RUNS));
    runs.min_by_key(|&(_, ns)| ns).expect("some")
}

fn cost_of_hints(pair: &Pair) {
    let words = [
        "none",
        "hash",
        "vlan",
        "timestamp",
        "mark",
        "hash,vlan,timestamp",
        "hash,vlan,timestamp,mark",
    ];
    let xsk = pair.unbound_xsk();
    let program = attach(pair);
    let conf = QueueConf {
        virtio_header: None,
        frame_limit: 1514,
        hints: true,
    };
    program.enable_queue(0, xsk.as_fd(), conf).expect("queue 0");
    let frame = testkit::frame::udp(7, 64);
    let mut rounds: Vec<[f64; 7]> = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push(words.map(|word| {
            let change = || program.set_hints(word.parse().expect("hints"));
            let changed = if std::env::var_os("AS_ROOT").is_some() {
                change()
            } else {
                as_a_steward(change)
            };
            changed.expect("a kernel with them");
            let send = || (0..SENT).for_each(|_| pair.far_socket.send(&frame));
            ns_a_run(program.id(), send)
        }));
    }
    let median = |n: usize| {
        let mut of: Vec<f64> = rounds.iter().map(|round| round[n]).collect();
        of.sort_by(f64::total_cmp);
        of[ROUNDS / 2]
    };
    for (n, word) in words.iter().enumerate() {
        let (ns, plain) = (median(n), median(0));
        println!("to a socket, hints {word:42} {ns:5.1} ns, {:+.1} ns", ns - plain);
    }
}

fn main() {
    let Some(pair) = Pair::new(1500) else { return };
    let (unicast, group) = (frame_to(NOBODY, &[]), frame_to(GROUP, &[]));
    let base = {
        let empty = ForeignProgram::attach(pair.ifindex(), true);
        cost(empty.id, &unicast).1
    };
    let say = |what: &str, (verdict, ns): (u32, u32)| {
        println!(
            "{what:60} verdict {verdict}: {ns:4} ns, {:+} ns",
            i64::from(ns) - i64::from(base)
        );
    };
    say("a program that passes everything", (2, base));
    let xsk = pair.unbound_xsk();
    let conf = QueueConf {
        virtio_header: None,
        frame_limit: 1514,
        hints: false,
    };
    {
        let program = attach(&pair);
        say("queue of the host's", cost(program.id(), &unicast));
        program.enable_queue(0, xsk.as_fd(), conf).expect("queue 0");
        say("leased queue without addresses", cost(program.id(), &unicast));
        let macs = (0..STATIONS).map(station).collect();
        let vlans = Vec::new();
        program.set_filter(0, &Filter { macs, vlans }).expect("room");
        say(
            "leased queue with 64 addresses, none of them",
            cost(program.id(), &unicast),
        );
        let ours = frame_to(station(7), &[]);
        say(
            "leased queue with 64 addresses, one of them",
            cost(program.id(), &ours),
        );
    }
    cost_of_hints(&pair);
    let program = attach(&pair);
    let ring = MulticastRing::new().expect("memory");
    let limit = |a_second| MulticastLimit { a_second, burst: 1 };
    program.set_network(0..1, limit(1), &ring).expect("queue 0");
    for mac in (0..STATIONS).map(station) {
        program.set_station(0, Station { vlan: 0, mac }, 1).expect("room");
    }
    program.enable_queue(0, xsk.as_fd(), conf).expect("queue 0");
    say(
        "network of 64 stations, unicast to none of them",
        cost(program.id(), &unicast),
    );
    let tagged = frame_to(NOBODY, &[(0x8100, 100)]);
    say("the same with a VLAN tag", cost(program.id(), &tagged));
    say("group, beyond the limit", cost(program.id(), &group));
    program.set_network(0..1, limit(0), &ring).expect("queue 0");
    say("group, the ring full", cost(program.id(), &group));
}
