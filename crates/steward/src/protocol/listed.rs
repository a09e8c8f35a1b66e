//! An entry of the list of leases, which any user may ask for, and how frames are steered to the queues of a lease.

use steer::Filter;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes};

use super::field::{enumerated, field, flags_of, interface_name, listed, padded, value, zero};
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
    /// How many.
    pub queues: u32,
    /// Which frames it takes.
    pub filter: Filter,
    /// How they come.
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

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct ListedBody {
    number: u64,
    namespace: u64,
    pid: u32,
    uid: u32,
    start_queue: u32,
    queues: u32,
    steered: u32,
    flags: u32,
    mac_count: u32,
    vlan_count: u32,
    interface: [u8; 16],
    macs: [[u8; 6]; ENTRIES_MAX],
    vlans: [u16; ENTRIES_MAX],
}

const FLAG_IMPAIRED: u32 = 1;
const FLAG_ORPHANED: u32 = 2;
const FLAG_ZCRX: u32 = 4;

const _: () = assert!(size_of::<ListedBody>() == 192);

impl Listed {
    pub(crate) fn body(&self) -> ListedBody {
        ListedBody {
            number: self.number,
            namespace: self.namespace,
            pid: self.pid,
            uid: self.uid,
            start_queue: self.start_queue,
            queues: self.queues,
            steered: self.steered as u32,
            flags: flags_of([
                (self.impaired, FLAG_IMPAIRED),
                (self.orphaned, FLAG_ORPHANED),
                (self.zcrx, FLAG_ZCRX),
            ]),
            mac_count: self.filter.macs.len().try_into().unwrap_or(u32::MAX),
            vlan_count: self.filter.vlans.len().try_into().unwrap_or(u32::MAX),
            interface: field(&self.interface),
            macs: padded(&self.filter.macs),
            vlans: padded(&self.filter.vlans),
        }
    }

    pub(crate) fn read(body: &ListedBody) -> Result<Self, Malformed> {
        zero(u64::from(
            body.flags & !(FLAG_IMPAIRED | FLAG_ORPHANED | FLAG_ZCRX),
        ))?;
        if body.start_queue.checked_add(body.queues).is_none() {
            return Err(value("first queue", body.start_queue));
        }
        Ok(Self {
            number: body.number,
            namespace: body.namespace,
            pid: body.pid,
            uid: body.uid,
            interface: interface_name(&body.interface)?,
            start_queue: body.start_queue,
            queues: body.queues,
            filter: Filter {
                macs: listed(&body.macs, body.mac_count, "number of addresses")?,
                vlans: listed(&body.vlans, body.vlan_count, "number of VLANs")?,
            },
            steered: enumerated("way of steering", body.steered)?,
            impaired: body.flags & FLAG_IMPAIRED != 0,
            orphaned: body.flags & FLAG_ORPHANED != 0,
            zcrx: body.flags & FLAG_ZCRX != 0,
        })
    }
}
