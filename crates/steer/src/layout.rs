//! Structures and constants shared by the loader and the XDP program: the same as in `bpf/steer.h`.
//!
//! Change both, in one commit. The sizes are asserted on both sides at compile time.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Maximum number of receive queues; `STEER_MAX_QUEUES`.
pub const MAX_QUEUES: u32 = 256;
/// Maximum number of addresses of all networks of an interface together, and of those in tunnels; `STEER_MAX_STATIONS`.
pub const MAX_STATIONS: u32 = 16_384;

const HEADER_LEN_SHIFT: u32 = 32;
const FLAGS_SHIFT: u32 = 48;
/// `STEER_OWN_MAP`
const OWN_MAP: u64 = 1 << 40;
/// `STEER_SHARE_SHIFT`
const SHARE_SHIFT: u32 = 8;
/// `STEER_TUNNEL`
const TUNNEL: u64 = 1 << 41;
/// `STEER_DROPS_UNKNOWN`
const DROPS_UNKNOWN: u64 = 1 << 42;
/// `STEER_SHARED`
const SHARED: u64 = 1 << 43;
/// `STEER_QUEUE_ACTIVE`
const ACTIVE: u64 = 0x1;
/// `STEER_QUEUE_SECOND`
const SECOND: u64 = 0x2;
/// `STEER_QUEUE_SUCCESSOR`
const SUCCESSOR: u64 = 0x4;

/// `STEER_QUEUE_MACS`
const MACS: u64 = 0x8;
/// `STEER_QUEUE_VLANS`
const VLANS: u64 = 0x10;
/// `STEER_QUEUE_NETWORK`
const NETWORK: u64 = 0x20;
/// `STEER_NETWORK_SHIFT`
const NETWORK_SHIFT: u32 = 8;
/// `STEER_QUEUE_HINTS`
const HINTS: u64 = 0x40;
/// `STEER_QUEUE_HINTS_WISHED`
const HINTS_WISHED: u64 = 0x80;
/// Maximum number of addresses and VLANs of all queues together; `STEER_MAX_ENTRIES`.
pub(crate) const MAX_ENTRIES: u32 = 16_384;
/// `STEER_ENTRY_MAC`
const ENTRY_MAC: u16 = 0xffff;
/// Highest VLAN ID (IEEE 802.1Q).
pub const LAST_VLAN: u16 = 4094;

/// Selects the frames of a queue that go to its socket; the others are passed to the host. An empty list means all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Frames to these addresses. Multicast and broadcast frames are always selected.
    pub macs: Vec<[u8; 6]>,
    /// Frames of these VLANs, by the outermost tag in the frame: 1 to [`LAST_VLAN`]; 0 for untagged frames, or those
    /// with a priority tag.
    pub vlans: Vec<u16>,
}

impl Filter {
    /// Whether it selects every frame.
    pub fn is_empty(&self) -> bool {
        self.macs.is_empty() && self.vlans.is_empty()
    }

    /// An address that both name, if there are VLANs whose frames both select: without VLANs a filter selects those of
    /// all.
    pub fn shared_mac(&self, other: &Self) -> Option<[u8; 6]> {
        let share_vlans = self.vlans.is_empty()
            || other.vlans.is_empty()
            || self.vlans.iter().any(|vlan| other.vlans.contains(vlan));
        let mut macs = self.macs.iter().filter(|_| share_vlans);
        macs.find(|mac| other.macs.contains(mac)).copied()
    }

    /// The flags of a queue's word.
    pub(crate) fn bits(&self) -> u64 {
        let flag = |list_is_empty, flag| if list_is_empty { 0 } else { flag << FLAGS_SHIFT };
        flag(self.macs.is_empty(), MACS) | flag(self.vlans.is_empty(), VLANS)
    }

    /// The keys of its entries in the program's set, for this queue.
    pub(crate) fn entries(&self, queue: u32) -> impl Iterator<Item = Entry> {
        // A queue's number is below MAX_QUEUES.
        let queue = u16::try_from(queue).unwrap_or(u16::MAX);
        let entry = move |vlan, mac| Entry {
            queue,
            vlan,
            mac,
            unused: [0; 2],
        };
        let macs = self.macs.iter().map(move |&mac| entry(ENTRY_MAC, mac));
        let vlans = self.vlans.iter().map(move |&vlan| entry(vlan, [0; 6]));
        macs.chain(vlans)
    }

    /// Adds an entry from the program's set.
    pub(crate) fn add(&mut self, entry: Entry) {
        match entry.vlan {
            ENTRY_MAC => self.macs.push(entry.mac),
            vlan => self.vlans.push(vlan),
        }
    }
}

/// `struct steer_entry`
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Entry {
    pub(crate) queue: u16,
    vlan: u16,
    mac: [u8; 6],
    unused: [u8; 2],
}

/// The flags of a word that belong to the queue's [`Filter`].
pub(crate) fn filter_bits(word: u64) -> u64 {
    word & ((MACS | VLANS) << FLAGS_SHIFT)
}

/// The bits of a word for the network of the queue.
pub(crate) fn network_bits(word: u64) -> u64 {
    word & ((NETWORK | 0xff << NETWORK_SHIFT) << FLAGS_SHIFT | TUNNEL | DROPS_UNKNOWN | SHARED)
}

/// The word, for a queue whose network is behind a tunnel.
pub(crate) fn word_with_tunnel(word: u64) -> u64 {
    word | TUNNEL
}

/// The word, for a queue that several networks in tunnels have.
pub(crate) fn word_of_shared(word: u64) -> u64 {
    word | SHARED
}

/// The word, for a queue of which a tunnel drops packets of unknown senders.
pub(crate) fn word_that_drops_unknown(word: u64) -> u64 {
    word | DROPS_UNKNOWN
}

/// The number of a network that shares the queues of another one, as the one with this number; 0: of that one, which has
/// the number of its first queue.
#[must_use]
pub const fn network_number(first: u32, share: u32) -> u32 {
    first | share << SHARE_SHIFT
}

/// The first of the queues that a network has, or shares.
#[must_use]
pub const fn queues_of(network: u32) -> u32 {
    network & ((1 << SHARE_SHIFT) - 1)
}

/// The part of a word that outlives the queue's sockets.
pub(crate) fn lasting_bits(word: u64) -> u64 {
    filter_bits(word) | network_bits(word)
}

/// The word, with the hints that the queue's holder requests, if hints are allowed.
pub(crate) fn word_with_hints(word: u64, allowed: bool) -> u64 {
    let wished = word & (HINTS_WISHED << FLAGS_SHIFT) != 0;
    let bare = word & !((HINTS | HINTS_WISHED) << FLAGS_SHIFT);
    match (wished, allowed) {
        (false, _) => bare,
        (true, false) => bare | HINTS_WISHED << FLAGS_SHIFT,
        (true, true) => bare | (HINTS | HINTS_WISHED) << FLAGS_SHIFT,
    }
}

/// The flags of a queue of this network, whose number is below [`MAX_QUEUES`].
pub(crate) fn word_of_network(network: u32) -> u64 {
    network_bits((NETWORK | u64::from(network) << NETWORK_SHIFT) << FLAGS_SHIFT)
}

/// Whether the network of a word's queue is behind a tunnel.
pub(crate) fn word_has_tunnel(word: u64) -> bool {
    word & TUNNEL != 0
}

/// The virtio-net header that the program writes before a frame (VirtIO 1.3, section 5.1.6): all zero, except
/// that `num_buffers` is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtioHeader {
    /// 12 bytes: the header of every device that offers `VIRTIO_F_VERSION_1`.
    Basic,
    /// 20 bytes: with `VIRTIO_NET_F_HASH_REPORT` negotiated. The report contains "no hash", or, from a program
    /// with the NIC's hash ([`HintSet::HASH`](crate::HintSet::HASH)), that hash if its type is one of virtio's.
    HashReport,
}

impl VirtioHeader {
    /// Length in bytes: 12 or 20.
    #[must_use]
    pub const fn len_bytes(self) -> u32 {
        match self {
            Self::Basic => 12,
            Self::HashReport => 20,
        }
    }
}

/// How the program treats the frames of an active queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConf {
    /// The header to put before each frame, `None` for the bare frame.
    pub virtio_header: Option<VirtioHeader>,
    /// Longest frame in bytes, from the destination MAC to the last byte of payload; without the virtio
    /// header. A longer frame is dropped and counted as [`QueueCounters::too_long`].
    pub frame_limit: u32,
    /// Write hints before each frame, while the program has any
    /// ([`Program::set_hints`](crate::Program::set_hints)); not with a virtio-net header. A frame without
    /// room for them is dropped and counted as [`QueueCounters::no_header_room`].
    pub hints: bool,
}

impl QueueConf {
    /// The map's word for an active queue.
    pub(crate) fn to_word(self, slot: MapSlot) -> u64 {
        let header_len = self.virtio_header.map_or(0, VirtioHeader::len_bytes);
        slot.inactive_word()
            | (ACTIVE << FLAGS_SHIFT)
            | (if self.hints {
                (HINTS | HINTS_WISHED) << FLAGS_SHIFT
            } else {
                0
            })
            | (u64::from(header_len) << HEADER_LEN_SHIFT)
            | u64::from(self.frame_limit)
    }
}

/// One of a queue's two slots in the socket map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MapSlot {
    First,
    Second,
}

impl MapSlot {
    /// The slot in a word, of a queue that is or was active.
    pub(crate) fn of_word(word: u64) -> Self {
        match (word >> FLAGS_SHIFT) & SECOND {
            0 => Self::First,
            _ => Self::Second,
        }
    }

    pub(crate) fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }

    /// The key in the map of sockets.
    pub(crate) fn key(self, queue: u32) -> u32 {
        match self {
            Self::First => queue,
            Self::Second => queue + MAX_QUEUES,
        }
    }

    /// The word of an inactive queue.
    pub(crate) fn inactive_word(self) -> u64 {
        match self {
            Self::First => 0,
            Self::Second => SECOND << FLAGS_SHIFT,
        }
    }
}

/// The word, for a queue whose socket is in a map of its own.
pub(crate) fn word_with_own_map(word: u64) -> u64 {
    word | OWN_MAP
}

/// Whether the other slot of a word has a waiting socket.
pub(crate) fn word_has_successor(word: u64) -> bool {
    (word >> FLAGS_SHIFT) & SUCCESSOR != 0
}

/// The word, with the flag that a socket waits in the other slot.
pub(crate) fn word_with_successor(word: u64) -> u64 {
    word | (SUCCESSOR << FLAGS_SHIFT)
}

/// The destination of a frame; `struct steer_station`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct Station {
    /// By the outermost tag in the frame: 1 to [`LAST_VLAN`]; 0: untagged, or with a priority tag.
    pub vlan: u16,
    /// Unicast.
    pub mac: [u8; 6],
}

impl Station {
    /// Whether the address is unicast and the VLAN valid.
    #[must_use]
    pub fn is_possible(self) -> bool {
        // Bit 0 of the first byte: multicast (IEEE 802).
        self.vlan <= LAST_VLAN && self.mac[0] & 1 == 0
    }
}

/// What the program did with the frames of one queue, summed over the CPUs; `struct steer_counters`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
#[non_exhaustive]
pub struct QueueCounters {
    /// Redirected to the AF_XDP socket of the queue. Frames that the socket then drops are in its `XDP_STATISTICS`.
    pub redirected: u64,
    /// Passed to the host: the queue is not active.
    pub passed: u64,
    /// Dropped: longer than [`QueueConf::frame_limit`].
    pub too_long: u64,
    /// Dropped: the driver left no room before the frame for the virtio-net header, or for the hints.
    pub no_header_room: u64,
    /// Passed to the host: the queue is active, but its socket is gone from the map, because it was closed. A
    /// decapsulated frame is dropped.
    pub no_socket: u64,
    /// Passed to the host: the queue is active, but the frame's address or VLAN is not its own ([`Filter`]).
    pub not_ours: u64,
    /// Multicast frames (broadcast included) in a network, which all pass to the host: a copy is in the network's ring.
    pub group_copied: u64,
    /// Multicast frames that were not copied: there were more than the network's [limit](crate::MulticastLimit).
    pub group_limited: u64,
    /// Multicast frames not copied: the ring was full, or they were too long for it or [`QueueConf::frame_limit`].
    pub group_lost: u64,
    /// Packets for a [tunnel](crate::Tunnel::drops_unknown) that were dropped: from an unknown host.
    pub unknown_sender: u64,
    /// The same: without a whole Ethernet header in them.
    pub malformed: u64,
}

/// Their number.
const COUNTERS: usize = size_of::<QueueCounters>() / size_of::<u64>();

impl QueueCounters {
    /// Every counter with its name, in the order of the program's checks.
    pub fn named(&self) -> [(&'static str, u64); COUNTERS] {
        [
            ("redirected", self.redirected),
            ("passed", self.passed),
            ("too_long", self.too_long),
            ("no_header_room", self.no_header_room),
            ("no_socket", self.no_socket),
            ("not_ours", self.not_ours),
            ("group_copied", self.group_copied),
            ("group_limited", self.group_limited),
            ("group_lost", self.group_lost),
            ("unknown_sender", self.unknown_sender),
            ("malformed", self.malformed),
        ]
    }

    /// Frames that the program dropped, for any reason.
    pub fn dropped(&self) -> u64 {
        let of_tunnels = self.unknown_sender.wrapping_add(self.malformed);
        self.too_long
            .wrapping_add(self.no_header_room)
            .wrapping_add(of_tunnels)
    }

    /// Adds one CPU's value as the kernel returns it; false if it does not have the size of `struct steer_counters`.
    pub(crate) fn add_cpu(&mut self, bytes: &[u8]) -> bool {
        let Ok(cpu) = <[u64; COUNTERS]>::read_from_bytes(bytes) else {
            return false;
        };
        let sums: &mut [u64; COUNTERS] = zerocopy::transmute_mut!(self);
        for (sum, counter) in sums.iter_mut().zip(cpu) {
            *sum = sum.wrapping_add(counter);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_has_limit_header_and_flag_where_steer_h_says() {
        let conf = QueueConf {
            virtio_header: Some(VirtioHeader::HashReport),
            frame_limit: 0xdead_beef,
            hints: true,
        };
        assert_eq!(conf.to_word(MapSlot::First), 0x00c1_0014_dead_beef);
        assert_eq!(conf.to_word(MapSlot::Second), 0x00c3_0014_dead_beef);
        let conf = QueueConf {
            virtio_header: None,
            frame_limit: 1514,
            hints: false,
        };
        assert_eq!(conf.to_word(MapSlot::First), 0x0001_0000_0000_05ea);
    }

    #[test]
    fn hints_that_may_not_be_had_stay_wished() {
        let (plain, wished, given) = (
            0x0001_0000_0000_05ea,
            0x0081_0000_0000_05ea,
            0x00c1_0000_0000_05ea,
        );
        for word in [wished, given] {
            assert_eq!(word_with_hints(word, false), wished);
            assert_eq!(word_with_hints(word, true), given);
        }
        assert_eq!(word_with_hints(plain, true), plain);
    }

    #[test]
    fn successor_is_noted_beside_what_is_in_use() {
        let word = 0x0003_000c_0000_05ea;
        assert!(!word_has_successor(word));
        let noted = word_with_successor(word);
        assert_eq!(noted, 0x0007_000c_0000_05ea);
        assert!(word_has_successor(noted));
        assert_eq!(MapSlot::of_word(noted), MapSlot::Second);
    }

    #[test]
    fn slots_have_words_and_keys_of_their_own() {
        for slot in [MapSlot::First, MapSlot::Second] {
            assert_eq!(MapSlot::of_word(slot.inactive_word()), slot);
        }
        assert_eq!((MapSlot::First.key(7), MapSlot::Second.key(7)), (7, 263));
    }

    #[test]
    fn filters_share_an_address_if_both_select_frames_of_a_vlan() {
        let filter = |last: &[u8], vlans: &[u16]| Filter {
            macs: last.iter().map(|&last| [2, 0, 0, 0, 0, last]).collect(),
            vlans: vlans.to_vec(),
        };
        let shared = |one: Filter, other: Filter| one.shared_mac(&other).map(|mac| mac[5]);
        assert_eq!(
            shared(filter(&[1, 2], &[5, 6]), filter(&[2, 3], &[6, 7])),
            Some(2)
        );
        assert_eq!(shared(filter(&[1, 2], &[5, 6]), filter(&[2, 3], &[7])), None);
        for (one, other) in [(&[][..], &[7][..]), (&[5], &[]), (&[], &[])] {
            assert_eq!(shared(filter(&[1], one), filter(&[1], other)), Some(1));
        }
        assert_eq!(shared(filter(&[1], &[]), filter(&[2], &[])), None);
    }

    #[test]
    fn filter_has_flags_and_keys_where_steer_h_says() {
        let filter = Filter {
            macs: vec![[2, 0, 0, 0, 0, 1]],
            vlans: vec![0, 100],
        };
        assert_eq!(filter.bits(), 0x0018_0000_0000_0000);
        assert_eq!(Filter::default().bits(), 0);
        assert_eq!(filter_bits(u64::MAX), filter.bits());
        let entries: Vec<Entry> = filter.entries(7).collect();
        let key = |queue: u16, vlan: u16, mac: [u8; 6]| {
            [&queue.to_ne_bytes()[..], &vlan.to_ne_bytes(), &mac, &[0; 2]].concat()
        };
        assert_eq!(entries[0].as_bytes(), key(7, 0xffff, filter.macs[0]));
        assert_eq!(entries[2].as_bytes(), key(7, 100, [0; 6]));
        let mut again = Filter::default();
        for entry in entries {
            again.add(entry);
        }
        assert_eq!(again, filter);
    }

    #[test]
    fn network_has_flag_and_number_where_steer_h_says() {
        assert_eq!(word_of_network(0), 0x0020_0000_0000_0000);
        assert_eq!(word_of_network(0xa5), 0xa520_0000_0000_0000);
        assert_eq!(lasting_bits(u64::MAX), 0xff38_0e00_0000_0000);
    }

    #[test]
    fn counters_of_two_cpus_add_up() {
        let cpu: Vec<u8> = (1..=11u64).flat_map(u64::to_ne_bytes).collect();
        let mut sum = QueueCounters::default();
        assert!(sum.add_cpu(&cpu));
        assert!(sum.add_cpu(&cpu));
        assert_eq!(
            sum.named().map(|(_, value)| value),
            [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]
        );
        assert_eq!(sum.dropped(), 56);
    }

    #[test]
    fn counters_of_another_size_are_refused() {
        let mut sum = QueueCounters::default();
        assert!(!sum.add_cpu(&[0; 87]));
        assert!(!sum.add_cpu(&[0; 89]));
        assert!(!sum.add_cpu(&[0; 96]));
        assert_eq!(sum, QueueCounters::default());
    }
}
