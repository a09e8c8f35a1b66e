//! The modes in which a program is attached.

use derive_more::Display;
use libbpf_rs::libbpf_sys;
use zerocopy::TryFromBytes;

/// The requested attachment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, TryFromBytes)]
#[repr(u32)]
pub enum ModeRequest {
    /// Native, or skb if the driver refuses native; the reason is kept.
    #[default]
    Xdp,
    /// In the driver, or fail.
    Native,
    /// In the host's stack after the driver (generic XDP): works with every driver, slower.
    Skb,
    /// No XDP program: frames for networks' addresses pass through a tap device ([`TapAccess`](crate::TapAccess)).
    Tap,
    /// Native, or tap if the driver refuses native; the reason is kept.
    Auto,
}

/// The attachment in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes, Display)]
#[repr(u32)]
pub enum Mode {
    /// In the driver.
    #[display("native")]
    Native = 1,
    /// Generic XDP, after the driver.
    #[display("skb")]
    Skb,
    /// No XDP program is attached: programs at the interface's tc hooks do its work.
    #[display("tap")]
    Tap,
}

impl Mode {
    /// The flag of `<linux/if_link.h>`; 0 in tap mode.
    pub(crate) fn flag(self) -> u32 {
        match self {
            Self::Native => libbpf_sys::XDP_FLAGS_DRV_MODE,
            Self::Skb => libbpf_sys::XDP_FLAGS_SKB_MODE,
            Self::Tap => 0,
        }
    }
}
