//! The steward: one thread and one loop, which answers messages, changes of interfaces, and the clock.
//!
//! # Theory of operation
//!
//! A round polls for the stop signal, connections, requests, room to send answers, and rtnetlink. In each round each
//! user gets at most one request done, however many connections it has (`connections::limits`). The steward never waits
//! for a lessee, and never touches a lessee's files: children do that (`job`). Other slow calls into the kernel
//! (attaching a program) delay the requests of other lessees, not their frames.
//!
//! A request is checked as a whole before anything is done for it. The program is attached for the first lease of an
//! interface, and stays for a while after the last one; how often a user may cause that is limited.
//!
//! State is in two tables: `Interface`s with their programs, and `Connection`s, each with at most one lease. A queue
//! belongs to one connection or to none. When a connection ends, for whatever reason, its queues are taken back in
//! the same round (`Server::end`). If the lessee died, the kernel has closed its sockets by then. A lessee that
//! closes its connection and keeps its sockets gets no frames any more, but can still send from its queue, and the
//! next lessee of the queue cannot bind until that process ends.
//!
//! When the steward dies, its programs are detached, as its descriptors are their BPF links, unless it has a
//! [`Store`]: then programs are pinned, leases are recorded, and the next steward continues with them (`journal`).

mod connections;
mod interface;
pub mod job;
mod journal;
mod leases;
#[cfg(test)]
mod named_tests;
mod operations;
pub mod part;
mod reload;
mod taps;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use crate::policy::Policy;
use crate::sys;
use connections::closing::{Closing, Over};
use connections::connection::{Connection, Incoming, lessees};
use connections::limits::{DeviceChanges, Turns};
use host::links::bridge::FdbChanges;
use host::links::{self, Changes};
use journal::file::may_crash;
use journal::restore::Orphan;
use leases::rings::Rings;
use leases::sockets::LostJob;
use part::{Loader, Part};
use program::backoff::{Backoff, RETRY};
use program::log_limit::LogLimits;
use program::rate::{Bucket, Rate};
use reload::Reload;
pub use reload::{NewPolicy, PolicySource};
use steward_protocol::{Answer, Reason, Refusal};
use taps::network_tap::{NetworkTap, TapAt, may_have_taps, network_at};
use taps::removals::Removals;

pub use connections::connection::By;
pub use connections::connection::{Held, Reply};
pub use connections::limits;
pub use interface::Interface;
pub use interface::netkits::Netkits;
pub use journal::file::{self, Entry, Journal};
pub use journal::state::{Store, StoreError};
pub use leases::sockets::OF_A_QUEUE;
pub use operations::{OPERATIONS, Operation};

/// How long the program stays on an interface without a lease: the next lease often follows soon, and a NIC may lose
/// its link and its frames for a moment each time a program is attached or detached.
pub const LINGER: Duration = Duration::from_secs(5);
/// How often all interfaces are checked because one changed. Lessees can change some interfaces, for example the tap
/// of their network, as often as they like.
const LOOKS: Rate = Rate {
    burst: 64,
    each: Duration::from_millis(20),
};
/// Descriptors kept in reserve for the time when no others are left: enough to start two child processes.
const RESERVE: usize = 12;
/// Pauses before a connection is accepted when there was no descriptor for it: the first, and the longest.
const NO_DESCRIPTOR: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(2)];

/// The steward; the module documentation describes it.
#[derive(Debug)]
pub struct Server {
    policy: Policy,
    listener: OwnedFd,
    changes: Changes,
    fdb_changes: FdbChanges,
    /// Forwarding databases of bridges are not read before this time.
    fdb_pause: Instant,
    /// Inode of the network namespace.
    namespace: u64,
    interfaces: BTreeMap<u64, Interface>,
    connections: BTreeMap<u64, Connection>,
    /// Taps of networks, to the host and to the wire.
    network_taps: BTreeMap<TapAt, NetworkTap>,
    /// When the programs of these taps are checked next, even if no event occurs.
    tap_programs_due: Instant,
    /// Removals of tap devices that are not finished.
    removals: Removals,
    /// Multicast rings of networks, and of users that had a network.
    rings: Rings,
    /// Leases from a previous steward whose lessees have not come back yet.
    orphans: BTreeMap<u64, Orphan>,
    /// State directory by which leases outlive this process; `None`: they end with it.
    store: Option<Store>,
    /// Number of the next connection or interface; never used twice.
    next: u64,
    /// When connections are accepted again.
    accepting: Backoff,
    /// See [`LOOKS`].
    looks: Bucket,
    /// Limits how often lessees cause changes of devices.
    device_changes: DeviceChanges,
    turns: Turns,
    reload: Option<Reload>,
    /// How long the program stays without a lease.
    linger: Duration,
    /// Jobs whose connection has ended, and that still run.
    lost_jobs: Vec<LostJob>,
    /// Ended connections: those still to be closed, and those being closed.
    unclosed: Vec<Over>,
    closing: Vec<Closing>,
    /// Descriptors that are closed when no others are left: refusing a request and ending a connection need some.
    reserve: Vec<OwnedFd>,
    /// Limits of log lines about leases, and about refused requests.
    leases: LogLimits,
    refusals: LogLimits,
    /// The part outside the core, while it is loaded; and how to load it, if there is one.
    part: Option<Box<dyn Part>>,
    loader: Option<Loader>,
    netkits: Option<&'static dyn Netkits>,
}

/// The reply to a request, or why it is refused.
pub type Answered = Result<Reply, Refusal>;

/// The numbers of the entries for which `is_so` returns true.
fn numbers<T>(of: &BTreeMap<u64, T>, is_so: impl Fn(&T) -> bool) -> Vec<u64> {
    let those = of.iter().filter(|(_, one)| is_so(one));
    those.map(|(&number, _)| number).collect()
}

/// The refusal for a connection without a lease.
#[must_use]
pub fn no_lease() -> Refusal {
    Reason::Lease.because("this connection has no lease: ask for one first")
}

impl Server {
    /// A steward that lessees reach by `listener`, a listening SOCK_SEQPACKET socket, for the interfaces in the network
    /// namespace of the calling thread.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn new(policy: Policy, listener: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&listener, true)?;
        // Before Linux 6.16 every process can send descriptors.
        let _ = sys::let_files(listener.as_fd(), false);
        let mut server = Self {
            policy,
            listener,
            changes: Changes::subscribe()?,
            fdb_changes: FdbChanges::subscribe()?,
            fdb_pause: Instant::now(),
            namespace: links::namespace(),
            interfaces: BTreeMap::new(),
            connections: BTreeMap::new(),
            network_taps: BTreeMap::new(),
            tap_programs_due: Instant::now(),
            removals: Removals::default(),
            rings: Rings::new(),
            orphans: BTreeMap::new(),
            store: None,
            next: 1,
            accepting: Backoff::new(NO_DESCRIPTOR[0], NO_DESCRIPTOR[1]),
            looks: Bucket::full(LOOKS, Instant::now()),
            device_changes: DeviceChanges::new(LINGER),
            turns: Turns::default(),
            reload: None,
            linger: LINGER,
            lost_jobs: Vec::new(),
            unclosed: Vec::new(),
            closing: Vec::new(),
            reserve: Vec::new(),
            leases: LogLimits::new(64),
            refusals: LogLimits::new(10),
            part: None,
            loader: None,
            netkits: None,
        };
        server.fill_reserve();
        server.remove_stray_taps();
        Ok(server)
    }

    /// Serves until `end` becomes readable. Dropping the value ends leases and programs, unless there is a
    /// [`Store`].
    ///
    /// # Errors
    /// The kernel's, if polling fails.
    pub fn run(&mut self, end: BorrowedFd<'_>) -> io::Result<()> {
        // A predecessor may have left unfinished work, and perhaps no event will occur.
        let mut look_at = self.next_look(None, Instant::now());
        loop {
            let ready = self.wait(end, look_at)?;
            if ready.end {
                return Ok(());
            }
            let now = Instant::now();
            self.end_jobs();
            self.removals.forget_finished();
            self.end_deserted();
            self.serve_ready(&ready.connections);
            // Before new connections are accepted, which may need the room of these.
            self.close_rest();
            if ready.accept {
                self.accept(now);
            }
            if ready.reload {
                self.reload();
            }
            if ready.changes {
                self.changes.drain();
                self.looks.left = self.looks.left.saturating_sub(1);
            }
            if ready.changes || look_at.is_some_and(|at| at <= now) {
                look_at = None;
                self.look();
            }
            let taps = &self.network_taps;
            let at = |tap: &NetworkTap| tap.advertised.at.map(|at| at.bridge);
            let advertises_by = |bridge| taps.values().any(|tap| at(tap) == Some(bridge));
            if ready.fdb && self.fdb_changes.drain(advertises_by) {
                self.look_behind_bridges();
            }
            self.look_at_stale_bridges(now);
            self.look_at_tap_programs(now);
            self.end_orphans(now);
            self.end_idle(now);
            if self.part_due(now).is_some_and(|at| at <= now) {
                self.go_on_by_part();
            }
            self.forget_idle();
            self.note_hints();
            self.note_lost_addresses();
            self.judge_tunnel_stations();
            self.record();
            self.notify_lessees();
            self.close_rest();
            look_at = self.next_look(look_at, now);
        }
    }

    /// When all interfaces are checked next although no event occurs, if at all; `planned`: the time set before.
    fn next_look(&self, planned: Option<Instant>, now: Instant) -> Option<Instant> {
        let is_unfinished = |interface: &Interface| interface.is_unfinished(now, self.linger);
        let unfinished = self.interfaces.values().any(is_unfinished)
            || self.network_taps.values().any(NetworkTap::is_unfinished);
        unfinished.then(|| planned.unwrap_or(now + RETRY))
    }

    /// Ends connections that are not read for now and whose process is gone. Such a connection can still be open: its
    /// descriptor may be in a message to the steward that is read only later.
    fn end_deserted(&mut self) {
        let deserted = |connection: &Connection| connection.is_busy() && connection.peer.is_gone();
        let over = numbers(&self.connections, deserted);
        over.into_iter().for_each(|number| self.end(number, None));
    }

    /// Handles events of connections: closed connections first, as that makes room; then one request of each user.
    fn serve_ready(&mut self, ready: &BTreeMap<u64, PollFlags>) {
        let mut waiting: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        for (&number, &events) in ready {
            let Some(connection) = self.connections.get_mut(&number) else {
                continue;
            };
            // Its unread requests are dropped.
            if events.intersects(PollFlags::HUP | PollFlags::ERR) || !connection.flush() {
                self.end(number, None);
            } else if !connection.has_unsent() && events.contains(PollFlags::IN) {
                waiting.entry(connection.peer.uid).or_default().insert(number);
            }
        }
        for number in self.turns.next(&waiting) {
            self.serve_requests(number);
        }
    }

    /// Handles the next request of one connection.
    fn serve_requests(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        match connection.receive(operations::by) {
            Incoming::Nothing => {}
            Incoming::End => self.end(number, None),
            Incoming::Broken(malformed) => {
                if self.refusals.may_log(connection.peer.uid) {
                    tracing::warn!(pid = connection.peer.pid, "connection closed: {malformed}");
                }
                self.end(number, Some(Reason::Malformed.because(malformed.to_string())));
            }
            Incoming::Request(serial, request, By::Steward) => {
                let answered = operations::act(self, number, &request);
                self.reply(number, serial, answered);
            }
            Incoming::Request(serial, request, by) => self.run_job(number, serial, (&request, by)),
        }
    }

    fn reply(&mut self, number: u64, serial: u32, answered: Answered) {
        let reply = match answered {
            Ok(reply) => reply,
            Err(refusal) => {
                if let Some(connection) = self.connections.get(&number) {
                    self.refusals
                        .log_refusal(&connection.peer, &format!("refused: {refusal}"));
                }
                Answer::Refused(refusal).into()
            }
        };
        let sent = self
            .connections
            .get_mut(&number)
            .is_some_and(|connection| connection.answer(serial, reply));
        if !sent {
            self.end(number, None);
        }
    }

    /// A connection with its lease, and the interface.
    fn lessee(&self, number: u64) -> Result<(&Connection, &Held, &Interface), Refusal> {
        let connection = self.connections.get(&number).ok_or_else(no_lease)?;
        let held = connection.held.as_ref().ok_or_else(no_lease)?;
        let interface = self.interfaces.get(&held.interface).ok_or_else(no_lease)?;
        Ok((connection, held, interface))
    }

    /// The lease of a connection, and the interface.
    ///
    /// # Errors
    /// It has none.
    pub fn lessee_mut(&mut self, number: u64) -> Result<(&Held, &mut Interface), Refusal> {
        let connection = self.connections.get(&number).ok_or_else(no_lease)?;
        let held = connection.held.as_ref().ok_or_else(no_lease)?;
        let interface = self.interfaces.get_mut(&held.interface).ok_or_else(no_lease)?;
        Ok((held, interface))
    }

    /// Ends a connection and its lease. `why` is sent to the lessee, if there is a reason.
    fn end(&mut self, number: u64, why: Option<Refusal>) {
        let Some(mut connection) = self.connections.remove(&number) else {
            return;
        };
        self.lose_job(&mut connection);
        if connection.by_part.take().is_some() {
            self.by_part(|part, server| part.end(server, number));
            self.go_on_by_part();
        }
        if let Some(held) = connection.held.take()
            && let Some(interface) = self.interfaces.get(&held.interface)
        {
            let name = interface.link.name.clone();
            self.release(&held);
            // Only after the release: tests and scripts rely on this line.
            if self.leases.may_log(connection.peer.uid) {
                let (pid, queues) = (connection.peer.pid, held.wanted.range());
                tracing::info!(pid, interface = name, ?queues, "lease ended");
            }
        }
        if let Some(why) = why {
            connection.refuse(why);
        }
        self.close(connection);
    }

    /// Ends a lease.
    fn release(&mut self, held: &Held) {
        self.end_send_taps(held);
        if may_have_taps(&held.wanted) {
            // Before others can lease the queues.
            self.end_network_taps(|_, (network, _)| network == network_at(held));
        }
        if let Some(interface) = self.interfaces.get_mut(&held.interface) {
            interface.release(held.wanted.range());
        }
        self.forget_if_idle(held.interface);
    }

    /// Takes the program off an interface that has had no lease for the linger time.
    fn forget_if_idle(&mut self, at: u64) {
        let now = Instant::now();
        if let Some(interface) = self.interfaces.get_mut(&at)
            && interface.is_over(now, self.linger)
        {
            self.forget(at);
        }
    }

    /// Takes the program off an interface without leases. Returns whether it is off.
    fn forget(&mut self, at: u64) -> bool {
        let Some(interface) = self.interfaces.get_mut(&at) else {
            return true;
        };
        let now = Instant::now();
        if !interface.detaching.is_due(now) {
            return false;
        }
        if !interface.detach() {
            interface.detaching.failed(now);
            return false;
        }
        self.interfaces.remove(&at);
        self.record();
        may_crash("forgotten");
        true
    }

    fn forget_idle(&mut self) {
        let idle = numbers(&self.interfaces, Interface::is_idle);
        idle.into_iter().for_each(|at| self.forget_if_idle(at));
    }

    /// Sets how long a program stays on an interface after its last lease; the default is [`LINGER`]. In that time, or
    /// in [`LINGER`] if that is shorter, a user may cause one more program to be attached.
    #[must_use]
    pub fn with_linger(mut self, linger: Duration) -> Self {
        (self.linger, self.device_changes) = (linger, DeviceChanges::new(linger));
        self
    }

    /// Detaches programs without leases now instead of leaving them to the next steward. Call this after serving ended.
    pub fn end_lingering(&mut self) {
        self.linger = Duration::ZERO;
        self.forget_idle();
        self.go_on_by_part();
    }

    /// Checks all interfaces, zero-copy queues and taps again.
    fn look(&mut self) {
        let mut of_host = Vec::new();
        let taken: Vec<u32> = self
            .interfaces
            .values()
            .map(|interface| interface.link.index)
            .collect();
        for (&at, interface) in &mut self.interfaces {
            let changed = interface.look(&taken);
            if std::mem::take(&mut interface.other_of_host) {
                of_host.push(at);
            }
            let theirs = lessees(&mut self.connections, |held| held.interface == at);
            theirs.for_each(|lessee| lessee.dirty |= changed);
        }
        of_host.into_iter().for_each(|at| self.judge_addresses_on(at));
        self.by_part(|part, server| part.look(server));
        self.go_on_by_part();
        self.look_at_network_taps();
        self.look_at_tunnels();
        self.forget_idle();
    }
}
