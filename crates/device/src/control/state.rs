//! What commands change of what a driver said, and what follows from it.

use std::sync::Arc;

use crate::config_space::HashLimits;
use crate::control::command::{Command, RssConfig};
use crate::control::{ControlQueue, MOST_TABLE_ENTRIES};
use crate::driver_state::State;
use crate::features::{F_CTRL_RX, F_CTRL_VLAN, F_HASH_REPORT, F_MQ, F_RSS};
use crate::filter::{Filter, Mac, Stations};
use crate::hash::nic::NicKey;
use crate::hash::toeplitz::KEY_BYTES;
use crate::hash::{HashTypes, Hashing};
use crate::net_device::{NetDevice, PairError};
use crate::receive::{Receive, Steering};

/// What a command changed, and the data path has to follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Which frames the guest wants: [`NetDevice::receive`].
    Filter,
    /// The device's address: the same, the config space, and the network's idea of who the guest is. Whether it may
    /// have that address is the caller's to say.
    Mac,
    /// How many pairs are on ([`State::pairs`], [`crate::pair::Vring::enabled`]), how frames find theirs, and their
    /// hashes: [`NetDevice::receive`].
    Steering,
    /// Offloads for the guest: [`NetDevice::negotiated`], and each pair's.
    Offloads,
    /// The guest has announced itself: the config space says so no more.
    Announced,
}

impl State {
    /// Does what is asked for; it was judged already.
    fn apply(&mut self, command: Command) -> Change {
        match command {
            Command::Mode(mode, on) => {
                *mode.of(&mut self.modes) = on;
                Change::Filter
            }
            Command::MacTable(table) => {
                self.macs = table;
                Change::Filter
            }
            Command::Mac(mac) => {
                self.mac = mac;
                Change::Mac
            }
            Command::Vlan(vlan, on) => {
                // There is such a VLAN: that was looked at.
                let _ = self.vlans.set(vlan, on);
                Change::Filter
            }
            Command::AnnounceAck => {
                self.announce = false;
                Change::Announced
            }
            Command::Pairs(pairs) => {
                self.pairs = pairs;
                self.steering = match pairs {
                    1 => Steering::FirstPair,
                    _ => Steering::Automatic,
                };
                Change::Steering
            }
            Command::Rss(config) => {
                self.apply_rss(config);
                Change::Steering
            }
            Command::Hash(config) => {
                self.hash = Some(config);
                Change::Steering
            }
            Command::Offloads(offloads) => {
                self.offloads = Some(offloads);
                Change::Offloads
            }
        }
    }

    fn apply_rss(&mut self, config: RssConfig) {
        let RssConfig {
            hash,
            table,
            send_pairs,
        } = config;
        let named = table.pairs.iter().chain([&table.unclassified]).max();
        self.pairs = send_pairs.max(named.map_or(0, |pair| pair + 1));
        self.steering = Steering::Table(Arc::new(table));
        self.hash = Some(hash);
    }

    /// What the data path works by.
    fn receive(&self, features: u64, nic: Option<&NicKey>) -> Receive {
        let has = |feature| features & feature != 0;
        let stations = has(F_CTRL_RX).then(|| Stations {
            modes: self.modes,
            mac: self.mac,
            table: self.macs.clone(),
        });
        let reports = has(F_HASH_REPORT);
        let steers = matches!(self.steering, Steering::Table(_));
        let hash = self.hash.as_ref().filter(|_| reports || steers);
        Receive {
            filter: Filter {
                stations,
                vlans: has(F_CTRL_VLAN).then(|| self.vlans.clone()),
            },
            steering: self.steering.clone(),
            hashing: hash.map(|hash| Hashing::new(hash, nic)),
            reports,
        }
    }
}

impl NetDevice {
    /// Serves its control queue itself, and has this address at first. Offers those of `features` that rest on that:
    /// [`crate::control::OFFERED`] has them all. Not for a vhost-user back end, whose VMM has that queue.
    #[must_use]
    pub fn with_control(mut self, mac: Mac, features: u64) -> Self {
        self.add_control(State::new(mac), features & super::OFFERED);
        self
    }

    /// What a driver said by the control queue; `None` where the VMM has it.
    #[must_use]
    pub fn control_state(&self) -> Option<&State> {
        self.control.as_ref()
    }

    /// Goes on with what the driver of another device said: that one's [`control_state`](Self::control_state), where a
    /// VM moves or is restored. After a reset the address is this device's own again. The data path follows as after a
    /// command. `false`, and nothing has changed: the VMM has the control queue, or the state is of a device with more
    /// pairs.
    #[must_use]
    pub fn restore_control(&mut self, state: &State) -> bool {
        let pairs = self.pairs();
        let Some(control) = &mut self.control else {
            return false;
        };
        let named = match &state.steering {
            Steering::Table(table) => table.pairs.iter().chain([&table.unclassified]).max(),
            Steering::FirstPair | Steering::Automatic => None,
        };
        if usize::from(state.pairs) > pairs || named.is_some_and(|&pair| usize::from(pair) >= pairs) {
            return false;
        }
        *control = State {
            first_mac: control.first_mac,
            ..state.clone()
        };
        self.switch_pairs(Change::Steering);
        true
    }

    /// The control queue's vring: behind those of all pairs that the driver can use (VirtIO 1.3, 5.1.2).
    #[must_use]
    pub fn control_index(&self) -> u32 {
        let multiqueue = self.features() & (F_MQ | F_RSS) != 0;
        let pairs = if multiqueue { self.pairs() } else { 1 };
        u32::try_from(pairs * 2).unwrap_or(u32::MAX)
    }

    /// Makes the control queue of a device whose vring for it is started.
    ///
    /// # Errors
    /// [`PairError`].
    pub fn control_queue(&self) -> Result<ControlQueue, PairError> {
        let memory = self.memory().ok_or(PairError::NoMemory)?;
        let vring = self.enter_control(self.control_index(), memory)?;
        Ok(ControlQueue::new(vring, memory, self.log().cloned()))
    }

    /// The control queue was stopped there; the next one goes on from there.
    ///
    /// # Errors
    /// [`crate::vring::VringError`].
    pub fn keep_control_base(&mut self, queue: &ControlQueue) -> Result<(), crate::vring::VringError> {
        self.set_base(self.control_index(), queue.vring.queue.base())
    }

    /// What the data path has to know of what the driver said. `nic`: the key of the NIC that frames come from, if that
    /// is known. Without a control queue: all frames come, as they are.
    #[must_use]
    pub fn receive(&self, nic: Option<&NicKey>) -> Receive {
        match &self.control {
            Some(state) => state.receive(self.features(), nic),
            None => Receive {
                filter: Filter::default(),
                steering: Steering::Automatic,
                hashing: None,
                reports: false,
            },
        }
    }

    /// Asks the guest to announce itself (VIRTIO_NET_F_GUEST_ANNOUNCE), by the config space, of whose change the caller
    /// tells it.
    pub fn announce(&mut self) {
        if let Some(state) = &mut self.control {
            state.announce = true;
        }
    }

    /// The limits that the config space of this device tells.
    #[must_use]
    pub fn hash_limits(&self) -> Option<HashLimits> {
        // KEY_BYTES is 40.
        #[allow(clippy::cast_possible_truncation)]
        let limits = HashLimits {
            key_bytes: KEY_BYTES as u8,
            table_entries: MOST_TABLE_ENTRIES,
            types: HashTypes::ALL,
        };
        (self.offered() & (F_RSS | F_HASH_REPORT) != 0).then_some(limits)
    }

    /// Does what a command says, unless `apply` cannot follow.
    pub(super) fn control(
        &mut self,
        command: Command,
        apply: &mut impl FnMut(&Self, Change) -> bool,
    ) -> bool {
        let Some(state) = &mut self.control else {
            return false;
        };
        let before = state.clone();
        let change = state.apply(command);
        self.switch_pairs(change);
        if apply(self, change) {
            return true;
        }
        self.control = Some(before);
        self.switch_pairs(change);
        false
    }

    /// Pairs are on as the driver said last.
    fn switch_pairs(&mut self, change: Change) {
        if change != Change::Steering {
            return;
        }
        let on = self.control.as_ref().map_or(0, State::pairs);
        for pair in 0..u32::try_from(self.pairs()).unwrap_or(0) {
            for vring in [pair * 2, pair * 2 + 1] {
                // Of a pair that there is.
                let _ = self.set_enabled(vring, pair < on.into());
            }
        }
    }
}
