//! Host and network joined by a veth pair: ping and TCP over the host's own interface and address, both ways, and
//! frames that come whole. The guest is a namespace with the pair's inner end, whose address is a station.

use crate::common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use common::{Pair, as_a_steward, bare};
use steer::{
    Hook, ModeRequest, MulticastLimit, MulticastRing, Program, Station, TapAccess, TapTo, TapUser,
    attach_redirect,
};
use testkit::{NetNs, PacketPort, TaggedPort, VethPair, frame, wait};

const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 0x11];
const GUEST_TEXT: &str = "02:00:00:00:00:11";
const HOST_IP: &str = "192.0.2.1";
const GUEST_IP: &str = "192.0.2.2";
const HOST_END: &str = "vaxh0";
const INNER_END: &str = "vaxg0";
const BYTES: usize = 3 << 20;

struct World {
    access: Option<TapAccess>,
    program: Program,
    guest: NetNs,
    pair: Pair,
}

impl World {
    fn new(hook: Hook) -> Option<Self> {
        let pair = Pair::new(1500)?;
        let (near, guest) = (&pair.veth.near, NetNs::new("guest"));
        near.ip(&[
            "link add",
            HOST_END,
            "type veth peer name",
            INNER_END,
            "netns",
            guest.name(),
        ]);
        // What the inner end gets has to be whole.
        near.run(
            "ethtool",
            &[
                "-K", HOST_END, "tx", "off", "tso", "off", "gso", "off", "txvlan", "off",
            ],
        );
        near.ip(&["link", "set", HOST_END, "arp", "off", "up"]);
        guest.ip(&["link", "set", INNER_END, "address", GUEST_TEXT, "up"]);
        guest.ip(&["address", "add", &format!("{GUEST_IP}/24"), "dev", INNER_END]);
        guest.run(
            "ethtool",
            &["-K", INNER_END, "tx", "off", "tso", "off", "gso", "off"],
        );
        near.ip(&["link", "set", VethPair::NIC, "arp", "on"]);
        near.ip(&["address", "add", &format!("{HOST_IP}/24"), "dev", VethPair::NIC]);
        let program = Program::attach(pair.ifindex(), ModeRequest::Native, false).expect("veth takes XDP");
        let ring = MulticastRing::new().expect("memory");
        program
            .set_network(0..1, MulticastLimit::default(), &ring)
            .expect("queue 0");
        let station = Station { vlan: 0, mac: GUEST };
        program.set_station(0, station, 1).expect("room");
        let xsk = pair.unbound_xsk();
        let conf = bare(1514);
        program.enable_queue(0, xsk.as_fd(), conf).expect("queue 0");
        let host_end = common::device(near, HOST_END);
        let uplink = pair.ifindex();
        let access = as_a_steward(|| {
            TapAccess::attach(
                &program,
                TapTo::Host,
                TapUser::Network(0),
                (uplink, host_end),
                hook,
            )
        })
        .expect("joined");
        near.await_sender(HOST_END);
        pair.veth.await_near();
        Some(Self {
            access: Some(access),
            program,
            guest,
            pair,
        })
    }

    fn pings(&self, from: &NetNs, to: &str) -> bool {
        let output = from.command("ping").args(["-c", "1", "-W", "1", to]).output();
        output.expect("ping(8)").status.success()
    }

    fn host(&self) -> &NetNs {
        &self.pair.veth.near
    }
}

/// Sends bytes over TCP, which must arrive as they are.
fn send_tcp(from: &NetNs, to: &NetNs, ip: &str) {
    let bytes: Vec<u8> = (0..BYTES).map(|at| (at / 7) as u8).collect();
    let listener = to.enter(|| TcpListener::bind((ip, 0)).expect("an address of its own"));
    let address = listener.local_addr().expect("bound");
    std::thread::scope(|scope| {
        let received = scope.spawn(move || {
            let (mut stream, _) = listener.accept().expect("somebody comes");
            stream.set_read_timeout(Some(wait::SOON)).expect("a time");
            let mut all = Vec::new();
            stream.read_to_end(&mut all).expect("it comes");
            all
        });
        from.enter(|| {
            let mut stream = TcpStream::connect_timeout(&address, wait::SOON).expect("it listens");
            stream.write_all(&bytes).expect("it goes");
        });
        assert!(received.join().expect("it ends") == bytes, "other bytes");
    });
}

#[test]
fn host_and_guest_reach_each_other_over_the_hosts_own_interface() {
    for hook in [Hook::Best, Hook::Clsact] {
        let Some(mut world) = World::new(hook) else { return };
        let host = world.host();
        let answers = |from, to| wait::until(wait::SOON, || world.pings(from, to));
        assert!(answers(host, GUEST_IP), "{hook:?}: host to guest");
        assert!(answers(&world.guest, HOST_IP), "{hook:?}: guest to host");
        let neighbours = host.output_of("ip", &["neighbour", "show", "dev", VethPair::NIC]);
        assert!(neighbours.contains(GUEST_TEXT), "{neighbours}");
        send_tcp(host, &world.guest, GUEST_IP);
        send_tcp(&world.guest, host, HOST_IP);
        world.access = None;
        assert!(!world.pings(world.host(), GUEST_IP), "{hook:?}: taken back");
        let filters = world
            .host()
            .output_of("tc", &["filter", "show", "dev", VethPair::NIC, "egress"]);
        assert!(!filters.contains("bpf"), "{filters}");
    }
}

#[test]
fn what_the_host_sends_comes_whole_and_not_out_of_the_nic() {
    let Some(world) = World::new(Hook::Best) else {
        return;
    };
    let inside = PacketPort::open_to_read_with_header(&world.guest, INNER_END);
    send_tcp(world.host(), &world.guest, GUEST_IP);
    let (mut segments, mut longest) = (0, 0);
    while let Some((seen, status)) = inside.receive_with_status(Duration::ZERO) {
        // The first 10 bytes are the header with checksum and segmentation information.
        let (header, bytes) = seen.split_at(10);
        assert_eq!(status & libc::TP_STATUS_CSUMNOTREADY, 0, "a partial checksum");
        assert_eq!(
            header[..2],
            [0, 0],
            "a checksum to be completed, or a packet to be cut"
        );
        longest = longest.max(bytes.len());
        segments += usize::from(bytes[..6] == GUEST && bytes.len() > 1000);
    }
    assert!(
        segments > 0 && longest <= 1514,
        "{segments} segments, {longest} bytes"
    );
    while let Some(seen) = world.pair.far_socket.receive(Duration::ZERO) {
        assert_ne!(seen[..6], GUEST, "to the guest, out of the NIC");
    }
}

#[test]
fn groups_go_both_ways_and_strangers_out_of_the_nic_only() {
    let Some(world) = World::new(Hook::Best) else {
        return;
    };
    let inside = PacketPort::open(&world.guest, INNER_END);
    let out = PacketPort::open(world.host(), VethPair::NIC);
    let to = |mac: [u8; 6], seed| {
        let mut sent = frame::plain(100, seed);
        sent[..6].copy_from_slice(&mac);
        sent
    };
    // Frames from a packet socket pass the same hook as all others.
    let (group, stranger, last) = (to([0xff; 6], 1), to([2, 0, 0, 0, 0, 0x99], 2), to(GUEST, 3));
    for sent in [&group, &stranger, &last] {
        out.send(sent);
    }
    assert_eq!(inside.receive_before(&last), std::slice::from_ref(&group));
    let wire = &world.pair.far_socket;
    assert_eq!(wire.receive(wait::SOON), Some(group.clone()));
    assert_eq!(wire.receive(wait::SOON), Some(stranger));
    assert_eq!(wire.receive(Duration::from_millis(100)), None);
    // A group frame of the guest reaches the host on its own interface, and is not sent to the wire.
    inside.send(&group);
    assert_eq!(out.receive(wait::SOON), Some(group));
    assert_eq!(wire.receive(Duration::from_millis(100)), None);
    assert!(
        world.program.counters(0).expect("counters").group_copied == 0,
        "native XDP does not see it again"
    );
}

/// A guest's packets that leave by a tap pass the hook of the host's, and are not the host's.
#[test]
fn what_is_redirected_for_guests_leaves_as_what_sockets_send() {
    let Some(world) = World::new(Hook::Best) else {
        return;
    };
    let near = world.host();
    near.ip(&["link", "add", "tap0", "type", "veth", "peer", "name", "tap1"]);
    let (tap, uplink) = (near.index_of("tap0"), world.pair.ifindex());
    as_a_steward(|| attach_redirect(tap, uplink, 0)).expect("attached");
    for end in ["tap0", "tap1"] {
        near.ip(&["link", "set", end, "arp", "off", "up"]);
    }
    near.await_sender("tap1");
    let inside = PacketPort::open(&world.guest, INNER_END);
    let (tap, host) = (
        PacketPort::open(near, "tap1"),
        PacketPort::open(near, VethPair::NIC),
    );
    for (seed, mac) in [[0xff; 6], GUEST].into_iter().enumerate() {
        let mut sent = frame::plain(100, seed as u8);
        sent[..6].copy_from_slice(&mac);
        tap.send(&sent);
        assert_eq!(world.pair.far_socket.receive(wait::SOON), Some(sent));
    }
    let mut last = frame::plain(100, 9);
    last[..6].copy_from_slice(&GUEST);
    host.send(&last);
    assert!(inside.receive_before(&last).is_empty(), "it is for the wire");
}

/// The number in a service tag is not a VLAN, whether the tag is in the frame or in its metadata.
#[test]
fn frame_of_the_host_with_a_service_tag_is_of_no_vlan() {
    let Some(world) = World::new(Hook::Best) else {
        return;
    };
    let inside = PacketPort::open(&world.guest, INNER_END);
    let out = PacketPort::open(world.host(), VethPair::NIC);
    let of_vlan = [2, 0, 0, 0, 0, 0x64];
    let station = Station {
        vlan: 100,
        mac: of_vlan,
    };
    world.program.set_station(0, station, 2).expect("room");
    let to = |mac: [u8; 6], tag: &[u8], seed| {
        let mut sent = frame::plain(100, seed);
        sent[..6].copy_from_slice(&mac);
        sent.splice(12..12, tag.iter().copied());
        sent
    };
    let reach = |mac: [u8; 6]| {
        let last = to(GUEST, &[], 9);
        out.send(&last);
        let got = inside.receive_before(&last);
        got.iter().filter(|got| got[..6] == mac).count()
    };
    out.send(&to(of_vlan, &[0x81, 0, 0, 100], 1));
    assert_eq!(reach(of_vlan), 1, "a tag of ours");
    out.send(&to(of_vlan, &[0x88, 0xa8, 0, 100], 2));
    assert_eq!(reach(of_vlan), 0, "in the frame");
    for (kind, reached) in [(0x8100, 1), (0x88a8, 0)] {
        let tagged = TaggedPort::on((world.host(), VethPair::NIC), kind, 100);
        tagged.port().send(&to(of_vlan, &[], 3));
        assert_eq!(reach(of_vlan), reached, "{kind:#x} beside the frame");
    }
}

/// A process without a privilege can send by the device itself, with the device's address as source.
#[test]
fn device_carries_nothing_that_does_not_pass_the_uplink() {
    for hook in [Hook::Best, Hook::Clsact] {
        let Some(world) = World::new(hook) else { return };
        let inside = PacketPort::open(&world.guest, INNER_END);
        let (device, out) = (
            PacketPort::open(world.host(), HOST_END),
            PacketPort::open(world.host(), VethPair::NIC),
        );
        let to = |mac: [u8; 6], seed| {
            let mut sent = frame::plain(100, seed);
            sent[..6].copy_from_slice(&mac);
            sent
        };
        let first = to(GUEST, 1);
        out.send(&first);
        inside.receive_before(&first);
        for mac in [GUEST, [0xff; 6]] {
            let mut sent = to(mac, 2);
            sent[6..12].copy_from_slice(&common::device(world.host(), HOST_END).mac);
            // The kernel says that there is no room (ENOBUFS).
            let _ = device.try_send(&sent);
        }
        let last = to(GUEST, 3);
        out.send(&last);
        assert_eq!(inside.receive_before(&last), Vec::<Vec<u8>>::new(), "{hook:?}");
    }
}
