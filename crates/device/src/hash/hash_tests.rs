//! Hashes of whole frames: the published vectors, and each rule of VirtIO.

use etherparse::{PacketBuilder, VlanId};
use proptest::prelude::*;

use super::nic::NicKey;
use super::*;

/// The key and the vectors of Microsoft's "Verifying the RSS Hash Calculation" (Windows driver documentation), which
/// data sheets of NICs repeat ("RSS Verification Suite": Intel 82599, 7.1.2.8.3).
const KEY: [u8; KEY_BYTES] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0,
    0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42,
    0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

/// Destination, source, hash of the addresses, hash with the ports of TCP.
type Vector = (&'static str, &'static str, u32, u32);

const VECTORS: [Vector; 8] = [
    (
        "161.142.100.80:1766",
        "66.9.149.187:2794",
        0x323e_8fc2,
        0x51cc_c178,
    ),
    (
        "65.69.140.83:4739",
        "199.92.111.2:14230",
        0xd718_262a,
        0xc626_b0ea,
    ),
    (
        "12.22.207.184:38024",
        "24.19.198.95:12898",
        0xd2d0_a5de,
        0x5c2b_394a,
    ),
    (
        "209.142.163.6:2217",
        "38.27.205.30:48228",
        0x8298_9176,
        0xafc7_327f,
    ),
    (
        "202.188.127.2:1303",
        "153.39.163.191:44251",
        0x5d18_09c5,
        0x10e8_28a2,
    ),
    (
        "[3ffe:2501:200:3::1]:1766",
        "[3ffe:2501:200:1fff::7]:2794",
        0x2cc1_8cd5,
        0x4020_7d3d,
    ),
    (
        "[ff02::1]:4739",
        "[3ffe:501:8::260:97ff:fe40:efab]:14230",
        0x0f0c_461c,
        0xdde5_1bbf,
    ),
    (
        "[fe80::200:f8ff:fe21:67cf]:38024",
        "[3ffe:1900:4545:3:200:f8ff:fe21:67cf]:44251",
        0x4b61_e985,
        0x02d1_feef,
    ),
];

const TCP: u8 = 6;
const UDP: u8 = 17;

/// The extension headers between the IPv6 header and TCP or UDP: type and bytes of each. Their first byte, the type
/// of the next header, is replaced.
type Extensions<'a> = &'a [(u8, &'a [u8])];

/// An Ethernet frame with a packet from `source` to `destination`.
fn frame(source: &str, destination: &str, protocol: u8, extensions: Extensions) -> Vec<u8> {
    use std::net::{IpAddr, SocketAddr};
    let [source, destination]: [SocketAddr; 2] =
        [source, destination].map(|address| address.parse().expect("an address"));
    let mut payload: Vec<u8> = Vec::new();
    let mut next = protocol;
    for (kind, body) in extensions.iter().rev() {
        let mut header = body.to_vec();
        header[0] = next;
        payload.splice(0..0, header);
        next = *kind;
    }
    payload.extend(source.port().to_be_bytes());
    payload.extend(destination.port().to_be_bytes());
    payload.extend([0; 16]);
    let mut frame = [[2; 6], [4; 6]].concat();
    match (source.ip(), destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            frame.extend([8, 0, 0x45, 0]);
            frame.extend((20 + payload.len() as u16).to_be_bytes());
            frame.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((payload.len() as u16).to_be_bytes());
            frame.extend([next, 64]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        _ => panic!("one family"),
    }
    frame.extend(payload);
    frame
}

fn types(kinds: &[HashType]) -> HashTypes {
    kinds
        .iter()
        .fold(HashTypes::NONE, |types, &kind| types.with(kind))
}

fn hashing(types: HashTypes) -> Hashing {
    Hashing::new(&HashConfig { types, key: KEY }, None)
}

/// The report for a frame without a hash of the NIC.
fn report(frame: &[u8], types: HashTypes) -> (u32, Option<HashType>) {
    let (report, _) = hashing(types).report(frame, None);
    (report.value, report.kind)
}

/// The hash of any fields, with the key of the test vectors.
fn hash_of(parts: &[&[u8]]) -> u32 {
    Toeplitz::new(&KEY).hash(parts)
}

#[test]
fn frames_have_the_hashes_that_microsoft_published() {
    for (destination, source, addresses, with_ports) in VECTORS {
        let v6 = source.starts_with('[');
        let (ip, tcp, udp) = match v6 {
            false => (HashType::Ipv4, HashType::TcpV4, HashType::UdpV4),
            true => (HashType::Ipv6, HashType::TcpV6, HashType::UdpV6),
        };
        let segment = frame(source, destination, TCP, &[]);
        let datagram = frame(source, destination, UDP, &[]);
        for all in [HashTypes::ALL, types(&[ip, tcp, udp])] {
            assert_eq!(report(&segment, all), (with_ports, Some(tcp)), "{source}");
            assert_eq!(report(&datagram, all), (with_ports, Some(udp)), "{source}");
        }
        assert_eq!(
            report(&segment, types(&[ip, udp])),
            (addresses, Some(ip)),
            "{source}"
        );
        assert_eq!(report(&datagram, types(&[ip])), (addresses, Some(ip)), "{source}");
        assert_eq!(report(&datagram, types(&[tcp])), (0, None), "no type is for it");
        let icmp = frame(source, destination, 1, &[]);
        assert_eq!(report(&icmp, HashTypes::ALL), (addresses, Some(ip)), "{source}");
    }
}

#[test]
fn vlan_tags_change_no_hash() {
    let (destination, source, _, hash) = VECTORS[0];
    let plain = frame(source, destination, TCP, &[]);
    let tag = |ethertype: [u8; 2], frame: &[u8]| [&frame[..12], &ethertype, &[0, 7], &frame[12..]].concat();
    let one = tag([0x81, 0], &plain);
    let two = tag([0x88, 0xa8], &one);
    for frame in [&one, &two] {
        assert_eq!(report(frame, HashTypes::ALL), (hash, Some(HashType::TcpV4)));
    }
    let three = tag([0x81, 0], &two);
    assert_eq!(report(&three, HashTypes::ALL), (0, None));
}

#[test]
fn all_pieces_of_a_fragmented_packet_have_the_hash_of_their_addresses() {
    let (destination, source, addresses, _) = VECTORS[0];
    // MORE_FRAGMENTS; then an offset; not DONT_FRAGMENT.
    for (flags, whole) in [([0x20, 0], false), ([0, 7], false), ([0x40, 0], true)] {
        let mut piece = frame(source, destination, UDP, &[]);
        piece[20..22].copy_from_slice(&flags);
        let (hash, kind) = report(&piece, HashTypes::ALL);
        assert_eq!(kind == Some(HashType::UdpV4), whole);
        assert_eq!(hash == addresses, !whole);
    }
    let (destination, source, addresses, with_ports) = VECTORS[5];
    for (offset, whole) in [([0, 1], false), ([0, 8], false), ([0, 0], true)] {
        let header = [0, 0, offset[0], offset[1], 1, 2, 3, 4];
        let piece = frame(source, destination, UDP, &[(44, &header)]);
        let expected = match whole {
            true => (with_ports, Some(HashType::UdpV6Ex)),
            false => (addresses, Some(HashType::Ipv6Ex)),
        };
        assert_eq!(report(&piece, HashTypes::ALL), expected);
    }
}

/// A routing header of type 2 to `address`, and destination options with a home address behind other options.
fn mobile(home: &[u8; 16], routed: &[u8; 16]) -> [Vec<u8>; 2] {
    let route = [&[0, 2, 2, 1, 0, 0, 0, 0][..], routed].concat();
    let options = [&[0, 3, 0, 1, 2, 9, 9, 0, 0, 0, 0xc9, 16][..], home, &[1, 2, 0, 0]].concat();
    [route, options]
}

#[test]
fn extension_headers_name_the_addresses_of_ex_types_and_are_skipped_by_others() {
    use HashType as T;
    let (destination, source, addresses, with_ports) = VECTORS[5];
    let (home, routed) = ([0x20; 16], [0x30; 16]);
    let [route, options] = mobile(&home, &routed);
    let extensions: Extensions = &[(0, &[0; 8]), (43, &route), (60, &options)];
    let segment = frame(source, destination, TCP, extensions);
    let datagram = frame(source, destination, UDP, extensions);
    let ports = [2794u16.to_be_bytes(), 1766u16.to_be_bytes()].concat();
    let whole = hash_of(&[&home, &routed, &ports]);
    let ex = hash_of(&[&home, &routed]);
    assert_eq!(report(&segment, HashTypes::ALL), (whole, Some(T::TcpV6Ex)));
    assert_eq!(report(&datagram, HashTypes::ALL), (whole, Some(T::UdpV6Ex)));
    assert_eq!(
        report(&segment, types(&[T::Ipv6Ex, T::TcpV6])),
        (ex, Some(T::Ipv6Ex))
    );
    // Only where none of the three serves, the headers are skipped.
    let plain = types(&[T::TcpV6, T::UdpV6Ex, T::Ipv6]);
    assert_eq!(report(&segment, plain), (with_ports, Some(T::TcpV6)));
    assert_eq!(report(&segment, types(&[T::Ipv6])), (addresses, Some(T::Ipv6)));
    // And _EX types are for packets with extension headers alone.
    let bare = frame(source, destination, TCP, &[]);
    assert_eq!(report(&bare, types(&[T::TcpV6Ex, T::Ipv6Ex])), (0, None));
}

#[test]
fn extension_headers_that_name_nothing_leave_the_addresses_of_the_packet() {
    let (destination, source, _, with_ports) = VECTORS[5];
    let other_route = [&[0, 2, 4, 1, 0, 0, 0, 0][..], &[0x30; 16]].concat();
    let visited = [&[0, 2, 2, 0, 0, 0, 0, 0][..], &[0x30; 16]].concat();
    let short_home = [&[0, 2, 0xc9, 15][..], &[0x20; 20]].concat();
    let cut_home = [0, 0, 0xc9, 16, 1, 2, 3, 4];
    for (kind, body) in [
        (43, &other_route[..]),
        (43, &visited),
        (60, &short_home),
        (60, &cut_home),
    ] {
        let segment = frame(source, destination, TCP, &[(kind, body)]);
        let expected = (with_ports, Some(HashType::TcpV6Ex));
        assert_eq!(report(&segment, HashTypes::ALL), expected, "{body:x?}");
    }
    // An authentication header counts four bytes, and the first two not.
    let segment = frame(
        source,
        destination,
        TCP,
        &[(
            51,
            &[
                0, 4, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9,
            ],
        )],
    );
    assert_eq!(
        report(&segment, HashTypes::ALL),
        (with_ports, Some(HashType::TcpV6Ex))
    );
}

#[test]
fn ports_that_are_not_there_are_not_hashed() {
    let (destination, source, addresses, _) = VECTORS[0];
    let whole = frame(source, destination, TCP, &[]);
    // The frame ends, the packet ends though the frame goes on, and a header that is longer than all that.
    let mut padded = whole.clone();
    padded[16..18].copy_from_slice(&23u16.to_be_bytes());
    let mut options = whole.clone();
    options[14] = 0x4f;
    options[16..18].copy_from_slice(&62u16.to_be_bytes());
    for frame in [&whole[..37], &padded, &options] {
        assert_eq!(report(frame, HashTypes::ALL), (addresses, Some(HashType::Ipv4)));
    }
    let (destination, source, addresses, _) = VECTORS[5];
    let long = vec![(60, &[0, 0, 1, 4, 0, 0, 0, 0][..]); 30];
    let segment = frame(source, destination, TCP, &long);
    assert!(segment.len() > packet::HEADERS_MAX);
    assert_eq!(
        report(&segment, HashTypes::ALL),
        (addresses, Some(HashType::Ipv6Ex))
    );
}

#[test]
fn what_is_no_ip_packet_has_no_hash() {
    let (destination, source, ..) = VECTORS[0];
    let whole = frame(source, destination, TCP, &[]);
    let mut frames: Vec<Vec<u8>> = (0..34).map(|len| whole[..len].to_vec()).collect();
    for (at, byte) in [(13, 6), (14, 0x44), (14, 0x65)] {
        let mut other = whole.clone();
        other[at] = byte;
        frames.push(other);
    }
    for frame in frames {
        let (report, source) = hashing(HashTypes::ALL).report(&frame, None);
        assert_eq!((report, source), (Report::NONE, Source::Nobody), "{frame:x?}");
    }
}

#[test]
fn no_frame_makes_more_of_its_head_than_is_looked_at() {
    // Each byte of a frame of extension headers changed in turn: an answer, and a type that fits.
    let (destination, source, ..) = VECTORS[5];
    let [route, options] = mobile(&[1; 16], &[2; 16]);
    let whole = frame(
        source,
        destination,
        TCP,
        &[(43, &route), (60, &options), (44, &[0; 8])],
    );
    for at in 0..whole.len() {
        for byte in [0, 1, 43, 44, 51, 60, 0x80, 0xc9, 0xff] {
            let mut frame = whole.clone();
            frame[at] = byte;
            if let Some(input) = Input::of(&frame, HashTypes::ALL) {
                assert_eq!(input.parts().concat().len(), input.kind().input_bytes());
            }
        }
    }
}

#[test]
fn report_is_little_endian_behind_the_header() {
    let report = Report {
        value: 0x0102_0304,
        kind: Some(HashType::UdpV6Ex),
    };
    assert_eq!(report.bytes(), [4, 3, 2, 1, 9, 0, 0, 0]);
    assert_eq!(Report::NONE.bytes(), [0; 8]);
    // VIRTIO_NET_HASH_TYPE_XXX = 1 << (VIRTIO_NET_HASH_REPORT_XXX - 1)
    for kind in HashType::ALL {
        assert_eq!(types(&[kind]).bits(), 1 << (kind.number() - 1));
    }
    assert_eq!(HashTypes::from_bits(0x200), None);
}

/// `enum xdp_rss_hash_type`, include/net/xdp.h.
mod xdp {
    pub(super) const L3_IPV4: u32 = 1;
    pub(super) const L4_IPV4_TCP: u32 = 1 | 8 | 16;
    pub(super) const L4_IPV4_SCTP: u32 = 1 | 8 | 64;
    pub(super) const L4_IPV6_UDP: u32 = 2 | 8 | 32;
    pub(super) const L4_IPV6_TCP_EX: u32 = 2 | 4 | 8 | 16;
    /// The only type that veth reports.
    pub(super) const L4_ANY: u32 = 8;
}

/// The report for a frame for which a NIC with that key reported `rss_type`, and the origin of the hash.
fn with_nic(types: HashTypes, key: &NicKey, rss_type: u32) -> (u32, Option<HashType>, Source) {
    let (destination, source, ..) = VECTORS[0];
    let frame = frame(source, destination, TCP, &[]);
    let hashing = Hashing::new(&HashConfig { types, key: KEY }, Some(key));
    let value = 0xdead_beef;
    let (report, source) = hashing.report(&frame, Some(NicHash { value, rss_type }));
    (report.value, report.kind, source)
}

#[test]
fn hash_of_the_nic_is_reported_where_it_is_what_the_driver_asked_for() {
    use HashType as T;
    let key = NicKey::toeplitz(&KEY);
    let v4 = types(&[T::TcpV4, T::UdpV4, T::Ipv4]);
    let told = with_nic(v4, &key, xdp::L4_IPV4_TCP);
    assert_eq!(told, (0xdead_beef, Some(T::TcpV4), Source::Nic));
    // Addresses alone, where ports are wanted; a type that is not enabled; one that VirtIO does not have; none.
    for rss_type in [xdp::L3_IPV4, xdp::L4_IPV6_UDP, xdp::L4_IPV4_SCTP, xdp::L4_ANY, 0] {
        let told = with_nic(v4, &key, rss_type);
        assert_eq!(
            told,
            (VECTORS[0].3, Some(T::TcpV4), Source::Device),
            "{rss_type:#x}"
        );
    }
    let told = with_nic(types(&[T::Ipv4]), &key, xdp::L3_IPV4);
    assert_eq!(told, (0xdead_beef, Some(T::Ipv4), Source::Nic));
    let told = with_nic(types(&[T::Ipv4]), &key, xdp::L4_IPV4_TCP);
    assert_eq!(told, (VECTORS[0].2, Some(T::Ipv4), Source::Device));
}

#[test]
fn hash_with_another_key_than_the_drivers_is_never_reported() {
    let mut other = KEY;
    other[15] ^= 1;
    let told = with_nic(HashTypes::ALL, &NicKey::toeplitz(&other), xdp::L4_IPV4_TCP);
    assert_eq!(told, (VECTORS[0].3, Some(HashType::TcpV4), Source::Device));
    let told = with_nic(HashTypes::ALL, &NicKey::toeplitz(&[]), xdp::L4_IPV4_TCP);
    assert_eq!(told.2, Source::Device);
    // Bits that no input of that length reaches do not matter, and NICs have longer keys.
    let longer = [&KEY[..16], &[0; 36]].concat();
    let told = with_nic(HashTypes::ALL, &NicKey::toeplitz(&longer), xdp::L4_IPV4_TCP);
    assert_eq!(told.2, Source::Nic);
    let told = with_nic(HashTypes::ALL, &NicKey::toeplitz(&longer), xdp::L4_IPV6_TCP_EX);
    assert_eq!(told.2, Source::Device);
}

#[test]
fn hash_over_plain_ipv6_serves_only_where_extension_headers_do_not_matter() {
    use HashType as T;
    let key = NicKey::toeplitz(&KEY);
    let from_nic = |types| Hashing::new(&HashConfig { types, key: KEY }, Some(&key)).from_nic();
    let plain = types(&[T::TcpV6, T::UdpV6, T::Ipv6]);
    assert_eq!(from_nic(plain), types(&[T::TcpV6, T::UdpV6]));
    assert_eq!(from_nic(plain.with(T::TcpV6Ex)), types(&[T::TcpV6Ex]));
    assert_eq!(from_nic(types(&[T::Ipv6])), types(&[T::Ipv6]));
    let best = types(&[T::TcpV4, T::UdpV4, T::TcpV6Ex, T::UdpV6Ex]);
    assert_eq!(from_nic(HashTypes::ALL), best);
    assert_eq!(
        Hashing::new(
            &HashConfig {
                types: plain,
                key: KEY
            },
            None
        )
        .from_nic(),
        HashTypes::NONE
    );
}

/// The Toeplitz hash by its definition, bit by bit.
fn by_definition(key: &[u8; KEY_BYTES], input: &[u8]) -> u32 {
    let bits = |bytes: &[u8]| -> Vec<bool> {
        let bits = bytes
            .iter()
            .flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1 == 1));
        bits.collect()
    };
    let key = bits(key);
    let set = bits(input).into_iter().enumerate().filter(|(_, set)| *set);
    set.fold(0, |hash, (at, _)| {
        let window = key[at..at + 32].iter();
        hash ^ window.fold(0, |all, &bit| all << 1 | u32::from(bit))
    })
}

proptest! {
    /// Packets that others built, hashed by the definition with what was put into them.
    #[test]
    fn any_packet_has_the_hash_of_its_fields(
        addresses: [[u8; 16]; 2], ports: [u16; 2], v6: bool, protocol in 0..3usize, tags in 0..3usize,
        bits in 0..=HashTypes::ALL.bits(), payload in 0..80usize,
        key in prop::collection::vec(any::<u8>(), KEY_BYTES),
    ) {
        use HashType as T;
        let key: [u8; KEY_BYTES] = key.try_into().expect("so many");
        let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
        let [source, destination] = addresses;
        let short = |address: [u8; 16]| *address.first_chunk::<4>().expect("longer");
        let (outer, inner) = (VlanId::try_new(7).expect("12 bits"), VlanId::try_new(0xfff).expect("12 bits"));
        let ip = match (tags, v6) {
            (0, false) => ethernet.ipv4(short(source), short(destination), 64),
            (0, true) => ethernet.ipv6(source, destination, 64),
            (1, false) => ethernet.single_vlan(outer).ipv4(short(source), short(destination), 64),
            (1, true) => ethernet.single_vlan(outer).ipv6(source, destination, 64),
            (_, false) => ethernet.double_vlan(outer, inner).ipv4(short(source), short(destination), 64),
            (_, true) => ethernet.double_vlan(outer, inner).ipv6(source, destination, 64),
        };
        let (mut frame, payload) = (Vec::new(), vec![0x5a; payload]);
        let written = match protocol {
            0 => ip.tcp(ports[0], ports[1], 1, 2).write(&mut frame, &payload),
            1 => ip.udp(ports[0], ports[1]).write(&mut frame, &payload),
            _ => ip.icmpv4_echo_request(3, 4).write(&mut frame, &payload),
        };
        written.expect("a vector takes it");

        let types = HashTypes::from_bits(bits).expect("only these");
        let with_ports = [[T::TcpV4, T::UdpV4], [T::TcpV6, T::UdpV6]][usize::from(v6)].get(protocol);
        let with_ports = with_ports.filter(|&&kind| types.has(kind));
        let alone = [T::Ipv4, T::Ipv6][usize::from(v6)];
        let kind = with_ports.copied().or(types.has(alone).then_some(alone));
        let len = if v6 { 16 } else { 4 };
        let mut input = [&source[..len], &destination[..len]].concat();
        if with_ports.is_some() {
            input.extend(ports.map(u16::to_be_bytes).concat());
        }
        let value = kind.map_or(0, |_| by_definition(&key, &input));
        let (report, _) = Hashing::new(&HashConfig { types, key }, None).report(&frame, None);
        prop_assert_eq!(report, Report { value, kind });
    }
}
