//! A device that connects a network with the wire, if no XDP program is on the uplink: which frames it carries, and
//! what happens if others change the programs. A namespace with its other end stands for the serving process.

use crate::common;

use common::{Pair, as_a_steward};
use steer::{Hook, ModeRequest, MulticastLimit, MulticastRing, Program, Station, TapAccess, TapTo, TapUser};
use testkit::foreign::{Side, accept_all, detach_all};
use testkit::{NetNs, PacketPort, VethPair, frame, wait};

const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 0x11];
const DEVICE: &str = "vaxu0";
const INNER_END: &str = "vaxg0";
/// A test ends before the limit allows a frame more than the burst.
const LIMIT: MulticastLimit = MulticastLimit {
    a_second: 1,
    burst: 10,
};

struct World {
    access: TapAccess,
    inside: PacketPort,
    program: Program,
    _namespace: NetNs,
    pair: Pair,
}

impl World {
    /// `before` runs first, in the uplink's namespace.
    fn new<T>(hook: Hook, before: impl FnOnce(&NetNs) -> T) -> Option<(Self, T)> {
        let pair = Pair::new(1500)?;
        let (near, namespace) = (&pair.veth.near, NetNs::new("serves"));
        let add = ["link", "add", DEVICE, "type", "veth", "peer", "name", INNER_END];
        near.ip(&[&add[..], &["netns", namespace.name()]].concat());
        near.ip(&["link", "set", DEVICE, "arp", "off", "up"]);
        namespace.ip(&["link", "set", INNER_END, "up"]);
        let before = before(near);
        let program = Program::attach(pair.ifindex(), ModeRequest::Tap, false).expect("nothing is attached");
        let ring = MulticastRing::new().expect("memory");
        let network = program.set_network(0..1, LIMIT, &ring);
        network.expect("queue 0");
        let station = Station { vlan: 0, mac: GUEST };
        program.set_station(0, station, 1).expect("room");
        let ends = (pair.ifindex(), common::device(near, DEVICE));
        let access =
            as_a_steward(|| TapAccess::attach(&program, TapTo::Uplink, TapUser::Network(0), ends, hook));
        near.await_sender(DEVICE);
        pair.veth.await_near();
        let world = Self {
            access: access.expect("joined"),
            inside: PacketPort::open(&namespace, INNER_END),
            program,
            _namespace: namespace,
            pair,
        };
        Some((world, before))
    }

    fn near(&self) -> &NetNs {
        &self.pair.veth.near
    }

    /// The frames that the device carried before a frame for the guest that arrives at the uplink.
    #[track_caller]
    fn carried(&self, seed: u8) -> Vec<Vec<u8>> {
        let last = to(GUEST, seed);
        self.pair.far_socket.send(&last);
        self.inside.receive_before(&last)
    }
}

fn to(mac: [u8; 6], seed: u8) -> Vec<u8> {
    let mut sent = frame::plain(100, seed);
    sent[..6].copy_from_slice(&mac);
    sent
}

/// A process of the host can send by each interface that is up, multicast frames even without a privilege.
#[test]
fn device_carries_nothing_of_the_hosts_but_what_comes_by_the_uplink() {
    for hook in [Hook::Best, Hook::Clsact] {
        let Some((world, ())) = World::new(hook, |_| ()) else {
            return;
        };
        // Frames that were in flight before the programs were attached.
        world.carried(0);
        let host = PacketPort::open(world.near(), DEVICE);
        for (seed, mac) in [GUEST, [0xff; 6], [0x01, 0, 0x5e, 0, 0, 1]]
            .into_iter()
            .enumerate()
        {
            // The kernel says that there is no room (ENOBUFS).
            let _ = host.try_send(&to(mac, seed as u8));
        }
        assert_eq!(world.carried(9), Vec::<Vec<u8>>::new(), "{hook:?}");
        // Frames to groups do come by the uplink.
        let group = to([0xff; 6], 10);
        world.pair.far_socket.send(&group);
        assert_eq!(world.carried(11), [group], "{hook:?}");
    }
}

#[test]
fn program_that_accepts_all_for_the_host_does_not_take_the_networks_frames() {
    let accept = |near: &NetNs| accept_all(near, VethPair::NIC, Side::Ingress);
    let Some((world, _accepting)) = World::new(Hook::Best, accept) else {
        return;
    };
    world.carried(0);
}

#[test]
fn program_that_somebody_detaches_is_missed() {
    for (interface, side) in [
        (VethPair::NIC, Side::Ingress),
        (DEVICE, Side::Ingress),
        (DEVICE, Side::Egress),
    ] {
        let Some((world, ())) = World::new(Hook::Best, |_| ()) else {
            return;
        };
        assert!(world.access.is_attached());
        assert_eq!(detach_all(world.near(), interface, side), 1);
        assert!(!world.access.is_attached(), "{interface}, {side:?}");
    }
}

#[test]
fn filter_that_goes_with_its_qdisc_is_missed() {
    for interface in [VethPair::NIC, DEVICE] {
        let Some((world, ())) = World::new(Hook::Clsact, |_| ()) else {
            return;
        };
        assert!(world.access.is_attached());
        world
            .near()
            .run("tc", &["qdisc", "del", "dev", interface, "clsact"]);
        assert!(!world.access.is_attached(), "{interface}");
    }
}

/// Frames to stations wait in the device's queue behind those to groups.
#[test]
fn groups_beyond_the_limit_reach_the_host_only_and_are_counted() {
    for hook in [Hook::Best, Hook::Clsact] {
        let Some((world, ())) = World::new(hook, |_| ()) else {
            return;
        };
        world.carried(0);
        let before = world.program.counters(0).expect("counters");
        let group = to([0xff; 6], 1);
        // On this CPU alone, as the limit is each CPU's own.
        common::on_one_cpu(|| (0..30).for_each(|_| world.pair.far_socket.send(&group)));
        let carried = world.carried(2);
        assert!((5..=15).contains(&carried.len()), "{hook:?}: {}", carried.len());
        assert!(carried.iter().all(|carried| *carried == group));
        let counters = world.program.counters(0).expect("counters");
        assert_eq!(counters.group_copied - before.group_copied, carried.len() as u64);
        assert_eq!(
            counters.group_limited - before.group_limited,
            30 - carried.len() as u64
        );
        for _ in 0..30 {
            let host = std::iter::from_fn(|| world.pair.near_socket.receive(wait::SOON));
            assert!(
                host.into_iter().any(|got| got == group),
                "{hook:?}: the host misses one"
            );
        }
    }
}
