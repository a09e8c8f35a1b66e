//! The least XDP program there is: every frame to the socket of its queue, loaded by bare bpf(2) calls, so that the
//! crate can be tried without a BPF toolchain.
#![allow(unsafe_code)]

use std::ffi::c_long;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

const BPF_MAP_CREATE: u32 = 0;
const BPF_MAP_UPDATE_ELEM: u32 = 2;
const BPF_PROG_LOAD: u32 = 5;
const BPF_LINK_CREATE: u32 = 28;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_ATTACH_XDP: u32 = 37;
const BPF_F_XDP_HAS_FRAGS: u32 = 1 << 5;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// The program on an interface; detached when dropped.
pub(crate) struct Redirect {
    map: OwnedFd,
    _program: OwnedFd,
    _link: OwnedFd,
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

#[derive(Default)]
#[repr(C)]
struct LinkCreate {
    program: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

impl Redirect {
    /// Loads the program, with support for frames in several buffers, and attaches it.
    pub(crate) fn attach(ifindex: u32, native: bool) -> io::Result<Self> {
        let create = MapCreate {
            map_type: BPF_MAP_TYPE_XSKMAP,
            key_size: 4,
            value_size: 4,
            max_entries: 64,
        };
        let map = descriptor(bpf(BPF_MAP_CREATE, &create)?);
        let program = load(&map)?;
        let link = LinkCreate {
            program: program.as_raw_fd() as u32,
            target_ifindex: ifindex,
            attach_type: BPF_ATTACH_XDP,
            flags: if native {
                XDP_FLAGS_DRV_MODE
            } else {
                XDP_FLAGS_SKB_MODE
            },
        };
        let link = descriptor(bpf(BPF_LINK_CREATE, &link)?);
        Ok(Self {
            map,
            _program: program,
            _link: link,
        })
    }

    /// From now on the frames of `queue` go to `socket`.
    pub(crate) fn steer(&self, queue: u32, socket: impl AsFd) -> io::Result<()> {
        let value = socket.as_fd().as_raw_fd();
        let update = MapUpdate {
            map: self.map.as_raw_fd() as u32,
            key: &raw const queue as u64,
            value: &raw const value as u64,
            ..MapUpdate::default()
        };
        bpf(BPF_MAP_UPDATE_ELEM, &update).map(drop)
    }
}

/// `return bpf_redirect_map(&map, ctx->rx_queue_index, XDP_PASS);`
fn load(map: &OwnedFd) -> io::Result<OwnedFd> {
    let map = map.as_raw_fd() as u32;
    let program: [u64; 6] = [
        instruction(0x61, 2, 1, 16, 0), // r2 = *(u32 *)(r1 + 16)    xdp_md.rx_queue_index
        instruction(0x18, 1, 1, 0, map), // r1 = map (BPF_LD_IMM64, BPF_PSEUDO_MAP_FD)
        0,                              //      its upper half
        instruction(0xb7, 3, 0, 0, 2),  // r3 = XDP_PASS
        instruction(0x85, 0, 0, 0, 51), // call bpf_redirect_map
        instruction(0x95, 0, 0, 0, 0),  // exit
    ];
    let load = ProgLoad {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_count: program.len() as u32,
        insns: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        prog_flags: BPF_F_XDP_HAS_FRAGS,
        expected_attach_type: BPF_ATTACH_XDP,
        ..ProgLoad::default()
    };
    Ok(descriptor(bpf(BPF_PROG_LOAD, &load)?))
}

/// `struct bpf_insn`, little-endian.
const fn instruction(opcode: u8, to: u8, from: u8, offset: i16, immediate: u32) -> u64 {
    opcode as u64
        | (to as u64) << 8
        | (from as u64) << 12
        | (offset as u16 as u64) << 16
        | (immediate as u64) << 32
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
    // SAFETY: bpf(2) has just returned it, nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(number as i32) }
}
