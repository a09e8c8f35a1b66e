//! The XDP program that steers frames into AF_XDP sockets: loading, attaching, configuring, counting.
//!
//! [`Program::attach`] puts `bpf/steer.bpf.c` on a network interface. From then on every receive queue of the
//! interface is in one of two states, initially in the first:
//!
//! | state | frames | entered by |
//! |---|---|---|
//! | inactive | the host's stack gets them, as without a program | [`Program::attach`], [`Program::disable_queue`] |
//! | active | the queue's AF_XDP socket gets them, with a virtio-net header on request | [`Program::activate_queue`] |
//!
//! [`Program::enable_queue`] is [`Program::place_socket`] and [`Program::activate_queue`] in one.
//!
//! The program is attached by a BPF link whose only holder is the [`Program`]: when that is dropped, or the
//! process dies in any way, the interface is as it was before. But a program that was pinned ([`Program::pin`])
//! stays, and a later process takes it over ([`Program::open_pinned`]) or removes it ([`detach_pinned`]).
//!
//! Queues can also belong to a *network* ([`Program::set_network`]): one socket per queue for many receivers,
//! distinguished by address and VLAN ([`Program::set_station`]). The receiver's port number is before each
//! frame ([`noted_port`]); multicast frames go to the host, and are copied into a [`MulticastRing`].
//!
//! A NIC has information about a frame that is not in its bytes: [`Program::set_hints`] replaces the program,
//! without losing a frame, by one that writes it before the frames of queues with hints
//! ([`QueueConf::hints`]). [`Program::layouts`] describes the layouts, and [`xsk::metadata`] reads them.
//!
//! [`TapAccess`] connects such a network with the host by a tap, and with the wire if no XDP program is on
//! the interface; [`attach_redirect`] redirects frames written to a tap to an interface.
//!
//! [`VerdictProgram`] is for measurements: every frame is dropped, or sent back, in the driver.
//!
//! # Limits
//! - Queues 0 to [`MAX_QUEUES`]` - 1`.
//! - One program per interface: a foreign one is never replaced, see [`AttachError::Foreign`]. Several users
//!   of one interface in one process share a [`Program`] (its methods take `&self`).
//! - Kernel 5.18 or later (BPF links for XDP: 5.9; the helper for the length of frames in several buffers: 5.18).
//! - Attaching needs `CAP_BPF` and `CAP_NET_ADMIN`. The methods of an attached [`Program`] need `CAP_BPF` only where
//!   `kernel.unprivileged_bpf_disabled` is set.
//!
//! # Example
//! ```no_run
//! use std::os::fd::AsFd;
//! use steer::{ModeRequest, Program, QueueConf, VirtioHeader};
//!
//! # fn example(ifindex: u32, xsk: std::os::fd::BorrowedFd<'_>) -> Result<(), Box<dyn std::error::Error>> {
//! let program = Program::attach(ifindex, ModeRequest::Xdp, false)?;
//! if let Some(reason) = program.fallback() {
//!     eprintln!("{} mode, because native was refused: {reason}", program.mode());
//! }
//! let header = Some(VirtioHeader::Basic);
//! program.enable_queue(0, xsk, QueueConf { virtio_header: header, frame_limit: 1514, hints: false })?;
//! println!("{:?}", program.counters(0)?);
//! # Ok(())
//! # }
//! ```

mod attach;
mod btf;
mod capture;
mod config;
mod error;
mod filter;
mod foreign;
mod hints;
mod layout;
mod link;
mod load;
mod map;
mod maps;
mod marks;
mod mode;
mod netlink;
mod network;
mod notes;
mod own_layouts;
mod own_map;
mod program;
mod program_hints;
mod program_networks;
mod ring;
mod send;
mod shape;
mod socket_map;
mod tap;
mod tunnel;
mod verdict;

pub use btf::{LayoutOfError, layout_of_map, layout_of_program};
pub use error::{AttachError, KernelRefusal, with_sources};
pub use foreign::{AttachedAs, ForeignProgram, Held, is_detached, program_on, unnamed_program_on};
pub use hints::{HintSet, NoSuchHint};
pub use layout::{
    Filter, LAST_VLAN, MAX_QUEUES, MAX_STATIONS, QueueConf, QueueCounters, Station, VirtioHeader,
    network_number, queues_of,
};
pub use marks::{Flow, InterfaceMarks, MAX_MARKS};
pub use mode::{Mode, ModeRequest};
pub use model::text::{mac_bytes, mac_text, ranges, ranges_text};
pub use network::{ANY_VLAN, MulticastLimit, NOTE_BYTES, note_layout, noted_port};
pub use own_map::OwnMap;
pub use program::{Program, detach_pinned};
pub use ring::{Group, MulticastReader, MulticastRing};
pub use send::attach_redirect;
pub use socket_map::SocketMap;
pub use tap::{Hook, TapAccess, TapDevice, TapTo, TapUser, detach_tap, network_of_filter, pinned_taps};
pub use tunnel::Tunnel;
pub use verdict::{Verdict, VerdictProgram};

/// The skeletons that `build.rs` generates from the programs in `bpf`.
#[allow(unsafe_code, missing_docs, unreachable_pub, unused, elided_lifetimes_in_paths)]
#[allow(
    clippy::all,
    clippy::needless_pass_by_value,
    clippy::undocumented_unsafe_blocks
)]
mod skel {
    include!(concat!(env!("OUT_DIR"), "/steer.skel.rs"));

    pub(crate) mod bound {
        include!(concat!(env!("OUT_DIR"), "/steer_bound.skel.rs"));
    }

    pub(crate) mod send {
        include!(concat!(env!("OUT_DIR"), "/send.skel.rs"));
    }

    pub(crate) mod tap {
        include!(concat!(env!("OUT_DIR"), "/tap.skel.rs"));
    }

    pub(crate) mod verdict {
        include!(concat!(env!("OUT_DIR"), "/verdict.skel.rs"));
    }
}
