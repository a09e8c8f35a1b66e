//! BPF objects of somebody else's, for tests without a BPF toolchain: a map, the least programs there are, links.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use libbpf_rs::libbpf_sys as sys;
use rustix::io::FdFlags;

/// Before all others at a hook.
pub(crate) const BPF_F_BEFORE: u32 = 1 << 3;
// include/uapi/linux/if_link.h.
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// A map of this type from numbers below `places` to values of four bytes.
pub(crate) fn make_map(map_type: sys::bpf_map_type, places: u32) -> io::Result<OwnedFd> {
    // SAFETY: null names and options are allowed.
    descriptor(unsafe { sys::bpf_map_create(map_type, ptr::null(), 4, 4, places, ptr::null()) })
}

/// Puts a socket into a place of an XSKMAP.
pub(crate) fn put(map: &OwnedFd, place: u32, socket: impl AsFd) -> io::Result<()> {
    let value = socket.as_fd().as_raw_fd();
    let [key, value] = [(&raw const place).cast(), (&raw const value).cast()];
    // SAFETY: maps of this file have keys and values of four bytes, which these are.
    checked(unsafe { sys::bpf_map_update_elem(map.as_raw_fd(), key, value, 0) }).map(drop)
}

/// Pins an object under a path on a bpffs.
pub(crate) fn pin(object: &OwnedFd, path: &CStr) -> io::Result<()> {
    // SAFETY: the path ends with a zero byte.
    checked(unsafe { sys::bpf_obj_pin(object.as_raw_fd(), path.as_ptr()) }).map(drop)
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
    // SAFETY: the length is that of `types`; options may be null.
    let btf = unsafe { sys::bpf_btf_load(types.as_ptr().cast(), types.len() as u64, ptr::null_mut()) };
    let btf = descriptor(btf)?;
    load(&[&leave[..], &redirect(map, first)].concat(), false, Some(&btf))
}

fn redirect(map: &OwnedFd, first: u32) -> [u64; 7] {
    [
        instruction(0x61, 2, 1, 16, 0), // r2 = *(u32 *)(r1 + 16)    xdp_md.rx_queue_index
        instruction(0x07, 2, 0, 0, first), // r2 += first
        instruction(0x18, 1, 1, 0, map.as_raw_fd().cast_unsigned()), // r1 = map (BPF_LD_IMM64, BPF_PSEUDO_MAP_FD)
        0,                                                           //      its upper half
        instruction(0xb7, 3, 0, 0, 2),                               // r3 = XDP_PASS
        instruction(0x85, 0, 0, 0, 51),                              // call bpf_redirect_map
        instruction(0x95, 0, 0, 0, 0),                               // exit
    ]
}

fn load(program: &[u64], frags: bool, btf: Option<&OwnedFd>) -> io::Result<OwnedFd> {
    // struct bpf_func_info: the first instruction, and its function's type.
    let function = [0, FUNCTION_ID];
    let mut options = sys::bpf_prog_load_opts {
        sz: size_of::<sys::bpf_prog_load_opts>() as u64,
        prog_flags: if frags { sys::BPF_F_XDP_HAS_FRAGS } else { 0 },
        expected_attach_type: sys::BPF_XDP,
        ..Default::default()
    };
    if let Some(btf) = btf {
        options.prog_btf_fd = btf.as_raw_fd().cast_unsigned();
        options.func_info = function.as_ptr().cast::<c_void>();
        options.func_info_cnt = 1;
        options.func_info_rec_size = size_of_val(&function) as u32;
    }
    load_as(sys::BPF_PROG_TYPE_XDP, program, &mut options)
}

fn load_as(
    kind: sys::bpf_prog_type,
    program: &[u64],
    options: *mut sys::bpf_prog_load_opts,
) -> io::Result<OwnedFd> {
    let (code, count) = (program.as_ptr().cast(), program.len() as u64);
    // SAFETY: so many instructions of eight bytes, and options, or none, that live longer than the call.
    descriptor(unsafe { sys::bpf_prog_load(kind, ptr::null(), c"GPL".as_ptr(), code, count, options) })
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

/// Has the kernel put a tag of that type and number beside frames with the mark of a socket
/// (`bpf_skb_vlan_push(skb, kind, vlan)`).
pub(crate) fn load_tagger(kind: u16, vlan: u8) -> io::Result<OwnedFd> {
    let program: [u64; 7] = [
        instruction(0x61, 2, 1, 8, 0), // r2 = *(u32 *)(r1 + 8)    __sk_buff.mark
        instruction(0x15, 2, 0, 3, 0), // if !r2 goto r0
        instruction(0xb7, 2, 0, 0, kind.to_be().into()),
        instruction(0xb7, 3, 0, 0, vlan.into()),
        instruction(0x85, 0, 0, 0, 18),       // call bpf_skb_vlan_push
        instruction(0xb7, 0, 0, 0, u32::MAX), // r0 = TCX_NEXT
        instruction(0x95, 0, 0, 0, 0),        // exit
    ];
    load_as(sys::BPF_PROG_TYPE_SCHED_CLS, &program, ptr::null_mut())
}

/// `return verdict;` at an interface's ingress or egress.
pub(crate) fn load_tc_verdict(verdict: u32) -> io::Result<OwnedFd> {
    let program: [u64; 2] = [
        instruction(0xb7, 0, 0, 0, verdict), // r0 = verdict
        instruction(0x95, 0, 0, 0, 0),       // exit
    ];
    load_as(sys::BPF_PROG_TYPE_SCHED_CLS, &program, ptr::null_mut())
}

/// Detaches all programs there that a link holds; how many there were.
pub(crate) fn detach_tcx(ifindex: u32, place: sys::bpf_attach_type) -> io::Result<usize> {
    let (mut programs, mut links) = ([0u32; 64], [0u32; 64]);
    let mut query = sys::bpf_prog_query_opts {
        sz: size_of::<sys::bpf_prog_query_opts>() as u64,
        prog_ids: programs.as_mut_ptr(),
        link_ids: links.as_mut_ptr(),
        ..Default::default()
    };
    query.__bindgen_anon_1.count = 64;
    // SAFETY: the kernel reads and writes the options, and arrays of the length that they state.
    checked(unsafe { sys::bpf_prog_query_opts(ifindex.cast_signed(), place, &raw mut query) })?;
    let held: Vec<u32> = links.into_iter().filter(|&link| link != 0).collect();
    for &link in &held {
        // SAFETY: a number.
        let link = descriptor(unsafe { sys::bpf_link_get_fd_by_id(link) })?;
        // SAFETY: a descriptor that is open.
        checked(unsafe { sys::bpf_link_detach(link.as_raw_fd()) })?;
    }
    Ok(held.len())
}

/// Attaches a program to an interface, natively or in skb mode, for as long as the link is open.
pub(crate) fn attach(program: &OwnedFd, ifindex: u32, native: bool) -> io::Result<OwnedFd> {
    let mode = if native {
        XDP_FLAGS_DRV_MODE
    } else {
        XDP_FLAGS_SKB_MODE
    };
    link(program, ifindex, sys::BPF_XDP, mode)
}

/// Attaches a program at a hook of an interface for as long as the link is open. `flags` at a tcx hook:
/// [`BPF_F_BEFORE`]: before all others there; 0: behind them.
pub(crate) fn link(
    program: &OwnedFd,
    ifindex: u32,
    place: sys::bpf_attach_type,
    flags: u32,
) -> io::Result<OwnedFd> {
    let options = sys::bpf_link_create_opts {
        sz: size_of::<sys::bpf_link_create_opts>() as u64,
        flags,
        ..Default::default()
    };
    let (program, target) = (program.as_raw_fd(), ifindex.cast_signed());
    // SAFETY: the options live longer than the call.
    descriptor(unsafe { sys::bpf_link_create(program, target, place, &raw const options) })
}

/// `struct bpf_insn`, little-endian.
fn instruction(opcode: u8, to: u8, from: u8, offset: i16, immediate: u32) -> u64 {
    u64::from(opcode)
        | u64::from(to) << 8
        | u64::from(from) << 12
        | u64::from(offset.cast_unsigned()) << 16
        | u64::from(immediate) << 32
}

/// libbpf returns negative errors.
fn checked(result: c_int) -> io::Result<c_int> {
    match result {
        0.. => Ok(result),
        error => Err(io::Error::from_raw_os_error(-error)),
    }
}

/// The descriptor of a new object, closed on exec.
fn descriptor(result: c_int) -> io::Result<OwnedFd> {
    let number = checked(result)?;
    // SAFETY: the kernel has just created the descriptor, so no other object owns it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
    Ok(descriptor)
}
