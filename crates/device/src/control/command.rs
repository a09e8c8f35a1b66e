//! Commands of the control queue: each is read once and checked.
//!
//! They are read from guest memory, or from the saved state of another device ([`Command::bytes`]). The same
//! code checks both.

use virtio_bindings::bindings::virtio_net as net;
use virtqueue::{Buffer, MemoryMap};

use crate::control::MOST_TABLE_ENTRIES;
use crate::features::{
    F_CTRL_GUEST_OFFLOADS, F_CTRL_MAC_ADDR, F_CTRL_RX, F_CTRL_RX_EXTRA, F_CTRL_VLAN, F_GUEST_ANNOUNCE,
    F_HASH_REPORT, F_MQ, F_RSS,
};
use crate::filter::{Addresses, MOST_ADDRESSES, Mac, MacTable, RxModes, VLANS, is_unicast};
use crate::hash::toeplitz::KEY_BYTES;
use crate::hash::{HashConfig, HashTypes};
use crate::net_device::NetDevice;
use crate::offloads::Offloads;
use crate::pair::Cursor;
use crate::receive::Table;

/// Commands of a driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// VIRTIO_NET_CTRL_RX: one of the modes.
    Mode(RxMode, bool),
    /// VIRTIO_NET_CTRL_MAC_TABLE_SET.
    MacTable(MacTable),
    /// VIRTIO_NET_CTRL_MAC_ADDR_SET.
    Mac(Mac),
    /// VIRTIO_NET_CTRL_VLAN: accepts frames of a VLAN (true), or stops accepting them.
    Vlan(u16, bool),
    /// VIRTIO_NET_CTRL_ANNOUNCE_ACK.
    AnnounceAck,
    /// VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET: the number of pairs, with automatic receive steering.
    Pairs(u16),
    /// VIRTIO_NET_CTRL_MQ_RSS_CONFIG.
    Rss(RssConfig),
    /// VIRTIO_NET_CTRL_MQ_HASH_CONFIG.
    Hash(HashConfig),
    /// VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET: enables these offloads for the guest, and no others.
    Offloads(Offloads),
}

/// `struct virtio_net_rss_config`, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RssConfig {
    /// Types and key.
    pub hash: HashConfig,
    /// The indirection table.
    pub table: Table,
    /// Transmit queues that the driver uses.
    pub send_pairs: u16,
}

/// The modes of VIRTIO_NET_CTRL_RX, with the numbers of their commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields of RxModes")]
#[repr(u32)]
pub enum RxMode {
    Promiscuous = net::VIRTIO_NET_CTRL_RX_PROMISC,
    AllMulticast = net::VIRTIO_NET_CTRL_RX_ALLMULTI,
    AllUnicast = net::VIRTIO_NET_CTRL_RX_ALLUNI,
    NoMulticast = net::VIRTIO_NET_CTRL_RX_NOMULTI,
    NoUnicast = net::VIRTIO_NET_CTRL_RX_NOUNI,
    NoBroadcast = net::VIRTIO_NET_CTRL_RX_NOBCAST,
}

impl RxMode {
    /// All of them.
    pub(super) const ALL: [Self; 6] = [
        Self::Promiscuous,
        Self::AllMulticast,
        Self::AllUnicast,
        Self::NoMulticast,
        Self::NoUnicast,
        Self::NoBroadcast,
    ];

    /// The feature that its command needs.
    fn feature(self) -> u64 {
        match self {
            Self::Promiscuous | Self::AllMulticast => F_CTRL_RX,
            Self::AllUnicast | Self::NoMulticast | Self::NoUnicast | Self::NoBroadcast => F_CTRL_RX_EXTRA,
        }
    }

    /// Its field in `modes`.
    pub(super) fn of(self, modes: &mut RxModes) -> &mut bool {
        match self {
            Self::Promiscuous => &mut modes.promiscuous,
            Self::AllMulticast => &mut modes.all_multicast,
            Self::AllUnicast => &mut modes.all_unicast,
            Self::NoMulticast => &mut modes.no_multicast,
            Self::NoUnicast => &mut modes.no_unicast,
            Self::NoBroadcast => &mut modes.no_broadcast,
        }
    }
}

/// Why a command is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is too short or too long.
    #[error("it is too short or too long")]
    Length,
    /// Its class, or its command, is not supported.
    #[error("this device has no such command")]
    Unknown,
    /// It needs a feature that was not negotiated, or a negotiated feature disables it (VirtIO 1.3, 5.1.6.5).
    #[error("the negotiated features do not allow it")]
    Features,
    /// A queue pair beyond those of the device.
    #[error("it refers to a queue pair that this device does not have")]
    Pair,
    /// Any other value.
    #[error("it has an invalid value")]
    Value,
}

/// Limits for commands.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// The negotiated features.
    features: u64,
    /// The device's number of pairs.
    pairs: u16,
}

impl Rules {
    /// The rules of a device in its present state.
    pub(super) fn of(device: &NetDevice) -> Self {
        Self {
            features: device.features(),
            pairs: u16::try_from(device.pairs()).unwrap_or(u16::MAX),
        }
    }

    fn has(self, feature: u64) -> bool {
        self.features & feature != 0
    }

    fn needs(self, feature: u64) -> Result<(), Refusal> {
        self.has(feature).then_some(()).ok_or(Refusal::Features)
    }

    /// Checks a pair's number: an `rss_rq_id` with its reserved bit, or a number of pairs minus one.
    fn pair(self, number: u16) -> Result<u16, Refusal> {
        (number < self.pairs).then_some(number).ok_or(Refusal::Pair)
    }

    fn count(self, pairs: u16) -> Result<u16, Refusal> {
        let last = pairs.checked_sub(1).ok_or(Refusal::Value)?;
        self.pair(last).map(|_| pairs)
    }
}

/// Classes, which the guest writes as bytes; the kernel's headers define them as wider numbers.
const RX: u32 = net::VIRTIO_NET_CTRL_RX;
const MAC: u32 = net::VIRTIO_NET_CTRL_MAC;
const VLAN: u32 = net::VIRTIO_NET_CTRL_VLAN;
const ANNOUNCE: u32 = net::VIRTIO_NET_CTRL_ANNOUNCE;
const MQ: u32 = net::VIRTIO_NET_CTRL_MQ;
const OFFLOADS: u32 = net::VIRTIO_NET_CTRL_GUEST_OFFLOADS;

impl Command {
    /// Reads a command from the readable buffers of a chain.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn read(memory: &MemoryMap, buffers: &[Buffer], rules: &Rules) -> Result<Self, Refusal> {
        let copy = |offset, bytes: &mut [u8]| {
            // Inside the map, as checked when the descriptor was read.
            let _ = memory.copy_from_guest(offset, bytes);
        };
        Self::parse_checked(&copy, buffers, *rules)
    }

    /// Reads a command from bytes as in a driver's buffers: class, command, data.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn of_bytes(bytes: &[u8], rules: &Rules) -> Result<Self, Refusal> {
        let buffer = Buffer {
            len: u32::try_from(bytes.len()).map_err(|_| Refusal::Length)?,
            ..Buffer::default()
        };
        let copy = |offset, into: &mut [u8]| {
            // Inside the one buffer.
            #[allow(clippy::cast_possible_truncation)]
            let at = offset as usize;
            into.copy_from_slice(&bytes[at..at + into.len()]);
        };
        Self::parse_checked(&copy, &[buffer], *rules)
    }

    fn parse_checked(
        copy: &dyn Fn(u64, &mut [u8]),
        buffers: &[Buffer],
        rules: Rules,
    ) -> Result<Self, Refusal> {
        let mut bytes = Reader {
            copy,
            buffers,
            at: Cursor::default(),
        };
        let [class, command] = bytes.take::<2>()?.map(u32::from);
        let read = match class {
            RX => mode(command, &mut bytes, rules)?,
            MAC => mac(command, &mut bytes, rules)?,
            VLAN => vlan(command, &mut bytes, rules)?,
            ANNOUNCE if command == net::VIRTIO_NET_CTRL_ANNOUNCE_ACK => {
                rules.needs(F_GUEST_ANNOUNCE).map(|()| Self::AnnounceAck)?
            }
            MQ => multiqueue(command, &mut bytes, rules)?,
            OFFLOADS if command == net::VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET => offloads(&mut bytes, rules)?,
            _ => return Err(Refusal::Unknown),
        };
        if bytes.is_empty() {
            Ok(read)
        } else {
            Err(Refusal::Length)
        }
    }

    /// The command as a driver writes it into its buffers (VirtIO 1.3, 5.1.6.5): class, command, data.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let (class, command, data) = match self {
            Self::Mode(mode, on) => (RX, *mode as u32, vec![u8::from(*on)]),
            Self::MacTable(table) => {
                let data = [written(&table.unicast), written(&table.multicast)].concat();
                (MAC, net::VIRTIO_NET_CTRL_MAC_TABLE_SET, data)
            }
            Self::Mac(mac) => (MAC, net::VIRTIO_NET_CTRL_MAC_ADDR_SET, mac.to_vec()),
            Self::Vlan(vlan, true) => (VLAN, net::VIRTIO_NET_CTRL_VLAN_ADD, vlan.to_le_bytes().to_vec()),
            Self::Vlan(vlan, false) => (VLAN, net::VIRTIO_NET_CTRL_VLAN_DEL, vlan.to_le_bytes().to_vec()),
            Self::AnnounceAck => (ANNOUNCE, net::VIRTIO_NET_CTRL_ANNOUNCE_ACK, Vec::new()),
            Self::Pairs(pairs) => (
                MQ,
                net::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET,
                pairs.to_le_bytes().to_vec(),
            ),
            Self::Rss(config) => (MQ, net::VIRTIO_NET_CTRL_MQ_RSS_CONFIG, config.bytes()),
            Self::Hash(config) => {
                let data = written_hash(config, &[0; 8]);
                (MQ, net::VIRTIO_NET_CTRL_MQ_HASH_CONFIG, data)
            }
            Self::Offloads(offloads) => {
                let data = offloads.features().to_le_bytes().to_vec();
                (OFFLOADS, net::VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET, data)
            }
        };
        // Both are bytes.
        #[allow(clippy::cast_possible_truncation)]
        [&[class as u8, command as u8], &data[..]].concat()
    }
}

/// Reads the bytes of a command in order, each once.
struct Reader<'a> {
    /// Copies the bytes at an offset.
    copy: &'a dyn Fn(u64, &mut [u8]),
    buffers: &'a [Buffer],
    at: Cursor,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Refusal> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Fills `bytes`.
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Refusal> {
        let mut rest = bytes;
        while !rest.is_empty() {
            // No value is longer than a key.
            #[allow(clippy::cast_possible_truncation)]
            let piece = self.at.next(self.buffers, rest.len() as u32);
            let piece = piece.ok_or(Refusal::Length)?;
            let (now, later) = rest.split_at_mut(piece.len as usize);
            (self.copy)(piece.offset, now);
            rest = later;
        }
        Ok(())
    }

    fn u8(&mut self) -> Result<u8, Refusal> {
        self.take().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, Refusal> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Refusal> {
        self.take().map(u32::from_le_bytes)
    }

    /// One byte: 0 or 1.
    fn switch(&mut self) -> Result<bool, Refusal> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Refusal::Value),
        }
    }

    /// Skips `count` bytes.
    fn skip(&mut self, count: u64) -> Result<(), Refusal> {
        let count = u32::try_from(count).ok().filter(|&count| count <= self.left());
        self.at.pass(self.buffers, count.ok_or(Refusal::Length)?);
        Ok(())
    }

    /// Number of remaining bytes; chains have less than 4 GiB.
    fn left(&self) -> u32 {
        let rest = self.buffers.get(self.at.buffer..).unwrap_or_default();
        rest.iter().map(|buffer| buffer.len).sum::<u32>() - self.at.within
    }

    fn is_empty(&self) -> bool {
        self.left() == 0
    }
}

fn mode(command: u32, bytes: &mut Reader, rules: Rules) -> Result<Command, Refusal> {
    let known = RxMode::ALL.into_iter().find(|mode| *mode as u32 == command);
    let mode = known.ok_or(Refusal::Unknown)?;
    rules.needs(mode.feature())?;
    Ok(Command::Mode(mode, bytes.switch()?))
}

fn mac(command: u32, bytes: &mut Reader, rules: Rules) -> Result<Command, Refusal> {
    match command {
        net::VIRTIO_NET_CTRL_MAC_TABLE_SET => {
            rules.needs(F_CTRL_RX)?;
            Ok(Command::MacTable(MacTable {
                unicast: addresses(bytes)?,
                multicast: addresses(bytes)?,
            }))
        }
        net::VIRTIO_NET_CTRL_MAC_ADDR_SET => {
            rules.needs(F_CTRL_MAC_ADDR)?;
            let mac: Mac = bytes.take()?;
            let is_right = is_unicast(mac);
            is_right.then_some(Command::Mac(mac)).ok_or(Refusal::Value)
        }
        _ => Err(Refusal::Unknown),
    }
}

/// Reads a number, and that many addresses.
fn addresses(bytes: &mut Reader) -> Result<Addresses, Refusal> {
    let entries = bytes.u32()?;
    let mut kept = Addresses::default();
    // MOST_ADDRESSES is small.
    #[allow(clippy::cast_possible_truncation)]
    let most = MOST_ADDRESSES as u32;
    for _ in 0..entries.min(most) {
        kept.add(bytes.take()?);
    }
    if let Some(more) = entries.checked_sub(most).filter(|&more| more > 0) {
        bytes.skip(u64::from(more) * 6)?;
        kept.add_more();
    }
    Ok(kept)
}

/// The addresses as a driver writes them.
fn written(addresses: &Addresses) -> Vec<u8> {
    let list = addresses.list();
    // If the driver set more than are kept, one more address encodes that; its value does not matter.
    let more = addresses.is_beyond().then_some([0; 6]);
    // MOST_ADDRESSES is small.
    #[allow(clippy::cast_possible_truncation)]
    let entries = list.len() as u32 + u32::from(addresses.is_beyond());
    let macs = [list, more.as_slice()].concat();
    [&entries.to_le_bytes(), macs.as_flattened()].concat()
}

fn vlan(command: u32, bytes: &mut Reader, rules: Rules) -> Result<Command, Refusal> {
    let on = match command {
        net::VIRTIO_NET_CTRL_VLAN_ADD => true,
        net::VIRTIO_NET_CTRL_VLAN_DEL => false,
        _ => return Err(Refusal::Unknown),
    };
    rules.needs(F_CTRL_VLAN)?;
    let vlan = bytes.u16()?;
    let is_right = vlan < VLANS;
    is_right.then_some(Command::Vlan(vlan, on)).ok_or(Refusal::Value)
}

fn multiqueue(command: u32, bytes: &mut Reader, rules: Rules) -> Result<Command, Refusal> {
    match command {
        net::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET => {
            rules.needs(F_MQ)?;
            Ok(Command::Pairs(rules.count(bytes.u16()?)?))
        }
        net::VIRTIO_NET_CTRL_MQ_RSS_CONFIG => {
            rules.needs(F_RSS)?;
            rss(bytes, rules).map(Command::Rss)
        }
        net::VIRTIO_NET_CTRL_MQ_HASH_CONFIG => {
            rules.needs(F_HASH_REPORT)?;
            // With RSS its configuration is used (5.1.6.4.3), and this one would have no effect.
            if rules.has(F_RSS) {
                return Err(Refusal::Features);
            }
            let types = hash_types(bytes)?;
            // Reserved: a correct driver writes zeros.
            bytes.take::<8>()?;
            let key = key(bytes, types)?;
            Ok(Command::Hash(HashConfig { types, key }))
        }
        _ => Err(Refusal::Unknown),
    }
}

fn rss(bytes: &mut Reader, rules: Rules) -> Result<RssConfig, Refusal> {
    let types = hash_types(bytes)?;
    let mask = bytes.u16()?;
    if mask >= MOST_TABLE_ENTRIES || !(mask + 1).is_power_of_two() {
        return Err(Refusal::Value);
    }
    let unclassified = rules.pair(bytes.u16()?)?;
    let pairs = (0..=mask).map(|_| rules.pair(bytes.u16()?));
    let pairs = pairs.collect::<Result<Vec<_>, _>>()?;
    let send_pairs = rules.count(bytes.u16()?)?;
    let key = key(bytes, types)?;
    Ok(RssConfig {
        hash: HashConfig { types, key },
        table: Table { pairs, unclassified },
        send_pairs,
    })
}

fn hash_types(bytes: &mut Reader) -> Result<HashTypes, Refusal> {
    HashTypes::from_bits(bytes.u32()?).ok_or(Refusal::Value)
}

/// Reads a length, and a key of that many bytes, which a driver that enables hashes must send.
fn key(bytes: &mut Reader, types: HashTypes) -> Result<[u8; KEY_BYTES], Refusal> {
    let len = usize::from(bytes.u8()?);
    let mut key = [0; KEY_BYTES];
    bytes.fill(key.get_mut(..len).ok_or(Refusal::Value)?)?;
    let is_right = len > 0 || types.is_empty();
    is_right.then_some(key).ok_or(Refusal::Value)
}

/// Types and key as a driver writes them, with `between` between them. The key has its full length.
fn written_hash(config: &HashConfig, between: &[u8]) -> Vec<u8> {
    // KEY_BYTES is 40.
    #[allow(clippy::cast_possible_truncation)]
    let key_bytes = [KEY_BYTES as u8];
    [
        &config.types.bits().to_le_bytes()[..],
        between,
        &key_bytes,
        &config.key,
    ]
    .concat()
}

impl RssConfig {
    /// The configuration as a driver writes it.
    fn bytes(&self) -> Vec<u8> {
        let Table { pairs, unclassified } = &self.table;
        // At most MOST_TABLE_ENTRIES, and at least one.
        #[allow(clippy::cast_possible_truncation)]
        let mask = (pairs.len() - 1) as u16;
        let words = [&[mask, *unclassified], &pairs[..], &[self.send_pairs]].concat();
        let words: Vec<_> = words.into_iter().flat_map(u16::to_le_bytes).collect();
        written_hash(&self.hash, &words)
    }
}

fn offloads(bytes: &mut Reader, rules: Rules) -> Result<Command, Refusal> {
    rules.needs(F_CTRL_GUEST_OFFLOADS)?;
    let wanted = bytes.take().map(u64::from_le_bytes)?;
    let negotiated = Offloads::from_features(rules.features).for_guest();
    let is_negotiated = wanted & !negotiated.features() == 0;
    let command = Command::Offloads(Offloads::from_features(wanted));
    is_negotiated.then_some(command).ok_or(Refusal::Features)
}
