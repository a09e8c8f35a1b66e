//! Each rule by an example.

use super::*;

/// So many segments in sequence.
fn train(first: &Spec, count: usize) -> Vec<Spec> {
    let mut train = vec![first.clone()];
    while train.len() < count {
        train.push(train[train.len() - 1].next());
    }
    train
}

/// Interleaved trains of `count` segments each, of so many flows.
fn mixed(flows: u16, count: usize) -> Vec<Spec> {
    let train = |port| {
        let first = Spec {
            ports: (port, 9),
            ..Spec::default()
        };
        train(&first, count)
    };
    let trains: Vec<_> = (0..flows).map(train).collect();
    let by_turns = (0..count).flat_map(|at| trains.iter().map(move |train| train[at].clone()));
    by_turns.collect()
}

#[test]
fn segments_in_sequence_become_one_gso_packet() {
    for (v6, udp, vlan, partial) in [
        (false, false, None, false),
        (false, false, Some(5), true),
        (true, false, None, true),
        (true, false, Some(5), false),
        (false, true, None, false),
        (true, true, Some(9), true),
    ] {
        let first = Spec {
            v6,
            udp,
            vlan,
            partial,
            ..Spec::default()
        };
        let frames: Vec<_> = train(&first, 5).iter().map(Spec::frame).collect();
        let got = coalesced(&frames);
        assert_eq!(got.len(), 1, "{v6} {udp}");
        assert_eq!(got[0].members, [0, 1, 2, 3, 4]);
        assert_eq!(got[0].header.gso_size, 100);
        assert_eq!(got[0].frame.len(), frames[0].len() + 400);
        check_gso_packet(&got[0], &frames);
    }
}

#[test]
fn nothing_is_merged_that_was_not_accepted() {
    let none = Rules::default();
    for (v6, udp, rules) in [
        (false, false, Rules { tcp4: false, ..ALL }),
        (true, false, Rules { tcp6: false, ..ALL }),
        (false, true, Rules { udp4: false, ..ALL }),
        (true, true, Rules { udp6: false, ..ALL }),
        (false, false, none),
    ] {
        let frames: Vec<_> = train(
            &Spec {
                v6,
                udp,
                ..Spec::default()
            },
            3,
        )
        .iter()
        .map(Spec::frame)
        .collect();
        let got = deliver(&batch_of(rules, &frames), &frames, |_| u32::MAX);
        assert_eq!(got.len(), 3);
        for (got, frame) in got.iter().zip(&frames) {
            assert_eq!(&got.frame, frame);
            assert_eq!(
                got.header,
                NetHeader::from([2, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
                "DATA_VALID"
            );
        }
    }
}

#[test]
fn each_rule_alone_allows_some_gso_packet() {
    let none = Rules::default();
    assert!(!none.any());
    assert!(!Rules { ecn: true, ..none }.any(), "it says how, not what");
    for rules in [
        Rules { tcp4: true, ..none },
        Rules { tcp6: true, ..none },
        Rules { udp4: true, ..none },
        Rules { udp6: true, ..none },
    ] {
        assert!(rules.any(), "{rules:?}");
    }
}

#[test]
fn batch_counts_its_frames() {
    let frames: Vec<_> = train(&Spec::default(), 3).iter().map(Spec::frame).collect();
    let mut batch = batch_of(ALL, &frames);
    assert_eq!((batch.len(), batch.is_empty()), (3, false));
    // A frame that is not read is not merged.
    assert!(batch.add_unread(77));
    let mut position = Position::default();
    let runs = [(); 2].map(|()| {
        let run = batch.run(&position, u32::MAX).expect("a frame");
        batch.advance(&mut position, &run);
        (run.frames(), run.bytes())
    });
    assert_eq!(runs, [(3, frames[0].len() as u32 + 200), (1, 77)]);
    assert!((4..MOST_FRAMES).all(|_| batch.add_unread(1)) && !batch.add_unread(1));
    assert_eq!(batch.len(), MOST_FRAMES);
    batch.clear();
    assert_eq!((batch.len(), batch.is_empty()), (0, true));
}

#[test]
fn single_frame_says_what_its_checksum_is() {
    let valid = Spec::default();
    let partial = Spec {
        partial: true,
        ports: (1, 1),
        ..Spec::default()
    };
    let mut wrong = Spec {
        ports: (1, 2),
        ..Spec::default()
    }
    .frame();
    *wrong.last_mut().expect("bytes") ^= 1;
    let none = {
        let mut frame = Spec {
            udp: true,
            ..Spec::default()
        }
        .frame();
        frame[40..42].fill(0);
        frame
    };
    let frames = [
        valid.frame(),
        partial.frame(),
        wrong.clone(),
        none,
        vec![0xff; 60],
    ];
    let got = coalesced(&frames);
    let headers: Vec<_> = got
        .iter()
        .map(|got| (got.header.flags, got.header.csum_start, got.header.csum_offset))
        .collect();
    assert_eq!(headers, [(2, 0, 0), (1, 34, 16), (0, 0, 0), (0, 0, 0), (0, 0, 0)]);
    assert_eq!(got[2].frame, wrong);
    for (frame, got) in frames.iter().zip(&got) {
        assert_eq!(header_alone(Rules::default(), frame), Some(got.header));
    }
    let may_be_merged: Vec<_> = frames
        .iter()
        .map(|frame| header_alone(ALL, frame).is_none())
        .collect();
    assert_eq!(may_be_merged, [true, true, true, true, false]);
}

/// Changes of a second and third segment, and whether these are still merged.
#[test]
fn differing_header_is_not_merged() {
    type Change = (&'static str, fn(&mut Spec));
    let change: [Change; 13] = [
        ("ttl", |spec| spec.ttl = 63),
        ("tos", |spec| spec.tos = 2),
        ("df", |spec| spec.df = false),
        ("id", |spec| spec.id += 1),
        ("sequence", |spec| spec.seq += 1),
        ("acknowledgement", |spec| spec.ack += 1),
        ("window", |spec| spec.window += 1),
        ("ECE", |spec| spec.flags |= 0x40),
        ("CWR", |spec| spec.flags |= 0x80),
        ("no timestamps", |spec| spec.stamps = None),
        ("timestamp going back", |spec| spec.stamps = Some((9, 20))),
        ("echo going back", |spec| spec.stamps = Some((10, 19))),
        ("longer", |spec| spec.payload.push(0)),
    ];
    for (what, change) in change {
        let mut specs = train(&Spec::default(), 3);
        change(&mut specs[1]);
        let units = units(&specs);
        assert!(
            units.iter().all(|unit| !unit.contains(&0) || unit == &[0]),
            "{what}: {units:?}"
        );
        assert_eq!(units.concat(), [0, 1, 2], "{what}");
    }
}

#[test]
fn last_bytes_of_the_headers_must_be_equal() {
    // Without options they are the window and the urgent pointer.
    let mut specs = train(
        &Spec {
            stamps: None,
            ..Spec::default()
        },
        2,
    );
    specs[1].window += 1;
    assert_eq!(units(&specs), [[0], [1]]);
}

#[test]
fn flow_label_and_traffic_class_of_ipv6_must_be_equal() {
    let change: [fn(&mut Spec); 3] = [|spec| spec.label = 1, |spec| spec.tos = 3, |spec| spec.ttl = 2];
    for change in change {
        let mut specs = train(
            &Spec {
                v6: true,
                ..Spec::default()
            },
            2,
        );
        change(&mut specs[1]);
        assert_eq!(units(&specs), [[0], [1]]);
    }
}

#[test]
fn addresses_of_ethernet_and_tags_must_be_equal() {
    let change: [fn(&mut Spec); 3] = [
        |spec| spec.mac = 7,
        |spec| spec.vlan = Some(6),
        |spec| spec.vlan = None,
    ];
    for change in change {
        let mut specs = train(
            &Spec {
                vlan: Some(5),
                ..Spec::default()
            },
            2,
        );
        change(&mut specs[1]);
        assert_eq!(units(&specs), [[0], [1]]);
    }
}

#[test]
fn push_and_fin_end_a_gso_packet_and_are_in_it() {
    for flag in [1, 8, 9] {
        let mut specs = train(&Spec::default(), 4);
        specs[1].flags |= flag;
        let got = coalesced_specs(&specs);
        assert_eq!(got[0].members, [0, 1]);
        assert_eq!(got[1].members, [2, 3]);
        assert_eq!(got[0].frame[34 + 13], ACK | flag);
    }
}

#[test]
fn syn_rst_urg_and_push_stay_alone() {
    for flag in [2, 4, 0x20, 8, 1] {
        for both in [false, true] {
            let mut specs = train(&Spec::default(), 2);
            specs[0].flags |= flag;
            specs[1].flags |= if both { flag } else { 0 };
            assert_eq!(units(&specs), [[0], [1]], "{flag:#x}");
            assert!(header_alone(ALL, &specs[0].frame()).is_some());
        }
    }
}

#[test]
fn congestion_window_reduced_may_be_in_the_first_only() {
    let mut specs = train(&Spec::default(), 3);
    specs[0].flags |= 0x80;
    let frames: Vec<_> = specs.iter().map(Spec::frame).collect();
    let got = coalesced(&frames);
    assert_eq!((got.len(), got[0].header.gso_type), (1, 0x81));
    check_gso_packet(&got[0], &frames);
    let got = deliver(&batch_of(Rules { ecn: false, ..ALL }, &frames), &frames, |_| {
        u32::MAX
    });
    assert_eq!(
        got.iter().map(|got| got.members.len()).collect::<Vec<_>>(),
        [1, 2]
    );
    assert_eq!(got[1].header.gso_type, 1);
}

#[test]
fn shorter_segment_ends_a_gso_packet() {
    for udp in [false, true] {
        let mut specs = train(
            &Spec {
                udp,
                ..Spec::default()
            },
            2,
        );
        specs[1].payload.truncate(40);
        specs.push(specs[1].next());
        assert_eq!(units(&specs), [vec![0, 1], vec![2]]);
    }
}

#[test]
fn timestamps_may_go_on_and_the_first_stay() {
    let mut specs = train(&Spec::default(), 3);
    specs[1].stamps = Some((11, 20));
    specs[2].stamps = Some((12, 25));
    let frames: Vec<_> = specs.iter().map(Spec::frame).collect();
    let got = coalesced(&frames);
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].frame[34 + 24..34 + 32], [0, 0, 0, 10, 0, 0, 0, 20]);
    check_gso_packet(&got[0], &frames);
}

#[test]
fn fixed_ids_need_dont_fragment_and_stay_fixed() {
    let fixed = |df| {
        let mut specs = train(
            &Spec {
                df,
                ..Spec::default()
            },
            3,
        );
        specs.iter_mut().for_each(|spec| spec.id = 7);
        units(&specs)
    };
    assert_eq!(fixed(true), [[0, 1, 2]]);
    assert_eq!(fixed(false), [[0], [1], [2]]);
    let mut mixed = train(&Spec::default(), 3);
    mixed[1].id = mixed[0].id;
    mixed[2].id = mixed[0].id + 1;
    assert_eq!(units(&mixed), [vec![0, 1], vec![2]]);
}

#[test]
fn ids_and_sequence_numbers_may_wrap() {
    let specs = train(
        &Spec {
            id: 0xffff,
            seq: u32::MAX - 50,
            ..Spec::default()
        },
        3,
    );
    assert_eq!(units(&specs), [[0, 1, 2]]);
}

#[test]
fn packet_has_at_most_65535_bytes() {
    // 52 bytes of IPv4 and TCP.
    let size = 9000;
    let most = (65_535 - 52) / size;
    let specs = train(
        &Spec {
            payload: vec![1; size],
            ..Spec::default()
        },
        most + 2,
    );
    let got = coalesced_specs(&specs);
    assert_eq!(
        got.iter().map(|got| got.members.len()).collect::<Vec<_>>(),
        [most, 2]
    );
    let last = 65_535 - 52 - most * size;
    for (short, merged) in [(last, most + 1), (last + 1, most)] {
        let mut specs = train(
            &Spec {
                payload: vec![1; size],
                ..Spec::default()
            },
            most + 1,
        );
        specs[most].payload.truncate(short);
        assert_eq!(coalesced_specs(&specs)[0].members.len(), merged);
    }
}

#[test]
fn padded_frame_and_wrong_checksum_are_passed_as_they_are_and_in_order() {
    let specs = train(
        &Spec {
            payload: vec![1; 4],
            ..Spec::default()
        },
        3,
    );
    let mut frames: Vec<_> = specs.iter().map(Spec::frame).collect();
    frames[1].extend([0; 2]);
    let got = coalesced(&frames);
    assert_eq!(
        got.iter().map(|got| got.members.clone()).collect::<Vec<_>>(),
        [[0], [1], [2]]
    );
    assert_eq!((&got[1].frame, got[1].header.flags), (&frames[1], 2));
    for at in [10, 11, 14 + 20 + 16, 70 - 1] {
        let mut frames: Vec<_> = specs.iter().map(Spec::frame).collect();
        frames[1][14 + at.min(55)] ^= 0x10;
        let got = coalesced(&frames);
        assert_eq!(got.len(), 3, "byte {at}");
        assert_eq!(got[1].frame, frames[1]);
    }
}

#[test]
fn flows_are_merged_beside_each_other_and_delivered_by_their_first() {
    let mixed = mixed(3, 4);
    assert_eq!(units(&mixed), [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]);
}

#[test]
fn flow_that_began_first_is_ended_wherever_its_group_is() {
    let first = |port| Spec {
        ports: (port, 9),
        ..Spec::default()
    };
    let mut specs: Vec<_> = (0..8).map(first).collect();
    // The first group ends, and another flow gets its place.
    specs.push(specs[0].next());
    specs[8].flags |= 8;
    specs.push(first(8));
    // Flow 1 is the oldest now.
    specs.push(first(9));
    specs.push(first(8).next());
    specs.push(first(2).next());
    specs.push(first(1).next());
    let got = units(&specs);
    assert!(
        got.contains(&vec![9, 11]) && got.contains(&vec![2, 12]),
        "{got:?}"
    );
    assert!(got.contains(&vec![1]) && got.contains(&vec![13]), "{got:?}");
}

#[test]
fn frame_without_payload_ends_no_other_flow() {
    let first = |port| Spec {
        ports: (port, 9),
        ..Spec::default()
    };
    for padding in [0, 6] {
        let acknowledgement = Spec {
            payload: Vec::new(),
            ..first(8)
        };
        let mut frames: Vec<_> = (0..8).map(|port| first(port).frame()).collect();
        frames.push([acknowledgement.frame(), vec![0; padding]].concat());
        frames.extend((0..8).map(|port| first(port).next().frame()));
        let got: Vec<_> = coalesced(&frames).into_iter().map(|got| got.members).collect();
        assert_eq!(got.len(), 9, "{got:?}");
        assert!((0..8).all(|at| got.contains(&vec![at, at + 9])), "{got:?}");
    }
}

#[test]
fn padded_or_reserved_first_frame_stays_alone() {
    let specs = train(&Spec::default(), 3);
    let members = |frames: &[Vec<u8>]| {
        let got = coalesced(frames);
        got.into_iter().map(|got| got.members).collect::<Vec<_>>()
    };
    let mut frames: Vec<_> = specs.iter().map(Spec::frame).collect();
    frames[0].extend([0; 2]);
    assert_eq!(members(&frames), [vec![0], vec![1, 2]]);
    // The reserved bit next to "don't fragment".
    let mut frames: Vec<_> = specs.iter().map(Spec::frame).collect();
    for frame in &mut frames {
        frame[14 + 6] |= 0x80;
        mend_ip(frame, 14);
    }
    assert_eq!(members(&frames), [[0], [1], [2]]);
}

#[test]
fn headers_of_more_than_128_bytes_are_not_merged() {
    let specs = train(
        &Spec {
            v6: true,
            stamps: None,
            ..Spec::default()
        },
        2,
    );
    for (options, is_merged) in [(48, true), (56, false), (64, false)] {
        let mut frames: Vec<_> = specs.iter().map(Spec::frame).collect();
        for frame in &mut frames {
            let len = u16::from_be_bytes([frame[18], frame[19]]) + options;
            frame[18..20].copy_from_slice(&len.to_be_bytes());
            frame[20] = 60;
            let mut header = vec![0; options.into()];
            (header[0], header[1]) = (6, (options / 8 - 1) as u8);
            frame.splice(54..54, header);
        }
        assert_eq!(
            coalesced(&frames).len(),
            if is_merged { 1 } else { 2 },
            "{options}"
        );
    }
}

#[test]
fn cut_segment_is_not_merged() {
    let frames: Vec<_> = train(&Spec::default(), 2).iter().map(Spec::frame).collect();
    for len in 0..frames[1].len() {
        let got = coalesced(&[frames[0].clone(), frames[1][..len].to_vec()]);
        assert_eq!(got.len(), 2, "{len} bytes");
    }
}

#[test]
fn timestamps_go_back_by_the_upper_half_of_their_numbers() {
    for (ahead, is_merged) in [(0x7fff_ffff, true), (0x8000_0000, false)] {
        for at in [0, 1] {
            let mut specs = train(&Spec::default(), 2);
            let stamps = specs[1].stamps.as_mut().expect("it has some");
            let stamp = if at == 0 { &mut stamps.0 } else { &mut stamps.1 };
            *stamp = stamp.wrapping_add(ahead);
            assert_eq!(units(&specs).len(), if is_merged { 1 } else { 2 }, "{ahead:#x}");
        }
    }
}

#[test]
fn only_a_frame_of_the_same_flow_ends_its_unit() {
    // A segment that cannot be appended, between two that can be.
    let between = |change: fn(&mut Vec<u8>), other: Spec| {
        let specs = train(&Spec::default(), 2);
        let mut frame = Spec { window: 1, ..other }.frame();
        change(&mut frame);
        let frames = [specs[0].frame(), frame, specs[1].frame()];
        coalesced(&frames).len()
    };
    let spec = Spec::default;
    assert_eq!(between(|_| (), spec()), 3, "the same flow");
    assert_eq!(between(|_| (), Spec { v6: true, ..spec() }), 2);
    assert_eq!(between(|_| (), Spec { udp: true, ..spec() }), 2);
    assert_eq!(
        between(
            |_| (),
            Spec {
                ports: (1000, 2001),
                ..spec()
            }
        ),
        2
    );
    assert_eq!(
        between(
            |_| (),
            Spec {
                ports: (1001, 2000),
                ..spec()
            }
        ),
        2
    );
    let address = |frame: &mut Vec<u8>| {
        frame[14 + 12] = 11;
        mend_ip(frame, 14);
        complete(frame);
    };
    assert_eq!(between(address, spec()), 2);
    for (at, units) in [(14 + 7, 3), (14 + 8, 2), (14 + 39, 2)] {
        let v6 = Spec { v6: true, ..spec() };
        let specs = train(&v6, 2);
        let mut frame = Spec { window: 1, ..v6 }.frame();
        // The hop limit, or an address.
        frame[at] ^= 1;
        complete(&mut frame);
        let frames = [specs[0].frame(), frame, specs[1].frame()];
        assert_eq!(coalesced(&frames).len(), units, "byte {at}");
    }
}

#[test]
fn member_that_starts_a_run_says_what_its_checksum_is() {
    for partial in [false, true] {
        let first = Spec {
            partial,
            ..Spec::default()
        };
        let frames: Vec<_> = train(&first, 3).iter().map(Spec::frame).collect();
        let batch = batch_of(ALL, &frames);
        let (whole, one) = (frames[0].len() as u32 + 200, frames[0].len() as u32);
        let position = Position::default();
        for (room, is_whole) in [(one, false), (whole - 1, false), (whole, true)] {
            let run = batch.run(&position, room).expect("a unit");
            assert_eq!(run.is_whole(), is_whole, "{room}");
        }
        let got = deliver(&batch, &frames, |_| one);
        let flags: Vec<_> = got.iter().map(|got| got.header.flags).collect();
        assert_eq!(flags, [if partial { 1 } else { 2 }; 3]);
        for frame in 0..3 {
            assert_eq!(batch.partial(frame).is_some(), partial, "{frame}");
        }
    }
}

#[test]
fn pure_acknowledgement_and_what_is_no_tcp_keep_their_place() {
    let mut specs = train(&Spec::default(), 4);
    specs[1].payload.clear();
    specs[2].seq = specs[1].seq;
    specs[3] = specs[2].next();
    assert_eq!(units(&specs), [vec![0], vec![1], vec![2, 3]]);
    let mut frames: Vec<_> = train(&Spec::default(), 4).iter().map(Spec::frame).collect();
    frames[2] = vec![0xff; 60];
    frames.swap(1, 2);
    let members: Vec<_> = coalesced(&frames).into_iter().map(|got| got.members).collect();
    assert_eq!(members, [vec![0], vec![1], vec![2], vec![3]]);
}

#[test]
fn unit_can_be_taken_in_runs_that_fit() {
    let frames: Vec<_> = train(
        &Spec {
            flags: ACK | 0x80,
            ..Spec::default()
        },
        5,
    )
    .iter()
    .map(Spec::frame)
    .collect();
    let mut frames = frames;
    frames[1..].iter_mut().for_each(|frame| {
        frame[34 + 13] &= !0x80;
        complete(frame);
    });
    let batch = batch_of(ALL, &frames);
    // Two frames; then one, the minimum, although it does not fit; then the rest.
    let room = |at: usize| [66 + 200, 1, u32::MAX][at.min(2)];
    let got = deliver(&batch, &frames, room);
    assert_eq!(
        got.iter().map(|got| got.members.clone()).collect::<Vec<_>>(),
        [vec![0, 1], vec![2], vec![3, 4]]
    );
    assert_eq!(got[1].frame, frames[2]);
    assert_eq!(
        [
            got[0].header.gso_type,
            got[1].header.gso_type,
            got[2].header.gso_type
        ],
        [0x81, 0, 1]
    );
    check_gso_packet(&got[0], &frames);
    check_gso_packet(&got[2], &frames);
}

#[test]
fn full_batch_takes_no_more_and_can_be_used_again() {
    let frame = Spec::default().frame();
    let mut batch = batch_of(ALL, &vec![frame.clone(); MOST_FRAMES]);
    assert!(!batch.add(&frame, frame.len() as u32, |_| Verdict::Valid));
    batch.clear();
    assert!(batch.is_empty() && batch.run(&Position::default(), 0).is_none());
    assert!(batch.add(&frame, frame.len() as u32, |_| Verdict::Valid));
}

#[test]
fn header_lies_in_memory_as_the_specification_has_it() {
    let csum = ChecksumAt {
        start: 0x0506,
        offset: 0x0708,
    };
    let gso = Gso {
        kind: GsoKind::Tcp6,
        ecn: false,
        size: 0x0304,
    };
    let request = Request {
        csum: Some(csum),
        gso: Some(gso),
    };
    assert_eq!(request.to_header(0x0102), [1, 4, 2, 1, 4, 3, 6, 5, 8, 7]);
}
