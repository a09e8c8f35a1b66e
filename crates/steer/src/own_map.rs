//! A map for the socket of one queue alone (`STEER_OWN_MAP`, `bpf/steer.h`).
//!
//! The holder of the map can insert, replace or remove a socket. The map of all sockets cannot be shared with
//! a holder: it could remove the socket of another's queue, or insert one that gets no frames. This one has a
//! single entry, for this queue's frames only, and the kernel passes a socket only frames of the queue that
//! it is bound to, or of the one leased to that queue (`xsk_rcv_check`, net/xdp/xsk.c). When the program no
//! longer uses the map, it gets no frames, whoever still holds it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use anyhow::Context as _;
use libbpf_rs::{MapHandle, MapType};

use crate::capture::messages_of;
use crate::layout::{MapSlot, QueueConf, lasting_bits, word_with_own_map};
use crate::map;
use crate::program::{Program, no_socket, socket_stays};
use crate::shape::Shape;

const SHAPE: Shape = Shape {
    name: "own_socket",
    kind: MapType::Xskmap,
    key_bytes: 4,
    value_bytes: 4,
    entries: 1,
};

/// See the module's head.
#[derive(Debug)]
pub struct OwnMap(MapHandle);

impl OwnMap {
    /// Creates an empty map.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn new() -> io::Result<Self> {
        SHAPE.create(0).map(Self).map_err(io::Error::other)
    }

    /// Pins the map on a bpffs, so that it outlives the process, in the place of what is pinned there.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn pin(&mut self, path: &Path) -> io::Result<()> {
        // It may be left from a process that was killed.
        let _ = std::fs::remove_file(path);
        messages_of(|| self.0.pin(path)).0.map_err(io::Error::other)
    }

    /// Opens a pinned map.
    ///
    /// # Errors
    /// The kernel's, or the map has another shape.
    pub fn open_pinned(path: &Path) -> io::Result<Self> {
        let (map, _) = messages_of(|| MapHandle::from_pinned_path(path));
        match map.map_err(io::Error::other)? {
            map if SHAPE.is_of(&map) => Ok(Self(map)),
            _ => Err(io::Error::other("the pinned object is not a map for one socket")),
        }
    }
}

impl AsFd for OwnMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Queues that have a map of their own.
impl Program {
    /// From now on the frames of `queue` go to the socket in `socket`, as configured by `conf`; while there is
    /// none they are passed to the host, and counted as `no_socket`. [`Program::activate_queue`] and
    /// [`Program::deactivate_queue`] end that; [`Program::disable_queue`] also removes the map from the program.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`](crate::MAX_QUEUES), or the kernel's; the queue stays as it was.
    pub fn activate_own_map(&self, queue: u32, socket: &OwnMap, conf: QueueConf) -> anyhow::Result<()> {
        let word = self.word(queue)?;
        map::set(&self.maps.own, &queue, &socket.as_fd().as_raw_fd()).with_context(|| no_socket(queue))?;
        let word = conf.to_word(MapSlot::First) | lasting_bits(word);
        self.set_word(queue, word_with_own_map(word))
    }

    /// Removes this queue's own map from the program.
    pub(crate) fn remove_own_map(&self, queue: u32) -> anyhow::Result<()> {
        map::remove(&self.maps.own, &queue)
            .map(drop)
            .with_context(|| socket_stays(queue))
    }
}
