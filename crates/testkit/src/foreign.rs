//! An XDP program, a map and sockets of somebody else's, by bare system calls: what QEMU's `inhibit` is for.
//!
//! The program sends each frame to the socket in the place of its queue, counted from a first place on, and passes on what finds none.
#![allow(unsafe_code)]

use std::ffi::{CString, c_long};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use rustix::io::FdFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::daemon::Mode;
use crate::{BpfFs, Daemon, Driver, DriverConfig, Layout, NetNs, PacketPort, Rig, VethPair, frame, wait};

/// Length of a guest's buffers, bytes.
const BUFFER: u32 = 2048;

// enum bpf_cmd, bpf_map_type, bpf_prog_type and bpf_attach_type, include/uapi/linux/bpf.h.
const BPF_MAP_CREATE: u32 = 0;
const BPF_MAP_UPDATE_ELEM: u32 = 2;
const BPF_PROG_LOAD: u32 = 5;
const BPF_OBJ_PIN: u32 = 6;
const BPF_LINK_CREATE: u32 = 28;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_ATTACH_XDP: u32 = 37;
// include/uapi/linux/if_link.h.
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// The program on an interface. Detached on drop.
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
    #[must_use]
    pub fn attach(netns: &NetNs, interface: &str, mode: Mode, first: u32) -> Self {
        let map = make_map(BPF_MAP_TYPE_XSKMAP, Self::PLACES);
        let program = load(&map, first);
        let link = link(&program, netns, interface, mode);
        Self {
            map,
            program,
            _link: link,
        }
    }

    /// Attaches it to an interface that was made again, for as long as the result lives.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn attach_again(&self, netns: &NetNs, interface: &str, mode: Mode) -> OwnedFd {
        link(&self.program, netns, interface, mode)
    }

    /// Puts a socket into a place.
    ///
    /// # Panics
    /// If it is none.
    pub fn place(&self, index: u32, socket: &OwnedFd) {
        let value = socket.as_raw_fd();
        let update = MapUpdate {
            map: number(&self.map),
            key: &raw const index as u64,
            value: &raw const value as u64,
            ..MapUpdate::default()
        };
        bpf(BPF_MAP_UPDATE_ELEM, &update).expect("it is a socket");
    }
}

/// An AF_XDP socket of a namespace, and nothing more.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn socket(netns: &NetNs) -> OwnedFd {
    let open = || socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None);
    netns.enter(open).expect("we are root")
}

/// A map that holds numbers.
#[must_use]
pub fn map_of_numbers() -> OwnedFd {
    make_map(BPF_MAP_TYPE_ARRAY, Foreign::PLACES)
}

/// Pins a map under a name in a directory of pins; where that is.
///
/// # Panics
/// If that fails.
#[must_use]
pub fn pin(bpffs: &BpfFs, map: &OwnedFd, name: &str) -> String {
    std::fs::create_dir_all(bpffs.pins()).expect("we are root");
    let path = bpffs.pins().join(name);
    let text = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    let pin = Pin {
        path: text.as_ptr() as u64,
        object: number(map),
        flags: 0,
    };
    bpf(BPF_OBJ_PIN, &pin).expect("it can be pinned");
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
#[must_use]
pub fn list(descriptors: &[&OwnedFd]) -> String {
    let numbers: Vec<_> = descriptors.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
    numbers.join(":")
}

#[derive(Default)]
#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

#[derive(Default)]
#[repr(C)]
struct MapUpdate {
    map: u32,
    _padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[derive(Default)]
#[repr(C)]
struct ProgLoad {
    prog_type: u32,
    insn_count: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buffer: u64,
    kern_version: u32,
    prog_flags: u32,
    name: [u8; 16],
    ifindex: u32,
    expected_attach_type: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

#[repr(C)]
struct Pin {
    path: u64,
    object: u32,
    flags: u32,
}

fn make_map(map_type: u32, max_entries: u32) -> OwnedFd {
    let create = MapCreate {
        map_type,
        key_size: 4,
        value_size: 4,
        max_entries,
    };
    descriptor(bpf(BPF_MAP_CREATE, &create).expect("we are root"))
}

fn link(program: &OwnedFd, netns: &NetNs, interface: &str, mode: Mode) -> OwnedFd {
    netns.enter(|| {
        let name = CString::new(interface).expect("no zero byte");
        // SAFETY: the name is a live string.
        let target_ifindex = unsafe { libc::if_nametoindex(name.as_ptr()) };
        let create = LinkCreate {
            program: number(program),
            target_ifindex,
            attach_type: BPF_ATTACH_XDP,
            flags: match mode {
                Mode::Native => XDP_FLAGS_DRV_MODE,
                Mode::Skb => XDP_FLAGS_SKB_MODE,
            },
        };
        descriptor(bpf(BPF_LINK_CREATE, &create).expect("the program can be attached"))
    })
}

/// `return bpf_redirect_map(&map, ctx->rx_queue_index + first, XDP_PASS);`
fn load(map: &OwnedFd, first: u32) -> OwnedFd {
    let program: [u64; 7] = [
        instruction(0x61, 2, 1, 16, 0), // r2 = *(u32 *)(r1 + 16)    xdp_md.rx_queue_index
        instruction(0x07, 2, 0, 0, first), // r2 += first
        instruction(0x18, 1, 1, 0, number(map)), // r1 = map (BPF_LD_IMM64, BPF_PSEUDO_MAP_FD)
        0,                              //      its upper half
        instruction(0xb7, 3, 0, 0, 2),  // r3 = XDP_PASS
        instruction(0x85, 0, 0, 0, 51), // call bpf_redirect_map
        instruction(0x95, 0, 0, 0, 0),  // exit
    ];
    let load = ProgLoad {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_count: 7,
        insns: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        expected_attach_type: BPF_ATTACH_XDP,
        ..ProgLoad::default()
    };
    descriptor(bpf(BPF_PROG_LOAD, &load).expect("the verifier accepts it"))
}

/// `struct bpf_insn`, little-endian.
fn instruction(opcode: u8, to: u8, from: u8, offset: i16, immediate: u32) -> u64 {
    u64::from(opcode)
        | u64::from(to) << 8
        | u64::from(from) << 12
        | u64::from(offset.cast_unsigned()) << 16
        | u64::from(immediate) << 32
}

fn bpf<T>(command: u32, attributes: &T) -> io::Result<c_long> {
    // SAFETY: the kernel reads size_of::<T> bytes of a live union member, and the objects that its pointers lead to
    // live in the callers' frames.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes as *const T, size_of::<T>()) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn descriptor(number: c_long) -> OwnedFd {
    let number = i32::try_from(number).expect("a descriptor");
    // SAFETY: bpf(2) has just returned it, nobody else owns it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(descriptor.as_fd(), FdFlags::CLOEXEC).expect("it is open");
    descriptor
}

fn number(fd: &OwnedFd) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// A daemon that cannot start says why in one line that contains all of `words`, and ends.
///
/// # Panics
/// If it does not.
#[track_caller]
pub fn assert_complains(mut daemon: Daemon, words: &[&str]) {
    let status = daemon.process().wait(wait::SOON);
    let said = daemon.said();
    assert!(!status.success(), "it should have failed: {said}");
    assert_eq!(said.trim_end().lines().count(), 1, "one line, and not: {said}");
    for word in words {
        assert!(said.contains(word), "{word:?} is missing in: {said}");
    }
    assert!(!daemon.socket().exists(), "a socket stayed behind");
}

/// Guests come and go on a daemon that listens; frames pass for each, and what came between them does not reach the next.
///
/// # Panics
/// If that is not so.
pub fn assert_serves_guests(veth: VethPair, mut daemon: Daemon, count: u8) {
    daemon.await_sockets(&[daemon.socket(), daemon.path("control")]);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let connect = |daemon: &Daemon| {
        Driver::connect(&daemon.socket(), &DriverConfig::default())
            .unwrap_or_else(|refused| panic!("{refused}: {}", daemon.said()))
    };
    let driver = connect(&daemon);
    let mut rig = Rig {
        driver,
        daemon,
        wire,
        veth,
    };
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
        wait::settle();
        while rig.wire.receive(Duration::from_millis(50)).is_some() {}
        rig.driver = connect(&rig.daemon);
    }
    assert!(rig.daemon.counter("to_guest_queue_stopped") > 0);
}
