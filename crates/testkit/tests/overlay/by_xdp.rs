//! Networks with an underlay: which frames pass by it and which by the kernel, when the kernel's tables, the devices, the
//! policy and the programs change. Which frames need the kernel is tested in crate `dataplane`
//! (`tests/network_tests/underlay.rs`).
//!
//! Most tests change something on host 0, and look at guest 0, which a daemon serves, and guest 2 of another host, which
//! the kernel does.

mod away;
mod packets;

use std::net::IpAddr;
use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use serde_json::Value;
use testkit::frame::{sum_ipv4, udp, vxlan};
use testkit::lan::{self, frame, mac, once, tagged, telling};
use testkit::overlay::{Host, NIC, Overlay, Station, Underlay, VXLAN, text};
use testkit::{Daemon, DriverConfig, PacketPort, Serve, assert_soon, require, wait};

use super::{HOSTS, MOVER, World, connect};
use crate::network_policy::{policy, read_policy};
use crate::queues::queues_of;
use crate::status::status_text;

/// An address that no daemon has.
const FURTHER: usize = 5;

impl World {
    fn by_xdp(serve: &Serve) -> Self {
        Self::new(Underlay::BY_XDP, serve, &DriverConfig::default())
    }

    /// What the first daemon tells of its underlay.
    fn underlay(&self) -> Value {
        self.daemons[0].status()["networks"][0]["underlay"].clone()
    }

    #[track_caller]
    fn await_underlay(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        assert_soon!(is_so(&self.underlay()), "{what}: {:#}", self.underlay());
    }

    /// Waits until the first daemon tells why it does not use its underlay, and how it will.
    #[track_caller]
    fn await_impaired(&self, words: &str) {
        let is_why = |why: &Value| why.as_str().is_some_and(|why| why.contains(words));
        self.await_underlay(words, |underlay| is_why(&underlay["impaired"]));
    }

    /// Waits until the first daemon knows the next hops of so many hosts.
    #[track_caller]
    fn await_resolved(&self, hosts: usize) {
        self.await_underlay("resolved", |underlay| underlay["resolved"] == hosts);
    }

    /// The next frame of guest 0 to guest 2 leaves by the kernel, or by the underlay.
    #[track_caller]
    fn assert_leaves(&mut self, by_xdp: bool) {
        self.by_xdp[0] = by_xdp;
        self.assert_passes(0, 2, 100);
    }

    /// Frames between guests 0 and 2 come to pass by the underlay, or all by the kernel.
    #[track_caller]
    fn await_ways(&mut self, by_xdp: bool) {
        self.by_xdp[0] = by_xdp;
        // The daemon may set the underlay up twice, as the steward may report further changes.
        for len in [60, 100] {
            self.await_way(0, 2, len);
            self.await_way(2, 0, len);
            if by_xdp {
                self.await_followed(0);
            }
        }
    }

    /// The host of guest 0, and that of guest 2.
    fn ends(&self) -> [&Host; 2] {
        [0, 2].map(|number| &self.overlay.hosts[number])
    }
}

#[test]
fn next_hop_is_used_as_the_kernel_has_it() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file());
    let [host, other] = world.ends();
    // The kernel there does not ask for this one, which would be an entry here.
    other.set_neighbour(host, "permanent");
    let neighbour = other.address();
    for _ in 0..2 {
        world.ends()[0]
            .netns
            .ip(&["neighbour del", &neighbour, "dev", NIC]);
        world.await_resolved(1);
        world.assert_leaves(false);
        world.await_resolved(2);
        world.assert_leaves(true);
        let [host, other] = world.ends();
        host.set_neighbour(other, "stale");
        world.await_followed(0);
        world.assert_leaves(false);
        for _ in 0..3 {
            world.assert_leaves(true);
        }
        let known = world.ends()[0]
            .netns
            .output_of("ip", &["neighbour", "show", &neighbour]);
        assert!(!known.contains("STALE"), "{known}");
    }
}

#[test]
fn frames_to_a_server_behind_a_router_leave_by_the_underlay() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file());
    let (router, gateway) = world.overlay.add_router();
    let forwarded = || router.output_of("nstat", &["-asz", "IpForwDatagrams"]);
    let (before, other) = (forwarded(), world.ends()[1].address());
    let route = |word: &str| {
        world.overlay.hosts[0]
            .netns
            .ip(&["route", word, &other, "via", &gateway]);
    };
    route("add");
    world.await_resolved(1);
    assert_eq!(forwarded(), before);
    world.assert_leaves(false);
    world.await_resolved(2);
    for _ in 0..3 {
        let before = forwarded();
        world.assert_leaves(true);
        assert_ne!(forwarded(), before);
    }
    world.overlay.hosts[0]
        .netns
        .ip(&["route del", &other, "via", &gateway]);
    let is_direct = wait::until(wait::SOON, || {
        let before = forwarded();
        world.assert_leaves(true);
        forwarded() == before
    });
    assert!(is_direct);
}

/// Hosts 1 and 2 both have the address, so that each frame arrives somewhere.
#[test]
fn entry_moves_to_another_server_while_frames_pass() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file());
    let mut ports = [1, 2].map(|number| {
        let host = &world.overlay.hosts[number];
        let port = host.add_port("further");
        host.add_entry(mac(FURTHER), "further");
        Station::port(port, FURTHER)
    });
    let entry = |to: usize| {
        let [host, to] = [0, to].map(|number| &world.overlay.hosts[number]);
        host.bridge(&format!(
            "fdb replace {} dev {VXLAN} dst {}",
            text(mac(FURTHER)),
            to.address()
        ));
    };
    entry(1);
    world.stations[0].await_reaches(&mut ports[0]);
    world.await_followed(0);
    let before = world.counted(0, FURTHER)[0];
    let mut arrived = [0, 0];
    let moves = || (0..60).for_each(|number| entry(1 + number % 2));
    let guest = &mut world.stations[0];
    let frames = wait::rounds_during(moves, |number| {
        let sent = telling(mac(FURTHER), mac(0), 0, number);
        guest.send(&sent);
        // Where it arrives, and before any other.
        let at = wait::until_some(wait::SOON, || {
            let mut got = ports.iter_mut().map(|port| port.receive(Duration::ZERO));
            got.position(|got| got.is_some_and(|got| got == sent))
        });
        arrived[at.expect("it arrives")] += 1;
    });
    assert!(arrived.iter().all(|&frames| frames > 0), "{arrived:?}");
    for (to, port) in [1, 2].into_iter().zip(&mut ports) {
        entry(to);
        world.await_followed(0);
        let sent = frame(mac(FURTHER), mac(0), 60, to as u8);
        world.stations[0].send(&sent);
        assert_eq!(port.receive(wait::SOON), Some(sent), "one arrived twice");
    }
    let left = || world.counted(0, FURTHER)[0];
    assert_soon!(left() == before + u64::from(frames) + 2, "{}", left());
}

#[test]
fn frames_that_need_more_than_headers_pass_by_the_kernel() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file());
    // To an unknown address.
    let [host, other] = world.ends();
    let entry = format!("{} dev {VXLAN} dst {}", text(mac(2)), other.address());
    host.bridge(&format!("fdb del {entry}"));
    world.await_followed(0);
    world.assert_leaves(false);
    world.ends()[0].bridge(&format!("fdb add {entry}"));
    world.await_followed(0);
    world.assert_leaves(true);
    // Too long for the underlay with headers: the kernel sends fragments.
    for (number, from, to) in [(0, 0, 2), (2, 2, 0)] {
        let at = &world.overlay.hosts[number];
        at.netns.ip(&["link set", NIC, "mtu 1400"]);
        world.by_xdp[0] = false;
        world.await_way(from, to, 1365);
        world.await_ways(true);
        world.by_xdp[0] = false;
        for len in [1365, 1464] {
            world.assert_passes(from, to, len);
        }
        world.by_xdp[0] = true;
        world.assert_passes(from, to, 1364);
    }
    world.assert_delivers_to_all(0, 60);
}

#[test]
fn guests_in_vlans_reach_each_other() {
    require!(Root);
    let overlay = Overlay::new(Underlay::BY_XDP, 2);
    (0..2).for_each(|guest| overlay.add_entries(mac(guest), guest));
    let daemons: [Daemon; 2] = [(0, "trunk = \"100\""), (1, "vlan = 100")].map(|(number, keys)| {
        let host = &overlay.hosts[number];
        host.start_daemon(&Serve::file(), &host.file(&[(number, keys)]))
    });
    let [mut trunk, mut access] =
        [0, 1].map(|guest| connect(&daemons[guest], 0, guest, &DriverConfig::default()));
    let [out, back] = [(1, 0), (0, 1)].map(|(to, from)| frame(mac(to), mac(from), 100, 1));
    let counts = || {
        daemons
            .each_ref()
            .map(|daemon| ["from_guest_encapsulated", "redirected"].map(|name| daemon.counter(name)))
    };
    let passes = wait::until(wait::SOON, || {
        let before = counts();
        trunk.send(&tagged(&out, 100));
        access.send(&back);
        let got = [&mut access, &mut trunk].map(|guest| guest.receive(wait::QUIET));
        got == [Some(out.clone()), Some(tagged(&back, 100))]
            && counts() == before.map(|of| of.map(|count| count + 1))
    });
    assert!(passes, "{:?}", counts());
}

#[test]
fn frames_at_a_queue_that_is_not_leased_pass_by_the_kernel() {
    require!(Root);
    let underlay = Underlay {
        queues: 2,
        ..Underlay::BY_XDP
    };
    let mut world = World::new(underlay, &Serve::file(), &DriverConfig::default());
    world.overlay.spread(0);
    for queues in [1, 2, 1] {
        let text = world.overlay.hosts[0].file(&[(0, ""), (MOVER, "")]);
        let of = format!("underlay = \"{NIC}\"\n");
        world.daemons[0].reload_with(&text.replace(&of, &format!("{of}underlay-queues = {queues}\n")));
        let mut redirected = 0;
        let is_so = wait::until(wait::SOON, || {
            let before = world.counted(2, 0)[1];
            for flow in 0..32 {
                let mut sent = [&mac(0)[..], &mac(2), &udp(flow, 100)[12..]].concat();
                sum_ipv4(&mut sent);
                world.pass(&sent, 2, 0);
            }
            redirected = world.counted(2, 0)[1] - before;
            if queues == 2 {
                redirected == 32
            } else {
                (1..32).contains(&redirected)
            }
        });
        assert!(is_so, "{redirected} of 32 by {queues} queues");
        world.assert_delivers_to_all(2, 60);
    }
}

/// Two VNIs, and VLAN 7 of the NIC, with the same address in each of these networks. Host 1 is only a wire. The first
/// queues of the tunnels: they may share one.
#[rstest]
#[case([0, 1])]
#[case([0, 0])]
fn networks_with_the_same_addresses_are_apart_on_one_nic(#[case] first: [u32; 2]) {
    require!(Root);
    let queues = first[1] + 2;
    let underlay = Underlay {
        queues,
        ..Underlay::BY_XDP
    };
    let overlay = Overlay::new(underlay, 2);
    overlay.spread(0);
    let [host, other] = &overlay.hosts[..] else {
        panic!("two hosts");
    };
    host.add_network(200);
    let vnis = [100, 200];
    for vni in vnis {
        let (mac, at) = (text(mac(2)), other.address());
        host.bridge(&format!("fdb add {mac} dev vx{vni} dst {at}"));
    }
    let uplinks = [
        format!("uplink = \"{VXLAN}\"\nmode = \"auto\"\nunderlay = \"{NIC}\"\n"),
        format!(
            "uplink = \"vx200\"\nmode = \"auto\"\nunderlay = \"{NIC}\"\nunderlay-start-queue = {}\n\
             drop-unknown-senders = true\n",
            first[1]
        ),
        format!("uplink = \"{NIC}\"\nstart-queue = {}\n", queues - 1),
    ];
    let port = |at: usize, keys| lan::port(at, keys).replace(&text(mac(at)), &text(mac(0)));
    let tables = (0..3).map(|at| {
        let of = format!("network = \"lan{at}\"");
        let port = port(at, ["", "", "vlan = 7"][at]).replace("network = \"lan\"", &of);
        format!("[network.lan{at}]\n{}{port}", uplinks[at])
    });
    let (interfaces, tables) = ([VXLAN, "vx200", NIC], tables.collect::<Vec<String>>());
    let daemon = Daemon::start_file(&host.netns, &Serve::file(), &interfaces, &tables.concat());
    let mut guests = [0, 1, 2].map(|at| {
        let socket = daemon.path(&format!("vm{at}.sock"));
        Station::guest(daemon.connect(at, &socket, &DriverConfig::default(), 64), 0)
    });
    let wire = PacketPort::open(&other.netns, NIC);
    let local: IpAddr = host.address().parse().expect("an address");
    let ends = [host.nic_mac(), other.nic_mac()].concat();
    let packet = |vni, frame: &[u8], flow: u16| {
        let mut packet = [&ends[..], &vxlan(local, vni, frame)[12..]].concat();
        packet[34..36].copy_from_slice(&(50_000 + flow).to_be_bytes());
        packet
    };
    let send = |vni, frame: &[u8], flow: u16| wire.send(&packet(vni, frame, flow));
    let redirected = || ["lan0", "lan1", "lan2"].map(|name| daemon.network_counter(name, "redirected"));
    let mut flows = 0..;
    // Until each has received frames by its queue; none ever receives another one's.
    let are_received = wait::until(wait::SOON, || {
        let before = redirected();
        for (flow, number) in flows.by_ref().take(30).map(|flow| (flow, usize::from(flow) % 3)) {
            let mut sent = [&mac(0)[..], &mac(2), &udp(flow, 100)[12..]].concat();
            sum_ipv4(&mut sent);
            match vnis.get(number) {
                Some(&vni) => send(vni, &sent, flow),
                None => wire.send(&tagged(&sent, 7)),
            }
            // The kernel delivers no frames of the VLAN at other queues.
            let limit = if number == 2 { wait::QUIET } else { wait::SOON };
            let got = guests[number].receive(limit);
            assert!(
                got.as_ref() == Some(&sent) || number == 2 && got.is_none(),
                "{number}: {got:?}"
            );
            for at in (0..3).filter(|&at| at != number) {
                assert_eq!(guests[at].receive(Duration::ZERO), None, "{number} at {at}");
            }
        }
        (0..3).all(|number| redirected()[number] > before[number])
    });
    assert!(are_received, "{:#}", daemon.status());
    let encapsulated =
        || ["vm0", "vm1", "vm2"].map(|name| daemon.counter_of(name, "from_guest_encapsulated"));
    let are_sent = wait::until(wait::SOON, || {
        let before = encapsulated();
        for (number, guest) in guests.iter_mut().enumerate() {
            let sent = once(mac(2), mac(0), 100);
            guest.send(&sent);
            let is_it = |got: &Vec<u8>| match vnis.get(number) {
                Some(vni) => got[46..].starts_with(&(vni << 8u32).to_be_bytes()) && got[50..] == sent,
                None => *got == tagged(&sent, 7),
            };
            let mut received = std::iter::from_fn(|| wire.receive(wait::SOON));
            assert!(
                received.any(|got| got.len() > 100 && is_it(&got)),
                "from {number}"
            );
        }
        let after = encapsulated();
        [0, 1, 2].map(|number| after[number] - before[number]) == [1, 1, 0]
    });
    assert!(are_sent, "{:#}", daemon.status());
    // One leaves the underlay: packets for it from any sender are the kernel's.
    let own = "uplink = \"vx200\"\nmode = \"auto\"\n";
    daemon.reload_with(&tables.concat().replace(&uplinks[1], own));
    let arrives = wait::until(wait::SOON, || {
        let sent = once(mac(0), mac(2), 100);
        let mut unknown = packet(200, &sent, flows.next().expect("endless"));
        unknown[29] = 77;
        sum_ipv4(&mut unknown);
        wire.send(&unknown);
        guests[1].receive(wait::QUIET) == Some(sent)
    });
    assert!(arrives, "{:#}", daemon.status());
    daemon.reload_with(&tables.concat());
    // The network that opened the underlay ends. Some frames may be lost until the other one has opened it.
    daemon.reload_with(&tables[1..].concat());
    let goes_on = wait::until(wait::SOON, || {
        let before = daemon.network_counter("lan1", "redirected");
        let [other, own] = vnis.map(|vni| {
            let sent = once(mac(0), mac(2), 100);
            send(vni, &sent, flows.next().expect("endless"));
            sent
        });
        let got = guests[1].receive(wait::QUIET);
        assert_ne!(got, Some(other), "of the network that has ended");
        got == Some(own) && daemon.network_counter("lan1", "redirected") > before
    });
    assert!(goes_on, "{:#}", daemon.status());
}
