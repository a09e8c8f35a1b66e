//! Reading the policy again, without a restart.
//!
//! A policy that cannot be read changes nothing. A valid one applies to everything from then on: each lease is
//! checked against it as at the start of a steward, in the order in which leases were granted. A lease that it does
//! not allow ends: its frames go to the host, and its lessee gets the reason and may request another one. The lessee
//! keeps its sockets, by which it can send until its process ends, as after any lease.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender};

use steer::with_sources;

use super::connections::connection::Connection;
use super::leases::lease::LeaseRef;
use super::{Server, numbers};
use crate::policy::Policy;
use host::maps_bound_rings;

/// The source of new policies.
#[derive(Debug)]
pub(super) struct Reload {
    /// Readable when a reload is requested; non-blocking.
    pub(super) asked: UnixStream,
    from: PolicySource,
}

/// Where it comes from.
#[derive(Debug)]
pub enum PolicySource {
    /// A file.
    File(PathBuf),
    /// Another thread, for a steward without a file.
    Given(Receiver<NewPolicy>),
}

/// A policy made by another thread of this process, which waits until it applies.
#[derive(Debug)]
pub struct NewPolicy {
    /// The policy.
    pub policy: Policy,
    /// Receives a message when the policy applies.
    pub applied: Sender<()>,
}

impl Server {
    /// Takes a new policy from there whenever `asked` is readable.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn with_reload(mut self, asked: UnixStream, from: PolicySource) -> std::io::Result<Self> {
        asked.set_nonblocking(true)?;
        self.reload = Some(Reload { asked, from });
        Ok(self)
    }

    /// Applies a new policy.
    pub(super) fn reload(&mut self) {
        let Some(reload) = &mut self.reload else {
            return;
        };
        let ended = loop {
            match reload.asked.read(&mut [0; 64]) {
                Ok(0) => break true,
                Ok(_) => {}
                Err(_) => break false,
            }
        };
        match &reload.from {
            PolicySource::File(path) => {
                let path = path.clone();
                self.read_again(&path);
            }
            PolicySource::Given(policies) => {
                let given: Vec<_> = policies.try_iter().collect();
                for NewPolicy { policy, applied } in given {
                    self.apply(policy);
                    // The receiver may be gone.
                    let _ = applied.send(());
                }
            }
        }
        if ended {
            // All writers are closed: the end of file would be readable forever.
            self.reload = None;
        }
    }

    fn read_again(&mut self, file: &Path) {
        let path = file.display().to_string();
        match Policy::read(file) {
            Ok(policy) if !maps_bound_rings() && !policy.unbound => {
                tracing::error!(
                    "the policy stays as it was: the new one of {path} does not have `unbound-sockets = true`"
                );
            }
            Ok(policy) => {
                for warning in &policy.warnings {
                    tracing::warn!("{warning}");
                }
                self.apply(policy);
                tracing::info!(policy = path, "the policy was read again");
            }
            Err(error) => tracing::error!("the policy stays as it was: {}", with_sources(&error)),
        }
    }

    fn apply(&mut self, policy: Policy) {
        self.policy = policy;
        self.load_part();
        if let Some(part) = &mut self.part {
            part.forget_rules(&self.policy);
        }
        // Until they are checked, leases count for no rule: the old rules' indexes are invalid.
        for connection in self.connections.values_mut() {
            let mut rules = self.policy.rules_for(&connection.peer);
            connection.rule = rules.next().map(|(index, _)| index);
            connection.held.iter_mut().for_each(|held| held.rule = usize::MAX);
            connection.by_part.iter_mut().for_each(|rule| *rule = usize::MAX);
            // Other rules may have room for waiting jobs.
            connection.waits = false;
        }
        let orphans = self.orphans.values_mut();
        orphans.for_each(|orphan| orphan.held.rule = usize::MAX);
        self.lost_jobs.iter_mut().for_each(|lost| lost.rule = None);
        self.closing.iter_mut().for_each(|closing| closing.rule = None);
        self.unclosed.iter_mut().for_each(|over| over.rule = None);
        let held: BTreeSet<u64> = self.all_leases().map(|lease| lease.number).collect();
        held.into_iter().for_each(|number| self.judge(number));
        self.look_at_tunnels();
        let by_part = numbers(&self.connections, |own: &Connection| own.by_part.is_some());
        by_part.into_iter().for_each(|number| self.judge_by_part(number));
    }

    /// Checks a lease against the policy, and ends it if it is not allowed.
    fn judge(&mut self, number: u64) {
        let found = self.all_leases().find(|lease| lease.number == number);
        let Some(LeaseRef { peer, held, .. }) = found else {
            return;
        };
        match self.rule_of(peer, held) {
            Ok(rule) => {
                self.charge(number, rule);
                self.have_asked_again(number);
            }
            Err(refusal) => {
                let (pid, queues) = (peer.pid, held.wanted.range());
                let why = refusal.to_string();
                if self.orphans.contains_key(&number) {
                    self.end_orphan(number);
                } else {
                    self.end(number, Some(refusal));
                }
                tracing::warn!(pid, ?queues, "lease ended by the new policy: {why}");
            }
        }
    }

    /// Charges a lease to a rule, and applies the addresses and VLANs that the rule names.
    pub(super) fn charge(&mut self, number: u64, rule: usize) {
        let held = match self.connections.get_mut(&number) {
            Some(connection) => {
                connection.rule = Some(rule);
                connection.held.as_mut()
            }
            None => self.orphans.get_mut(&number).map(|orphan| &mut orphan.held),
        };
        let Some(held) = held else {
            return;
        };
        held.rule = rule;
        let held = held.clone();
        let (at, queues) = (held.interface, held.wanted.range());
        self.judge_taps(number, &held);
        let hints = self.hints_under(rule, held.hint_request);
        if let Some(interface) = self.interfaces.get_mut(&at) {
            let before = interface.facts_for(&queues);
            interface.ask_for_hints(queues.start, hints);
            interface.rename_entries(&queues, self.policy.rule(rule).names.clone());
            let changed = before != interface.facts_for(&queues);
            if let Some(connection) = self.connections.get_mut(&number) {
                connection.dirty |= changed;
            }
        }
    }
}
