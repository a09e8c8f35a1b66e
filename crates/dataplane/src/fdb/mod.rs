//! The forwarding database of a network: from (VLAN, MAC) to port.
//!
//! Control threads build a new table for each change, and a table is never modified: each worker has an `Arc` of its
//! own, so it reads the table without a lock, and receives the next one by message (`Command::Fdb`).

pub(crate) mod fdb_key;
pub(crate) mod flows;
pub(crate) mod forwarding;
pub mod learned;
pub mod remotes;
pub mod vlans;

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::time::Instant;

use model::config::MemberOptions;
use packet::ethernet::Mac;
use steer::ANY_VLAN;

pub use crate::fdb::fdb_key::FdbKey;
use crate::fdb::flows::Flows;
use crate::fdb::learned::Learned;
use crate::fdb::remotes::{Remotes, Vtep, VtepNumber, Vteps};
use crate::fdb::vlans::Vlans;
use crate::policy::guard::SourceGuard;

/// An underlay: the network that has opened it, and the index of its NIC, which may be another one the next time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are described above")]
pub struct UnderlayOf {
    pub network: Arc<str>,
    pub interface: u32,
}

/// Names a port within its network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortNumber(pub u16);

/// Ports of a network that shares its underlay with others have numbers below this.
pub const SHARED_PORTS: u16 = 1 << 10;

/// Where a frame goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Destination {
    /// The port of that number.
    Port(PortNumber),
    /// All ports of the VLAN, the uplink, and the host.
    Multicast,
    /// The host, over its own interface.
    Host,
    /// A station on another host, behind a VTEP whose next hop is known: the underlay.
    Remote(VtepNumber),
    /// No port here: the uplink.
    #[default]
    Unknown,
    /// A port that is isolated from the sender: the frame is dropped.
    Isolated,
}

/// A port, as the table knows it.
#[derive(Debug, Clone, Default)]
pub struct FdbPort {
    /// Its guest's address.
    pub mac: Mac,
    /// Distinguishes this port with its present addresses from earlier ports of its number, and from itself with other
    /// addresses.
    pub generation: u16,
    /// Which VLANs it is in.
    pub vlans: Vlans,
    /// What it may do in the network.
    pub options: MemberOptions,
    /// Learned addresses, if the port may learn.
    pub learned: Option<Arc<Learned>>,
    /// Its guest's IP addresses; `None`: any.
    pub source_guard: Option<Arc<SourceGuard>>,
    /// The pair that its guest sends each flow by; `None`: the port has one pair.
    pub flows: Option<Arc<Flows>>,
}

impl FdbPort {
    /// The mark of frames for this port: its number, and above it its generation.
    pub fn mark(&self, number: PortNumber) -> PortMark {
        PortMark::new(number, self.generation)
    }
}

/// A port's number and generation. The XDP program marks a frame with its destination. A marked frame may wait
/// until the port is removed and another port has the number. So the mark is trusted only if the port's generation
/// still matches; otherwise the FDB decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortMark(pub u32);

impl PortMark {
    pub(crate) const fn new(number: PortNumber, generation: u16) -> Self {
        Self((generation as u32) << 16 | number.0 as u32)
    }

    /// The same for frames at an underlay that networks share: the upper bits of the number are this network's; `None`:
    /// the port's number is too large.
    #[must_use]
    pub fn of_network(self, share: u16) -> Option<Self> {
        let (port, generation) = self.parts();
        (port.0 < SHARED_PORTS).then(|| Self::new(PortNumber(share * SHARED_PORTS + port.0), generation))
    }

    /// The port's number and generation.
    #[inline]
    pub(crate) fn parts(self) -> (PortNumber, u16) {
        // The halves.
        #[allow(clippy::cast_possible_truncation)]
        let (number, generation) = (self.0 as u16, (self.0 >> 16) as u16);
        (PortNumber(number), generation)
    }
}

/// Addresses that the host reaches through a bridge: the uplink is a port of that bridge, and they are behind the
/// bridge's other ports.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BridgeFdb(HashSet<FdbKey, FdbKeyHash>);

impl BridgeFdb {
    /// Contains these addresses, whose VLAN may be [`ANY_VLAN`].
    pub fn new(keys: &[steer::Station]) -> Self {
        let keys = keys.iter();
        Self(keys.map(|of| FdbKey::new(of.vlan, of.mac)).collect())
    }

    /// The number of addresses.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    #[inline]
    fn has(&self, key: FdbKey) -> bool {
        let any_vlan = || FdbKey::new(ANY_VLAN, key.mac());
        !self.0.is_empty() && (self.0.contains(&key) || self.0.contains(&any_vlan()))
    }
}

/// See the module's head.
#[derive(Debug, Default)]
pub struct Fdb {
    keys: HashMap<FdbKey, PortNumber, FdbKeyHash>,
    /// By number.
    ports: Vec<Option<FdbPort>>,
    /// The host's address on the uplink.
    host: Option<Mac>,
    /// The host's own addresses, in any VLAN, while its tap is connected.
    reached: Vec<Mac>,
    /// Addresses that are reached through the host.
    behind: Arc<BridgeFdb>,
    /// Addresses that the underlay reaches, and their VTEPs.
    remotes: Option<(Arc<Remotes>, Arc<Vteps>)>,
    /// The underlay of another network, which this one uses, too, and its number there; `None`: its own.
    pub(crate) shares: Option<(UnderlayOf, u16)>,
    /// Until then frames for an uplink without a queue wait: its last queue is being set up again.
    uplink_until: Option<Instant>,
}

impl Fdb {
    /// With these ports, by number. No two of them have the same key: the network checks that.
    pub fn new(ports: Vec<Option<FdbPort>>) -> Self {
        let mut keys = HashMap::default();
        for (number, port) in (0..).map(PortNumber).zip(&ports) {
            if let Some(port) = port {
                let its = port.vlans.all().iter();
                keys.extend(its.map(|&vlan| (FdbKey::new(vlan, port.mac), number)));
            }
        }
        Self {
            keys,
            ports,
            host: None,
            reached: Vec::new(),
            behind: Arc::default(),
            remotes: None,
            shares: None,
            uplink_until: None,
        }
    }

    /// Adds learned addresses. A key belongs to one port only.
    pub fn with_learned(mut self, learned: impl Iterator<Item = (FdbKey, PortNumber)>) -> Self {
        for (key, port) in learned {
            self.keys.entry(key).or_insert(port);
        }
        self
    }

    /// Sets the host's address on the uplink, which no port may learn.
    pub fn with_host(self, host: Option<Mac>) -> Self {
        Self { host, ..self }
    }

    /// Sets the host's own addresses, for any VLAN.
    pub fn with_reached(self, macs: &[Mac]) -> Self {
        let reached = macs.to_vec();
        Self { reached, ..self }
    }

    /// Sets the addresses that are reached through the host.
    pub fn with_behind(self, behind: &Arc<BridgeFdb>) -> Self {
        let behind = Arc::clone(behind);
        Self { behind, ..self }
    }

    /// Sets the addresses that are reached by the underlay, and their VTEPs.
    pub fn with_remotes(self, remotes: Arc<Remotes>, vteps: Arc<Vteps>) -> Self {
        let remotes = Some((remotes, vteps));
        Self { remotes, ..self }
    }

    /// Sets the underlay of another network, which this one uses, too, and its number there, from 1 on.
    pub fn sharing(self, shares: Option<(UnderlayOf, u16)>) -> Self {
        Self { shares, ..self }
    }

    /// Sets until when frames wait for an uplink without a queue; `None`: they do not.
    pub fn with_uplink_until(self, uplink_until: Option<Instant>) -> Self {
        Self { uplink_until, ..self }
    }

    /// Whether frames for an uplink without a queue wait now.
    pub(crate) fn awaits_uplink(&self) -> bool {
        self.uplink_until.is_some_and(|until| Instant::now() < until)
    }

    /// Whether a port may learn an address: it is unicast, and neither a port's configured address nor the host's.
    pub fn is_free(&self, key: FdbKey) -> bool {
        let its = self.keys.get(&key).and_then(|&port| self.port(port));
        let mac = key.mac();
        !key.is_multicast()
            && its.is_none_or(|port| port.mac != mac)
            && self.host != Some(mac)
            && !self.reached.contains(&mac)
    }

    /// The port of a number.
    #[inline]
    pub(crate) fn port(&self, number: PortNumber) -> Option<&FdbPort> {
        self.ports.get(usize::from(number.0))?.as_ref()
    }

    /// The destination of a port's frame.
    #[inline]
    pub(crate) fn find_for(&self, from: &FdbPort, to: FdbKey) -> Destination {
        match self.find(to) {
            Destination::Port(port) if from.options.isolated && self.is_isolated_from(from, port) => {
                Destination::Isolated
            }
            found => found,
        }
    }

    /// Whether `port` is isolated and is not `from`, which must be a reference into this table.
    fn is_isolated_from(&self, from: &FdbPort, port: PortNumber) -> bool {
        let port = self.port(port).filter(|port| !std::ptr::eq(*port, from));
        port.is_some_and(|port| port.options.isolated)
    }

    /// The destination of a frame.
    #[inline]
    pub fn find(&self, key: FdbKey) -> Destination {
        if key.is_multicast() {
            return Destination::Multicast;
        }
        match self.keys.get(&key) {
            Some(&port) => Destination::Port(port),
            None if self.reached.contains(&key.mac()) || self.behind.has(key) => Destination::Host,
            None => self.find_remote(key.mac()),
        }
    }

    /// Whether the underlay reaches addresses.
    pub(crate) fn has_remotes(&self) -> bool {
        self.remotes.is_some()
    }

    /// Where frames to an address leave if no port here receives them.
    #[inline]
    pub(crate) fn find_remote(&self, to: Mac) -> Destination {
        match &self.remotes {
            Some((remotes, vteps)) => remotes.find_resolved(to, vteps),
            None => Destination::Unknown,
        }
    }

    /// The VTEP of a number, if its next hop is known.
    #[inline]
    pub(crate) fn vtep(&self, number: VtepNumber) -> Option<&Arc<Vtep>> {
        self.remotes.as_ref()?.1.find(number)
    }
}

/// Hashes keys by a multiplication with a secret number, so that senders cannot choose addresses that collide.
#[derive(Debug, Clone)]
struct FdbKeyHash(u64);

impl Default for FdbKeyHash {
    fn default() -> Self {
        Self(RandomState::new().hash_one(0) | 1)
    }
}

impl BuildHasher for FdbKeyHash {
    type Hasher = FdbKeyHasher;

    #[inline]
    fn build_hasher(&self) -> FdbKeyHasher {
        FdbKeyHasher {
            factor: self.0,
            hash: 0,
        }
    }
}

struct FdbKeyHasher {
    factor: u64,
    hash: u64,
}

impl Hasher for FdbKeyHasher {
    #[inline]
    fn write_u64(&mut self, key: u64) {
        let product = u128::from(key) * u128::from(self.factor);
        // The hash table uses the highest bits and the lowest: both halves of the product depend on all bits.
        #[allow(clippy::cast_possible_truncation)]
        let folded = (product >> 64) as u64 ^ product as u64;
        self.hash ^= folded;
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_found_in_its_vlan_only() {
        let mac = [2, 0, 0, 0, 0, 1];
        let port = |vlans| {
            Some(FdbPort {
                mac,
                vlans,
                ..FdbPort::default()
            })
        };
        let fdb = Fdb::new(vec![
            None,
            port(Vlans::Untagged),
            port(Vlans::Trunk(vec![100, 102])),
        ]);
        let find = |vlan, mac| fdb.find(FdbKey::new(vlan, mac));
        assert_eq!(find(0, mac), Destination::Port(PortNumber(1)));
        assert_eq!(find(100, mac), Destination::Port(PortNumber(2)));
        assert_eq!(find(101, mac), Destination::Unknown);
        assert_eq!(find(0, [2, 0, 0, 0, 0, 2]), Destination::Unknown);
    }

    #[test]
    fn host_is_found_in_every_vlan_and_after_ports() {
        let mac = [2, 0, 0, 0, 0, 1];
        let port = FdbPort {
            mac,
            vlans: Vlans::Access(100),
            ..FdbPort::default()
        };
        let fdb = Fdb::new(vec![Some(port)]).with_reached(&[[2, 0, 0, 0, 0, 9], mac]);
        let find = |vlan, mac| fdb.find(FdbKey::new(vlan, mac));
        assert_eq!(find(0, [2, 0, 0, 0, 0, 9]), Destination::Host);
        assert_eq!(find(100, [2, 0, 0, 0, 0, 9]), Destination::Host);
        assert_eq!(find(100, mac), Destination::Port(PortNumber(0)));
        assert_eq!(find(100, [2, 0, 0, 0, 0, 8]), Destination::Unknown);
    }

    #[test]
    fn what_is_behind_a_bridge_is_found_after_ports_and_in_its_vlan() {
        let [port, other] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
        let ports = vec![Some(FdbPort {
            mac: port,
            ..FdbPort::default()
        })];
        let behind = [(0, port), (7, other), (ANY_VLAN, [2, 0, 0, 0, 0, 3])];
        let behind = behind.map(|(vlan, mac)| steer::Station { vlan, mac });
        let fdb = Fdb::new(ports).with_behind(&Arc::new(BridgeFdb::new(&behind)));
        let find = |vlan, mac| fdb.find(FdbKey::new(vlan, mac));
        assert_eq!(find(0, port), Destination::Port(PortNumber(0)));
        assert_eq!(find(7, other), Destination::Host);
        assert_eq!(find(0, other), Destination::Unknown);
        for vlan in [0, 7] {
            assert_eq!(find(vlan, [2, 0, 0, 0, 0, 3]), Destination::Host);
        }
        // A guest may move from there to a port.
        assert!(fdb.is_free(FdbKey::new(7, other)));
    }

    #[test]
    fn multicast_is_one_bit_of_the_address() {
        let fdb = Fdb::default();
        for first in 0..=255u8 {
            let mac = [first, 0xff, 0xff, 0xff, 0xff, 0xff];
            let found = fdb.find(FdbKey::new(5, mac));
            assert_eq!(found == Destination::Multicast, first & 1 == 1, "{first:#x}");
        }
    }
}
