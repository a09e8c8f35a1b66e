//! Networks over VXLAN with FRR's EVPN: it announces the addresses of connected guests, and learns those of other hosts.

use rstest::rstest;
use rustix::process::Signal;
use testkit::lan::{frame, mac};
use testkit::overlay::{Host, Overlay, Station, Underlay};
use testkit::{Driver, DriverConfig, Layout, Serve, assert_soon, driver, require};

use super::{MOVER, World, connect};

/// Number of an address without a guest, at a port of host 0; the next number is at host 1.
const FENCE: usize = 8;

impl World {
    fn with_frr(underlay: Underlay, serve: &Serve) -> Self {
        let overlay = Overlay::with_frr(underlay, 3);
        for host in &overlay.hosts {
            let _ = host.add_port("fence");
        }
        Self::on(overlay, serve, &DriverConfig::default())
    }

    /// The mover connects at a host.
    fn arrive(&self, host: usize) -> Station {
        connect(&self.daemons[host], 1, MOVER, &DriverConfig::default())
    }

    /// The same, and does not start its queues.
    fn connect_idle(&self, host: usize) -> Driver {
        let socket = self.daemons[host].path(&format!("vm{MOVER}.sock"));
        Driver::connect_idle(&socket, &DriverConfig::default()).expect("accepted")
    }

    /// Waits until the observer finds the mover at a host.
    #[track_caller]
    fn await_mover(&self, host: usize) {
        self.observer()
            .await_remote(mac(MOVER), Some(&self.overlay.hosts[host]));
    }

    /// The host of the kernel's guest.
    fn observer(&self) -> &Host {
        &self.overlay.hosts[2]
    }

    /// Waits until the observer has received all that hosts 0 and 1 have announced and withdrawn before.
    #[track_caller]
    fn await_announced(&self) {
        for (number, host) in self.overlay.hosts[..2].iter().enumerate() {
            let mac = mac(FENCE + number);
            host.add_entry(mac, "fence");
            self.observer().await_remote(mac, Some(host));
            host.remove_entry(mac, "fence");
            self.observer().await_remote(mac, None);
        }
    }

    /// Guest 0 is where it was, and is reached.
    #[track_caller]
    fn assert_stays(&mut self) {
        self.await_announced();
        let at = self.observer().remote(mac(0));
        assert_eq!(at, Some(self.overlay.hosts[0].address()));
        for (from, to) in [(0, 2), (2, 0)] {
            self.assert_passes(from, to, 100);
        }
    }
}

#[rstest]
#[case(Underlay::PLAIN, Serve::file().leased())]
#[case(Underlay::PLAIN, Serve::file().by_root())]
#[case(Underlay::BY_XDP, Serve::file().leased())]
fn guests_of_all_hosts_reach_each_other(#[case] underlay: Underlay, #[case] serve: Serve) {
    require!(Root, Frr);
    let mut world = World::with_frr(underlay, &serve);
    world.assert_all_deliver(100);
}

/// IP addresses of guest 0 in the tests of two hosts. A network is not announced.
const KEYS: &str = "ips = [\"192.0.2.10\", \"2001:db8::10\", \"192.0.2.11/32\", \"198.51.100.0/24\"]";
const IPS: [&str; 3] = ["192.0.2.10", "2001:db8::10", "192.0.2.11"];

/// Waits until a host knows these addresses of guest 0, and no others.
#[track_caller]
fn await_known(host: &Host, at: Option<&Host>, ips: &[&str]) {
    host.await_remote(mac(0), at);
    for ip in IPS {
        host.await_neighbour(ip, mac(0), ips.contains(&ip));
    }
    assert!(!host.neighbours().contains("198.51.100"), "{}", host.neighbours());
}

#[rstest]
fn addresses_of_a_guest_are_known_while_it_is_connected(
    #[values(Serve::file().leased(), Serve::file().by_root())] serve: Serve,
) {
    require!(Root, Frr);
    let overlay = Overlay::with_frr(Underlay::PLAIN, 2);
    let [host, observer] = [0, 1].map(|number| &overlay.hosts[number]);
    let text = host.file(&[(0, KEYS), (1, "")]);
    let daemon = host.start_daemon(&serve, &text);
    let config = DriverConfig::default();
    let _other = connect(&daemon, 1, 1, &config);
    observer.await_remote(mac(1), Some(host));
    for _ in 0..2 {
        await_known(observer, None, &[]);
        let _guest = connect(&daemon, 0, 0, &config);
        await_known(observer, Some(host), &IPS);
        daemon.reload_with(&host.file(&[(0, "ips = [\"192.0.2.10\"]"), (1, "")]));
        await_known(observer, Some(host), &IPS[..1]);
        daemon.reload_with(&text);
        await_known(observer, Some(host), &IPS);
    }
    await_known(observer, None, &[]);
    daemon.reload_with(&host.file(&[(1, "")]));
    assert_eq!(observer.remote(mac(1)), Some(host.address()));
    assert_eq!(host.neighbours(), "");
}

#[rstest]
fn addresses_are_withdrawn_when_the_daemon_is_killed(
    #[values(Serve::file().leased(), Serve::file().by_root())] serve: Serve,
) {
    require!(Root, Frr);
    let overlay = Overlay::with_frr(Underlay::PLAIN, 2);
    let [host, observer] = [0, 1].map(|number| &overlay.hosts[number]);
    let mut daemon = host.start_daemon(&serve, &host.file(&[(0, KEYS)]));
    for _ in 0..2 {
        let _guest = connect(&daemon, 0, 0, &DriverConfig::default());
        await_known(observer, Some(host), &IPS);
        daemon.kill();
        await_known(observer, None, &[]);
        assert_soon!(
            !host.entries().contains("vax") && host.neighbours().is_empty(),
            "{}{}",
            host.entries(),
            host.neighbours()
        );
        daemon.restart_file(&host.netns, &serve);
    }
}

/// VMMs stay, and connect to the next daemon.
#[rstest]
fn addresses_are_announced_again_when_the_daemon_is_restarted_under_guests(
    #[values(Serve::file().leased(), Serve::file().by_root())] serve: Serve,
    #[values(true, false)] kills: bool,
) {
    require!(Root, Frr);
    let overlay = Overlay::with_frr(Underlay::PLAIN, 2);
    let [host, observer] = [0, 1].map(|number| &overlay.hosts[number]);
    let text = host.file(&[(0, KEYS), (1, "learning = true")]);
    let mut daemon = host.start_daemon(&serve, &text);
    let sockets = [0, 1].map(|guest| daemon.path(&format!("vm{guest}.sock")));
    let config = DriverConfig::default();
    let mut guests = [0, 1].map(|guest| daemon.connect(guest, &sockets[guest], &config, 64));
    for restarts in 0..3 {
        if restarts > 0 {
            match kills {
                true => daemon.kill(),
                false => _ = daemon.terminate(),
            }
            await_known(observer, None, &[]);
            daemon.restart_file(&host.netns, &serve);
            let mut socket = sockets.iter().map(|path| driver::connect(path));
            guests = guests.map(|guest| guest.resume(socket.next().expect("two")).expect("accepted again"));
        }
        await_known(observer, Some(host), &IPS);
        observer.await_remote(mac(1), Some(host));
        // A learned address is known when the guest uses it again.
        observer.await_remote(mac(FENCE), None);
        let sent = frame(mac(0), mac(FENCE), 60, 0);
        guests[1].pairs[0].reap_sent();
        guests[1].pairs[0].send(&sent, Layout::Whole);
        observer.await_remote(mac(FENCE), Some(host));
    }
}

#[rstest]
fn addresses_stay_when_the_steward_is_killed_and_follow_guests_when_it_is_back() {
    require!(Root, Frr);
    let mut world = World::with_frr(Underlay::PLAIN, &Serve::file().leased());
    let mut mover = None;
    for arrives in [true, false] {
        world.daemons[0].end_steward(Signal::KILL);
        world.assert_stays();
        mover = arrives.then(|| world.arrive(0));
        world.assert_stays();
        let host = &world.overlay.hosts[0];
        world.daemons[0].restart_lessor(&host.netns);
        world.observer().await_remote(mac(MOVER), arrives.then_some(host));
        world.assert_stays();
    }
    drop(mover);
}

#[rstest]
#[case::bgpd(false)]
#[case::all_of_frr(true)]
fn frames_pass_again_when_frr_is_restarted(#[case] with_zebra: bool) {
    require!(Root, Frr);
    let mut world = World::with_frr(Underlay::BY_XDP, &Serve::file());
    let [host, .., observer] = &mut world.overlay.hosts[..] else {
        panic!("three hosts");
    };
    let frr = host.frr.as_mut().expect("it has FRR");
    frr.restart(&host.netns, with_zebra, || observer.await_remote(mac(0), None));
    world.await_all();
    let (frr, netns) = world.overlay.reflector.as_mut().expect("there is one");
    frr.restart(netns, with_zebra, || {
        world.overlay.hosts[2].await_remote(mac(0), None);
    });
    world.await_all();
}

/// A VMM connects at the other host while the guest runs here, or after it disconnected here.
#[rstest]
#[case(Underlay::PLAIN, true)]
#[case(Underlay::BY_XDP, false)]
fn guest_that_moves_to_another_host_is_reached_there(
    #[case] underlay: Underlay,
    #[case] connects_before: bool,
) {
    require!(Root, Frr);
    let mut world = World::with_frr(underlay, &Serve::file());
    let mut mover = Some(world.arrive(0));
    world.await_mover(0);
    for to in [1, 0, 1] {
        if !connects_before {
            mover = None;
        }
        let mut arrived = world.connect_idle(to);
        if connects_before {
            // Where its queues run, and not where a VMM only waits for it.
            world.await_announced();
            world.await_mover(1 - to);
        }
        arrived.start_pair(0).expect("accepted");
        arrived.pairs[0].post(64, &[2048]);
        let mut arrived = Station::guest(arrived, MOVER);
        world.await_mover(to);
        drop(mover);
        // What the first host withdraws changes nothing.
        world.await_announced();
        world.await_mover(to);
        for other in &mut world.stations {
            arrived.await_reaches(other);
            other.await_reaches(&mut arrived);
        }
        mover = Some(arrived);
    }
}

/// A migration that fails at its end: the guest goes on where it was.
#[rstest]
fn guest_that_does_not_move_after_all_is_reached_where_it_stays() {
    require!(Root, Frr);
    let mut world = World::with_frr(Underlay::PLAIN, &Serve::file());
    let mut mover = world.arrive(0);
    for _ in 0..3 {
        world.await_mover(0);
        for other in &mut world.stations {
            mover.await_reaches(other);
            other.await_reaches(&mut mover);
        }
        let arrived = world.arrive(1);
        world.await_mover(1);
        drop(arrived);
    }
    world.await_mover(0);
}
