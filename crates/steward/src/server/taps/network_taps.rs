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

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use steer::{
    Hook, Mode, ModeRequest, Program, Station, TapAccess, TapDevice, TapTo, TapUser, detach_tap, pinned_taps,
    program_on, with_sources,
};

use crate::server::connections::connection::{Connection, Held, Reply};
use crate::server::connections::limits::DeviceChange;
use crate::server::interface::Interface;
use crate::server::journal::file::may_crash;
use crate::server::journal::state::Records;
use crate::server::leases::lease::LeaseRef;
use crate::server::taps::removals::Removals;
use crate::server::taps::tap::{NewTap, Purpose, Tap, all_taps};
use crate::server::{Answered, Server, no_lease};
use host::links::bridge::BridgeFdb;
use host::links::filters::{self, Filter};
use host::links::{Link, LinkError};
use program::backoff::Retry;
use steward_protocol::{Answer, CHANGES_MAX, ENTRIES_MAX, HostEnd, Reason, Refusal, Wanted};

/// Pause between two reads of bridges' forwarding databases, which others can change as often as they like.
const FDB_PAUSE: Duration = Duration::from_millis(100);
/// The pause after a read is this many times as long as the read.
const FDB_SHARE: u32 = 20;
/// Pause between two checks whether programs are attached: three short system calls for each tap.
const PROGRAMS_PAUSE: Duration = Duration::from_secs(1);

/// A network: its interface's number, and its first queue.
pub(crate) type NetworkAt = (u64, u32);
/// A network, and where its tap leads.
pub(crate) type TapAt = (NetworkAt, TapTo);

/// A tap that joins a network with the host or with the wire.
#[derive(Debug)]
pub(crate) struct NetworkTap {
    tap: Tap,
    to: TapTo,
    user: TapUser,
    /// See [`HostEnd::cuts_udp`].
    cuts_udp: bool,
    joined: Option<Joined>,
    /// Addresses of the host; none if the tap leads to the wire.
    macs: Vec<[u8; 6]>,
    /// Stations behind the bridge that the interface is part of; none if the tap leads to the wire.
    behind: BridgeFdb,
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
fn user_of(wanted: &Wanted) -> TapUser {
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
    fn new(tap: Tap, to: TapTo, user: TapUser) -> Self {
        Self {
            tap,
            to,
            user,
            cuts_udp: false,
            joined: None,
            macs: Vec::new(),
            behind: BridgeFdb::default(),
            why: String::new(),
            retry: Retry::default(),
        }
    }

    /// The device, if it is there.
    /// Errors: in words.
    fn device(&self) -> Result<Option<Link>, String> {
        match Link::by_name(&self.tap.name) {
            Ok(link) => Ok(Some(link)),
            Err(LinkError::Unknown(_)) => Ok(None),
            Err(error) => Err(with_sources(&error)),
        }
    }

    /// Ensures that there is a device whose descriptors the lessee has. `has`: index of the device whose descriptors it
    /// has now. Returns descriptors if the device is a new one, of so many `queues`. `may_make`: whether a device may
    /// be made now.
    fn give(
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
        if let Err(error) = self.behind.look_at_links(uplink) {
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
        let (program, mtu) = (
            interface.program().map_err(|refusal| refusal.text)?,
            Tap::mtu_for(interface.link.mtu),
        );
        if device.mtu != mtu {
            let set = self.tap.set_mtu(mtu, device.mtu);
            set.map_err(|error| format!("cannot set the MTU of {}: {error}", self.tap.name))?;
        }
        if self.joined.as_ref().map(|joined| joined.between) != Some(between) {
            self.attach(interface, program, (between, device.mac))?;
        }
        // Not before: only the program may take the tap's frames.
        let up = self.tap.set_up(true);
        up.map_err(|error| format!("cannot set {} up: {error}", self.tap.name))
    }

    fn attach(
        &mut self,
        interface: &Interface,
        program: &Program,
        (between, mac): (Between, [u8; 6]),
    ) -> Result<(), String> {
        // A filter of its own would be taken for the next one's.
        self.joined = None;
        let Between {
            uplink, tap: index, ..
        } = between;
        let ends = (uplink, TapDevice { index, mac });
        let access = TapAccess::attach(program, self.to, self.user, ends, Hook::Best);
        let mut access = access.map_err(|error| with_sources(&error))?;
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

    fn has_detached_program(&self) -> bool {
        let joined = self.joined.as_ref();
        joined.is_some_and(|joined| joined.access.has_detached_link())
    }

    /// Whether something has to be tried again.
    pub(crate) fn is_unfinished(&self) -> bool {
        !self.why.is_empty()
    }

    /// Detaches the programs. The caller removes the device that this returns.
    fn end(self, interface: Option<&Interface>) -> Tap {
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

impl Server {
    /// Answers the lessee of a lease in tap mode that asks for its tap, of so many queues. Without a lease the answer
    /// for several is `Done`, as the message is known.
    pub(crate) fn uplink_tap(&mut self, number: u64, has: u32, queues: u32) -> Answered {
        let connection = self.connections.get(&number).ok_or_else(no_lease)?;
        match &connection.held {
            None if queues > 1 => return Ok(Answer::Done.into()),
            Some(held) if queues > held.wanted.queues => {
                return Reason::Lease.refuse(format!(
                    "a tap of {queues} queues for a lease of {}: ask for no more, or for a larger lease",
                    held.wanted.queues
                ));
            }
            _ => {}
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
        let may_make = || changes.take(DeviceChange::NetworkTap, interface.name(), uid, Instant::now());
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
                let end = HostEnd {
                    interface: device.name,
                    index: device.index,
                    cuts_udp: tap.cuts_udp,
                    macs: tap.macs.clone(),
                    bridge: tap.behind.bridge().to_owned(),
                    behind: count(tap.behind.count()),
                    left_out: count(tap.behind.left_out()),
                };
                Ok(Reply::with(Answer::Host(end), files))
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

    /// Ends taps to the wire of interfaces that have an XDP program now: it has the frames first, and leases go by it.
    pub(crate) fn end_taps_without_tap_mode(&mut self) {
        let is_over = |&&((at, _), to): &&TapAt| {
            let interface = self.interfaces.get(&at);
            let mode = interface.and_then(Interface::mode);
            to == TapTo::Uplink && mode.is_some_and(|mode| mode != Mode::Tap)
        };
        let over: Vec<_> = self.network_taps.keys().filter(is_over).copied().collect();
        over.into_iter().for_each(|at| self.end_network_tap(at));
    }

    /// Checks all taps again, and notifies lessees of changes.
    pub(crate) fn look_at_network_taps(&mut self) {
        self.end_taps_without_tap_mode();
        for (&(at, to), tap) in &mut self.network_taps {
            let Some(interface) = self.interfaces.get(&at.0) else {
                continue;
            };
            let (macs, was_joined) = (tap.macs.clone(), tap.joined.is_some());
            let behind = tap.behind.changes();
            if interface.link.index == 0 {
                tap.part(interface.pins());
            }
            // It is looked at again when the interface is back.
            let looked: Result<bool, String> = interface.program().map_or(Ok(true), |_| {
                tap.look_at_links(interface);
                let is_there = tap.look(interface)?.is_some();
                if !is_there {
                    tap.joined = None;
                }
                Ok(is_there)
            });
            let is_lost = was_joined && matches!(looked, Ok(false));
            let why = looked.err().unwrap_or_default();
            if !why.is_empty() && why != tap.why {
                tracing::error!(
                    interface = interface.link.name,
                    "not joined with {}: {why}",
                    words(to)
                );
            }
            tap.why = why;
            let (is_other, is_other_behind) = (is_lost || tap.macs != macs, tap.behind.changes() != behind);
            for lessee in lessees(&mut self.connections, at) {
                lessee.dirty |= is_other;
                lessee.other_behind |= is_other_behind;
            }
        }
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

    /// Answers a lessee of a network with the stations behind the bridge that its interface is part of.
    pub(crate) fn behind(&self, number: u64, after: Station) -> Answered {
        let at = network_at(&self.held_network(number)?);
        let host = self.network_taps.get(&(at, TapTo::Host)).ok_or_else(|| {
            Reason::Lease.because("this network does not reach the host: ask for that first")
        })?;
        let stations = host.behind.after(after).take(CHANGES_MAX);
        Ok(Answer::Behind(stations.collect()).into())
    }

    /// Whether changes of bridges' forwarding databases are to be looked at now.
    pub(crate) fn watches_bridges(&self, now: Instant) -> bool {
        let mut taps = self.network_taps.values();
        self.fdb_pause <= now && taps.any(|tap| !tap.behind.bridge().is_empty())
    }

    /// Whether bridges' forwarding databases are to be read, whose bridges or ports are others than when they were.
    pub(crate) fn has_stale_bridges(&self) -> bool {
        self.network_taps.values().any(|tap| tap.behind.is_stale())
    }

    /// Reads bridges' forwarding databases if [some are stale](Self::has_stale_bridges), and the pause is over.
    pub(crate) fn look_at_stale_bridges(&mut self, now: Instant) {
        if self.fdb_pause <= now && self.has_stale_bridges() {
            self.look_behind_bridges();
        }
    }

    /// Looks at bridges' forwarding databases again, and notifies lessees of changes.
    pub(crate) fn look_behind_bridges(&mut self) {
        let begun = Instant::now();
        for (&(at, _), tap) in &mut self.network_taps {
            match tap.behind.look_at_fdb() {
                Ok(true) => {
                    lessees(&mut self.connections, at).for_each(|lessee| lessee.other_behind = true);
                }
                Ok(false) => {}
                Err(error) => tracing::debug!("cannot read the forwarding database of a bridge: {error}"),
            }
        }
        let now = Instant::now();
        self.fdb_pause = now + FDB_PAUSE.max(now.duration_since(begun) * FDB_SHARE);
    }

    /// Ends all taps of a network, with its lease.
    pub(crate) fn end_network_taps(&mut self, at: NetworkAt) {
        for to in TapTo::ALL {
            self.end_network_tap((at, to));
        }
    }

    /// Ends a tap of a network, with its lease or by the policy.
    pub(crate) fn end_network_tap(&mut self, at: TapAt) {
        if !self.take_network_tap_back(at) {
            return;
        }
        // The lessee asks again, and is told why. Others ask again, too: they may have been refused because of this
        // tap.
        let ((network, to), taps) = (at, &self.network_taps);
        for other in self.connections.values_mut() {
            let may_have_one = |held: &Held| {
                let lacks_it = held.interface == network.0 && !taps.contains_key(&(network_at(held), to));
                network_at(held) == network
                    || (to == TapTo::Uplink && may_have_taps(&held.wanted) && lacks_it)
            };
            other.dirty |= other.held.as_ref().is_some_and(may_have_one);
        }
    }

    /// The same without notifying lessees; whether there was such a tap.
    fn take_network_tap_back(&mut self, at: TapAt) -> bool {
        let ended = self.network_taps.remove(&at);
        let was_there = ended.is_some();
        if let Some(ended) = ended {
            let device = ended.end(self.interfaces.get(&at.0.0));
            self.removals.begin(&device);
        }
        was_there
    }

    /// Ends all taps, if the steward ends and has no successor.
    pub(crate) fn end_all_network_taps(&mut self) {
        for at in self.network_taps.keys().copied().collect::<Vec<_>>() {
            self.end_network_tap(at);
        }
    }

    /// Takes over devices of the previous steward for leases that may continue.
    pub(crate) fn adopt_network_taps(&mut self, records: &Records) {
        for tap in all_taps() {
            let Purpose::Joins(to) = tap.purpose else { continue };
            let interfaces = self.interfaces.iter();
            let mut uplink = interfaces
                .filter(|(_, interface)| interface.name() == tap.uplink)
                .map(|(&at, _)| at);
            let user = uplink.find_map(|at| {
                let mut leases = records.leases.iter().filter(|lease| lease.interface == at);
                let wants = |wanted: &Wanted| may_have_taps(wanted) && wanted.start_queue == tap.first;
                let wanted = leases.find_map(|lease| lease.wanted().filter(wants))?;
                Some((at, user_of(&wanted)))
            });
            if let Some((at, user)) = user {
                self.network_taps
                    .insert(((at, tap.first), to), NetworkTap::new(tap, to, user));
            }
        }
    }

    /// Removes those whose leases do not continue, and keeps the others.
    pub(crate) fn sweep_network_taps(&mut self) {
        for at in self.network_taps.keys().copied().collect::<Vec<_>>() {
            let goes_on =
                |lease: LeaseRef<'_>| may_have_taps(&lease.held.wanted) && network_at(lease.held) == at.0;
            if !self.all_leases().any(goes_on) {
                self.end_network_tap(at);
            }
        }
        self.look_at_network_taps();
        for (&at, interface) in &self.interfaces {
            let Some(pins) = interface.pins() else { continue };
            for to in TapTo::ALL {
                for first in pinned_taps(pins, to) {
                    if !self.network_taps.contains_key(&((at, first), to)) {
                        remove_left(Some(pins), (to, first), interface.link.index);
                    }
                }
            }
        }
        self.remove_stray_taps();
    }

    /// Removes devices that no steward has: of interfaces that are ours, or that have no program of a steward's.
    pub(crate) fn remove_stray_taps(&mut self) {
        let taps = all_taps();
        for tap in taps.clone() {
            let is_known = match tap.purpose {
                Purpose::Joins(_) => self.network_taps.values().any(|its| its.tap == tap),
                Purpose::Send => self.is_of_a_lease(&tap),
            };
            let is_ours = self
                .interfaces
                .values()
                .any(|interface| interface.name() == tap.uplink);
            // It may have another name now.
            let named = Link::by_name(&tap.uplink)
                .ok()
                .or_else(|| Link::by_index(tap.ifindex()));
            let uplink = named.map_or(0, |link| link.index);
            // Another steward may have it still.
            let is_in_use =
                || program_on(uplink).is_some() || has_uplink_tap(&taps, uplink, &tap.uplink, tap.first);
            if is_known || !(is_ours || uplink == 0 || !is_in_use()) {
                continue;
            }
            tracing::info!(tap = tap.name, "removed: another steward left it");
            if let Purpose::Joins(to) = tap.purpose {
                remove_left(None, (to, tap.first), uplink);
            }
            self.removals.begin(&tap);
        }
        self.remove_stray_filters(&taps);
    }

    /// Removes filters at uplinks whose tap is gone, because steward and lessee died: they would redirect frames to a
    /// device that does not exist.
    fn remove_stray_filters(&self, taps: &[Tap]) {
        let filters = filters::of_networks().unwrap_or_else(|error| {
            tracing::warn!("cannot look for filters that another steward left: {error}");
            Vec::new()
        });
        for Filter { uplink, to, first } in filters {
            let mut ours = self
                .interfaces
                .iter()
                .filter(|(_, interface)| interface.link.index == uplink);
            let is_left = match ours.next() {
                Some((&at, _)) => !self.network_taps.contains_key(&((at, first), to)),
                None => {
                    let name = Link::by_index(uplink).map(|link| link.name).unwrap_or_default();
                    program_on(uplink).is_none() && !has_uplink_tap(taps, uplink, &name, first)
                }
            };
            if is_left {
                tracing::info!(uplink, first, "a filter is removed: another steward left it");
                remove_left(None, (to, first), uplink);
            }
        }
    }
}

/// Whether a network of this interface reaches the wire by a tap, which may have this queue: then a steward has the
/// interface, though no XDP program is on it.
fn has_uplink_tap(taps: &[Tap], ifindex: u32, uplink: &str, queue: u32) -> bool {
    let is_its = |tap: &Tap| (tap.uplink == uplink || tap.ifindex() == ifindex) && tap.first <= queue;
    taps.iter()
        .any(|tap| tap.purpose == Purpose::Joins(TapTo::Uplink) && is_its(tap))
}

/// Where a tap leads, in a sentence.
fn words(to: TapTo) -> &'static str {
    match to {
        TapTo::Host => "the host",
        TapTo::Uplink => "the wire",
    }
}

/// Connections that have the network.
pub(crate) fn lessees(
    connections: &mut BTreeMap<u64, Connection>,
    at: NetworkAt,
) -> impl Iterator<Item = &mut Connection> {
    let has = move |other: &&mut Connection| other.held.as_ref().is_some_and(|held| network_at(held) == at);
    connections.values_mut().filter(has)
}

fn count(of: usize) -> u32 {
    of.try_into().unwrap_or(u32::MAX)
}

fn remove_left(pins: Option<&Path>, (to, first): (TapTo, u32), uplink: u32) {
    if let Err(error) = detach_tap(pins, to, first, uplink) {
        tracing::warn!(
            "the programs that joined {} with a network stay: {error}",
            words(to)
        );
    }
}
