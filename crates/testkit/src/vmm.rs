//! A VMM with a guest, message by message: all that it shares is in files that it never maps, so that it may do to them
//! whatever it likes.
//!
//! Theory of operation. A [`Shared`] is what a VMM shares: guest memory, the dirty log, the inflight region. [`Act`]s
//! are a session in the order in which QEMU has it, from the first message to the end, with frames each way in between;
//! the rings are written into the file of guest memory beforehand. A [`Vmm`] does act by act, and tells whether the
//! back end is still there.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Protocol};
use virtqueue::InflightShape;
use virtqueue::layout::{DESC_WRITE, Descriptor, PACKED_AVAIL, PackedDescriptor};

use crate::driver::{self, F_MRG_RXBUF, F_PROTOCOL_FEATURES, F_RING_PACKED, F_VERSION_1};
use crate::{frame, message, wait};

/// VHOST_F_LOG_ALL.
const F_LOG_ALL: u64 = 1 << 26;
/// Entries of each ring.
pub const QUEUE: u16 = 64;
/// Bytes of guest memory, which begins at address 0.
pub const RAM: u64 = 4 << 20;
/// Bytes of the dirty log.
pub const LOG: u64 = 4096;
/// Where the VMM has guest memory mapped, as it says.
const USER: u64 = 1 << 30;
/// Where in guest memory the rings of vring `index` are: descriptors, what the driver writes, what the device writes.
const fn rings(index: u64) -> [u64; 3] {
    [index << 14, (index << 14) + 0x1000, (index << 14) + 0x2000]
}
/// Where buffers of a vring begin.
const fn buffers(index: u64) -> u64 {
    (1 + index) << 18
}
/// Receive buffers that are posted, and frames.
pub const POSTED: u16 = 32;
/// Frames that are sent at a time.
const SENT: u16 = 8;
const BUFFER: u32 = 2048;

/// Files that a VMM shares.
#[derive(Debug)]
pub struct Shared {
    /// Guest memory.
    pub ram: OwnedFd,
    /// The dirty log.
    pub log: OwnedFd,
    /// The inflight region.
    pub inflight: OwnedFd,
    /// Kicks and calls of both vrings.
    pub events: [OwnedFd; 4],
    /// Virtio features to acknowledge.
    pub features: u64,
    packed: bool,
}

/// One thing that a VMM does.
pub enum Act<'a> {
    /// It says that, with those descriptors.
    Say(FrontendReq, Vec<u8>, Vec<BorrowedFd<'a>>),
    /// It says that, and no answer is to come.
    Tell(FrontendReq, Vec<u8>),
    /// Its guest shows some frames, the last of which is that, to be sent, and kicks.
    Send(u16),
}

/// The bytes of these numbers, as they go into a message.
pub fn longs<const N: usize>(longs: [u64; N]) -> Vec<u8> {
    longs.into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// As [`longs`].
pub fn words<const N: usize>(words: [u32; N]) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_ne_bytes).collect()
}

/// An unsealed file in memory, of so many bytes.
///
/// # Panics
/// If it cannot be made.
pub fn memory(bytes: u64) -> OwnedFd {
    let file = memfd_create("shared", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&file, bytes).expect("room");
    file
}

/// An eventfd.
///
/// # Panics
/// If none is left.
pub fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor is left")
}

impl Shared {
    /// Fresh files, not sealed.
    ///
    /// # Panics
    /// If they cannot be made.
    pub fn new(packed: bool) -> Self {
        let files = [RAM, LOG, inflight_bytes(packed)].map(memory);
        Self::of(files, packed)
    }

    /// Files of the caller's: guest memory, log, inflight. The rings are written into the first.
    ///
    /// # Panics
    /// If it takes none.
    pub fn of([ram, log, inflight]: [OwnedFd; 3], packed: bool) -> Self {
        let shared = Self::as_they_are([ram, log, inflight], packed);
        shared.lay_out();
        shared
    }

    /// As [`of`](Self::of), and nothing is written.
    ///
    /// # Panics
    /// If no descriptor is left.
    pub fn as_they_are([ram, log, inflight]: [OwnedFd; 3], packed: bool) -> Self {
        Self {
            ram,
            log,
            inflight,
            events: [(); 4].map(|()| event()),
            features: F_VERSION_1
                | F_MRG_RXBUF
                | F_PROTOCOL_FEATURES
                | if packed { F_RING_PACKED } else { 0 },
            packed,
        }
    }

    /// The files: guest memory, log, inflight.
    pub fn files(&self) -> [&OwnedFd; 3] {
        [&self.ram, &self.log, &self.inflight]
    }

    /// Receive buffers, shown; frames to be sent, not shown yet.
    fn lay_out(&self) {
        self.move_buffers(0);
        for slot in 0..POSTED {
            for index in 0..2 {
                let at = rings(index)[1] + 4 + 2 * u64::from(slot);
                self.write(at, &slot.to_le_bytes());
            }
        }
        self.set_frame(&frame::plain(frame::NUMBERED, 0x77));
        if !self.packed {
            self.write(rings(0)[1] + 2, &POSTED.to_le_bytes());
        }
    }

    /// Has the guest send that, of [`frame::NUMBERED`] bytes, each time.
    pub fn set_frame(&self, frame: &[u8]) {
        for slot in 0..POSTED {
            let addr = buffers(1) + u64::from(slot) * u64::from(BUFFER);
            self.write(addr + 12, frame);
        }
    }

    /// Lets all descriptors refer to addresses that are `by` bytes further than where the buffers are.
    pub fn move_buffers(&self, by: u64) {
        for index in 0..2 {
            let table = rings(index)[0];
            for slot in 0..POSTED {
                let addr = buffers(index) + u64::from(slot) * u64::from(BUFFER) + by;
                let (len, flags) = match index {
                    0 => (BUFFER, DESC_WRITE),
                    _ => (12 + frame::NUMBERED as u32, 0),
                };
                let [low, high] = if self.packed && index == 0 {
                    let (id, flags) = (slot, flags | PACKED_AVAIL);
                    PackedDescriptor { addr, len, id, flags }.to_words()
                } else {
                    let next = 0;
                    Descriptor {
                        addr,
                        len,
                        flags,
                        next,
                    }
                    .to_words()
                };
                self.write(table + 16 * u64::from(slot), &longs([low, high]));
            }
        }
    }

    /// Shows the receive buffers of a split ring once more, for the second time, to the device, which is not kicked.
    pub fn repost(&self) {
        let [_, driver, _] = rings(0);
        for slot in 0..POSTED {
            self.write(driver + 4 + 2 * u64::from(POSTED + slot), &slot.to_le_bytes());
        }
        self.write(driver + 2, &(2 * POSTED).to_le_bytes());
    }

    /// How many receive buffers of a split ring the device has used.
    pub fn received(&self) -> u16 {
        let mut bytes = [0; 2];
        let _ = rustix::io::pread(&self.ram, &mut bytes, rings(0)[2] + 2);
        u16::from_le_bytes(bytes)
    }

    /// Shows more frames than a split ring has, which is wrong.
    pub fn jump(&self) {
        self.write(rings(1)[1] + 2, &u16::MAX.to_le_bytes());
        let _ = rustix::io::write(&self.events[1], &1u64.to_ne_bytes());
    }

    /// Shows frames up to that number to the device.
    fn show(&self, last: u16) {
        let [table, driver, _] = rings(1);
        let last = last.min(POSTED);
        if self.packed {
            for slot in last.saturating_sub(SENT)..last {
                // The flags, with those of the first lap.
                let at = table + 16 * u64::from(slot) + 14;
                self.write(at, &PACKED_AVAIL.to_le_bytes());
            }
        } else {
            self.write(driver + 2, &last.to_le_bytes());
        }
        let _ = rustix::io::write(&self.events[1], &1u64.to_ne_bytes());
    }

    /// Writes into guest memory, if it is there still.
    fn write(&self, at: u64, bytes: &[u8]) {
        let size = rustix::fs::fstat(&self.ram).map_or(0, |stat| stat.st_size);
        if at + (bytes.len() as u64) <= size.cast_unsigned() {
            let _ = rustix::io::pwrite(&self.ram, bytes, at);
        }
    }

    /// A whole session.
    pub fn session(&self) -> Vec<Act<'_>> {
        let mut acts = self.greeting();
        acts.push(Act::Say(
            FrontendReq::SET_LOG_BASE,
            longs([LOG, 0]),
            vec![self.log.as_fd()],
        ));
        acts.push(Act::Say(
            FrontendReq::SET_INFLIGHT_FD,
            inflight(inflight_bytes(self.packed), 0, 2, QUEUE),
            vec![self.inflight.as_fd()],
        ));
        acts.push(Act::Say(
            FrontendReq::SET_MEM_TABLE,
            table(&[(0, RAM, 0)]),
            vec![self.ram.as_fd()],
        ));
        for index in 0..2 {
            acts.extend(self.vring(index));
        }
        acts.extend([0, 1].map(|index| Act::Say(FrontendReq::SET_VRING_ENABLE, words([index, 1]), vec![])));
        acts.push(Act::Send(SENT));
        // The log is used from here on.
        acts.push(Act::Say(
            FrontendReq::SET_FEATURES,
            longs([self.features | F_LOG_ALL]),
            vec![],
        ));
        acts.push(Act::Send(2 * SENT));
        // Lanes are stopped and started; they read what the inflight region says.
        acts.push(Act::Say(FrontendReq::SET_VRING_ENABLE, words([1, 0]), vec![]));
        acts.push(Act::Say(FrontendReq::SET_VRING_ENABLE, words([1, 1]), vec![]));
        acts.push(Act::Say(
            FrontendReq::SET_INFLIGHT_FD,
            inflight(inflight_bytes(self.packed), 0, 2, QUEUE),
            vec![self.inflight.as_fd()],
        ));
        acts.push(Act::Send(3 * SENT));
        acts.push(Act::Say(
            FrontendReq::SET_MEM_TABLE,
            table(&[(0, RAM, 0)]),
            vec![self.ram.as_fd()],
        ));
        acts.push(Act::Send(4 * SENT));
        acts.extend([0, 1].map(|index| Act::Say(FrontendReq::GET_VRING_BASE, words([index, 0]), vec![])));
        acts
    }

    /// As far as the features.
    pub fn greeting(&self) -> Vec<Act<'_>> {
        let protocol = Protocol::MQ
            | Protocol::REPLY_ACK
            | Protocol::CONFIG
            | Protocol::CONFIGURE_MEM_SLOTS
            | Protocol::RARP
            | Protocol::LOG_SHMFD
            | Protocol::INFLIGHT_SHMFD;
        vec![
            Act::Say(FrontendReq::GET_FEATURES, vec![], vec![]),
            Act::Say(FrontendReq::GET_PROTOCOL_FEATURES, vec![], vec![]),
            Act::Tell(FrontendReq::SET_PROTOCOL_FEATURES, longs([protocol.bits()])),
            Act::Say(FrontendReq::SET_OWNER, vec![], vec![]),
            Act::Say(FrontendReq::SET_FEATURES, longs([self.features]), vec![]),
        ]
    }

    fn vring(&self, index: u32) -> [Act<'_>; 5] {
        let [table, driver, device] = rings(index.into()).map(|at| USER + at);
        let base = if self.packed { 1 << 15 } else { 0 };
        let event = |at: u32| vec![self.events[at as usize].as_fd()];
        [
            Act::Say(FrontendReq::SET_VRING_NUM, words([index, QUEUE.into()]), vec![]),
            Act::Say(FrontendReq::SET_VRING_BASE, words([index, base]), vec![]),
            Act::Say(
                FrontendReq::SET_VRING_ADDR,
                [words([index, 0]), longs([table, device, driver, 0])].concat(),
                vec![],
            ),
            Act::Say(
                FrontendReq::SET_VRING_CALL,
                longs([index.into()]),
                event(index + 2),
            ),
            Act::Say(FrontendReq::SET_VRING_KICK, longs([index.into()]), event(index)),
        ]
    }
}

/// Bytes of an inflight region for the two rings.
///
/// # Panics
/// Never.
pub fn inflight_bytes(packed: bool) -> u64 {
    let shape = InflightShape {
        queues: 2,
        entries: QUEUE,
        packed,
    };
    shape.bytes().expect("a shape that there is")
}

/// What GET_INFLIGHT_FD and SET_INFLIGHT_FD carry.
pub fn inflight(bytes: u64, offset: u64, queues: u16, size: u16) -> Vec<u8> {
    [
        longs([bytes, offset]),
        [queues.to_ne_bytes(), size.to_ne_bytes(), [0; 2], [0; 2]].concat(),
    ]
    .concat()
}

/// What SET_MEM_TABLE carries, for regions of (guest address, length, offset in the file).
pub fn table(regions: &[(u64, u64, u64)]) -> Vec<u8> {
    let count = u32::try_from(regions.len()).expect("few");
    let entry =
        |&(guest, len, offset): &(u64, u64, u64)| longs([guest, len, USER.wrapping_add(guest), offset]);
    [words([count, 0]), regions.iter().flat_map(entry).collect()].concat()
}

/// A connection.
#[must_use]
pub struct Vmm {
    socket: UnixStream,
}

impl Vmm {
    /// Connects to a back end that listens at `path`.
    ///
    /// # Panics
    /// If nobody listens.
    pub fn connect(path: &Path) -> Self {
        let socket = driver::connect(path);
        // Against a back end that never answers.
        socket.set_read_timeout(Some(wait::SOON)).expect("not zero");
        Self { socket }
    }

    /// The connection.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Does all that, and stops where the back end is gone; how much was done.
    ///
    /// # Errors
    /// The back end neither answers nor ends the connection.
    pub fn perform(&self, shared: &Shared, acts: &[Act<'_>]) -> io::Result<usize> {
        for (at, act) in acts.iter().enumerate() {
            if !self.act(shared, act)? {
                return Ok(at);
            }
        }
        Ok(acts.len())
    }

    /// Does one thing; `false` if the back end is gone, or refuses it.
    ///
    /// # Errors
    /// The back end neither answers nor ends the connection.
    pub fn act(&self, shared: &Shared, act: &Act<'_>) -> io::Result<bool> {
        let answer = match act {
            Act::Say(request, payload, files) => {
                match message::try_send(&self.socket, *request, payload, files) {
                    Ok(()) => message::try_receive(&self.socket),
                    Err(error) => Err(error),
                }
            }
            Act::Tell(request, payload) => {
                message::try_tell(&self.socket, *request, payload).map(|()| vec![0; 8])
            }
            Act::Send(last) => {
                shared.show(*last);
                return Ok(true);
            }
        };
        match answer {
            // What has an answer of its own has one of these, too, where it is not refused.
            Ok(answer) => Ok(!is_refusal(act, &answer)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
            Err(_) => Ok(false),
        }
    }

    /// Says that; `false` if the back end refuses it or is gone.
    ///
    /// # Panics
    /// If the back end neither answers nor ends the connection.
    pub fn says(&self, request: FrontendReq, payload: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        let answer = message::try_send(&self.socket, request, payload, files)
            .and_then(|()| message::try_receive(&self.socket));
        match answer {
            Ok(answer) => answer == [0; 8],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                panic!("{request:?} is neither answered nor refused")
            }
            Err(_) => false,
        }
    }
}

fn is_refusal(act: &Act<'_>, answer: &[u8]) -> bool {
    let is_ack = match act {
        Act::Say(request, ..) => !matches!(
            request,
            FrontendReq::GET_FEATURES
                | FrontendReq::GET_PROTOCOL_FEATURES
                | FrontendReq::GET_VRING_BASE
                | FrontendReq::GET_INFLIGHT_FD
                | FrontendReq::GET_CONFIG
                | FrontendReq::GET_QUEUE_NUM
                | FrontendReq::GET_MAX_MEM_SLOTS
                | FrontendReq::SET_LOG_BASE
        ),
        _ => false,
    };
    is_ack && answer.iter().any(|&byte| byte != 0)
}
