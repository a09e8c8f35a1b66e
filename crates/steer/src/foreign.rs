//! A program that is already attached to an interface, and how to remove it.
//!
//! A program on a BPF link is removed with its link and cannot be removed by `ip link set … off`; one without a link is
//! removed only by that. Reading the link's number needs CAP_SYS_ADMIN. Whether there is a link can be found with the
//! privilege to attach: the kernel reports it when it rejects another program (`dev_xdp_attach`, net/core/dev.c).
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use derive_more::Display;
use libbpf_rs::query::{LinkInfoIter, LinkTypeInfo};
use libbpf_rs::{Program, libbpf_sys};

use crate::capture::{checked, messages_of};
use crate::mode::Mode;
use crate::netlink::{as_int, refusal_of};

/// What keeps a program on its interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// The BPF link of this number.
    Link(u32),
    /// A BPF link whose number only CAP_SYS_ADMIN may read.
    SomeLink,
    /// The interface itself.
    Interface,
    /// This process has no privilege for the query.
    Unknown,
}

/// A foreign program that is attached instead of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignProgram {
    /// The kernel's id of the program, as in `bpftool prog show id`.
    pub id: u32,
    /// Its name, if it was queried, is readable and exists.
    pub name: Option<String>,
    /// How it is attached.
    pub mode: AttachedAs,
}

/// How an existing program is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
pub enum AttachedAs {
    /// In a mode that our program has, too.
    Mode(Mode),
    /// In the NIC itself.
    #[display("hardware")]
    Hardware,
    /// Programs in several modes.
    #[display("several")]
    Several,
}

impl ForeignProgram {
    /// What keeps it on its interface. Do not call it repeatedly: if links may not be listed, it loads a
    /// program and tries to attach it.
    #[must_use]
    pub fn held(&self, ifindex: u32) -> Held {
        if let Some(link) = link_of(self.id, ifindex) {
            return Held::Link(link);
        }
        let AttachedAs::Mode(mode) = self.mode else {
            return Held::Unknown;
        };
        let said = pass_all().and_then(|program| refusal_of(program.as_fd(), ifindex, mode));
        match said.as_deref() {
            Some(said) if said.contains("BPF XDP link") => Held::SomeLink,
            Some(said) if said.contains("already attached") => Held::Interface,
            _ => Held::Unknown,
        }
    }

    /// How to remove it, in words that follow "which is not replaced:".
    pub(crate) fn remedy(&self, held: Held, interface: &str) -> String {
        let kind = match self.mode {
            AttachedAs::Mode(Mode::Native) => "xdpdrv",
            AttachedAs::Mode(Mode::Skb) => "xdpgeneric",
            AttachedAs::Hardware => "xdpoffload",
            AttachedAs::Several | AttachedAs::Mode(Mode::Tap) => "xdp",
        };
        // Our own programs are attached by links.
        let shared = "(daemons share an interface by vhost-af-xdp-steward, guests as ports of one daemon)";
        // libxdp pins its programs: without the link's holder they stay.
        if self.name.as_deref() == Some("xdp_dispatcher") {
            return format!("`xdp-loader unload {interface} --all` takes it off, with its pins");
        }
        match held {
            Held::Link(link) => format!("end its holder {shared}, or `bpftool link detach id {link}`"),
            Held::SomeLink => format!("end its holder {shared}"),
            Held::Interface => format!("`ip link set dev {interface} {kind} off` takes it off"),
            Held::Unknown => "end its holder".to_owned(),
        }
    }
}

impl fmt::Display for ForeignProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "id {}", self.id)?;
        if let Some(name) = &self.name {
            write!(f, ", name {name:?}")?;
        }
        write!(f, ", {} mode", self.mode)
    }
}

/// The XDP program of an interface, ours or not; `None` also if the query fails: attaching will show the
/// error. Only a query: it tries to attach nothing.
#[must_use]
pub fn program_on(ifindex: u32) -> Option<ForeignProgram> {
    let program = unnamed_program_on(ifindex).ok().flatten()?;
    let name = program_name(program.id);
    Some(ForeignProgram { name, ..program })
}

/// Whether the program with this id is certainly not on the interface. False if the query fails, for example
/// for lack of a descriptor.
#[must_use]
pub fn is_detached(ifindex: u32, id: u32) -> bool {
    unnamed_program_on(ifindex).is_ok_and(|on| on.is_none_or(|on| on.id != id))
}

/// The XDP program of an interface without its name, which would need bpf(2): netlink is enough for the rest.
/// It waits for the kernel's RTNL lock.
///
/// # Errors
/// The query failed, for example for lack of a descriptor.
pub fn unnamed_program_on(ifindex: u32) -> io::Result<Option<ForeignProgram>> {
    let mut opts = libbpf_sys::bpf_xdp_query_opts {
        sz: size_of::<libbpf_sys::bpf_xdp_query_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    let target = as_int(ifindex)?;
    let (result, _) = messages_of(|| {
        // SAFETY: opts is valid for the call and contains its own size.
        unsafe { libbpf_sys::bpf_xdp_query(target, 0, &raw mut opts) }
    });
    checked(result)?;
    let (id, mode) = match u32::from(opts.attach_mode) {
        libbpf_sys::XDP_ATTACHED_NONE => return Ok(None),
        libbpf_sys::XDP_ATTACHED_DRV => (opts.drv_prog_id, AttachedAs::Mode(Mode::Native)),
        libbpf_sys::XDP_ATTACHED_SKB => (opts.skb_prog_id, AttachedAs::Mode(Mode::Skb)),
        libbpf_sys::XDP_ATTACHED_HW => (opts.hw_prog_id, AttachedAs::Hardware),
        _ => {
            let ids = [opts.drv_prog_id, opts.skb_prog_id, opts.hw_prog_id];
            (
                ids.into_iter().find(|id| *id != 0).unwrap_or(0),
                AttachedAs::Several,
            )
        }
    };
    let id = if id == 0 { opts.prog_id } else { id };
    Ok(Some(ForeignProgram { id, name: None, mode }))
}

fn program_name(id: u32) -> Option<String> {
    let (fd, _) = messages_of(|| Program::fd_from_id(id));
    let fd = fd.ok()?;
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut len = size_of::<libbpf_sys::bpf_prog_info>() as u32;
    // SAFETY: info is zeroed, so it has no buffers to fill, and len is its size.
    let result = unsafe { libbpf_sys::bpf_prog_get_info_by_fd(fd.as_raw_fd(), &raw mut info, &raw mut len) };
    if result != 0 {
        return None;
    }
    let bytes: Vec<u8> = info.name.iter().map(|c| c.cast_unsigned()).collect();
    let name = CStr::from_bytes_until_nul(&bytes)
        .ok()?
        .to_string_lossy()
        .into_owned();
    (!name.is_empty()).then_some(name)
}

/// The link that holds program `id` on the interface; `None` also without `CAP_SYS_ADMIN`.
fn link_of(id: u32, ifindex: u32) -> Option<u32> {
    let (found, _) = messages_of(|| {
        LinkInfoIter::default().find(|link| match &link.info {
            LinkTypeInfo::Xdp(xdp) => link.prog_id == id && xdp.ifindex == ifindex,
            _ => false,
        })
    });
    found.map(|link| link.id)
}

/// A program that passes everything: `r0 = XDP_PASS; exit`. Attaching it is tried, and rejected.
fn pass_all() -> Option<OwnedFd> {
    // struct bpf_insn, include/uapi/linux/bpf.h: code, registers, offset (16 bits), immediate (32 bits).
    let [a, b, c, d] = libbpf_sys::XDP_PASS.to_ne_bytes();
    let code: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, a, b, c, d], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    let (fd, _) = messages_of(|| {
        // SAFETY: two instructions of 8 bytes each, which the kernel reads, whatever their alignment; both names are
        // terminated; null options are allowed.
        unsafe {
            libbpf_sys::bpf_prog_load(
                libbpf_sys::BPF_PROG_TYPE_XDP,
                c"pass".as_ptr(),
                c"GPL".as_ptr(),
                code.as_ptr().cast(),
                code.len() as libbpf_sys::size_t,
                ptr::null_mut(),
            )
        }
    });
    if fd < 0 {
        return None;
    }
    // SAFETY: the call just returned this descriptor, and nobody else has it.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}
