//! Lessees of networks that ask for as much as they can, while others are served, and stewards that are killed
//! meanwhile.

use crate::common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::raw::Raw;
use common::{World, change, lessee, network, take};
use rustix::process::Signal;
use steward_client::Lease;
use steward_protocol::{Answer, CHANGES_MAX, Reason, Request, StationChange};
use testkit::{VethPair, assert_soon, frame, require, soak, wait};

const OURS: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];
/// Who storms.
const HOSTILE: u32 = 4321;

/// Root has one queue, who storms another; no rule says for which stations.
const POLICY: &str = "[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"0\"\nnetwork = true\n\
                      [[allow]]\nuser = 4321\ninterface = \"nic0\"\nqueues = \"1\"\nnetwork = true\n";

/// The lessee that is to lose nothing.
struct Guest {
    lease: Lease,
    echo: lessee::Echo,
    serial: u16,
}

impl Guest {
    fn new(world: &World) -> Self {
        // All frames come to its queue.
        world.veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
        let lease = take(&world.socket(), &network(0, 1)).expect("allowed");
        let echo = lessee::Echo::open(&lease, 0);
        lease.set_stations(&[change(0, OURS, Some(1))]).expect("free");
        Self {
            lease,
            echo,
            serial: 0,
        }
    }

    /// A frame to it comes back.
    #[track_caller]
    fn assert_answers(&mut self, world: &World) {
        let mut sent = frame::plain(200, 7);
        sent[..6].copy_from_slice(&OURS);
        self.serial += 1;
        sent[100..102].copy_from_slice(&self.serial.to_be_bytes());
        world.wire.send(&sent);
        let came = wait::until(wait::SOON, || {
            self.echo.run(Duration::from_millis(5));
            std::iter::from_fn(|| world.wire.receive(Duration::ZERO)).any(|got| got == sent)
        });
        assert!(came, "frame {} is lost", self.serial);
    }
}

/// As many as a message has, from that one on.
fn batch(from: u16, port: Option<u32>) -> Vec<StationChange> {
    let of_number = |number: u16| {
        let [high, low] = number.to_be_bytes();
        change(0, [2, 0, 0, 9, high, low], port)
    };
    (from..).take(CHANGES_MAX).map(of_number).collect()
}

/// Sets and clears stations as fast as it is answered, asks for others' and for more than there may be; how often.
fn storm(lessee: &mut Raw, over: &AtomicBool) -> usize {
    let per_message = CHANGES_MAX as u16;
    let mut asked = 0;
    let mut ask = |changes: Vec<StationChange>| {
        asked += 1;
        lessee.ask(&Request::Stations { changes })
    };
    while !over.load(Ordering::Relaxed) {
        let mut others = batch(0, Some(3));
        others[CHANGES_MAX - 1].station.mac = OURS;
        let Answer::Refused(refusal) = ask(others) else {
            panic!("another's")
        };
        assert_eq!(refusal.reason, Reason::Taken);
        let all = (0..20).map(|number| number * per_message);
        let set = all.clone().map(|from| ask(batch(from, Some(3))));
        let refused = set.filter(|answer| matches!(answer, Answer::Refused(_))).count();
        assert_eq!(refused, 4, "of 1,280, 1,024 may be");
        for from in all {
            assert!(matches!(ask(batch(from, None)), Answer::Done));
        }
    }
    asked
}

#[test]
fn stations_in_a_storm_cost_another_lessee_no_frame_and_no_answer() {
    require!(Root);
    let world = World::with(2, POLICY);
    let mut guest = Guest::new(&world);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let storming = scope.spawn(|| {
            let mut lessee = Raw::connect_as(&world.socket(), HOSTILE, HOSTILE);
            lessee.lease(network(1, 1));
            storm(&mut lessee, &over)
        });
        // Also when it panics.
        let end = wait::Raised(&over);
        let mut longest = Duration::ZERO;
        for _ in 0..soak::count(1000, 20_000) {
            guest.assert_answers(&world);
            let begun = Instant::now();
            guest.lease.counters(0, common::soon()).expect("ours");
            longest = longest.max(begun.elapsed());
        }
        drop(end);
        let asked = storming.join().expect("as it should be answered");
        println!("{asked} messages in the storm, the longest answer to another one: {longest:?}");
    });
}

#[test]
fn steward_killed_in_a_storm_of_networks_leaves_nothing_and_another_lessee_is_served() {
    require!(Root);
    let mut world = World::kept_lingering(POLICY, "0");
    let mut guest = Guest::new(&world);
    let (over, leases) = (AtomicBool::new(false), AtomicUsize::new(0));
    let socket = world.socket();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                // Whatever is answered, and whether it is.
                let Ok(lessee) = Raw::try_connect_as(&socket, HOSTILE, HOSTILE) else {
                    continue;
                };
                let stations = Request::Stations {
                    changes: batch(0, Some(3)),
                };
                for (serial, request) in [Request::Lease(network(1, 1)), stations, Request::Groups]
                    .iter()
                    .enumerate()
                {
                    let _ = lessee.send(&request.encode(serial as u32 + 1));
                    if let Some((_, Answer::Facts(_))) = lessee.receive(Duration::from_millis(200)) {
                        leases.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        });
        let end = wait::Raised(&over);
        for round in 0..soak::count(20, 200) {
            std::thread::sleep(Duration::from_millis(20 + 7 * (round as u64 % 9)));
            // On a busy machine none of the rounds may be long enough for a lease.
            assert_soon!(round > 0 || leases.load(Ordering::Relaxed) > 0, "no lease");
            world.end_steward(Signal::KILL);
            guest.assert_answers(&world);
            world.restart();
            world.await_that(|| guest.lease.take_changes().is_ok() && !guest.lease.is_away());
            guest.assert_answers(&world);
        }
        drop(end);
    });
    drop(guest);
    world.await_nothing();
}
