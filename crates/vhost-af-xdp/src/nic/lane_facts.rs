//! What status shows of a lane, besides its counters.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use common::binding::GuestBuffers;
use common::drivers;
use xsk::{NumaNode, Umem};

use crate::nic::interface::Interface;
use crate::nic::mode::{Checksums, DataPath, Fallback};
use crate::nic::shared_memory::SharedMemory;
use dataplane::nic::queue::Sends;
use dataplane::nic::xdp::XdpNic;

const NOT_SET_UP: &Fallback = &Fallback::NotSetUp;

pub(crate) struct LaneFacts {
    /// The data path really in use.
    pub(crate) mode: DataPath,
    /// The guest has not set the pair up: the first pair gets its frames. Written under the port's lock; nothing is
    /// published through it.
    pub(crate) is_idle: AtomicBool,
    /// Why the data path is not a better one.
    pub(crate) fallbacks: Vec<Fallback>,
    /// Why it keeps copying although it should have become direct.
    pub(crate) copies_on: OnceLock<Fallback>,
    /// Frames may span several descriptors.
    pub(crate) multi_buffer: bool,
    /// Which side completes checksums that the guest leaves open; `None`: it leaves none.
    pub(crate) checksums: Option<Checksums>,
    /// Packet memory of this queue pair in our process, bytes.
    pub(crate) packet_bytes: u64,
    /// The kernel's bookkeeping for this queue's UMEM, bytes.
    pub(crate) kernel_bytes: u64,
    /// What backs the packet memory.
    pub(crate) backing: String,
    /// The shared memory that it is a slice of, if it is one.
    pub(crate) shared: Option<Arc<SharedMemory>>,
    /// NUMA node that most of it is on, where there are several.
    pub(crate) node: Option<NumaNode>,
    /// A duplicate of the socket, for its statistics; closed before the lane is stopped.
    pub(crate) socket: Option<OwnedFd>,
}

impl LaneFacts {
    /// For a cable, which has no memory.
    pub(crate) fn cable() -> Self {
        Self {
            mode: DataPath::Cable,
            is_idle: AtomicBool::new(false),
            fallbacks: Vec::new(),
            copies_on: OnceLock::new(),
            multi_buffer: false,
            checksums: None,
            packet_bytes: 0,
            kernel_bytes: 0,
            backing: String::new(),
            shared: None,
            node: None,
            socket: None,
        }
    }

    /// For a network, whose uplink has memory.
    pub(crate) fn network() -> Self {
        Self {
            mode: DataPath::Network,
            ..Self::cable()
        }
    }

    /// For a tap, whose kernel completes checksums.
    pub(crate) fn tap() -> Self {
        Self {
            mode: DataPath::Tap,
            ..Self::cable()
        }
    }

    /// For a lane with this memory; `csum`: the guest may leave checksums open.
    pub(crate) fn new(umem: &Umem, packet_bytes: u64, backing: String, csum: bool) -> Self {
        Self {
            mode: DataPath::Null,
            packet_bytes,
            kernel_bytes: kernel_bytes(umem),
            backing,
            checksums: csum.then_some(Checksums::Daemon),
            ..Self::cable()
        }
    }

    /// Why it is not in a better mode, as far as is known yet.
    pub(crate) fn fallbacks(&self) -> impl Iterator<Item = &Fallback> {
        let copies_on = self.copies_on.get();
        let said = self.fallbacks.iter();
        let still = said.filter(move |said| copies_on.is_none() || !matches!(said, Fallback::NotYet(_)));
        let not_set_up = self.is_idle.load(Relaxed).then_some(NOT_SET_UP);
        still.chain(copies_on).chain(not_set_up)
    }

    /// Sets what is shown of a queue: mode, fallbacks, checksums, and a duplicate of its socket for statistics.
    /// `guest`: the guest's receive buffers, if its memory is the UMEM.
    pub(crate) fn describe(
        &mut self,
        interface: &Interface,
        guest: Option<GuestBuffers>,
        nic: &XdpNic,
        sends: Sends,
    ) -> io::Result<()> {
        let bound = nic.socket();
        self.mode = match interface.is_by_tap() {
            true => DataPath::Tap,
            false => DataPath::Socket(bound.mode()),
        };
        if self.mode != DataPath::Tap {
            let binding = interface.binding(guest);
            let note = binding.ok().and_then(|binding| binding.note);
            self.fallbacks.extend(note.map(Fallback::NoZeroCopy));
        }
        let why = interface.steering.fallback().map(str::to_owned);
        self.fallbacks.extend(match self.mode {
            DataPath::Tap => why.map(Fallback::ByTap),
            _ => why.map(Fallback::NotNative),
        });
        let no_tap = interface.no_tap_because.clone();
        self.fallbacks.extend(no_tap.map(Fallback::NotByTap));
        let refused = bound.fallbacks().iter().map(ToString::to_string);
        self.fallbacks.extend(refused.map(Fallback::Refused));
        if interface.steering.mode() == steer::Mode::Skb && interface.link.partial_checksums {
            self.fallbacks.push(Fallback::SkbOnVeth);
        }
        if bound.busy_polls() && !drivers::is_polled(bound.mode(), drivers::kernel()) {
            self.fallbacks.push(Fallback::NotPolled);
        }
        self.fallbacks
            .extend(interface.lacks_hints().map(Fallback::NoHints));
        self.multi_buffer = bound.multi_buffer();
        self.node = interface.link.node.and_then(|_| bound.umem().node());
        self.socket = Some(bound.as_fd().try_clone_to_owned()?);
        if self.checksums.is_some() && sends.checksum {
            self.checksums = Some(match sends.zero_copy {
                true => Checksums::Nic,
                false => Checksums::Kernel,
            });
        }
        Ok(())
    }
}

/// Kernel memory of a bound socket: `xp_create_and_assign_umem` (net/xdp/xsk_buff_pool.c) keeps a
/// `struct xdp_buff_xsk` and a pointer for every chunk; measured as 32 MiB per GiB of 4 KiB chunks
/// and 70 MiB per GiB of 2 KiB chunks on 6.18.
fn kernel_bytes(umem: &Umem) -> u64 {
    umem.chunks() * 136
}
