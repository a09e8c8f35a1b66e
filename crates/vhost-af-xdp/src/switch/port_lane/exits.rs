//! By what frames of a port leave the network: the uplink, and the host's end.

use super::judged::with_tag;
use super::{Burst, PortLane};
use crate::nic::xdp::XdpNic;
use crate::switch::from_guest::{GuestFrame, Put, Sink, Turn};
use crate::switch::lane::{Network, SlotAt};
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

impl PortLane {
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
        self.transmit.iter().any(Transmit::has_rest)
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
