//! Bare bpf(2) calls, for tests that need an XDP program and no BPF toolchain: a map, the least program there is, a
//! link.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_long};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::io::FdFlags;

// enum bpf_cmd, bpf_map_type, bpf_prog_type and bpf_attach_type, include/uapi/linux/bpf.h.
const BPF_MAP_CREATE: u32 = 0;
const BPF_MAP_UPDATE_ELEM: u32 = 2;
const BPF_PROG_LOAD: u32 = 5;
const BPF_OBJ_PIN: u32 = 6;
const BPF_BTF_LOAD: u32 = 18;
const BPF_PROG_QUERY: u32 = 16;
const BPF_LINK_CREATE: u32 = 28;
const BPF_LINK_GET_FD_BY_ID: u32 = 30;
const BPF_LINK_DETACH: u32 = 34;
pub(crate) const BPF_MAP_TYPE_ARRAY: u32 = 2;
pub(crate) const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_ATTACH_XDP: u32 = 37;
pub(crate) const BPF_TCX_INGRESS: u32 = 46;
pub(crate) const BPF_TCX_EGRESS: u32 = 47;
const BPF_F_XDP_HAS_FRAGS: u32 = 1 << 5;
// include/uapi/linux/if_link.h.
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

// The members of union bpf_attr, as far as they are used here.

#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

#[repr(C)]
struct MapUpdate {
    map: u32,
    padding: u32,
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
    btf: u32,
    function_bytes: u32,
    functions: u64,
    function_count: u32,
    line_bytes: u32,
}

#[repr(C)]
struct BtfLoad {
    btf: u64,
    log: u64,
    btf_bytes: u32,
    log_bytes: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

#[derive(Default)]
#[repr(C)]
struct ProgQuery {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    program_ids: u64,
    count: u32,
    padding: u32,
    program_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

#[repr(C)]
struct ObjPin {
    path: u64,
    object: u32,
    flags: u32,
}

/// A map of this type from numbers below `places` to values of four bytes.
pub(crate) fn make_map(map_type: u32, places: u32) -> io::Result<OwnedFd> {
    let create = MapCreate {
        map_type,
        key_size: 4,
        value_size: 4,
        max_entries: places,
    };
    bpf(BPF_MAP_CREATE, &create).map(descriptor)
}

/// Puts a socket into a place of an XSKMAP.
pub(crate) fn put(map: &OwnedFd, place: u32, socket: impl AsFd) -> io::Result<()> {
    let value = socket.as_fd().as_raw_fd();
    let update = MapUpdate {
        map: number(map),
        padding: 0,
        key: &raw const place as u64,
        value: &raw const value as u64,
        flags: 0,
    };
    bpf(BPF_MAP_UPDATE_ELEM, &update).map(drop)
}

/// Pins an object under a path on a bpffs.
pub(crate) fn pin(object: &OwnedFd, path: &CStr) -> io::Result<()> {
    let pin = ObjPin {
        path: path.as_ptr() as u64,
        object: number(object),
        flags: 0,
    };
    bpf(BPF_OBJ_PIN, &pin).map(drop)
}

/// `return bpf_redirect_map(&map, ctx->rx_queue_index + first, XDP_PASS);`, with or without support for frames in
/// several buffers.
pub(crate) fn load_redirect(map: &OwnedFd, first: u32, frags: bool) -> io::Result<OwnedFd> {
    load(&redirect(map, first), frags, None)
}

/// `return verdict;`, or `return bpf_redirect(to, 0);` with the index of an interface.
pub(crate) fn load_verdict(verdict: u32, to: Option<u32>) -> io::Result<OwnedFd> {
    let say = [
        instruction(0xb7, 0, 0, 0, verdict), // r0 = verdict
        instruction(0x95, 0, 0, 0, 0),       // exit
    ];
    let redirect = |to| {
        [
            instruction(0xb7, 1, 0, 0, to), // r1 = to
            instruction(0xb7, 2, 0, 0, 0),  // r2 = 0
            instruction(0x85, 0, 0, 0, 23), // call bpf_redirect
            instruction(0x95, 0, 0, 0, 0),  // exit
        ]
    };
    match to {
        Some(to) => load(&redirect(to), false, None),
        None => load(&say, false, None),
    }
}

/// The program of [`load_redirect`], which puts a [`STRUCTURE`] with this mark before each frame, as its types tell.
pub(crate) fn load_marking(map: &OwnedFd, first: u32, mark: u32) -> io::Result<OwnedFd> {
    let leave = [
        instruction(0xbf, 6, 1, 0, 0),                    // r6 = r1
        instruction(0xb7, 2, 0, 0, 12u32.wrapping_neg()), // r2 = -12
        instruction(0x85, 0, 0, 0, 54),                   // call bpf_xdp_adjust_meta
        instruction(0x55, 0, 0, 8, 0),                    // if r0 != 0 goto redirect
        instruction(0x61, 2, 6, 8, 0),                    // r2 = *(u32 *)(r6 + 8)     xdp_md.data_meta
        instruction(0x61, 3, 6, 0, 0),                    // r3 = *(u32 *)(r6 + 0)     xdp_md.data
        instruction(0xbf, 4, 2, 0, 0),                    // r4 = r2
        instruction(0x07, 4, 0, 0, 12),                   // r4 += 12
        instruction(0x2d, 4, 3, 3, 0),                    // if r4 > r3 goto redirect
        instruction(0x62, 2, 0, 0, 0),                    // *(u32 *)(r2 + 0) = 0      rx_hash
        instruction(0x62, 2, 0, 4, mark),                 // *(u32 *)(r2 + 4) = mark   flow_mark
        instruction(0x62, 2, 0, 8, STRUCTURE_ID),         // *(u32 *)(r2 + 8) = id     btf_id
        instruction(0xbf, 1, 6, 0, 0),                    // redirect: r1 = r6
    ];
    let types = types();
    let btf = BtfLoad {
        btf: types.as_ptr() as u64,
        log: 0,
        btf_bytes: types.len() as u32,
        log_bytes: 0,
    };
    let btf = bpf(BPF_BTF_LOAD, &btf).map(descriptor)?;
    load(&[&leave[..], &redirect(map, first)].concat(), false, Some(&btf))
}

fn redirect(map: &OwnedFd, first: u32) -> [u64; 7] {
    [
        instruction(0x61, 2, 1, 16, 0), // r2 = *(u32 *)(r1 + 16)    xdp_md.rx_queue_index
        instruction(0x07, 2, 0, 0, first), // r2 += first
        instruction(0x18, 1, 1, 0, number(map)), // r1 = map (BPF_LD_IMM64, BPF_PSEUDO_MAP_FD)
        0,                              //      its upper half
        instruction(0xb7, 3, 0, 0, 2),  // r3 = XDP_PASS
        instruction(0x85, 0, 0, 0, 51), // call bpf_redirect_map
        instruction(0x95, 0, 0, 0, 0),  // exit
    ]
}

fn load(program: &[u64], frags: bool, btf: Option<&OwnedFd>) -> io::Result<OwnedFd> {
    // struct bpf_func_info: the first instruction, and its function's type.
    let function = [0, FUNCTION_ID];
    let load = ProgLoad {
        prog_type: BPF_PROG_TYPE_XDP,
        insn_count: program.len() as u32,
        insns: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        prog_flags: if frags { BPF_F_XDP_HAS_FRAGS } else { 0 },
        expected_attach_type: BPF_ATTACH_XDP,
        btf: btf.map_or(0, number),
        function_bytes: size_of_val(&function) as u32,
        functions: function.as_ptr() as u64,
        function_count: btf.is_some().into(),
        ..ProgLoad::default()
    };
    bpf(BPF_PROG_LOAD, &load).map(descriptor)
}

/// What [`load_marking`] leaves before frames.
pub(crate) const STRUCTURE: &str = "frame_hints";
const FUNCTION_ID: u32 = 3;
const STRUCTURE_ID: u32 = 4;

/// The types of [`load_marking`]'s program (Documentation/bpf/btf.rst): `unsigned int`, `unsigned int (void)`, a
/// function of that type, and the structure.
fn types() -> Vec<u8> {
    let mut names = vec![0];
    let mut name = |text: &str| {
        let at = names.len() as u32;
        names.extend(text.bytes().chain([0]));
        at
    };
    let types = [
        [name("unsigned int"), 1 << 24, 4, 32].to_vec(),
        [0, 13 << 24, 1].to_vec(),
        [name("leave"), 12 << 24, 2].to_vec(),
        [name(STRUCTURE), 4 << 24 | 3, 12].to_vec(),
        [name("rx_hash"), 1, 0].to_vec(),
        [name("flow_mark"), 1, 32].to_vec(),
        [name("btf_id"), 1, 64].to_vec(),
    ];
    let types: Vec<u8> = types.concat().into_iter().flat_map(u32::to_le_bytes).collect();
    let head = [
        0x0001_eb9f,
        24,
        0,
        types.len() as u32,
        types.len() as u32,
        names.len() as u32,
    ];
    let head = head.into_iter().flat_map(u32::to_le_bytes);
    head.chain(types).chain(names).collect()
}

/// `return verdict;` at an interface's ingress or egress.
pub(crate) fn load_tc_verdict(verdict: u32) -> io::Result<OwnedFd> {
    let program: [u64; 2] = [
        instruction(0xb7, 0, 0, 0, verdict), // r0 = verdict
        instruction(0x95, 0, 0, 0, 0),       // exit
    ];
    let load = ProgLoad {
        prog_type: BPF_PROG_TYPE_SCHED_CLS,
        insn_count: program.len() as u32,
        insns: program.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        ..ProgLoad::default()
    };
    bpf(BPF_PROG_LOAD, &load).map(descriptor)
}

/// Attaches a program at the ingress or egress of an interface, behind all others there, for as long as the link is open.
pub(crate) fn attach_tcx(program: &OwnedFd, ifindex: u32, place: u32) -> io::Result<OwnedFd> {
    let create = LinkCreate {
        program: number(program),
        target_ifindex: ifindex,
        attach_type: place,
        flags: 0,
    };
    bpf(BPF_LINK_CREATE, &create).map(descriptor)
}

/// Detaches all programs there that a link holds; how many there were.
pub(crate) fn detach_tcx(ifindex: u32, place: u32) -> io::Result<usize> {
    let (mut programs, mut links) = ([0u32; 64], [0u32; 64]);
    let mut query = ProgQuery {
        target_ifindex: ifindex,
        attach_type: place,
        program_ids: programs.as_mut_ptr() as u64,
        count: 64,
        link_ids: links.as_mut_ptr() as u64,
        ..ProgQuery::default()
    };
    // SAFETY: the kernel reads and writes a live union member, and arrays of the length that it states.
    let asked = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_QUERY,
            &raw mut query,
            size_of::<ProgQuery>(),
        )
    };
    if asked < 0 {
        return Err(io::Error::last_os_error());
    }
    let held: Vec<u32> = links.into_iter().filter(|&link| link != 0).collect();
    for link in &held {
        let link = bpf(BPF_LINK_GET_FD_BY_ID, link).map(descriptor)?;
        bpf(BPF_LINK_DETACH, &number(&link))?;
    }
    Ok(held.len())
}

/// Attaches a program to an interface, natively or in skb mode, for as long as the link is open.
pub(crate) fn attach(program: &OwnedFd, ifindex: u32, native: bool) -> io::Result<OwnedFd> {
    let create = LinkCreate {
        program: number(program),
        target_ifindex: ifindex,
        attach_type: BPF_ATTACH_XDP,
        flags: if native {
            XDP_FLAGS_DRV_MODE
        } else {
            XDP_FLAGS_SKB_MODE
        },
    };
    bpf(BPF_LINK_CREATE, &create).map(descriptor)
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

/// What bpf(2) has just returned for a new object; not inherited by programs that are started.
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
