//! Moves frames along a path, so many rounds: for `scripts/cost`, which counts the instructions of a round by running
//! this twice under callgrind, the second time with more rounds.
//!
//!     cargo run --release -p vhost-af-xdp --features counted --example path_cost from-guest/60/split 64 1000

use vhost_af_xdp::fuzzing::{Checks, Path, Rounds, Way};

/// So many come before, in which memory is touched for the first time, and flows are judged.
const WARM: usize = 50;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_default();
    let mut number = || arguments.next().and_then(|text| text.parse::<usize>().ok());
    let (Some(at_once @ 1..=128), Some(rounds)) = (number(), number()) else {
        return usage();
    };
    let Some(path) = path_of(&path, at_once) else {
        return usage();
    };
    let mut moving = Rounds::new(path);
    // A flow that no rules have judged yet takes room of many frames from the round.
    moving.play(1);
    moving.round();
    moving.play(0);
    let mut taken = 0;
    for _ in 0..WARM + rounds {
        taken += moving.play(at_once);
        moving.round();
    }
    taken += moving.play(0);
    let sides = if path.way == Way::GuestToGuest { 2 } else { 1 };
    assert_eq!(taken, (WARM + rounds) * at_once * sides, "frames were lost");
}

fn usage() {
    eprintln!(
        "path_cost WAY/BYTES/RING[/CHECK] FRAMES ROUNDS: from-guest, to-guest or guest-to-guest; frames of so many bytes, \
         60 to 1514; split or packed; with ten filter rules, guard, limits or vlan; so many frames a round, 1 to 128"
    );
    std::process::exit(2);
}

fn path_of(text: &str, at_once: usize) -> Option<Path> {
    let mut parts = text.split('/');
    let way = match parts.next()? {
        "from-guest" => Way::FromGuest,
        "to-guest" => Way::ToGuest,
        "guest-to-guest" => Way::GuestToGuest,
        _ => return None,
    };
    let frame_bytes = parts
        .next()?
        .parse()
        .ok()
        .filter(|bytes| (60..=1514).contains(bytes))?;
    let packed = match parts.next()? {
        "split" => false,
        "packed" => true,
        _ => return None,
    };
    let checks = match parts.next() {
        None => Checks::None,
        Some("rules") => Checks::Rules(10),
        Some("guard") => Checks::Guard,
        Some("limits") => Checks::Limits,
        Some("vlan") => Checks::Vlan,
        Some(_) => return None,
    };
    parts.next().is_none().then_some(Path {
        way,
        packed,
        frame_bytes,
        at_once,
        checks,
    })
}
