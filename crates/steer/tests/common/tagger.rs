//! Frames whose VLAN tag is beside the frame, as from a VLAN device on a driver with `txvlan`: a program at the egress
//! of the interface, before all others, has the kernel put it there (`bpf_skb_vlan_push`).

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use libbpf_rs::libbpf_sys;
use testkit::{NetNs, PacketPort, VethPair};

use super::Pair;

/// Its frames are tagged, for as long as it lives.
pub(crate) struct TaggedPort {
    port: PacketPort,
    _link: OwnedFd,
}

impl TaggedPort {
    /// At the far end, with tags of that type, 0x8100 or 0x88a8, and number.
    pub(crate) fn open(pair: &Pair, kind: u16, vlan: u8) -> Self {
        Self::on((&pair.veth.far, VethPair::WIRE), kind, vlan)
    }

    /// The same at an interface.
    pub(crate) fn on((netns, interface): (&NetNs, &str), kind: u16, vlan: u8) -> Self {
        let [high, low] = kind.to_be_bytes();
        // struct bpf_insn, include/uapi/linux/bpf.h: code, registers (source, destination), offset, immediate.
        let code: [[u8; 8]; 7] = [
            [0x61, 0x12, 8, 0, 0, 0, 0, 0],          // r2 = __sk_buff.mark
            [0x15, 0x02, 3, 0, 0, 0, 0, 0],          // without a mark: the end
            [0xb7, 0x02, 0, 0, high, low, 0, 0],     // r2 = the type in network order
            [0xb7, 0x03, 0, 0, vlan, 0, 0, 0],       // r3 = the tag
            [0x85, 0, 0, 0, 18, 0, 0, 0],            // bpf_skb_vlan_push
            [0xb7, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], // r0 = TCX_NEXT
            [0x95, 0, 0, 0, 0, 0, 0, 0],             // the end
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
        let target = netns.index_of(interface).cast_signed();
        let place = libbpf_sys::BPF_TCX_EGRESS;
        let link = netns.enter(|| {
            let opts = libbpf_sys::bpf_link_create_opts {
                sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
                flags: libbpf_sys::BPF_F_BEFORE,
                ..Default::default()
            };
            // SAFETY: the options are live, and of the size that they say; for this place the target is an interface's
            // index.
            unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), target, place, &raw const opts) }
        });
        assert!(link >= 0, "bpf_link_create: {link}");
        let port = PacketPort::open(netns, interface);
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
