//! An entry of the list of leases, which any user may ask for, and how frames are steered to the queues of a lease.

use steer::Filter;
use zerocopy::TryFromBytes;

use super::wire::{Body, Codec, List, Name, Wire, count, enumeration, value};
use super::{ENTRIES_MAX, Malformed};

/// One lease.
#[derive(Debug, Clone, PartialEq, Eq)]
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

impl Wire for Listed {
    fn write(&self, to: &mut Vec<u8>) {
        self.number.write(to);
        self.namespace.write(to);
        let Filter { macs, vlans } = &self.filter;
        [self.pid, self.uid].write(to);
        [self.start_queue, self.queues].write(to);
        self.steered.write(to);
        [self.impaired, self.orphaned, self.zcrx].write(to);
        [count(macs), count(vlans)].write(to);
        Name.write(&self.interface, to);
        MACS.write_elements(macs, to);
        VLANS.write_elements(vlans, to);
    }

    fn read(from: &mut Body<'_>) -> Result<Self, Malformed> {
        let (number, namespace, pid, uid) = (from.next()?, from.next()?, from.next()?, from.next()?);
        let [start_queue, queues]: [u32; 2] = from.next()?;
        if start_queue.checked_add(queues).is_none() {
            return Err(value("first queue", start_queue));
        }
        let steered = from.next()?;
        let [impaired, orphaned, zcrx] = from.next()?;
        let [macs, vlans] = from.next()?;
        Ok(Self {
            number,
            namespace,
            pid,
            uid,
            interface: Name.read(from)?,
            start_queue,
            queues,
            filter: Filter {
                macs: MACS.read_elements(macs, from)?,
                vlans: VLANS.read_elements(vlans, from)?,
            },
            steered,
            impaired,
            orphaned,
            zcrx,
        })
    }
}
