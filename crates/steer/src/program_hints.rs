//! Hints: replaces a program by another on the same link, without losing a frame, and tracks what each writes
//! before frames.
//!
//! # Theory of operation
//!
//! A plain program sees only a frame's bytes. One that is *bound* to the interface can query its driver, and is
//! loaded for one set of hints (`bpf/steer_hints.h`). `BPF_LINK_UPDATE` replaces the program on the link: the new
//! one is loaded with the maps of the old one, so queues, sockets, filters, stations and counters continue, and
//! the driver switches between two frames (`bpf_xdp_link_update`, net/core/dev.c). A program keeps only two things
//! for itself: when the next multicast frame may be copied, and the constants for its hints.
//!
//! Frames of the old program may still be in flight, in the driver and in the rings of sockets. Each has the id of its
//! layout, which is unique on the link (`own_layouts.rs`). So a reader of frames knows several layouts: those of
//! earlier programs (`notes.rs`), and those of all possible later ones ([`Program::all_layouts`]). A program of another
//! version has other layouts: a frame of it that arrives before its reader gets them is treated as one without hints.

use std::io;
use std::os::fd::AsFd;

use xsk::metadata::Layout;

use crate::btf::LayoutOfError;
use crate::capture::messages_of;
use crate::hints::HintSet;
use crate::load::{self, BoundError, Loaded, MARKS};
use crate::marks::InterfaceMarks;
use crate::mode::Mode;
use crate::notes::{Note, Turn, each_once};
use crate::own_layouts::Generation;
use crate::program::Program;
use crate::tunnel::Tunnels;

/// Why the hints could not be changed. The attached program stays.
///
/// `source` is the error of libbpf or the kernel.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum HintsError {
    /// Bound programs need native mode.
    #[error("hints take native mode, and the program is in {mode} mode")]
    Mode { mode: Mode },
    /// The kernel lacks the functions.
    #[error(
        "this kernel has no {missing} for XDP programs (Linux 6.3, for vlan 6.8, with CONFIG_DEBUG_INFO_BTF)"
    )]
    Kernel { missing: HintSet },
    /// The program cannot be loaded.
    #[error("cannot load the XDP program for {hints}: {}", last_line(.detail))]
    Load {
        hints: HintSet,
        /// libbpf's messages, the verifier's log among them; may be empty.
        detail: String,
        #[source]
        source: libbpf_rs::Error,
    },
    /// The program's types are not the expected ones: a bug of this crate.
    #[error("cannot determine the layout of the XDP program's metadata")]
    Layout(#[source] LayoutOfError),
    /// A map for hints cannot be created, pinned or written.
    #[error("cannot create or update the maps for hints")]
    Map(#[source] libbpf_rs::Error),
    /// The link does not accept the program.
    #[error("cannot replace the attached XDP program by the one for {hints}")]
    Replace {
        hints: HintSet,
        #[source]
        source: io::Error,
    },
}

fn last_line(detail: &str) -> &str {
    let mut lines = detail.lines().rev().map(str::trim);
    lines
        .find(|line| !line.is_empty())
        .unwrap_or("libbpf says nothing")
}

/// Hints, and the marks of flows.
impl Program {
    /// The hints that the program writes before frames of queues with hints
    /// ([`QueueConf::hints`](crate::QueueConf::hints)).
    pub fn hints(&self) -> HintSet {
        self.now.get().hints
    }

    /// From now on the program writes these hints: it is replaced by another one with the same maps, and no frame
    /// is lost. Does nothing if it writes them already. [`Program::id`] and [`Program::layouts`] change.
    ///
    /// Hints that the driver lacks ([`HintSet::of_driver`]) cost a call each and are absent in every frame:
    /// omit them.
    ///
    /// # Errors
    /// [`HintsError`]; the attached program stays.
    pub fn set_hints(&self, hints: HintSet) -> Result<(), HintsError> {
        let mut now = self.now.lock();
        if now.hints == hints {
            return Ok(());
        }
        let (mode, missing) = (self.mode(), hints.without(HintSet::of_kernel()));
        if !hints.is_empty() && mode != Mode::Native {
            return Err(HintsError::Mode { mode });
        }
        if !missing.is_empty() {
            return Err(HintsError::Kernel { missing });
        }
        let (loaded, layout) = self.load_after(&now, hints)?;
        let note = Note {
            program: loaded.id,
            turn: now.turn.next(),
            frags: now.frags,
            hints,
            layout,
        };
        // The record first, so that the next owner of the link finds it whenever this process dies.
        self.notes.add(&note).map_err(HintsError::Map)?;
        self.attached
            .replace(loaded.program.as_fd())
            .map_err(|source| HintsError::Replace { hints, source })?;
        *now = note;
        Ok(())
    }

    /// The metadata layouts of frames of queues with hints: those of the present and earlier programs, the
    /// latest first. In a network's queue, also [`note_layout`](crate::note_layout).
    pub fn layouts(&self) -> Vec<Layout> {
        self.notes.layouts(self.now.get().turn)
    }

    /// As [`Program::layouts`], and those of all programs that [`Program::set_hints`] may load later: so a reader of
    /// frames knows them in advance. Only a take-over from another version ([`Program::open_pinned`]) changes them.
    pub fn all_layouts(&self) -> Vec<Layout> {
        let turn = self.now.get().turn;
        let noted = self.notes.layouts(turn);
        each_once(noted.into_iter().chain(self.generation(turn).layouts()))
    }

    /// The generation of later programs. It avoids the ids of layouts recorded before.
    fn generation(&self, turn: Turn) -> Generation {
        let after = || Generation::after(&self.notes.layouts(turn));
        *self.generation.get_or_init(after)
    }

    /// The map of marks, created if there is none.
    fn marks(&self) -> libbpf_rs::Result<&InterfaceMarks> {
        if let Some(marks) = self.marks.get() {
            return Ok(marks);
        }
        let mut marks = InterfaceMarks::new()?;
        if let Some(dir) = &self.dir {
            let (pinned, _) = messages_of(|| marks.0.pin(dir.join(InterfaceMarks::SHAPE.name)));
            pinned?;
        }
        // If two threads create one at the same time, the unused one is dropped; pinning refuses the second.
        Ok(self.marks.get_or_init(|| marks))
    }

    /// Loads the program that writes these hints, with the maps of the attached one.
    fn load_after(&self, now: &Note, hints: HintSet) -> Result<(Loaded, Option<Layout>), HintsError> {
        let mut reused = vec![
            ("steer_queues", self.queues.as_fd()),
            ("steer_sockets", self.sockets.as_fd()),
            ("steer_entries", self.entries.as_fd()),
            ("steer_counts", self.counts.as_fd()),
            ("steer_stations", self.networks.stations.as_fd()),
            ("steer_rings", self.networks.rings.as_fd()),
            ("steer_limits", self.networks.limits.as_fd()),
            ("steer_own", self.own.as_fd()),
        ];
        let tunnels = self.networks.tunnels.as_ref();
        reused.extend(tunnels.into_iter().flat_map(
            |Tunnels {
                 tunnels,
                 vteps,
                 inner,
             }| {
                [
                    ("steer_tunnels", tunnels.as_fd()),
                    ("steer_vteps", vteps.as_fd()),
                    ("steer_inner", inner.as_fd()),
                ]
            },
        ));
        if hints.has(HintSet::MARK) {
            let marks = self.marks().map_err(HintsError::Map)?;
            reused.push((MARKS, marks.0.as_fd()));
        }
        let (loaded, detail) = messages_of(|| match hints.is_empty() {
            true => load::plain(now.frags, &reused)
                .map(|(loaded, _)| (loaded, None))
                .map_err(BoundError::Load),
            false => {
                let generation = self.generation(now.turn);
                let (ifindex, half) = (self.now.ifindex, generation.upper_half());
                let (loaded, layout) = load::bound(now.frags, ifindex, hints, half, &reused)?;
                // Otherwise its readers would not know the layout.
                if !generation.layouts().any(|own| own == layout) {
                    let structure = hints.structure();
                    return Err(BoundError::Layout(LayoutOfError::Missing { structure }));
                }
                Ok((loaded, Some(layout)))
            }
        });
        loaded.map_err(|error| match error {
            BoundError::Load(source) => HintsError::Load {
                hints,
                detail,
                source,
            },
            BoundError::Layout(source) => HintsError::Layout(source),
        })
    }
}
