//! Leased queues of an interface: their owners, and requests of lessees about them.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use steer::{MAX_QUEUES, ModeRequest, MulticastRing, QueueConf, QueueCounters, with_sources};

use super::network::by_kernel;
use super::{Interface, LeaseHints, Lessee};
use crate::hardware::Names;
use crate::server::leases::entries::Entries;
use host::links::Link;
use steward_protocol::{Reason, Refusal, Wanted};

impl Interface {
    /// Reserves queues for a connection. `names`: what the policy names of what they are for; `ring`: of a network; the
    /// hints that its frames are to have.
    pub(crate) fn reserve(
        &mut self,
        wanted: &Wanted,
        connection: u64,
        names: Names,
        (ring, hints): (Option<MulticastRing>, LeaseHints),
    ) -> Result<(), Refusal> {
        let queues = wanted.range();
        let name = &self.link.name;
        let program = self.program()?;
        if !self.suits(wanted.mode) {
            return Reason::Program.refuse(format!(
                "the program on {name} is attached in {} mode for other leases: ask for that mode, or for none \
                 (mode)",
                program.mode()
            ));
        }
        check(&self.link, wanted, hints)?;
        for queue in queues.clone() {
            let text = match self.lessees.get(&queue) {
                None => continue,
                Some(Lessee::Lease(_)) => format!(
                    "queue {queue} of {name} is leased to another connection: choose another queue, or end its lessee \
                     (after a restart of the steward: wait, it keeps queues a while for lessees that come back)"
                ),
                Some(Lessee::Leaving) => {
                    format!("queue {queue} of {name} is being taken back from its last lessee: try again")
                }
            };
            return Reason::Taken.refuse(text);
        }
        self.lessees
            .extend(queues.clone().map(|queue| (queue, Lessee::Lease(connection))));
        self.idle_since = None;
        let mut entries = Entries::new(queues.clone(), wanted.filter.clone(), names);
        entries.look(&self.link, self.is_by_tap());
        let installed = entries.install(self.program()?);
        if installed.is_ok() {
            entries.apply(&self.link, &mut self.ledger);
        }
        entries.look_beyond(&self.link);
        self.entries.insert(queues.start, entries);
        self.accept_stations(queues.start);
        self.look_below();
        let installed = installed.map_err(by_kernel).and_then(|()| match ring {
            Some(ring) => self
                .open_network(queues.clone(), ring)
                .map_err(|text| Reason::Kernel.because(text)),
            None => Ok(()),
        });
        self.ask_for_hints(queues.start, hints);
        let installed = installed.and_then(|()| match self.is_blind(queues.start) {
            true => Reason::NoInterface.refuse(host::nic::tags::blind(&self.link.name)),
            false => Ok(()),
        });
        installed.inspect_err(|_| self.release(queues))
    }

    /// Stores a bound socket next to the queue's current one, until `activate`.
    pub(crate) fn place(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), Refusal> {
        self.program()?.place_socket(queue, socket).map_err(|error| {
            Reason::Kernel.because(format!(
                "cannot place the socket of queue {queue} of {}: {}",
                self.link.name,
                with_sources(error)
            ))
        })
    }

    /// Stops counting the memory of closed sockets of these queues. `other` is a socket with an RX ring.
    pub(crate) fn forget_closed(&mut self, queues: Range<u32>, other: BorrowedFd<'_>) {
        for queue in queues {
            let has_socket = self.program().map(|program| program.has_socket(queue, other));
            if let Ok(Ok(false)) = has_socket {
                self.sockets.note_bound(queue, None);
            }
        }
    }

    /// Sends frames to the queue's socket.
    pub(crate) fn activate(&self, queue: u32, conf: QueueConf) -> Result<(), Refusal> {
        if self.is_blind(queue) {
            return Reason::Impaired.refuse(host::nic::tags::blind(&self.link.name));
        }
        let hints = self.may_have_hints(queue);
        if let Some(map) = self.own_maps.get(&queue) {
            let conf = QueueConf {
                hints: conf.hints && hints,
                ..conf
            };
            return self
                .program()?
                .activate_own_map(queue, map, conf)
                .map_err(by_kernel);
        }
        self.program()?
            .activate_judged(queue, conf, hints)
            .map_err(by_kernel)
    }

    /// Applies other addresses and VLANs that the policy names for the lease of these queues: removes NIC rules that it
    /// no longer allows, and adds those that it does.
    pub(crate) fn rename_entries(&mut self, queues: &Range<u32>, names: Names) {
        if let Some(entries) = self.entries.get_mut(&queues.start) {
            entries.rename(names, &self.link, &mut self.ledger);
            self.accept_stations(queues.start);
        }
    }

    /// Whether the lease of a queue is for VLANs that cannot be distinguished now.
    #[must_use]
    pub fn is_blind(&self, queue: u32) -> bool {
        let of_queue = |entries: &&Entries| entries.queues.contains(&queue);
        self.entries
            .values()
            .find(of_queue)
            .is_some_and(Entries::is_blind)
    }

    /// Sends frames to the host.
    pub(crate) fn deactivate(&self, queue: u32) -> Result<(), Refusal> {
        match &self.program {
            Some(program) => program.deactivate_queue(queue).map_err(by_kernel),
            None => Ok(()),
        }
    }

    /// The program's counters.
    pub(crate) fn counters(&self, queue: u32) -> Result<QueueCounters, Refusal> {
        self.program()?.counters(queue).map_err(by_kernel)
    }

    /// Reserves queues for a lease of a previous steward; false if that is not possible.
    pub(crate) fn hold(&mut self, wanted: &Wanted, lease: u64, names: Names, hints: LeaseHints) -> bool {
        let queues = wanted.range();
        if queues.end > MAX_QUEUES || queues.clone().any(|queue| self.lessees.contains_key(&queue)) {
            return false;
        }
        let mut entries = Entries::new(queues.clone(), wanted.filter.clone(), names);
        entries.look(&self.link, self.is_by_tap());
        entries.restored = self.restores_for(&hints);
        if let Some(program) = &self.program {
            let stopped = |queue| !entries.is_blind() || program.deactivate_queue(queue).is_ok();
            if entries.install(program).is_err() || !queues.clone().all(stopped) {
                return false;
            }
            entries.adopt(&self.link, &mut self.ledger);
        }
        if wanted.network
            && let Err(why) = self.adopt_network(queues.clone())
        {
            tracing::warn!(
                interface = self.link.name,
                ?queues,
                "network not taken over: {why}"
            );
            return false;
        }
        entries.look_beyond(&self.link);
        self.entries.insert(queues.start, entries);
        self.accept_stations(queues.start);
        self.look_below();
        if let Some(netkits) = self.netkits {
            netkits.adopt(self, queues.start);
        }
        self.adopt_hints(queues.start, hints);
        self.lessees
            .extend(queues.map(|queue| (queue, Lessee::Lease(lease))));
        true
    }

    /// Gives the lease another number.
    pub(crate) fn hand_over(&mut self, from: u64, to: u64) {
        let theirs = self
            .lessees
            .values_mut()
            .filter(|lessee| **lessee == Lessee::Lease(from));
        theirs.for_each(|lessee| *lessee = Lessee::Lease(to));
    }
}

/// Checks whether an interface can have such a lease, as far as that is known without the program.
pub(crate) fn check(link: &Link, wanted: &Wanted, hints: LeaseHints) -> Result<(), Refusal> {
    let (name, have, last) = (&link.name, link.rx_queues, wanted.range().end - 1);
    if last >= have.min(MAX_QUEUES) {
        return Reason::NoInterface.refuse(format!(
            "{name} has {have} receive queue(s), queue {last} was asked for: use a lower start-queue or fewer queues, \
             or add channels with `ethtool -L`"
        ));
    }
    if wanted.mode == ModeRequest::Tap {
        // The NIC may strip tags: the kernel keeps them in the skb, where the programs of a tap read them.
        return Ok(());
    }
    let may_restore = || wanted.mode != ModeRequest::Skb && Interface::may_restore_tags(link.index, hints);
    host::nic::tags::check_tags(name, &wanted.filter, may_restore)
        .map_err(|text| Reason::NoInterface.because(text))
}
