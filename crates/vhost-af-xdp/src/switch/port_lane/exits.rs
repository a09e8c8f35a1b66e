//! By what frames of a port leave the network: the uplink, or a queue of its own, and the host's end.

use device::counters::PairCounters;
use device::pair::{Fault, QueuePair};
use virtqueue::{ChainId, Chains};

use super::judged::{Judged, with_tag};
use super::{Burst, PortLane};
use crate::nic::xdp::XdpNic;
use crate::switch::from_guest::{GuestFrame, Put, Sink, Turn};
use crate::switch::lane::{Blame, Network, Peer, SlotAt};
use crate::switch::own_queue::OwnQueue;
use crate::switch::to_nic::{NicSink, Transmit};

/// A NIC of the network, which frames leave by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exit {
    Uplink = 0,
    Host = 1,
}

impl Exit {
    pub(super) const ALL: [Self; 2] = [Self::Uplink, Self::Host];
}

/// Chains of a turn that go the same way out.
pub(super) struct Frames<'a> {
    pub(super) pair: &'a mut QueuePair,
    pub(super) judged: &'a [Judged],
    pub(super) chains: &'a Chains,
    pub(super) counters: &'a PairCounters,
    /// Behind the last of them.
    pub(super) end: usize,
}

impl Frames<'_> {
    /// Puts them from `done` on, as far as there is room; true if the next one waits for some. Chains that the sink does
    /// not keep are given back.
    #[inline]
    pub(super) fn put(
        self,
        sink: &mut impl Sink,
        mut give_back: impl FnMut(&mut QueuePair, ChainId),
        (turn, done): (&mut Turn, &mut usize),
    ) -> bool {
        let mut waits = false;
        while *done < self.end && turn.takes_more() && !waits {
            if !sink.has_room() {
                self.counters.from_guest_waits.add(1);
                return true;
            }
            let chain = self.chains.chains[*done];
            let buffers = self.chains.buffers(&chain);
            let judged = &self.judged[*done];
            let frame = judged.frame(self.pair, buffers);
            let lost = frame.and_then(|_| sink.unsendable(self.counters));
            if let Some(counter) = lost {
                counter.add(1);
            }
            let put = match frame.filter(|_| lost.is_none()) {
                Some(frame) => {
                    let put = |frame: GuestFrame<'_>| sink.put(chain.id, Some(frame), turn);
                    with_tag(judged, frame, true, put)
                }
                None => sink.put(chain.id, None, turn),
            };
            match put {
                Put::NoRoom => return true,
                Put::Done => give_back(self.pair, chain.id),
                Put::Taken => {}
            }
            waits = sink.has_rest();
            turn.note(buffers.len());
            *done += 1;
        }
        waits
    }
}

impl<O: OwnQueue> PortLane<O> {
    /// Sends for the guest, and delivers what its own queue received.
    pub(super) fn breathe_own(&mut self, network: &mut dyn Network) -> Result<usize, Blame> {
        let sent = self.send(network);
        let moved = sent.and_then(|sent| Ok(sent + self.receive(network)?));
        if moved.is_err() {
            // Its queues are not used any more.
            (self.pair.from_guest.enabled, self.pair.to_guest.enabled) = (false, false);
        }
        moved.map_err(Blame::Own)
    }

    fn receive(&mut self, network: &mut dyn Network) -> Result<usize, Fault> {
        if !self.own.has_frames() {
            return Ok(0);
        }
        if self.pair.to_guest.enabled {
            let guest = Peer::new(&mut self.pair, &mut self.buffers, &self.counters);
            return self.own.receive(&mut guest.limited(self.limit.as_ref()));
        }
        // What arrived for a pair that is off goes to the first one.
        let Some(first) = self.members.lanes(self.number).first().map(|first| first.at) else {
            return Ok(0);
        };
        let Some(mut guest) = network.guest(first) else {
            return Ok(0);
        };
        match self.own.receive(&mut guest) {
            Ok(frames) => {
                self.counters.spilled_frames.add(frames as u64);
                Ok(frames)
            }
            Err(fault) => {
                network.blame(first, fault);
                Ok(0)
            }
        }
    }

    /// Goes on with GSO packets that are being cut for a NIC; whether there is more to do then.
    #[inline]
    pub(super) fn send_rest(&mut self, network: &mut dyn Network) -> bool {
        if !self.has_rest() {
            return true;
        }
        for exit in Exit::ALL {
            if !self.transmit[exit as usize].has_rest() {
                continue;
            }
            let mut turn = Turn::shared(self.sender.left());
            match self.sink(exit, network) {
                Some(mut sink) => _ = sink.send_rest(&mut turn),
                None => self.transmit[exit as usize].lose(&self.counters),
            }
            self.sender.spend(&turn);
        }
        self.waits = self.has_rest();
        !self.waits && self.sender.left() > 0
    }

    /// Part of a GSO packet waits to be sent.
    #[inline]
    pub(super) fn has_rest(&self) -> bool {
        self.own.has_rest() || self.transmit.iter().any(Transmit::has_rest)
    }

    /// The host gets a frame to a group, if there is room for it now.
    pub(super) fn copy_to_host(&mut self, index: usize, burst: &mut Burst<'_>) {
        let Some(queue) = self.members.host.and_then(|at| burst.network.uplink(at)) else {
            return;
        };
        let transmit = &mut self.transmit[Exit::Host as usize];
        let mut sink = NicSink::new(queue, transmit, &self.counters);
        let (judged, chain) = (&self.chains[index], self.sender.chains().chains[index]);
        if let Some(frame) = judged.frame(&self.pair, self.sender.chains().buffers(&chain)) {
            let is_down = sink.unsendable(&self.counters).is_some();
            let put = |frame: GuestFrame<'_>| sink.put(chain.id, Some(frame), &mut burst.turn);
            if is_down || with_tag(judged, frame, true, put) == Put::NoRoom {
                self.counters.from_guest_host_no_room.add(1);
            }
            self.waits |= self.transmit[Exit::Host as usize].has_rest();
        }
    }

    /// Where the lane is that it sends by.
    #[inline]
    pub(super) fn place_of(&self, exit: Exit) -> Option<SlotAt> {
        match exit {
            Exit::Uplink => self.members.uplink(self.flow()),
            Exit::Host => self.members.host,
        }
    }

    /// The NIC queue that the lane sends by, if there is one.
    pub(super) fn sink<'n>(
        &'n mut self,
        exit: Exit,
        network: &'n mut dyn Network,
    ) -> Option<NicSink<'n, XdpNic>> {
        let queue = network.uplink(self.place_of(exit)?)?;
        let transmit = &mut self.transmit[exit as usize];
        Some(NicSink::new(queue, transmit, &self.counters))
    }
}
