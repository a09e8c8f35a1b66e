//! A part outside the core: a kind of lease that only some policies allow, with code of its own.
//!
//! The program that starts the server names the part ([`Loader`]). It is loaded only when a policy allows its leases,
//! or when a previous steward has left something that it has to undo. The core reads the requests, limits them, counts
//! the leases of each rule, and calls the part for the rest. A connection with such a lease has no other lease.

use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::connections::limits::DeviceChange;
use super::job::{Outcome, Pending};
use super::journal::file::Journal;
use super::journal::state::Store;
use super::{Answered, Server, no_lease};
use crate::policy::Policy;
use host::links::Link;
use program::peer::Credentials;
use steward_protocol::{Answer, Listed, Reason, Refusal, Request};

/// A queue of an interface, by the interface's index.
pub type QueueKey = (u32, u32);

/// See the module's head. `number` is that of a connection.
pub trait Part: fmt::Debug + Send {
    /// Grants a lease. Returns the rule of the policy that it is charged to.
    ///
    /// # Errors
    /// The refusal for the client.
    fn lease(&mut self, server: &mut Server, number: u64, request: &Request) -> Result<usize, Refusal>;

    /// Starts a child for a request about a lease. [`Server::conclude_by_part`] concludes it.
    ///
    /// # Errors
    /// The refusal for the lessee.
    fn begin(&mut self, server: &mut Server, number: u64, request: &Request) -> Result<Pending, Refusal>;

    /// Called when that child has ended.
    ///
    /// # Errors
    /// The refusal for the lessee.
    fn conclude(&mut self, server: &mut Server, number: u64, outcome: Outcome) -> Answered;

    /// A lease as it is listed; the core adds its number and its process.
    fn listed(&self, number: u64) -> Option<Listed>;

    /// Ends a lease; its connection is gone.
    fn end(&mut self, server: &mut Server, number: u64);

    /// Finds the rule of the current policy for a lease.
    ///
    /// # Errors
    /// The reason why no rule allows it any more.
    fn judge(&mut self, server: &Server, number: u64) -> Result<usize, Refusal>;

    /// Called when there is a new policy: indexes of rules are invalid.
    fn forget_rules(&mut self, policy: &Policy);

    /// Checks that no lease of the part forbids an XDP program on an interface.
    ///
    /// # Errors
    /// The refusal, which names the queue of such a lease.
    fn check_program(&self, link: &Link) -> Result<(), Refusal>;

    /// Called before an XDP program is attached to an interface: undoes at once what ended leases left on it.
    fn make_room(&mut self, link: &Link);

    /// The number of queues that count for a rule although their leases are over.
    fn charged(&self, rule: usize) -> u32;

    /// Checks settings that other processes may have changed.
    fn look(&mut self, server: &mut Server);

    /// When [`Part::go_on`] is due.
    fn due(&self, now: Instant, linger: Duration) -> Option<Instant>;

    /// Continues to undo what ended leases left. `busy`: queues that a child may still change; `linger`: how long
    /// settings of a whole NIC stay after its last lease.
    fn go_on(&mut self, busy: &BTreeSet<QueueKey>, linger: Duration);

    /// Whether something is still to be undone.
    fn is_unfinished(&self) -> bool;
}

/// How to load a part. Both functions get the journal, in which it may have entries of its own.
#[derive(Debug, Clone, Copy)]
pub struct Loader {
    /// Whether the policy allows leases of the part, or a previous steward left some.
    pub is_needed: fn(&Policy, &Journal) -> bool,
    /// Loads it.
    pub load: fn(&Journal) -> Box<dyn Part>,
    /// What to add to the policy, for the refusal where it is not loaded.
    pub remedy: &'static str,
}

/// For the program.
impl Server {
    /// Names the part that may be loaded. Call it before [`Server::with_store`].
    #[must_use]
    pub fn with_part(mut self, loader: Loader) -> Self {
        self.loader = Some(loader);
        self.load_part();
        self
    }
}

/// For the core.
impl Server {
    /// Loads the part if it is needed and not loaded yet.
    pub(super) fn load_part(&mut self) {
        let none = Journal::default();
        let journal = self.store.as_ref().map_or(&none, Store::journal);
        if let Some(loader) = self.loader
            && self.part.is_none()
            && (loader.is_needed)(&self.policy, journal)
        {
            self.part = Some((loader.load)(journal));
        }
    }

    /// Calls the part, if it is loaded. During the call `self.part` is `None`.
    pub(super) fn by_part<T>(&mut self, call: impl FnOnce(&mut dyn Part, &mut Self) -> T) -> Option<T> {
        let mut part = self.part.take()?;
        let result = call(part.as_mut(), self);
        self.part = Some(part);
        Some(result)
    }

    fn not_loaded(&self) -> Refusal {
        let remedy = self.loader.map_or("another steward", |loader| loader.remedy);
        Reason::NotAllowed.because(format!(
            "the policy has no rule for leases of this kind, which take {remedy}"
        ))
    }

    /// Handles a request for a lease of the part.
    pub(super) fn lease_by_part(&mut self, number: u64, request: &Request) -> Answered {
        self.newcomer(number)?;
        let granted = self.by_part(|part, server| part.lease(server, number, request));
        let rule = granted.ok_or_else(|| self.not_loaded())??;
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.rule = Some(rule);
            connection.hold_by_part(rule);
        }
        Ok(Answer::Done.into())
    }

    /// Starts the child for a request about such a lease.
    pub(super) fn begin_by_part(&mut self, number: u64, request: &Request) -> Result<Pending, Refusal> {
        let connection = self.connections.get(&number).ok_or_else(no_lease)?;
        connection.by_part.ok_or_else(no_lease)?;
        let begun = self.by_part(|part, server| part.begin(server, number, request));
        begun.ok_or_else(no_lease)?
    }

    pub(super) fn go_on_by_part(&mut self) {
        let busy = self.jobs().filter_map(|(_, _, pending)| pending.queue).collect();
        if let Some(part) = &mut self.part {
            part.go_on(&busy, self.linger);
        }
    }

    /// When the part has something to do.
    pub(super) fn part_due(&self, now: Instant) -> Option<Instant> {
        self.part.as_ref().and_then(|part| part.due(now, self.linger))
    }

    /// Whether the part still has to undo something.
    pub(super) fn is_part_unfinished(&self) -> bool {
        self.part.as_ref().is_some_and(|part| part.is_unfinished())
    }

    /// Checks such a lease against a new policy, and ends it if it is not allowed.
    pub(super) fn judge_by_part(&mut self, number: u64) {
        match self.by_part(|part, server| part.judge(server, number)) {
            Some(Ok(rule)) => {
                if let Some(connection) = self.connections.get_mut(&number) {
                    (connection.rule, connection.by_part) = (Some(rule), Some(rule));
                }
            }
            Some(Err(refusal)) => {
                let pid = self.peer(number).map_or(0, |peer| peer.pid);
                tracing::warn!(pid, "lease (zcrx) ended by the new policy: {refusal}");
                self.end(number, Some(refusal));
            }
            None => {}
        }
    }
}

/// For the part.
impl Server {
    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The process at the other end of a connection.
    #[must_use]
    pub fn peer(&self, number: u64) -> Option<&Credentials> {
        Some(&self.connections.get(&number)?.peer)
    }

    /// The socket of a connection.
    #[must_use]
    pub fn socket(&self, number: u64) -> Option<BorrowedFd<'_>> {
        Some(self.connections.get(&number)?.as_fd())
    }

    /// Whether an interface with the steward's program has leases; `None`: it has no program.
    #[must_use]
    pub fn has_leases(&self, ifindex: u32) -> Option<bool> {
        let mut interfaces = self.interfaces.values();
        let found = interfaces.find(|interface| interface.link.index == ifindex)?;
        Some(!found.is_idle())
    }

    /// Takes the units that a change of a device costs.
    ///
    /// # Errors
    /// The user has caused too many changes.
    pub fn take_units(&mut self, change: DeviceChange, interface: &str, uid: u32) -> Result<(), Refusal> {
        self.device_changes.take(change, (interface, uid), Instant::now())
    }

    /// Whether a line about a lease of this user may be logged.
    pub fn may_log_lease(&mut self, uid: u32) -> bool {
        self.leases.may_log(uid)
    }

    /// Whether a warning that no user causes may be logged.
    pub fn may_log_warning(&mut self) -> bool {
        self.refusals.may_log(u32::MAX)
    }

    /// Concludes a child of the part.
    ///
    /// # Errors
    /// The refusal for the lessee.
    pub fn conclude_by_part(&mut self, number: u64, outcome: Outcome) -> Answered {
        let concluded = self.by_part(|part, server| part.conclude(server, number, outcome));
        concluded.ok_or_else(no_lease)?
    }
}
