//! Answers of a steward, and their messages.

use steer::{Mode, QueueCounters, Station};
use xsk::NumaNode;
use zerocopy::TryFromBytes;

use super::hints::Hinted;
use super::listed::{Listed, Steered};
use super::netkit::NetkitEnd;
use super::taps::BEHIND;
use super::wire::{BeforeZeros, Fields, Io, Name, Text, enumerated, enumeration, messages, value, wire};
use super::zcrx::ZcrxRegistered;
use super::{HostEnd, Malformed, SendTapEnd, message, split};
use host::links::{DriverSends, Link};

/// Its length is ETHTOOL_BUSINFO_LEN (include/uapi/linux/ethtool.h).
const DRIVER: Text = Text(32, "name of a driver");
const NOTE: Text = Text(240, "note");
const STEERING: Text = Text(STEERING_BYTES, "note on steering");
/// Longest text on how frames are steered, bytes; longer text is cut.
pub const STEERING_BYTES: usize = 504;
const REFUSAL_BYTES: usize = 480;

/// An answer of a steward, or a notification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Done.
    Done,
    /// The interface of the lease.
    Facts(Facts),
    /// Counters of a queue.
    Counters(QueueCounters),
    /// How the network reaches the host.
    Host(HostEnd),
    /// Stations behind the bridge that the uplink is part of. As a notification, without any: they changed.
    Behind(Vec<Station>),
    /// Hints before frames. Also as a notification, to a lessee that sent [`Request::Hints`](super::Request::Hints).
    Hinted(Hinted),
    /// A queue is registered for zero-copy receive.
    ZcrxRegistered(ZcrxRegistered),
    /// The netkit that has the lease's queue. The descriptor of the map for its socket is sent with it.
    Netkit(NetkitEnd),
    /// A tap device that sends GSO packets unsegmented. Its descriptor is sent with it.
    SendTap(SendTapEnd),
    /// Not done.
    Refused(Refusal),
    /// The interface of the lease changed: its facts now. Never an answer to a request.
    Changed(Facts),
    /// A lease of any lessee.
    Lease(Listed),
    /// The kernel failed in a step of setting up a socket or netkit; a lessee may try with other options.
    Failed {
        /// The step that failed.
        step: Step,
        /// The kernel's error number (errno(3)).
        errno: u32,
    },
}

/// Steps of setting up a socket or a netkit, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u32)]
pub enum Step {
    /// Check and map the files of its memory.
    Map = 1,
    /// Register the memory (`XDP_UMEM_REG`).
    Register = 2,
    /// Make its rings.
    Rings = 3,
    /// Bind it.
    Bind = 4,
    /// Wait until no socket has the queue any more.
    Await = 5,
    /// Check the socket whose memory it shares.
    Share = 6,
    /// Get an io_uring ring from its owner (pidfd_getfd(2)).
    Ring = 7,
    /// Register the queue with that ring.
    Queue = 8,
    /// Share the queue with the other rings.
    ShareQueue = 9,
    /// Check the network namespace for a netkit.
    Namespace = 10,
    /// Move the netkit there, name it, and set it up.
    Netkit = 11,
}

impl Step {
    /// What failed, in words, with a likely cause.
    #[must_use]
    pub fn what(self) -> &'static str {
        match self {
            Self::Map => {
                "the memory cannot be mapped by the steward (it has to be of memfd_create, tmpfs or hugetlbfs; QEMU: \
                 memory-backend-memfd, or memory-backend-file below /dev/shm or /dev/hugepages)"
            }
            Self::Register => "the memory cannot be registered (XDP_UMEM_REG)",
            Self::Rings => "the rings cannot be made",
            Self::Bind => "the socket cannot be bound to the queue",
            Self::Share => "the socket with the memory to share is not the one that was named",
            Self::Ring => "the ring cannot be taken from the process that has connected",
            Self::Queue => "the queue cannot be registered for zero-copy receive",
            Self::ShareQueue => "the queue cannot be shared with further rings (Linux 7.1)",
            Self::Namespace => "the descriptor is not of a network namespace that this user may use",
            Self::Netkit => "the netkit cannot be moved, named or set up",
            Self::Await => "the queue does not become free, though its socket is closed",
        }
    }
}

/// Facts about the interface, which a lessee in another network namespace cannot query itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Index in the steward's network namespace; 0: the interface is gone.
    pub ifindex: u32,
    /// Its name now.
    pub name: String,
    /// Bytes.
    pub mtu: u32,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Receive queues.
    pub rx_queues: u32,
    /// Name of the driver; empty if it is not known. Cut to 32 bytes.
    pub driver: String,
    /// Administratively up.
    pub up: bool,
    /// Its local senders leave partial checksums, as those of a veth do.
    pub partial_checksums: bool,
    /// VLAN tags are stripped before XDP sees frames: stations in VLANs cannot be distinguished.
    pub strips_tags: bool,
    /// Frames for the lessee may be lost: [`steering`](Self::steering) says where, with the remedy.
    pub loses: bool,
    /// NUMA node of its device, if it is on one and that is known.
    pub node: Option<NumaNode>,
    /// An IOMMU translates the addresses of its device.
    pub translated: bool,
    /// How the program is attached; `None`: it is not, the lease is impaired, and [`note`](Self::note) says why.
    pub mode: Option<Mode>,
    /// The kernel's id of the program; 0 if there is none.
    pub program: u32,
    /// Features of the driver in zero-copy mode.
    pub sends: DriverSends,
    /// Changes whenever the program is attached again: the lessee has to request all sockets again then.
    pub generation: u32,
    /// How frames are steered to the queues of the lease.
    pub steered: Steered,
    /// No frames arrive: the interface is gone or down, or lacks a queue of the lease. The lease continues by itself
    /// when that is over.
    pub impaired: bool,
    /// Why the lease is impaired, or why the program is not attached natively; else empty. Cut to 240 bytes.
    pub note: String,
    /// Why frames are not steered in a better way, or which frames are not seen; else empty. Cut to 504 bytes.
    pub steering: String,
}

impl Facts {
    /// Those that an interface itself has.
    #[must_use]
    pub fn of(link: &Link) -> Self {
        Self {
            ifindex: link.index,
            name: link.name.clone(),
            mtu: link.mtu,
            mac: link.mac,
            rx_queues: link.rx_queues,
            driver: link.driver.clone(),
            up: link.up,
            partial_checksums: link.partial_checksums,
            node: link.node,
            translated: link.translated,
            ..Self::default()
        }
    }
}

/// Why a request was refused, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes)]
#[repr(u32)]
pub enum Reason {
    /// The message was malformed; the connection is closed.
    Malformed = 1,
    /// The policy has no rule for it.
    NotAllowed = 2,
    /// Another lease has a queue of it.
    Taken = 3,
    /// No such interface or queue, or one that cannot be leased.
    NoInterface = 4,
    /// The XDP program cannot be attached.
    Program = 5,
    /// Too many connections, or too frequent changes.
    Limit = 6,
    /// More locked memory than the policy allows.
    Memlock = 7,
    /// The connection has no lease, has one already, or has one without this queue.
    Lease = 8,
    /// The kernel refused something.
    Kernel = 9,
    /// The interface is gone, or its program; it may come back.
    Impaired = 10,
    /// No memory is registered for the queue; perhaps it was registered with a previous steward.
    Unregistered = 11,
    /// The NIC, or its driver, cannot do it, or is not set up for it.
    Nic = 12,
}
impl Reason {
    /// A refusal for this reason.
    #[must_use]
    pub fn because(self, text: impl Into<String>) -> Refusal {
        Refusal::new(self, text)
    }

    /// The same, as an `Err`.
    ///
    /// # Errors
    /// Always.
    pub fn refuse<T>(self, text: impl Into<String>) -> Result<T, Refusal> {
        Err(self.because(text))
    }
}

/// A refusal: a reason for programs, a text for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Refusal {
    /// For programs.
    pub reason: Reason,
    /// Names the value and the remedy. Cut to 480 bytes.
    pub text: String,
}

impl Refusal {
    /// A refusal for this reason.
    #[must_use]
    pub fn new(reason: Reason, text: impl Into<String>) -> Self {
        Self {
            reason,
            text: text.into(),
        }
    }
}

enumeration!(Step, "step");
enumeration!(Reason, "reason of a refusal");

wire!(Refusal {
    reason: BeforeZeros(4),
    text: Text(REFUSAL_BYTES, "refusal"),
});

messages! {
    Answer {
        64 => Done;
        65 => Facts(facts);
        66 => Counters(counters);
        67 => Refused(refusal);
        68 => Changed(facts);
        69 => Failed { step, errno };
        70 => Host(host);
        71 => Hinted(hinted);
        72 => ZcrxRegistered(registered);
        73 => Netkit(netkit);
        74 => Behind(stations: BEHIND);
        75 => SendTap(tap);
        80 => Lease(listed);
    } else |kind, _: &mut _| Err(Malformed::Kind(kind))
}

impl Answer {
    /// The message, with the serial number of the request, or 0.
    #[must_use]
    pub fn encode(&self, serial: u32) -> Vec<u8> {
        message(serial, |to| self.write(to))
    }

    /// Reads a message of a steward: the serial number of the request, or 0, and the answer.
    ///
    /// # Errors
    /// [`Malformed`], for anything that [`Answer::encode`] does not write.
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self), Malformed> {
        let (head, mut body) = split(bytes)?;
        let answer = Self::read(head.kind, &mut body)?;
        body.end()?;
        Ok((head.serial, answer))
    }
}

impl Fields for Facts {
    fn fields(&mut self, io: &mut Io<'_, '_>) -> Result<(), Malformed> {
        for number in [
            &mut self.ifindex,
            &mut self.mtu,
            &mut self.rx_queues,
            &mut self.program,
            &mut self.generation,
        ] {
            io.plain(number)?;
        }
        let mut mode = self.mode.map_or(0, |mode| mode as u32);
        io.plain(&mut mode)?;
        self.mode = match mode {
            0 => None,
            number => Some(enumerated("mode", number)?),
        };
        let sends = &mut self.sends;
        io.flags([
            &mut self.up,
            &mut sends.checksum,
            &mut self.partial_checksums,
            &mut self.impaired,
            &mut sends.zero_copy,
            &mut self.translated,
            &mut self.strips_tags,
            &mut self.loses,
        ])?;
        let mut most_pieces = u32::try_from(sends.most_pieces).unwrap_or(u32::MAX);
        io.plain(&mut most_pieces)?;
        sends.most_pieces = most_pieces as usize;
        io.by(&Name, &mut self.name)?;
        io.plain(&mut self.mac)?;
        let mut beyond = self.node.map_or(0u16, |node| node.number() + 1);
        io.by(&BeforeZeros(4), &mut beyond)?;
        self.node = NumaNode::new(i32::from(beyond) - 1);
        if self.node.is_none() && beyond != 0 {
            return Err(value("NUMA node", beyond.into()));
        }
        io.plain(&mut self.steered)?;
        io.by(&DRIVER, &mut self.driver)?;
        io.by(&NOTE, &mut self.note)?;
        io.by(&STEERING, &mut self.steering)
    }
}
