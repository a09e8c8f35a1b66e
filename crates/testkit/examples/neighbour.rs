//! Throughput of a guest beside another one on the same worker; run by `scripts/bench --only neighbours/`.
//!
//! `neighbour KIND PLACEMENT SECONDS`. The honest guest sends as fast as it can; counted is what the daemon took of it.
//! `alone` has no other guest. `busy` has a thread that only burns CPU time: the hostile guest is a thread of this
//! process, too, and takes time of the honest one's where there are few CPUs, which is not the daemon's doing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use testkit::daemon::Placement;
use testkit::neighbours::{self, Hostility, Scene};
use testkit::{Layout, frame};

/// Kinds of neighbours.
const KINDS: [(&str, Option<Hostility>); 8] = [
    ("alone", None),
    (
        "busy",
        Some(|_, stop| neighbours::until(stop, std::hint::spin_loop)),
    ),
    ("lies", Some(neighbours::lies_and_comes_back)),
    ("comes-and-goes", Some(neighbours::comes_and_goes)),
    ("kicks", Some(neighbours::kicks_for_nothing)),
    ("garbage", Some(neighbours::fills_rings_with_garbage)),
    ("no-calls", Some(neighbours::takes_no_calls)),
    ("changes-memory", Some(neighbours::changes_its_memory)),
];

fn main() {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let [kind, placement, seconds] = args.as_slice() else {
        panic!("neighbour KIND copy|direct SECONDS")
    };
    let (_, hostility) = KINDS.iter().find(|(name, _)| name == kind).expect("a kind");
    let placement = match placement.as_str() {
        "direct" => Placement::Direct,
        _ => Placement::Copy,
    };
    let time = Duration::from_secs_f64(seconds.parse().expect("a number of seconds"));
    let mut scene = neighbours::scene(placement);
    rate(&mut scene, time / 4);
    let (stop, socket) = (AtomicBool::new(false), scene.daemon.path("port1.sock"));
    let rate = std::thread::scope(|scope| {
        if let Some(hostility) = hostility {
            scope.spawn(|| hostility(&socket, &stop));
        }
        let rate = rate(&mut scene, time);
        stop.store(true, Ordering::Relaxed);
        rate
    });
    println!("{{\"kpps\": {:.3}}}", rate / 1000.0);
}

/// Frames a second that the honest guest gets out in that time.
fn rate(scene: &mut Scene, time: Duration) -> f64 {
    let sent = frame::plain(64, 1);
    let batch = vec![&sent[..]; 64];
    let (before, begun) = (taken(scene), Instant::now());
    while begun.elapsed() < time {
        scene.honest.pairs[0].send_batch(&batch, Layout::Whole);
    }
    (taken(scene) - before) as f64 / begun.elapsed().as_secs_f64()
}

/// Frames that the daemon has taken from the honest guest.
fn taken(scene: &Scene) -> u64 {
    let lane = scene.daemon.port(0)["lanes"][0]["counters"].clone();
    let counters = lane.as_array().expect("counters").iter();
    let value = counters
        .filter(|counter| counter["name"] == "from_guest_frames")
        .map(|counter| counter["value"].as_u64());
    value.flatten().sum()
}
