//! A program that drops every frame of an interface, or sends it back: for measurements, see `bpf/verdict.bpf.c`.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::Context;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::attach::Target;
use crate::capture::messages_of;
use crate::error::AttachError;
use crate::link::Attached;
use crate::mode::{Mode, ModeRequest};
use crate::skel::verdict::VerdictSkelBuilder;

/// The action for every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is dropped (`XDP_DROP`).
    Drop,
    /// It goes back out of the interface with its MAC addresses swapped (`XDP_TX`).
    SendBack,
}

/// A program with one verdict for every frame of an interface, attached as long as this value exists.
#[derive(Debug)]
pub struct VerdictProgram {
    // Dropped first, so that the program is detached before its map is closed.
    attached: Attached,
    frames: MapHandle,
}

impl VerdictProgram {
    /// Loads the program and attaches it to the interface with this index in the calling thread's network namespace.
    /// `frags` as in [`Program::attach`](crate::Program::attach).
    ///
    /// # Errors
    /// As [`Program::attach`](crate::Program::attach).
    pub fn attach(
        ifindex: u32,
        request: ModeRequest,
        frags: bool,
        verdict: Verdict,
    ) -> Result<Self, AttachError> {
        let target = Target::check(ifindex, frags)?;
        let (loaded, said) = messages_of(|| load(verdict, frags));
        let (program, frames) = loaded.map_err(|source| AttachError::Load { detail: said, source })?;
        let id = libbpf_rs::Program::id_from_fd(program.as_fd()).map_err(|source| AttachError::Load {
            detail: String::new(),
            source,
        })?;
        let attached = target.attach(program.as_fd(), id, request)?;
        Ok(Self { attached, frames })
    }

    /// The mode in use.
    pub fn mode(&self) -> Mode {
        self.attached.mode
    }

    /// Why native mode was not possible, if [`ModeRequest::Xdp`] chose skb; one line.
    pub fn fallback(&self) -> Option<&str> {
        self.attached.fallback.as_deref()
    }

    /// Frames of all queues that got the verdict since the program was attached. Only the interface's
    /// counters show whether frames were actually sent back.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn frames(&self) -> anyhow::Result<u64> {
        let key = 0_u32.to_ne_bytes();
        let (looked_up, _) = messages_of(|| self.frames.lookup_percpu(&key, MapFlags::ANY));
        let cpus = looked_up
            .context("cannot read how many frames the XDP program saw")?
            .unwrap_or_default();
        let number = |bytes: &Vec<u8>| bytes.first_chunk().copied().map_or(0, u64::from_ne_bytes);
        Ok(cpus.iter().map(number).sum())
    }
}

fn load(verdict: Verdict, frags: bool) -> libbpf_rs::Result<(OwnedFd, MapHandle)> {
    let mut storage = MaybeUninit::uninit();
    let mut open = VerdictSkelBuilder::default().open(&mut storage)?;
    let wanted = (verdict, frags);
    open.progs.drop_all.set_autoload(wanted == (Verdict::Drop, false));
    open.progs
        .drop_all_frags
        .set_autoload(wanted == (Verdict::Drop, true));
    open.progs
        .send_all_back
        .set_autoload(wanted == (Verdict::SendBack, false));
    open.progs
        .send_all_back_frags
        .set_autoload(wanted == (Verdict::SendBack, true));
    let skel = open.load()?;
    let program = match wanted {
        (Verdict::Drop, false) => skel.progs.drop_all.as_fd(),
        (Verdict::Drop, true) => skel.progs.drop_all_frags.as_fd(),
        (Verdict::SendBack, false) => skel.progs.send_all_back.as_fd(),
        (Verdict::SendBack, true) => skel.progs.send_all_back_frags.as_fd(),
    };
    Ok((
        program.try_clone_to_owned()?,
        MapHandle::try_from(&skel.maps.verdict_frames)?,
    ))
}
