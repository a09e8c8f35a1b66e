//! Packets that arrive at the underlay: left to the kernel, decapsulated, or dropped.

use super::*;
use testkit::assert_soon;

/// What the program leaves to the kernel of what arrives at the underlay.
#[test]
fn packets_that_are_not_plainly_of_the_tunnel_reach_the_kernel() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file());
    let [host, from, ..] = &world.overlay.hosts[..] else {
        panic!("two hosts");
    };
    let local: IpAddr = host.address().parse().expect("an address");
    let others = [("vx101", "101", "4789"), ("vx102", "100", "4790")].map(|(name, id, port)| {
        let kind = [
            "type vxlan nolearning local",
            &host.address(),
            "id",
            id,
            "dstport",
            port,
        ];
        host.netns.ip(&[&["link add", name], &kind[..]].concat());
        host.netns.ip(&["link set", name, "up"]);
        PacketPort::open(&host.netns, name)
    });
    let wire = PacketPort::open(&from.netns, NIC);
    let ends = [host.nic_mac(), from.nic_mac()].concat();
    let packet = |vni: u32, inner: &[u8]| [&ends[..], &vxlan(local, vni, inner)[12..]].concat();
    let inner = frame(mac(0), mac(1), 100, 1);
    // An ECN-capable packet.
    let mut capable = udp(1, 100);
    capable[..12].copy_from_slice(&inner[..12]);
    capable[15] = 2;
    sum_ipv4(&mut capable);
    let redirected = |world: &World| world.counted(1, 0)[1];
    let before = redirected(&world);
    wire.send(&packet(101, &inner));
    assert_eq!(others[0].receive(wait::SOON).as_ref(), Some(&inner));
    let mut to_other_port = packet(100, &inner);
    to_other_port[36..38].copy_from_slice(&4790u16.to_be_bytes());
    wire.send(&to_other_port);
    assert_eq!(others[1].receive(wait::SOON).as_ref(), Some(&inner));
    // Of a host that has no address.
    let mut of_other = packet(100, &inner);
    of_other[29] = 77;
    sum_ipv4(&mut of_other);
    wire.send(&of_other);
    assert_same(&world.stations[0].received(), &inner);
    // Congestion was experienced, which the kernel notes in the packet inside.
    let mut marked = packet(100, &capable);
    marked[15] = 3;
    sum_ipv4(&mut marked);
    wire.send(&marked);
    let mut noted = capable.clone();
    noted[15] = 3;
    sum_ipv4(&mut noted);
    assert_same(&world.stations[0].received(), &noted);
    assert_eq!(redirected(&world), before);
    // Nothing arrives twice.
    wire.send(&packet(100, &capable));
    assert_same(&world.stations[0].received(), &capable);
    assert_eq!(redirected(&world), before + 1);
    world.assert_passes(2, 0, 100);
}

/// A packet from host 1 to host 0 with this frame in it, and what sends it.
fn to_first(world: &World, inner: &[u8]) -> (PacketPort, Vec<u8>) {
    let [to, from, ..] = &world.overlay.hosts[..] else {
        panic!("two hosts");
    };
    let local = to.address().parse().expect("an address");
    let packet = [
        &to.nic_mac()[..],
        &from.nic_mac(),
        &vxlan(local, 100, inner)[12..],
    ]
    .concat();
    (world.overlay.wire_to(0), packet)
}

#[test]
fn packets_of_servers_that_are_not_listed_are_dropped_by_option() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file());
    let inner = frame(mac(0), mac(1), 100, 1);
    let (wire, known) = to_first(&world, &inner);
    let mut unknown = known.clone();
    unknown[29] = 77;
    sum_ipv4(&mut unknown);
    let reload = |world: &World, drops: bool| {
        let text = world.overlay.hosts[0].file(&[(0, ""), (MOVER, "")]);
        let of = format!("underlay = \"{NIC}\"\n");
        let with = format!("{of}drop-unknown-senders = {drops}\n");
        world.daemons[0].reload_with(&text.replace(&of, &with));
    };
    let dropped = |world: &World| world.daemons[0].counter("unknown_sender");
    let assert_drops = |world: &World| {
        let before = dropped(world);
        wire.send(&unknown);
        wire.send(&known);
        assert_soon!(dropped(world) == before + 1, "{:#}", world.daemons[0].status());
    };
    reload(&world, true);
    for kills in [false, true] {
        if kills {
            world.daemons[0].end_steward(Signal::KILL);
            world.daemons[0].restart_lessor(&world.overlay.hosts[0].netns);
        }
        world.await_ways(true);
        assert_drops(&world);
        assert_same(&world.stations[0].received(), &inner);
        let host = &world.overlay.hosts[0];
        let entry = format!("{} dev {VXLAN} dst 10.9.0.77", text([0; 6]));
        host.bridge(&format!("fdb append {entry}"));
        world.await_followed(0);
        wire.send(&unknown);
        assert_same(&world.stations[0].received(), &inner);
        world.overlay.hosts[0].bridge(&format!("fdb del {entry}"));
        world.await_followed(0);
    }
    // Nothing of it is counted twice or arrives.
    assert_drops(&world);
    assert_same(&world.stations[0].received(), &inner);
    let before = dropped(&world);
    reload(&world, false);
    world.await_ways(true);
    wire.send(&unknown);
    assert_same(&world.stations[0].received(), &inner);
    assert_eq!(dropped(&world), before);
}

/// Changes to a packet, and the kernel's counter of it; none: the daemon's.
type Malformed = (&'static str, fn(&mut Vec<u8>), Option<&'static str>);

/// Sets the lengths of a packet's headers.
fn set_len(packet: &mut Vec<u8>, len: usize) {
    packet.truncate(len);
    packet[16..18].copy_from_slice(&(len as u16 - 14).to_be_bytes());
    packet[38..40].copy_from_slice(&(len as u16 - 34).to_be_bytes());
}

const MALFORMED: [Malformed; 4] = [
    (
        "longer than it is",
        |packet| packet[17] += 1,
        Some("IpExtInTruncatedPkts"),
    ),
    (
        "datagram longer than its packet",
        |packet| packet[39] += 1,
        Some("UdpInErrors"),
    ),
    ("frame shorter than a header", |packet| set_len(packet, 63), None),
    ("no frame", |packet| set_len(packet, 50), None),
];

#[test]
fn malformed_packets_are_dropped_and_counted_and_a_nested_one_is_decapsulated_once() {
    require!(Root);
    let mut world = World::by_xdp(&Serve::file());
    let inner = frame(mac(0), mac(1), 100, 1);
    for (name, change, counter) in MALFORMED {
        let (wire, mut packet) = to_first(&world, &inner);
        change(&mut packet);
        sum_ipv4(&mut packet);
        let netns = &world.overlay.hosts[0].netns;
        let counted = || match counter {
            Some(counter) => {
                let all = netns.output_of("nstat", &["-asz", counter]);
                let words: Vec<_> = all.split_whitespace().collect();
                let at = words
                    .iter()
                    .position(|&word| word == counter)
                    .expect("it is there");
                words[at + 1].parse().expect("a number")
            }
            None => world.daemons[0].counter("malformed"),
        };
        let before = counted();
        wire.send(&packet);
        assert_soon!(counted() == before + 1, "{name}");
        // Before it nothing arrives.
        world.assert_passes(1, 0, 100);
    }
    let (wire, packet) = to_first(&world, &inner);
    let nested = [&inner[..12], &packet[12..]].concat();
    let (_, outer) = to_first(&world, &nested);
    wire.send(&outer);
    assert_same(&world.stations[0].received(), &nested);
    world.assert_passes(1, 0, 100);
}
