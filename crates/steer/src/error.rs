//! Why a program could not be attached.

use std::error::Error;
use std::{fmt, io};

use crate::foreign::{ForeignProgram, Held};
use crate::mode::Mode;

/// The kernel's error for a refused attachment.
#[derive(Debug)]
pub struct KernelRefusal {
    /// The errno of `BPF_LINK_CREATE`.
    pub errno: io::Error,
    /// The kernel's message, if there was one.
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

impl Error for KernelRefusal {}

/// Why a program could not be attached. The interface is unchanged.
///
/// `ifindex` is the interface's index, as given, and `interface` its name; `mtu` is its MTU in bytes, 0 if it
/// could not be read; `program` is the attached one, `mode` the one that was tried. `source` is the error of
/// the kernel or of libbpf.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum AttachError {
    /// The index names no interface in this network namespace.
    #[error("no interface has index {ifindex}; `ip link` lists them")]
    NoSuchInterface { ifindex: u32 },
    /// The kernel refused the program or its maps.
    #[error("cannot load the XDP program{}", hint_of(.source, .detail))]
    Load {
        /// libbpf's messages, the verifier's log among them; may be empty.
        detail: String,
        #[source]
        source: libbpf_rs::Error,
    },
    /// Another program is attached, and is not replaced.
    #[error("{interface} already has an XDP program ({program}), which is not replaced: {}",
        .program.remedy(*.held, .interface))]
    Foreign {
        interface: String,
        program: ForeignProgram,
        /// What keeps it there.
        held: Held,
    },
    /// Frames of this MTU do not fit into the buffers of an XDP program of this kind.
    #[error("the MTU of {interface} ({mtu}) or of its peer is too large for XDP in {mode} mode{}: lower it{}",
        if *.frags { "" } else { " without multi-buffer frames" },
        match .mode {
            Mode::Native => ", or use skb mode (mode=skb)",
            Mode::Skb | Mode::Tap => "",
        })]
    MtuTooLarge {
        interface: String,
        mtu: u32,
        mode: Mode,
        /// Whether the program supports frames in several buffers.
        frags: bool,
        #[source]
        source: KernelRefusal,
    },
    /// Attaching needs privileges that this process lacks.
    #[error("may not attach an XDP program to {interface}: run as root, or with CAP_BPF and CAP_NET_ADMIN")]
    NotPermitted {
        interface: String,
        #[source]
        source: KernelRefusal,
    },
    /// The kernel or the driver refused for another reason.
    #[error("{interface} refuses an XDP program in {mode} mode{}", match .mode {
        Mode::Native => "; the driver may lack XDP: try skb mode (mode=skb)",
        Mode::Skb | Mode::Tap => "",
    })]
    Refused {
        interface: String,
        mode: Mode,
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
    // The verifier's error is before its summary.
    let lines: Vec<&str> = detail.lines().filter(|line| !line.trim().is_empty()).collect();
    let summary = lines.iter().position(|line| line.starts_with("processed "));
    match lines[..summary.unwrap_or(lines.len())].last() {
        Some(last) => format!(" (libbpf: {})", last.trim().trim_start_matches("libbpf: ")),
        None => String::new(),
    }
}

impl AttachError {
    /// Whether the other mode might work although this one did not.
    pub(crate) fn is_worth_a_fallback(&self) -> bool {
        matches!(self, Self::MtuTooLarge { .. } | Self::Refused { .. })
    }
}

/// An error and its sources, in one line.
#[must_use]
pub fn with_sources<'a>(error: impl Into<Box<dyn Error + 'a>>) -> String {
    let error = error.into();
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let said = cause.to_string();
        // Some errors repeat their source.
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        source = cause.source();
    }
    text
}
