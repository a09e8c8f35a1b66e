//! The driver's state, set by the control queue. Commands change it ([`crate::control`]), the device uses it.

use crate::filter::{Mac, MacTable, RxModes, VlanTable};
use crate::hash::HashConfig;
use crate::offloads::Offloads;
use crate::receive::Steering;

/// The state that commands change.
#[derive(Debug, Clone)]
pub struct State {
    /// The address that the device was created with.
    pub(crate) first_mac: Mac,
    pub(crate) mac: Mac,
    pub(crate) announce: bool,
    pub(crate) modes: RxModes,
    pub(crate) macs: MacTable,
    pub(crate) vlans: VlanTable,
    /// Number of enabled pairs.
    pub(crate) pairs: u16,
    pub(crate) steering: Steering,
    pub(crate) hash: Option<HashConfig>,
    /// `None`: all that were negotiated.
    pub(crate) offloads: Option<Offloads>,
}

impl State {
    /// The state after a reset.
    pub(crate) fn new(mac: Mac) -> Self {
        Self {
            first_mac: mac,
            mac,
            announce: false,
            modes: RxModes::default(),
            macs: MacTable::default(),
            vlans: VlanTable::default(),
            pairs: 1,
            steering: Steering::FirstPair,
            hash: None,
            offloads: None,
        }
    }

    /// Resets the driver's state.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.first_mac);
    }

    /// The device's address, for the config space.
    #[must_use]
    pub fn mac(&self) -> Mac {
        self.mac
    }

    /// Whether the guest should announce itself, for the config space (VIRTIO_NET_S_ANNOUNCE).
    #[must_use]
    pub fn announce(&self) -> bool {
        self.announce
    }

    /// The number of enabled pairs, from the first one.
    #[must_use]
    pub fn pairs(&self) -> u16 {
        self.pairs
    }

    /// The hash types that the driver enabled, and the key. A NIC that can use this key saves the device the
    /// computation ([`crate::hash`]).
    #[must_use]
    pub fn hash(&self) -> Option<&HashConfig> {
        self.hash.as_ref()
    }

    /// The negotiated offloads, less those for the guest that the driver has disabled.
    pub(crate) fn offloads(&self, negotiated: Offloads) -> Offloads {
        let Some(on) = self.offloads else {
            return negotiated;
        };
        negotiated.without(negotiated.for_guest().without(on)).sound()
    }
}
