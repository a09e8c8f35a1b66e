//! Networks of many guests, and what happens to them: ports that come and go by the hundred, processes that are killed.

use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use testkit::lan::{self, BROADCAST, STRANGER, mac, none_is_lost, port, telling};
use testkit::{
    Daemon, Driver, DriverConfig, Layout, Noise, PacketPort, Serve, VethPair, driver, holdings, require,
    soak, wait,
};

/// Ports of these numbers, on an uplink.
fn file(guests: impl IntoIterator<Item = usize>) -> String {
    let mut text = lan::file(Some(VethPair::NIC), &[]);
    text.extend(guests.into_iter().map(|guest| port(guest, "")));
    text
}

fn config() -> DriverConfig {
    DriverConfig::with_memory(vec![(virtqueue::GuestAddr(0), 4 << 20)])
}

fn connect(daemon: &Daemon, guest: usize) -> Driver {
    let mut driver = Driver::connect(&daemon.path(&format!("vm{guest}.sock")), &config()).expect("accepted");
    driver.pairs[0].post(200, &[2048]);
    driver
}

/// Two hundred of them.
#[rstest]
fn ports_come_and_go_by_the_hundred_and_the_others_lose_no_frame(#[values(false, true)] leased: bool) {
    const AT_ONCE: usize = 20;
    require!(Root);
    let veth = VethPair::new();
    let serve = Serve::file().leased_if(leased);
    let two = file(0..2);
    let all = file(0..2 + AT_ONCE);
    let mut daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &two);
    let mut guests = [0, 1].map(|guest| connect(&daemon, guest));
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let round = |daemon: &Daemon, with_guest: bool| {
        daemon.reload_with(&all);
        let guest = with_guest.then(|| {
            let mut guest = connect(daemon, 2);
            let sent = telling(mac(3), mac(2), 0, 0);
            guest.pairs[0].send(&sent, Layout::Whole);
            guest.pairs[0].await_sent();
            guest
        });
        daemon.reload_with(&two);
        drop(guest);
    };
    (0..3).for_each(|_| round(&daemon, true));
    let (pid, helper) = (daemon.process().pid(), (!leased).then(|| daemon.helper()));
    let pids: Vec<_> = [pid].into_iter().chain(helper).collect();
    let before: Vec<_> = pids
        .iter()
        .map(|&pid| holdings::steady(pid, wait::QUIET))
        .collect();
    let rounds = soak::count(200, 5000) / AT_ONCE;
    let frames = none_is_lost(&mut guests, [0, 1], Some(&wire), || {
        for number in 0..rounds {
            round(&daemon, number % 5 == 0);
        }
    });
    println!("{frames} frames each way");
    holdings::await_within(&pids, &before);
    let fdb = veth
        .near
        .output_of("bridge", &["fdb", "show", "dev", VethPair::NIC]);
    let known = (2..2 + AT_ONCE).find(|guest| fdb.contains(&format!("02:00:00:00:00:{guest:02x}")));
    assert_eq!(known, None, "addresses stay with the interface: {fdb}");
}

/// A network whose processes are killed.
struct Mortal {
    guests: Vec<Driver>,
    daemon: Daemon,
    wire: PacketPort,
    veth: VethPair,
    serve: Serve,
    number: u32,
}

impl Mortal {
    /// Frames from everybody to everybody, which nobody waits for.
    fn burst(&mut self) {
        let all = self.guests.len();
        for from in 0..all {
            let pair = &mut self.guests[from].pairs[0];
            pair.reap_sent();
            for to in [mac((from + 1) % all), STRANGER, BROADCAST] {
                if pair.has_room() {
                    pair.send(&telling(to, mac(from), 0, 0), Layout::Whole);
                }
            }
            let _ = self.wire.try_send(&telling(mac(from), STRANGER, 0, 0));
        }
    }

    /// Everybody reaches everybody, after what was under way before.
    #[track_caller]
    fn await_all(&mut self, what: &str) {
        let all = self.guests.len();
        for from in 0..all {
            let to = (from + 1) % all;
            let send = |world: &mut Self, sent: &[u8]| {
                let pair = &mut world.guests[from].pairs[0];
                pair.reap_sent();
                if pair.has_room() {
                    pair.send(sent, Layout::Whole);
                }
            };
            self.await_frame(what, from, send, (mac(to), mac(from)), Some(to));
            self.await_frame(what, from, send, (STRANGER, mac(from)), None);
            self.await_frame(
                what,
                from,
                |world, sent| {
                    let _ = world.wire.try_send(sent);
                },
                (mac(from), STRANGER),
                Some(from),
            );
        }
    }

    /// Sends a frame again and again until it arrives at a guest, or at the wire.
    #[track_caller]
    fn await_frame(
        &mut self,
        what: &str,
        guest: usize,
        send: impl Fn(&mut Self, &[u8]),
        (to, from): ([u8; 6], [u8; 6]),
        at: Option<usize>,
    ) {
        self.number += 1;
        let sent = telling(to, from, 0, self.number);
        let arrives = wait::until(wait::SOON, || {
            send(self, &sent);
            let deadline = std::time::Instant::now() + Duration::from_millis(20);
            let mut next = || match at {
                Some(at) => self.guests[at].pairs[0].poll().map(|got| got.frame),
                None => self.wire.receive(Duration::ZERO),
            };
            while std::time::Instant::now() < deadline {
                match next() {
                    Some(got) if got == sent => return true,
                    Some(_) => {}
                    None => std::thread::yield_now(),
                }
            }
            false
        });
        assert!(arrives, "{what}: guest {guest}, {to:x?} from {from:x?}");
    }

    /// Guests connect again, with their memory and rings as they are.
    fn reconnect(&mut self) {
        let guests = std::mem::take(&mut self.guests);
        let again = |(number, guest): (usize, Driver)| {
            let path = self.daemon.path(&format!("vm{number}.sock"));
            guest.resume(driver::connect(&path)).expect("accepted")
        };
        self.guests = guests.into_iter().enumerate().map(again).collect();
    }
}

/// All of it works again each time, and at the end nothing is left behind.
#[rstest]
fn whoever_is_killed_under_traffic_comes_back_and_leaves_nothing_behind() {
    const GUESTS: usize = 6;
    require!(Root);
    let mut random = Noise::new(0x5eed_cafe);
    let veth = VethPair::new();
    let serve = Serve::file().leased();
    let text = file(0..GUESTS);
    let daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &text);
    let guests = (0..GUESTS).map(|guest| connect(&daemon, guest)).collect();
    let mut world = Mortal {
        guests,
        daemon,
        wire: PacketPort::open(&veth.far, VethPair::WIRE),
        veth,
        serve,
        number: 0,
    };
    world.await_all("at first");
    for round in 0..soak::count(10, 100) {
        world.burst();
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        let what = match random.index(4) {
            0 => {
                world.daemon.kill();
                world.burst();
                world.daemon.restart_file(&world.veth.near, &world.serve);
                world.reconnect();
                "daemon".to_owned()
            }
            1 => {
                world.daemon.end_steward(Signal::KILL);
                world.burst();
                world.daemon.restart_lessor(&world.veth.near);
                "steward".to_owned()
            }
            _ => {
                let guest = random.index(GUESTS);
                drop(world.guests.remove(guest));
                world.guests.insert(guest, connect(&world.daemon, guest));
                format!("guest {guest}")
            }
        };
        world.await_all(&format!("round {round}, {what} was killed"));
    }
    let Mortal { mut daemon, veth, .. } = world;
    daemon.kill();
    let nic = || veth.near.output_of("ip", &["-d", "link", "show", VethPair::NIC]);
    let lessor = daemon.lessor.as_ref().expect("queues are leased");
    let links = || veth.near.output_of("ip", &["-o", "link", "show"]);
    // The loopback and the NIC.
    let nothing =
        || !nic().contains("xdp") && lessor.bpffs.pinned().is_empty() && links().lines().count() == 2;
    assert!(
        wait::until(wait::SOON, nothing),
        "{} {}: {:?}: {}",
        nic(),
        links(),
        lessor.bpffs.pinned(),
        lessor.steward
    );
}
