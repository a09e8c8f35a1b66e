//! Where the interfaces of all ports come from.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use program::backoff::Backoff;
use steer::{ModeRequest, with_sources};
use steward_client::LeaseError;
use steward_protocol::{Reason, Wanted};

use super::demand::Demand;
use super::error::InterfaceError;
use super::external::{Given, GivenInterface};
use super::interface::Interface;
use super::interface_queue::InterfaceQueue;
use super::numa::Nodes;
use super::shared_memory::SharedMemory;
use super::steering::{Attached, Steering, StewardAt};
use crate::config::QueueOptions;
use common::lock::Locked;

/// How long the program and leases of a daemon that has just ended may stay: its helper removes the program some 30 ms
/// later, and holds the leases until then.
const PREDECESSOR: Duration = Duration::from_millis(1000);

pub(crate) struct Interfaces {
    /// The daemon's start.
    began: Instant,
    steward: StewardAt,
    /// Foreign descriptors for ports.
    given: Given,
    /// NUMA nodes of this machine.
    nodes: Nodes,
    /// Bytes that all ports lock while they copy. Nothing is published through it.
    copy_bytes: AtomicU64,
    /// The memory that copying queues share, by option.
    memory: Option<Arc<SharedMemory>>,
    /// Opened ahead, and not used by a port yet.
    ready: Mutex<Vec<Arc<Interface>>>,
}

impl Default for Interfaces {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            steward: StewardAt::default(),
            given: Given::default(),
            nodes: Nodes::default(),
            copy_bytes: AtomicU64::new(0),
            memory: None,
            ready: Mutex::default(),
        }
    }
}

impl Interfaces {
    /// For queues that lock `copy_bytes` in all while they copy. Some of them may be foreign.
    pub(crate) fn new(given: Given, nodes: Nodes, copy_bytes: u64) -> Self {
        Self {
            given,
            nodes,
            copy_bytes: copy_bytes.into(),
            ..Self::default()
        }
    }

    /// With memory that queues share.
    pub(crate) fn sharing(self, memory: Option<Arc<SharedMemory>>) -> Self {
        Self { memory, ..self }
    }

    /// Sets how many bytes all ports together lock while they copy.
    pub(crate) fn expect_copies(&self, copy_bytes: u64) {
        self.copy_bytes.store(copy_bytes, Relaxed);
    }

    /// Sets the steward that other interfaces are leased from.
    pub(crate) fn leased_from(self, steward: StewardAt) -> Self {
        Self { steward, ..self }
    }

    /// The interface for a port's queues: one with a foreign program, or a lease of its own.
    pub(crate) fn open(
        &self,
        wanted: &Wanted,
        options: QueueOptions,
    ) -> Result<Arc<Interface>, InterfaceError> {
        let mut ready = self.ready.locked();
        if let Some(at) = ready.iter().position(|interface| interface.is_for(wanted)) {
            return Ok(ready.swap_remove(at));
        }
        drop(ready);
        if let Some(given) = self.given.open(wanted)? {
            let options = options.on_given(&given.link)?;
            return Ok(self.interface(given.into(), wanted, options));
        }
        let interface = self.interface(self.lease(wanted, options)?, wanted, options);
        let interface = match self.check_tap(&interface, wanted) {
            Ok(()) => interface,
            Err(why) => {
                // The lease ends with it.
                drop(interface);
                let wanted = &wanted.in_mode(ModeRequest::Xdp);
                let leased = self.lease(wanted, options)?;
                Arc::new(self.describe(leased, wanted, options).without_tap(why))
            }
        };
        if let Some(why) = interface.lacks_hints() {
            let (name, asked) = (interface.name(), options.hints);
            tracing::warn!(interface = name, hints = %asked, "{why}");
        }
        Ok(interface)
    }

    fn lease(&self, wanted: &Wanted, options: QueueOptions) -> Result<Attached, InterfaceError> {
        let (mut pauses, end) = (
            Backoff::new(PREDECESSOR / 4, PREDECESSOR),
            self.began + PREDECESSOR,
        );
        loop {
            let leased = Steering::lease(&self.steward, wanted, options.hints);
            let is_predecessors = leased.as_ref().err().is_some_and(is_predecessors);
            match is_predecessors
                .then(|| pauses.failed_before(end, Instant::now()))
                .flatten()
            {
                Some(pause) => std::thread::sleep(pause),
                None => return leased,
            }
        }
    }

    /// If the daemon chose tap mode: whether the interface's tap is available.
    /// Errors: why not, in words.
    fn check_tap(&self, interface: &Interface, wanted: &Wanted) -> Result<(), String> {
        if wanted.mode != ModeRequest::Auto || !interface.is_by_tap() {
            return Ok(());
        }
        match interface.open_tap() {
            Err(error) if error.is_lasting_refusal() => Err(with_sources(&error)),
            _ => Ok(()),
        }
    }

    /// Opens foreign queues for a port ahead, while the process has the privilege.
    pub(crate) fn open_given(&self, wanted: &Wanted, options: QueueOptions) -> Result<(), InterfaceError> {
        let Some(given) = self.given.open(wanted)? else {
            return Ok(());
        };
        let options = options.on_given(&given.link)?;
        let interface = self.interface(given.into(), wanted, options);
        for queue in wanted.range() {
            InterfaceQueue::new(&interface, queue).open()?;
        }
        self.ready.locked().push(interface);
        Ok(())
    }

    fn interface(&self, attached: Attached, wanted: &Wanted, options: QueueOptions) -> Arc<Interface> {
        Arc::new(self.describe(attached, wanted, options))
    }

    fn describe(&self, mut attached: Attached, wanted: &Wanted, options: QueueOptions) -> Interface {
        let demand = Demand {
            copy_bytes: self.copy_bytes.load(Relaxed),
            pairs: wanted.queues,
        };
        attached.link.node = self.nodes.known(attached.link.node);
        Interface::new(attached, wanted, demand, options).sharing(self.memory.clone())
    }
}

impl From<GivenInterface> for Attached {
    fn from(given: GivenInterface) -> Self {
        Self {
            steering: Steering::External(given.external),
            link: given.link,
        }
    }
}

/// Whether the cause may be a daemon that has just ended, whose helper has not cleaned up yet. A steward's refusal
/// because of another program is not retried: it counts each request as an attempt to attach one, and allows few.
fn is_predecessors(error: &InterfaceError) -> bool {
    match error {
        InterfaceError::Refused(refusal) => refusal.reason == Reason::Program,
        InterfaceError::Lease(LeaseError::Refused(refusal)) => refusal.reason == Reason::Taken,
        _ => false,
    }
}
