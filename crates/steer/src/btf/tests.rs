//! Tests with types written byte by byte (`Documentation/bpf/btf.rst`): reading them never panics and takes a bounded
//! time, and the offsets of the layout are those of the types.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

use rustix::fs::{MemfdFlags, memfd_create};

use super::*;

const INT: u32 = 1;
const POINTER: u32 = 2;
const STRUCT: u32 = 4;
const UNION: u32 = 5;
const ENUM: u32 = 6;
const FORWARD: u32 = 7;
const TYPEDEF: u32 = 8;
const CONST: u32 = 10;
/// Of a structure: offsets of members have the length of a bit-field in their highest byte.
const HAS_BIT_FIELDS: u32 = 1 << 31;

/// Types of a program, numbered from 1.
struct Types {
    types: Vec<u8>,
    strings: Vec<u8>,
    count: u32,
}

struct Member<'a> {
    name: &'a str,
    ty: u32,
    bits: u32,
}

impl Types {
    fn new() -> Self {
        Self {
            types: Vec::new(),
            strings: vec![0],
            count: 0,
        }
    }

    fn put(&mut self, word: u32) {
        self.types.extend(word.to_ne_bytes());
    }

    fn text(&mut self, text: &str) -> u32 {
        let at = self.strings.len() as u32;
        self.strings.extend(text.as_bytes());
        self.strings.push(0);
        if text.is_empty() { 0 } else { at }
    }

    /// Adds a type; returns its number. `flags`: those besides the kind, and the number of members.
    fn of_kind(&mut self, kind: u32, name: &str, flags: u32, size_or_type: u32) -> u32 {
        let name = self.text(name);
        [name, kind << 24 | flags, size_or_type]
            .into_iter()
            .for_each(|word| self.put(word));
        self.count += 1;
        self.count
    }

    fn int(&mut self, bytes: u32, bits: u32) -> u32 {
        let ty = self.of_kind(INT, "number", 0, bytes);
        self.put(bits);
        ty
    }

    fn structure(
        &mut self,
        kind: u32,
        name: &str,
        bytes: u32,
        (flags, members): (u32, &[Member<'_>]),
    ) -> u32 {
        let ty = self.of_kind(kind, name, flags | members.len() as u32, bytes);
        for member in members {
            let name = self.text(member.name);
            [name, member.ty, member.bits]
                .into_iter()
                .for_each(|word| self.put(word));
        }
        ty
    }

    /// The types as read from the kernel; `None`: libbpf rejects them.
    fn read(&self) -> Option<Btf<'static>> {
        let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
        let magic_and_version = [0xeb9f_u16.to_ne_bytes(), [1, 0]].concat();
        let places = [24, 0, types, types, strings].map(u32::to_ne_bytes).concat();
        read(
            &[
                magic_and_version,
                places,
                self.types.clone(),
                self.strings.clone(),
            ]
            .concat(),
        )
    }
}

fn read(bytes: &[u8]) -> Option<Btf<'static>> {
    let mut file = File::from(memfd_create("types", MemfdFlags::CLOEXEC).expect("memory"));
    file.write_all(bytes).expect("memory");
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    messages_of(|| Btf::from_path(path)).0.ok()
}

/// A structure of a hash and its name.
fn usual(types: &mut Types, name: &str, number: u32) -> u32 {
    let member = |name, bits| Member {
        name,
        ty: number,
        bits,
    };
    let members = [member("rx_hash", 0), member("flow_mark", 32), member("id", 64)];
    types.structure(STRUCT, name, 12, (0, &members))
}

#[test]
fn what_else_has_the_name_hides_no_structure() {
    let mut types = Types::new();
    let number = types.int(4, 32);
    types.of_kind(FORWARD, "hints", 0, 0);
    types.of_kind(TYPEDEF, "hints", 0, number + 4);
    types.structure(UNION, "hints", 4, (0, &[]));
    let its = usual(&mut types, "hints", number);
    usual(&mut types, "hints", number);
    let layout = layout_of(&types.read().expect("types"), "hints", 0).expect("it is there");
    assert_eq!((layout.id(), layout.len_bytes()), (its, 12));
    assert_eq!(layout.offset(Field::Mark), Some(4));
}

#[test]
fn bit_fields_are_no_fields() {
    let mut types = Types::new();
    let [number, short] = [types.int(4, 32), types.int(4, 5)];
    let member = |name, ty, bits| Member { name, ty, bits };
    let id = || member("id", number, 64);
    let cases = [
        (
            0,
            [
                member("rx_hash", number, 4),
                member("flow_mark", number, 32),
                id(),
            ],
        ),
        (
            0,
            [member("rx_hash", short, 0), member("flow_mark", number, 32), id()],
        ),
        (
            HAS_BIT_FIELDS,
            [
                member("rx_hash", number, 5 << 24),
                member("flow_mark", number, 32),
                id(),
            ],
        ),
    ];
    for (at, (flags, members)) in cases.into_iter().enumerate() {
        types.structure(STRUCT, &format!("hints{at}"), 12, (flags, &members));
    }
    let btf = types.read().expect("types");
    for at in 0..3 {
        let layout = layout_of(&btf, &format!("hints{at}"), 0).expect("it has a name");
        assert!(!layout.has(Field::Hash) && layout.has(Field::Mark), "hints{at}");
    }
    // As the name is found by.
    types.structure(STRUCT, "nameless", 12, (0, &[member("id", number, 65)]));
    let nameless = layout_of(&types.read().expect("types"), "nameless", 0);
    assert!(
        matches!(nameless, Err(LayoutOfError::Nameless { .. })),
        "{nameless:?}"
    );
}

#[test]
fn names_of_names_without_end_are_given_up() {
    let mut types = Types::new();
    let number = types.int(4, 32);
    let mut ty = number;
    for _ in 0..100_000 {
        ty = types.of_kind(CONST, "", 0, ty);
    }
    // As many members as a structure can have, all of which would be looked at.
    let member = |name, ty, bits| Member { name, ty, bits };
    let mut members: Vec<Member<'_>> = (0..65_532).map(|_| member("rx_hash", ty, 0)).collect();
    members.extend((0..2).map(|_| member("id", ty, 0)));
    members.push(member("id", number, 32));
    types.structure(STRUCT, "hints", 8, (0, &members));
    let layout = layout_of(&types.read().expect("types"), "hints", 0).expect("it has a name");
    assert!(!layout.has(Field::Hash));
}

#[test]
fn type_that_is_made_of_itself_is_given_up() {
    let mut types = Types::new();
    types.of_kind(TYPEDEF, "one", 0, 2);
    types.of_kind(CONST, "", 0, 1);
    usual(&mut types, "hints", 1);
    // The kernel has none such; whether libbpf refuses it depends on its version.
    if let Some(btf) = types.read() {
        let layout = layout_of(&btf, "hints", 0);
        assert!(
            matches!(layout, Err(LayoutOfError::Nameless { .. })),
            "{layout:?}"
        );
    }
}

/// Numbers that are the same each time (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, most: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32 % most
    }

    fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u32) as usize]
    }
}

/// A structure of any members, among types of any kind.
fn any_types(numbers: &mut Numbers) -> (Types, Vec<(String, u32, u32)>) {
    let mut types = Types::new();
    for bytes in [1, 2, 4, 8] {
        types.int(bytes, bytes * 8);
    }
    types.int(4, 3);
    types.of_kind(ENUM, "kinds", 0, 4);
    types.of_kind(ENUM, "small", 0, 2);
    for _ in 0..8 {
        let kind = numbers.one_of(&[TYPEDEF, CONST, POINTER]);
        let name = if kind == TYPEDEF { "other" } else { "" };
        let of = numbers.below(types.count + 4);
        types.of_kind(kind, name, 0, of);
    }
    let names = Field::ALL.map(Field::name);
    let mut members: Vec<(String, u32, u32)> = (0..numbers.below(12))
        .map(|_| {
            let name = match numbers.below(8) {
                0 => ["id", "btf_id", "", "ä", "other"][numbers.below(5) as usize],
                _ => numbers.one_of(&names),
            };
            let bits = match numbers.below(8) {
                0 => numbers.below(u32::MAX),
                1 => numbers.below(2048),
                _ => 8 * numbers.below(40),
            };
            (name.to_owned(), 1 + numbers.below(17), bits)
        })
        .collect();
    let bytes = numbers.one_of(&[0, 3, 4, 8, 12, 16, 24, 32, 64, 251, 252, 256, u32::MAX]);
    if numbers.below(4) != 0 {
        members.push(("id".to_owned(), 3, bytes.wrapping_sub(4).wrapping_mul(8)));
    }
    let said: Vec<Member<'_>> = members
        .iter()
        .map(|(name, ty, bits)| Member {
            name,
            ty: *ty,
            bits: *bits,
        })
        .collect();
    let flags = numbers.one_of(&[0, 0, HAS_BIT_FIELDS]);
    types.structure(STRUCT, "hints", bytes, (flags, &said));
    (types, members)
}

#[test]
fn layout_of_any_types_is_what_they_say() {
    let (mut numbers, mut laid_out) = (Numbers(0x9e37_79b9_7f4a_7c15), 0);
    for _ in 0..20_000 {
        let (types, members) = any_types(&mut numbers);
        let Some(btf) = types.read() else { continue };
        let Ok(layout) = layout_of(&btf, "hints", 1 << 31) else {
            continue;
        };
        laid_out += 1;
        assert_eq!(layout.id() >> 31, 1);
        let of = |name: &str, at: u8| {
            let is_it = |(its, _, bits): &(String, u32, u32)| its == name && *bits == u32::from(at) * 8;
            members.iter().any(is_it)
        };
        assert!(of("id", layout.len_bytes() - 4) || of("btf_id", layout.len_bytes() - 4));
        for field in Field::ALL {
            if let Some(at) = layout.offset(field) {
                // The lower bytes of one that is wider.
                let wider = if cfg!(target_endian = "big") { 2 } else { 0 };
                assert!(
                    of(field.name(), at) || (at >= wider && of(field.name(), at - wider)),
                    "{field:?}"
                );
                assert!(at + field.len_bytes() <= layout.len_bytes() - 4);
            }
        }
    }
    assert!(laid_out > 100, "{laid_out} layouts");
}

#[test]
fn bytes_that_are_changed_or_cut_are_types_or_none() {
    let mut numbers = Numbers(0x2545_f491_4f6c_dd1d);
    for _ in 0..20_000 {
        let (mut types, _) = any_types(&mut numbers);
        for _ in 0..1 + numbers.below(4) {
            let at = numbers.below(types.types.len() as u32) as usize;
            types.types[at] = numbers.below(256) as u8;
        }
        if numbers.below(8) == 0 {
            let len = numbers.below(types.types.len() as u32) as usize;
            types.types.truncate(len);
        }
        if let Some(btf) = types.read() {
            let _ = layout_of(&btf, "hints", 0);
        }
    }
}
