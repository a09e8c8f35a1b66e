//! An interface of which queues are leased, with our program on it.
//!
//! The program comes with the first lease and goes a while after the last. A lease is taken back in dependency order (see
//! `teardown`): first of all its queues' configuration words (no frame is redirected any more, and nothing can refuse
//! that), then step after step, then, with the last lease, the program; until all is done its queues are `Leaving`,
//! not to be leased again. Nothing that was on the interface before us is touched: a program of somebody else's is an
//! error.
//!
//! An interface that is deleted or moved away takes the program along. Leases stay, impaired, and are told so; when one of its name
//! is there again, the program is attached anew, under another generation.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};
use steer::{Filter, MAX_QUEUES, Mode, ModeRequest, Program, QueueConf, QueueCounters};

use super::entries::{self, Entries};
use super::ledger::Ledger;
use crate::hardware::{self, Ethtool, Names};
use crate::links::{DriverSends, Link};
use crate::listing::Listed;
use crate::protocol::{Facts, RECEIVE_RING, Reason, Refusal, Steered, Wanted};
use crate::sys::{self, Credentials};

use super::state::{InterfaceRecord, may_crash};
use super::teardown::{Step, Teardown, Undo};

/// Ethernet header and one VLAN tag, bytes: what a frame may be longer than the MTU.
const L2_BYTES: u32 = 18;
/// Longest frame for which a program without multi-buffer support can be attached, bytes: a page less headroom and the kernel's
/// own tail (veth and most drivers).
const LONGEST_WITHOUT_FRAGS: u32 = 3000;

/// Who has a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holder {
    /// The connection of this number.
    Lease(u64),
    /// Nobody any more, but the kernel has not let go of it.
    Leaving,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Interface {
    /// As it was leased first, and as it is looked for when it is gone.
    name: String,
    /// As it was seen last; index 0 when it is gone.
    link: Link,
    mode: ModeRequest,
    program: Option<Program>,
    /// Why there is no program, or why it is not attached natively.
    note: String,
    sends: DriverSends,
    generation: u32,
    holders: BTreeMap<u32, Holder>,
    /// Leases that are being taken back.
    leaving: Vec<Leaving>,
    /// What leases take, by their first queue.
    entries: BTreeMap<u32, Entries>,
    /// Leases that were taken back, all of them.
    ended: Vec<u64>,
    /// Since when it has no lease.
    idle_since: Option<Instant>,
    /// Where the program is pinned, an empty directory without one; none: the program goes with this process.
    pins: Option<PathBuf>,
    /// What the NIC was told of that.
    ledger: Ledger,
}

/// A lease that is being taken back.
#[derive(Debug)]
struct Leaving {
    lease: u64,
    queues: Range<u32>,
    teardown: Teardown,
}

impl Interface {
    /// Attaches the program. `places`: where it is pinned, and the file for what the NIC is told.
    pub(super) fn open(
        link: Link,
        mode: ModeRequest,
        places: Option<(PathBuf, PathBuf)>,
    ) -> Result<Self, Refusal> {
        let mut interface = Self::without_program(link, mode, places);
        interface.attach();
        match interface.program {
            Some(_) => Ok(interface),
            None => Err(Refusal::new(Reason::Program, interface.note.clone())),
        }
    }

    /// Goes on with what another steward left. Whatever cannot be used of it is taken off; then it is as if the program had been lost.
    pub(super) fn adopt(record: &InterfaceRecord, pins: PathBuf, notes: PathBuf) -> Self {
        let link = match Link::find(record.ifindex) {
            Ok(Some(link)) => link,
            _ => Link::gone(&record.name),
        };
        let mut interface = Self::without_program(link, record.mode(), Some((pins, notes)));
        interface.name.clone_from(&record.name);
        interface.generation = record.generation;
        let opened = interface
            .pins
            .as_deref()
            .map(|pins| Program::open_pinned(interface.link.index, pins));
        match opened {
            Some(Ok(program)) => {
                // Attached again and not recorded yet: holders do not know of it.
                if program.id() != record.program {
                    interface.generation = interface.generation.wrapping_add(1);
                }
                interface.note.clone_from(&record.note);
                interface.sends = DriverSends::by_index(interface.link.index);
                interface.program = Some(program);
            }
            Some(Err(error)) => {
                interface.note = super::with_sources(&error);
                tracing::warn!(
                    interface = record.name,
                    "program not taken over: {}",
                    interface.note
                );
                interface.unpin();
            }
            None => {}
        }
        interface
    }

    fn without_program(link: Link, mode: ModeRequest, places: Option<(PathBuf, PathBuf)>) -> Self {
        let (pins, notes) = places.unzip();
        Self {
            name: link.name.clone(),
            link,
            mode,
            program: None,
            note: String::new(),
            sends: DriverSends::NOTHING,
            generation: 0,
            holders: BTreeMap::new(),
            leaving: Vec::new(),
            entries: BTreeMap::new(),
            ended: Vec::new(),
            idle_since: None,
            pins,
            ledger: Ledger::open(notes),
        }
    }

    /// What a successor must know of it.
    pub(super) fn record(&self, number: u64) -> InterfaceRecord {
        InterfaceRecord {
            ifindex: self.link.index,
            program: self.program.as_ref().map_or(0, Program::id),
            generation: self.generation,
            note: self.note.clone(),
            ..InterfaceRecord::new(number, &self.name, self.mode)
        }
    }

    /// Empties the queues that nobody has: what a steward that died has left in them.
    pub(super) fn sweep(&mut self) {
        let free = (0..MAX_QUEUES).filter(|queue| !self.holders.contains_key(queue));
        let steps: BTreeSet<Step> = free.flat_map(Step::of_queue).collect();
        for step in &steps {
            if let Err(why) = self.undo(step) {
                tracing::warn!(interface = self.link.name, "{step:?}: {why}");
            }
        }
        // What the NIC was told for leases that nobody has any more.
        for first in self.ledger.noted() {
            if self.entries.contains_key(&first) {
                continue;
            }
            let nic = self.driver().ok().flatten();
            let parts = self.ledger.parts(nic.as_ref(), first);
            // Until it is undone nobody is to have the queue, if nobody has it by another lease.
            let free = !self.holders.contains_key(&first);
            self.leaving.push(Leaving {
                lease: 0,
                queues: first..first.saturating_add(free.into()),
                teardown: Teardown::new(parts.into_iter().map(Step::Nic)),
            });
            if free {
                self.holders.insert(first, Holder::Leaving);
            }
        }
        self.take_back();
    }

    fn attach(&mut self) {
        self.unpin();
        let frags = self.link.mtu.saturating_add(L2_BYTES) > LONGEST_WITHOUT_FRAGS;
        let attached = Program::attach(self.link.index, self.mode, frags);
        may_crash("attached");
        // A program that does not know what leases take must not be used by them: it is off again at once.
        let known = attached
            .map_err(|error| super::with_sources(&error))
            .and_then(|program| {
                let mut entries = self.entries.values();
                let installed = entries.try_for_each(|entries| entries.install(&program));
                installed.map_err(|error| super::with_sources(&error))?;
                Ok(program)
            });
        match known {
            Ok(mut program) => {
                self.note = program.fallback().unwrap_or_default().to_owned();
                self.sends = DriverSends::by_index(self.link.index);
                self.generation = self.generation.wrapping_add(1);
                tracing::info!(interface = self.link.name, mode = %program.mode(), program = program.id(), "program attached");
                self.pin(&mut program);
                self.program = Some(program);
                // An interface that was made anew has no rules; one that came back may have them still.
                let entries = self.entries.values_mut();
                entries.for_each(|entries| entries.tell(&self.link, &mut self.ledger));
            }
            Err(note) => self.note = note,
        }
    }

    /// Pins the program. If that cannot be it goes with this process.
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
                program.pin(pins).map_err(|error| super::with_sources(&error))
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
    fn unpin(&mut self) {
        if let Some(pins) = &self.pins
            && let Err(why) = remove_pins(pins)
        {
            tracing::error!(interface = self.link.name, "{}: {why}", pins.display());
        }
    }

    /// Takes the program off, and looks whether it is. True: there is none of ours any more.
    pub(super) fn detach(&mut self) -> bool {
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

    /// Whether it is gone, and had this name.
    pub(super) fn was(&self, name: &str) -> bool {
        self.link.index == 0 && self.name == name
    }

    /// Its index; 0 when it is gone.
    pub(super) fn index(&self) -> u32 {
        self.link.index
    }

    /// Whether nobody needs it any more.
    pub(super) fn is_idle(&self) -> bool {
        self.holders.is_empty()
    }

    /// Since when, as far as that was noticed.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        self.idle_since
    }

    /// Whether nobody has needed it for so long; without a program there is nothing to wait with.
    pub(super) fn is_over(&mut self, now: Instant, linger: Duration) -> bool {
        if !self.is_idle() {
            self.idle_since = None;
            return false;
        }
        let since = *self.idle_since.get_or_insert(now);
        self.program.is_none() || since + linger <= now
    }

    /// Whether a lease of this mode can have the program as it is attached.
    pub(super) fn suits(&self, mode: ModeRequest) -> bool {
        let program = self.program.as_ref();
        program.is_some_and(|program| match (mode, program.mode()) {
            (ModeRequest::Native, Mode::Skb) | (ModeRequest::Skb, Mode::Native) => false,
            (ModeRequest::Auto, _) | (ModeRequest::Native, Mode::Native) | (ModeRequest::Skb, Mode::Skb) => {
                true
            }
        })
    }

    /// Whether something is to be tried again soon.
    pub(super) fn is_unfinished(&self, now: Instant, linger: Duration) -> bool {
        let lingers = self.idle_since.is_some_and(|since| now < since + linger);
        self.program.is_none() || !self.leaving.is_empty() || (self.is_idle() && !lingers)
    }

    /// Reserves queues for a connection. `names`: what the policy names of what they are for.
    pub(super) fn reserve(&mut self, wanted: &Wanted, connection: u64, names: Names) -> Result<(), Refusal> {
        let queues = wanted.range();
        let name = &self.link.name;
        let program = self.program()?;
        if !self.suits(wanted.mode) {
            return Err(Refusal::new(
                Reason::Program,
                format!(
                    "the program on {name} is attached in {} mode for other leases: ask for that mode, or for none",
                    program.mode()
                ),
            ));
        }
        check(&self.link, wanted)?;
        for queue in queues.clone() {
            let text = match self.holders.get(&queue) {
                None => continue,
                Some(Holder::Lease(_)) => format!(
                    "queue {queue} of {name} is leased to another connection: choose another queue, or end its holder (after a restart of the \
                     steward: wait, it keeps queues a while for holders that come back)"
                ),
                Some(Holder::Leaving) => {
                    format!("queue {queue} of {name} is being taken back from its last holder: try again")
                }
            };
            return Err(Refusal::new(Reason::Taken, text));
        }
        self.holders
            .extend(queues.clone().map(|queue| (queue, Holder::Lease(connection))));
        self.idle_since = None;
        let mut entries = Entries::new(queues.clone(), wanted.filter.clone(), names);
        entries.look(&self.link.name);
        let installed = entries.install(self.program()?);
        if installed.is_ok() {
            entries.tell(&self.link, &mut self.ledger);
        }
        self.entries.insert(queues.start, entries);
        kernel(installed).inspect_err(|_| self.release(connection, queues))
    }

    /// A new socket with an RX ring, confined to the interface and placed beside the one that the queue may have, for `activate`.
    pub(super) fn socket(&self, queue: u32) -> Result<OwnedFd, Refusal> {
        let program = self.program()?;
        let failed = |what: &str, error: &dyn std::error::Error| {
            let text = format!(
                "{what} for queue {queue} of {}: {}",
                self.link.name,
                super::with_sources(error)
            );
            Refusal::new(Reason::Kernel, text)
        };
        let socket = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).map_err(
            |error| {
                failed(
                    "no AF_XDP socket (the steward needs CAP_NET_RAW and descriptors)",
                    &error,
                )
            },
        )?;
        sys::confine(socket.as_fd(), self.link.index)
            .map_err(|error| failed("cannot confine the socket", &error))?;
        // Before it is placed: see there.
        sockopt::set_xdp_rx_ring_size(&socket, RECEIVE_RING)
            .map_err(|error| failed("cannot make the socket's RX ring", &error))?;
        program
            .place_socket(queue, socket.as_fd())
            .map_err(|error| failed("cannot place the socket", &error))?;
        Ok(socket)
    }

    /// Frames go to the queue's socket.
    pub(super) fn activate(&self, queue: u32, conf: QueueConf) -> Result<(), Refusal> {
        if self.is_blind(queue) {
            return Err(Refusal::new(Reason::Impaired, entries::blind(&self.link.name)));
        }
        kernel(self.program()?.activate_queue(queue, conf))
    }

    /// The policy names other addresses and VLANs for the lease of these queues: what the NIC was told that it may not be any more
    /// is undone, and what it may be is told.
    pub(super) fn rename_entries(&mut self, queues: &Range<u32>, names: Names) {
        if let Some(entries) = self.entries.get_mut(&queues.start) {
            entries.rename(names, &self.link, &mut self.ledger);
        }
    }

    /// Whether the lease of a queue is for VLANs that cannot be told now.
    fn is_blind(&self, queue: u32) -> bool {
        let of_queue = |entries: &&Entries| entries.queues.contains(&queue);
        self.entries
            .values()
            .find(of_queue)
            .is_some_and(Entries::is_blind)
    }

    /// Frames go to the host.
    pub(super) fn deactivate(&self, queue: u32) -> Result<(), Refusal> {
        match &self.program {
            Some(program) => kernel(program.deactivate_queue(queue)),
            None => Ok(()),
        }
    }

    /// What the program counted.
    pub(super) fn counters(&self, queue: u32) -> Result<QueueCounters, Refusal> {
        kernel(self.program()?.counters(queue))
    }

    fn program(&self) -> Result<&Program, Refusal> {
        self.program.as_ref().ok_or_else(|| {
            let text = match self.link.index {
                0 => format!(
                    "interface {} is gone; the lease goes on when an interface of that name is there",
                    self.name
                ),
                _ => self.note.clone(),
            };
            Refusal::new(Reason::Impaired, text)
        })
    }

    /// Gives queues to a lease as another steward had done; false if that cannot be.
    pub(super) fn hold(&mut self, wanted: &Wanted, lease: u64, names: Names) -> bool {
        let queues = wanted.range();
        if queues.end > MAX_QUEUES || queues.clone().any(|queue| self.holders.contains_key(&queue)) {
            return false;
        }
        let mut entries = Entries::new(queues.clone(), wanted.filter.clone(), names);
        entries.look(&self.link.name);
        if let Some(program) = &self.program {
            let stopped = |queue| !entries.is_blind() || program.deactivate_queue(queue).is_ok();
            if entries.install(program).is_err() || !queues.clone().all(stopped) {
                return false;
            }
            entries.adopt(&self.link, &mut self.ledger);
        }
        self.entries.insert(queues.start, entries);
        self.holders
            .extend(queues.map(|queue| (queue, Holder::Lease(lease))));
        true
    }

    /// Whether something of this lease is still there.
    pub(super) fn has(&self, lease: u64) -> bool {
        self.leaving.iter().any(|leaving| leaving.lease == lease)
            || self
                .holders
                .values()
                .any(|&holder| holder == Holder::Lease(lease))
    }

    /// The lease has another number from now on.
    pub(super) fn hand_over(&mut self, from: u64, to: u64) {
        let theirs = self
            .holders
            .values_mut()
            .filter(|holder| **holder == Holder::Lease(from));
        theirs.for_each(|holder| *holder = Holder::Lease(to));
    }

    /// Takes a lease back: its frames go to the host at once, the rest as soon as it can be.
    pub(super) fn release(&mut self, lease: u64, queues: Range<u32>) {
        for queue in queues.clone() {
            // One store, which is not refused.
            let _ = self.deactivate(queue);
            self.holders.insert(queue, Holder::Leaving);
        }
        self.entries.remove(&queues.start);
        may_crash("deactivated");
        let nic = self.driver().ok().flatten();
        let parts = self.ledger.parts(nic.as_ref(), queues.start);
        let steps = queues.clone().flat_map(Step::of_queue);
        let teardown = Teardown::new(parts.into_iter().map(Step::Nic).chain(steps));
        self.leaving.push(Leaving {
            lease,
            queues,
            teardown,
        });
        self.take_back();
    }

    /// Its driver, by the name that it has now; `None` when it is gone.
    fn driver(&self) -> io::Result<Option<Ethtool>> {
        match Link::find(self.link.index).map_err(io::Error::other)? {
            Some(link) => Ethtool::open(&link.name).map(Some),
            None => Ok(None),
        }
    }

    /// Leases that were taken back since this was asked last.
    pub(super) fn take_ended(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.ended)
    }

    /// Goes on with what is being taken back.
    fn take_back(&mut self) {
        for mut leaving in std::mem::take(&mut self.leaving) {
            match leaving.teardown.go_on(self) {
                Ok(()) => {
                    may_crash("taken-back");
                    self.ledger.forget(leaving.queues.start);
                    self.holders.retain(|queue, _| !leaving.queues.contains(queue));
                    self.ended.push(leaving.lease);
                }
                Err(stuck) => {
                    // Once, and then less and less often.
                    if stuck.tries.is_power_of_two() {
                        tracing::warn!(interface = self.link.name, "{stuck}");
                    }
                    self.leaving.push(leaving);
                }
            }
        }
    }

    /// Tries again what was not done, and attaches the program again if it is missing. True if the facts changed.
    /// `taken`: indexes of interfaces that are leased, which it cannot come back as.
    pub(super) fn look(&mut self, taken: &[u32]) -> bool {
        let before = (self.facts(), self.entries.clone());
        self.take_back();
        match Link::find(self.link.index) {
            Ok(Some(link)) => self.link = link,
            Ok(None) => self.vanished(),
            // No answer is no reason to take anything down.
            Err(error) => tracing::warn!("{}", super::with_sources(&error)),
        }
        let id = self.program.as_ref().map(Program::id);
        if id.is_some() && steer::program_on(self.link.index).map(|program| program.id) != id {
            tracing::warn!(interface = self.link.name, "somebody has detached the program");
            self.program = None;
        }
        // Nobody waits for it when it has no holder.
        if self.program.is_none() && !self.is_idle() && self.find_again(taken) {
            self.attach();
        }
        for entries in self.entries.values_mut() {
            entries.look(&self.link.name);
            // Rather no frames than those of others.
            if let Some(program) = self.program.as_ref().filter(|_| entries.is_blind()) {
                for queue in entries.queues.clone() {
                    let _ = program.deactivate_queue(queue);
                }
            }
            entries.keep(&self.link, &mut self.ledger);
        }
        before != (self.facts(), self.entries.clone())
    }

    /// Whether there is something to attach to: the interface, whatever its name is now, or, if it is gone, one that has
    /// the name that it had and is nobody else's.
    fn find_again(&mut self, taken: &[u32]) -> bool {
        if self.link.index == 0
            && let Ok(link) = Link::by_name(&self.name)
            && !taken.contains(&link.index)
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

    /// What the holder of the lease of these queues is told.
    pub(super) fn facts_for(&self, queues: &Range<u32>) -> Facts {
        let mut facts = self.facts();
        let Some(entries) = self.entries.get(&queues.start) else {
            return facts;
        };
        facts.generation = facts.generation.wrapping_add(entries.renewed);
        facts.steered = entries.steered;
        let impaired = self.impairment(queues);
        facts.impaired = impaired.is_some();
        facts.steering = entries.note();
        let notes = impaired.filter(|note| !note.is_empty()).into_iter();
        let notes = notes.chain(Some(facts.note).filter(|note| !note.is_empty()));
        facts.note = notes.collect::<Vec<_>>().join("; ");
        facts
    }

    /// The lease of these queues, for whoever asks.
    pub(super) fn listed(&self, queues: &Range<u32>, peer: &Credentials) -> Listed {
        let facts = self.facts_for(queues);
        let entries = self.entries.get(&queues.start);
        Listed {
            number: 0,
            namespace: 0,
            pid: peer.pid.try_into().unwrap_or(0),
            uid: peer.uid,
            interface: facts.name,
            start_queue: queues.start,
            queues: queues.end - queues.start,
            filter: entries.map(|entries| entries.filter.clone()).unwrap_or_default(),
            steered: facts.steered,
            impaired: facts.impaired,
            orphaned: false,
        }
    }

    /// Why no frames come to these queues, apart from what the interface's own note says.
    fn impairment(&self, queues: &Range<u32>) -> Option<String> {
        let (name, have) = (&self.link.name, self.link.rx_queues);
        if self.program.is_none() {
            return Some(String::new());
        }
        if queues.end > have {
            return Some(format!(
                "{name} has {have} receive queue(s) now, queue {} of the lease is not there: add channels with `ethtool -L`",
                queues.end - 1
            ));
        }
        if self.is_blind(queues.start) {
            return Some(entries::blind(name));
        }
        (!self.link.up).then(|| format!("{name} is down"))
    }

    /// What all holders are told.
    pub(super) fn facts(&self) -> Facts {
        Facts {
            ifindex: self.link.index,
            name: self.link.name.clone(),
            mtu: self.link.mtu,
            mac: self.link.mac,
            rx_queues: self.link.rx_queues,
            up: self.link.up,
            partial_checksums: self.link.partial_checksums,
            mode: self.program.as_ref().map(Program::mode),
            program: self.program.as_ref().map_or(0, Program::id),
            sends: self.sends,
            generation: self.generation,
            steered: Steered::ByQueue,
            impaired: self.program.is_none(),
            note: self.note.clone(),
            steering: String::new(),
        }
    }
}

/// Whether an interface can have such a lease at all, as far as that is known without the program.
pub(super) fn check(link: &Link, wanted: &Wanted) -> Result<(), Refusal> {
    let (name, have, last) = (&link.name, link.rx_queues, wanted.range().end - 1);
    if last >= have.min(MAX_QUEUES) {
        let text = format!(
            "{name} has {have} receive queue(s), queue {last} was asked for: use a lower start-queue or fewer queues, or add channels \
             with `ethtool -L`"
        );
        return Err(Refusal::new(Reason::NoInterface, text));
    }
    entries::check_tags(name, &wanted.filter).map_err(|text| Refusal::new(Reason::NoInterface, text))
}

/// Takes off what is pinned in a directory, and removes it; nothing happens if there is none.
pub(super) fn remove_pins(pins: &Path) -> io::Result<()> {
    if !pins.is_dir() {
        return Ok(());
    }
    steer::detach_pinned(pins)?;
    fs::remove_dir_all(pins)
}

impl Undo for Interface {
    fn undo(&mut self, step: &Step) -> Result<(), String> {
        if let Step::Nic(part) = step {
            // The rules of an interface that is gone went with it, or away with it.
            return match self.driver() {
                Ok(None) => Ok(()),
                Ok(Some(mut nic)) => hardware::undo(&mut nic, part),
                Err(error) => Err(error),
            }
            .map_err(|error| error.to_string());
        }
        // Without the program there is nothing to take it back from.
        let Some(program) = &self.program else {
            return Ok(());
        };
        let undone = match *step {
            Step::Nic(_) => return Ok(()),
            Step::Entries { queue } => program.set_filter(queue, &Filter::default()),
            Step::Sockets { queue } => program.disable_queue(queue),
        };
        undone.map_err(|error| super::with_sources(&error))
    }
}

fn kernel<T>(result: Result<T, steer::QueueError>) -> Result<T, Refusal> {
    result.map_err(|error| Refusal::new(Reason::Kernel, super::with_sources(&error)))
}
