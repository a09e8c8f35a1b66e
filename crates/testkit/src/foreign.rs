//! An XDP program, a map and sockets of somebody else's: what QEMU's `inhibit` is for.
//!
//! The program sends each frame to the socket in the place of its queue, counted from a first place on, and passes on
//! what finds none.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use libbpf_rs::libbpf_sys as sys;
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::daemon::Mode;
use crate::{BpfFs, Daemon, DriverConfig, Layout, NetNs, Rig, VethPair, bpf, frame, rig, wait};

/// Length of a guest's buffers, bytes.
const BUFFER: u32 = 2048;

/// The program on an interface. Detached on drop.
#[must_use]
pub struct Foreign {
    /// Its socket map.
    pub map: OwnedFd,
    program: OwnedFd,
    _link: OwnedFd,
}

impl Foreign {
    /// Places of its map.
    pub const PLACES: u32 = 8;

    /// Attaches it; the socket of queue 0 is in place `first`.
    ///
    /// # Panics
    /// If that fails.
    pub fn attach(netns: &NetNs, interface: &str, mode: Mode, first: u32) -> Self {
        Self::load((netns, interface, mode), |map| {
            bpf::load_redirect(map, first, false)
        })
    }

    fn load(
        (netns, interface, mode): (&NetNs, &str, Mode),
        load: impl FnOnce(&OwnedFd) -> io::Result<OwnedFd>,
    ) -> Self {
        let map = make_map(sys::BPF_MAP_TYPE_XSKMAP);
        let program = load(&map).expect("the verifier accepts it");
        let link = link(&program, netns, interface, mode);
        Self {
            map,
            program,
            _link: link,
        }
    }

    /// Of the structure that [`Self::attach_marking`]'s program leaves before frames.
    pub const STRUCTURE: &str = bpf::STRUCTURE;

    /// Attaches one that leaves a structure with this mark before each frame, which its types describe.
    ///
    /// # Panics
    /// If that fails.
    pub fn attach_marking(netns: &NetNs, interface: &str, mark: u32) -> Self {
        Self::load((netns, interface, Mode::Native), |map| {
            bpf::load_marking(map, 0, mark)
        })
    }

    /// Attaches it to an interface that was made again, for as long as the result lives.
    ///
    /// # Panics
    /// If that fails.
    pub fn attach_again(&self, netns: &NetNs, interface: &str, mode: Mode) -> OwnedFd {
        link(&self.program, netns, interface, mode)
    }

    /// Puts a socket into a place.
    ///
    /// # Panics
    /// If it is none.
    pub fn place(&self, index: u32, socket: &OwnedFd) {
        self.try_place(index, socket).expect("it is a socket with a ring");
    }

    /// The same, for one that the kernel may refuse.
    ///
    /// # Errors
    /// Its answer.
    pub fn try_place(&self, index: u32, socket: &OwnedFd) -> io::Result<()> {
        bpf::put(&self.map, index, socket)
    }
}

/// What a program says of each frame (`enum xdp_action`, include/uapi/linux/bpf.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// `XDP_ABORTED`.
    Aborted,
    /// `XDP_DROP`.
    Drop,
    /// `XDP_PASS`.
    Pass,
    /// `XDP_TX`.
    SendBack,
    /// `XDP_REDIRECT`, to be sent by the interface with this index.
    SendBy(u32),
}

/// Attaches a program that says the same of all frames, natively, for as long as the result lives.
///
/// # Panics
/// If that fails.
pub fn judge_all(netns: &NetNs, interface: &str, verdict: Verdict) -> OwnedFd {
    let (number, to) = match verdict {
        Verdict::Aborted => (0, None),
        Verdict::Drop => (1, None),
        Verdict::Pass => (2, None),
        Verdict::SendBack => (3, None),
        Verdict::SendBy(to) => (4, Some(to)),
    };
    let program = bpf::load_verdict(number, to).expect("the verifier accepts it");
    link(&program, netns, interface, Mode::Native)
}

/// Where programs see an interface's frames that an XDP program has passed on, or that are about to leave (tcx).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Frames that it receives.
    Ingress,
    /// Frames that it is to send.
    Egress,
}

impl Side {
    fn place(self) -> sys::bpf_attach_type {
        match self {
            Self::Ingress => sys::BPF_TCX_INGRESS,
            Self::Egress => sys::BPF_TCX_EGRESS,
        }
    }
}

/// Attaches a program that accepts all frames, behind the programs that are there, for as long as the result lives:
/// those behind it see none.
///
/// # Panics
/// If that fails, for want of tcx (Linux 6.6) for example.
pub fn accept_all(netns: &NetNs, interface: &str, side: Side) -> OwnedFd {
    const TCX_PASS: u32 = 0;
    let program = bpf::load_tc_verdict(TCX_PASS).expect("the verifier accepts it");
    let index = netns.index_of(interface);
    let link = netns.enter(|| bpf::link(&program, index, side.place(), 0));
    link.expect("tcx")
}

/// Detaches all programs there that links hold, as an administrator may (`bpftool link detach`); how many there were.
///
/// # Panics
/// If that fails.
pub fn detach_all(netns: &NetNs, interface: &str, side: Side) -> usize {
    let index = netns.index_of(interface);
    let detached = netns.enter(|| bpf::detach_tcx(index, side.place()));
    detached.expect("we are root")
}

/// An AF_XDP socket of a namespace with an RX ring, without which a map takes none (Linux 7.1), and nothing more.
///
/// # Panics
/// If there is none.
pub fn socket(netns: &NetNs) -> OwnedFd {
    with_ring(bare_socket(netns), 1024)
}

/// The socket, with an RX ring of so many entries.
///
/// # Panics
/// If it has one.
pub fn with_ring(socket: OwnedFd, entries: u32) -> OwnedFd {
    rustix::net::sockopt::set_xdp_rx_ring_size(&socket, entries).expect("a fresh AF_XDP socket");
    socket
}

/// An AF_XDP socket of a namespace, and nothing more.
///
/// # Panics
/// If there is none.
pub fn bare_socket(netns: &NetNs) -> OwnedFd {
    let open = || socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None);
    netns.enter(open).expect("we are root")
}

/// A map that holds numbers.
pub fn map_of_numbers() -> OwnedFd {
    make_map(sys::BPF_MAP_TYPE_ARRAY)
}

/// Pins a map under a name in a directory of pins; where that is.
///
/// # Panics
/// If that fails.
pub fn pin(bpffs: &BpfFs, map: &OwnedFd, name: &str) -> String {
    std::fs::create_dir_all(bpffs.pins()).expect("we are root");
    let path = bpffs.pins().join(name);
    let text = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    bpf::pin(map, &text).expect("it can be pinned");
    path.to_str().expect("ASCII").to_owned()
}

/// Starts something that inherits these descriptors.
///
/// # Panics
/// If one is not open.
pub fn inherited<T>(descriptors: &[&OwnedFd], start: impl FnOnce() -> T) -> T {
    let set = |flags| {
        for descriptor in descriptors {
            // Whatever else is started meanwhile inherits it too, which does no harm in a test.
            rustix::io::fcntl_setfd(descriptor, flags).expect("an open descriptor");
        }
    };
    set(FdFlags::empty());
    let started = start();
    set(FdFlags::CLOEXEC);
    started
}

/// As the option has it: numbers of descriptors, joined by colons.
pub fn list(descriptors: &[&OwnedFd]) -> String {
    let numbers: Vec<_> = descriptors.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
    numbers.join(":")
}

fn make_map(map_type: sys::bpf_map_type) -> OwnedFd {
    bpf::make_map(map_type, Foreign::PLACES).expect("we are root")
}

fn link(program: &OwnedFd, netns: &NetNs, interface: &str, mode: Mode) -> OwnedFd {
    let index = netns.index_of(interface);
    let link = netns.enter(|| bpf::attach(program, index, mode == Mode::Native));
    link.expect("the program can be attached")
}

/// Guests come and go on a daemon that listens; frames pass for each, and what came between them does not reach the
/// next.
///
/// # Panics
/// If that is not so.
pub fn assert_serves_guests(veth: VethPair, mut daemon: Daemon, count: u8) {
    daemon.await_listening();
    let mut rig = Rig::around(veth, daemon, &DriverConfig::default());
    for seed in 0..count {
        rig.post(64, &[BUFFER]);
        for at in 0..20 {
            let size = 60 + usize::from(at) * 70;
            rig.assert_from_guest(&frame::plain(size, seed ^ at), Layout::Whole);
            rig.assert_to_guest(&frame::plain(size, seed ^ at));
        }
        // It goes with frames under way, and more come than the socket has room for.
        for at in 0..64 {
            rig.pair().send(&frame::plain(200, at), Layout::Whole);
            rig.wire.send(&frame::plain(200, at));
        }
        drop(rig.driver);
        rig.daemon
            .await_port(0, "the end of the guest", |port| port["connected"] == false);
        for _ in 0..3000 {
            let _ = rig.wire.try_send(&frame::plain(60, 0x77));
        }
        wait::a_moment();
        rig.driver = rig::connect(&rig.daemon, &DriverConfig::default());
        let _ = rig.flush_from_guest();
    }
    assert!(rig.daemon.counter("to_guest_queue_stopped") > 0);
}
