//! The hints that the program writes before frames, and those that are available.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::OnceLock;

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::Func;
use netlink_bindings::netdev::{self, XdpRxMetadata};
use netlink_socket2::NetlinkSocket;

use crate::capture::messages_of;

/// A set of hints: the metadata that the program writes before the frames of queues with hints
/// ([`QueueConf::hints`](crate::QueueConf::hints)). As text: `hash,vlan`, or `none`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct HintSet(u8);

/// A hint (`STEER_HINT_*`), its name, which is part of the structure's name (`bpf/steer_hints.h`), and, for a
/// hint from the NIC, the kernel's function and the driver's flag.
type Known = (HintSet, &'static str, Option<(&'static str, XdpRxMetadata)>);

const KNOWN: [Known; 4] = [
    (
        HintSet::HASH,
        "hash",
        Some(("bpf_xdp_metadata_rx_hash", XdpRxMetadata::Hash)),
    ),
    (
        HintSet::VLAN,
        "vlan",
        Some(("bpf_xdp_metadata_rx_vlan_tag", XdpRxMetadata::VlanTag)),
    ),
    (
        HintSet::TIMESTAMP,
        "timestamp",
        Some(("bpf_xdp_metadata_rx_timestamp", XdpRxMetadata::Timestamp)),
    ),
    (HintSet::MARK, "mark", None),
];

impl HintSet {
    /// No hints.
    pub const NONE: Self = Self(0);
    /// The NIC's hash of the frame's flow.
    pub const HASH: Self = Self(0x1);
    /// The VLAN tag that the NIC stripped. The program then also uses it as the outermost one.
    pub const VLAN: Self = Self(0x2);
    /// When the NIC received the frame.
    pub const TIMESTAMP: Self = Self(0x4);
    /// The mark of the frame's flow ([`InterfaceMarks`](crate::InterfaceMarks)); needs no support from the NIC.
    pub const MARK: Self = Self(0x8);
    /// All.
    pub const ALL: Self = Self(0xf);

    /// Whether the set is empty.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the set has all of `others`.
    #[must_use]
    pub const fn has(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// The union of both sets.
    #[must_use]
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    /// The intersection of both sets.
    #[must_use]
    pub const fn among(self, others: Self) -> Self {
        Self(self.0 & others.0)
    }

    /// This set without `others`.
    #[must_use]
    pub const fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// The hints that programs on this kernel can read at all: those whose functions it has (hash and time
    /// from Linux 6.3 on, the tag from 6.8 on), with types (CONFIG_DEBUG_INFO_BTF). Queried once.
    #[must_use]
    pub fn of_kernel() -> Self {
        static OF_KERNEL: OnceLock<HintSet> = OnceLock::new();
        if let Some(&known) = OF_KERNEL.get() {
            return known;
        }
        let (btf, _) = messages_of(Btf::from_vmlinux);
        // Not cached: a later call may have permission to read it.
        let Ok(btf) = btf else { return Self::NONE };
        let has = |function: &str| btf.type_by_name::<Func<'_>>(function).is_some();
        let is_there = |known: &Known| known.2.is_none_or(|(function, _)| has(function));
        *OF_KERNEL.get_or_init(|| Self::all_of(KNOWN.iter().filter(|known| is_there(known))))
    }

    /// The hints that the driver of this interface reports (`xdp-rx-metadata-features`,
    /// Documentation/netlink/specs/netdev.yaml), in the network namespace of the calling thread. Not guaranteed
    /// for each frame: veth, for example, has a time only if the sender set one. The query loads nothing.
    ///
    /// # Errors
    /// There is no such interface, or the kernel does not report them (before Linux 6.3).
    pub fn of_driver(ifindex: u32) -> io::Result<Self> {
        let mut socket = NetlinkSocket::new();
        let mut request = netdev::Request::new().op_dev_get_do();
        request.encode().push_ifindex(ifindex);
        let mut replies = socket.request(&request)?;
        let attributes = replies.recv_one().map_err(io::Error::from)?;
        // The kernel omits the attribute if there is none.
        let features = attributes.get_xdp_rx_metadata_features().unwrap_or(0);
        let has = |known: &&Known| known.2.is_some_and(|(_, bit)| features & bit as u64 != 0);
        Ok(Self::all_of(KNOWN.iter().filter(has)))
    }

    fn all_of<'a>(known: impl Iterator<Item = &'a Known>) -> Self {
        known.fold(Self::NONE, |set, &(hint, ..)| set.with(hint))
    }

    /// The set as a number, for another process: the bits of `STEER_HINT_*`.
    #[must_use]
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// The set from [`bits`](Self::bits); unknown bits are ignored.
    #[must_use]
    pub const fn of_bits(bits: u8) -> Self {
        Self(bits & Self::ALL.0)
    }

    /// The names of the hints in the set.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let its = KNOWN.into_iter().filter(move |&(hint, ..)| self.has(hint));
        its.map(|(_, name, _)| name)
    }

    /// Name of the structure that the program writes.
    pub(crate) fn structure(self) -> String {
        self.names()
            .fold("steer_hints".to_owned(), |name, hint| name + "_" + hint)
    }
}

impl fmt::Display for HintSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&self.names().collect::<Vec<_>>().join(",")),
        }
    }
}

impl fmt::Debug for HintSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HintSet({self})")
    }
}

/// A word that is not the name of a hint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no hint: choose some of {all}, or none", all = HintSet::ALL)]
pub struct NoSuchHint(String);

impl FromStr for HintSet {
    type Err = NoSuchHint;

    fn from_str(text: &str) -> Result<Self, NoSuchHint> {
        if text == "none" {
            return Ok(Self::NONE);
        }
        let hint = |word: &str| KNOWN.into_iter().find(|&(_, name, _)| name == word);
        text.split(',')
            .map(str::trim)
            .try_fold(Self::NONE, |set, word| match hint(word) {
                Some((hint, ..)) => Ok(set.with(hint)),
                None => Err(NoSuchHint(word.to_owned())),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_written_and_read_by_name() {
        for bits in 0..16 {
            let set = HintSet::of_bits(bits);
            assert_eq!(set.to_string().parse(), Ok(set));
        }
        assert_eq!(HintSet::ALL.to_string(), "hash,vlan,timestamp,mark");
        assert_eq!("vlan,hash, vlan".parse(), Ok(HintSet::HASH.with(HintSet::VLAN)));
        for wrong in ["", "none,hash", "Hash", "hash,", "time"] {
            wrong.parse::<HintSet>().expect_err(wrong);
        }
    }

    #[test]
    fn structures_are_called_as_steer_hints_h_has_them() {
        assert_eq!(HintSet::ALL.structure(), "steer_hints_hash_vlan_timestamp_mark");
        assert_eq!(HintSet::TIMESTAMP.structure(), "steer_hints_timestamp");
    }
}
