//! Tap devices that join a network with the host, or with the wire where no XDP program is on the interface
//! (`steer::TapAccess`). A guest without a network has such a device, too, in tap mode: here, "network" includes its
//! lease.
//!
//! A lessee of a network asks for one by [`Request::Host`](steward_protocol::Request::Host) or
//! [`Request::Uplink`](steward_protocol::Request::Uplink). The steward makes the device and attaches programs that move
//! frames between it and the network's interface. Only the lessee has the device's descriptors: the device ends with
//! the lessee, and survives the steward. It ends with the lease of the network, too.
//!
//! After a steward died, the next one finds the devices by their aliases, and the programs by their pins, which are
//! next to those of the interface's program. It keeps devices and programs of leases that are still held, and removes
//! all others.

use std::time::{Duration, Instant};

use steer::{Mode, TapTo, mac_text};

use crate::server::connections::connection::{Held, Reply, lessees};
use crate::server::connections::limits::DeviceChange;
use crate::server::interface::Interface;
use crate::server::taps::network_tap::{NetworkTap, TapAt, may_have_taps, network_at, user_of, words};
use crate::server::taps::tap::{Purpose, Tap};
use crate::server::{Answered, Server, no_lease};
use steward_protocol::{AddressChange, Answer, Reason, Refusal};

/// The network has no tap to the host.
pub(super) fn no_host() -> Refusal {
    Reason::Lease.because("this network does not reach the host: ask for that first")
}

/// Pause between two checks whether programs are attached: three short system calls for each tap.
const PROGRAMS_PAUSE: Duration = Duration::from_secs(1);

impl Server {
    /// Answers the lessee of a lease in tap mode that asks for its tap, of so many queues.
    pub(crate) fn uplink_tap(&mut self, number: u64, has: u32, queues: u32) -> Answered {
        let leased = self.held_lease(number)?.wanted.queues;
        if queues > leased {
            return Reason::Lease.refuse(format!(
                "a tap of {queues} queues for a lease of {leased}: ask for no more, or for a larger lease"
            ));
        }
        self.network_tap(number, TapTo::Uplink, has, queues as usize)
    }

    /// Answers the lessee of a network that asks for its tap to the host or to the wire. `queues`: of a device that is
    /// made for this.
    pub(crate) fn network_tap(&mut self, number: u64, to: TapTo, has: u32, queues: usize) -> Answered {
        let held = match to {
            TapTo::Host => self.held_network(number)?,
            TapTo::Uplink => self.held_lease(number)?,
        };
        let network = network_at(&held);
        let at = (network, to);
        self.lessee_mut(number)?.1.look_at_host();
        let interface = self.interfaces.get(&held.interface).ok_or_else(no_lease)?;
        let mode = interface.program()?.mode();
        if to == TapTo::Host {
            self.policy.check_host(held.rule)?;
        }
        match mode {
            Mode::Tap => self.check_tap_mode(number, &held, interface)?,
            _ if to == TapTo::Host => {}
            _ => {
                return Reason::Program.refuse(format!(
                    "frames of {} come by an XDP program in {mode} mode, not by a tap",
                    interface.name()
                ));
            }
        }
        let purpose = Purpose::Joins(to);
        let device = || Tap::new(purpose, interface.name(), interface.link.index, network.1);
        let tap = self
            .network_taps
            .entry(at)
            .or_insert_with(|| NetworkTap::new(device(), to, user_of(&held.wanted)));
        let (uid, changes) = (self.connections[&number].peer.uid, &mut self.device_changes);
        let may_make = || changes.take(DeviceChange::NetworkTap, (interface.name(), uid), Instant::now());
        let given = tap.give(interface, (has, queues), &mut self.removals, may_make);
        let link = interface.link.clone();
        self.look_at_stale_bridges(Instant::now());
        match given {
            Ok((device, files)) => {
                let tap = self.network_taps.get(&at).ok_or_else(no_lease)?;
                if !files.is_empty() && self.leases.may_log(uid) {
                    let (interface, tap) = (&link.name, &device.name);
                    tracing::info!(interface, tap, queues = files.len(), "joined with {}", words(to));
                }
                Ok(Reply::with(Answer::Host(tap.end_at(device)), files))
            }
            // It asks too often: what there is stays.
            Err(refusal) if refusal.reason == Reason::Limit => Err(refusal),
            Err(Refusal { reason, text: why }) => {
                // The answer has the reason. A notification besides would make the lessee ask again at once.
                self.take_network_tap_back(at);
                reason.refuse(format!("{} cannot be joined with a network: {why}", link.name))
            }
        }
    }

    /// Changes the addresses that a network advertises.
    pub(crate) fn advertise(&mut self, number: u64, changes: &[AddressChange]) -> Answered {
        let held = self.held_network(number)?;
        let interface = self.interfaces.get(&held.interface).ok_or_else(no_lease)?;
        for change in changes.iter().filter(|change| change.is_added) {
            self.policy.check_advertised(held.rule, change.ip)?;
            let mut stations = interface.stations(held.wanted.start_queue);
            if !stations.any(|station| station == change.station) {
                let mac = mac_text(change.station.mac);
                return Reason::Lease.refuse(format!(
                    "{mac} is no station of this network: it was rejected, or another lease has it"
                ));
            }
        }
        let tap = self.network_taps.get_mut(&(network_at(&held), TapTo::Host));
        let advertised = tap.ok_or_else(no_host)?.advertise(interface, changes);
        advertised.map_err(|why| Reason::Kernel.because(why))?;
        Ok(Answer::Done.into())
    }

    /// Ends taps to the wire of interfaces that have an XDP program now: it has the frames first, and leases go by it.
    pub(crate) fn end_taps_without_tap_mode(&mut self) {
        self.end_network_taps(|server, ((at, _), to)| {
            let mode = server.interfaces.get(&at).and_then(Interface::mode);
            to == TapTo::Uplink && mode.is_some_and(|mode| mode != Mode::Tap)
        });
    }

    /// Checks all taps again, and notifies lessees of changes.
    pub(crate) fn look_at_network_taps(&mut self) {
        self.end_taps_without_tap_mode();
        for (&(at, _), tap) in &mut self.network_taps {
            let Some(interface) = self.interfaces.get(&at.0) else {
                continue;
            };
            let (is_other, is_other_behind) = tap.look_again(interface);
            for lessee in lessees(&mut self.connections, |held| network_at(held) == at) {
                lessee.dirty |= is_other;
                lessee.other_behind |= is_other_behind;
            }
        }
        // Its lessee asks for another one, and advertises all addresses again.
        self.end_network_taps(|server, at| {
            let tap = server.network_taps.get(&at);
            let interface = server.interfaces.get(&at.0.0);
            tap.zip(interface)
                .is_some_and(|(tap, interface)| tap.advertises_elsewhere(interface))
        });
        self.renew_advertised(Instant::now());
    }

    /// Checks whether programs were detached, and attaches them again. The kernel sends no notification of that.
    pub(crate) fn look_at_tap_programs(&mut self, now: Instant) {
        if now < self.tap_programs_due {
            return;
        }
        self.tap_programs_due = now + PROGRAMS_PAUSE;
        if self.network_taps.values().any(NetworkTap::has_detached_program) {
            self.look_at_network_taps();
        }
    }

    /// Ends the taps of networks for which `is_over` returns true.
    pub(crate) fn end_network_taps(&mut self, is_over: impl Fn(&Self, TapAt) -> bool) {
        let all = self.network_taps.keys().copied();
        let over: Vec<_> = all.filter(|&at| is_over(self, at)).collect();
        over.into_iter().for_each(|at| self.end_network_tap(at));
    }

    /// Ends a tap of a network, with its lease or by the policy.
    pub(crate) fn end_network_tap(&mut self, at: TapAt) {
        if !self.take_network_tap_back(at) {
            return;
        }
        // The lessee asks again, and is told why. Others ask again, too: they may have been refused because of this
        // tap.
        let ((network, to), taps) = (at, &self.network_taps);
        let may_have_one = |held: &Held| {
            let lacks_it = held.interface == network.0 && !taps.contains_key(&(network_at(held), to));
            network_at(held) == network || (to == TapTo::Uplink && may_have_taps(&held.wanted) && lacks_it)
        };
        lessees(&mut self.connections, may_have_one).for_each(|lessee| lessee.dirty = true);
    }

    /// The same without notifying lessees; whether there was such a tap.
    fn take_network_tap_back(&mut self, at: TapAt) -> bool {
        let Some(ended) = self.network_taps.remove(&at) else {
            return false;
        };
        let device = ended.end(self.interfaces.get(&at.0.0));
        self.removals.begin(&device);
        true
    }
}
