//! Frames of the far end whose VLAN tag is beside the frame, as from a VLAN device on a driver with `txvlan`: a program
//! at the egress of the interface has the kernel put it there (`bpf_skb_vlan_push`).

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use libbpf_rs::libbpf_sys;
use testkit::{PacketPort, VethPair};

use super::Pair;

/// Its frames are tagged, for as long as it lives.
pub(crate) struct TaggedPort {
    port: PacketPort,
    _link: OwnedFd,
}

impl TaggedPort {
    /// 802.1Q, with this number.
    pub(crate) fn open(pair: &Pair, vlan: u8) -> Self {
        // struct bpf_insn, include/uapi/linux/bpf.h: code, registers (source, destination), offset, immediate.
        let code: [[u8; 8]; 7] = [
            [0x61, 0x12, 8, 0, 0, 0, 0, 0],          // r2 = __sk_buff.mark
            [0xb7, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], // r0 = TCX_NEXT
            [0x15, 0x02, 3, 0, 0, 0, 0, 0],          // without a mark: the end
            [0xb7, 0x02, 0, 0, 0x81, 0, 0, 0],       // r2 = 0x8100 in network order
            [0xb7, 0x03, 0, 0, vlan, 0, 0, 0],       // r3 = the tag
            [0x85, 0, 0, 0, 18, 0, 0, 0],            // bpf_skb_vlan_push
            [0x95, 0, 0, 0, 0, 0, 0, 0],             // the end; 0 is TCX_PASS
        ];
        // SAFETY: so many instructions of eight bytes, a C string each for name and licence; null options are allowed.
        let program = unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
                c"tags".as_ptr(),
                c"GPL".as_ptr(),
                code.as_ptr().cast(),
                code.len() as libbpf_sys::size_t,
                ptr::null_mut(),
            )
        };
        assert!(program >= 0, "bpf_prog_load: {program}");
        // SAFETY: the call just returned this descriptor, and nobody else has it.
        let program = unsafe { OwnedFd::from_raw_fd(program) };
        let far = &pair.veth.far;
        let wire = far.index_of(VethPair::WIRE).cast_signed();
        let place = libbpf_sys::BPF_TCX_EGRESS;
        // SAFETY: null options are allowed; for this place the target is an interface's index.
        let link = far
            .enter(|| unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), wire, place, ptr::null()) });
        assert!(link >= 0, "bpf_link_create: {link}");
        let port = PacketPort::open(far, VethPair::WIRE);
        let mark = 1u32;
        // SAFETY: the kernel reads four bytes of a live value.
        let marked = unsafe {
            libc::setsockopt(
                port.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MARK,
                (&raw const mark).cast(),
                4,
            )
        };
        assert_eq!(marked, 0, "SO_MARK");
        Self {
            port,
            // SAFETY: as above.
            _link: unsafe { OwnedFd::from_raw_fd(link) },
        }
    }

    pub(crate) fn port(&self) -> &PacketPort {
        &self.port
    }
}
