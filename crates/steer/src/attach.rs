//! Attaching a loaded XDP program to an interface by a BPF link, in a chosen mode, and saying why it failed.
//!
//! libbpf's `bpf_program__attach_xdp` cannot choose the mode, so this makes the link with `bpf_link_create` and the
//! `XDP_FLAGS_*_MODE` of `<linux/if_link.h>`. The kernel attaches a link only where no program is
//! (`dev_xdp_attach` in net/core/dev.c): one of somebody else's is safe even against a race; asking
//! beforehand is for the better message.
//!
//! `bpf_link_create` returns an errno and keeps the kernel's explanation to itself (a tracepoint has it), while the
//! netlink way of attaching returns it. So after a refusal the same is asked by netlink, for the text only.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr;

use libbpf_rs::libbpf_sys;
use libbpf_rs::query::{LinkInfo, LinkTypeInfo};

use crate::capture::{kernel_message, messages_of};
use crate::foreign::{ForeignProgram, Held, program_on};

/// Which attachment is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ModeRequest {
    /// Native, and skb where the driver refuses native; the reason is kept.
    #[default]
    Auto,
    /// In the driver, or not at all.
    Native,
    /// In the host's stack after the driver (generic XDP): works with every driver, slower.
    Skb,
}

/// Which attachment is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// In the driver.
    Native,
    /// Generic XDP, after the driver.
    Skb,
}

impl Mode {
    fn flag(self) -> u32 {
        match self {
            Self::Native => libbpf_sys::XDP_FLAGS_DRV_MODE,
            Self::Skb => libbpf_sys::XDP_FLAGS_SKB_MODE,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Skb => "skb",
        })
    }
}

/// The kernel's answer to a refused attachment.
#[derive(Debug)]
pub struct KernelRefusal {
    /// The errno of `BPF_LINK_CREATE`.
    pub errno: io::Error,
    /// The kernel's own words, where it had any.
    pub message: Option<String>,
}

impl fmt::Display for KernelRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.message {
            Some(message) => write!(f, "{message}: {}", self.errno),
            None => self.errno.fmt(f),
        }
    }
}

impl std::error::Error for KernelRefusal {}

/// Why a program is not attached. The interface is as it was.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The index names no interface in this network namespace.
    #[error("no interface has index {ifindex}; `ip link` lists them")]
    NoSuchInterface {
        /// As given.
        ifindex: u32,
    },
    /// The kernel refused the program or its maps.
    #[error("cannot load the XDP program{}", hint_of(.source, .detail))]
    Load {
        /// libbpf's messages, the verifier's log among them; may be empty.
        detail: String,
        /// What libbpf returned.
        #[source]
        source: libbpf_rs::Error,
    },
    /// A program that is not this one is attached, and stays so.
    #[error("{interface} already has an XDP program ({program}), which is not replaced: {}",
        .program.remedy(*.held, .interface))]
    Foreign {
        /// Name of the interface.
        interface: String,
        /// What is there.
        program: ForeignProgram,
        /// What keeps it there.
        held: Held,
    },
    /// Frames of this MTU do not fit the buffers of an XDP program of this kind.
    #[error("the MTU of {interface} ({mtu}) or of its peer is too large for XDP in {mode} mode{}: lower it{}",
        if *.frags { "" } else { " without multi-buffer frames" },
        match .mode {
            Mode::Native => ", or use skb mode (--mode skb)",
            Mode::Skb => "",
        })]
    MtuTooLarge {
        /// Name of the interface.
        interface: String,
        /// Its MTU in bytes.
        mtu: u32,
        /// The mode that was tried.
        mode: Mode,
        /// Whether the program takes frames in several buffers.
        frags: bool,
        /// The kernel's answer.
        #[source]
        source: KernelRefusal,
    },
    /// Attaching needs privileges that this process lacks.
    #[error("may not attach an XDP program to {interface}: run as root, or with CAP_BPF and CAP_NET_ADMIN")]
    NotPermitted {
        /// Name of the interface.
        interface: String,
        /// The kernel's answer.
        #[source]
        source: KernelRefusal,
    },
    /// The kernel or the driver refused for another reason.
    #[error("{interface} refuses an XDP program in {mode} mode{}", match .mode {
        Mode::Native => "; the driver may lack XDP: try skb mode (--mode skb)",
        Mode::Skb => "",
    })]
    Refused {
        /// Name of the interface.
        interface: String,
        /// The mode that was tried.
        mode: Mode,
        /// The kernel's answer.
        #[source]
        source: KernelRefusal,
    },
    /// Neither mode was possible.
    #[error("neither mode is possible: native: {native}; skb")]
    Neither {
        /// Why native was refused, in full.
        native: String,
        /// Why skb was refused.
        #[source]
        skb: Box<AttachError>,
    },
    /// A map of the loaded program could not be prepared.
    #[error("cannot map the program's configuration")]
    Config(#[source] io::Error),
}

fn hint_of(source: &libbpf_rs::Error, detail: &str) -> String {
    if source.kind() == libbpf_rs::ErrorKind::PermissionDenied && !detail.contains("PROG LOAD LOG") {
        return ": run as root, or with CAP_BPF and CAP_NET_ADMIN".to_owned();
    }
    // The verifier's complaint stands before its summary.
    let lines: Vec<&str> = detail.lines().filter(|line| !line.trim().is_empty()).collect();
    let summary = lines.iter().position(|line| line.starts_with("processed "));
    match lines[..summary.unwrap_or(lines.len())].last() {
        Some(last) => format!(" (libbpf: {})", last.trim().trim_start_matches("libbpf: ")),
        None => String::new(),
    }
}

impl AttachError {
    /// Whether the other mode might work where this one did not.
    fn is_worth_a_fallback(&self) -> bool {
        matches!(self, Self::MtuTooLarge { .. } | Self::Refused { .. })
    }

    /// The error and its sources in one line.
    fn in_full(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            text.push_str(": ");
            text.push_str(&error.to_string());
            source = error.source();
        }
        text
    }
}

/// Why a program that was pinned cannot be taken over, or could not be pinned.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// The kernel refused.
    #[error("cannot pin or open {}", .path.display())]
    Pin {
        /// The pin.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The link is no longer, or never was, one of an XDP program on that interface.
    #[error("{} is not the link of the XDP program on interface {ifindex} (any more)", .path.display())]
    Gone {
        /// The pin.
        path: PathBuf,
        /// As given.
        ifindex: u32,
    },
    /// A map of another shape: of another version of the program.
    #[error("{} is not a map of this version of the XDP program", .path.display())]
    Other {
        /// The pin.
        path: PathBuf,
    },
}

/// An attached program, detached on drop, and by the kernel when the process dies, unless it was pinned.
#[derive(Debug)]
pub(crate) struct Attached {
    link: OwnedFd,
    /// The kernel's id of the program.
    pub(crate) program: u32,
    /// Its link is pinned: it outlives this value.
    stays: bool,
    pub(crate) mode: Mode,
    pub(crate) fallback: Option<String>,
}

impl Attached {
    /// Takes the program off the interface; nothing happens if it is off already.
    pub(crate) fn detach(&self) -> io::Result<()> {
        // SAFETY: no memory is passed; the descriptor is open.
        let (result, _) = messages_of(|| unsafe { libbpf_sys::bpf_link_detach(self.link.as_raw_fd()) });
        match result {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(-code)),
        }
    }

    /// Pins the link; from then on the program stays.
    pub(crate) fn pin(&mut self, path: &Path) -> io::Result<()> {
        let c_path = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: the path is terminated and lives as long as the call; the descriptor is open.
        let (result, _) =
            messages_of(|| unsafe { libbpf_sys::bpf_obj_pin(self.link.as_raw_fd(), c_path.as_ptr()) });
        if result != 0 {
            return Err(io::Error::from_raw_os_error(-result));
        }
        self.stays = true;
        Ok(())
    }

    /// Opens a link that was pinned, of a program that is on the interface now.
    pub(crate) fn open_pinned(ifindex: u32, path: &Path) -> Result<Self, PinError> {
        let link = open_pin(path).map_err(|source| PinError::Pin {
            path: path.to_owned(),
            source,
        })?;
        let gone = || PinError::Gone {
            path: path.to_owned(),
            ifindex,
        };
        let (info, _) = messages_of(|| LinkInfo::from_fd(link.as_fd()));
        let info = info.map_err(|_| gone())?;
        // The link of an interface that is gone, or that has moved to another namespace, has none
        // (bpf_xdp_link_fill_link_info, net/core/dev.c).
        let is_there = matches!(&info.info, LinkTypeInfo::Xdp(xdp) if xdp.ifindex == ifindex);
        let on = program_on(ifindex).filter(|on| is_there && on.id == info.prog_id);
        Ok(Self {
            link,
            program: info.prog_id,
            stays: true,
            mode: match on.ok_or_else(gone)?.mode {
                "skb" => Mode::Skb,
                _ => Mode::Native,
            },
            fallback: None,
        })
    }
}

/// Detaches the link that is pinned at `path`, if there is one.
pub(crate) fn detach_pinned(path: &Path) -> io::Result<()> {
    let link = match open_pin(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        result => result?,
    };
    // SAFETY: no memory is passed; the descriptor is open.
    let (result, _) = messages_of(|| unsafe { libbpf_sys::bpf_link_detach(link.as_raw_fd()) });
    match result {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}

fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let c_path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path is terminated and lives as long as the call.
    let (fd, _) = messages_of(|| unsafe { libbpf_sys::bpf_obj_get(c_path.as_ptr()) });
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the call just returned this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

impl Drop for Attached {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        // Closing the descriptor would do, but only once no copy is left, and a thread that forks holds copies of
        // all descriptors for a moment. A failure is no matter: closing follows.
        let _ = self.detach();
    }
}

/// Where a program goes, and what kind it is.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) ifindex: u32,
    pub(crate) interface: String,
    pub(crate) frags: bool,
}

impl Target {
    /// Looks the interface up, and refuses one that has a program.
    pub(crate) fn check(ifindex: u32, frags: bool) -> Result<Self, AttachError> {
        let interface = interface_name(ifindex).ok_or(AttachError::NoSuchInterface { ifindex })?;
        let target = Self {
            ifindex,
            interface,
            frags,
        };
        match program_on(ifindex) {
            Some(program) => Err(AttachError::Foreign {
                interface: target.interface,
                held: program.held(ifindex),
                program,
            }),
            None => Ok(target),
        }
    }

    /// Attaches the loaded `program` as requested.
    pub(crate) fn attach(
        &self,
        program: BorrowedFd<'_>,
        id: u32,
        request: ModeRequest,
    ) -> Result<Attached, AttachError> {
        let attached = |link, mode, fallback| Attached {
            link,
            program: id,
            stays: false,
            mode,
            fallback,
        };
        let first = match request {
            ModeRequest::Auto | ModeRequest::Native => Mode::Native,
            ModeRequest::Skb => Mode::Skb,
        };
        match self.attach_in(program, first) {
            Ok(link) => Ok(attached(link, first, None)),
            Err(error) if request == ModeRequest::Auto && error.is_worth_a_fallback() => {
                let native = error.in_full();
                match self.attach_in(program, Mode::Skb) {
                    Ok(link) => Ok(attached(link, Mode::Skb, Some(native))),
                    Err(skb) => Err(AttachError::Neither {
                        native,
                        skb: Box::new(skb),
                    }),
                }
            }
            Err(error) => Err(error),
        }
    }

    fn attach_in(&self, program: BorrowedFd<'_>, mode: Mode) -> Result<OwnedFd, AttachError> {
        create_link(program, self.ifindex, mode).map_err(|errno| self.explain(program, mode, errno))
    }

    fn explain(&self, program: BorrowedFd<'_>, mode: Mode, errno: io::Error) -> AttachError {
        let interface = self.interface.clone();
        let code = errno.raw_os_error().unwrap_or(0);
        match code {
            libc::ENODEV => {
                return AttachError::NoSuchInterface {
                    ifindex: self.ifindex,
                };
            }
            libc::EPERM | libc::EACCES => {
                let source = KernelRefusal { errno, message: None };
                return AttachError::NotPermitted { interface, source };
            }
            // Somebody was faster than us.
            libc::EBUSY | libc::EEXIST => {
                if let Some(program) = program_on(self.ifindex) {
                    let held = program.held(self.ifindex);
                    return AttachError::Foreign {
                        interface,
                        program,
                        held,
                    };
                }
            }
            _ => {}
        }
        let message = ask_for_message(program, self.ifindex, mode);
        let says_mtu = message
            .as_ref()
            .is_some_and(|text| text.to_ascii_lowercase().contains("mtu"));
        let source = KernelRefusal { errno, message };
        if code == libc::ERANGE || says_mtu {
            let mtu = interface_mtu(&self.interface).unwrap_or(0);
            return AttachError::MtuTooLarge {
                interface,
                mtu,
                mode,
                frags: self.frags,
                source,
            };
        }
        AttachError::Refused {
            interface,
            mode,
            source,
        }
    }
}

fn create_link(program: BorrowedFd<'_>, ifindex: u32, mode: Mode) -> io::Result<OwnedFd> {
    let opts = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as libbpf_sys::size_t,
        flags: mode.flag(),
        ..Default::default()
    };
    let target = as_int(ifindex)?;
    let (fd, _) = messages_of(|| {
        // SAFETY: opts is valid for the call and says its own size; the program's descriptor is borrowed, hence
        // open; for BPF_XDP the "target descriptor" is an interface index.
        unsafe {
            libbpf_sys::bpf_link_create(program.as_raw_fd(), target, libbpf_sys::BPF_XDP, &raw const opts)
        }
    });
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the call just returned this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Asks by netlink for what `BPF_LINK_CREATE` just refused, for the kernel's words.
///
/// Should it succeed, because what was in the way went meanwhile, it is undone at once.
pub(crate) fn ask_for_message(program: BorrowedFd<'_>, ifindex: u32, mode: Mode) -> Option<String> {
    let target = as_int(ifindex).ok()?;
    let flags = mode.flag() | libbpf_sys::XDP_FLAGS_UPDATE_IF_NOEXIST;
    let (result, said) = messages_of(|| {
        // SAFETY: null options are allowed; the program's descriptor is borrowed, hence open.
        unsafe { libbpf_sys::bpf_xdp_attach(target, program.as_raw_fd(), flags, ptr::null()) }
    });
    if result == 0 {
        let opts = libbpf_sys::bpf_xdp_attach_opts {
            sz: size_of::<libbpf_sys::bpf_xdp_attach_opts>() as libbpf_sys::size_t,
            old_prog_fd: program.as_raw_fd(),
            ..Default::default()
        };
        // SAFETY: opts is valid for the call and says its own size. With old_prog_fd only our program goes.
        let (_, _) =
            messages_of(|| unsafe { libbpf_sys::bpf_xdp_detach(target, mode.flag(), &raw const opts) });
        return None;
    }
    kernel_message(&said)
}

fn interface_name(ifindex: u32) -> Option<String> {
    let mut name = [0u8; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the IF_NAMESIZE bytes that the call may write.
    let found = unsafe { libc::if_indextoname(ifindex, name.as_mut_ptr().cast()) };
    if found.is_null() {
        return None;
    }
    Some(
        CStr::from_bytes_until_nul(&name)
            .ok()?
            .to_string_lossy()
            .into_owned(),
    )
}

fn interface_mtu(interface: &str) -> Option<u32> {
    // SAFETY: no pointers; returns a new descriptor or -1.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the call just returned this descriptor, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: ifreq is plain data, for which all zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte less than the field: it stays terminated.
    for (to, from) in request
        .ifr_name
        .iter_mut()
        .zip(interface.bytes().take(libc::IF_NAMESIZE - 1))
    {
        *to = from.cast_signed();
    }
    // SAFETY: SIOCGIFMTU takes an ifreq and writes its ifru_mtu; request is one and valid for the call.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
    if result != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so ifru_mtu is the member that was written.
    u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
}

pub(crate) fn as_int(ifindex: u32) -> io::Result<i32> {
    i32::try_from(ifindex).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))
}
