//! Stewards and lessees killed at random under traffic, 500 times in a soak: frames go on whenever only the steward is
//! away, and nothing is left behind in the end.

use crate::common;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{World, lessee, lessee_may, take};
use rustix::process::Signal;
use testkit::{Noise, PacketPort, Running, VethPair, frame, require, soak, wait};

/// The interfaces, of one queue each and with one lessee each, and their other ends.
const PAIRS: [(&str, &str); 2] = [(VethPair::NIC, VethPair::WIRE), ("nic1", "wire1")];

/// Kills, how many echoes were asked for while there was no steward, and how often all was found well.
#[derive(Debug, Default)]
struct Tally {
    stewards: u32,
    lessees: u32,
    echoes_without: u32,
    in_order: u32,
}

/// Everything that is killed.
struct Victims {
    world: World,
    lessees: Vec<Running>,
    wires: Vec<PacketPort>,
    /// Of the next frame that is looked for.
    serial: u8,
    tally: Tally,
}

impl Victims {
    fn new() -> Self {
        // Long enough for a lessee that is not scheduled for a while; who is dead is not waited for.
        let world = World::kept_for(&PAIRS.map(|(nic, _)| lessee_may(nic, "0")).concat(), "60");
        world.veth.join_as(PAIRS[1].0, PAIRS[1].1, 1, 1500);
        let wires = PAIRS
            .map(|(_, wire)| PacketPort::open(&world.veth.far, wire))
            .into();
        let mut victims = Self {
            lessees: (0..PAIRS.len()).map(|at| start_lessee(&world, at)).collect(),
            world,
            wires,
            serial: 0,
            tally: Tally::default(),
        };
        victims.await_order();
        victims
    }

    /// Whether a frame comes back on that wire.
    fn echoes(&mut self, at: usize, limit: Duration) -> bool {
        self.serial = self.serial.wrapping_add(1);
        // Of a length that the traffic has not.
        let sent = frame::plain(200, self.serial);
        let wire = &self.wires[at];
        let until = Instant::now() + limit;
        if wire.try_send(&sent).is_err() {
            return false;
        }
        while Instant::now() < until {
            if wire
                .receive(until.saturating_duration_since(Instant::now()))
                .as_ref()
                == Some(&sent)
            {
                return true;
            }
        }
        false
    }

    /// Kills the steward; who had frames before, within that time, has them still.
    fn kill_steward(&mut self, limit: Duration) {
        let had: Vec<usize> = (0..PAIRS.len()).filter(|&at| self.echoes(at, limit)).collect();
        self.world.end_steward(Signal::KILL);
        self.tally.stewards += 1;
        for at in had {
            let goes_on = self.echoes(at, wait::SOON);
            assert!(
                goes_on,
                "no echo on {at}: {} {}",
                self.world.steward, self.lessees[at]
            );
            self.tally.echoes_without += 1;
        }
    }

    fn kill_lessee(&mut self, at: usize) {
        self.lessees[at].signal(Signal::KILL);
        self.lessees[at].wait(wait::SOON);
        self.tally.lessees += 1;
    }

    /// One or two kills, in any order, of what may be in the midst of anything.
    fn round(&mut self, random: &mut Noise) {
        std::thread::sleep(Duration::from_micros(random.below(25_000)));
        let lessee = random.index(PAIRS.len());
        let (steward_dies, lessee_dies, steward_first) = match random.below(10) {
            0..4 => (true, false, true),
            4..7 => (false, true, true),
            7 => (true, true, true),
            _ => (true, true, false),
        };
        if lessee_dies && !steward_first {
            self.kill_lessee(lessee);
        }
        if steward_dies {
            self.kill_steward(Duration::from_millis(3));
        }
        if lessee_dies && steward_first {
            self.kill_lessee(lessee);
        }
        let lessee_before = random.below(2) == 0;
        if lessee_dies && lessee_before {
            self.lessees[lessee] = start_lessee(&self.world, lessee);
        }
        if steward_dies {
            self.world.start_again();
        }
        if lessee_dies && !lessee_before {
            self.lessees[lessee] = start_lessee(&self.world, lessee);
        }
    }

    /// Waits until all is well: frames come back everywhere, and there is what belongs to two leases, and no more.
    fn await_order(&mut self) {
        for at in 0..PAIRS.len() {
            let until = Instant::now() + wait::SOON;
            while !self.echoes(at, Duration::from_millis(50)) {
                assert!(
                    Instant::now() < until,
                    "no echo on {at}: {} {}",
                    self.world.steward,
                    self.lessees[at]
                );
            }
        }
        let whole = wait::until(wait::SOON, || self.records() == 2 && self.pins().len() == 2);
        assert!(whole, "{} records, pins {:?}", self.records(), self.pins());
        self.tally.in_order += 1;
    }

    /// Leases that are recorded with a token.
    fn records(&self) -> usize {
        let path = self.world.dir.path().join("state/state.toml");
        std::fs::read_to_string(path)
            .unwrap_or_default()
            .matches("token = ")
            .count()
    }

    /// Links that are pinned.
    fn pins(&self) -> Vec<PathBuf> {
        let pinned = self.world.bpffs.as_ref().expect("kept").pinned();
        pinned.into_iter().filter(|path| path.ends_with("link")).collect()
    }
}

fn start_lessee(world: &World, at: usize) -> Running {
    lessee::spawn_on(world, "kills::child_holds_on", PAIRS[at].0)
}

/// Has its queue and sends back what comes, whatever happens to the steward and the lease.
#[test]
#[ignore = "run in a process of its own"]
fn child_holds_on() {
    lessee::give_up_privileges();
    let interface = lessee::interface();
    let mut report = String::new();
    loop {
        let over = hold(&interface).expect_err("it ends only by an error");
        if over != report {
            println!("{over}");
            report = over;
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}

fn hold(interface: &str) -> Result<(), String> {
    let wanted = common::wanted_of(interface, 0, 1);
    let lease = take(&lessee::socket(), &wanted).map_err(|error| error.to_string())?;
    let mut echo = lessee::Echo::try_open(&lease, 0)?;
    loop {
        echo.run(Duration::from_millis(5));
        let generation = lease.facts().generation;
        let changed = lease.take_changes().map_err(|error| error.to_string())?;
        if changed.is_some_and(|facts| facts.generation != generation || facts.mode.is_none()) {
            return Err("another program".to_owned());
        }
    }
}

#[test]
fn stewards_and_lessees_killed_under_traffic_leave_nothing_and_frames_go_on() {
    require!(Root);
    let kills = soak::count(100, 500) as u64;
    let (mut victims, mut random) = (Victims::new(), Noise::new(0x5eed_cafe));
    let (over, began) = (AtomicBool::new(false), Instant::now());
    let traffic = PAIRS.map(|(_, wire)| PacketPort::open(&victims.world.veth.far, wire));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for wire in &traffic {
                    let _ = wire.try_send(&frame::plain(100, 1));
                }
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        // Also when it panics.
        let _end = wait::Raised(&over);
        let mut rounds = 0;
        while u64::from(victims.tally.stewards + victims.tally.lessees) < kills {
            victims.round(&mut random);
            rounds += 1;
            if rounds % 20 == 0 {
                victims.await_order();
            }
        }
        victims.await_order();
        // At other times it depends on how soon lessees are back whether they had any.
        victims.kill_steward(wait::SOON);
        victims.world.restart();
        victims.await_order();
    });
    println!("{:?} in {:?}", victims.tally, began.elapsed());
    // All but the steward go, which then has nothing left.
    for at in 0..PAIRS.len() {
        victims.kill_lessee(at);
    }
    let world = &mut victims.world;
    world.await_nothing();
    wait::a_moment();
    let before = world.descriptors();
    world.restart_after(Signal::KILL);
    world.await_descriptors(before);
    world.await_nothing();
    world.end_steward(Signal::TERM);
    assert!(!world.socket().exists());
}
