//! Sockets of leases. Registering memory, binding, and waiting until the queue of a closed socket is free are [`Job`]s.
//! Also the limit of memory in a user's sockets.
//!
//! A lessee has one such request in progress at a time. Its further requests wait in its connection, also while its
//! user or rule has as many jobs as allowed. Only the steward has a socket until it is bound.
//!
//! Before Linux 6.4 the rings of a bound socket cannot be mapped. There a socket is handed over as soon as it has
//! memory, and its lessee binds it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use steer::with_sources;
use xsk::PreferNode;

use crate::capabilities::ChildWork;
use crate::server::connections::connection::{By, Connection, Reply};
use crate::server::interface::{Bound, Holds, Interface, Memory, Registered, bytes_held};
use crate::server::job::{self, Attempt, Job, Outcome, Pending, Probe, QueueAt, failed, in_time};
use crate::server::operations;
use crate::server::{Answered, Server, no_lease};
use crate::sys::{
    self,
    child::{self, LockedFor},
};
use host::maps_bound_rings;
use steward_protocol::{Answer, Reason, Refusal, Request, Rings, Step, UmemLayout};

/// Above this size of memory, a failed bind takes longer than testing first whether the queue is free, bytes.
const LARGE: u64 = 64 << 20;
/// Memory allowed for each leased queue if the rule has no `memlock`, bytes: enough for a lessee that copies frames.
pub const OF_A_QUEUE: u64 = 16 << 20;

const NO_SOCKET: &str = "no AF_XDP socket (the steward needs CAP_NET_RAW and descriptors)";
/// Error text where the kernel counts more memory than [`Server::check_memory`] does.
const LOCKED: &str = "sockets that this user has kept hold as much memory as the policy allows it, and other locked \
                      memory of the user counts, too: end what holds it, or raise `memlock` in the rule";

const NO_SHARING: &str = "memory of one socket for several takes Linux 6.4, where rings of sockets that are bound can \
                          be mapped: leave --shared-umem out";
const UNKNOWN_SOCKET: &str = "the socket with the memory to share was not bound by this steward for this user, or \
                              is not used any more: register the memory";

/// A running job whose connection has ended.
#[derive(Debug)]
pub(crate) struct LostJob {
    uid: u32,
    /// Rule of the policy; reset when the policy changes.
    pub(crate) rule: Option<usize>,
    pub(crate) pending: Pending,
}

impl Server {
    /// Starts the job that the next message on a connection requests; the message is still in the socket. If user or
    /// rule may not have one more job, the connection waits.
    pub(crate) fn run_job(&mut self, number: u64, serial: u32, (request, by): (&Request, By)) {
        let Some(connection) = self.connections.get(&number) else {
            return;
        };
        let (uid, rule) = (connection.peer.uid, connection.charged());
        if !self.has_room_for_job(uid, rule) {
            self.connections.entry(number).and_modify(|own| own.waits = true);
            return;
        }
        let begun = operations::begin(self, number, request);
        // A child receives a message with descriptors. A connection without a lease has sent none.
        let has_files = rule.is_some() && by == By::ChildWithFiles;
        let begun = match has_files {
            true => begun.or_else(|refusal| self.discard(number, refusal)),
            false => begun,
        };
        let Some(connection) = self.connections.get_mut(&number) else {
            return;
        };
        if !has_files {
            connection.discard();
        }
        match begun {
            Ok(pending) => connection.pending = Some(Pending { serial, ..pending }),
            Err(refusal) if has_files => self.end(number, Some(refusal)),
            Err(refusal) => self.reply(number, serial, Err(refusal)),
        }
    }

    /// Has a child receive and drop the message of a refused request, with its descriptors. The child's own descriptors
    /// come from the reserve if no others are left.
    fn discard(&mut self, number: u64, refusal: Refusal) -> Result<Pending, Refusal> {
        let connection = self.connections.get(&number).ok_or_else(no_lease)?;
        let connection = connection.as_fd();
        let job = Job::discard(connection).or_else(|_| {
            self.reserve.clear();
            Job::discard(connection)
        })?;
        Ok(Pending::new(job, |_, _, _| Err(refusal)))
    }

    /// Jobs that have not been seen to end: the user and the rule that each counts for.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = (u32, Option<usize>, &Pending)> {
        let connections = self.connections.values();
        let waited_for =
            connections.filter_map(|own| Some((own.peer.uid, own.charged(), own.pending.as_ref()?)));
        let lost = self.lost_jobs.iter();
        waited_for.chain(lost.map(|lost| (lost.uid, lost.rule, &lost.pending)))
    }

    /// Whether a user may have one more job, and a rule of the policy.
    fn has_room_for_job(&self, uid: u32, rule: Option<usize>) -> bool {
        let of_user = self.jobs().filter(|&(other, ..)| other == uid);
        let of_rule = self.jobs().filter(|&(_, other, _)| other == rule);
        of_user.count() < job::OF_A_USER && (rule.is_none() || of_rule.count() < job::OF_A_RULE)
    }

    /// Ends the job of a connection that ends.
    pub(crate) fn lose_job(&mut self, connection: &mut Connection) {
        let (uid, rule) = (connection.peer.uid, connection.charged());
        if let Some(pending) = connection.pending.take() {
            pending.job.kill();
            let pending = pending.of_nobody();
            self.lost_jobs.push(LostJob { uid, rule, pending });
        }
    }

    pub(crate) fn register(
        &mut self,
        number: u64,
        queue: u32,
        umem: &UmemLayout,
        rings: &Rings,
    ) -> Result<Pending, Refusal> {
        let memory = Memory {
            number: self.next_number(),
            bytes: umem.len_bytes(),
        };
        let holds = Holds::one(memory, false);
        self.allow_memory(number, queue, holds)?;
        let (connection, held, interface) = self.lessee(number)?;
        let socket = new_socket(self.policy.rule(held.rule).busy_poll)?;
        if !maps_bound_rings() {
            sys::confine(socket.as_fd(), interface.link.index)
                .map_err(|error| kernel("cannot confine the socket", &error))?;
        }
        let locked_for = self.locked_for(connection.peer.uid, held.rule);
        let (to, connection) = (socket.as_fd(), connection.as_fd());
        let job = begin_near(interface, ChildWork::Register, &[to, connection], || {
            locked_for
                .map_or(Ok(()), child::count_for)
                .map_err(failed(Step::Register))?;
            let memory = child::map_parts(connection, &umem.parts).map_err(failed(Step::Map))?;
            child::register(to, memory, umem).map_err(failed(Step::Register))?;
            child::make_rings(to, rings).map_err(failed(Step::Rings))
        })?;
        let no_buffers = Errno::NOBUFS.raw_os_error().cast_unsigned();
        let pending = Pending::new(job, move |server, number, outcome| match outcome {
            Outcome::Failed {
                step: Step::Register,
                errno,
            } if errno == no_buffers && locked_for.is_some() => Reason::Memlock.refuse(LOCKED),
            Outcome::Done(_) if maps_bound_rings() => {
                let (_, interface) = server.lessee_mut(number)?;
                let registered = Registered { socket, memory };
                interface.sockets.put_registered(queue, registered);
                Ok(Answer::Done.into())
            }
            Outcome::Done(_) => server.hand_over(number, queue, socket, (memory, false)),
            outcome => outcome.not_done(),
        });
        Ok(pending.holding(holds))
    }

    pub(crate) fn share(
        &mut self,
        number: u64,
        (queue, wait_ms): (u32, u32),
        cookie: u64,
        rings: &Rings,
    ) -> Result<Pending, Refusal> {
        let memory = self.memory_of(number, cookie)?;
        let holds = Holds::one(memory, true);
        self.allow_memory(number, queue, holds)?;
        let (connection, held, interface) = self.lessee(number)?;
        interface.program()?;
        if !maps_bound_rings() {
            return Reason::Kernel.refuse(NO_SHARING);
        }
        let socket = new_socket(self.policy.rule(held.rule).busy_poll)?;
        let at = queue_at(interface, queue, wait_ms);
        let (to, connection) = (socket.as_fd(), connection.as_fd());
        let job = begin_near(interface, ChildWork::Files, &[to, connection], || {
            let first = child::take_socket(connection, cookie).map_err(failed(Step::Share))?;
            child::make_rings(to, rings).map_err(failed(Step::Rings))?;
            let bound = in_time(at.deadline(), || {
                child::bind_sharing(to, at.ifindex, at.queue, first.as_fd())
            });
            std::mem::forget(first);
            bound.map_err(failed(Step::Bind))
        })?;
        let pending = Pending::new(job, move |server, number, outcome| match outcome {
            Outcome::Done(_) => server.hand_over(number, queue, socket, (memory, true)),
            outcome => outcome.not_done(),
        });
        Ok(pending.holding(holds))
    }

    /// A number for registered memory; never used twice.
    fn next_number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// The memory of a socket that was bound here for the user of a connection.
    fn memory_of(&self, number: u64, cookie: u64) -> Result<Memory, Refusal> {
        let uid = self.peer(number).ok_or_else(no_lease)?.uid;
        let theirs = self.all_leases().filter(|lease| lease.peer.uid == uid);
        let bound = theirs.filter_map(|lease| {
            let sockets = &self.interfaces.get(&lease.held.interface)?.sockets;
            let mut bound = lease.held.wanted.range().filter_map(|queue| sockets.bound(queue));
            bound.find(|bound| bound.cookie == cookie && cookie != 0)
        });
        let memory = bound.map(|bound| bound.memory).next();
        memory.ok_or_else(|| Reason::Unregistered.because(UNKNOWN_SOCKET))
    }

    /// Memory that a user's sockets may have under a rule, bytes.
    fn allowed_memory(&self, uid: u32, rule: usize) -> u64 {
        let theirs = self.all_leases().filter(|lease| lease.peer.uid == uid);
        let queues: u64 = theirs.map(|lease| u64::from(lease.held.wanted.queues)).sum();
        self.policy.rule(rule).memlock.unwrap_or(queues * OF_A_QUEUE)
    }

    /// The user that the kernel charges memory to, and the limit: twice the policy's, as a queue that changes memory
    /// has both for a moment. `None` if the steward cannot set that limit.
    fn locked_for(&self, uid: u32, rule: usize) -> Option<LockedFor> {
        let allowed = self.allowed_memory(uid, rule);
        let bytes = allowed.saturating_mul(2);
        sys::can_limit_memory(bytes).then_some(LockedFor { uid, bytes })
    }

    pub(crate) fn bind(
        &mut self,
        number: u64,
        queue: u32,
        flags: u32,
        wait_ms: u32,
    ) -> Result<Pending, Refusal> {
        let (held, interface) = self.lessee_mut(number)?;
        held.check(queue)?;
        interface.program()?;
        let at = queue_at(interface, queue, wait_ms);
        let registered = interface.sockets.take_registered(queue)?;
        let flags = u16::try_from(flags).unwrap_or(0);
        let probes = registered.memory.bytes > LARGE && at.probe == Probe::Refused;
        let (memory, socket) = (registered.memory, registered.socket.as_fd());
        let job = match Job::begin(ChildWork::Bind, &[socket], || {
            at.bind(socket, flags, probes).map_err(failed(Step::Bind))
        }) {
            Ok(job) => job,
            Err(refusal) => {
                interface.sockets.put_registered(queue, registered);
                return Err(refusal);
            }
        };
        let pending = Pending::new(job, move |server, number, outcome| match outcome {
            Outcome::Done(_) => server.hand_over(number, queue, registered.socket, (memory, false)),
            Outcome::Failed { .. } => {
                let (_, interface) = server.lessee_mut(number)?;
                interface.sockets.put_registered(queue, registered);
                outcome.not_done()
            }
            Outcome::Lost => outcome.not_done(),
        });
        Ok(pending.holding(Holds::one(memory, false)))
    }

    pub(crate) fn await_free(&self, number: u64, queue: u32, wait_ms: u32) -> Result<Pending, Refusal> {
        let (_, held, interface) = self.lessee(number)?;
        let at = queue_at(interface, held.check(queue)?, wait_ms);
        let job = Job::begin(ChildWork::Bind, &[], || at.run().map_err(failed(Step::Await)))?;
        Ok(Pending::new(job, |_, _, outcome| match outcome {
            Outcome::Done(_) => Ok(Answer::Done.into()),
            outcome => outcome.not_done(),
        }))
    }

    /// Collects ended jobs, and answers their requests.
    pub(crate) fn end_jobs(&mut self) {
        let lost = self.lost_jobs.len();
        self.lost_jobs.retain(|lost| lost.pending.job.outcome().is_none());
        let mut done = Vec::new();
        for (&number, connection) in &mut self.connections {
            if let Some(pending) = connection.pending.take() {
                match pending.job.outcome() {
                    None => connection.pending = Some(pending),
                    Some(outcome) => done.push((number, pending, outcome)),
                }
            }
        }
        if done.is_empty() && self.lost_jobs.len() == lost {
            return;
        }
        for (number, pending, outcome) in done {
            let serial = pending.serial;
            // The child died before it received the message, which may have descriptors.
            let is_left = |connection: &Connection| connection.has_request(serial);
            if matches!(outcome, Outcome::Lost) && self.connections.get(&number).is_some_and(is_left) {
                self.end(
                    number,
                    Some(Reason::Kernel.because("no process for it: connect again")),
                );
                continue;
            }
            let answered = (pending.conclude)(self, number, outcome);
            self.reply(number, serial, answered);
        }
        // Some jobs have ended: waiting connections may try again.
        for connection in self.connections.values_mut() {
            connection.waits = false;
        }
    }

    /// Places a socket in the program's map, and sends it to its lessee.
    fn hand_over(
        &mut self,
        number: u64,
        queue: u32,
        socket: OwnedFd,
        (memory, shares): (Memory, bool),
    ) -> Answered {
        let (_, interface) = self.lessee_mut(number)?;
        interface.place(queue, socket.as_fd())?;
        // This does not fail in practice; without a cookie the memory cannot be shared.
        let cookie = rustix::net::sockopt::socket_cookie(&socket).unwrap_or(0);
        let bound = Bound {
            memory,
            cookie,
            shares,
        };
        interface.sockets.note_bound(queue, Some(bound));
        Ok(Reply::with(Answer::Done, vec![socket]))
    }

    /// Stops counting the memory of those sockets of a connection's user that are closed by now.
    fn forget_closed(&mut self, number: u64) {
        let (Some(uid), Ok(other)) = (self.peer(number).map(|peer| peer.uid), ring_alone()) else {
            return;
        };
        let theirs = self.all_leases().filter(|lease| lease.peer.uid == uid);
        let theirs = theirs.map(|lease| (lease.held.interface, lease.held.wanted.range()));
        for (at, queues) in theirs.collect::<Vec<_>>() {
            if let Some(interface) = self.interfaces.get_mut(&at) {
                interface.forget_closed(queues, other.as_fd());
            }
        }
    }

    /// Checks whether the socket of this queue may have this memory. Before refusing, it checks which other sockets are
    /// closed by now.
    fn allow_memory(&mut self, number: u64, queue: u32, wanted: Holds) -> Result<(), Refusal> {
        if self.check_memory(number, queue, wanted).is_ok() {
            return Ok(());
        }
        self.forget_closed(number);
        self.check_memory(number, queue, wanted)
    }

    /// Whether a user may have that memory in the socket of this queue, in addition to its other sockets.
    fn check_memory(&self, number: u64, queue: u32, wanted: Holds) -> Result<(), Refusal> {
        let (connection, held, _) = self.lessee(number)?;
        held.check(queue)?;
        let uid = connection.peer.uid;
        let under_way = self.jobs().filter(|&(other, ..)| other == uid);
        let mut theirs: Vec<Holds> = under_way.map(|(_, _, pending)| pending.holds).collect();
        for lease in self.all_leases().filter(|lease| lease.peer.uid == uid) {
            let Some(interface) = self.interfaces.get(&lease.held.interface) else {
                continue;
            };
            let others = lease.held.wanted.range();
            let others = others.filter(|&other| (lease.held.interface, other) != (held.interface, queue));
            theirs.extend(others.map(|other| interface.sockets.holds(other)));
        }
        let before = bytes_held(&theirs);
        theirs.push(wanted);
        let used = bytes_held(&theirs);
        let allowed = self.allowed_memory(uid, held.rule);
        if used <= allowed {
            return Ok(());
        }
        let kib = |bytes: u64| bytes.div_ceil(1024);
        Reason::Memlock.refuse(format!(
            "queue {queue} needs {} KiB of memory, which makes {} KiB with user {uid}'s other queues, and rule {} \
             of the policy allows {} KiB: raise its `memlock`, or ask for less (fewer queues, memory=copy, a smaller \
             packet-memory)",
            kib(used - before),
            kib(used),
            held.rule + 1,
            allowed / 1024,
        ))
    }
}

/// Starts a job that allocates rings, preferably on the NUMA node of the interface.
fn begin_near(
    interface: &Interface,
    kind: ChildWork,
    kept: &[BorrowedFd<'_>],
    work: impl FnOnce() -> Attempt<()>,
) -> Result<Job, Refusal> {
    let _near = interface.link.node.and_then(PreferNode::begin);
    Job::begin(kind, kept, work)
}

/// A queue, and how long to wait until it is free.
fn queue_at(interface: &Interface, queue: u32, wait_ms: u32) -> QueueAt {
    QueueAt {
        ifindex: interface.link.index,
        queue,
        wait: Duration::from_millis(wait_ms.into()),
        probe: Probe::of(interface.sends.most_pieces),
    }
}

/// An unbound socket with an RX ring, for [`Program::has_socket`](steer::Program::has_socket).
fn ring_alone() -> io::Result<OwnedFd> {
    let socket = xsk::new_socket()?;
    rustix::net::sockopt::set_xdp_rx_ring_size(&socket, 1)?;
    Ok(socket)
}

/// A new socket. `busy_poll`: how many frames it may take in one busy poll of the driver; `None`: no busy polling.
fn new_socket(busy_poll: Option<u16>) -> Result<OwnedFd, Refusal> {
    let socket = xsk::new_socket().map_err(|error| kernel(NO_SOCKET, &error))?;
    if let Some(budget) = busy_poll {
        sys::allow_busy_poll(socket.as_fd(), budget)
            .map_err(|error| kernel("cannot let the socket poll the driver (Linux 5.11)", &error))?;
    }
    Ok(socket)
}

fn kernel(what: &str, error: &dyn std::error::Error) -> Refusal {
    Reason::Kernel.because(format!("{what}: {}", with_sources(error)))
}
