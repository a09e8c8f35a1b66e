//! What the core needs of netkits: interfaces in other network namespaces that a lease's queue is leased on to.
//!
//! The core checks that the policy allows one, has the program redirect the queue's frames to its map, and says when it
//! has to go. The program that starts the server makes and deletes the interfaces, and has them in the journal.

use std::collections::BTreeSet;
use std::fmt;

use super::Interface;
use crate::server::Server;
use crate::server::connections::connection::Held;
use crate::server::job::Pending;
use crate::server::journal::file::Journal;
use steward_protocol::{NetkitWanted, Reason, Refusal};

/// See the module's head.
pub trait Netkits: fmt::Debug + Sync {
    /// Makes a netkit for the queue of a connection's lease, and starts the child that moves it.
    ///
    /// # Errors
    /// The refusal.
    fn begin(&self, server: &mut Server, number: u64, wanted: &NetkitWanted) -> Result<Pending, Refusal>;

    /// Takes over the netkit that a previous steward made for a queue of a lease that continues, if it made one.
    fn adopt(&self, interface: &mut Interface, queue: u32);

    /// The queues for which the journal has a netkit that a previous steward made for an interface.
    fn queues(&self, interface: &Interface) -> BTreeSet<u32>;

    /// Why a queue gets no frames whose netkit is gone.
    fn lost(&self, interface: &Interface, queue: u32) -> String;

    /// Deletes the netkit of a queue, wherever it is, checks that it is gone, and removes it from the journal. `is_new`:
    /// it is kept for now if a socket has the queue.
    ///
    /// # Errors
    /// In words.
    fn remove(&self, interface: &Interface, queue: u32, is_new: bool) -> Result<(), String>;

    /// Called before interfaces of a previous steward are taken over: deletes, as far as possible, netkits of those
    /// whose numbers are not known.
    fn remove_strays(&self, journal: &Journal, is_known: &dyn Fn(u64) -> bool);
}

impl Server {
    /// Names the part that makes netkits. Call it before [`Server::with_store`].
    #[must_use]
    pub fn with_netkits(mut self, netkits: &'static dyn Netkits) -> Self {
        self.netkits = Some(netkits);
        self
    }

    /// Has a netkit made, if the policy allows it.
    pub(in crate::server) fn begin_netkit(
        &mut self,
        number: u64,
        wanted: &NetkitWanted,
    ) -> Result<Pending, Refusal> {
        let (_, held, _) = self.lessee(number)?;
        held.check(wanted.queue)?;
        self.policy.check_netkit(held.rule)?;
        let none = || Reason::NotAllowed.because("this steward makes no netkits");
        self.netkits.ok_or_else(none)?.begin(self, number, wanted)
    }

    /// Whether a lease with its netkit may continue under a rule.
    pub(in crate::server) fn check_netkit_of(&self, held: &Held, rule: usize) -> Result<(), Refusal> {
        let interface = self.interfaces.get(&held.interface);
        match interface.is_some_and(|interface| interface.netkit_queues.contains(&held.wanted.start_queue)) {
            true => self.policy.check_netkit(rule),
            false => Ok(()),
        }
    }

    /// Has a lessee notified of the state of its interface.
    pub fn notify(&mut self, number: u64) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.dirty = true;
        }
    }
}
