//! Frames of a lease: those to its addresses and VLANs.
//!
//! The program checks each frame: a frame in a leased queue that is for another address goes to the host. NICs that
//! have rules get some ([`crate::hardware`]), so that the frames come to the lease's queues whatever their RSS hash
//! is.

use std::ops::Range;

use steer::{Filter, Program};

use crate::hardware::{Names, Nic, NotMade, Order};
use crate::server::journal::ledger::{Ledger, SteeringOutcome};
use host::links::Link;
use host::nic::tags::tags_of;
use host::nic::{Ethtool, Tags, Target};
use host::unserved_queues::{NOTE_MAX, UnservedQueues};
use steward_protocol::{STEERING_BYTES, Steered};

/// Why the NIC has no rules if the policy's rule names no address or VLAN.
const NOT_NAMED: &str =
    "the NIC has no rules for these frames: a steward makes rules if its policy names them (`macs`, `vlans`)";

/// A limit that the steward cannot check.
const AS_SENT: &str = "tags that a veth sends next to frames are not visible: `txvlan off` at its far end";

/// A note for kernels on which the lessee binds its sockets.
const UNBOUND: &str = "leased sockets reach any free queue (from Linux 6.4 on they do not)";

// Longer text is cut in the message to the lessee.
const _: () = assert!(2 * NOTE_MAX <= STEERING_BYTES);
const _: () = assert!(NOT_NAMED.len() + 2 + AS_SENT.len() <= STEERING_BYTES);
const _: () = assert!(UNBOUND.len() + 2 + NOT_NAMED.len() <= STEERING_BYTES);

/// Joins the notes that are not empty, in one line.
pub(crate) fn joined<const N: usize>(notes: [&str; N]) -> String {
    let parts: Vec<&str> = notes.into_iter().filter(|note| !note.is_empty()).collect();
    parts.join("; ")
}

/// Steering entries of one lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entries {
    pub(crate) queues: Range<u32>,
    pub(crate) filter: Filter,
    /// Addresses and VLANs that the policy's rule names: the NIC may get rules for them.
    names: Names,
    /// How frames are steered; the note says why the NIC does not do it, and may be empty.
    pub(crate) outcome: SteeringOutcome,
    /// Whether tags are visible on its interface, if a filter needs them.
    tags: Option<Tags>,
    /// The driver reports stripped tags to the program.
    pub(crate) restored: bool,
    /// How often tags have come to be seen again: lessees set up their queues again then.
    pub(crate) renewed: u32,
    /// Other queues that may receive its frames.
    pub(crate) unserved: UnservedQueues,
}

impl Entries {
    /// `names`: what the policy's rule names.
    pub(crate) fn new(queues: Range<u32>, filter: Filter, names: Names) -> Self {
        let mut entries = Self {
            queues,
            filter,
            names,
            outcome: SteeringOutcome::default(),
            tags: None,
            restored: false,
            renewed: 0,
            unserved: UnservedQueues::default(),
        };
        entries.begin();
        entries
    }

    /// The outcome before the NIC has rules.
    fn begin(&mut self) {
        if self.filter.is_empty() {
            return;
        }
        self.outcome = match self.check() {
            Err(why) if !self.names.is_empty() => SteeringOutcome::by_program(&why),
            checked => SteeringOutcome {
                steered: Steered::ByProgram,
                note: checked.map_or_else(|_| NOT_NAMED.to_owned(), |()| String::new()),
            },
        };
    }

    /// Sets other addresses and VLANs that the policy names.
    pub(crate) fn rename(&mut self, names: Names, link: &Link, ledger: &mut Ledger) {
        if self.names == names {
            return;
        }
        let might = self.may_steer();
        self.names = names;
        match (might, self.may_steer()) {
            (true, true) => {}
            (false, false) => self.begin(),
            (false, true) => self.apply(link, ledger),
            (true, false) => {
                ledger.refuse(self.queues.start);
                self.adopt(link, ledger);
                self.begin();
            }
        }
    }

    /// Whether the NIC may be configured.
    pub(crate) fn may_steer(&self) -> bool {
        !self.filter.is_empty() && self.check().is_ok()
    }

    /// Why the NIC may not be configured. What its rules cannot express is found when they are made.
    fn check(&self) -> Result<(), NotMade> {
        let order = Order {
            filter: &self.filter,
            queues: &[],
            names: &self.names,
        };
        match order.rules(Target::Queue(0)) {
            Err(why @ NotMade::NotNamed(_)) => Err(why),
            _ => Ok(()),
        }
    }

    /// Checks which frames the program will not see on this interface. `is_by_tap`: the programs of a tap are used,
    /// which see tags that the NIC stripped.
    pub(crate) fn look(&mut self, link: &Link, is_by_tap: bool) {
        self.tags = match is_by_tap {
            true => None,
            false => tags_of(&link.name, &self.filter),
        };
        self.look_beyond(link);
    }

    /// Checks which other queues may receive its frames.
    pub(crate) fn look_beyond(&mut self, link: &Link) {
        self.unserved = match self.outcome.steered {
            Steered::ByQueue | Steered::ByProgram => UnservedQueues::guest(link, &self.queues),
            Steered::ByRules | Steered::ByContext | Steered::ByNetwork => UnservedQueues::default(),
        };
    }

    /// Whether the driver strips tags that the filter needs.
    pub(crate) fn lacks_tags(&self) -> bool {
        self.tags == Some(Tags::TakenOff)
    }

    /// Whether the program cannot distinguish frames of its VLANs from others: then the lessee may receive none.
    pub(crate) fn is_blind(&self) -> bool {
        match self.tags {
            Some(Tags::Lost) => true,
            Some(Tags::TakenOff) => !self.restored,
            Some(Tags::There | Tags::AsSent) | None => false,
        }
    }

    /// The note for the lessee; may be empty.
    pub(crate) fn note(&self) -> String {
        let unbound = if host::maps_bound_rings() { "" } else { UNBOUND };
        let far_end = if self.tags == Some(Tags::AsSent) {
            AS_SENT
        } else {
            ""
        };
        joined([unbound, far_end, &self.outcome.note])
    }

    /// Configures the NIC, if that is allowed.
    pub(crate) fn apply(&mut self, link: &Link, ledger: &mut Ledger) {
        if !self.may_steer() {
            return;
        }
        ledger.set_interface(&link.name);
        match Ethtool::open(&link.name) {
            Ok(mut nic) => self.apply_to(&mut nic, ledger),
            Err(error) => self.outcome = SteeringOutcome::by_program(&error),
        }
        self.accept(link, ledger);
    }

    pub(crate) fn apply_to(&mut self, nic: &mut impl Nic, ledger: &mut Ledger) {
        if self.may_steer() {
            self.outcome = ledger.apply(nic, &self.queues, &self.filter, &self.names);
        }
    }

    /// Takes over the NIC configuration of a predecessor; makes it again if it is not complete.
    pub(crate) fn adopt(&mut self, link: &Link, ledger: &mut Ledger) {
        let mut nic = Ethtool::open(&link.name).ok();
        if !self.may_steer() {
            // The policy named it before. What cannot be undone now is undone when the lease ends.
            let undone = nic.as_mut().map(|nic| ledger.undo_all(nic, self.queues.start));
            if let Some(Err(error)) = undone {
                tracing::warn!(
                    interface = link.name,
                    "rules of a lease that may have none: {error}"
                );
            }
            return;
        }
        match nic.and_then(|nic| ledger.in_force(&nic, self.queues.start)) {
            Some(steered) => {
                self.outcome.steered = steered;
                self.accept(link, ledger);
            }
            None => self.apply(link, ledger),
        }
    }

    /// Makes rules again that the NIC has lost, as when n-tuple rules were switched off and on. Returns whether it had.
    pub(crate) fn renew(&mut self, link: &Link, ledger: &mut Ledger) -> bool {
        let by_nic = matches!(self.outcome.steered, Steered::ByRules | Steered::ByContext);
        let is_lost =
            by_nic && Ethtool::open(&link.name).is_ok_and(|nic| ledger.is_lost(&nic, self.queues.start));
        if is_lost {
            tracing::warn!(interface = link.name, queues = ?self.queues, "rules of the NIC are gone, and made again");
            self.apply(link, ledger);
        }
        is_lost
    }

    fn accept(&mut self, link: &Link, ledger: &mut Ledger) {
        let (first, macs) = (self.queues.start, &self.filter.macs);
        if macs.is_empty() {
            return;
        }
        if let Err(error) = ledger.accept(link.index, first, macs) {
            let why = format!("the NIC may not accept frames to these stations: {error}");
            self.outcome.note = joined([self.outcome.note.as_str(), &why]);
        }
    }

    /// Sets the filters in a program, before any queue of the lease is active in it.
    /// Errors: the kernel's; a queue must not become active then.
    pub(crate) fn install(&self, program: &Program) -> anyhow::Result<()> {
        self.queues
            .clone()
            .try_for_each(|queue| program.set_filter(queue, &self.filter))
    }
}
