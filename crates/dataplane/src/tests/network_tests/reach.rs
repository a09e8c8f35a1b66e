//! Who reaches whom on a network with ports of all kinds, its host and an uplink: each allowed port
//! gets a frame once, and no other port gets it. The uplink of these tests only receives: frames that would leave by it
//! are counted instead.

use std::os::fd::OwnedFd;

use super::host::{HOST, add_host, read, write};
use super::*;

/// VLANs of the host's and the uplink's frames; no port is in the last one.
const VLANS: [u16; 4] = [0, 100, 101, 102];

/// Two ports of each kind: untagged, isolated, of a VLAN, of another, of both.
fn ports() -> Vec<FdbPort> {
    let port = |at: u8| {
        fdb_port_with(at, |port| {
            port.vlans = match at / 2 {
                0 | 1 => Vlans::Untagged,
                2 => Vlans::Access(100),
                3 => Vlans::Access(101),
                _ => Vlans::Trunk(vec![100, 101]),
            };
            port.options.isolated = at / 2 == 1;
        })
    };
    (0..10).map(port).collect()
}

fn vlans(port: &FdbPort) -> Vec<u16> {
    match &port.vlans {
        Vlans::Untagged => vec![0],
        Vlans::Access(vlan) => vec![*vlan],
        Vlans::Trunk(vlans) => vlans.clone(),
    }
}

/// A frame of a VLAN as the uplink and the host have it.
fn outside(frame: &[u8], vlan: u16) -> Vec<u8> {
    match vlan {
        0 => frame.to_vec(),
        _ => tagged(frame, vlan),
    }
}

/// The same as a port's guest has it.
fn inside(port: &FdbPort, frame: &[u8], vlan: u16) -> Vec<u8> {
    match port.vlans {
        Vlans::Trunk(_) => tagged(frame, vlan),
        _ => frame.to_vec(),
    }
}

/// The frames of each port and of the host, and how many to one station are for the uplink.
#[derive(Debug, PartialEq, Eq)]
struct Got {
    ports: Vec<Vec<Vec<u8>>>,
    host: Vec<Vec<u8>>,
    for_uplink: u64,
}

impl Got {
    fn nothing(ports: &[FdbPort], for_uplink: u64) -> Self {
        Self {
            ports: vec![Vec::new(); ports.len()],
            host: Vec::new(),
            for_uplink,
        }
    }

    fn of(world: &mut World, host: &OwnedFd) -> Self {
        (0..4).for_each(|_| world.poll());
        let for_uplink = |port: &Port| port.counters.from_guest_no_station.get();
        Self {
            ports: world.ports.iter_mut().map(Port::take).collect(),
            host: read(host),
            for_uplink: world.ports.iter().map(for_uplink).sum(),
        }
    }

    /// In an order of their own.
    fn sorted(mut self) -> Self {
        self.ports
            .iter_mut()
            .chain([&mut self.host])
            .for_each(|frames| frames.sort());
        self
    }
}

/// What a port sends to everybody and to a group in one of its VLANs, and who gets it.
fn of_port(ports: &[FdbPort], from: usize, vlan: u16, wanted: &mut Got) -> Vec<Vec<u8>> {
    let sender = &ports[from];
    let mut sent = Vec::new();
    let mut send = |to| {
        let frame = frame(to, sender.mac, 60);
        sent.push(inside(sender, &frame, vlan));
        frame
    };
    let may = |to: &FdbPort| !(sender.options.isolated && to.options.isolated);
    for (at, to) in ports.iter().enumerate().filter(|&(at, _)| at != from) {
        let frame = send(to.mac);
        match vlans(to).contains(&vlan) {
            true if may(to) => wanted.ports[at].push(inside(to, &frame, vlan)),
            true => {}
            // No port of that VLAN has this address.
            false => wanted.for_uplink += 1,
        }
    }
    wanted.host.push(outside(&send(HOST), vlan));
    send(STRANGER);
    wanted.for_uplink += 1;
    let group = send(BROADCAST);
    wanted.host.push(outside(&group, vlan));
    for (at, to) in ports.iter().enumerate().filter(|&(at, _)| at != from) {
        if vlans(to).contains(&vlan) && may(to) {
            wanted.ports[at].push(inside(to, &group, vlan));
        }
    }
    sent
}

/// The same of the host or of the uplink.
fn of_outside(ports: &[FdbPort], from: Mac, vlan: u16, wanted: &mut Got) -> Vec<Vec<u8>> {
    let mut sent = Vec::new();
    for to in ports.iter().map(|port| port.mac).chain([BROADCAST]) {
        let frame = frame(to, from, 60);
        let is_for = |port: &FdbPort| (to == BROADCAST || to == port.mac) && vlans(port).contains(&vlan);
        for (at, port) in ports.iter().enumerate().filter(|(_, port)| is_for(port)) {
            wanted.ports[at].push(inside(port, &frame, vlan));
        }
        sent.push(outside(&frame, vlan));
    }
    sent
}

#[test]
fn each_reaches_whom_it_may_and_nobody_else() {
    let ports = ports();
    let mut world = World::of(ports.clone()).with_uplink(256);
    let (host, _) = add_host(&mut world, ports.clone(), true);
    world.ports.iter_mut().for_each(|port| port.post(64));
    world.poll();
    let mut for_uplink = 0;
    for from in 0..ports.len() {
        for vlan in vlans(&ports[from]) {
            let mut wanted = Got::nothing(&ports, for_uplink);
            for frame in of_port(&ports, from, vlan, &mut wanted) {
                world.ports[from].send(&frame);
            }
            for_uplink = wanted.for_uplink;
            let got = Got::of(&mut world, &host);
            assert_eq!(got.sorted(), wanted.sorted(), "port {from}, VLAN {vlan}");
        }
    }
    for vlan in VLANS {
        let mut wanted = Got::nothing(&ports, for_uplink);
        for frame in of_outside(&ports, STRANGER, vlan, &mut wanted) {
            world.arrive(&frame);
        }
        let got = Got::of(&mut world, &host);
        assert_eq!(got.sorted(), wanted.sorted(), "uplink, VLAN {vlan}");
        let mut wanted = Got::nothing(&ports, for_uplink);
        for frame in of_outside(&ports, HOST, vlan, &mut wanted) {
            assert!(write(&host, &frame));
        }
        let got = Got::of(&mut world, &host);
        assert_eq!(got.sorted(), wanted.sorted(), "host, VLAN {vlan}");
    }
}
