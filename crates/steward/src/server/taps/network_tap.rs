//! One tap device that joins a network with the host, or with the wire where no XDP program is on the interface
//! (`steer::TapAccess`): made, joined, repaired, and taken back.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use steer::{Hook, ModeRequest, TapAccess, TapDevice, TapTo, TapUser, detach_tap, with_sources};

use crate::server::connections::connection::Held;
use crate::server::interface::Interface;
use crate::server::journal::file::may_crash;
use crate::server::taps::bridge_entries::BridgeEntries;
use crate::server::taps::removals::Removals;
use crate::server::taps::tap::{NewTap, Purpose, Tap};
use host::links::Link;
use host::links::bridge::BridgeFdb;
use host::links::bridge_ports::BridgePorts;
use program::backoff::Retry;
use steward_protocol::{AddressChange, ENTRIES_MAX, HostEnd, Reason, Refusal, Wanted};

/// A network: its interface's number, and its first queue.
pub(crate) type NetworkAt = (u64, u32);
/// A network, and where its tap leads.
pub(crate) type TapAt = (NetworkAt, TapTo);

/// A tap that joins a network with the host or with the wire.
#[derive(Debug)]
pub(crate) struct NetworkTap {
    pub(super) tap: Tap,
    to: TapTo,
    user: TapUser,
    /// See [`HostEnd::cuts_udp`].
    cuts_udp: bool,
    joined: Option<Joined>,
    /// Addresses of the host; none if the tap leads to the wire.
    macs: Vec<[u8; 6]>,
    /// Stations behind the bridge that the interface is part of; none if the tap leads to the wire.
    pub(super) behind: BridgeFdb,
    /// Addresses that the network advertises by that bridge.
    pub(in crate::server) advertised: BridgeEntries,
    /// Why tap and interface are not joined, as logged; empty: they are joined.
    why: String,
    /// Pauses between attempts to join them; the state is both ends and the MTU.
    retry: Retry<(Between, u32)>,
}

#[derive(Debug)]
struct Joined {
    access: TapAccess,
    between: Between,
}

/// The two ends that are joined, and the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Between {
    /// The kernel's id of the program that knows the stations.
    program: u32,
    /// Indexes.
    uplink: u32,
    tap: u32,
}

impl Between {
    /// As they are now.
    /// Errors: in words.
    fn of(interface: &Interface, device: &Link) -> Result<Self, String> {
        Ok(Self {
            program: interface.program().map_err(|refusal| refusal.text)?.number(),
            uplink: interface.link.index,
            tap: device.index,
        })
    }
}

/// Whether a lease may have taps: it is of a network, or of a guest that is alone on its queues in tap mode.
pub(crate) fn may_have_taps(wanted: &Wanted) -> bool {
    wanted.network || wanted.mode == ModeRequest::Tap
}

/// The queues or the network whose frames the taps of a lease carry.
pub(super) fn user_of(wanted: &Wanted) -> TapUser {
    let (first, count) = (wanted.start_queue, wanted.queues);
    match wanted.network {
        true => TapUser::Network(first),
        false => TapUser::Queues { first, count },
    }
}

pub(crate) fn network_at(held: &Held) -> NetworkAt {
    (held.interface, held.wanted.start_queue)
}

impl NetworkTap {
    pub(super) fn new(tap: Tap, to: TapTo, user: TapUser) -> Self {
        Self {
            tap,
            to,
            user,
            cuts_udp: false,
            joined: None,
            macs: Vec::new(),
            behind: BridgeFdb::default(),
            advertised: BridgeEntries::default(),
            why: String::new(),
            retry: Retry::default(),
        }
    }

    /// The device, if it is there.
    /// Errors: in words.
    fn device(&self) -> Result<Option<Link>, String> {
        Link::find_by_name(&self.tap.name).map_err(with_sources)
    }

    /// Ensures that there is a device whose descriptors the lessee has. `has`: index of the device whose descriptors it
    /// has now. Returns descriptors if the device is a new one, of so many `queues`. `may_make`: whether a device may
    /// be made now.
    pub(super) fn give(
        &mut self,
        interface: &Interface,
        (has, queues): (u32, usize),
        removals: &mut Removals,
        may_make: impl FnOnce() -> Result<(), Refusal>,
    ) -> Result<(Link, Vec<OwnedFd>), Refusal> {
        let name = &self.tap.name;
        let failed = |why: String| Reason::Kernel.because(why);
        let there = self.device().map_err(failed)?;
        let known = there.clone().filter(|device| device.index == has);
        let made = match there {
            Some(device) if device.index == has => Vec::new(),
            there => {
                may_make()?;
                if there.is_some() {
                    removals.make_room(&self.tap).map_err(failed)?;
                }
                let made = self.tap.make(queues, Tap::mtu_for(interface.link.mtu));
                let NewTap {
                    descriptors,
                    cuts_udp,
                } = made.map_err(|error| {
                    failed(format!(
                        "cannot make the tap device {name} (by /dev/net/tun): {error}"
                    ))
                })?;
                may_crash("made");
                self.cuts_udp = cuts_udp;
                // How often devices are made has a limit of its own.
                self.retry = Retry::default();
                descriptors
            }
        };
        // What it has is looked at when it changes.
        if !made.is_empty() || self.joined.is_none() {
            self.look_at_links(interface);
        }
        match (self.look(interface), known) {
            (Ok(Some(device)), _) => Ok((device, made)),
            (Ok(None), _) => Err(failed(format!("{} is gone again", self.tap.name))),
            // Another MTU is tried again later: until then frames pass as before.
            (Err(why), Some(device)) if self.joins(interface, &device) => {
                self.why = why;
                Ok((device, made))
            }
            (Err(why), _) => Err(failed(why)),
        }
    }

    /// Whether frames pass between the device and the interface as they are now.
    fn joins(&self, interface: &Interface, device: &Link) -> bool {
        let joined = self.joined.as_ref();
        let is_same = |joined: &Joined| Between::of(interface, device).is_ok_and(|now| now == joined.between);
        device.up && joined.is_some_and(is_same)
    }

    /// Reads the host's addresses, and the bridges that the interface is part of.
    fn look_at_links(&mut self, interface: &Interface) {
        if self.to != TapTo::Host {
            return;
        }
        let uplink = &interface.link;
        let others = interface.of_host.iter().filter(|&&mac| mac != uplink.mac);
        let all = interface.of_host.get(&uplink.mac).into_iter().chain(others);
        self.macs = all.take(ENTRIES_MAX).copied().collect();
        if let Err(error) = self.behind.look_at_links(uplink, &self.tap.name) {
            tracing::debug!(interface = uplink.name, "cannot ask for bridges: {error}");
        }
    }

    /// Repairs what does not fit the interface as it is now; `None`: the device is gone.
    /// Errors: in words.
    fn look(&mut self, interface: &Interface) -> Result<Option<Link>, String> {
        let uplink = &interface.link;
        let Some(device) = self.device()? else {
            return Ok(None);
        };
        let between = Between::of(interface, &device)?;
        if let Some(joined) = &self.joined
            && !joined.access.is_attached()
        {
            // Without its programs the host's stack would take what guests send.
            let _ = self.tap.set_up(false);
            self.joined = None;
            tracing::warn!(
                tap = self.tap.name,
                "another program has detached a program that joins it"
            );
        }
        let joined = self.joined.as_ref().map(|joined| joined.between);
        // While it is down the kernel drops all that the programs redirect to it.
        let is_whole = device.up && device.mtu == Tap::mtu_for(uplink.mtu);
        if joined == Some(between) && is_whole && !self.is_unfinished() {
            return Ok(Some(device));
        }
        let now = Instant::now();
        if !self.retry.is_due((between, uplink.mtu), false, now) {
            return Err(match self.why.is_empty() {
                true => "the interface or the tap changes too often: the steward tries again in a second"
                    .to_owned(),
                false => self.why.clone(),
            });
        }
        let done = self.join(interface, &device, between);
        self.retry.record(done.is_ok(), now);
        match done {
            // It was removed with its lessee meanwhile.
            Err(_) if matches!(self.device(), Ok(None)) => Ok(None),
            done => done.map(|()| Some(device)),
        }
    }

    /// Makes what is missing between the device and the interface.
    /// Errors: in words.
    fn join(&mut self, interface: &Interface, device: &Link, between: Between) -> Result<(), String> {
        let mtu = Tap::mtu_for(interface.link.mtu);
        if device.mtu != mtu {
            let set = self.tap.set_mtu(mtu, device.mtu);
            set.map_err(|error| format!("cannot set the MTU of {}: {error}", self.tap.name))?;
        }
        if self.joined.as_ref().map(|joined| joined.between) != Some(between) {
            self.attach(interface, device.mac, between)?;
        }
        // Not before: only the program may take the tap's frames.
        let up = self.tap.set_up(true);
        up.map_err(|error| format!("cannot set {} up: {error}", self.tap.name))
    }

    fn attach(&mut self, interface: &Interface, mac: [u8; 6], between: Between) -> Result<(), String> {
        let program = interface.program().map_err(|refusal| refusal.text)?;
        // A filter of its own would be taken for the next one's.
        self.joined = None;
        let index = between.tap;
        let ends = (between.uplink, TapDevice { index, mac });
        let access = TapAccess::attach(program, self.to, self.user, ends, Hook::Best);
        let mut access = access.map_err(with_sources)?;
        may_crash("joined");
        if let Some(pins) = interface.pins()
            && let Err(error) = access.pin(pins)
        {
            tracing::warn!(
                tap = self.tap.name,
                "the programs that join it will not outlive this process: {}: {error}",
                pins.display()
            );
        }
        self.joined = Some(Joined { access, between });
        self.set_wire(interface);
        Ok(())
    }

    /// The interface is gone. It may have gone to another network namespace, with the programs, and there another
    /// device may have the tap's index.
    fn part(&mut self, pins: Option<&Path>) {
        let Some(joined) = self.joined.take() else { return };
        // Without its programs the host's stack would take what guests send.
        let _ = self.tap.set_up(false);
        if let Err(error) = joined.access.detach(pins) {
            tracing::error!("cannot detach the programs that join {}: {error}", self.tap.name);
        }
    }

    /// Looks at everything again. Returns whether the host's end changed for the lessee, and what is behind its bridge.
    pub(super) fn look_again(&mut self, interface: &Interface) -> (bool, bool) {
        let (macs, was_joined, behind) = (self.macs.clone(), self.joined.is_some(), self.behind.changes());
        if interface.link.index == 0 {
            self.part(interface.pins());
        }
        let (mut is_lost, mut why) = (false, String::new());
        // Without a program it is looked at again when the interface is back.
        if interface.program().is_ok() {
            self.look_at_links(interface);
            match self.look(interface) {
                Ok(Some(_)) => {}
                Ok(None) => {
                    self.joined = None;
                    is_lost = was_joined;
                }
                Err(error) => why = error,
            }
        }
        if !why.is_empty() && why != self.why {
            let (interface, to) = (&interface.link.name, words(self.to));
            tracing::error!(interface, "not joined with {to}: {why}");
        }
        self.why = why;
        self.set_wire(interface);
        (is_lost || self.macs != macs, self.behind.changes() != behind)
    }

    /// The answer to its lessee about this device.
    pub(super) fn end_at(&self, device: Link) -> HostEnd {
        HostEnd {
            interface: device.name,
            index: device.index,
            cuts_udp: self.cuts_udp,
            macs: self.macs.clone(),
            bridge: self.behind.bridge().to_owned(),
            behind: count(self.behind.count()),
            left_out: count(self.behind.left_out()),
        }
    }

    /// Changes the addresses that the network advertises.
    /// Errors: in words, with the remedy.
    pub(super) fn advertise(
        &mut self,
        interface: &Interface,
        changes: &[AddressChange],
    ) -> Result<(), String> {
        for change in changes.iter().filter(|change| !change.is_added) {
            self.advertised.withdraw(change.station.mac, change.ip);
        }
        let mut added = changes.iter().filter(|change| change.is_added).peekable();
        if added.peek().is_none() {
            return Ok(());
        }
        let (_, at) = BridgePorts::of(&self.behind, &interface.link, &self.tap.name)?;
        let begun = self.advertised.begin(&self.tap, at);
        begun.map_err(|error| format!("{} cannot be made a port of the bridge: {error}", self.tap.name))?;
        self.set_wire(interface);
        added.try_for_each(|change| self.advertised.add(change.station.mac, change.ip))
    }

    /// Has the bridge get guests' questions ([`TapAccess::set_wire`]) while the tap is its port, and it sends them on.
    fn set_wire(&self, interface: &Interface) {
        let (Some(joined), Some(at)) = (&self.joined, self.advertised.at) else {
            return;
        };
        let is_up = || Link::by_index(at.bridge).is_some_and(|bridge| bridge.up);
        let gets_them = !self.advertises_elsewhere(interface) && is_up();
        let wire = Tap::new(
            Purpose::Joins(TapTo::Uplink),
            "",
            self.tap.ifindex(),
            self.tap.first,
        );
        let wire = Link::by_name(&wire.name).ok().filter(|_| gets_them);
        // An array has all of its keys.
        let _ = joined.access.set_wire(wire.map_or(0, |wire| wire.index));
    }

    /// Whether addresses are advertised at a place where that is not possible any more.
    pub(super) fn advertises_elsewhere(&self, interface: &Interface) -> bool {
        match self.advertised.at {
            Some(at) => BridgePorts::of(&self.behind, &interface.link, &self.tap.name) != Ok((true, at)),
            // An earlier steward has advertised addresses where that is not possible now.
            None => {
                self.to == TapTo::Host && matches!(self.device(), Ok(Some(device)) if device.master.is_some())
            }
        }
    }

    /// Continues to advertise what an earlier steward has advertised.
    pub(super) fn take_over_advertised(&mut self, interface: &Interface) {
        self.look_at_links(interface);
        let macs = interface.stations(self.tap.first).map(|station| station.mac);
        if let Ok((true, at)) = BridgePorts::of(&self.behind, &interface.link, &self.tap.name) {
            // If this fails, the tap ends, and its lessee asks for another one.
            let _ = self.advertised.take_over(&self.tap, at, macs);
        }
    }

    pub(super) fn has_detached_program(&self) -> bool {
        let joined = self.joined.as_ref();
        joined.is_some_and(|joined| joined.access.has_detached_link())
    }

    /// Whether something has to be tried again.
    pub(crate) fn is_unfinished(&self) -> bool {
        !self.why.is_empty()
    }

    /// Detaches the programs. The caller removes the device that this returns.
    pub(super) fn end(self, interface: Option<&Interface>) -> Tap {
        self.advertised.end();
        if let Some(joined) = &self.joined {
            // A bridge sends nothing of a port that is down.
            let _ = joined.access.set_wire(0);
        }
        // Nothing comes by it any more when the program is taken off.
        let _ = self.tap.set_up(false);
        let pins = interface.and_then(Interface::pins);
        let detached = match self.joined {
            Some(joined) => joined.access.detach(pins),
            None => {
                let uplink = interface.map_or(0, |interface| interface.link.index);
                detach_tap(pins, self.to, self.tap.first, uplink)
            }
        };
        may_crash("parted");
        if let Err(error) = detached {
            tracing::error!("cannot take {} back: {error}", self.tap.name);
        }
        // However that went, no device stays.
        self.tap
    }
}

/// Where a tap leads, in a sentence.
pub(super) fn words(to: TapTo) -> &'static str {
    match to {
        TapTo::Host => "the host",
        TapTo::Uplink => "the wire",
    }
}

fn count(of: usize) -> u32 {
    of.try_into().unwrap_or(u32::MAX)
}
