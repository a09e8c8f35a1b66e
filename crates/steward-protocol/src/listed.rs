//! An entry of the list of leases, which any user may ask for, and how frames are steered to the queues of a lease.

use steer::Filter;
use zerocopy::TryFromBytes;

use super::wire::{Fields, Io, List, Name, count, enumeration, value};
use super::{ENTRIES_MAX, Malformed};

/// One lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listed {
    /// Number of the lease, in increasing order; 0 is before the first.
    pub number: u64,
    /// Inode of the network namespace that the interface is in; see [`namespace`](host::links::namespace).
    pub namespace: u64,
    /// PID of its lessee in the steward's PID namespace; 0: it has none there.
    pub pid: u32,
    /// Its lessee's user.
    pub uid: u32,
    /// Current name of the interface.
    pub interface: String,
    /// First queue.
    pub start_queue: u32,
    /// Number of queues.
    pub queues: u32,
    /// The frames that it receives.
    pub filter: Filter,
    /// How its frames are steered.
    pub steered: Steered,
    /// The lease is impaired: it receives no frames.
    pub impaired: bool,
    /// The lessee has not resumed it since the steward was restarted.
    pub orphaned: bool,
    /// It is for io_uring zero-copy receive, not for AF_XDP.
    pub zcrx: bool,
}

/// How frames are steered to the queues of a lease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, TryFromBytes)]
#[repr(u32)]
pub enum Steered {
    /// The lease gets all frames that the NIC puts into the queues.
    #[default]
    ByQueue,
    /// Of the frames that the NIC puts into the queues, the program selects those of the lease's addresses and VLANs.
    ByProgram,
    /// The NIC steers frames of these addresses and VLANs to the lease's first queue (n-tuple rules); the program
    /// checks them, too.
    ByRules,
    /// The NIC spreads the frames of these addresses and VLANs over the lease's queues (n-tuple rules and an RSS
    /// context); the program checks them, too.
    ByContext,
    /// The program selects the frames to the stations of a network, on all of the queues.
    ByNetwork,
}

impl Steered {
    /// For status and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ByQueue => "queue",
            Self::ByProgram => "program",
            Self::ByRules => "n-tuple rules",
            Self::ByContext => "n-tuple rules, RSS context",
            Self::ByNetwork => "network",
        }
    }
}

enumeration!(Steered, "way of steering");

/// Addresses of a lease.
pub(super) const MACS: List = List::set(ENTRIES_MAX, 6, "addresses");
/// Its VLANs.
pub(super) const VLANS: List = List::set(ENTRIES_MAX, 2, "VLANs");

impl Fields for Listed {
    fn fields(&mut self, io: &mut Io<'_, '_>) -> Result<(), Malformed> {
        let Filter { macs, vlans } = &mut self.filter;
        io.plain(&mut self.number)?;
        io.plain(&mut self.namespace)?;
        for number in [
            &mut self.pid,
            &mut self.uid,
            &mut self.start_queue,
            &mut self.queues,
        ] {
            io.plain(number)?;
        }
        io.plain(&mut self.steered)?;
        io.flags([&mut self.impaired, &mut self.orphaned, &mut self.zcrx])?;
        let mut counts = [count(macs), count(vlans)];
        io.plain(&mut counts)?;
        io.by(&Name, &mut self.interface)?;
        io.elements(MACS, counts[0], macs)?;
        io.elements(VLANS, counts[1], vlans)?;
        match self.start_queue.checked_add(self.queues) {
            Some(_) => Ok(()),
            None => Err(value("first queue", self.start_queue)),
        }
    }
}
