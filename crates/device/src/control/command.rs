//! Commands of the control queue, each read once out of guest memory, and what is wrong with them.

use virtio_bindings::bindings::virtio_net as net;
use virtqueue::{Buffer, MemoryMap};

use crate::control::MOST_TABLE_ENTRIES;
use crate::features::{
    F_CTRL_GUEST_OFFLOADS, F_CTRL_MAC_ADDR, F_CTRL_RX, F_CTRL_RX_EXTRA, F_CTRL_VLAN, F_GUEST_ANNOUNCE,
    F_HASH_REPORT, F_MQ, F_RSS,
};
use crate::filter::{Addresses, MOST_ADDRESSES, Mac, MacTable, RxModes};
use crate::hash::toeplitz::KEY_BYTES;
use crate::hash::{HashConfig, HashTypes};
use crate::net_device::NetDevice;
use crate::offloads::Offloads;
use crate::pair::Cursor;
use crate::receive::Table;

/// What a driver may ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// VIRTIO_NET_CTRL_RX: one of the modes.
    Mode(RxMode, bool),
    /// VIRTIO_NET_CTRL_MAC_TABLE_SET.
    MacTable(MacTable),
    /// VIRTIO_NET_CTRL_MAC_ADDR_SET.
    Mac(Mac),
    /// VIRTIO_NET_CTRL_VLAN: a VLAN is let through, or no more.
    Vlan(u16, bool),
    /// VIRTIO_NET_CTRL_ANNOUNCE_ACK.
    AnnounceAck,
    /// VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET: so many pairs, with automatic receive steering.
    Pairs(u16),
    /// VIRTIO_NET_CTRL_MQ_RSS_CONFIG.
    Rss(RssConfig),
    /// VIRTIO_NET_CTRL_MQ_HASH_CONFIG.
    Hash(HashConfig),
    /// VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET: these of the offloads for the guest, and no others.
    Offloads(Offloads),
}

/// `struct virtio_net_rss_config`, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RssConfig {
    /// Types and key.
    pub hash: HashConfig,
    /// Where frames go.
    pub table: Table,
    /// Transmit queues that the driver uses.
    pub send_pairs: u16,
}

/// The modes that VIRTIO_NET_CTRL_RX has commands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields of RxModes")]
pub enum RxMode {
    Promiscuous,
    AllMulticast,
    AllUnicast,
    NoMulticast,
    NoUnicast,
    NoBroadcast,
}

impl RxMode {
    /// Its place among the modes.
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

/// By what a command is judged.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// That were negotiated.
    features: u64,
    /// The device's.
    pairs: u16,
}

impl Rules {
    /// Of a device as it is now.
    pub(super) fn of(device: &NetDevice) -> Self {
        Self {
            features: device.features(),
            pairs: u16::try_from(device.pairs()).unwrap_or(u16::MAX),
        }
    }

    fn has(self, feature: u64) -> Option<()> {
        (self.features & feature != 0).then_some(())
    }

    /// A pair of the device's: an `rss_rq_id` with its reserved bit, or a number of pairs less one.
    fn pair(self, number: u16) -> Option<u16> {
        (number < self.pairs).then_some(number)
    }

    fn count(self, pairs: u16) -> Option<u16> {
        self.pair(pairs.checked_sub(1)?).map(|_| pairs)
    }
}

/// Classes and commands as the guest writes them: bytes, in headers that have them wider.
const RX: u32 = net::VIRTIO_NET_CTRL_RX;
const MAC: u32 = net::VIRTIO_NET_CTRL_MAC;
const VLAN: u32 = net::VIRTIO_NET_CTRL_VLAN;
const ANNOUNCE: u32 = net::VIRTIO_NET_CTRL_ANNOUNCE;
const MQ: u32 = net::VIRTIO_NET_CTRL_MQ;
const OFFLOADS: u32 = net::VIRTIO_NET_CTRL_GUEST_OFFLOADS;

impl Command {
    /// Out of the readable buffers of a chain. `None`: it is too short or too long, is not known, asks for something
    /// that was not negotiated, or has a value that it may not have.
    #[must_use]
    pub fn read(memory: &MemoryMap, buffers: &[Buffer], rules: &Rules) -> Option<Self> {
        let mut bytes = Reader {
            memory,
            buffers,
            at: Cursor::default(),
        };
        let [class, command] = bytes.take::<2>()?.map(u32::from);
        let read = match class {
            RX => mode(command, &mut bytes, *rules),
            MAC => mac(command, &mut bytes, *rules),
            VLAN => vlan(command, &mut bytes, *rules),
            ANNOUNCE if command == net::VIRTIO_NET_CTRL_ANNOUNCE_ACK => {
                rules.has(F_GUEST_ANNOUNCE).map(|()| Self::AnnounceAck)
            }
            MQ => multiqueue(command, &mut bytes, *rules),
            OFFLOADS if command == net::VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET => offloads(&mut bytes, *rules),
            _ => None,
        };
        read.filter(|_| bytes.is_empty())
    }
}

/// The bytes of a command, from front to back, each taken out of guest memory once.
struct Reader<'a> {
    memory: &'a MemoryMap,
    buffers: &'a [Buffer],
    at: Cursor,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes).then_some(bytes)
    }

    /// Fills `bytes`; false, if there are not so many.
    fn fill(&mut self, bytes: &mut [u8]) -> bool {
        let mut rest = bytes;
        while !rest.is_empty() {
            // No value is longer than a key.
            #[allow(clippy::cast_possible_truncation)]
            let Some(piece) = self.at.next(self.buffers, rest.len() as u32) else {
                return false;
            };
            let (now, later) = rest.split_at_mut(piece.len as usize);
            // Inside the map, as checked when the descriptor was read.
            let _ = self.memory.copy_from_guest(piece.offset, now);
            rest = later;
        }
        true
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    /// One byte: 0 or 1.
    fn switch(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    /// Goes past `count` bytes; `None` if there are not so many.
    fn skip(&mut self, count: u64) -> Option<()> {
        let count = u32::try_from(count).ok().filter(|&count| count <= self.left())?;
        self.at.pass(self.buffers, count);
        Some(())
    }

    /// Bytes to come; chains have less than 4 GiB.
    fn left(&self) -> u32 {
        let rest = self.buffers.get(self.at.buffer..).unwrap_or_default();
        rest.iter().map(|buffer| buffer.len).sum::<u32>() - self.at.within
    }

    fn is_empty(&self) -> bool {
        self.left() == 0
    }
}

fn mode(command: u32, bytes: &mut Reader, rules: Rules) -> Option<Command> {
    let (mode, feature) = match command {
        net::VIRTIO_NET_CTRL_RX_PROMISC => (RxMode::Promiscuous, F_CTRL_RX),
        net::VIRTIO_NET_CTRL_RX_ALLMULTI => (RxMode::AllMulticast, F_CTRL_RX),
        net::VIRTIO_NET_CTRL_RX_ALLUNI => (RxMode::AllUnicast, F_CTRL_RX_EXTRA),
        net::VIRTIO_NET_CTRL_RX_NOMULTI => (RxMode::NoMulticast, F_CTRL_RX_EXTRA),
        net::VIRTIO_NET_CTRL_RX_NOUNI => (RxMode::NoUnicast, F_CTRL_RX_EXTRA),
        net::VIRTIO_NET_CTRL_RX_NOBCAST => (RxMode::NoBroadcast, F_CTRL_RX_EXTRA),
        _ => return None,
    };
    rules.has(feature)?;
    Some(Command::Mode(mode, bytes.switch()?))
}

fn mac(command: u32, bytes: &mut Reader, rules: Rules) -> Option<Command> {
    match command {
        net::VIRTIO_NET_CTRL_MAC_TABLE_SET => {
            rules.has(F_CTRL_RX)?;
            Some(Command::MacTable(MacTable {
                unicast: addresses(bytes)?,
                multicast: addresses(bytes)?,
            }))
        }
        net::VIRTIO_NET_CTRL_MAC_ADDR_SET => {
            rules.has(F_CTRL_MAC_ADDR)?;
            let mac: Mac = bytes.take()?;
            // A station's: no group's, and not none at all.
            let is_station = mac[0] & 1 == 0 && mac != [0; 6];
            is_station.then_some(Command::Mac(mac))
        }
        _ => None,
    }
}

/// A number, and so many addresses.
fn addresses(bytes: &mut Reader) -> Option<Addresses> {
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
    Some(kept)
}

fn vlan(command: u32, bytes: &mut Reader, rules: Rules) -> Option<Command> {
    let on = match command {
        net::VIRTIO_NET_CTRL_VLAN_ADD => true,
        net::VIRTIO_NET_CTRL_VLAN_DEL => false,
        _ => return None,
    };
    rules.has(F_CTRL_VLAN)?;
    let vlan = bytes.u16().filter(|&vlan| vlan < 4096)?;
    Some(Command::Vlan(vlan, on))
}

fn multiqueue(command: u32, bytes: &mut Reader, rules: Rules) -> Option<Command> {
    match command {
        net::VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET => {
            rules.has(F_MQ)?;
            Some(Command::Pairs(rules.count(bytes.u16()?)?))
        }
        net::VIRTIO_NET_CTRL_MQ_RSS_CONFIG => {
            rules.has(F_RSS)?;
            rss(bytes, rules).map(Command::Rss)
        }
        net::VIRTIO_NET_CTRL_MQ_HASH_CONFIG => {
            rules.has(F_HASH_REPORT)?;
            // With RSS its configuration is what counts (5.1.6.4.3), and this one would count for nothing.
            if rules.has(F_RSS).is_some() {
                return None;
            }
            let types = hash_types(bytes)?;
            // Reserved: zeroes, by a driver that does as it must.
            bytes.take::<8>()?;
            let key = key(bytes, types)?;
            Some(Command::Hash(HashConfig { types, key }))
        }
        _ => None,
    }
}

fn rss(bytes: &mut Reader, rules: Rules) -> Option<RssConfig> {
    let types = hash_types(bytes)?;
    let mask = bytes.u16().filter(|&mask| mask < MOST_TABLE_ENTRIES)?;
    let entries = mask + 1;
    if !entries.is_power_of_two() {
        return None;
    }
    let unclassified = rules.pair(bytes.u16()?)?;
    let pairs = (0..entries).map(|_| rules.pair(bytes.u16()?));
    let pairs = pairs.collect::<Option<Vec<_>>>()?;
    let send_pairs = rules.count(bytes.u16()?)?;
    let key = key(bytes, types)?;
    Some(RssConfig {
        hash: HashConfig { types, key },
        table: Table { pairs, unclassified },
        send_pairs,
    })
}

fn hash_types(bytes: &mut Reader) -> Option<HashTypes> {
    HashTypes::from_bits(bytes.u32()?)
}

/// A length, and so many bytes of a key, which a driver that wants hashes has to have.
fn key(bytes: &mut Reader, types: HashTypes) -> Option<[u8; KEY_BYTES]> {
    let len = usize::from(bytes.u8()?);
    let mut key = [0; KEY_BYTES];
    let is_filled = bytes.fill(key.get_mut(..len)?);
    (is_filled && (len > 0 || types.is_empty())).then_some(key)
}

fn offloads(bytes: &mut Reader, rules: Rules) -> Option<Command> {
    rules.has(F_CTRL_GUEST_OFFLOADS)?;
    let wanted = bytes.take().map(u64::from_le_bytes)?;
    let negotiated = Offloads::from_features(rules.features).for_guest();
    let is_negotiated = wanted & !negotiated.features() == 0;
    is_negotiated.then(|| Command::Offloads(Offloads::from_features(wanted)))
}
