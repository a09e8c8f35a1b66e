//! Loads the programs, plain ones and those bound to an interface, with their own maps or with those of the
//! program that they will replace.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::Context as _;
use libbpf_rs::btf::Btf;
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use libbpf_rs::{MapCore as _, MapHandle, OpenObject};
use xsk::metadata::Layout;

use crate::btf::layout_of;
use crate::hints::HintSet;
use crate::maps::Maps;
use crate::skel::SteerSkelBuilder;
use crate::skel::bound::SteerBoundSkelBuilder;

/// Maps of a program that its replacement reuses, by their names in `bpf/`.
pub(crate) type Reused<'a> = &'a [(String, BorrowedFd<'a>)];

/// Name of the map of marks in `bpf/`.
pub(crate) const MARKS: &str = "steer_marks";

/// `BPF_F_XDP_DEV_BOUND_ONLY` (include/uapi/linux/bpf.h)
const DEV_BOUND_ONLY: u32 = 1 << 6;

/// A loaded program and its kernel id.
pub(crate) struct Loaded {
    pub(crate) program: OwnedFd,
    pub(crate) id: u32,
}

impl Loaded {
    fn new(program: BorrowedFd<'_>) -> libbpf_rs::Result<Self> {
        let program = program.try_clone_to_owned()?;
        Ok(Self {
            id: libbpf_rs::Program::id_from_fd(program.as_fd())?,
            program,
        })
    }
}

/// Loads a plain program.
pub(crate) fn plain(frags: bool, reused: Reused<'_>) -> libbpf_rs::Result<(Loaded, Maps)> {
    let mut storage = MaybeUninit::uninit();
    let mut open = SteerSkelBuilder::default().open(&mut storage)?;
    open.progs.steer.set_autoload(!frags);
    open.progs.steer_frags.set_autoload(frags);
    reuse(open.open_object_mut(), reused)?;
    let skel = open.load()?;
    let program = match frags {
        true => skel.progs.steer_frags.as_fd(),
        false => skel.progs.steer.as_fd(),
    };
    let maps = Maps::each(|shape| {
        let mut maps = skel.object().maps();
        let found = maps.find(|map| map.name() == shape.name_of_map().as_str());
        MapHandle::try_from(&found.ok_or_else(|| std::io::Error::other("no such map"))?)
    })?;
    Ok((Loaded::new(program)?, maps))
}

/// Loads a program that is bound to the interface and writes these hints, at least one; `generation` is the
/// upper half of its ids, with a zero lower half. `reused` must have all maps of a plain program.
pub(crate) fn bound(
    frags: bool,
    ifindex: u32,
    hints: HintSet,
    generation: u32,
    reused: Reused<'_>,
) -> anyhow::Result<(Loaded, Layout)> {
    let mut storage = MaybeUninit::uninit();
    let mut open = SteerBoundSkelBuilder::default().open(&mut storage)?;
    open.progs.steer_bound.set_autoload(!frags);
    open.progs.steer_bound_frags.set_autoload(frags);
    let program = match frags {
        true => &mut open.progs.steer_bound_frags,
        false => &mut open.progs.steer_bound,
    };
    program.set_ifindex(ifindex);
    program.set_flags(DEV_BOUND_ONLY);
    let constants = open.maps.rodata_data.as_deref_mut().context("no .rodata")?;
    constants.steer_asked = hints.bits().into();
    constants.steer_generation = generation;
    reuse(open.open_object_mut(), reused)?;
    let skel = open.load()?;
    let program = match frags {
        true => skel.progs.steer_bound_frags.as_fd(),
        false => skel.progs.steer_bound.as_fd(),
    };
    let loaded = Loaded::new(program)?;
    let btf: Option<Btf<'_>> = skel.object().btf()?;
    let layout = layout_of(&btf.context("no types (BTF)")?, &hints.structure(), generation)?;
    Ok((loaded, layout))
}

/// Makes the object use these maps. The map of marks is not created if it is not among them.
fn reuse(object: &mut OpenObject, reused: Reused<'_>) -> libbpf_rs::Result<()> {
    for mut map in object.maps_mut() {
        match reused.iter().find(|(name, _)| map.name() == name.as_str()) {
            Some(&(_, fd)) => map.reuse_fd(fd)?,
            None if map.name() == MARKS => map.set_autocreate(false)?,
            None => {}
        }
    }
    Ok(())
}
