//! Leases of a queue for io_uring zero-copy receive.
//!
//! # Theory of operation
//!
//! Such a queue has no XDP program and no AF_XDP socket: the kernel allows one or the other on an interface. The
//! queue is registered with the lessee's own ring ([`crate::sys::zcrx`]); the steward keeps nothing of it.
//!
//! ```text
//!   lease      allowed by the policy; the queue is free; headers are split; the main RSS table does not name the queue
//!   registered the queue restarts with the lessee's memory; then n-tuple rules bring it the lease's flows
//!   ended      the rules go at once; when no memory is bound to the queue any more, the table is restored
//! ```
//!
//! The kernel has no way to take a queue from a ring. So a lessee that ends its connection and runs on keeps it,
//! without frames. Until its ring is gone no lease can have the queue, and the main table does not name it, as other
//! processes' payload would go to that memory ([`crate::hardware::apart`]).
//!
//! The configuration of the NIC is saved in a file before it is set, one for each queue. The next steward undoes all
//! of it: lessees see the end of their connection, and receive by the kernel's stack.

mod refusals;
mod saved;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Instant;

use program::peer::process_of;
use rustix::thread::CapabilitySet;
use steer::{Filter, with_sources};

use self::refusals::{check_split, failed, not_apart};
use self::saved::Charge;
pub(super) use self::saved::ZcrxQueues;

use super::file::may_crash;
use super::job::{self, Job, Outcome, Pending, lost};
use super::limits::DeviceChange;
use super::sockets::OF_A_QUEUE;
use super::zcrx_lease::{QueueKey, ZcrxLease};
use super::{Answered, Server};
use crate::hardware::apart::{self, NotApart};
use crate::hardware::{Ethtool, bound};
use crate::links::Link;
use crate::protocol::{
    Answer, Listed, Reason, Refusal, Steered, Step, ZcrxRegistered, ZcrxRings, ZcrxWanted,
};
use crate::sys::child;
use crate::sys::zcrx::{self, QueueOrder, UserAndGroup};

fn gone() -> Refusal {
    Reason::Impaired.because("the interface is gone: end the lease")
}

impl Server {
    /// Handles a request for a lease.
    pub(super) fn lease_queue(&mut self, number: u64, wanted: &ZcrxWanted) -> Answered {
        let peer = self.newcomer(number)?;
        let rule = self.policy.find_zcrx(&peer, wanted, |rule| self.leased(rule))?;
        refusals::check_takes_rings()?;
        let link = Link::by_name(&wanted.interface)
            .map_err(|error| Reason::NoInterface.because(with_sources(&error)))?;
        let is_loopback = Link::is_loopback(link.index).unwrap_or(false);
        let key = (!is_loopback).then_some((link.index, wanted.queue));
        if let Some(key) = key {
            self.check_queue(&link, key)?;
            let changes = &mut self.device_changes;
            changes.take(DeviceChange::NicSetUp, &link.name, peer.uid, Instant::now())?;
            let apart = self.set_apart(&link, key, wanted, self.policy.rule(rule).zcrx_setup);
            apart.inspect_err(|_| self.zcrx.abandon(key))?;
        }
        may_crash("zcrx-leased");
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.rule = Some(rule);
            connection.hold_queue(ZcrxLease {
                wanted: wanted.clone(),
                key,
                rule,
                bytes: None,
                steered: false,
            });
        }
        if self.leases.may_log(peer.uid) {
            let ZcrxWanted { interface, queue, .. } = wanted;
            tracing::info!(
                pid = peer.pid,
                uid = peer.uid,
                interface,
                queue,
                rule = rule + 1,
                "leased (zcrx)"
            );
        }
        Ok(Answer::Done.into())
    }

    /// Checks that nobody has a queue.
    fn check_queue(&self, link: &Link, key: QueueKey) -> Result<(), Refusal> {
        let (name, queue) = (&link.name, key.1);
        if queue >= link.rx_queues {
            return Reason::NoInterface.refuse(format!(
                "interface {name} has {} receive queue(s), no queue {queue}: choose a lower one, or `ethtool -L`",
                link.rx_queues
            ));
        }
        let taken = |by: String| {
            Reason::Taken.refuse(format!(
                "queue {queue} of {name} is taken by {by}: choose another queue, or end its lessee"
            ))
        };
        if self.zcrx_leases().any(|(_, _, held)| held.key == Some(key)) {
            return taken("another lease (zcrx)".to_owned());
        }
        if self.zcrx.leaving().any(|leaving| leaving == key) {
            return taken("a lease that is being taken back, until its lessee's ring is closed".to_owned());
        }
        let with_program = self
            .interfaces
            .values()
            .find(|interface| interface.link.index == link.index);
        if with_program.is_some_and(|interface| !interface.is_idle()) {
            return Reason::Program.refuse(format!(
                "queues of {name} are leased for AF_XDP, and the kernel has either XDP or zero-copy receive on an \
                 interface: end these leases, or lease from another interface"
            ));
        }
        if with_program.is_some() || steer::program_on(link.index).is_some() {
            return Reason::Program.refuse(format!(
                "an XDP program is on {name}, and the kernel has either XDP or zero-copy receive on an interface: take \
                 it off (`ip link set dev {name} xdp off`; the steward's own goes a while after its last lease)"
            ));
        }
        match bound::to(link.index, queue) {
            Ok(None) => Ok(()),
            Ok(Some(what)) => taken(format!("{} of a process without a lease", what.words())),
            Err(error) => Reason::Kernel.refuse(format!(
                "the kernel does not report the owner of queue {queue} of {name} (Linux 6.8 does): {error}"
            )),
        }
    }

    /// Whether an interface may have an XDP program, as far as such leases are concerned.
    pub(super) fn check_no_queue_of(&self, link: &Link) -> Result<(), Refusal> {
        let is_of = |key: QueueKey| key.0 == link.index;
        let held = self.zcrx_leases().filter_map(|(_, _, held)| held.key);
        match held.chain(self.zcrx.leaving()).find(|&key| is_of(key)) {
            None => Ok(()),
            Some((_, queue)) => {
                Reason::Taken.refuse(format!(
                    "queue {queue} of {} is leased for zero-copy receive, and the kernel has either XDP or that on an \
                     interface: end that lease, or lease from another interface",
                    link.name
                ))
            }
        }
    }

    /// Has the NIC split header and data, and steer all other frames to other queues.
    fn set_apart(
        &mut self,
        link: &Link,
        key: QueueKey,
        wanted: &ZcrxWanted,
        may_set_up: bool,
    ) -> Result<(), Refusal> {
        check_split(link, may_set_up)?;
        let named = |error: &NotApart| not_apart(link, error);
        let mut nic = Ethtool::open(&link.name).map_err(|error| named(&NotApart::NoRules(error)))?;
        let why = match apart::check(&nic, key.1, &wanted.flows) {
            Ok(()) => {
                return self
                    .zcrx
                    .path(key)
                    .map(drop)
                    .map_err(|error| named(&NotApart::Save(error)));
            }
            Err(why) => why,
        };
        if !matches!(why, NotApart::InTable(_)) || !may_set_up {
            return Err(named(&why));
        }
        let mut plan = self.zcrx.plan_of(key);
        let zcrx = &mut self.zcrx;
        let moved = apart::move_table(&mut nic, &mut plan, &mut |plan| zcrx.save(&link.name, key, plan));
        moved.map_err(|error| named(&error))
    }

    /// Checks again, as the NIC's configuration may have changed since the queue was leased.
    fn still_apart(&mut self, uid: u32, held: &ZcrxLease) -> Result<(), Refusal> {
        let Some(key) = held.key else { return Ok(()) };
        let link = Link::by_index(key.0).ok_or_else(gone)?;
        let changes = &mut self.device_changes;
        changes.take(DeviceChange::NicSetUp, &link.name, uid, Instant::now())?;
        self.set_apart(&link, key, &held.wanted, self.policy.rule(held.rule).zcrx_setup)
    }

    /// Starts the registration of a connection's queue. The message carries the memory's descriptor.
    pub(super) fn register_queue(&mut self, number: u64, rings: &ZcrxRings) -> Result<Pending, Refusal> {
        let connection = self.connections.get(&number).ok_or_else(super::no_lease)?;
        let (uid, held) = (
            connection.peer.uid,
            connection.queue.as_ref().ok_or_else(super::no_lease)?,
        );
        if held.bytes.is_some() {
            return Reason::Lease
                .refuse("this lease's queue was registered before: connect once more for another");
        }
        let held = held.clone();
        self.check_area(uid, held.rule, rings.area.len)?;
        self.still_apart(uid, &held)?;
        let connection = self.connections.get(&number).ok_or_else(super::no_lease)?;
        let process = process_of(connection.as_fd()).map_err(|error| refusals::no_owner(&error))?;
        let key = held.key;
        let order = QueueOrder {
            owner: UserAndGroup {
                uid,
                gid: connection.peer.gid,
            },
            queue: key,
            entries: rings.entries,
            buffer_bytes: rings.buffer_bytes,
            area_len: rings.area.len,
        };
        let (process, connection) = (process.as_fd(), connection.as_fd());
        let job = Job::begin_without(CapabilitySet::empty(), &[process, connection], || {
            let parts = std::slice::from_ref(&rings.area);
            let memory = child::map_parts(connection, parts).map_err(job::failed(Step::Map))?;
            zcrx::register(process, &rings.rings, memory, &order)
        })?;
        if let Some(held) = self
            .connections
            .get_mut(&number)
            .and_then(|own| own.queue.as_mut())
        {
            held.bytes = Some(rings.area.len);
        }
        let pending = Pending::new(job, Self::conclude_queue);
        Ok(Pending {
            queue: key,
            ..pending
        })
    }

    /// Whether a user may have so much more memory in queues under a rule. The kernel counts it, too, for who made the
    /// ring.
    fn check_area(&self, uid: u32, rule: usize, bytes: u64) -> Result<(), Refusal> {
        let theirs = self.zcrx_leases().filter(|&(_, other, _)| other == uid);
        // Memory that a lessee keeps after its lease ended counts, too.
        let kept = self.zcrx.charged_to(uid);
        let (count, has) = theirs.fold(kept, |(count, has), (_, _, held)| {
            (count + 1, has.saturating_add(held.bytes.unwrap_or(0)))
        });
        let allowed = self.policy.rule(rule).memlock.unwrap_or(count * OF_A_QUEUE);
        if has.saturating_add(bytes) <= allowed {
            return Ok(());
        }
        Reason::Memlock.refuse(format!(
            "the queue needs {} KiB of memory, user {uid} has {} KiB in others, and rule {} of the policy allows \
             {} KiB: raise its `memlock`, or ask for less",
            bytes.div_ceil(1024),
            has.div_ceil(1024),
            rule + 1,
            allowed / 1024
        ))
    }

    /// Called when the child of a registration has ended. If the queue is registered, makes rules for its flows.
    fn conclude_queue(&mut self, number: u64, outcome: Outcome) -> Answered {
        let connection = self.connections.get_mut(&number).ok_or_else(super::no_lease)?;
        let held = connection.queue.as_mut().ok_or_else(super::no_lease)?;
        let (name, key) = (held.wanted.interface.clone(), held.key);
        let made = match outcome {
            Outcome::Done(Some(made)) => made,
            Outcome::Failed { step, errno } => {
                // Else the first ring has the memory.
                if step != Step::ShareQueue {
                    held.bytes = None;
                }
                return Err(failed(&name, key, step, errno));
            }
            // It may have registered the memory before.
            _ => return Err(lost()),
        };
        may_crash("zcrx-registered");
        let flows = held.wanted.flows.clone();
        if let Some(key) = key {
            self.bring_flows(key, &flows)?;
            may_crash("zcrx-steered");
        }
        if let Some(held) = self
            .connections
            .get_mut(&number)
            .and_then(|own| own.queue.as_mut())
        {
            held.steered = key.is_some();
        }
        let count = made.numbers.len().min(made.count as usize);
        Ok(Answer::ZcrxRegistered(ZcrxRegistered {
            numbers: made.numbers[..count].to_vec(),
            entries: made.entries,
            buffer_bytes: made.buffer_bytes,
            offsets: made.offsets,
            map_offset: made.map_offset,
            map_bytes: made.map_bytes,
        })
        .into())
    }

    fn bring_flows(&mut self, key: QueueKey, flows: &[SocketAddr]) -> Result<(), Refusal> {
        let link = Link::by_index(key.0).ok_or_else(gone)?;
        let named = |error: NotApart| not_apart(&link, &error);
        let mut nic = Ethtool::open(&link.name).map_err(|error| named(NotApart::NoRules(error)))?;
        let mut plan = self.zcrx.plan_of(key);
        let zcrx = &mut self.zcrx;
        apart::bring(&mut nic, &mut plan, flows, &mut |plan| {
            zcrx.save(&link.name, key, plan)
        })
        .map_err(named)
    }

    /// Takes back the queue of a connection that has ended.
    pub(super) fn release_queue(&mut self, uid: u32, held: &ZcrxLease) {
        if let Some(key) = held.key {
            let charge = Charge {
                uid,
                rule: Some(held.rule),
                bytes: held.bytes.unwrap_or(0),
            };
            self.zcrx.end(key, &held.wanted.interface, Some(charge));
            self.go_on_with_queues();
        }
    }

    /// Checks whether other frames come to leased queues again, and continues to take queues back.
    pub(super) fn look_at_queues(&mut self) {
        let leased = self
            .zcrx_leases()
            .filter_map(|(_, _, held)| Some((held.key?, held.rule)));
        for (key, rule) in leased.collect::<Vec<_>>() {
            if let Err(why) = self.keep_apart(key, self.policy.rule(rule).zcrx_setup)
                && self.refusals.may_log(u32::MAX)
            {
                tracing::warn!(
                    ifindex = key.0,
                    queue = key.1,
                    "frames of others may come to a leased queue: {why}"
                );
            }
        }
        self.go_on_with_queues();
    }

    /// Errors: why not, in one line.
    fn keep_apart(&mut self, key: QueueKey, may_set_up: bool) -> Result<(), String> {
        let Some(link) = Link::by_index(key.0) else {
            return Ok(());
        };
        let mut nic = Ethtool::open(&link.name).map_err(|error| error.to_string())?;
        let mut plan = self.zcrx.plan_of(key);
        let zcrx = &mut self.zcrx;
        let kept = apart::keep(&mut nic, &mut plan, &mut |plan| match may_set_up {
            true => zcrx.save(&link.name, key, plan),
            false => Err(std::io::Error::other("the policy does not have `zcrx-setup`")),
        });
        if kept.map_err(|error| error.to_string().replace("NAME", &link.name))? {
            let interface = &link.name;
            tracing::warn!(
                interface,
                queue = key.1,
                "the RSS table named a leased queue again, and is changed again"
            );
        }
        Ok(())
    }

    /// Continues taking queues back.
    pub(super) fn go_on_with_queues(&mut self) {
        let busy = self.jobs().filter_map(|(_, _, pending)| pending.queue).collect();
        self.zcrx.go_on(&busy, Instant::now());
    }

    /// All queues that are leased for zero-copy receive: the connection's number, its user, the queue.
    pub(super) fn zcrx_leases(&self) -> impl Iterator<Item = (u64, u32, &ZcrxLease)> {
        self.connections.iter().filter_map(|(&number, own)| {
            let held = own.queue.as_ref()?;
            Some((number, own.peer.uid, held))
        })
    }

    /// A queue as it is listed.
    pub(super) fn listed_queue(&self, number: u64) -> Option<Listed> {
        let connection = self.connections.get(&number)?;
        let held = connection.queue.as_ref()?;
        Some(Listed {
            number,
            namespace: self.namespace,
            pid: connection.peer.pid.try_into().unwrap_or(0),
            uid: connection.peer.uid,
            interface: held.wanted.interface.clone(),
            start_queue: held.wanted.queue,
            queues: 1,
            filter: Filter::default(),
            steered: if held.steered {
                Steered::ByRules
            } else {
                Steered::ByQueue
            },
            impaired: false,
            orphaned: false,
            zcrx: true,
        })
    }

    /// Checks a lease against a new policy, and ends it if it is not allowed.
    pub(super) fn judge_queue(&mut self, number: u64) {
        let Some(connection) = self.connections.get(&number) else {
            return;
        };
        let Some(held) = &connection.queue else { return };
        match self
            .policy
            .find_zcrx(&connection.peer, &held.wanted, |rule| self.leased(rule))
        {
            Ok(rule) => {
                if let Some(connection) = self.connections.get_mut(&number) {
                    connection.rule = Some(rule);
                    connection.queue.iter_mut().for_each(|held| held.rule = rule);
                }
            }
            Err(refusal) => {
                tracing::warn!(
                    pid = connection.peer.pid,
                    "lease (zcrx) ended by the new policy: {refusal}"
                );
                self.revoke(number, refusal);
            }
        }
    }
}
