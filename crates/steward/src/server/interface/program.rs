//! The program on an interface: attached, pinned so that it outlives the steward, and taken off.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use steer::{Mode, ModeRequest, Program, with_sources};

use super::Interface;
use super::own_maps::own_path;
use crate::server::journal::file::may_crash;
use host::links::{DriverSends, Link, wants_frags};
use steward_protocol::{Reason, Refusal};

impl Interface {
    /// The mode of a lease: that of the attached program, or the one in which it would be attached.
    pub(crate) fn mode_of(attached: Option<Mode>, link: &Link, asked: ModeRequest) -> ModeRequest {
        let is_tap = match attached {
            Some(mode) => mode == Mode::Tap,
            None => link.copies(DriverSends::by_index(link.index)).is_some(),
        };
        match (asked, is_tap) {
            (ModeRequest::Auto, true) => ModeRequest::Tap,
            (ModeRequest::Auto, false) => ModeRequest::Xdp,
            (asked, _) => asked,
        }
    }

    /// Stores that a granted lease requested tap mode explicitly, if it did.
    pub(crate) fn note_mode(&mut self, asked: ModeRequest) {
        if asked == ModeRequest::Tap {
            self.mode = asked;
        }
    }

    /// Whether the interface may change from tap mode to this mode: no lease has requested tap mode explicitly.
    pub(crate) fn may_leave_tap_mode(&self, asked: ModeRequest) -> bool {
        let is_of_xdp = !matches!(asked, ModeRequest::Auto | ModeRequest::Tap);
        is_of_xdp && self.mode == ModeRequest::Auto && self.is_by_tap()
    }

    /// Attaches the program in that mode, for all leases. If that fails they stay in tap mode, where no program of
    /// ours is attached that would be in the way.
    pub(crate) fn leave_tap_mode(&mut self, asked: ModeRequest) {
        let attached = match self.attach_as(asked) {
            Ok(attached) if self.detach() => attached,
            attached => {
                let why = attached.err().unwrap_or_else(|| "its programs stay".to_owned());
                tracing::warn!(interface = self.link.name, "tap mode not left: {why}");
                return;
            }
        };
        self.mode = asked;
        self.take_on(Ok(attached));
        if self.program.is_none() {
            let why = std::mem::take(&mut self.note);
            tracing::warn!(interface = self.link.name, "tap mode not left: {why}");
            self.mode = ModeRequest::Auto;
            self.attach();
        }
    }

    pub(super) fn attach(&mut self) {
        self.unpin();
        let attached = self.attach_as(self.mode);
        self.take_on(attached);
    }

    /// Attaches a program, without any leases in it yet. Returns it with the reason why its mode is not a better one.
    /// Errors: in words.
    fn attach_as(&self, mode: ModeRequest) -> Result<(Program, String), String> {
        let only_skb = self.link.only_skb();
        let (mode, why) = match (mode, only_skb) {
            (ModeRequest::Native, Some(why)) => return Err(format!("{why}: use mode=skb")),
            (ModeRequest::Auto, _) => match self.link.copies(DriverSends::by_index(self.link.index)) {
                Some(why) => (ModeRequest::Tap, Some(why)),
                None => (ModeRequest::Auto, None),
            },
            (ModeRequest::Tap, _) => (ModeRequest::Tap, None),
            (_, Some(_)) => (ModeRequest::Skb, only_skb),
            (mode, None) => (mode, None),
        };
        let program = Program::attach(self.link.index, mode, wants_frags(self.link.mtu));
        may_crash("attached");
        let program = program.map_err(with_sources)?;
        let note = program.fallback().or(why).unwrap_or_default().to_owned();
        Ok((program, note))
    }

    /// Installs all leases in a new program, and uses it from now on.
    fn take_on(&mut self, attached: Result<(Program, String), String>) {
        // A program without the filters of all leases must not be used: it is detached at once.
        let known = attached.and_then(|(program, note)| {
            let mut entries = self.entries.values();
            let installed = entries.try_for_each(|entries| entries.install(&program));
            installed.map_err(with_sources)?;
            let mut networks = self.networks.iter();
            networks.try_for_each(|(&number, network)| network.install(number, &program))?;
            Ok((program, note))
        });
        match known {
            Ok((mut program, note)) => {
                self.note = note;
                self.sends = DriverSends::by_index(self.link.index);
                self.generation = self.generation.wrapping_add(1);
                let (mode, program_id) = (program.mode(), program.id());
                tracing::info!(interface = self.link.name, %mode, program = program_id, "program attached");
                self.pin(&mut program);
                self.program = Some(program);
                self.hints_of_new_program();
                let entries = self.entries.values_mut();
                entries.for_each(|entries| entries.look(&self.link, mode == Mode::Tap));
                let maps = self.own_maps.keys();
                maps.for_each(|&queue| self.go_on_with_map(queue));
                // An interface that was created again has no rules; one that came back may still have them.
                let entries = self.entries.values_mut();
                entries.for_each(|entries| entries.apply(&self.link, &mut self.ledger));
                let leases: Vec<u32> = self.entries.keys().copied().collect();
                leases.into_iter().for_each(|first| self.accept_stations(first));
            }
            Err(note) => self.note = note,
        }
    }

    /// Pins the program. If that fails, the program ends with this process.
    fn pin(&mut self, program: &mut Program) {
        let Some(pins) = &self.pins else {
            return;
        };
        let pinned = DirBuilder::new()
            .mode(0o700)
            .create(pins)
            .map_err(|error| error.to_string())
            .and_then(|()| {
                may_crash("pins-made");
                program.pin(pins).map_err(with_sources)?;
                let mut networks = self.networks.values_mut();
                let mut maps = self.own_maps.iter_mut();
                networks
                    .try_for_each(|network| network.pin(pins))
                    .and_then(|()| maps.try_for_each(|(&queue, map)| map.pin(&own_path(pins, queue))))
                    .map_err(|error| error.to_string())
            });
        may_crash("pinned");
        if let Err(why) = pinned {
            tracing::warn!(
                interface = self.link.name,
                "the program will not outlive this process: {}: {why}",
                pins.display()
            );
            self.unpin();
        }
    }

    /// Removes the pins, and a program that only they hold.
    pub(super) fn unpin(&mut self) {
        if let Some(pins) = &self.pins
            && let Err(why) = remove_pins(pins)
        {
            tracing::error!(interface = self.link.name, "{}: {why}", pins.display());
        }
    }

    /// Detaches the program. Returns whether the steward's program is not attached any more.
    pub(crate) fn detach(&mut self) -> bool {
        let Some(program) = &self.program else {
            self.unpin();
            return true;
        };
        let id = program.id();
        if let Err(error) = program.detach() {
            tracing::error!(
                interface = self.link.name,
                program = id,
                "cannot detach the program: {error}"
            );
        }
        if steer::program_on(self.link.index).is_some_and(|left| left.id == id) {
            tracing::error!(
                interface = self.link.name,
                program = id,
                "the kernel keeps the program attached"
            );
            return false;
        }
        may_crash("detached");
        tracing::info!(interface = self.link.name, program = id, "program detached");
        self.program = None;
        self.unpin();
        may_crash("unpinned");
        true
    }

    /// The program on it.
    ///
    /// # Errors
    /// There is none at the moment.
    pub fn program(&self) -> Result<&Program, Refusal> {
        self.program.as_ref().ok_or_else(|| {
            Reason::Impaired.because(match self.link.index {
                0 => format!(
                    "interface {} is gone; the lease continues when an interface of that name is there",
                    self.name
                ),
                _ => self.note.clone(),
            })
        })
    }
}

/// Detaches a program pinned in a directory, and removes the directory, if it exists.
pub(crate) fn remove_pins(pins: &Path) -> io::Result<()> {
    if !pins.is_dir() {
        return Ok(());
    }
    steer::detach_pinned(pins)?;
    fs::remove_dir_all(pins)
}
