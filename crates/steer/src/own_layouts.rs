//! All metadata layouts of our own programs, known before any program is loaded.
//!
//! A structure's id is its number among the types of its object file, with a *generation* in the upper half
//! (`bpf/steer_hints.h`). The generation is a hash of the layouts themselves: the same object has the same
//! one on each link and after each restart, so a reader of frames knows the layouts of all programs that may
//! follow, whatever hints they have. The object of another version, with other structures, has another
//! generation. If by chance it has the same, and its frames may be in flight, the next number is used.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::sync::OnceLock;

use libbpf_rs::AsRawLibbpf;
use libbpf_rs::btf::Btf;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use xsk::metadata::Layout;

use crate::btf::layout_of;
use crate::capture::messages_of;
use crate::hints::HintSet;
use crate::skel::bound::SteerBoundSkelBuilder;

/// The upper half of ids; its highest bit is set, see `bpf/steer_hints.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Generation(u16);

impl Generation {
    const BITS: u16 = 0x7fff;

    /// The generation for programs that replace programs with these layouts.
    pub(crate) fn after(noted: &[Layout]) -> Self {
        Self::of(own(), noted)
    }

    fn of(own: &[Layout], noted: &[Layout]) -> Self {
        // FNV-1a
        let bytes = own.iter().flat_map(Layout::to_bytes);
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let first = Self((hash ^ hash >> 15 ^ hash >> 30 ^ hash >> 45) as u16 & Self::BITS);
        let tried = (0..=Self::BITS).map(|n| Self(first.0.wrapping_add(n) & Self::BITS));
        let mut clear = tried.filter(|generation| {
            let mut layouts = own.iter().map(|&layout| generation.applied_to(layout));
            layouts.all(|own| noted.iter().all(|noted| noted.id() != own.id() || *noted == own))
        });
        clear.next().unwrap_or(first)
    }

    /// The upper half of ids.
    pub(crate) fn upper_half(self) -> u32 {
        1 << 31 | u32::from(self.0) << 16
    }

    fn applied_to(self, layout: Layout) -> Layout {
        let mut bytes = layout.to_bytes();
        let id = self.upper_half() | layout.id();
        bytes[..4].copy_from_slice(&id.to_ne_bytes());
        // Only the id differs, and it is not 0.
        Layout::from_bytes(bytes).unwrap_or(layout)
    }

    /// All layouts of programs of this generation.
    pub(crate) fn layouts(self) -> impl Iterator<Item = Layout> {
        own().iter().map(move |&layout| self.applied_to(layout))
    }
}

/// All of our layouts, without a generation.
fn own() -> &'static [Layout] {
    static OWN: OnceLock<Vec<Layout>> = OnceLock::new();
    // It fails only by a bug of ours: then no program with hints is loaded.
    OWN.get_or_init(|| read_own().unwrap_or_default())
}

fn read_own() -> Option<Vec<Layout>> {
    let mut storage = MaybeUninit::uninit();
    let (open, _) = messages_of(|| SteerBoundSkelBuilder::default().open(&mut storage));
    let open = open.ok()?;
    let object = open.open_object().as_libbpf_object();
    // SAFETY: libbpf's object lives as long as `open`, which owns it; nothing changes it meanwhile.
    let btf = Btf::from_bpf_object(unsafe { object.as_ref() }).ok()??;
    let sets = (1..=HintSet::ALL.bits()).map(HintSet::of_bits);
    let layouts = sets.map(|hints| layout_of(&btf, &hints.structure(), 0).ok());
    layouts.collect()
}

#[cfg(test)]
mod tests {
    use xsk::metadata::Field;

    use super::*;

    #[test]
    fn all_sets_have_a_layout_of_their_own() {
        assert_eq!(own().len(), 15);
        let generation = Generation::after(&[]);
        let mut ids: Vec<u32> = generation.layouts().map(|layout| layout.id()).collect();
        assert!(
            ids.iter()
                .all(|id| id >> 16 == generation.upper_half() >> 16 && id >> 31 == 1)
        );
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 15);
        for (bits, layout) in (1..).zip(own()) {
            let hints = HintSet::of_bits(bits);
            assert_eq!(HintSet::of_bits(layout.fields()), hints, "{hints}");
            assert!(layout.has(Field::Port), "{hints}");
        }
    }

    #[test]
    fn no_id_means_two_things() {
        let first = Generation::after(&[]);
        let same: Vec<Layout> = first.layouts().collect();
        assert_eq!(
            Generation::after(&same),
            first,
            "what is the same may have the same id"
        );
        let other = Layout::new(same[3].id(), 8, &[(Field::Mark, 0)]).expect("inside");
        let second = Generation::after(&[same[0], other]);
        assert_ne!(second, first);
        assert!(second.layouts().all(|layout| layout.id() != other.id()));
    }
}
