//! States of a port and their reasons, as types. The sentences of the log, `status` and its JSON are made here.

use std::fmt;
use std::time::Duration;

use device::pair::Fault;

use super::ticket_lock::Task;
use crate::nic::steering::AWAY;
use crate::supervision::sigbus;

/// Why no frames move although they should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Impaired {
    /// Queues cannot be set up before the steward is back.
    #[error("{AWAY}")]
    StewardAway,
    /// The interface is gone, or cannot be used; why.
    #[error("{0}")]
    Interface(String),
    /// Its queues cannot be set up; why.
    #[error("{0}")]
    Queues(String),
    #[error("interface {0} is down")]
    LinkDown(String),
    #[error(
        "VMMs disconnect when they read the offered features ({0:#x}): probably the guest uses features that an \
         earlier daemon offered and this one does not. Start it with the options that the earlier one had (memory, \
         offload, queues), or restart the VMs"
    )]
    Declined(u64),
    #[error(
        "VMMs disconnect when they read {0} queue pair(s): most likely they need more. Set `queues` of \
         the port to as many as the VMM has, or lower the VMM's (QEMU: queues=, libvirt: <driver queues=…/>)"
    )]
    FewPairs(u16),
}

/// Why a session ended.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum Closed {
    #[error("the VMM disconnected")]
    Disconnected,
    /// A request of the VMM was refused; why.
    #[error("{0}")]
    Refused(String),
    /// The VMM violated the vhost-user protocol; how.
    #[error("{0}")]
    Protocol(String),
    #[error("{}", sigbus::TRUNCATED)]
    MemoryTruncated,
    /// A fault of the guest.
    #[error("{0}")]
    Guest(Fault),
    #[error("the port was removed")]
    Removed,
}

impl Closed {
    /// Stable name.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Disconnected => "disconnected",
            Self::Refused(_) => "refused",
            Self::Protocol(_) => "protocol",
            Self::MemoryTruncated => "memory-truncated",
            Self::Guest(fault) => fault.name(),
            Self::Removed => "removed",
        }
    }
}

/// How a session ended, which decides about the pause before the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// By a fault of the VMM or its guest.
    Wrong,
    /// No queue pair ever ran.
    Idle,
    /// No queue pair ever ran, and several VMMs in a row disconnected after they had read the offered features.
    Declined,
    /// A queue pair ran.
    Served,
}

/// A VMM that connected while another one was connected, and was refused.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TurnedAway {
    /// Its process, if known.
    pub(crate) second: Option<i32>,
    /// The process of the connected VMM, if known.
    pub(crate) first: Option<i32>,
    /// How long it waited for the end of the other one's session.
    pub(crate) waited: Duration,
}

impl fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |pid: Option<i32>| pid.map_or("a process".to_owned(), |pid| format!("process {pid}"));
        let (second, first) = (name(self.second), name(self.first));
        write!(
            f,
            "{second} connected while {first} has this port, and is refused after {} s: end one of them, or give each \
             a port of its own",
            self.waited.as_secs()
        )
    }
}

/// A thread holds the port's lock for long.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("{task}, for {} s", .taken.as_secs())]
pub(crate) struct Busy {
    pub(super) task: Task,
    /// Time since the task began.
    pub(super) taken: Duration,
}
