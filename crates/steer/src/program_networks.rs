//! Networks: queues of an interface that serve many receivers, distinguished by their addresses (see
//! `bpf/steer_body.h`).
//!
//! A network has the number of its first queue. Its state in the program (the queues' words, its stations,
//! its ring, its limit) is set and removed in an order in which nothing refers to missing state:
//!
//! - set: limit and ring first, then the words;
//! - end: the words first, then stations and ring.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use anyhow::Context as _;

use crate::layout::{
    MAX_QUEUES, Station, network_bits, queues_of, word_has_tunnel, word_of_network, word_of_shared,
    word_that_drops_unknown, word_with_tunnel,
};
use crate::map;
use crate::network::MulticastLimit;
use crate::program::Program;
use crate::ring::MulticastRing;
use crate::tunnel::{MAX_VTEPS, Tunnel};

/// Names the network of a refused map update, by its first queue.
fn refused(network: u32) -> impl FnOnce() -> String {
    move || format!("cannot set up or end the network of queue {network}")
}

/// Networks, each identified by its first queue.
impl Program {
    /// Makes `queues` a network, whose multicast frames are copied to `ring`. Frames of a queue that is not
    /// enabled still go to the host, and so do unicast frames while there are no stations. Filters of these
    /// queues have no effect.
    ///
    /// # Errors
    /// A queue is beyond [`MAX_QUEUES`], or the kernel's; then [`Program::end_network`] undoes the completed part.
    pub fn set_network(
        &self,
        queues: Range<u32>,
        limit: MulticastLimit,
        ring: &MulticastRing,
    ) -> anyhow::Result<()> {
        let network = queues.start;
        queues.clone().try_for_each(|queue| self.word(queue).map(drop))?;
        let maps = &self.maps.networks;
        map::set(&maps.limits, &network, &limit.value()).with_context(refused(network))?;
        map::set(&maps.rings, &network, &ring.as_fd().as_raw_fd()).with_context(refused(network))?;
        for queue in queues {
            let word = self.word(queue)?;
            // Of a network that is taken over, behind a tunnel.
            let tunnel = word & word_with_tunnel(0);
            self.set_word(
                queue,
                word & !network_bits(u64::MAX) | word_of_network(network) | tunnel,
            )?;
        }
        Ok(())
    }

    /// Removes these queues from their network, and the ring, the stations and the tunnel of the network that the first
    /// of them identifies, and of those that share its queues. Does nothing if there is no network.
    ///
    /// # Errors
    /// A queue is beyond [`MAX_QUEUES`], or the kernel's; even then the queues get no frames of the network if they are
    /// not enabled.
    pub fn end_network(&self, queues: Range<u32>) -> anyhow::Result<()> {
        let network = queues.start;
        for queue in queues {
            let word = self.word(queue)?;
            self.set_word(queue, word & !network_bits(u64::MAX))?;
        }
        let stations = self.maps.networks.all_stations().into_iter();
        let tunnels = self.maps.networks.tunnels.networks();
        let all: BTreeSet<u32> = stations.map(|(_, _, network)| network).chain(tunnels).collect();
        for &its in all.iter().filter(|&&its| queues_of(its) == network) {
            self.remove_stations(its)?;
            self.end_tunnel(its)?;
        }
        map::remove(&self.maps.networks.rings, &network)
            .map(drop)
            .with_context(refused(network))
    }

    /// From now on a network gets the unicast frames to its stations in this tunnel that arrive at these queues, and no
    /// others, until [`Program::end_network`]; of Geneve from its host, of VXLAN at first from none
    /// ([`Program::change_vtep`]). It is the network of the queues, or one that shares them
    /// ([`network_number`](crate::network_number)) if that one has a tunnel, too. Other networks may have
    /// the same stations. A network that had no tunnel loses its stations.
    ///
    /// # Errors
    /// A queue is beyond [`MAX_QUEUES`], or the kernel's.
    pub fn set_tunnel(&self, queues: Range<u32>, network: u32, tunnel: Tunnel) -> anyhow::Result<()> {
        if !self.tunnels(queues_of(network)).contains_key(&network) {
            self.remove_stations(network)?;
        }
        self.end_tunnel(network)?;
        if network != queues_of(network) {
            for queue in queues.clone() {
                self.set_word(queue, word_of_shared(self.word(queue)?))?;
            }
        }
        let set = self.maps.networks.tunnels.set(network, tunnel);
        set.with_context(refused(network))?;
        for queue in queues {
            self.set_word(queue, word_with_tunnel(self.word(queue)?))?;
        }
        Ok(())
    }

    /// Removes the tunnel of a network, and its hosts. A network of its own queues gets no frames then.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn end_tunnel(&self, network: u32) -> anyhow::Result<()> {
        let ended = self.maps.networks.tunnels.remove(network);
        ended.with_context(refused(network))
    }

    fn has_tunnel(&self, network: u32) -> bool {
        self.word(queues_of(network)).is_ok_and(word_has_tunnel)
    }

    fn remove_stations(&self, network: u32) -> anyhow::Result<()> {
        let mut stations = self.stations(network).into_iter();
        let removed =
            stations.try_for_each(|(station, _)| self.maps.networks.remove_station(network, station));
        removed.with_context(refused(network))
    }

    /// From now on a network takes packets of its tunnel from a host (VTEP), or does not any more, until
    /// [`Program::end_network`]. It takes none from other hosts: they go to the kernel.
    ///
    /// # Errors
    /// The kernel's: mostly because there are too many.
    pub fn change_vtep(&self, network: u32, change: (IpAddr, bool)) -> anyhow::Result<()> {
        let changed = self.maps.networks.tunnels.change_vtep(network, change);
        changed.with_context(|| {
            format!(
                "cannot add or remove host {} (the tunnels of an interface have at most {MAX_VTEPS} hosts)",
                change.0
            )
        })
    }

    /// Drops packets for the tunnel of a network of these queues from hosts that it takes none from, until
    /// [`Program::set_tunnel`]; of a tunnel of Geneve they stay the kernel's. Returns the tunnel, if there is one.
    ///
    /// # Errors
    /// A queue is beyond [`MAX_QUEUES`], or the kernel's.
    pub fn drop_unknown(&self, queues: Range<u32>, network: u32) -> anyhow::Result<Option<Tunnel>> {
        let Some(tunnel) = self.tunnels(queues.start).remove(&network) else {
            return Ok(None);
        };
        let tunnel = tunnel.dropping_unknown();
        if !tunnel.drops_unknown {
            return Ok(Some(tunnel));
        }
        let set = self.maps.networks.tunnels.set(network, tunnel);
        set.with_context(refused(network))?;
        for queue in queues {
            self.set_word(queue, word_that_drops_unknown(self.word(queue)?))?;
        }
        Ok(Some(tunnel))
    }

    /// The hosts from which a network takes packets of its tunnel.
    pub fn vteps(&self, network: u32) -> BTreeSet<IpAddr> {
        self.maps.networks.tunnels.vteps(network)
    }

    /// The tunnels of the network of these first queues, and of those that share its queues.
    pub fn tunnels(&self, first: u32) -> BTreeMap<u32, Tunnel> {
        match self.has_tunnel(first) {
            true => self.maps.networks.tunnels.of_queues(first),
            // Those of an earlier network may be left.
            false => BTreeMap::new(),
        }
    }

    /// The first queues of all networks that have a queue or a station; each queue of a network counts as one.
    pub fn networks(&self) -> BTreeSet<u32> {
        let is_of_one = |&queue: &u32| self.word(queue).is_ok_and(|word| network_bits(word) != 0);
        let by_queue = (0..MAX_QUEUES).filter(is_of_one);
        let by_station = self.maps.networks.all_stations().into_iter();
        by_queue
            .chain(by_station.map(|(_, _, network)| queues_of(network)))
            .collect()
    }

    /// From now on a network's frames to `station` have this port number before them.
    ///
    /// # Errors
    /// Another network has it, it is none, or the kernel's: mostly because there are too many. Nothing has changed.
    pub fn set_station(&self, network: u32, station: Station, port: u32) -> anyhow::Result<()> {
        let has_tunnel = self.has_tunnel(network);
        self.maps
            .networks
            .set_station((network, has_tunnel), station, port)
    }

    /// From now on frames to `station` go to the host; does nothing if the network does not have it.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn remove_station(&self, network: u32, station: Station) -> anyhow::Result<()> {
        let removed = self.maps.networks.remove_station(network, station);
        removed.with_context(refused(network))
    }

    /// A network's addresses with their ports, in order.
    pub fn stations(&self, network: u32) -> Vec<(Station, u32)> {
        let all = self.maps.networks.all_stations().into_iter();
        all.filter(|&(_, _, of)| of == network)
            .map(|(station, port, _)| (station, port))
            .collect()
    }
}
