//! The layout of a program's metadata before frames, read from the program's types (BTF).
//!
//! A structure with an id, like our own (`bpf/steer_hints.h`): its last four bytes are called `id` or
//! `btf_id`, and contain its number among the program's types (`bpf_core_type_id_local`), in our own with a
//! generation in the upper half. Other fields are found by their names ([`Field::name`]); fields with another
//! name or size, and bit-fields, are ignored.
//!
//! The kernel has checked the types of a loaded program: type numbers and name offsets are in range, and no type
//! contains itself. But it does not limit chains of types, so each is followed only once and only so far ([`DEEPEST`]).

#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;

use libbpf_rs::MapInfo;
use libbpf_rs::btf::types::{Enum, Int, MemberAttr, Struct};
use libbpf_rs::btf::{Btf, BtfKind, BtfType, HasSize};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use xsk::metadata::{Field, Layout, LayoutError};

use crate::capture::messages_of;

/// Maximum number of typedefs and qualifiers before the type of a field; compilers generate a few.
const DEEPEST: usize = 32;

/// Why the layout of a structure cannot be read.
///
/// `structure` is its name, as given; `program` the kernel's id of the program.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum LayoutOfError {
    /// The program, or its types, cannot be read: it is gone, has no types, or this process lacks
    /// CAP_SYS_ADMIN.
    #[error("cannot read the types (BTF) of program {program}")]
    Types {
        program: u32,
        #[source]
        source: libbpf_rs::Error,
    },
    /// No program that this process can query (with CAP_SYS_ADMIN) uses the map and has this structure.
    #[error("no program that uses the map has a `struct {structure}` in its types (BTF)")]
    Owner { structure: String },
    /// The program has no such structure.
    #[error("the program's types (BTF) have no `struct {structure}`")]
    Missing { structure: String },
    /// The structure does not end with its id.
    #[error("`struct {structure}` does not end with four bytes called `id` or `btf_id`")]
    Nameless { structure: String },
    /// The structure cannot be metadata.
    #[error("`struct {structure}` cannot be metadata before frames")]
    Unfit {
        structure: String,
        #[source]
        source: LayoutError,
    },
    /// The kernel returns no information about the map.
    #[error("cannot query the BPF map")]
    Map(#[source] libbpf_rs::Error),
}

/// The layout of a structure that a foreign program writes before frames. Its id is the number of the type in
/// that program's BTF.
///
/// # Errors
/// [`LayoutOfError`]; needs CAP_SYS_ADMIN.
pub fn layout_of_program(program: u32, structure: &str) -> Result<Layout, LayoutOfError> {
    let (btf, _) = messages_of(|| Btf::from_prog_id(program));
    let btf = btf.map_err(|source| LayoutOfError::Types { program, source })?;
    layout_of(&btf, structure, 0)
}

/// As [`layout_of_program`], for a program that uses this map; for an XSKMAP, one that redirects into it.
///
/// # Errors
/// [`LayoutOfError`]; needs CAP_SYS_ADMIN.
pub fn layout_of_map(map: BorrowedFd<'_>, structure: &str) -> Result<Layout, LayoutOfError> {
    let info = MapInfo::new(map).map_err(LayoutOfError::Map)?;
    let options = ProgInfoQueryOptions::default().include_map_ids(true);
    let (programs, _) = messages_of(|| {
        let users = ProgInfoIter::with_query_opts(options);
        let users = users.filter(|program| program.map_ids.contains(&info.info.id));
        users.map(|program| program.id).collect::<Vec<u32>>()
    });
    let mut result = Err(LayoutOfError::Owner {
        structure: structure.to_owned(),
    });
    for program in programs {
        match layout_of_program(program, structure) {
            Ok(layout) => return Ok(layout),
            Err(LayoutOfError::Types { .. } | LayoutOfError::Missing { .. }) => {}
            // The program has the structure, but it is not usable: this error is more helpful than `Owner`.
            error => result = error,
        }
    }
    result
}

/// The layout of `structure`, whose id is its type number combined with `generation`.
pub(crate) fn layout_of(btf: &Btf<'_>, structure: &str, generation: u32) -> Result<Layout, LayoutOfError> {
    let named = || structure.to_owned();
    // Only structures: a typedef or a forward declaration may have the same name.
    let mut structures = btf.type_by_kind::<Struct<'_>>();
    let found = structures.find(|found| found.name().is_some_and(|name| name == structure));
    let found = found.ok_or_else(|| LayoutOfError::Missing { structure: named() })?;
    let unfit = |source| LayoutOfError::Unfit {
        structure: named(),
        source,
    };
    let size = found.size();
    let len =
        u8::try_from(size).map_err(|_| unfit(LayoutError::Len(u32::try_from(size).unwrap_or(u32::MAX))))?;
    let (mut fields, mut id_at) = (Vec::new(), None);
    for member in found.iter() {
        let MemberAttr::Normal { offset } = member.attr else {
            continue;
        };
        let Some(name) = member.name.and_then(|name| name.to_str()) else {
            continue;
        };
        let field = Field::ALL.into_iter().find(|field| field.name() == name);
        let is_id = matches!(name, "id" | "btf_id");
        // Ignores a repeated name, which C does not allow.
        if !is_id && field.is_none_or(|field| fields.iter().any(|&(known, _)| known == field)) {
            continue;
        }
        let member_size = btf.type_by_id::<BtfType<'_>>(member.ty).and_then(size_of_type);
        let (Some(member_size), Some(offset)) = (member_size, byte_of(offset)) else {
            continue;
        };
        if is_id && member_size == 4 {
            id_at = Some(usize::from(offset));
        }
        if let Some(field) = field {
            fields.extend(lower_bytes(field, offset, member_size).map(|offset| (field, offset)));
        }
    }
    if size < 4 || id_at != Some(size - 4) {
        return Err(LayoutOfError::Nameless { structure: named() });
    }
    Layout::new(generation | u32::from(found.type_id()), len, &fields).map_err(unfit)
}

/// Offset of the bytes that are read of a field. Some fields may be wider than that, an enum for example.
fn lower_bytes(field: Field, offset: u8, size: u8) -> Option<u8> {
    let read = field.len_bytes();
    let may_be_wider = matches!(field, Field::HashType | Field::Absent);
    if size != read && !(may_be_wider && size == 4) {
        return None;
    }
    match cfg!(target_endian = "big") {
        true => offset.checked_add(size - read),
        false => Some(offset),
    }
}

/// The byte that begins at this bit; `None`: not at a byte boundary, as a bit-field in older BTF, or too far.
fn byte_of(bits: u32) -> Option<u8> {
    bits.is_multiple_of(8).then(|| u8::try_from(bits / 8).ok())?
}

/// Size of an integer without unused bits, or of an enum, bytes.
fn size_of_type(ty: BtfType<'_>) -> Option<u8> {
    let is_other_name = |ty: &BtfType<'_>| ty.is_mod() || ty.kind() == BtfKind::Typedef;
    let mut types = std::iter::successors(Some(ty), BtfType::next_type).take(DEEPEST);
    let ty = types.find(|ty| !is_other_name(ty))?;
    let size = match (Int::try_from(ty), Enum::try_from(ty)) {
        (Ok(int), _) if usize::from(int.bits) != 8 * int.size() || int.offset != 0 => return None,
        (Ok(int), _) => int.size(),
        (_, Ok(kinds)) => kinds.size(),
        _ => return None,
    };
    u8::try_from(size).ok()
}
