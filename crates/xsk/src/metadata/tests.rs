//! Layouts and what is read by them.

use std::sync::Arc;

use super::*;
use crate::{OwnMemory, Umem, UmemOffset};

const FRAME: u64 = 256;

fn umem() -> Umem {
    Umem::aligned(Arc::new(OwnMemory::new(8192).unwrap()), 2048, 0).unwrap()
}

fn all_fields(id: u32) -> Layout {
    let fields = [
        (Field::Timestamp, 0),
        (Field::Hash, 8),
        (Field::Mark, 12),
        (Field::Port, 16),
        (Field::HashType, 20),
        (Field::VlanProto, 22),
        (Field::VlanTci, 24),
        (Field::Absent, 26),
    ];
    Layout::new(id, 32, &fields).unwrap()
}

/// Writes a structure of [`all_fields`] before the frame at `frame`.
fn leave(umem: &Umem, frame: u64, absent: u16, id: u32) {
    let mut bytes = Vec::new();
    bytes.extend(0x0102_0304_0506_0708u64.to_ne_bytes());
    bytes.extend(0x1111_2222u32.to_ne_bytes());
    bytes.extend(0x3333_4444u32.to_ne_bytes());
    bytes.extend(7u32.to_ne_bytes());
    bytes.extend(25u16.to_ne_bytes());
    bytes.extend([0x81, 0]);
    bytes.extend(0x6064u16.to_ne_bytes());
    bytes.extend(absent.to_ne_bytes());
    bytes.extend(id.to_ne_bytes());
    umem.write(UmemOffset::new(frame - bytes.len() as u64), &bytes)
        .unwrap();
}

fn all_hints() -> Hints {
    Hints {
        hash: Some(Hash {
            value: 0x1111_2222,
            kind: 25,
        }),
        tag: Some(Tag {
            proto: 0x8100,
            tci: 0x6064,
        }),
        timestamp: std::num::NonZeroU64::new(0x0102_0304_0506_0708),
        mark: Some(0x3333_4444),
        port: Some(7),
    }
}

fn read(layouts: &Layouts, umem: &Umem, frame: u64) -> Found {
    layouts.read(umem, UmemOffset::new(frame))
}

#[test]
fn fields_are_read_as_the_layout_says_but_those_that_are_absent() {
    let umem = umem();
    let layouts = Layouts::new(&[all_fields(0x8001_0007)]);
    for absent in 0..32u16 {
        leave(&umem, FRAME, absent | 0xff00, 0x8001_0007);
        let mut expected = all_hints();
        if absent & 1 != 0 {
            expected.hash = None;
        }
        if absent & 2 != 0 {
            expected.tag = None;
        }
        if absent & 4 != 0 {
            expected.timestamp = None;
        }
        if absent & 8 != 0 {
            expected.mark = None;
        }
        if absent & 16 != 0 {
            expected.port = None;
        }
        assert_eq!(
            read(&layouts, &umem, FRAME),
            Found::Hints(expected),
            "{absent:#x}"
        );
    }
}

#[test]
fn each_set_of_fields_is_read() {
    let umem = umem();
    leave(&umem, FRAME, 0, 5);
    let groups: [&[(Field, u8)]; 6] = [
        &[(Field::Timestamp, 0)],
        &[(Field::Hash, 8), (Field::HashType, 20)],
        &[(Field::Mark, 12)],
        &[(Field::Port, 16)],
        &[(Field::VlanProto, 22), (Field::VlanTci, 24)],
        &[(Field::Absent, 26)],
    ];
    for set in 0..64usize {
        let chosen = groups.iter().enumerate().filter(|(n, _)| set & 1 << n != 0);
        let fields: Vec<_> = chosen.flat_map(|(_, group)| group.iter().copied()).collect();
        let layouts = Layouts::new(&[Layout::new(5, 32, &fields).unwrap()]);
        let all = all_hints();
        let expected = Hints {
            timestamp: all.timestamp.filter(|_| set & 1 != 0),
            hash: all.hash.filter(|_| set & 2 != 0),
            mark: all.mark.filter(|_| set & 4 != 0),
            port: all.port.filter(|_| set & 8 != 0),
            tag: all.tag.filter(|_| set & 16 != 0),
        };
        assert_eq!(read(&layouts, &umem, FRAME), Found::Hints(expected), "{set:#b}");
    }
}

#[test]
fn frames_of_several_layouts_are_told_apart_by_their_ids() {
    let umem = umem();
    let short = Layout::new(0x8002_0009, 8, &[(Field::Port, 0)]).unwrap();
    let layouts = Layouts::new(&[short, all_fields(0x8001_0009)]);
    leave(&umem, FRAME, 0, 0x8001_0009);
    assert_eq!(read(&layouts, &umem, FRAME), Found::Hints(all_hints()));
    umem.write(
        UmemOffset::new(FRAME - 8),
        &[9u32.to_ne_bytes(), 0x8002_0009u32.to_ne_bytes()].concat(),
    )
    .unwrap();
    let port = Hints {
        port: Some(9),
        ..Hints::default()
    };
    assert_eq!(read(&layouts, &umem, FRAME), Found::Hints(port));
    leave(&umem, FRAME, 0, 0x8003_0009);
    assert_eq!(read(&layouts, &umem, FRAME), Found::Unknown(0x8003_0009));
    assert_eq!(Found::Unknown(0x8003_0009).hints(), Hints::default());
    forget(&umem, UmemOffset::new(FRAME));
    assert_eq!(read(&layouts, &umem, FRAME), Found::Nothing);
}

#[test]
fn nothing_is_read_or_written_outside_the_umem() {
    let umem = umem();
    umem.write(UmemOffset::new(0), &[0xa5; 8192]).unwrap();
    let layouts = Layouts::new(&[all_fields(0xa5a5_a5a5)]);
    for frame in [0, 1, 3, 4, 31, 8193, 8192 + 32, u64::MAX - 1, u64::MAX] {
        assert_eq!(read(&layouts, &umem, frame), Found::Nothing, "{frame}");
    }
    assert!(matches!(read(&layouts, &umem, 8192), Found::Hints(_)));
    assert!(matches!(read(&layouts, &umem, 32), Found::Hints(_)));
    for frame in [0, 3, 8193, 8196, u64::MAX] {
        forget(&umem, UmemOffset::new(frame));
    }
    let mut bytes = [0; 8192];
    umem.read(UmemOffset::new(0), &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 0xa5));
}

#[test]
fn longer_structures_are_read_to_their_length() {
    let umem = umem();
    let fields = [(Field::Mark, 0), (Field::Port, 244)];
    let layouts = Layouts::new(&[Layout::new(77, 252, &fields).unwrap()]);
    let mut bytes = [0xee; 252];
    bytes[..4].copy_from_slice(&5u32.to_ne_bytes());
    bytes[244..248].copy_from_slice(&6u32.to_ne_bytes());
    bytes[248..].copy_from_slice(&77u32.to_ne_bytes());
    umem.write(UmemOffset::new(4), &bytes).unwrap();
    let expected = Hints {
        mark: Some(5),
        port: Some(6),
        ..Hints::default()
    };
    assert_eq!(read(&layouts, &umem, 256), Found::Hints(expected));
    // Where it would begin before the UMEM.
    umem.write(UmemOffset::new(100), &77u32.to_ne_bytes()).unwrap();
    assert_eq!(read(&layouts, &umem, 104), Found::Nothing);
}

#[test]
fn tag_of_no_kind_and_time_zero_are_none() {
    let umem = umem();
    umem.write(UmemOffset::new(FRAME - 16), &[0; 16]).unwrap();
    umem.write(UmemOffset::new(FRAME - 4), &3u32.to_ne_bytes())
        .unwrap();
    let fields = [(Field::Timestamp, 0), (Field::VlanProto, 8), (Field::VlanTci, 10)];
    let layouts = Layouts::new(&[Layout::new(3, 16, &fields).unwrap()]);
    assert_eq!(read(&layouts, &umem, FRAME), Found::Hints(Hints::default()));
}

#[test]
fn latest_layouts_are_known_and_of_two_with_an_id_the_later_one() {
    assert!(Layouts::default().is_empty());
    let umem = umem();
    let layout = |id| Layout::new(id, 8, &[(Field::Mark, 0)]).unwrap();
    let last = MAX_LAYOUTS as u32 + 1;
    let mut all: Vec<Layout> = (1..=last).rev().map(layout).collect();
    all.insert(1, Layout::new(last, 8, &[(Field::Port, 0)]).unwrap());
    let layouts = Layouts::new(&all);
    assert!(!layouts.is_empty());
    for id in 1..=last {
        umem.write(
            UmemOffset::new(FRAME - 8),
            &[5u32.to_ne_bytes(), id.to_ne_bytes()].concat(),
        )
        .unwrap();
        let marked = Hints {
            mark: Some(5),
            ..Hints::default()
        };
        let wanted = match id {
            1 | 2 => Found::Unknown(id),
            _ => Found::Hints(marked),
        };
        assert_eq!(read(&layouts, &umem, FRAME), wanted, "{id}");
    }
}

#[test]
fn port_is_read_alone_if_the_latest_layout_has_nothing_else() {
    let umem = umem();
    let port = |len| Layout::new(7, len, &[(Field::Port, 0)]).unwrap();
    let both = Layout::new(7, 12, &[(Field::Port, 0), (Field::Mark, 4)]).unwrap();
    umem.write(
        UmemOffset::new(FRAME - 8),
        &[5u32.to_ne_bytes(), 7u32.to_ne_bytes()].concat(),
    )
    .unwrap();
    let other = Layout::new(8, 8, &[(Field::Port, 0)]).unwrap();
    for (layouts, expected) in [
        (vec![port(8)], Some(5)),
        (vec![port(8), other], Some(5)),
        (vec![other, port(8)], None),
        (vec![both], None),
        (vec![port(36)], None),
        (vec![], None),
    ] {
        let read = |frame| Layouts::new(&layouts).port_only(&umem, UmemOffset::new(frame));
        assert_eq!(read(FRAME), expected, "{layouts:?}");
        for outside in [0, 31, 8193, 1 << 40] {
            assert_eq!(read(outside), None, "at {outside}");
        }
    }
}

#[test]
fn what_is_no_layout_is_refused() {
    let refused = |id, len, fields: &[(Field, u8)]| Layout::new(id, len, fields).unwrap_err();
    assert_eq!(refused(0, 8, &[]), LayoutError::Id);
    for len in [0, 3, 5, 255] {
        assert_eq!(refused(1, len, &[]), LayoutError::Len(len.into()));
    }
    assert_eq!(
        refused(1, 8, &[(Field::Hash, 1)]),
        LayoutError::Field(Field::Hash)
    );
    assert_eq!(
        refused(1, 252, &[(Field::Mark, 255)]),
        LayoutError::Field(Field::Mark)
    );
    let twice = [(Field::Mark, 0), (Field::Mark, 4)];
    assert_eq!(refused(1, 16, &twice), LayoutError::Field(Field::Mark));
    assert_eq!(refused(1, 16, &[(Field::VlanTci, 0)]), LayoutError::Tag);
}

#[test]
fn layout_comes_back_from_its_bytes_and_no_bytes_break_it() {
    let layout = all_fields(0x8001_0007);
    assert_eq!(Layout::from_bytes(layout.to_bytes()), Ok(layout));
    for place in 0..13 {
        for value in 0..=255 {
            let mut bytes = layout.to_bytes();
            bytes[place] = value;
            if let Ok(layout) = Layout::from_bytes(bytes) {
                assert!(layout.len_bytes() >= 4);
                let umem = umem();
                umem.write(UmemOffset::new(FRAME - 4), &layout.id().to_ne_bytes())
                    .unwrap();
                read(&Layouts::new(&[layout]), &umem, FRAME);
            }
        }
    }
}
