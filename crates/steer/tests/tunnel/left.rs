//! What is left to the host as it came, and what is dropped.

use super::*;

/// Changes to a frame that would be decapsulated: a name, and what is done.
type Change = (&'static str, fn(&mut Vec<u8>));

const CHANGES_OF_BOTH: [Change; 3] = [
    ("tagged", |sent| drop(sent.splice(12..12, [0x81, 0, 0, 100]))),
    ("another protocol behind Ethernet", |sent| sent[12] = 0x88),
    ("to a group of hosts", |sent| sent[..6].copy_from_slice(&GROUP)),
];
const CHANGES_OF_IPV4: [Change; 15] = [
    ("another address", |sent| sent[33] = 3),
    ("from a host that is not known", |sent| sent[29] = 3),
    ("options", |sent| sent[14] = 0x46),
    ("congestion", |sent| sent[15] = 3),
    ("longer than it is", |sent| sent[17] += 1),
    ("shorter than it is", |sent| sent[17] -= 1),
    ("first fragment", |sent| sent[20] = 0x20),
    ("last fragment", |sent| sent[21] = 8),
    ("TCP", |sent| sent[23] = 6),
    ("another port", |sent| sent[37] += 1),
    ("datagram longer than the packet", |sent| sent[39] += 1),
    ("datagram shorter than the packet", |sent| sent[39] -= 1),
    ("flags of an extension", |sent| sent[42] = 0x88),
    ("another VNI", |sent| sent[48] += 1),
    ("reserved bits", |sent| sent[49] = 1),
];
const CHANGES_OF_IPV6: [Change; 9] = [
    ("another address", |sent| sent[53] = 3),
    ("from a host that is not known", |sent| sent[37] = 3),
    ("another network", |sent| sent[38] = 0xfd),
    ("another version", |sent| sent[14] = 0x40),
    ("congestion", |sent| sent[15] = 0x30),
    ("longer than it is", |sent| sent[19] += 1),
    ("fragment", |sent| sent[20] = 44),
    ("another port", |sent| sent[57] += 1),
    ("another VNI", |sent| sent[66] += 1),
];

/// First bytes of the header of a tunnel.
const STARTS: [(&str, [u8; 4]); 8] = [
    ("VXLAN", [8, 0, 0, 0]),
    ("Geneve", [0, 0, 0x65, 0x58]),
    ("options", [1, 0, 0x65, 0x58]),
    ("another version of Geneve", [0x40, 0, 0x65, 0x58]),
    ("control packet", [0, 0x80, 0x65, 0x58]),
    ("critical options", [0, 0x40, 0x65, 0x58]),
    ("reserved bits in front of the VNI", [0, 1, 0x65, 0x58]),
    ("IPv4 inside", [0, 0, 8, 0]),
];

#[test]
fn all_else_goes_to_the_host_as_it_came() {
    let Some(pair) = Pair::new(1500) else { return };
    for request in [ModeRequest::Native, ModeRequest::Skb] {
        for local in LOCALS {
            let changes = if is_ipv4(local) {
                &CHANGES_OF_IPV4[..]
            } else {
                &CHANGES_OF_IPV6
            };
            let (program, _ring) = network(&pair, request, false, local);
            let _receiver = Receiver::of_queue_0(&pair, &program);
            let inner = frame_to(OURS, &[]);
            let mut cases = vec![
                ("frame of the station, outside of the tunnel", inner.clone()),
                ("no station", packed(local, &frame_to(STRANGER, &[]))),
                ("another VLAN", packed(local, &frame_to(OURS, &[(0x8100, 7)]))),
                ("to a group", packed(local, &frame_to(GROUP, &[]))),
                ("cut off", packed(local, &inner)[..48].to_vec()),
            ];
            for &(name, change) in CHANGES_OF_BOTH.iter().chain(changes) {
                let mut sent = packed(local, &inner);
                change(&mut sent);
                sum(&mut sent);
                cases.push((name, sent));
            }
            if is_ipv4(local) {
                let mut sent = packed(local, &inner);
                sent[24] ^= 1;
                cases.push(("wrong checksum", sent));
            }
            let start = if is_ipv4(local) { 42 } else { 62 };
            for (name, other) in STARTS {
                let mut sent = packed(local, &inner);
                if sent[start..][..4] != other {
                    sent[start..][..4].copy_from_slice(&other);
                    cases.push((name, sent));
                }
            }
            if is_geneve(local) {
                // It has no frame in it, so it need not have room for one.
                let mut sent = packed(local, &[]);
                sent[start + 1] = 0x80;
                cases.push(("control packet without a frame", sent));
            }
            for (name, sent) in &cases {
                pair.far_socket.send(sent);
                let passed = pair.near_socket.receive(wait::SOON);
                assert_eq!(passed.as_ref(), Some(sent), "{request:?} {local}: {name}");
            }
            for malformed in [packed(local, &inner[..13]), packed(local, &[])] {
                pair.far_socket.send(&malformed);
            }
            let dropped = || program.counters(0).expect("counters").malformed == 2;
            assert!(wait::until(wait::SOON, dropped), "{request:?} {local}");
            assert!(pair.near_socket.receive(wait::QUIET).is_none());
            let counters = program.counters(0).expect("counters");
            let all = cases.len() as u64;
            assert_eq!(
                (counters.not_ours, counters.redirected, counters.group_copied),
                (all, 0, 0),
                "{request:?} {local}: {counters:?}"
            );
        }
    }
}

/// Changes that the kernel's device may not mind.
const DISGUISES_OF_BOTH: [Change; 4] = [
    ("plain", |_| ()),
    ("with a priority", |sent| {
        drop(sent.splice(12..12, [0x81, 0, 0, 0]));
    }),
    ("with two tags", |sent| {
        drop(sent.splice(12..12, [0x88, 0xa8, 0, 9, 0x81, 0, 0, 7]));
    }),
    ("to a group of hosts", |sent| sent[..6].copy_from_slice(&GROUP)),
];
const DISGUISES_OF_IPV4: [Change; 7] = [
    ("to another address", |sent| sent[33] = 3),
    ("with options", |sent| {
        sent[14] = 0x47;
        sent.splice(34..34, [1; 8]);
    }),
    ("congestion", |sent| sent[15] = 3),
    ("first fragment", |sent| sent[20] = 0x20),
    ("wrong datagram", |sent| sent[39] -= 1),
    ("flags of an extension", |sent| sent[42] = 0x88),
    ("reserved bits", |sent| sent[49] = 1),
];
const DISGUISES_OF_IPV6: [Change; 4] = [
    ("to another address", |sent| sent[53] = 3),
    ("congestion", |sent| sent[15] = 0x30),
    ("first fragment", |sent| {
        sent[20] = 44;
        sent.splice(54..54, [17, 0, 0, 1, 0, 0, 0, 9]);
    }),
    ("options of all kinds", |sent| {
        sent[20] = 0;
        let options = [
            [43, 0, 1, 4, 0, 0, 0, 0],
            [60, 0, 0, 0, 0, 0, 0, 0],
            [17, 0, 1, 4, 0, 0, 0, 0],
        ];
        sent.splice(54..54, options.concat());
    }),
];
/// Changes by which a packet hides what it is for, as no sender does.
const HIDDEN_IPV4: [Change; 3] = [
    ("many tags", |sent| {
        drop(sent.splice(12..12, [0x81, 0, 0, 0].repeat(4)));
    }),
    ("shortest first fragment", |sent| {
        sent[16..18].copy_from_slice(&28u16.to_be_bytes());
        sent[20] = 0x20;
        sent.truncate(42);
    }),
    ("with padding", |sent| {
        sent[16..18].copy_from_slice(&28u16.to_be_bytes());
        sent[20] = 0x20;
        sent[42..].fill(0);
        sent.truncate(60);
    }),
];
const HIDDEN_IPV6: [Change; 2] = [
    ("many extension headers", |sent| {
        sent[20] = 60;
        sent.splice(54..54, [[60, 0, 1, 4, 0, 0, 0, 0]; 9].concat());
    }),
    (
        "first fragment that ends behind another fragment's header",
        |sent| {
            sent[18..21].copy_from_slice(&[0, 24, 44]);
            sent.splice(
                54..54,
                [[44, 0, 0, 1, 0, 0, 0, 9], [17, 0, 0, 0, 0, 0, 0, 9]].concat(),
            );
            sent[78..].fill(0);
        },
    ),
];
/// Packets that are not for the tunnel, or pass in vain.
const OTHERS_OF_IPV4: [Change; 4] = [
    ("TCP", |sent| sent[23] = 6),
    ("later fragment", |sent| sent[21] = 8),
    ("another port", |sent| sent[37] += 1),
    ("another VNI", |sent| sent[48] += 1),
];
const OTHERS_OF_IPV6: [Change; 4] = [
    ("another port", |sent| sent[57] += 1),
    ("another VNI", |sent| sent[66] += 1),
    ("another protocol", |sent| sent[20] = 58),
    ("later fragment", |sent| {
        sent[20] = 44;
        sent.splice(54..54, [17, 0, 0, 8, 0, 0, 0, 9]);
    }),
];

#[test]
fn packets_of_unknown_hosts_are_dropped_if_the_tunnel_says_so() {
    let Some(pair) = Pair::new(1500) else { return };
    let of_vxlan = || LOCALS.into_iter().filter(|local| !is_geneve(local));
    let ipv4 = (29, &DISGUISES_OF_IPV4[..], &OTHERS_OF_IPV4[..], &HIDDEN_IPV4[..]);
    let ipv6 = (37, &DISGUISES_OF_IPV6[..], &OTHERS_OF_IPV6[..], &HIDDEN_IPV6[..]);
    for request in [ModeRequest::Native, ModeRequest::Skb] {
        for local in of_vxlan() {
            let (sender_at, disguises, others, hidden) = if is_ipv4(local) { ipv4 } else { ipv6 };
            let (program, _ring) = network(&pair, request, false, local);
            let tunnel = program.drop_unknown(0..1, 0).expect("there is one");
            assert!(tunnel.is_some_and(|tunnel| tunnel.drops_unknown));
            assert_eq!(program.tunnels(0).get(&0).copied(), tunnel);
            let mut receiver = Receiver::of_queue_0(&pair, &program);
            let dropped = || program.counters(0).expect("counters").unknown_sender;
            let inner = frame_to(OURS, &[]);
            // Not the sender's: in an unchanged packet.
            let [known, unknown] = [0, 0x40].map(|bit| {
                let mut packet = packed(local, &inner);
                packet[sender_at] ^= bit;
                packet
            });
            let changed = |packet: &[u8], change: fn(&mut Vec<u8>)| {
                let mut sent = packet.to_vec();
                change(&mut sent);
                if is_ipv4(local) && sent[12..14] == [8, 0] && sent[14] == 0x45 {
                    sum(&mut sent);
                }
                sent
            };
            let passes = |name, sent: &[u8]| {
                pair.far_socket.send(sent);
                let passed = pair.near_socket.receive(wait::SOON);
                assert_eq!(passed.as_deref(), Some(sent), "{request:?} {local}: {name}");
            };
            for (number, &(name, change)) in DISGUISES_OF_BOTH.iter().chain(disguises).enumerate() {
                pair.far_socket.send(&changed(&unknown, change));
                let is_dropped = wait::until(wait::SOON, || dropped() == number as u64 + 1);
                assert!(is_dropped, "{request:?} {local}: {name}");
                // Without a tag it is the receiver's, and with one that has a priority only.
                if number > 1 {
                    passes(name, &changed(&known, change));
                }
            }
            let all = dropped();
            for &(name, change) in others {
                passes(name, &changed(&unknown, change));
            }
            pair.far_socket.send(&known);
            frame::assert_same(&next(&mut receiver).0, &inner);
            let malformed = || program.counters(0).expect("counters").malformed;
            for (&(name, change), number) in hidden.iter().zip(1..) {
                pair.far_socket.send(&changed(&known, change));
                let is_dropped = wait::until(wait::SOON, || malformed() == number);
                assert!(is_dropped, "{request:?} {local}: {name}");
            }
            let hidden = hidden.len() as u64;
            let counters = program.counters(0).expect("counters");
            assert_eq!(
                (counters.redirected, counters.unknown_sender, counters.dropped()),
                (1, all, all + hidden)
            );
            assert!(pair.near_socket.receive(wait::QUIET).is_none());
        }
    }
}

#[test]
fn packets_of_a_tunnel_of_geneve_are_the_kernels_without_room_for_its_host() {
    let Some(pair) = Pair::new(1500) else { return };
    for local in LOCALS.into_iter().filter(|local| is_geneve(local)) {
        let (program, _ring) = network(&pair, ModeRequest::Native, false, local);
        program.end_tunnel(0).expect("it is there");
        let mut hosts = (0x0b00_0000..).map(std::net::Ipv4Addr::from);
        while program
            .change_vtep(1 << 8, (hosts.next().expect("more").into(), true))
            .is_ok()
        {}
        let tunnel = tunnel(local);
        program.set_tunnel(0..1, 0, tunnel).expect("without its host");
        let refused = program.change_vtep(0, (sender(local), true));
        assert!(
            refused
                .expect_err("no room")
                .to_string()
                .contains("at most 65536")
        );
        assert_eq!(program.tunnels(0).get(&0), Some(&Tunnel::none(tunnel.device)));
        let sent = packed(local, &frame_to(OURS, &[]));
        pair.far_socket.send(&sent);
        assert_eq!(pair.near_socket.receive(wait::SOON), Some(sent), "{local}");
        assert_eq!(
            program.drop_unknown(0..1, 0).ok().flatten(),
            Some(Tunnel::none(tunnel.device))
        );
    }
}

/// They may be for another device with the same VNI.
#[test]
fn packets_of_unknown_hosts_are_the_kernels_in_any_tunnel_of_geneve() {
    let Some(pair) = Pair::new(1500) else { return };
    for local in LOCALS.into_iter().filter(|local| is_geneve(local)) {
        let (program, _ring) = network(&pair, ModeRequest::Native, false, local);
        let asked = program.drop_unknown(0..1, 0).expect("there is one");
        assert_eq!(asked, Some(tunnel(local)));
        let mut unknown = packed(local, &frame_to(OURS, &[]));
        unknown[if is_ipv4(local) { 29 } else { 37 }] ^= 0x40;
        sum(&mut unknown);
        pair.far_socket.send(&unknown);
        assert_eq!(pair.near_socket.receive(wait::SOON), Some(unknown), "{local}");
    }
}
