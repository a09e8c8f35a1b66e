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

use std::os::fd::AsFd;

use anyhow::{Context as _, ensure};
use xsk::metadata::Layout;

use crate::capture::messages_of;
use crate::hints::HintSet;
use crate::load::{self, Loaded, MARKS};
use crate::marks::InterfaceMarks;
use crate::mode::Mode;
use crate::notes::{Note, Turn, each_once};
use crate::own_layouts::Generation;
use crate::program::Program;

/// The text before an error of creating, pinning or writing a map for hints.
const MAPS: &str = "cannot create or update the maps for hints";

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
    /// The program is in another mode than native, which bound programs need; the kernel lacks the functions
    /// ([`HintSet::of_kernel`]); or it refuses the program or a map. The attached program stays.
    pub fn set_hints(&self, hints: HintSet) -> anyhow::Result<()> {
        let mut now = self.now.lock();
        if now.hints == hints {
            return Ok(());
        }
        let (mode, missing) = (self.mode(), hints.without(HintSet::of_kernel()));
        ensure!(
            hints.is_empty() || mode == Mode::Native,
            "hints take native mode, and the program is in {mode} mode"
        );
        ensure!(
            missing.is_empty(),
            "this kernel has no {missing} for XDP programs (Linux 6.3, for vlan 6.8, with CONFIG_DEBUG_INFO_BTF)"
        );
        let (loaded, layout) = self.load_after(&now, hints)?;
        let note = Note {
            program: loaded.id,
            turn: now.turn.next(),
            frags: now.frags,
            hints,
            layout,
        };
        // The record first, so that the next owner of the link finds it whenever this process dies.
        self.notes.add(&note).context(MAPS)?;
        self.attached
            .replace(loaded.program.as_fd())
            .with_context(|| format!("cannot replace the attached XDP program by the one for {hints}"))?;
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
    fn load_after(&self, now: &Note, hints: HintSet) -> anyhow::Result<(Loaded, Option<Layout>)> {
        let maps = self.maps.all().into_iter();
        let mut reused: Vec<_> = maps
            .map(|(shape, map)| (shape.name_of_map(), map.as_fd()))
            .collect();
        if hints.has(HintSet::MARK) {
            let marks = self.marks().context(MAPS)?;
            reused.push((MARKS.to_owned(), marks.0.as_fd()));
        }
        let (loaded, detail) = messages_of(|| match hints.is_empty() {
            true => Ok((load::plain(now.frags, &reused)?.0, None)),
            false => {
                let generation = self.generation(now.turn);
                let (ifindex, half) = (self.now.ifindex, generation.upper_half());
                let (loaded, layout) = load::bound(now.frags, ifindex, hints, half, &reused)?;
                // Otherwise its readers would not know the layout: a bug of this crate.
                ensure!(
                    generation.layouts().any(|own| own == layout),
                    "its layout is unknown"
                );
                Ok((loaded, Some(layout)))
            }
        });
        loaded.with_context(|| format!("cannot load the XDP program for {hints}: {}", last_line(&detail)))
    }
}
