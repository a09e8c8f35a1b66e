//! Whatever arrives, nothing is lost, repeated, reordered within its flow, or changed.

use proptest::prelude::*;

use super::*;

/// What is done to the next segment of a flow.
#[derive(Debug, Clone)]
enum Twist {
    None,
    Flags(u8),
    Short(usize),
    Long(usize),
    Empty,
    Gap(u32),
    Repeat,
    Ttl,
    Tos(u8),
    Id(u16),
    FixedId,
    Ack,
    Stamps(i8, i8),
    NoStamps,
    Vlan,
    Padding(usize),
    Fragment,
    Flip(usize, u8),
    FlipAndMend(usize, u8),
    NotIp,
}

fn twist() -> impl Strategy<Value = Twist> {
    prop_oneof![
        30 => Just(Twist::None),
        2 => any::<u8>().prop_map(Twist::Flags),
        2 => prop_oneof![Just(1u8), Just(8), Just(9), Just(0x80)].prop_map(Twist::Flags),
        2 => (1usize..100).prop_map(Twist::Short),
        1 => (1usize..10).prop_map(Twist::Long),
        1 => Just(Twist::Empty),
        1 => any::<u32>().prop_map(Twist::Gap),
        1 => Just(Twist::Repeat),
        1 => Just(Twist::Ttl),
        1 => any::<u8>().prop_map(Twist::Tos),
        1 => any::<u16>().prop_map(Twist::Id),
        2 => Just(Twist::FixedId),
        1 => Just(Twist::Ack),
        3 => (-1i8..4, -1i8..4).prop_map(|(now, echo)| Twist::Stamps(now, echo)),
        1 => Just(Twist::NoStamps),
        1 => Just(Twist::Vlan),
        1 => (1usize..9).prop_map(Twist::Padding),
        1 => Just(Twist::Fragment),
        2 => (0usize..200, 1u8..).prop_map(|(at, bits)| Twist::Flip(at, bits)),
        2 => (0usize..200, 1u8..).prop_map(|(at, bits)| Twist::FlipAndMend(at, bits)),
        1 => Just(Twist::NotIp),
    ]
}

/// Frames of up to twelve flows, twisted.
fn frames() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let kinds = proptest::collection::vec((any::<[bool; 4]>(), proptest::option::of(1u16..3)), 1..12);
    let steps = proptest::collection::vec((any::<proptest::sample::Index>(), twist()), 1..=MOST_FRAMES);
    (kinds, steps).prop_map(|(kinds, steps)| {
        let mut flows: Vec<_> = (0..)
            .zip(&kinds)
            .map(|(port, &([v6, udp, df, partial], vlan))| Spec {
                v6,
                udp,
                df,
                partial,
                vlan,
                ports: (port, 9),
                seq: u32::MAX - 300,
                id: 0xfffd,
                ..Spec::default()
            })
            .collect();
        steps
            .iter()
            .map(|(at, twist)| {
                let flow = at.index(flows.len());
                let (sent, next) = twisted(&flows[flow], twist);
                flows[flow] = next;
                sent
            })
            .collect()
    })
}

/// The frame, and the flow's next segment.
fn twisted(flow: &Spec, twist: &Twist) -> (Vec<u8>, Spec) {
    let (mut spec, mut lasting) = (flow.clone(), false);
    match *twist {
        Twist::Flags(flags) => spec.flags = ACK | flags,
        Twist::Short(len) => spec.payload.truncate(len),
        Twist::Long(more) => spec.payload.extend(vec![7; more]),
        Twist::Empty => spec.payload.clear(),
        Twist::Gap(gap) => (spec.seq, lasting) = (spec.seq.wrapping_add(gap), true),
        Twist::Ttl => spec.ttl = 3,
        Twist::Tos(tos) => spec.tos = tos,
        Twist::Id(id) => (spec.id, lasting) = (id, true),
        Twist::FixedId => spec.id = spec.id.wrapping_sub(1),
        Twist::Ack => (spec.ack, lasting) = (spec.ack + 1, true),
        Twist::Stamps(now, echo) => {
            spec.stamps = spec.stamps.map(|(a, b)| {
                (
                    a.wrapping_add_signed(now.into()),
                    b.wrapping_add_signed(echo.into()),
                )
            });
            lasting = true;
        }
        Twist::NoStamps => spec.stamps = None,
        Twist::Vlan => spec.vlan = Some(77),
        _ => {}
    }
    let mut frame = spec.frame();
    match *twist {
        Twist::Padding(bytes) => frame.extend(vec![0xee; bytes]),
        Twist::Fragment if !spec.v6 => {
            let ip = if spec.vlan.is_some() { 18 } else { 14 };
            frame[ip + 6] |= 0x20;
            mend_ip(&mut frame, ip);
        }
        Twist::Flip(at, bits) | Twist::FlipAndMend(at, bits) => {
            let at = at % frame.len();
            frame[at] ^= bits;
            if matches!(twist, Twist::FlipAndMend(..)) && layers::parse(&frame, frame.len() as u32).is_some()
            {
                complete(&mut frame);
            }
        }
        Twist::NotIp => frame[12..14].copy_from_slice(&[0x88, 0xb5]),
        _ => {}
    }
    let after = if lasting {
        spec
    } else {
        Spec {
            payload: spec.payload,
            seq: spec.seq,
            id: spec.id,
            ..flow.clone()
        }
    };
    let mut next = after.next();
    next.payload = (0..100).map(|at| at ^ next.seq as u8).collect();
    if matches!(twist, Twist::Repeat) {
        next = flow.clone();
    }
    (frame, next)
}

proptest! {
    #[test]
    fn nothing_is_lost_repeated_reordered_or_changed(
        frames in frames(), rooms in any::<[u16; 8]>(), tight in any::<bool>(),
    ) {
        let batch = batch_of(ALL, &frames);
        let room = |at: usize| if tight { u32::from(rooms[at % 8]) % 2000 } else { u32::MAX };
        let delivered = deliver(&batch, &frames, room);
        check(&delivered, &frames, room);
        for unit in delivered {
            if let Some(alone) = header_alone(ALL, &frames[unit.members[0]]) {
                prop_assert_eq!((unit.header, unit.members.len()), (alone, 1));
            }
        }
    }

    #[test]
    fn gso_packet_cut_and_coalesced_is_the_gso_packet(
        [v6, udp, df, partial, stamped] in any::<[bool; 5]>(),
        vlan in proptest::option::of(1u16..4095),
        size in 64usize..9000,
        len in 1usize..65_000,
        (tos, flags) in (
            any::<u8>(),
            prop_oneof![Just(0u8), Just(1), Just(8), Just(9), Just(0x80), Just(0x48), Just(0x88)],
        ),
        (seq, id, seed) in (any::<u32>(), any::<u16>(), any::<u8>()),
    ) {
        let size = size.max(len.div_ceil(MOST_FRAMES));
        let payload = (0..len).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect();
        let spec = Spec {
            v6, udp, df, vlan, tos, seq, id, payload, partial: true,
            stamps: stamped.then_some((5, 6)), flags: ACK | flags, ..Spec::default()
        };
        let whole = spec.frame();
        let kind = match (udp, v6) {
            (true, _) => GsoKind::Udp,
            (false, false) => GsoKind::Tcp4,
            (false, true) => GsoKind::Tcp6,
        };
        let plan = Plan::new(&whole, whole.len() as u32, Gso { kind, ecn: true, size: size as u16 }).expect("good");
        let frames: Vec<_> = (0..plan.segments()).map(|index| {
            let mut segment = vec![0; plan.header_len()];
            plan.write_header(index, &mut segment);
            segment.extend(&whole[plan.payload(index).start as usize..plan.payload(index).end as usize]);
            if !partial {
                complete(&mut segment);
            }
            segment
        }).collect();
        let got = coalesced(&frames);
        prop_assert_eq!(got.len(), 1);
        if frames.len() > 1 {
            prop_assert_eq!(got[0].header.gso_size as usize, size);
            prop_assert_eq!(&got[0].frame, &whole);
            check_gso_packet(&got[0], &frames);
        }
    }

    #[test]
    fn any_bytes_are_stood(
        frames in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 0..MOST_FRAMES),
    ) {
        let delivered = coalesced(&frames);
        prop_assert_eq!(delivered.len(), frames.len());
    }
}
