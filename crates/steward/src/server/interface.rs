//! An interface with leased queues, and the program on it.
//!
//! The program is attached with the first lease and detached a while after the last. A lease is taken back in
//! dependency order (see `teardown`). First its queues' configuration words are cleared: no frame is redirected any
//! more, and that cannot fail. The other steps follow one by one and, after the last lease, the program. Until all is
//! done the queues are `Leaving` and cannot be leased. If the interface has another program already, attaching fails:
//! the steward never replaces it.
//!
//! An interface that is deleted or moved away takes the program along. Leases stay, impaired, and their lessees are
//! notified. When an interface of that name exists again, the program is attached with another generation.

mod facts;
mod hints;
mod lease;
pub(super) mod netkits;
mod network;
mod own_maps;
mod program;
mod sockets;
mod take_back;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use steer::{Mode, ModeRequest, OwnMap, Program, with_sources};

use self::hints::Hints;
use self::netkits::Netkits;
use self::network::Network;
use self::sockets::Sockets;
use self::take_back::Leaving;
use super::journal::file::Journal;
use super::journal::ledger::{self, Ledger};
use super::journal::state::{InterfaceRecord, Places};
use super::leases::entries::Entries;
use ::program::backoff::{Backoff, Retry};
use ::program::log_limit::LogLimit;
use host::links::below::losses_above;
use host::links::{DriverSends, Link};
use steward_protocol::{Reason, Refusal, mode_request};

pub(super) use self::hints::LeaseHints;
pub(super) use self::lease::check;
pub(super) use self::program::remove_pins;
pub(super) use self::sockets::{Bound, Holds, Memory, Registered, bytes_held};

/// The owner of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lessee {
    /// The connection of this number.
    Lease(u64),
    /// No connection any more: the lease has ended, but not all of it is undone.
    Leaving,
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Interface {
    /// Its name when it was first leased, by which it is searched when it is gone.
    name: String,
    /// Its last known state; index 0 when it is gone.
    pub link: Link,
    mode: ModeRequest,
    program: Option<Program>,
    /// Why there is no program, or why it is not attached natively.
    note: String,
    /// A note about frames that are lost because of the interfaces below it; may be empty.
    losses: String,
    /// Notes on addresses of networks that other hosts have, by the networks' first queues.
    pub(super) lost_addresses: BTreeMap<u32, String>,
    /// Features of its driver in zero-copy mode.
    pub sends: DriverSends,
    generation: u32,
    lessees: BTreeMap<u32, Lessee>,
    /// Leases that are being taken back.
    leaving: Vec<Leaving>,
    /// Steering entries of leases, by their first queue.
    entries: BTreeMap<u32, Entries>,
    /// Networks among the leases, by their first queue.
    networks: BTreeMap<u32, Network>,
    /// Maps of queues that are leased on to netkits.
    own_maps: BTreeMap<u32, OwnMap>,
    /// Queues for which the journal has a netkit, which may not exist.
    pub netkit_queues: BTreeSet<u32>,
    /// Queues whose netkits were found to be gone.
    lost_netkits: BTreeSet<u32>,
    /// The part that makes netkits.
    netkits: Option<&'static dyn Netkits>,
    /// The host's MAC addresses on it, which no network or guest in tap mode may have; empty while it has neither.
    pub(super) of_host: BTreeSet<[u8; 6]>,
    /// The host's addresses changed since leases were last checked against them.
    pub(super) other_of_host: bool,
    /// When it was first seen without a lease.
    pub(super) idle_since: Option<Instant>,
    /// Its number, and the journal in which it has entries under that number.
    pub number: u64,
    /// See `number`.
    pub journal: Journal,
    /// Where the program is pinned; `None`: the program ends with this process.
    pins: Option<PathBuf>,
    /// The NIC's configuration for the leases.
    ledger: Ledger,
    hints: Hints,
    /// Memory of its queues' sockets.
    pub(super) sockets: Sockets,
    /// When attaching the program is tried again, and when detaching it.
    attaching: Retry<Link>,
    pub(super) detaching: Backoff,
    /// When rules that the NIC has lost are set again.
    renewing: Backoff,
    /// Limits log lines about failed queries of the kernel.
    lines: LogLimit,
}

/// Where an interface's state outlives the steward, and the part that makes netkits, if there is one.
pub(super) type Kept = (Places, Option<&'static dyn Netkits>);

impl Interface {
    /// Attaches the program.
    pub(super) fn open(link: Link, mode: ModeRequest, places: Option<Kept>) -> Result<Self, Refusal> {
        let mut interface = Self::without_program(link, mode, places);
        interface.attach();
        match interface.program {
            Some(_) => Ok(interface),
            None => Reason::Program.refuse(interface.note.clone()),
        }
    }

    /// Takes over the interface and program of a previous steward. A program that cannot be used is removed and handled
    /// like a lost one.
    pub(super) fn adopt(record: &InterfaceRecord, places: Kept) -> Self {
        let gone = || Link {
            name: record.name.clone(),
            ..Link::default()
        };
        let link = Link::by_index(record.ifindex).unwrap_or_else(gone);
        let opened = Program::open_pinned(link.index, &places.0.pins);
        let mode = mode_request(record.mode).unwrap_or_default();
        let mut interface = Self {
            name: record.name.clone(),
            generation: record.generation,
            ..Self::without_program(link, mode, Some(places))
        };
        match opened {
            Ok(program) => {
                // If it was attached again and not recorded yet, lessees do not know of it.
                if program.number() != record.attached {
                    interface.generation = interface.generation.wrapping_add(1);
                }
                interface.note.clone_from(&record.note);
                interface.sends = DriverSends::by_index(interface.link.index);
                interface.program = Some(program);
            }
            Err(error) => {
                interface.note = with_sources(&*error);
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

    fn without_program(link: Link, mode: ModeRequest, places: Option<Kept>) -> Self {
        let mut interface = Self {
            name: link.name.clone(),
            link,
            mode,
            ..Self::default()
        };
        if let Some((places, netkits)) = places {
            interface.ledger = Ledger::open(ledger::entry_of(&places.journal, places.number));
            (interface.number, interface.journal) = (places.number, places.journal);
            (interface.pins, interface.netkits) = (Some(places.pins), netkits);
            let netkits = interface.netkits.map(|netkits| netkits.queues(&interface));
            interface.netkit_queues = netkits.unwrap_or_default();
        }
        interface
    }

    /// Its name when it was first leased.
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

    /// Whether it is gone and was first leased by this name.
    pub(super) fn was(&self, name: &str) -> bool {
        self.link.index == 0 && self.name == name
    }

    /// Whether it has no lease, and none that is being taken back.
    pub(super) fn is_idle(&self) -> bool {
        self.lessees.is_empty()
    }

    /// Whether it has been idle for `linger`. Without a program there is no reason to wait.
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

    /// Whether something has to be tried again soon.
    pub(super) fn is_unfinished(&self, now: Instant, linger: Duration) -> bool {
        let lingers = self.idle_since.is_some_and(|since| now < since + linger);
        let renews = !self.renewing.is_due(now);
        let waits = self.program.is_none() || !self.leaving.is_empty() || self.hints.has_surplus() || renews;
        waits || (self.is_idle() && !lingers)
    }

    /// Checks the interface, retries unfinished work, and attaches the program again if it is missing. Returns whether
    /// facts for lessees changed. `taken`: indexes of leased interfaces, none of which can replace one that is gone.
    pub(super) fn look(&mut self, taken: &[u32]) -> bool {
        let (before, now) = (self.facts_for_all(), Instant::now());
        self.take_back();
        self.look_at_link();
        // Without a lessee the program is not needed.
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
            if was_blind && !entries.is_blind() {
                entries.renewed += 1;
                seen_again.push(entries.queues.start);
            }
            // Otherwise a lessee would receive frames of other VLANs.
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
        // Other lessees activate their queues themselves when they are notified.
        seen_again
            .into_iter()
            .for_each(|queue| self.go_on_with_map(queue));
        self.look_at_host();
        self.look_at_netkits();
        before != self.facts_for_all()
    }

    /// Checks whether the interface still exists and the program is still attached.
    fn look_at_link(&mut self) {
        match Link::find(self.link.index) {
            Ok(Some(link)) => self.link = link,
            Ok(None) => self.vanished(),
            // A failed query does not mean that the interface is gone.
            Err(error) => {
                if let Some(left_out) = self.lines.allow() {
                    tracing::warn!("{}{left_out}", with_sources(&error));
                }
            }
        }
        if let Some(program) = &self.program
            && program.mode() != Mode::Tap
            && steer::is_detached(self.link.index, program.id())
        {
            tracing::warn!(
                interface = self.link.name,
                "another program has detached the program"
            );
            self.program = None;
        }
    }

    /// How the program is attached; `None`: it is not attached.
    pub(super) fn mode(&self) -> Option<Mode> {
        self.program.as_ref().map(Program::mode)
    }

    /// Whether the lessees receive its frames from taps (tap mode).
    pub(super) fn is_by_tap(&self) -> bool {
        self.mode() == Some(Mode::Tap)
    }

    /// Checks whether it is stacked on other interfaces in such a way that frames are lost: by an XDP program on it, or in
    /// a tunnel.
    fn look_below(&mut self) {
        if self.is_by_tap() && !self.link.is_tunnel() {
            return;
        }
        match losses_above(&self.link) {
            Ok(losses) => self.losses = losses,
            // Keep what is known.
            Err(error) => tracing::debug!(
                interface = self.link.name,
                "cannot ask for the interfaces below: {error}"
            ),
        }
    }

    /// Finds an interface to attach to: this one, whatever its name is now, or, if it is gone, one with its first name
    /// that no other lease uses. Not a netkit without a peer: a program there sees no frame. Returns whether there is
    /// one.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interface_without_a_program_suits_no_lease_and_is_over_without_one() {
        let mut interface = Interface {
            name: "eth1".to_owned(),
            ..Interface::default()
        };
        let modes = [
            ModeRequest::Auto,
            ModeRequest::Xdp,
            ModeRequest::Native,
            ModeRequest::Skb,
            ModeRequest::Tap,
        ];
        assert_eq!(modes.map(|mode| interface.suits(mode)), [false; 5]);
        let (now, linger) = (Instant::now(), Duration::from_secs(60));
        assert!(interface.is_over(now, linger) && interface.idle_since == Some(now));
        assert!(interface.is_unfinished(now, linger));
        // It is searched by the name that it had when it was leased.
        assert!(interface.was("eth1") && !interface.was("eth2"));
        interface.link.index = 7;
        assert!(!interface.was("eth1"));
    }
}
