//! Networks: queues of an interface that serve many receivers, distinguished by their addresses (see
//! `bpf/steer_body.h`).
//!
//! A network has the number of its first queue. Its state in the program (the queues' words, its stations,
//! its ring, its limit) is set and removed in an order in which nothing refers to missing state:
//!
//! - set: limit and ring first, then the words;
//! - end: the words first, then stations and ring.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use crate::layout::{
    MAX_QUEUES, Station, network_bits, queues_of, word_has_tunnel, word_of_network, word_of_shared,
    word_that_drops_unknown, word_with_tunnel,
};
use crate::map;
use crate::network::{MulticastLimit, StationError};
use crate::program::{Program, QueueError};
use crate::ring::MulticastRing;
use crate::tunnel::{Tunnel, Tunnels};

/// Networks, each identified by its first queue.
impl Program {
    /// Makes `queues` a network, whose multicast frames are copied to `ring`. Frames of a queue that is not
    /// enabled still go to the host, and so do unicast frames while there are no stations. Filters of these
    /// queues have no effect.
    ///
    /// # Errors
    /// [`QueueError::OutOfRange`], or [`QueueError::Network`]; then [`Program::end_network`] undoes the completed part.
    pub fn set_network(
        &self,
        queues: Range<u32>,
        limit: MulticastLimit,
        ring: &MulticastRing,
    ) -> Result<(), QueueError> {
        let network = queues.start;
        queues.clone().try_for_each(|queue| self.word(queue).map(drop))?;
        let refused = |source| QueueError::Network { network, source };
        let maps = &self.networks;
        map::set(&maps.limits, &network, &limit.value()).map_err(refused)?;
        map::set(&maps.rings, &network, &ring.as_fd().as_raw_fd()).map_err(refused)?;
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
    /// [`QueueError::OutOfRange`], or [`QueueError::Network`]; even then the queues get no frames of the
    /// network if they are not enabled.
    pub fn end_network(&self, queues: Range<u32>) -> Result<(), QueueError> {
        let network = queues.start;
        for queue in queues {
            let word = self.word(queue)?;
            self.set_word(queue, word & !network_bits(u64::MAX))?;
        }
        let stations = self.networks.all_stations().into_iter();
        let tunnels = self.networks.tunnels.iter().flat_map(Tunnels::networks);
        let all: BTreeSet<u32> = stations.map(|(_, _, network)| network).chain(tunnels).collect();
        let refused = |source| QueueError::Network { network, source };
        for &its in all.iter().filter(|&&its| queues_of(its) == network) {
            self.remove_stations(its)?;
            self.end_tunnel(its)?;
        }
        map::remove(&self.networks.rings, &network)
            .map(drop)
            .map_err(refused)
    }

    /// From now on a network gets the unicast frames to its stations in this tunnel that arrive at these queues, and no
    /// others, until [`Program::end_network`]; of Geneve from its host, of VXLAN at first from none
    /// ([`Program::change_vtep`]). It is the network of the queues, or one that shares them
    /// ([`network_number`](crate::network_number)) if that one has a tunnel, too. Other networks may have
    /// the same stations. A network that had no tunnel loses its stations.
    ///
    /// # Errors
    /// [`QueueError::OutOfRange`], [`QueueError::NoTunnels`], or [`QueueError::Network`].
    pub fn set_tunnel(&self, queues: Range<u32>, network: u32, tunnel: Tunnel) -> Result<(), QueueError> {
        let tunnels = self.networks.tunnels.as_ref().ok_or(QueueError::NoTunnels)?;
        if !self.tunnels(queues_of(network)).contains_key(&network) {
            self.remove_stations(network)?;
        }
        self.end_tunnel(network)?;
        if network != queues_of(network) {
            for queue in queues.clone() {
                self.set_word(queue, word_of_shared(self.word(queue)?))?;
            }
        }
        let set = tunnels.set(network, tunnel);
        set.map_err(|source| QueueError::Network { network, source })?;
        for queue in queues {
            self.set_word(queue, word_with_tunnel(self.word(queue)?))?;
        }
        Ok(())
    }

    /// Removes the tunnel of a network, and its hosts. A network of its own queues gets no frames then.
    ///
    /// # Errors
    /// [`QueueError::Network`].
    pub fn end_tunnel(&self, network: u32) -> Result<(), QueueError> {
        let tunnels = self.networks.tunnels.as_ref();
        let ended = tunnels.map_or(Ok(()), |tunnels| tunnels.remove(network));
        ended.map_err(|source| QueueError::Network { network, source })
    }

    fn has_tunnel(&self, network: u32) -> bool {
        self.word(queues_of(network)).is_ok_and(word_has_tunnel)
    }

    fn remove_stations(&self, network: u32) -> Result<(), QueueError> {
        let refused = |source| QueueError::Network { network, source };
        self.stations(network).into_iter().try_for_each(|(station, _)| {
            self.remove_station(network, station)
                .map_err(|error| match error {
                    StationError::Kernel { source, .. } => refused(source),
                    error => refused(io::Error::other(error).into()),
                })
        })
    }

    /// From now on a network takes packets of its tunnel from a host (VTEP), or does not any more, until
    /// [`Program::end_network`]. It takes none from other hosts: they go to the kernel.
    ///
    /// # Errors
    /// [`QueueError::NoTunnels`], or [`QueueError::Network`]: mostly because there are too many.
    pub fn change_vtep(&self, network: u32, change: (IpAddr, bool)) -> Result<(), QueueError> {
        let tunnels = self.networks.tunnels.as_ref().ok_or(QueueError::NoTunnels)?;
        let changed = tunnels.change_vtep(network, change);
        changed.map_err(|source| QueueError::Network { network, source })
    }

    /// Drops packets for the tunnel of a network of these queues from hosts that it takes none from, until
    /// [`Program::set_tunnel`]; of a tunnel of Geneve they stay the kernel's. Returns the tunnel, if there is one.
    ///
    /// # Errors
    /// [`QueueError::OutOfRange`], or [`QueueError::Network`].
    pub fn drop_unknown(&self, queues: Range<u32>, network: u32) -> Result<Option<Tunnel>, QueueError> {
        let tunnel = self.tunnels(queues.start).remove(&network);
        let Some((maps, tunnel)) = self.networks.tunnels.as_ref().zip(tunnel) else {
            return Ok(None);
        };
        let tunnel = tunnel.dropping_unknown();
        if !tunnel.drops_unknown {
            return Ok(Some(tunnel));
        }
        let set = maps.set(network, tunnel);
        set.map_err(|source| QueueError::Network { network, source })?;
        for queue in queues {
            self.set_word(queue, word_that_drops_unknown(self.word(queue)?))?;
        }
        Ok(Some(tunnel))
    }

    /// The hosts from which a network takes packets of its tunnel.
    pub fn vteps(&self, network: u32) -> BTreeSet<IpAddr> {
        let tunnels = self.networks.tunnels.as_ref();
        tunnels.map_or_else(BTreeSet::new, |tunnels| tunnels.vteps(network))
    }

    /// The tunnels of the network of these first queues, and of those that share its queues.
    pub fn tunnels(&self, first: u32) -> BTreeMap<u32, Tunnel> {
        let tunnels = self.networks.tunnels.as_ref();
        // Those of an earlier network may be left.
        let tunnels = tunnels.filter(|_| self.has_tunnel(first));
        tunnels.map_or_else(BTreeMap::new, |tunnels| tunnels.of_queues(first))
    }

    /// The first queues of all networks that have a queue or a station; each queue of a network counts as one.
    pub fn networks(&self) -> BTreeSet<u32> {
        let is_of_one = |&queue: &u32| self.word(queue).is_ok_and(|word| network_bits(word) != 0);
        let by_queue = (0..MAX_QUEUES).filter(is_of_one);
        let by_station = self.networks.all_stations().into_iter();
        by_queue
            .chain(by_station.map(|(_, _, network)| queues_of(network)))
            .collect()
    }

    /// From now on a network's frames to `station` have this port number before them.
    ///
    /// # Errors
    /// [`StationError`]; nothing has changed.
    pub fn set_station(&self, network: u32, station: Station, port: u32) -> Result<(), StationError> {
        let has_tunnel = self.has_tunnel(network);
        self.networks.set_station((network, has_tunnel), station, port)
    }

    /// From now on frames to `station` go to the host; does nothing if the network does not have it.
    ///
    /// # Errors
    /// [`StationError::Kernel`].
    pub fn remove_station(&self, network: u32, station: Station) -> Result<(), StationError> {
        self.networks.remove_station(network, station)
    }

    /// A network's addresses with their ports, in order.
    pub fn stations(&self, network: u32) -> Vec<(Station, u32)> {
        let all = self.networks.all_stations().into_iter();
        all.filter(|&(_, _, of)| of == network)
            .map(|(station, port, _)| (station, port))
            .collect()
    }
}
