//! Hints: one program in the place of another on the same link, without a frame lost, and what each leaves before
//! frames.
//!
//! # Theory of operation
//!
//! A plain program knows nothing of a frame but its bytes. One that is *bound* to the interface can ask its driver, and
//! is loaded for one set of hints (`bpf/steer_hints.h`). Which of them is on the link changes by `BPF_LINK_UPDATE`: the
//! new program is loaded with the maps of the old one, so queues, sockets, filters, stations and counters go on, and
//! the driver takes it between two frames (`bpf_xdp_link_update`, net/core/dev.c). Two things a program keeps for
//! itself: when the next frame to a group is due, and the constants that say what it leaves.
//!
//! Frames of the old program may be under way still, in the driver and in the rings of sockets. Each names its own
//! layout by an id that means nothing else on the link (`own_layouts.rs`). So who reads frames knows several: those of
//! the programs that were (`notes.rs`), and those of all that may be ([`Program::all_layouts`]). A program of another
//! version has others: a frame of it may come before its reader has learned of them, and is then one without hints.

use std::io;
use std::os::fd::AsFd;

use xsk::metadata::Layout;

use crate::btf::LayoutOfError;
use crate::capture::messages_of;
use crate::hints::HintSet;
use crate::load::{self, BoundError, Loaded, MARKS};
use crate::marks::{Flow, MarkError, Marks};
use crate::mode::Mode;
use crate::notes::{Note, Turn, each_once};
use crate::own_layouts::Generation;
use crate::program::Program;

/// Why the hints are not changed. The program that was there goes on.
///
/// `source` is libbpf's answer, or the kernel's.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum HintsError {
    /// Bound programs are for native mode.
    #[error("hints take native mode, and the program is in {mode} mode")]
    Mode { mode: Mode },
    /// The kernel has no such functions.
    #[error(
        "this kernel gives XDP programs no {missing} (Linux 6.3, for vlan 6.8, with CONFIG_DEBUG_INFO_BTF)"
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
    #[error("cannot tell what the XDP program leaves before frames")]
    Layout(#[source] LayoutOfError),
    /// A map that goes with hints cannot be made, pinned or written.
    #[error("cannot keep what goes with hints")]
    Map(#[source] libbpf_rs::Error),
    /// The link does not take the program.
    #[error("cannot put the XDP program for {hints} in the place of the one that is there")]
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
    /// The hints that the program leaves before frames of queues with hints
    /// ([`QueueConf::hints`](crate::QueueConf::hints)).
    pub fn hints(&self) -> HintSet {
        self.now.get().hints
    }

    /// From now on the program leaves these hints: another one takes its place, with the same maps, and no frame is
    /// lost. Nothing happens if it leaves them already. [`Program::id`] and [`Program::layouts`] change.
    ///
    /// Hints that the driver lacks ([`HintSet::of_driver`]) cost a call each and are absent in every frame: leave them
    /// out.
    ///
    /// # Errors
    /// [`HintsError`]; the program that was there goes on.
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
        // First the note, so that the next owner of the link finds it whenever this one ends.
        self.notes.add(&note).map_err(HintsError::Map)?;
        self.attached
            .replace(loaded.program.as_fd())
            .map_err(|source| HintsError::Replace { hints, source })?;
        *now = note;
        Ok(())
    }

    /// The metadata layouts of frames of queues with hints: those of the present program and of those before it, the
    /// latest first. In a network's queue, also [`note_layout`](crate::note_layout).
    pub fn layouts(&self) -> Vec<Layout> {
        self.notes.layouts(self.now.get().turn)
    }

    /// The same, and those of all programs that may follow by [`Program::set_hints`]: so who reads frames knows each
    /// before it comes. They change only when the program of another version is taken over ([`Program::open_pinned`]).
    pub fn all_layouts(&self) -> Vec<Layout> {
        let turn = self.now.get().turn;
        let noted = self.notes.layouts(turn);
        each_once(noted.into_iter().chain(self.generation(turn).layouts()))
    }

    /// Of programs that follow. What was noted before the first of them it keeps clear of.
    fn generation(&self, turn: Turn) -> Generation {
        let after = || Generation::after(&self.notes.layouts(turn));
        *self.generation.get_or_init(after)
    }

    /// Gives the frames of a flow a mark, or takes it away; nothing happens if it has none. Programs leave marks that
    /// have [`HintSet::MARK`]; marks stay when the hints change.
    ///
    /// # Errors
    /// [`MarkError`].
    pub fn set_mark(&self, flow: &Flow, mark: Option<u32>) -> Result<(), MarkError> {
        let marks = self.marks().map_err(MarkError)?;
        match mark {
            Some(mark) => marks.set(flow, mark),
            None => marks.remove(flow).map(drop),
        }
    }

    /// All marks, in order.
    pub fn all_marks(&self) -> Vec<(Flow, u32)> {
        self.marks.get().map_or_else(Vec::new, Marks::all)
    }

    /// The map of marks, made where there is none.
    fn marks(&self) -> libbpf_rs::Result<&Marks> {
        if let Some(marks) = self.marks.get() {
            return Ok(marks);
        }
        let mut marks = Marks::new()?;
        if let Some(dir) = &self.dir {
            let (pinned, _) = messages_of(|| marks.0.pin(dir.join(Marks::SHAPE.name)));
            pinned?;
        }
        // Whose is not taken, when two make one at the same time, is nobody's: pinning has refused the second.
        Ok(self.marks.get_or_init(|| marks))
    }

    /// Loads the program that leaves these hints, with the maps of the one that is there.
    fn load_after(&self, now: &Note, hints: HintSet) -> Result<(Loaded, Option<Layout>), HintsError> {
        let mut reused = vec![
            ("steer_queues", self.queues.as_fd()),
            ("steer_sockets", self.sockets.as_fd()),
            ("steer_entries", self.entries.as_fd()),
            ("steer_counts", self.counts.as_fd()),
            ("steer_stations", self.networks.stations.as_fd()),
            ("steer_rings", self.networks.rings.as_fd()),
            ("steer_limits", self.networks.limits.as_fd()),
        ];
        reused.extend(self.own.as_ref().map(|own| ("steer_own", own.as_fd())));
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
                // Else its readers would not know it.
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
