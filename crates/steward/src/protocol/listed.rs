//! An entry of the list of leases, which any user may ask for, and how frames are steered to the queues of a lease.

use steer::Filter;
use zerocopy::TryFromBytes;

use super::wire::{Fields, Io, List, Name, count, enumeration, value};
use super::{ENTRIES_MAX, Malformed};

/// One lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listed {
    /// Increases from one to the next; 0 is before the first.
    pub number: u64,
    /// Inode of the network namespace that the interface is in; see [`namespace`](crate::listing::namespace).
    pub namespace: u64,
    /// Its lessee's process, as the steward's PID namespace has it; 0: not there.
    pub pid: u32,
    /// Its lessee's user.
    pub uid: u32,
    /// The interface, by its name now.
    pub interface: String,
    /// First queue.
    pub start_queue: u32,
    /// Number of queues.
    pub queues: u32,
    /// Which frames it takes.
    pub filter: Filter,
    /// How its frames come.
    pub steered: Steered,
    /// They do not, although they should.
    pub impaired: bool,
    /// The lessee has not come back since the steward was started again.
    pub orphaned: bool,
    /// It is for io_uring zero-copy receive, not for AF_XDP.
    pub zcrx: bool,
}

/// How frames come to the queues of a lease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, TryFromBytes)]
#[repr(u32)]
pub enum Steered {
    /// All that the NIC puts into the queues, by whatever rules it has.
    #[default]
    ByQueue,
    /// Of what the NIC puts into the queues, the frames of the lease's addresses and VLANs; the program looks.
    ByProgram,
    /// The NIC brings the frames of these addresses and VLANs to the lease's first queue (n-tuple rules); the program
    /// looks, too.
    ByRules,
    /// The NIC spreads the frames of these addresses and VLANs over the lease's queues (n-tuple rules and an RSS
    /// context); the program looks, too.
    ByContext,
    /// Those to the stations of a network, whichever of the queues they come to; the program looks.
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
