//! How commands change the driver's state, and what the data path must update.

use std::sync::Arc;

use crate::config_space::HashLimits;
use crate::control::command::{Command, Refusal, RssConfig, Rules, RxMode};
use crate::control::{ControlQueue, MOST_TABLE_ENTRIES};
use crate::driver_state::State;
use crate::features::{F_CTRL_MAC_ADDR, F_CTRL_RX, F_CTRL_VLAN, F_HASH_REPORT, F_MQ, F_RSS};
use crate::filter::{ByAddress, Filter, Mac, MacTable, VLANS, is_unicast};
use crate::hash::nic::NicKey;
use crate::hash::toeplitz::KEY_BYTES;
use crate::hash::{HashTypes, Hashing};
use crate::net_device::{NetDevice, PairError};
use crate::receive::{Receive, Steering, Table};

/// What a command changed. The data path must update it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Which frames the guest wants: [`NetDevice::receive`].
    Filter,
    /// The device's address: [`NetDevice::receive`], the config space, and the guest's address in the
    /// network. The caller decides whether the guest may use that address.
    Mac,
    /// How many pairs are enabled ([`State::pairs`], [`crate::pair::Vring::enabled`]), which pair a frame
    /// goes to, and hashes: [`NetDevice::receive`].
    Steering,
    /// Offloads for the guest: [`NetDevice::negotiated`], and those of each pair.
    Offloads,
    /// The guest has announced itself: the config space no longer requests that.
    Announced,
}

/// Why a device cannot restore the driver's state of another one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RestoreError {
    /// Only a device created [with a control queue](NetDevice::with_control) has such a state.
    #[error("this device has no control queue of its own: its VMM serves it")]
    NoControlQueue,
    /// The rules for a driver's commands refuse it. `at`: its index; `begins`: its class and command.
    #[error("command {at} (from 0) of those that were saved, of class and command {begins:?}, is refused")]
    #[allow(missing_docs, reason = "fields are described above")]
    Refused {
        at: usize,
        begins: Vec<u8>,
        source: Refusal,
    },
}

impl State {
    /// The commands that set this state on a reset device, except for the announcement. `features` are
    /// negotiated.
    fn commands(&self, features: u64) -> Vec<Command> {
        let has = |feature| features & feature != 0;
        let mut modes = self.modes;
        let on = RxMode::ALL.into_iter().filter(|mode| *mode.of(&mut modes));
        let mut commands: Vec<_> = on.map(|mode| Command::Mode(mode, true)).collect();
        if self.macs != MacTable::default() {
            commands.push(Command::MacTable(self.macs.clone()));
        }
        if has(F_CTRL_MAC_ADDR) && is_unicast(self.mac) {
            commands.push(Command::Mac(self.mac));
        }
        let vlans = (0..VLANS).filter(|&vlan| self.vlans.has(vlan));
        commands.extend(vlans.map(|vlan| Command::Vlan(vlan, true)));
        commands.extend(self.hash_command(has(F_RSS)));
        // After RSS_CONFIG: the last of both decides (5.1.6.5.6).
        if has(F_MQ) && !matches!(self.steering, Steering::Table(_)) {
            commands.push(Command::Pairs(self.pairs));
        }
        commands.extend(self.offloads.map(Command::Offloads));
        commands
    }

    /// The command for types and key. With RSS they are sent with a table, even if VQ_PAIRS_SET has disabled RSS since.
    fn hash_command(&self, rss: bool) -> Option<Command> {
        let hash = self.hash.clone()?;
        if !rss {
            return Some(Command::Hash(hash));
        }
        let (table, send_pairs) = match &self.steering {
            Steering::Table(table) => (Table::clone(table), self.pairs),
            Steering::FirstPair | Steering::Automatic => (Table::first_pair(), 1),
        };
        Some(Command::Rss(RssConfig {
            hash,
            table,
            send_pairs,
        }))
    }

    /// Executes a command that was checked already.
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
                // The VLAN exists: the command was checked.
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

    /// The part of the state that the data path uses.
    fn receive(&self, features: u64, nic: Option<&NicKey>) -> Receive {
        let has = |feature| features & feature != 0;
        let by_address = has(F_CTRL_RX).then(|| ByAddress {
            modes: self.modes,
            mac: self.mac,
            table: self.macs.clone(),
        });
        let reports = has(F_HASH_REPORT);
        let steers = matches!(self.steering, Steering::Table(_));
        let hash = self.hash.as_ref().filter(|_| reports || steers);
        Receive {
            filter: Filter {
                by_address,
                vlans: has(F_CTRL_VLAN).then(|| self.vlans.clone()),
            },
            steering: self.steering.clone(),
            hashing: hash.map(|hash| Hashing::new(hash, nic)),
            reports,
        }
    }
}

impl NetDevice {
    /// A device that serves its control queue itself, with the initial address `mac`. Offers those of
    /// `features` that need that: see [`crate::control::OFFERED`].
    #[must_use]
    pub fn with_control(mut self, mac: Mac, features: u64) -> Self {
        self.add_control(State::new(mac), features & super::OFFERED, false);
        self
    }

    /// As [`with_control`](Self::with_control), for a vhost-user back end: the device serves the control queue if the
    /// front end acknowledges CTRL_VQ and sets the vring up. [`Self::acknowledge`] does not check what features need.
    #[must_use]
    pub fn with_passed_control(mut self, mac: Mac, features: u64) -> Self {
        self.add_control(State::new(mac), features & super::OFFERED, true);
        self
    }

    /// The driver's state, set by the control queue; `None` if the VMM serves the queue.
    #[must_use]
    pub fn control_state(&self) -> Option<&State> {
        self.control.as_ref()
    }

    /// The driver's state, to be saved: the commands that set it on a device that was reset. Each is in the
    /// form of a driver's buffers (VirtIO 1.3, 5.1.6.5): class and command, a byte each, and data, whose
    /// numbers are little-endian. There are at most 4096 of them for VLANs and eleven others, each of at most
    /// 1077 bytes. Empty if the VMM serves the control queue.
    ///
    /// Only commands that were negotiated are made, so [`features`](Self::features) must be saved with them. The
    /// device's address is among them if the driver may set it (VIRTIO_NET_F_CTRL_MAC_ADDR); otherwise create the other
    /// device with it. Whether the guest [should announce itself](Self::announce) is not part of it: the destination's
    /// VMM requests that.
    ///
    /// ```
    /// # use device::control::OFFERED;
    /// # use device::features::{F_CTRL_VLAN, F_CTRL_VQ, F_VERSION_1};
    /// # use device::net_device::NetDevice;
    /// # use device::offloads::Offloads;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let mac = [0x52, 0x54, 0, 0, 0, 1];
    /// # let mut device = NetDevice::new(1, Offloads::NONE).with_control(mac, OFFERED);
    /// # device.acknowledge(F_VERSION_1 | F_CTRL_VQ | F_CTRL_VLAN)?;
    /// let saved = (device.features(), device.control_commands());
    ///
    /// // In another process:
    /// let mut device = NetDevice::new(1, Offloads::NONE).with_control(mac, OFFERED);
    /// device.acknowledge(saved.0)?;
    /// device.restore_control(&saved.1)?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn control_commands(&self) -> Vec<Vec<u8>> {
        let commands = self
            .control
            .iter()
            .flat_map(|state| state.commands(self.features()));
        commands.map(|command| command.bytes()).collect()
    }

    /// Restores the driver's state of another device, in this process or another, from its
    /// [`control_commands`](Self::control_commands), when a VM is migrated or restored. They are checked like
    /// a driver's commands, so they may come from anywhere, and the other device's features have to be
    /// [acknowledged](Self::acknowledge) before. The earlier state of this device is lost; its original
    /// address remains the one after a reset. Update the data path as after each [`Change`].
    ///
    /// # Errors
    /// [`RestoreError`]; nothing has changed.
    pub fn restore_control<C: AsRef<[u8]>>(&mut self, commands: &[C]) -> Result<(), RestoreError> {
        let rules = Rules::of(self);
        let control = self.control.as_mut().ok_or(RestoreError::NoControlQueue)?;
        let mut restored = State {
            announce: control.announce,
            ..State::new(control.first_mac)
        };
        for (at, bytes) in commands.iter().map(C::as_ref).enumerate() {
            let command = Command::of_bytes(bytes, &rules).map_err(|source| RestoreError::Refused {
                at,
                begins: bytes.iter().take(2).copied().collect(),
                source,
            })?;
            restored.apply(command);
        }
        *control = restored;
        self.switch_pairs(Change::Steering);
        Ok(())
    }

    /// The control queue's vring: after those of all pairs that the driver can use (VirtIO 1.3, 5.1.2).
    #[must_use]
    pub fn control_index(&self) -> u32 {
        let multiqueue = self.features() & (F_MQ | F_RSS) != 0;
        let pairs = if multiqueue { self.pairs() } else { 1 };
        u32::try_from(pairs * 2).unwrap_or(u32::MAX)
    }

    /// Creates the control queue, whose vring must be started.
    ///
    /// # Errors
    /// [`PairError`].
    pub fn control_queue(&self) -> Result<ControlQueue, PairError> {
        let memory = self.memory().ok_or(PairError::NoMemory)?;
        let vring = self.enter_control(self.control_index(), memory)?;
        Ok(ControlQueue::new(vring, memory, self.log().cloned()))
    }

    /// Keeps the position of the stopped control queue, from which the next one continues.
    ///
    /// # Errors
    /// [`crate::vring::VringError`].
    pub fn keep_control_base(&mut self, queue: &ControlQueue) -> Result<(), crate::vring::VringError> {
        self.set_base(self.control_index(), queue.vring.queue.base())
    }

    /// The part of the driver's state that the data path uses. `nic`: the key of the NIC that receives the frames, if
    /// known. Without a control queue: all frames, unchanged.
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

    /// Makes the config space request an announcement (VIRTIO_NET_F_GUEST_ANNOUNCE); the caller notifies the guest of
    /// the change.
    pub fn announce(&mut self) {
        if let Some(state) = &mut self.control {
            state.announce = true;
        }
    }

    /// The limits in the config space of this device.
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

    /// Enables and disables pairs according to the driver's last command.
    fn switch_pairs(&mut self, change: Change) {
        if change != Change::Steering {
            return;
        }
        let on = self.control.as_ref().map_or(0, State::pairs);
        for pair in 0..u32::try_from(self.pairs()).unwrap_or(0) {
            for vring in [pair * 2, pair * 2 + 1] {
                // Cannot fail: the pair exists.
                let _ = self.set_enabled(vring, pair < on.into());
            }
        }
    }
}

impl AsMut<Self> for NetDevice {
    fn as_mut(&mut self) -> &mut Self {
        self
    }
}

/// Executes a command, unless `apply` fails.
pub(super) fn change<O: AsMut<NetDevice>>(
    owner: &mut O,
    command: Command,
    apply: &mut impl FnMut(&mut O, Change) -> bool,
) -> bool {
    let device = owner.as_mut();
    let Some(state) = &mut device.control else {
        return false;
    };
    let before = state.clone();
    let change = state.apply(command);
    device.switch_pairs(change);
    if apply(owner, change) {
        return true;
    }
    let device = owner.as_mut();
    device.control = Some(before);
    device.switch_pairs(change);
    false
}
