//! The BPF link that holds a program on an interface.
//!
//! libbpf's `bpf_program__attach_xdp` cannot choose the mode, so this creates the link with `bpf_link_create`
//! and the `XDP_FLAGS_*_MODE` of `<linux/if_link.h>`. The kernel attaches a link only if there is no program
//! (`dev_xdp_attach` in net/core/dev.c), so even in a race a foreign one is not replaced.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use anyhow::{Context as _, ensure};
use libbpf_rs::query::{LinkInfo, LinkTypeInfo};
use libbpf_rs::{Link, Program, libbpf_sys};

use crate::capture::{checked, messages_of};
use crate::foreign::{AttachedAs, program_on};
use crate::mode::Mode;
use crate::netlink::as_int;

/// An attached program, detached on drop, and by the kernel when the process dies, unless it was pinned.
#[derive(Debug)]
pub(crate) struct Attached {
    /// Descriptor of the link; in [`Mode::Tap`], where there is no link, of the program.
    pub(crate) link: OwnedFd,
    /// The kernel's id of the program that was attached first.
    pub(crate) program: u32,
    /// Its link is pinned: it outlives this value.
    pub(crate) stays: bool,
    pub(crate) mode: Mode,
    pub(crate) fallback: Option<String>,
}

impl Attached {
    /// Detaches the program from the interface; does nothing if it is detached already.
    pub(crate) fn detach(&self) -> io::Result<()> {
        if self.mode == Mode::Tap {
            return Ok(());
        }
        // SAFETY: no memory is passed; the descriptor is open.
        let (result, _) = messages_of(|| unsafe { libbpf_sys::bpf_link_detach(self.link.as_raw_fd()) });
        checked(result)
    }

    /// Replaces the attached program by another one, between two frames.
    pub(crate) fn replace(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        let link = self.link.as_raw_fd();
        // SAFETY: both descriptors are open; null options are allowed.
        let update = || unsafe { libbpf_sys::bpf_link_update(link, program.as_raw_fd(), ptr::null()) };
        checked(messages_of(update).0)
    }

    /// Pins the link; from then on the program stays.
    pub(crate) fn pin(&mut self, path: &Path) -> io::Result<()> {
        pin(self.link.as_fd(), path)?;
        self.stays = true;
        Ok(())
    }

    /// Opens a program that was pinned without being attached ([`Mode::Tap`]). `ifindex`: the interface's
    /// index, 0 if it is gone.
    pub(crate) fn open_unattached(ifindex: u32, path: &Path) -> anyhow::Result<Self> {
        ensure!(ifindex != 0, gone(path, ifindex));
        let opened = messages_of(|| -> libbpf_rs::Result<_> {
            let program = Program::fd_from_pinned_path(path)?;
            Ok((Program::id_from_fd(program.as_fd())?, program))
        });
        let (id, link) = opened.0.with_context(|| cannot_open(path))?;
        Ok(Self {
            link,
            program: id,
            stays: true,
            mode: Mode::Tap,
            fallback: None,
        })
    }

    /// Opens a pinned link of a program that is on the interface now.
    pub(crate) fn open_pinned(ifindex: u32, path: &Path) -> anyhow::Result<Self> {
        let opened =
            messages_of(|| -> libbpf_rs::Result<_> { Ok(Link::open(path)?.as_fd().try_clone_to_owned()?) });
        let link = opened.0.with_context(|| cannot_open(path))?;
        let (info, _) = messages_of(|| LinkInfo::from_fd(link.as_fd()));
        let info = info.ok().with_context(|| gone(path, ifindex))?;
        // The link of an interface that is gone, or that has moved to another namespace, has none
        // (bpf_xdp_link_fill_link_info, net/core/dev.c).
        let is_there = matches!(&info.info, LinkTypeInfo::Xdp(xdp) if xdp.ifindex == ifindex);
        let on = program_on(ifindex).filter(|on| is_there && on.id == info.prog_id);
        Ok(Self {
            link,
            program: info.prog_id,
            stays: true,
            mode: match on.with_context(|| gone(path, ifindex))?.mode {
                AttachedAs::Mode(mode) => mode,
                AttachedAs::Hardware | AttachedAs::Several => Mode::Native,
            },
            fallback: None,
        })
    }
}

/// The text before the kernel's error: a pin cannot be created or opened.
pub(crate) fn cannot_open(path: &Path) -> String {
    format!("cannot pin or open {}", path.display())
}

fn gone(path: &Path, ifindex: u32) -> String {
    format!(
        "{} is not the link of the XDP program on interface {ifindex} (any more)",
        path.display()
    )
}

/// Pins a link or a map.
pub(crate) fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let c_path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is terminated and lives as long as the call; the descriptor is open.
    let (result, _) = messages_of(|| unsafe { libbpf_sys::bpf_obj_pin(object.as_raw_fd(), c_path.as_ptr()) });
    checked(result)
}

/// Detaches the link that is pinned at `path`, if there is one.
pub(crate) fn detach_pinned(path: &Path) -> io::Result<()> {
    let (result, _) = messages_of(|| Link::open(path)?.detach());
    match result {
        Err(error) if error.kind() == libbpf_rs::ErrorKind::NotFound => Ok(()),
        result => result.map_err(io::Error::other),
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        // Closing the descriptor is enough only once there is no copy, and a thread that forks has copies of
        // all descriptors for a moment. A failure does not matter: closing follows.
        let _ = self.detach();
    }
}

/// Attaches a program to a hook of an interface, without a link, until the interface is removed.
pub(crate) fn attach_without_link(
    program: BorrowedFd<'_>,
    ifindex: u32,
    place: libbpf_sys::bpf_attach_type,
) -> io::Result<()> {
    let target = as_int(ifindex)?;
    let (result, _) = messages_of(|| {
        // SAFETY: the program's descriptor is borrowed, hence open; null options are allowed.
        unsafe { libbpf_sys::bpf_prog_attach_opts(program.as_raw_fd(), target, place, ptr::null()) }
    });
    checked(result)
}

/// Creates a link from an interface to an XDP program.
pub(crate) fn create(program: BorrowedFd<'_>, ifindex: u32, mode: Mode) -> io::Result<OwnedFd> {
    create_at(program, ifindex, libbpf_sys::BPF_XDP, mode.flag())
}

/// Creates a link from a hook of an interface to a program of the kind for that hook.
pub(crate) fn create_at(
    program: BorrowedFd<'_>,
    ifindex: u32,
    place: libbpf_sys::bpf_attach_type,
    flags: u32,
) -> io::Result<OwnedFd> {
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags,
        ..Default::default()
    };
    let target = as_int(ifindex)?;
    let (fd, _) = messages_of(|| {
        // SAFETY: opts is valid for the call and contains its own size; the program's descriptor is borrowed,
        // hence open; for these hooks the "target descriptor" is an interface index.
        unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), target, place, &raw const opts) }
    });
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the call just returned this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
