//! Leases of a queue for io_uring zero-copy receive.
//!
//! # Theory of operation
//!
//! Such a queue has no XDP program and no AF_XDP socket: the kernel allows one or the other on an interface. The
//! queue is registered with the lessee's own ring ([`rings`]); the steward keeps no descriptor of it.
//!
//! ```text
//!   lease      allowed by the policy; the queue is free; headers are split; the main RSS table does not name the queue
//!   registered the queue restarts with the lessee's memory; then n-tuple rules bring it the lease's flows
//!   ended      the rules go at once; when no memory is bound to the queue any more, the table is restored, and a while
//!              after the NIC's last lease header split
//! ```
//!
//! The kernel has no way to take a queue from a ring. So a lessee that ends its connection and runs on keeps it,
//! without frames. Until its ring is gone no lease can have the queue, and the main table does not name it, as other
//! processes' payload would go to that memory ([`apart`]).
//!
//! The configuration of the NIC is saved in a file before it is set, one for each queue ([`saved`]), and one for each
//! NIC ([`split`]). The next steward undoes all of it: lessees see the end of their connection, and receive by the
//! kernel's stack.

mod apart;
mod policy;
mod refusals;
mod rings;
mod saved;
mod split;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use host::links::Link;
use host::nic::{Ethtool, bound};
use program::capabilities::are_at_hand;
use program::peer::process_of;
use steer::with_sources;
use steward::capabilities::{ChildWork, TO_TAKE_RINGS};
use steward::child;
use steward::policy::Policy;
use steward::server::Journal;
use steward::server::file::may_crash;
use steward::server::job::{self, Job, Outcome, Pending, lost};
use steward::server::limits::DeviceChange;
use steward::server::part::{Loader, Part, QueueKey};
use steward::server::{Answered, OF_A_QUEUE, Server, no_lease};
use steward_protocol::{
    Answer, Listed, Reason, Refusal, Request, Steered, Step, ZcrxRegistered, ZcrxRings, ZcrxWanted,
};

use self::apart::NotApart;
use self::refusals::{check_split, failed, not_apart, switch_split_on};
use self::rings::{Made, QueueOrder, UserAndGroup};
use self::saved::{Charge, ZcrxQueues};
use self::split::{Kernel, Splits};

/// How the server loads this part.
pub const LOADER: Loader = Loader {
    is_needed: |policy, journal| {
        policy.allows_zcrx() || ZcrxQueues::are_left(journal) || Splits::are_left(journal)
    },
    load: |journal| Box::new(Zcrx::new(journal)),
    remedy: "`zcrx = [\"ADDRESS:PORT\"]` in a rule",
};

/// The queue that a connection has.
#[derive(Debug, Clone)]
struct ZcrxLease {
    pid: i32,
    uid: u32,
    wanted: ZcrxWanted,
    /// The NIC's queue; `None`: the interface is the loopback, which has no queue.
    key: Option<QueueKey>,
    /// The policy's rule that it is charged to.
    rule: usize,
    /// Bytes of memory that are registered, or are to be.
    bytes: Option<u64>,
    /// Rules bring it its flows.
    steered: bool,
}

/// See the module's head.
#[derive(Debug, Default)]
struct Zcrx {
    queues: ZcrxQueues,
    splits: Splits,
    /// Leases, by the number of their connection.
    leases: BTreeMap<u64, ZcrxLease>,
}

fn gone() -> Refusal {
    Reason::Impaired.because("the interface is gone: end the lease")
}

impl Part for Zcrx {
    fn lease(&mut self, server: &mut Server, number: u64, request: &Request) -> Result<usize, Refusal> {
        match request {
            Request::Zcrx(wanted) => self.grant(server, number, wanted),
            _ => Err(no_lease()),
        }
    }

    fn begin(&mut self, server: &mut Server, number: u64, request: &Request) -> Result<Pending, Refusal> {
        match request {
            Request::ZcrxRegister(rings) => self.register(server, number, rings),
            _ => Err(no_lease()),
        }
    }

    /// If the queue is registered, makes rules for its flows.
    fn conclude(&mut self, _: &mut Server, number: u64, outcome: Outcome) -> Answered {
        let held = self.leases.get_mut(&number).ok_or_else(no_lease)?;
        let (name, key) = (held.wanted.interface.clone(), held.key);
        let made: Option<Made> = match outcome {
            Outcome::Done(report) => report.read(),
            Outcome::Failed { step, errno } => {
                // After a failure to share, the first ring keeps the memory.
                if step != Step::ShareQueue {
                    held.bytes = None;
                }
                return Err(failed(&name, key, step, errno));
            }
            Outcome::Lost => None,
        };
        // A child that was lost may have registered the memory: `bytes` stays.
        let made = made.ok_or_else(lost)?;
        may_crash("zcrx-registered");
        let flows = held.wanted.flows.clone();
        if let Some(key) = key {
            self.bring_flows(key, &flows)?;
            may_crash("zcrx-steered");
        }
        if let Some(held) = self.leases.get_mut(&number) {
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

    fn listed(&self, number: u64) -> Option<Listed> {
        let held = self.leases.get(&number)?;
        Some(Listed {
            interface: held.wanted.interface.clone(),
            start_queue: held.wanted.queue,
            queues: 1,
            steered: match held.steered {
                true => Steered::ByRules,
                false => Steered::ByQueue,
            },
            zcrx: true,
            ..Listed::default()
        })
    }

    fn end(&mut self, server: &mut Server, number: u64) {
        let Some(held) = self.leases.remove(&number) else {
            return;
        };
        if let Some(key) = held.key {
            let charge = Charge {
                uid: held.uid,
                rule: Some(held.rule),
                bytes: held.bytes.unwrap_or(0),
            };
            self.queues.end(key, &held.wanted.interface, Some(charge));
        }
        if server.may_log_lease(held.uid) {
            let ZcrxWanted { interface, queue, .. } = held.wanted;
            tracing::info!(pid = held.pid, interface, queue, "lease (zcrx) ended");
        }
    }

    fn judge(&mut self, server: &Server, number: u64) -> Result<usize, Refusal> {
        let held = self.leases.get(&number).ok_or_else(no_lease)?;
        let peer = server.peer(number).ok_or_else(no_lease)?;
        let rule = policy::find(server.policy(), peer, &held.wanted, |rule| {
            self.leased(server, rule)
        })?;
        if let Some(held) = self.leases.get_mut(&number) {
            held.rule = rule;
        }
        Ok(rule)
    }

    fn forget_rules(&mut self, policy: &Policy) {
        self.queues.charges().for_each(|charge| charge.rule = None);
        self.leases.values_mut().for_each(|held| held.rule = usize::MAX);
        if policy.allows_zcrx() && !are_at_hand(TO_TAKE_RINGS) {
            tracing::warn!(
                "leases for zero-copy receive (`zcrx`) are refused until the steward is restarted: it gave up \
                 CAP_SYS_PTRACE, as its policy had no `zcrx`"
            );
        }
    }

    fn check_program(&self, link: &Link) -> Result<(), Refusal> {
        match self.used_queues().find(|key| key.0 == link.index) {
            None => Ok(()),
            Some((_, queue)) => Reason::Taken.refuse(format!(
                "queue {queue} of {} is leased for zero-copy receive, and the kernel has either XDP or that on an \
                 interface: end that lease, or lease from another interface",
                link.name
            )),
        }
    }

    fn charged(&self, rule: usize) -> u32 {
        self.queues.charged(rule)
    }

    /// Keeps the frames of others away from leased queues, or warns.
    fn look(&mut self, server: &mut Server) {
        let leased = self.leases.values();
        let leased: Vec<_> = leased.filter_map(|held| Some((held.key?, held.rule))).collect();
        for (key, rule) in leased {
            if let Err(why) = self.keep_apart(key, server.policy().rule(rule).zcrx_setup)
                && server.may_log_warning()
            {
                tracing::warn!(
                    ifindex = key.0,
                    queue = key.1,
                    "frames of others may come to a leased queue: {why}"
                );
            }
        }
    }

    fn due(&self, now: Instant, linger: Duration) -> Option<Instant> {
        let split = self.splits.next_due(|ifindex| self.is_used(ifindex), now, linger);
        self.queues.next_due(now).into_iter().chain(split).min()
    }

    fn make_room(&mut self, link: &Link) {
        if !self.is_used(link.index) {
            self.splits.restore_now(&mut Kernel, link.index);
        }
    }

    fn go_on(&mut self, busy: &BTreeSet<QueueKey>, linger: Duration) {
        let now = Instant::now();
        self.queues.go_on(busy, now);
        let used: BTreeSet<u32> = self.used_queues().map(|(ifindex, _)| ifindex).collect();
        let is_used = |ifindex| used.contains(&ifindex);
        self.splits.go_on(&mut Kernel, is_used, now, linger);
    }

    fn is_unfinished(&self) -> bool {
        self.queues.is_unfinished() || self.splits.is_unfinished()
    }
}

impl Zcrx {
    fn new(journal: &Journal) -> Self {
        Self {
            queues: ZcrxQueues::open(journal),
            splits: Splits::open(journal),
            leases: BTreeMap::new(),
        }
    }

    /// Queues that are leased, or are being taken back.
    fn used_queues(&self) -> impl Iterator<Item = QueueKey> {
        let held = self.leases.values().filter_map(|held| held.key);
        held.chain(self.queues.leaving())
    }

    /// Whether a NIC has such queues.
    fn is_used(&self, ifindex: u32) -> bool {
        self.used_queues().any(|key| key.0 == ifindex)
    }

    /// The number of queues that are leased under a rule. While it calls the part, the server counts none of `queues`.
    fn leased(&self, server: &Server, rule: usize) -> u32 {
        server.leased(rule).saturating_add(self.queues.charged(rule))
    }

    /// Handles a request for a lease.
    fn grant(&mut self, server: &mut Server, number: u64, wanted: &ZcrxWanted) -> Result<usize, Refusal> {
        let peer = server.newcomer(number)?;
        let rule = policy::find(server.policy(), &peer, wanted, |rule| self.leased(server, rule))?;
        refusals::check_takes_rings()?;
        let link = Link::by_name(&wanted.interface)
            .map_err(|error| Reason::NoInterface.because(with_sources(&error)))?;
        let is_loopback = Link::is_loopback(link.index).unwrap_or(false);
        let key = (!is_loopback).then_some((link.index, wanted.queue));
        if let Some(key) = key {
            self.check_queue(server, &link, key)?;
            server.take_units(DeviceChange::NicSetUp, &link.name, peer.uid)?;
            let apart = self.set_apart(&link, key, wanted, server.policy().rule(rule).zcrx_setup);
            apart.inspect_err(|_| self.queues.abandon(key))?;
        }
        may_crash("zcrx-leased");
        let held = ZcrxLease {
            pid: peer.pid,
            uid: peer.uid,
            wanted: wanted.clone(),
            key,
            rule,
            bytes: None,
            steered: false,
        };
        self.leases.insert(number, held);
        if server.may_log_lease(peer.uid) {
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
        Ok(rule)
    }

    /// Checks that no lease, program or process uses a queue.
    fn check_queue(&self, server: &Server, link: &Link, key: QueueKey) -> Result<(), Refusal> {
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
        if self.leases.values().any(|held| held.key == Some(key)) {
            return taken("another lease (zcrx)".to_owned());
        }
        if self.queues.leaving().any(|leaving| leaving == key) {
            return taken("a lease that is being taken back, until its lessee's ring is closed".to_owned());
        }
        let has_leases = server.has_leases(link.index);
        if has_leases == Some(true) {
            return Reason::Program.refuse(format!(
                "queues of {name} are leased for AF_XDP, and the kernel has either XDP or zero-copy receive on an \
                 interface: end these leases, or lease from another interface"
            ));
        }
        if has_leases.is_some() || steer::program_on(link.index).is_some() {
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

    /// Has the NIC split header and data, and steer all other frames to other queues.
    fn set_apart(
        &mut self,
        link: &Link,
        key: QueueKey,
        wanted: &ZcrxWanted,
        may_set_up: bool,
    ) -> Result<(), Refusal> {
        let split = check_split(link, may_set_up)?;
        let named = |error: &NotApart| not_apart(link, error);
        let mut nic = Ethtool::open(&link.name).map_err(|error| named(&NotApart::NoRules(error)))?;
        let why = match apart::check(&nic, key.1, &wanted.flows) {
            Ok(()) => {
                switch_split_on(&mut self.splits, link, split)?;
                let entry = self.queues.entry(key);
                return entry
                    .path()
                    .map(drop)
                    .map_err(|error| named(&NotApart::Save(error)));
            }
            Err(why) => why,
        };
        if !matches!(why, NotApart::InTable(_)) || !may_set_up {
            return Err(named(&why));
        }
        switch_split_on(&mut self.splits, link, split)?;
        let mut plan = self.queues.plan_of(key);
        let queues = &mut self.queues;
        let moved = apart::move_table(&mut nic, &mut plan, &mut |plan| {
            queues.save(&link.name, key, plan)
        });
        moved.map_err(|error| named(&error))
    }

    /// Checks again, as the NIC's configuration may have changed since the queue was leased.
    fn still_apart(&mut self, server: &mut Server, held: &ZcrxLease) -> Result<(), Refusal> {
        let Some(key) = held.key else { return Ok(()) };
        let link = Link::by_index(key.0).ok_or_else(gone)?;
        server.take_units(DeviceChange::NicSetUp, &link.name, held.uid)?;
        self.set_apart(
            &link,
            key,
            &held.wanted,
            server.policy().rule(held.rule).zcrx_setup,
        )
    }

    /// Starts the registration of a connection's queue. The message carries the memory's descriptor.
    fn register(&mut self, server: &mut Server, number: u64, rings: &ZcrxRings) -> Result<Pending, Refusal> {
        let held = self.leases.get(&number).ok_or_else(no_lease)?.clone();
        if held.bytes.is_some() {
            return Reason::Lease
                .refuse("this lease's queue was registered before: connect once more for another");
        }
        self.check_area(server.policy(), &held, rings.area.len)?;
        self.still_apart(server, &held)?;
        let (peer, connection) = server
            .peer(number)
            .zip(server.socket(number))
            .ok_or_else(no_lease)?;
        let process = process_of(connection).map_err(|error| refusals::no_owner(&error))?;
        let order = QueueOrder {
            owner: UserAndGroup {
                uid: peer.uid,
                gid: peer.gid,
            },
            queue: held.key,
            entries: rings.entries,
            buffer_bytes: rings.buffer_bytes,
            area_len: rings.area.len,
        };
        let process = process.as_fd();
        let job = Job::begin(ChildWork::Rings, &[process, connection], || {
            let parts = std::slice::from_ref(&rings.area);
            let memory = child::map_parts(connection, parts).map_err(job::failed(Step::Map))?;
            rings::register(process, &rings.rings, memory, &order)
        })?;
        if let Some(held) = self.leases.get_mut(&number) {
            held.bytes = Some(rings.area.len);
        }
        Ok(Pending::new(job, Server::conclude_by_part).changing(held.key))
    }

    /// Checks that a user may register so many more bytes for queues under a rule. The kernel also charges them to the
    /// user who made the ring.
    fn check_area(&self, policy: &Policy, of: &ZcrxLease, bytes: u64) -> Result<(), Refusal> {
        let (uid, rule) = (of.uid, of.rule);
        let theirs = self.leases.values().filter(|other| other.uid == uid);
        // Memory that a lessee keeps after its lease ended counts, too.
        let kept = self.queues.charged_to(uid);
        let (count, has) = theirs.fold(kept, |(count, has), held| {
            (count + 1, has.saturating_add(held.bytes.unwrap_or(0)))
        });
        let allowed = policy.rule(rule).memlock.unwrap_or(count * OF_A_QUEUE);
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

    fn bring_flows(&mut self, key: QueueKey, flows: &[SocketAddr]) -> Result<(), Refusal> {
        let link = Link::by_index(key.0).ok_or_else(gone)?;
        let named = |error: NotApart| not_apart(&link, &error);
        let mut nic = Ethtool::open(&link.name).map_err(|error| named(NotApart::NoRules(error)))?;
        let mut plan = self.queues.plan_of(key);
        let queues = &mut self.queues;
        apart::bring(&mut nic, &mut plan, flows, &mut |plan| {
            queues.save(&link.name, key, plan)
        })
        .map_err(named)
    }

    /// Keeps the RSS table from naming a leased queue. Errors: the reason, in one line.
    fn keep_apart(&mut self, key: QueueKey, may_set_up: bool) -> Result<(), String> {
        let Some(link) = Link::by_index(key.0) else {
            return Ok(());
        };
        let mut nic = Ethtool::open(&link.name).map_err(|error| error.to_string())?;
        let mut plan = self.queues.plan_of(key);
        let queues = &mut self.queues;
        let kept = apart::keep(&mut nic, &mut plan, &mut |plan| match may_set_up {
            true => queues.save(&link.name, key, plan),
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
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn part_is_loaded_where_the_policy_allows_it_or_a_previous_steward_left_something() {
        let rule = "[[allow]]\nuser = 7\ninterface = \"eth1\"\nqueues = \"2-3\"\n";
        let policy = |more: &str| {
            let text = format!("{rule}{more}\n");
            Policy::parse(Path::new("p.toml"), &text).expect("a policy")
        };
        let (without, with) = (policy(""), policy("zcrx = [\"192.0.2.1:443\"]"));
        let dir = tempfile::tempdir().expect("a directory");
        let (journal, none) = (Journal::open(dir.path()), Journal::default());
        let is_needed = |policy| (LOADER.is_needed)(policy, &journal);
        assert!(!is_needed(&without) && is_needed(&with));
        assert!(!(LOADER.is_needed)(&without, &none) && (LOADER.is_needed)(&with, &none));
        for left in ["zcrx-3-1.toml", "header-split-3.toml"] {
            std::fs::write(dir.path().join(left), "").expect("ours");
            assert!(is_needed(&without));
            std::fs::remove_file(dir.path().join(left)).expect("ours");
        }
    }
}
