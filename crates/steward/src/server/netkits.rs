//! What the core needs of netkits: interfaces in other network namespaces that a lease's queue is leased on to.
//!
//! The core checks that the policy allows one, keeps it in the journal, has the program redirect the queue's frames to
//! its map, and undoes all that. The program that starts the server makes and deletes the interfaces.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Server;
use super::connections::connection::Held;
use super::interface::Interface;
use super::job::Pending;
use steward_protocol::{NetkitEnd, NetkitWanted, Reason, Refusal};

/// See the module's head.
pub trait Netkits: fmt::Debug + Sync {
    /// Makes a netkit for the queue of a connection's lease, and starts the child that moves it.
    ///
    /// # Errors
    /// The refusal.
    fn begin(&self, server: &mut Server, number: u64, wanted: &NetkitWanted) -> Result<Pending, Refusal>;

    /// Takes over the netkit that a previous steward made for a queue of a lease that continues, if it made one.
    fn adopt(&self, interface: &mut Interface, queue: u32);

    /// Deletes a netkit, wherever it is, and checks that it is gone. `nic`: the index of the NIC; `is_new`: it is kept
    /// for now if a socket has the queue.
    ///
    /// # Errors
    /// In words.
    fn remove(&self, nic: u32, saved: &SavedNetkit, is_new: bool) -> Result<(), String>;
}

/// A netkit to which a queue is leased.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedNetkit {
    /// The NIC's queue.
    pub queue: u32,
    /// Its unique temporary name, before it was moved to its network namespace.
    pub made_as: String,
    /// Its name in that namespace.
    pub name: String,
    /// Its index in that namespace; 0: it may not have been moved yet.
    #[serde(default)]
    pub ifindex: u32,
    /// The id (netnsid) of that namespace in the steward's; `None`: it is the steward's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<i32>,
    /// Number of the netkit's queue to which the NIC's queue is leased.
    #[serde(default)]
    pub its_queue: u32,
}

impl SavedNetkit {
    /// Deletes it. `nic`: the index of the NIC; `is_new`: not yet while a socket has the queue.
    pub(super) fn remove(&self, netkits: Option<&dyn Netkits>, nic: u32, is_new: bool) -> Result<(), String> {
        let none = || "this steward knows no netkits".to_owned();
        let removed = netkits
            .ok_or_else(none)
            .and_then(|netkits| netkits.remove(nic, self, is_new));
        removed.map_err(|why| format!("netkit {}: {why}", self.name))
    }

    /// The answer to its lessee, once it is in its network namespace.
    #[must_use]
    pub fn end(&self) -> NetkitEnd {
        NetkitEnd {
            name: self.name.clone(),
            ifindex: self.ifindex,
            queue: self.its_queue,
        }
    }
}

impl Server {
    /// Names the part that makes netkits. Call it before [`Server::with_store`].
    #[must_use]
    pub fn with_netkits(mut self, netkits: &'static dyn Netkits) -> Self {
        self.netkits = Some(netkits);
        self
    }

    /// Has a netkit made, if the policy allows it.
    pub(super) fn begin_netkit(&mut self, number: u64, wanted: &NetkitWanted) -> Result<Pending, Refusal> {
        let (_, held, _) = self.lessee(number)?;
        held.check(wanted.queue)?;
        self.policy.check_netkit(held.rule)?;
        let none = || Reason::NotAllowed.because("this steward makes no netkits");
        self.netkits.ok_or_else(none)?.begin(self, number, wanted)
    }

    /// Whether a lease with its netkit may continue under a rule.
    pub(super) fn check_netkit_of(&self, held: &Held, rule: usize) -> Result<(), Refusal> {
        let interface = self.interfaces.get(&held.interface);
        match interface.and_then(|interface| interface.saved_netkit(held.wanted.start_queue)) {
            Some(_) => self.policy.check_netkit(rule),
            None => Ok(()),
        }
    }

    /// Has a lessee notified of the state of its interface.
    pub fn notify(&mut self, number: u64) {
        if let Some(connection) = self.connections.get_mut(&number) {
            connection.dirty = true;
        }
    }
}
