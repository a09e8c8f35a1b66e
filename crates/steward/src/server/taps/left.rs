//! Taps of networks that a previous steward left: taken over if their leases may continue, else removed, with the
//! programs and filters that joined them.

use std::path::Path;

use steer::{TapTo, detach_tap, pinned_taps, program_on};

use crate::server::Server;
use crate::server::journal::state::Records;
use crate::server::leases::lease::LeaseRef;
use crate::server::taps::bridge_entries::remove_left_neighbours;
use crate::server::taps::network_tap::{NetworkTap, may_have_taps, network_at, user_of, words};
use crate::server::taps::tap::{Purpose, Tap, all_taps};
use host::links::Link;
use host::links::filters::{self, Filter};

impl Server {
    /// Takes over devices of the previous steward for leases that may continue.
    pub(crate) fn adopt_network_taps(&mut self, records: &Records) {
        for tap in all_taps() {
            let Purpose::Joins(to) = tap.purpose else { continue };
            let lease = records.leases.iter().find_map(|lease| {
                let (wanted, interface) = (lease.wanted()?, self.interfaces.get(&lease.interface)?);
                let is_its = may_have_taps(&wanted)
                    && (interface.name(), wanted.start_queue) == (&tap.uplink, tap.first);
                is_its.then(|| (lease.interface, user_of(&wanted)))
            });
            if let Some((at, user)) = lease {
                self.network_taps
                    .insert(((at, tap.first), to), NetworkTap::new(tap, to, user));
            }
        }
    }

    /// Removes those whose leases do not continue, and keeps the others.
    pub(crate) fn sweep_network_taps(&mut self) {
        self.end_network_taps(|server, (network, _)| {
            let goes_on =
                |lease: LeaseRef<'_>| may_have_taps(&lease.held.wanted) && network_at(lease.held) == network;
            !server.all_leases().any(goes_on)
        });
        for (&((at, _), _), tap) in &mut self.network_taps {
            if let Some(interface) = self.interfaces.get(&at) {
                tap.take_over_advertised(interface);
            }
        }
        remove_left_neighbours();
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
            let mut interfaces = self.interfaces.iter();
            let is_left = match interfaces.find(|(_, interface)| interface.link.index == uplink) {
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

fn remove_left(pins: Option<&Path>, (to, first): (TapTo, u32), uplink: u32) {
    if let Err(error) = detach_tap(pins, to, first, uplink) {
        tracing::warn!(
            "the programs that joined {} with a network stay: {error}",
            words(to)
        );
    }
}
