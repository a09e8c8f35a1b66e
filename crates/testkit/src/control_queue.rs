//! The control queue of a guest whose VMM passes it on to the back end, as User-mode Linux and crosvm do.

use crate::assert_soon;
use std::os::fd::{AsFd, OwnedFd};

use vhost::vhost_user::message::FrontendReq;
use virtqueue::driver::{Buffer, DriverFeatures, QueueDriver};
use virtqueue::{GuestAddr, QueueSize, RingFormat, RingShape};

use crate::driver::{Driver, F_EVENT_IDX, F_RING_PACKED};
use crate::message;
use crate::vmm::{event, longs, words};

/// Entries: few, so that a few commands go round.
const SIZE: u32 = 16;
/// What the device answers.
pub const OK: u8 = 0;
/// The same, if it cannot.
pub const ERR: u8 = 1;

/// See the module's head.
pub struct ControlQueue {
    /// Its vring.
    pub index: u32,
    /// The ring.
    pub ring: QueueDriver,
    /// Its kick, and its call.
    pub events: [OwnedFd; 2],
    command: GuestAddr,
    ack: GuestAddr,
}

impl ControlQueue {
    /// In the guest's memory; nothing is said of it yet.
    ///
    /// # Panics
    /// If there is no room.
    pub fn new(guest: &Driver, index: u32) -> Self {
        let format = RingFormat::of(guest.features() & F_RING_PACKED != 0);
        let shape = RingShape::new(format, QueueSize::new(SIZE).expect("a good size"));
        let features = DriverFeatures {
            event_idx: guest.features() & F_EVENT_IDX != 0,
            in_order: false,
        };
        let ram = guest.ram();
        Self {
            index,
            ring: QueueDriver::new(ram, shape, features).expect("room for a ring"),
            events: [event(), event()],
            command: ram.alloc(4096, 4096).expect("room"),
            ack: ram.alloc(64, 64).expect("room"),
        }
    }

    /// Sets the vring up and starts it; the acknowledgements.
    pub fn start(&self, guest: &mut Driver) -> Vec<u64> {
        let addresses = self.ring.ring_user_addresses();
        let rings = longs([addresses.desc, addresses.used, addresses.avail, 0]);
        let [kick, call] = &self.events;
        let mut acks = vec![
            guest.say(FrontendReq::SET_VRING_NUM, &words([self.index, SIZE]), None),
            guest.say(
                FrontendReq::SET_VRING_BASE,
                &words([self.index, self.ring.base()]),
                None,
            ),
            guest.say(
                FrontendReq::SET_VRING_ADDR,
                &[words([self.index, 0]), rings].concat(),
                None,
            ),
        ];
        for (request, event) in [
            (FrontendReq::SET_VRING_CALL, call),
            (FrontendReq::SET_VRING_KICK, kick),
        ] {
            acks.push(guest.say(request, &longs([self.index.into()]), Some(event.as_fd())));
        }
        acks.push(guest.say(FrontendReq::SET_VRING_ENABLE, &words([self.index, 1]), None));
        acks
    }

    /// Stops the vring; where it stands, as the back end says.
    ///
    /// # Panics
    /// If it does not.
    pub fn stop(&self, guest: &Driver) -> u32 {
        let state = words([self.index, 0]);
        message::send(guest.socket(), FrontendReq::GET_VRING_BASE, &state, None);
        let answer = message::try_receive(guest.socket()).expect("an answer");
        u32::from_ne_bytes(*answer.last_chunk().expect("a vring's state"))
    }

    /// Sends a command, with room for an answer or without; kicks if the device wants that, or in any case.
    ///
    /// # Panics
    /// If there is no room.
    pub fn send(&mut self, command: &[u8], answer: bool, always: bool) {
        let ram = self.ring.ram();
        ram.write(self.command, command);
        ram.write(self.ack, &[0xaa]);
        let mut chain = vec![Buffer::readable(self.command, command.len().max(1) as u32)];
        if answer {
            chain.push(Buffer::writable(self.ack, 1));
        }
        self.ring.add(&chain).expect("room");
        if self.ring.publish() || always {
            let _ = rustix::io::write(&self.events[0], &1u64.to_ne_bytes());
        }
    }

    /// Sends a command; the answer.
    ///
    /// # Panics
    /// If none comes.
    pub fn ask(&mut self, command: &[u8]) -> u8 {
        self.send(command, true, false);
        self.answer()
    }

    /// The answer to what was sent.
    ///
    /// # Panics
    /// If none comes.
    pub fn answer(&mut self) -> u8 {
        assert_soon!(self.ring.take_used().is_some(), "no answer");
        self.ring.ram().read_vec(self.ack, 1)[0]
    }

    /// The page of guest memory that has the answer.
    pub fn ack_page(&self) -> u64 {
        self.ack.0 / 4096
    }
}

/// VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET: these offloads, by their feature bits.
pub fn guest_offloads(features: u64) -> Vec<u8> {
    [&[5, 0][..], &features.to_le_bytes()].concat()
}

/// VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET.
pub fn pairs(pairs: u16) -> Vec<u8> {
    [&[4, 0][..], &pairs.to_le_bytes()].concat()
}
