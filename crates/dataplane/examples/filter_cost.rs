//! What filter rules cost a frame (docs/filter.md): nanoseconds for a flow that the cache knows, and for one that it
//! does not, with few rules and with many.
//!
//!     cargo run --release -p vhost-af-xdp --features fuzzing --example filter_cost

use std::hint::black_box;
use std::time::Instant;

use dataplane::fuzzing::Filter;

/// Frames judged for each figure.
const FRAMES: usize = 100_000;
/// Tries, of which the best counts: the machine may do other things, too.
const TRIES: usize = 100;

/// Whose hash flows are found by, and what it is of the flow with a number.
type HashOf = (&'static str, fn(u32) -> Option<u32>);
const HASHES: [HashOf; 3] = [
    ("computed", |_| None),
    // Any: a NIC's is good, too.
    ("NIC's", |flow| Some((flow ^ flow << 7).wrapping_mul(0x9e37_79b1))),
    ("alike", |_| Some(7)),
];

/// The first bytes of a UDP datagram over IPv4.
fn head(source: u32, port: u16) -> [u8; 64] {
    let mut head = [0; 64];
    head[12..14].copy_from_slice(&[0x08, 0x00]);
    head[14..18].copy_from_slice(&[0x45, 0, 0, 50]);
    head[22..24].copy_from_slice(&[64, 17]);
    head[26..30].copy_from_slice(&source.to_be_bytes());
    head[30..34].copy_from_slice(&[10, 255, 0, 1]);
    head[34..36].copy_from_slice(&1024u16.to_be_bytes());
    head[36..38].copy_from_slice(&port.to_be_bytes());
    head
}

/// So many rules, of which the last one matches.
fn filter(rules: u32) -> Filter {
    let rule = |at: u32| {
        let [_, a, b, c] = at.to_be_bytes();
        format!(
            "direction=to-guest action=deny protocol=tcp source=172.{}.{b}.{c} destination-ports={}",
            16 + a,
            at % 1000
        )
    };
    let last = "direction=to-guest action=allow protocol=udp destination-ports=53".to_owned();
    let all: Vec<String> = (1..rules).map(rule).chain([last]).collect();
    Filter::new(&all.join("\n"), true).expect("rules")
}

/// Nanoseconds a frame.
fn best(mut round: impl FnMut(usize)) -> f64 {
    let tries = (0..TRIES).map(|_| {
        let begun = Instant::now();
        (0..FRAMES).for_each(&mut round);
        begun.elapsed().as_secs_f64() * 1e9 / FRAMES as f64
    });
    tries.fold(f64::INFINITY, f64::min)
}

fn main() {
    println!(
        "{:>7} {:>7} {:>9} {:>9} {:>8}",
        "rules", "flows", "ns/frame", "known", "hash"
    );
    for rules in [10, 10_000] {
        for (flows, hash) in [1, 100, 10_000]
            .into_iter()
            .flat_map(|flows| HASHES.map(|hash| (flows, hash)))
        {
            let mut filter = filter(rules);
            let heads: Vec<_> = (0..flows)
                .map(|flow| (head(0x0a00_0000 + flow, 53), hash.1(flow)))
                .collect();
            let nanoseconds = best(|at| {
                let (head, hash) = &heads[at % heads.len()];
                black_box(filter.allows(head, 64, *hash));
            });
            let [hits, misses] = filter.found();
            let known = 100.0 * hits as f64 / (hits + misses) as f64;
            println!(
                "{rules:>7} {flows:>7} {nanoseconds:>9.1} {known:>7.1} % {:>8}",
                hash.0
            );
        }
        let mut filter = filter(rules);
        let mut flow = 0u32;
        let nanoseconds = best(|_| {
            flow = flow.wrapping_add(1);
            black_box(filter.allows(&head(flow.wrapping_mul(0x9e37_79b1), 53), 64, None));
        });
        println!("{rules:>7} {:>7} {nanoseconds:>9.1} {:>7.1} %", "new", 0.0);
    }
}
