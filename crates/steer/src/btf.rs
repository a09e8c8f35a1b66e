//! The layout of what a program leaves before frames, read from the types that it carries (BTF).
//!
//! A structure that names itself as our own do (`bpf/steer_hints.h`): its last four bytes are called `id`, or `btf_id`,
//! and hold its number among the program's types (`bpf_core_type_id_local`), for ours below a generation. Other fields
//! count by their names ([`Field::name`]); what has another name, or another size, means nothing to us, nor do
//! bit-fields.
//!
//! The kernel has checked the types of a program that it has: numbers of types and offsets of names lie inside, and no
//! type is made of itself. It does not keep them short, so each is looked at once, for a bounded time ([`DEEPEST`]).

#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;

use libbpf_rs::MapInfo;
use libbpf_rs::btf::types::{Enum, Int, MemberAttr, Struct};
use libbpf_rs::btf::{Btf, BtfKind, BtfType, HasSize};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use xsk::metadata::{Field, Layout, LayoutError};

use crate::capture::messages_of;

/// Most typedefs and qualifiers before the type of a field; compilers make a few.
const DEEPEST: usize = 32;

/// Why there is no layout of that structure.
///
/// `structure` is its name, as given; `program` the kernel's id of the program.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum LayoutOfError {
    /// The program, or its types, cannot be read: it is gone, has none, or this process has no privilege for it
    /// (CAP_SYS_ADMIN).
    #[error("cannot read the types (BTF) of program {program}")]
    Types {
        program: u32,
        #[source]
        source: libbpf_rs::Error,
    },
    /// No program of this machine that this process may look at (CAP_SYS_ADMIN) uses the map and has this structure.
    #[error("no program that uses the map has a `struct {structure}` in its types (BTF)")]
    Owner { structure: String },
    /// No such structure.
    #[error("the program's types (BTF) have no `struct {structure}`")]
    Missing { structure: String },
    /// The structure does not name itself.
    #[error("`struct {structure}` does not end with four bytes called `id` or `btf_id`")]
    Nameless { structure: String },
    /// The structure is no metadata.
    #[error("`struct {structure}` cannot stand before frames")]
    Unfit {
        structure: String,
        #[source]
        source: LayoutError,
    },
    /// The kernel gives no information about the map.
    #[error("cannot ask the kernel about the BPF map")]
    Map(#[source] libbpf_rs::Error),
}

/// The layout of a structure that a foreign program leaves before frames. Its id is the number of the type in that
/// program's BTF.
///
/// # Errors
/// [`LayoutOfError`]; needs CAP_SYS_ADMIN.
pub fn layout_of_program(program: u32, structure: &str) -> Result<Layout, LayoutOfError> {
    let (btf, _) = messages_of(|| Btf::from_prog_id(program));
    let btf = btf.map_err(|source| LayoutOfError::Types { program, source })?;
    layout_of(&btf, structure, 0)
}

/// The same of a program that uses this map: redirects into it, if it is an XSKMAP.
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
            // It has the structure, and it is not usable: that is the better answer.
            error => result = error,
        }
    }
    result
}

/// The layout of `structure`, whose id is its number below `generation`.
pub(crate) fn layout_of(btf: &Btf<'_>, structure: &str, generation: u32) -> Result<Layout, LayoutOfError> {
    let named = || structure.to_owned();
    // By its kind, too: a typedef, or what was declared before, may have the same name.
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
        // C knows no second one.
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

/// Offset of the bytes that are read of a field; some may be wider than what is read, an enum for example.
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

/// The byte that begins at this bit; `None`: none does, as in a bit-field of older types, or it is too far.
fn byte_of(bits: u32) -> Option<u8> {
    bits.is_multiple_of(8).then(|| u8::try_from(bits / 8).ok())?
}

/// Bytes of a number or an enum, all of which it has.
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
