//! An interface with leased queues, and the program on it.
//!
//! The program comes with the first lease and goes a while after the last. A lease is taken back in dependency order
//! (see `teardown`): first of all its queues' configuration words (no frame is redirected any more, and nothing can
//! refuse that), then step after step, then, with the last lease, the program; until all is done its queues are
//! `Leaving`, not to be leased again. The steward never touches an older program on the interface: that is an
//! error.
//!
//! An interface that is deleted or moved away takes the program along. Leases stay, impaired, and their lessees are
//! notified. When an interface of its name is there again, the program is attached with another generation.

mod facts;
mod hints;
mod lease;
mod netkit;
mod network;
mod program;
mod sockets;
mod take_back;

pub use program::wants_frags;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use steer::{Mode, ModeRequest, Program, with_sources};

use self::hints::Hints;
use self::netkit::Netkit;
use self::network::Network;
use self::sockets::Sockets;
use self::take_back::Leaving;
use super::entries::Entries;
use super::ledger::Ledger;
use super::state::{InterfaceRecord, Places};
use crate::backoff::{Backoff, Retry};
use crate::links::below::losses_above;
use crate::links::{DriverSends, Link};
use crate::log_limit::LogLimit;
use crate::protocol::{Reason, Refusal, mode_request};

pub(super) use self::hints::LeaseHints;
pub(super) use self::lease::check;
pub(super) use self::program::remove_pins;
pub(super) use self::sockets::{Bound, Holds, Memory, Registered, bytes_held};

/// The owner of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lessee {
    /// The connection of this number.
    Lease(u64),
    /// Nobody any more, but the kernel has not let go of it.
    Leaving,
}

#[derive(Debug, Default)]
pub(super) struct Interface {
    /// As it was leased first, and as it is looked for when it is gone.
    name: String,
    /// As it was seen last; index 0 when it is gone.
    pub(super) link: Link,
    mode: ModeRequest,
    program: Option<Program>,
    /// Why there is no program, or why it is not attached natively.
    note: String,
    /// A note about frames that are lost because of the interfaces below it; may be empty.
    losses: String,
    pub(super) sends: DriverSends,
    generation: u32,
    lessees: BTreeMap<u32, Lessee>,
    /// Leases that are being taken back.
    leaving: Vec<Leaving>,
    /// Steering entries of leases, by their first queue.
    entries: BTreeMap<u32, Entries>,
    /// Those that are networks, by their first queue.
    networks: BTreeMap<u32, Network>,
    /// Those that have a queue of it.
    netkits: BTreeMap<u32, Netkit>,
    /// Addresses of the host's on it, which no network and no guest in tap mode may have; none while it has neither.
    pub(super) of_host: BTreeSet<[u8; 6]>,
    /// They are others than when leases were held against them.
    pub(super) other_of_host: bool,
    /// Leases that were taken back, all of them, since this was taken last.
    pub(super) ended: Vec<u64>,
    /// Since when it has no lease, as far as that was noticed.
    pub(super) idle_since: Option<Instant>,
    /// Where the program is pinned, an empty directory without one; none: the program goes with this process.
    pins: Option<PathBuf>,
    /// The NIC's configuration for them.
    ledger: Ledger,
    hints: Hints,
    /// Of its queues.
    pub(super) sockets: Sockets,
    /// When attaching the program is tried again, and when taking it off.
    attaching: Retry<Link>,
    pub(super) detaching: Backoff,
    /// When rules that a NIC has forgotten are made again.
    renewing: Backoff,
    /// Of what the kernel does not answer.
    lines: LogLimit,
}

impl Interface {
    /// Attaches the program.
    pub(super) fn open(link: Link, mode: ModeRequest, places: Option<Places>) -> Result<Self, Refusal> {
        let mut interface = Self::without_program(link, mode, places);
        interface.attach();
        match interface.program {
            Some(_) => Ok(interface),
            None => Reason::Program.refuse(interface.note.clone()),
        }
    }

    /// Goes on with what another steward left. Whatever cannot be used of it is taken off; then it is as if the program
    /// had been lost.
    pub(super) fn adopt(record: &InterfaceRecord, places: Places) -> Self {
        let gone = || Link {
            name: record.name.clone(),
            ..Link::default()
        };
        let link = Link::by_index(record.ifindex).unwrap_or_else(gone);
        let opened = Program::open_pinned(link.index, &places.pins);
        let mode = mode_request(record.mode).unwrap_or_default();
        let mut interface = Self {
            name: record.name.clone(),
            generation: record.generation,
            ..Self::without_program(link, mode, Some(places))
        };
        match opened {
            Ok(program) => {
                // Attached again and not recorded yet: lessees do not know of it.
                let is_same = match record.attached {
                    // Of a version that did not know.
                    0 => program.id() == record.program,
                    attached => program.number() == attached,
                };
                if !is_same {
                    interface.generation = interface.generation.wrapping_add(1);
                }
                interface.note.clone_from(&record.note);
                interface.sends = DriverSends::by_index(interface.link.index);
                interface.program = Some(program);
            }
            Err(error) => {
                interface.note = with_sources(&error);
                tracing::warn!(
                    interface = record.name,
                    "program not taken over: {}",
                    interface.note
                );
                interface.unpin();
            }
        }
        interface
    }

    fn without_program(link: Link, mode: ModeRequest, places: Option<Places>) -> Self {
        let (pins, ledger) = places.map(|places| (places.pins, places.ledger)).unzip();
        Self {
            name: link.name.clone(),
            link,
            mode,
            pins,
            ledger: Ledger::open(ledger),
            ..Self::default()
        }
    }

    /// As it was leased first.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Where its program is pinned, if it is.
    pub(super) fn pins(&self) -> Option<&Path> {
        self.pins.as_deref().filter(|pins| pins.is_dir())
    }

    /// The record for the next steward.
    pub(super) fn record(&self, number: u64) -> InterfaceRecord {
        InterfaceRecord {
            number,
            name: self.name.clone(),
            ifindex: self.link.index,
            program: self.program.as_ref().map_or(0, Program::id),
            attached: self.program.as_ref().map_or(0, Program::number),
            generation: self.generation,
            mode: self.mode as u32,
            note: self.note.clone(),
        }
    }

    /// Whether it is gone, and had this name.
    pub(super) fn was(&self, name: &str) -> bool {
        self.link.index == 0 && self.name == name
    }

    /// Whether nobody needs it any more.
    pub(super) fn is_idle(&self) -> bool {
        self.lessees.is_empty()
    }

    /// Whether nobody has needed it for so long; without a program there is nothing to wait with.
    pub(super) fn is_over(&mut self, now: Instant, linger: Duration) -> bool {
        if !self.is_idle() {
            self.idle_since = None;
            self.detaching.reset();
            return false;
        }
        let since = *self.idle_since.get_or_insert(now);
        self.program.is_none() || since + linger <= now
    }

    /// Whether a lease of this mode can have the program as it is attached.
    pub(super) fn suits(&self, mode: ModeRequest) -> bool {
        let attached = self.mode();
        match mode {
            // A lessee that names no mode expects queues.
            ModeRequest::Xdp => attached.is_some_and(|mode| mode != Mode::Tap),
            ModeRequest::Native => attached == Some(Mode::Native),
            ModeRequest::Skb => attached == Some(Mode::Skb),
            ModeRequest::Tap => attached == Some(Mode::Tap),
            ModeRequest::Auto => attached.is_some(),
        }
    }

    /// Whether something is to be tried again soon.
    pub(super) fn is_unfinished(&self, now: Instant, linger: Duration) -> bool {
        let lingers = self.idle_since.is_some_and(|since| now < since + linger);
        let renews = !self.renewing.is_due(now);
        let waits = self.program.is_none() || !self.leaving.is_empty() || self.hints.has_surplus() || renews;
        waits || (self.is_idle() && !lingers)
    }

    /// Tries again what was not done, and attaches the program again if it is missing. True if the facts changed.
    /// `taken`: indexes of interfaces that are leased, which it cannot come back as.
    pub(super) fn look(&mut self, taken: &[u32]) -> bool {
        let before = (self.facts(), self.entries.clone(), self.known_of_networks());
        let (lost, now) = (self.lost_netkits(), Instant::now());
        self.take_back();
        self.look_at_link();
        // Nobody waits for it when it has no lessee.
        if self.program.is_none()
            && !self.is_idle()
            && self.find_again(taken)
            && self.attaching.is_due(self.link.clone(), false, now)
        {
            self.attach();
            self.attaching.record(self.program.is_some(), now);
        }
        let mut were_blind = Vec::new();
        let is_by_tap = self.is_by_tap();
        for entries in self.entries.values_mut() {
            were_blind.push(entries.is_blind());
            entries.look(&self.link, is_by_tap);
        }
        for network in self.networks.values_mut() {
            network.look(&self.link);
        }
        self.look_below();
        self.decide_hints();
        let (mut seen_again, renews, mut renewed) = (Vec::new(), self.renewing.is_due(now), false);
        for (entries, was_blind) in self.entries.values_mut().zip(were_blind) {
            entries.note_renewed(was_blind);
            if was_blind && !entries.is_blind() {
                seen_again.push(entries.queues.start);
            }
            // Rather no frames than those of others.
            if let Some(program) = self.program.as_ref().filter(|_| entries.is_blind()) {
                for queue in entries.queues.clone() {
                    let _ = program.deactivate_queue(queue);
                }
            }
            renewed |= renews && entries.renew(&self.link, &mut self.ledger);
        }
        if renewed {
            self.renewing.failed(now);
        }
        // Other lessees do that themselves, as they are told.
        seen_again
            .into_iter()
            .for_each(|queue| self.go_on_with_netkit(queue));
        self.look_at_host();
        self.look_at_netkits();
        lost != self.lost_netkits()
            || before != (self.facts(), self.entries.clone(), self.known_of_networks())
    }

    /// Looks whether it is there, with its program.
    fn look_at_link(&mut self) {
        match Link::find(self.link.index) {
            Ok(Some(link)) => self.link = link,
            Ok(None) => self.vanished(),
            // No answer is no reason to take anything down.
            Err(error) => {
                if let Some(left_out) = self.lines.allow() {
                    tracing::warn!("{}{left_out}", with_sources(&error));
                }
            }
        }
        let attached = self
            .program
            .as_ref()
            .filter(|program| program.mode() != Mode::Tap);
        let id = attached.map(Program::id);
        if id.is_some_and(|id| steer::is_detached(self.link.index, id)) {
            tracing::warn!(
                interface = self.link.name,
                "another program has detached the program"
            );
            self.program = None;
        }
    }

    /// How the program is attached; `None`: it is not.
    pub(super) fn mode(&self) -> Option<Mode> {
        self.program.as_ref().map(Program::mode)
    }

    /// Whether its frames come by taps.
    pub(super) fn is_by_tap(&self) -> bool {
        self.mode() == Some(Mode::Tap)
    }

    /// Looks whether it stands on other interfaces, of which an XDP program loses frames.
    fn look_below(&mut self) {
        if self.is_by_tap() {
            return;
        }
        match losses_above(&self.link) {
            Ok(losses) => self.losses = losses,
            // What is known holds still.
            Err(error) => tracing::debug!(
                interface = self.link.name,
                "cannot ask for the interfaces below: {error}"
            ),
        }
    }

    /// A note for lessees of networks about tags, and about queues outside their lease.
    fn known_of_networks(&self) -> Vec<(bool, String)> {
        let networks = self.networks.iter();
        networks
            .map(|(&first, network)| {
                let strips = network.strips_tags && !self.restores_tags(first);
                (strips, network.note(&self.link.name))
            })
            .collect()
    }

    /// Whether there is something to attach to: the interface, whatever its name is now, or, if it is gone, one that
    /// has the name that it had, and no other lease has it. No netkit without a peer: no frame comes to a program
    /// there.
    fn find_again(&mut self, taken: &[u32]) -> bool {
        if self.link.index == 0
            && let Ok(link) = Link::by_name(&self.name)
            && !taken.contains(&link.index)
            && !link.has_leased_only
        {
            self.link = link;
        }
        self.link.index != 0
    }

    fn vanished(&mut self) {
        if self.link.index != 0 {
            tracing::warn!(interface = self.link.name, "interface is gone");
        }
        self.program = None;
        (self.link.index, self.link.up) = (0, false);
        self.note = format!("interface {} is gone", self.link.name);
    }
}
