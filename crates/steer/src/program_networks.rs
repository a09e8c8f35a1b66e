//! Networks: queues of an interface that serve many receivers, distinguished by their addresses (see
//! `bpf/steer_body.h`).
//!
//! A network has the number of its first queue. Its state in the program (the queues' words, its stations,
//! its ring, its limit) is set and removed in an order in which nothing refers to missing state:
//!
//! - set: limit and ring first, then the words;
//! - end: the words first, then stations and ring.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use crate::layout::{MAX_QUEUES, network_bits, word_of_network};
use crate::map;
use crate::network::{MulticastLimit, Station, StationError};
use crate::program::{Program, QueueError};
use crate::ring::MulticastRing;

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
            let word = self.word(queue)? & !network_bits(u64::MAX);
            self.set_word(queue, word | word_of_network(network))?;
        }
        Ok(())
    }

    /// Removes these queues from their network, and the stations and the ring of the network that the first
    /// of them identifies. Does nothing if there is no network.
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
        let refused = |source| QueueError::Network { network, source };
        for (station, _) in self.stations(network) {
            self.remove_station(network, station)
                .map_err(|error| match error {
                    StationError::Kernel { source, .. } => refused(source),
                    error => refused(io::Error::other(error).into()),
                })?;
        }
        map::remove(&self.networks.rings, &network)
            .map(drop)
            .map_err(refused)
    }

    /// All numbers of networks that have a queue or a station; each queue of a network counts as a number, too.
    pub fn networks(&self) -> BTreeSet<u32> {
        let is_of_one = |&queue: &u32| self.word(queue).is_ok_and(|word| network_bits(word) != 0);
        let by_queue = (0..MAX_QUEUES).filter(is_of_one);
        let by_station = self.networks.all_stations().into_iter();
        by_queue
            .chain(by_station.map(|(_, _, network)| network))
            .collect()
    }

    /// From now on a network's frames to `station` have this port number before them.
    ///
    /// # Errors
    /// [`StationError`]; nothing has changed.
    pub fn set_station(&self, network: u32, station: Station, port: u32) -> Result<(), StationError> {
        self.networks.set_station(network, station, port)
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
