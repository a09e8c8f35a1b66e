//! Which frames a lease takes: the addresses and VLANs that it is for.
//!
//! The program looks in any case: a frame that is put into a leased queue and is of another address goes to the host. Where the NIC
//! can be told, it is told in addition ([`crate::hardware`]), so that the frames come to the lease's queues at all, whatever its hash says.

use std::ops::Range;

use steer::{Filter, Program, QueueError};

use super::ledger::{Ledger, Told};
use crate::hardware::Ethtool;
use crate::links::Link;
use crate::protocol::Steered;

/// Why the NIC is not told.
const NOT_NAMED: &str = "the NIC is not told whose frames these are: that takes a steward with a policy that names them (`macs`, `vlans`)";

/// What one lease takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entries {
    pub(super) queues: Range<u32>,
    pub(super) filter: Filter,
    /// The NIC may be told.
    named: bool,
    pub(super) steered: Steered,
    /// Why the NIC does not bring the frames; may be empty.
    nic: String,
    /// The interface, if its driver takes tags off that are looked for.
    blind: Option<String>,
}

impl Entries {
    /// `named`: the policy's rule names them, so that the NIC may be told.
    pub(super) fn new(queues: Range<u32>, filter: Filter, named: bool) -> Self {
        let (steered, note) = match (filter.is_empty(), named) {
            (true, _) => (Steered::ByQueue, ""),
            (false, true) => (Steered::ByProgram, ""),
            (false, false) => (Steered::ByProgram, NOT_NAMED),
        };
        Self {
            queues,
            filter,
            named,
            steered,
            nic: note.to_owned(),
            blind: None,
        }
    }

    /// Looks what of the frames the program will not see on this interface.
    pub(super) fn look(&mut self, interface: &str) {
        let blind = !self.filter.vlans.is_empty()
            && Ethtool::open(interface).is_ok_and(|driver| driver.takes_tags_off());
        self.blind = blind.then(|| interface.to_owned());
    }

    /// What the holder should know; may be empty.
    pub(super) fn note(&self) -> String {
        let blind = self.blind.as_ref().map(|interface| {
            format!("VLAN tags that the driver takes off are not seen: `ethtool -K {interface} rxvlan off`")
        });
        let notes = [Some(self.nic.clone()).filter(|note| !note.is_empty()), blind];
        notes.into_iter().flatten().collect::<Vec<_>>().join("; ")
    }

    /// Tells the NIC, if it may be told.
    pub(super) fn tell(&mut self, link: &Link, ledger: &mut Ledger) {
        if !self.named {
            return;
        }
        ledger.set_interface(&link.name);
        let told = match Ethtool::open(&link.name) {
            Ok(mut nic) => ledger.tell(&mut nic, &self.queues, &self.filter),
            Err(error) => Told::by_program(&error),
        };
        (self.steered, self.nic) = (told.steered, told.note);
        self.accept(link, ledger);
        tracing::info!(interface = link.name, queues = ?self.queues, steered = self.steered.name(), "{}", self.nic);
    }

    /// Goes on with what the NIC was told by a predecessor; tells it anew if it is not all there.
    pub(super) fn adopt(&mut self, link: &Link, ledger: &mut Ledger) {
        let mut nic = Ethtool::open(&link.name).ok();
        if !self.named {
            // The policy named it before. What is not undone now is undone with the lease.
            let undone = nic.as_mut().map(|nic| ledger.undo_all(nic, self.queues.start));
            if let Some(Err(error)) = undone {
                tracing::warn!(
                    interface = link.name,
                    "rules of a lease that may have none: {error}"
                );
            }
            return;
        }
        match nic.and_then(|nic| ledger.is_told(&nic, self.queues.start)) {
            Some(steered) => {
                self.steered = steered;
                self.accept(link, ledger);
            }
            None => self.tell(link, ledger),
        }
    }

    /// Tells the NIC again what it has forgotten, as it does when rules are switched off and on.
    pub(super) fn keep(&mut self, link: &Link, ledger: &mut Ledger) {
        let told = matches!(self.steered, Steered::ByRules | Steered::ByContext);
        if told && Ethtool::open(&link.name).is_ok_and(|nic| ledger.is_lost(&nic, self.queues.start)) {
            tracing::warn!(interface = link.name, queues = ?self.queues, "rules of the NIC are gone, and made again");
            self.tell(link, ledger);
        }
    }

    fn accept(&mut self, link: &Link, ledger: &mut Ledger) {
        let (first, macs) = (self.queues.start, &self.filter.macs);
        if macs.is_empty() {
            return;
        }
        if let Err(error) = ledger.accept(link.index, first, macs) {
            let separator = if self.nic.is_empty() { "" } else { "; " };
            self.nic = format!(
                "{}{separator}the NIC may not accept frames to these stations: {error}",
                self.nic
            );
        }
    }

    /// Tells a program, before any queue of the lease is active in it.
    ///
    /// # Errors
    /// The kernel's; a queue must not become active then.
    pub(super) fn install(&self, program: &Program) -> Result<(), QueueError> {
        self.queues
            .clone()
            .try_for_each(|queue| program.set_filter(queue, &self.filter))
    }
}
