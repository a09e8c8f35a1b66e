//! Frames in VXLAN of a stack at the other end of the uplink, with an unfinished checksum inside.

use packet::{checksum, layers, verify};

use super::*;

/// A UDP datagram over IPv4, its checksum unfinished or none.
fn datagram(to: Mac, port: u16, payload: &[u8], has_sum: bool) -> Vec<u8> {
    let word = |value: usize| (value as u16).to_be_bytes();
    let mut frame = [&to[..], &STRANGER, &[8, 0, 0x45, 0]].concat();
    frame.extend(word(28 + payload.len()));
    frame.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 239, 0, 0, 1]);
    frame.extend(
        [
            &word(5000)[..],
            &port.to_be_bytes(),
            &word(8 + payload.len()),
            &[0; 2],
        ]
        .concat(),
    );
    frame.extend(payload);
    if has_sum {
        let layers = layers::parse(&frame, frame.len() as u32).expect("UDP");
        let sum = verify::pseudo(&frame, &layers).fold();
        frame[40..42].copy_from_slice(&sum.to_be_bytes());
    }
    frame
}

#[test]
fn checksum_inside_a_tunnel_is_completed_for_one_guest_and_for_all() {
    for takes_partial in [false, true] {
        let offloads = Offloads {
            guest_csum: takes_partial,
            ..Offloads::NONE
        };
        let ports = (0..3).map(fdb_port);
        let mut world = World::offering(ports.collect(), offloads)
            .with_uplink_from(true, 256, |_| ())
            .posting(16);
        world.poll();
        let tunnelled =
            |to, inner: &[u8]| datagram(to, 4789, &[&[8, 0, 0, 0, 0, 0, 42, 0], inner].concat(), false);
        let mut inner = datagram(mac(9), 7, b"whoever is there", true);
        let sent = [BROADCAST, mac(1)].map(|to| tunnelled(to, &inner));
        checksum::complete(&mut inner[..], checksum::ChecksumAt { start: 34, offset: 6 }).expect("inside");
        let [all, one] = [BROADCAST, mac(1)].map(|to| tunnelled(to, &inner));
        sent.iter().for_each(|frame| world.arrive(frame));
        (0..4).for_each(|_| world.poll());
        let mut got: Vec<_> = world.ports.iter_mut().map(Port::got).collect();
        got[1].sort();
        let mut both = vec![all.clone(), one];
        both.sort();
        assert_eq!(got, [vec![all.clone()], both, vec![all]], "{takes_partial}");
    }
}
