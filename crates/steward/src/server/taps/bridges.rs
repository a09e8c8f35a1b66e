//! Stations behind the bridge that the interface of a network is part of.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use steer::{Station, TapTo};

use crate::server::connections::connection::lessees;
use crate::server::taps::network_tap::network_at;
use crate::server::taps::network_taps::no_host;
use crate::server::{Answered, Server};
use steward_protocol::{Answer, CHANGES_MAX};

/// Pause between two reads of bridges' forwarding databases, which others can change as often as they like.
const FDB_PAUSE: Duration = Duration::from_millis(100);
/// The pause after a read is this many times as long as the read.
const FDB_SHARE: u32 = 20;

impl Server {
    /// Answers a lessee of a network with the stations behind the bridge that its interface is part of.
    pub(crate) fn behind(&self, number: u64, after: Station) -> Answered {
        let at = network_at(&self.held_network(number)?);
        let host = self.network_taps.get(&(at, TapTo::Host)).ok_or_else(no_host)?;
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
                    let theirs = lessees(&mut self.connections, |held| network_at(held) == at);
                    theirs.for_each(|lessee| lessee.other_behind = true);
                }
                Ok(false) => {}
                Err(error) => tracing::debug!("cannot read the forwarding database of a bridge: {error}"),
            }
        }
        self.renew_advertised(begun);
        let now = Instant::now();
        self.fdb_pause = now + FDB_PAUSE.max(now.duration_since(begun) * FDB_SHARE);
    }

    /// Sets advertised addresses again that others have removed.
    pub(crate) fn renew_advertised(&mut self, now: Instant) {
        for tap in self.network_taps.values_mut() {
            if let Err(error) = tap.advertised.renew(now) {
                tracing::debug!("cannot advertise addresses again: {error}");
            }
        }
    }

    /// Notifies lessees of networks when other hosts have other addresses of their guests than before.
    pub(crate) fn note_lost_addresses(&mut self) {
        for (&at, interface) in &mut self.interfaces {
            let taps = self
                .network_taps
                .iter()
                .filter(|((network, _), _)| network.0 == at);
            let notes = taps.map(|((network, _), tap)| (network.1, tap.advertised.lost_note()));
            let notes: BTreeMap<_, _> = notes.filter(|(_, note)| !note.is_empty()).collect();
            if interface.lost_addresses != notes {
                interface.lost_addresses = notes;
                let theirs = lessees(&mut self.connections, |held| held.interface == at);
                theirs.for_each(|lessee| lessee.dirty = true);
            }
        }
    }
}
