//! Moves frames along a path, so many rounds: for `scripts/cost`, which counts the instructions of a round by running
//! this twice under callgrind, the second time with more rounds.
//!
//!     cargo run --release -p dataplane --features counted --example path_cost from-guest/60/split 64 1000

use dataplane::fuzzing::{Checks, Frames, Path, Placement, Rounds, Way};
use device::counters::{Kind, PairCounters};

/// So many come before, in which memory is touched for the first time, and flows are judged.
const WARM: usize = 50;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().unwrap_or_default();
    let mut number = || arguments.next().and_then(|text| text.parse::<usize>().ok());
    let (Some(at_once @ 1..=256), Some(rounds)) = (number(), number()) else {
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
    let merged_before = merged(&moving);
    let mut taken = 0;
    for _ in 0..WARM + rounds {
        taken += moving.play(at_once);
        for _ in 0..path.rounds() {
            moving.round();
        }
    }
    taken += moving.play(0) + merged(&moving) - merged_before;
    let sides = if path.way == Way::GuestToGuest { 2 } else { 1 };
    assert_eq!(taken, (WARM + rounds) * at_once * sides, "frames were lost");
    moving.counters().for_each(|counters| check(path, counters));
}

/// Frames from the NIC that came to guests as parts of others.
fn merged(moving: &Rounds) -> usize {
    let of_lane = |counters: &PairCounters| {
        counters.to_guest_coalesced_frames.get() - counters.to_guest_super_frames.get()
    };
    moving.counters().map(of_lane).sum::<u64>() as usize
}

/// Panics if a lane lost frames, or did not do with them what the path is for.
fn check(path: Path, counters: &PairCounters) {
    let lost = counters.read().into_iter();
    let lost: Vec<_> = lost
        .filter(|reading| reading.kind == Kind::Drop && reading.value > 0)
        .collect();
    assert!(lost.is_empty(), "{lost:?}");
    let bytes = u64::from(path.frame_bytes);
    let (frames, got) = (counters.to_guest_frames.get(), counters.to_guest_bytes.get());
    let (segments, referred) = (
        &counters.from_guest_frames,
        &counters.from_guest_referred_segments,
    );
    let as_meant = match (path.frames, path.way) {
        (Frames::Plain, _) if path.encapsulated => {
            counters.from_guest_encapsulated.get() == counters.from_guest_frames.get()
        }
        (Frames::Gso, Way::ToGuest) => got == frames * bytes,
        (Frames::Gso, _) if path.tap => {
            let unsegmented = counters.from_guest_super_frames_unsegmented.get();
            unsegmented == counters.from_guest_super_frames.get()
        }
        (Frames::Plain, _) => counters.bounced_frames.get() == 0,
        (Frames::Gso, Way::GuestToGuest) => got == frames * bytes,
        (Frames::Gso, _) => {
            let refers = path.placement != Placement::Copy;
            segments.get() > counters.from_guest_super_frames.get() * 40
                && referred.get() == if refers { segments.get() } else { 0 }
        }
        (Frames::Gro, _) => counters.to_guest_coalesced_frames.get() > frames * 20,
        (Frames::Hints, _) => counters.filter_nic_hashes.get() == 1,
        (Frames::Tag, _) => got == frames * (bytes + 4),
    };
    assert!(as_meant, "frames went another way: {counters:?}");
}

fn usage() {
    eprintln!(
        "path_cost WAY/BYTES/RING[/VARIANT]... FRAMES ROUNDS\n\
         WAY: from-guest, to-guest or guest-to-guest. BYTES: of a frame, 60 to 1514, or of a GSO packet. RING: split or \
         packed. FRAMES: sent or received at a time, 1 to 256.\n\
         VARIANT: rules (ten), guard, limits, vlan; send-direct, direct (placement); gso (packets of TCP), gro (a flow \
         of TCP from the NIC), hints (of the NIC, with ten rules), tag (which the NIC took off); \
         two-workers (one for each guest); csum (guests accepted checksum offloads); network (with an uplink); encapsulated \
         (in VXLAN, by an underlay); tap (of a network in tap mode)"
    );
    std::process::exit(2);
}

fn path_of(text: &str, at_once: usize) -> Option<Path> {
    let mut parts = text.split('/');
    let mut path = Path {
        way: match parts.next()? {
            "from-guest" => Way::FromGuest,
            "to-guest" => Way::ToGuest,
            "guest-to-guest" => Way::GuestToGuest,
            _ => return None,
        },
        frame_bytes: parts.next()?.parse().ok()?,
        packed: match parts.next()? {
            "split" => false,
            "packed" => true,
            _ => return None,
        },
        at_once,
        ..Path::default()
    };
    for variant in parts {
        match variant {
            "rules" => path.checks = Checks::Rules(10),
            "guard" => path.checks = Checks::Guard,
            "limits" => path.checks = Checks::Limits,
            "vlan" => path.checks = Checks::Vlan,
            "send-direct" => path.placement = Placement::SendDirect,
            "direct" => path.placement = Placement::Direct,
            "gso" => path.frames = Frames::Gso,
            "gro" => path.frames = Frames::Gro,
            "hints" => (path.frames, path.checks) = (Frames::Hints, Checks::Rules(10)),
            "tag" => path.frames = Frames::Tag,
            "encapsulated" if path.way == Way::FromGuest => path.encapsulated = true,
            "tap" if path.way != Way::GuestToGuest => path.tap = true,
            "network" if path.way != Way::GuestToGuest => path.network = true,
            "csum" => path.csum = true,
            "two-workers" if path.way == Way::GuestToGuest => path.two_workers = true,
            _ => return None,
        }
    }
    let most = if path.frames == Frames::Gso { 65_000 } else { 1514 };
    // Before frames of a network is the mark of their port alone.
    let has_hints = matches!(path.frames, Frames::Hints | Frames::Tag);
    ((60..=most).contains(&path.frame_bytes) && !(path.network && has_hints)).then_some(path)
}
