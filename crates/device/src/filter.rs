//! Which frames a guest accepts, set by the control queue (VirtIO 1.3, 5.1.6.5.1 to 5.1.6.5.3).
//!
//! Only the guest's own choice, not a security boundary: the network decides before which frames a guest may get.

use packet::ethernet::ADDRESS_BYTES;
pub use packet::ethernet::Mac;
use packet::{ethertype, word};

/// Whether an address can be a device's own: unicast, and not zero.
pub(crate) fn is_unicast(mac: Mac) -> bool {
    mac[0] & 1 == 0 && mac != [0; 6]
}

/// Maximum number of addresses of each kind. If a driver sets more, all of that kind are accepted, as the
/// specification suggests.
pub const MOST_ADDRESSES: usize = 64;

/// VLAN IDs are below this.
pub(crate) const VLANS: u16 = 4096;

/// One bit for each VLAN.
type Vlans = [u64; 64];

/// Modes set by the class VIRTIO_NET_CTRL_RX; initially all are off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RxModes {
    /// Accepts everything.
    pub promiscuous: bool,
    /// Accepts all multicast.
    pub all_multicast: bool,
    /// Accepts all unicast.
    pub all_unicast: bool,
    /// Accepts no multicast, except for broadcast.
    pub no_multicast: bool,
    /// Accepts no unicast.
    pub no_unicast: bool,
    /// Accepts no broadcast.
    pub no_broadcast: bool,
}

/// Addresses of one kind besides the device's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Addresses {
    list: Vec<Mac>,
    /// The driver set more than are kept: all are accepted.
    all: bool,
}

impl Addresses {
    /// Adds an address, if there is room.
    pub(crate) fn add(&mut self, address: Mac) {
        if self.list.len() < MOST_ADDRESSES {
            self.list.push(address);
        } else {
            self.all = true;
        }
    }

    /// Records that there are more addresses, which are not kept.
    pub(crate) fn add_more(&mut self) {
        self.all = true;
    }

    /// The kept addresses.
    #[must_use]
    pub fn list(&self) -> &[Mac] {
        &self.list
    }

    /// Whether the driver set more, so that all are accepted.
    #[must_use]
    pub fn is_beyond(&self) -> bool {
        self.all
    }

    #[inline]
    fn has(&self, address: Mac) -> bool {
        self.all || self.list.contains(&address)
    }
}

/// The MAC filtering table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MacTable {
    /// The first list: unicast.
    pub unicast: Addresses,
    /// The second: multicast.
    pub multicast: Addresses,
}

/// VLANs that are accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VlanTable(Box<Vlans>);

impl Default for VlanTable {
    /// None.
    fn default() -> Self {
        Self(Box::new([0; 64]))
    }
}

impl VlanTable {
    /// Starts or stops accepting a VLAN. Returns false, and does nothing, if there is no such VLAN.
    #[must_use]
    pub fn set(&mut self, vlan: u16, on: bool) -> bool {
        let Some(word) = self.0.get_mut(usize::from(vlan / 64)) else {
            return false;
        };
        let bit = 1 << (vlan % 64);
        *word = if on { *word | bit } else { *word & !bit };
        true
    }

    /// Whether a VLAN is accepted.
    #[inline]
    #[must_use]
    pub fn has(&self, vlan: u16) -> bool {
        let word = self.0.get(usize::from(vlan / 64));
        word.is_some_and(|word| word >> (vlan % 64) & 1 != 0)
    }
}

/// The filter that is applied to each frame.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// `None`: the driver cannot set a filter (no VIRTIO_NET_F_CTRL_RX), and gets all frames.
    pub(crate) by_address: Option<ByAddress>,
    /// `None`: no VIRTIO_NET_F_CTRL_VLAN.
    pub(crate) vlans: Option<VlanTable>,
}

/// The filter by address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ByAddress {
    pub(crate) modes: RxModes,
    pub(crate) mac: Mac,
    pub(crate) table: MacTable,
}

impl Filter {
    /// Whether a frame with this head is accepted. Frames too short for an Ethernet header pass.
    #[inline]
    #[must_use]
    pub fn accepts(&self, head: &[u8]) -> bool {
        let Some(destination) = head.first_chunk::<6>() else {
            return true;
        };
        match &self.by_address {
            Some(by_address) if by_address.modes.promiscuous => true,
            Some(by_address) => self.accepts_vlan(head) && by_address.accepts(*destination),
            None => self.accepts_vlan(head),
        }
    }

    #[inline]
    fn accepts_vlan(&self, head: &[u8]) -> bool {
        match (
            &self.vlans,
            word(head, ADDRESS_BYTES),
            word(head, ADDRESS_BYTES + 2),
        ) {
            (Some(vlans), Some(ethertype::VLAN), Some(tag)) => vlans.has(tag & 0xfff),
            _ => true,
        }
    }
}

impl ByAddress {
    #[inline]
    fn accepts(&self, destination: Mac) -> bool {
        let modes = &self.modes;
        if destination == [0xff; 6] {
            return !modes.no_broadcast;
        }
        if destination[0] & 1 != 0 {
            return !modes.no_multicast && (modes.all_multicast || self.table.multicast.has(destination));
        }
        !modes.no_unicast
            && (destination == self.mac || modes.all_unicast || self.table.unicast.has(destination))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 1];
    const OTHER: Mac = [2, 0, 0, 0, 0, 9];
    const GROUP: Mac = [0x33, 0x33, 0, 0, 0, 1];
    const BROADCAST: Mac = [0xff; 6];

    /// Which of the four are accepted: own, other unicast, multicast, broadcast.
    fn accepted(modes: RxModes, table: &MacTable) -> [bool; 4] {
        let filter = Filter {
            by_address: Some(ByAddress {
                modes,
                mac: MAC,
                table: table.clone(),
            }),
            vlans: None,
        };
        [MAC, OTHER, GROUP, BROADCAST].map(|to| filter.accepts(&[&to[..], &OTHER, &[8, 0]].concat()))
    }

    #[test]
    fn each_mode_does_what_its_name_says_and_promiscuous_wins() {
        let none = MacTable::default();
        let modes = |change: fn(&mut RxModes)| {
            let mut modes = RxModes::default();
            change(&mut modes);
            modes
        };
        let at = |change| accepted(modes(change), &none);
        assert_eq!(at(|_| ()), [true, false, false, true]);
        assert_eq!(at(|modes| modes.promiscuous = true), [true; 4]);
        assert_eq!(at(|modes| modes.all_multicast = true), [true, false, true, true]);
        assert_eq!(at(|modes| modes.all_unicast = true), [true, true, false, true]);
        assert_eq!(at(|modes| modes.no_unicast = true), [false, false, false, true]);
        assert_eq!(at(|modes| modes.no_broadcast = true), [true, false, false, false]);
        let silent = |modes: &mut RxModes| {
            (modes.no_multicast, modes.no_unicast, modes.no_broadcast) = (true, true, true);
            (modes.all_multicast, modes.all_unicast) = (true, true);
        };
        assert_eq!(at(silent), [false; 4]);
        let mut all = modes(silent);
        all.promiscuous = true;
        assert_eq!(accepted(all, &none), [true; 4]);
    }

    #[test]
    fn table_lets_its_addresses_through_and_all_of_a_kind_that_is_too_many() {
        let mut table = MacTable::default();
        table.unicast.add(OTHER);
        assert_eq!(accepted(RxModes::default(), &table), [true, true, false, true]);
        table.multicast.add(GROUP);
        assert_eq!(accepted(RxModes::default(), &table), [true; 4]);
        let mut table = MacTable::default();
        for last in 0..=MOST_ADDRESSES {
            assert!(!table.multicast.is_beyond());
            table.multicast.add([1, 0, 0, 0, 0, last as u8]);
        }
        assert_eq!(table.multicast.list().len(), MOST_ADDRESSES);
        assert_eq!(accepted(RxModes::default(), &table), [true, false, true, true]);
        let silent = RxModes {
            no_multicast: true,
            ..RxModes::default()
        };
        assert_eq!(accepted(silent, &table), [true, false, false, true]);
    }

    #[test]
    fn tagged_frames_are_let_through_by_their_vlan_and_others_untouched() {
        let mut filter = Filter::default();
        let frame = |tag: &[u8]| [&BROADCAST[..], &OTHER, tag, &[8, 0]].concat();
        assert!(filter.accepts(&frame(&[0x81, 0, 0x20, 7])), "no table");
        let mut vlans = VlanTable::default();
        assert!(vlans.set(7, true) && vlans.set(4095, true) && !vlans.set(4096, true));
        filter.vlans = Some(vlans.clone());
        let accepts = |tag: &[u8]| filter.accepts(&frame(tag));
        assert!(accepts(&[]) && accepts(&[0x81, 0, 0x20, 7]) && accepts(&[0x81, 0, 0xff, 0xff]));
        assert!(!accepts(&[0x81, 0, 0, 8]) && !accepts(&[0x81, 0, 0, 0]));
        assert!(vlans.set(7, false) && !vlans.has(7) && vlans.has(4095));
        assert!(filter.accepts(&[]) && filter.accepts(&frame(&[0x81, 0])[..15]));
    }
}
