//! How exact limits of ports are: a guest sends, or gets, as much as it can, and what passed in the time is compared
//! with what the limit allows.
//!
//! ```text
//! cargo run --release -p testkit --example limits [SECONDS]
//! ```
//!
//! Each line: the limit, frames that passed a second beyond one burst, those that may, and the ratio.

use std::time::Duration;

use testkit::two_ports::{LEN, TwoPorts};

fn main() {
    let seconds = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let lasts = Duration::from_secs(seconds.unwrap_or(3));
    let bits = |text, a_second: u64| (format!("bits = \"{text}\""), a_second as f64 / (LEN * 8) as f64);
    let packets = |text, a_second: u64| (format!("packets = \"{text}\""), a_second as f64);
    let limits = [
        bits("1M", 1_000_000),
        bits("10M", 10_000_000),
        bits("100M", 100_000_000),
        bits("1G", 1_000_000_000),
        packets("100", 100),
        packets("10k", 10_000),
        packets("100k", 100_000),
    ];
    println!("{:34} {:>12} {:>12} {:>8}", "limit", "frames/s", "may", "ratio");
    for (from, direction) in [(0, "from-guest"), (1, "to-guest")] {
        for (limit, a_second) in &limits {
            let key = format!("{direction}-{limit}");
            let mut ports = TwoPorts::new(&key);
            let burst = burst_of(&ports, direction);
            let (arrived, took) = ports.flood(from, lasts, 0);
            let measured = (arrived as f64 - burst) / took.as_secs_f64();
            let ratio = measured / a_second;
            println!("{key:34} {measured:12.1} {a_second:12.1} {ratio:8.4}");
        }
    }
}

/// Frames that the limit's burst has.
fn burst_of(ports: &TwoPorts, direction: &str) -> f64 {
    let port = ports.daemon.port_named("vm0").expect("it is there");
    let limits = &port["limits"][direction.replace('-', "_")];
    match limits["bits"]["burst"].as_f64() {
        Some(bits) => bits / (LEN * 8) as f64,
        None => limits["packets"]["burst"].as_f64().expect("one of both"),
    }
}
