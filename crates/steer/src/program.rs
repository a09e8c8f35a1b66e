//! The steering program on one interface.
//!
//! A [`Program`] owns one BPF link, whose closing detaches the program, and the program's three maps: the
//! configuration of each queue (mapped, see `config.rs`), the sockets, the counters. A queue changes hands in an
//! order that leaves no moment in which frames are lost uncounted:
//!
//! - enable: the socket into the place that is not in use, then active there;
//! - disable: inactive, then both places emptied.
//!
//! A frame that is in the program during the change follows the word that it has read: at worst it finds an empty
//! slot, is passed to the host, and counted as `no_socket`.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use crate::attach::{AttachError, Attached, Mode, ModeRequest, Target};
use crate::capture::messages_of;
use crate::config::QueueWords;
use crate::layout::{MAX_QUEUES, Place, QueueConf, QueueCounters, word_is_active, word_with_limit};
use crate::skel::SteerSkelBuilder;

/// Why a queue could not be configured or read.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The program has no entry for this queue.
    #[error("queue {queue} is beyond the {MAX_QUEUES} queues that the XDP program knows")]
    OutOfRange {
        /// As given.
        queue: u32,
    },
    /// The limit of a queue that is not ours means nothing.
    #[error("queue {queue} is not enabled")]
    NotEnabled {
        /// As given.
        queue: u32,
    },
    /// The kernel refused the socket; most often it is no AF_XDP socket.
    #[error("cannot give queue {queue} its AF_XDP socket")]
    Socket {
        /// As given.
        queue: u32,
        /// What libbpf returned.
        #[source]
        source: libbpf_rs::Error,
    },
    /// The slot of the socket could not be emptied.
    #[error("cannot take the AF_XDP socket of queue {queue} back")]
    Remove {
        /// As given.
        queue: u32,
        /// What libbpf returned.
        #[source]
        source: libbpf_rs::Error,
    },
    /// The counters could not be read.
    #[error("cannot read the counters of queue {queue}")]
    Counters {
        /// As given.
        queue: u32,
        /// What libbpf returned.
        #[source]
        source: libbpf_rs::Error,
    },
    /// The counters are not those of this version of the program: a bug of ours.
    #[error("the counters of queue {queue} have another layout than this version's")]
    Layout {
        /// As given.
        queue: u32,
    },
}

/// The steering program, attached to one interface for as long as this value lives.
///
/// `Send` and `Sync`; the methods take `&self`, so the users of an interface's queues can share it. Two callers must
/// not change the same queue at the same time.
#[derive(Debug)]
pub struct Program {
    // Dropped first: the program goes before its maps.
    attached: Attached,
    id: u32,
    words: QueueWords,
    sockets: MapHandle,
    counts: MapHandle,
    /// For each queue, whether a socket was placed that is not used yet. Only callers that change the same queue share one, and
    /// those must not do it at the same time.
    successors: Box<[AtomicBool]>,
}

impl Program {
    /// Loads the program and attaches it to the interface with this index in the calling thread's network
    /// namespace. All its queues are passed on to the host until [`Program::enable_queue`].
    ///
    /// `frags` asks for the variant that takes frames in several buffers, which drivers require at an MTU whose
    /// frames do not fit one (veth: above 3,506 bytes).
    ///
    /// # Errors
    /// [`AttachError::Foreign`] if any XDP program is there already, whoever's it is. With
    /// [`ModeRequest::Auto`] a refusal of native mode by the driver is no error: see [`Program::fallback`].
    pub fn attach(ifindex: u32, request: ModeRequest, frags: bool) -> Result<Self, AttachError> {
        let target = Target::check(ifindex, frags)?;
        let (loaded, said) = messages_of(|| load(frags));
        let loaded = loaded.map_err(|source| AttachError::Load { detail: said, source })?;
        let words = QueueWords::map(loaded.queues.as_fd()).map_err(AttachError::Config)?;
        let attached = target.attach(loaded.program.as_fd(), request)?;
        Ok(Self {
            attached,
            id: loaded.id,
            words,
            sockets: loaded.sockets,
            counts: loaded.counts,
            successors: (0..MAX_QUEUES).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    /// The mode in use.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.attached.mode
    }

    /// Why native mode was not possible, where [`ModeRequest::Auto`] ended with skb; one line.
    #[must_use]
    pub fn fallback(&self) -> Option<&str> {
        self.attached.fallback.as_deref()
    }

    /// The kernel's id of the program, as `bpftool prog` and `ip link` show it.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Takes the program off the interface ahead of the value's end; nothing happens if it is off already.
    ///
    /// # Errors
    /// The kernel's.
    pub fn detach(&self) -> std::io::Result<()> {
        self.attached.detach()
    }

    /// From now on the frames of `queue` go to the AF_XDP socket `xsk`, as `conf` says.
    ///
    /// `xsk` must be bound to this interface and queue, or the kernel drops the frames. A queue that is enabled
    /// already changes its socket and configuration.
    ///
    /// # Errors
    /// [`QueueError::OutOfRange`], or [`QueueError::Socket`] if `xsk` is no AF_XDP socket; the queue stays as it was.
    pub fn enable_queue(&self, queue: u32, xsk: BorrowedFd<'_>, conf: QueueConf) -> Result<(), QueueError> {
        self.place_socket(queue, xsk)?;
        self.activate_queue(queue, conf)
    }

    /// The first half of [`Program::enable_queue`]: puts `xsk`, which need not be bound yet, beside the socket that
    /// the queue may have. Frames go on as before until [`Program::activate_queue`]. Of several that are placed the last counts.
    ///
    /// # Errors
    /// As [`Program::enable_queue`].
    pub fn place_socket(&self, queue: u32, xsk: BorrowedFd<'_>) -> Result<(), QueueError> {
        let key = self.place(queue)?.other().key(queue);
        let (updated, _) = messages_of(|| {
            self.sockets
                .update(&key.to_ne_bytes(), &xsk.as_raw_fd().to_ne_bytes(), MapFlags::ANY)
        });
        updated.map_err(|source| QueueError::Socket { queue, source })?;
        self.successor(queue)?.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The second half of [`Program::enable_queue`]: from now on the frames of `queue` go to the socket that was
    /// placed last, which must be bound by now. Without one that was placed since, the queue keeps the socket that it had, with
    /// this configuration; while it has none, frames are passed on, and counted as `no_socket`.
    ///
    /// # Errors
    /// [`QueueError::OutOfRange`].
    pub fn activate_queue(&self, queue: u32, conf: QueueConf) -> Result<(), QueueError> {
        let place = match self.successor(queue)?.swap(false, Ordering::Relaxed) {
            true => self.place(queue)?.other(),
            false => self.place(queue)?,
        };
        self.set_word(queue, conf.to_word(place))
    }

    /// From now on the frames of `queue` are passed on to the host; its sockets stay where they are.
    ///
    /// # Errors
    /// [`QueueError::OutOfRange`].
    pub fn deactivate_queue(&self, queue: u32) -> Result<(), QueueError> {
        let place = self.place(queue)?;
        self.set_word(queue, place.inactive_word())
    }

    /// From now on the frames of `queue` are passed on to the host, and it has no socket. Nothing happens if that is so already.
    ///
    /// # Errors
    /// [`QueueError::OutOfRange`], or [`QueueError::Remove`] if the kernel keeps a socket in its place; frames are
    /// passed on then, too.
    pub fn disable_queue(&self, queue: u32) -> Result<(), QueueError> {
        self.deactivate_queue(queue)?;
        self.successor(queue)?.store(false, Ordering::Relaxed);
        let remove = |place: Place| {
            let (deleted, _) = messages_of(|| self.sockets.delete(&place.key(queue).to_ne_bytes()));
            match deleted {
                Err(source) if source.kind() == libbpf_rs::ErrorKind::NotFound => Ok(()),
                result => result.map_err(|source| QueueError::Remove { queue, source }),
            }
        };
        // Both are tried, whatever becomes of the first.
        remove(Place::First).and(remove(Place::Second))
    }

    /// The place of the queue's socket, now or last.
    fn place(&self, queue: u32) -> Result<Place, QueueError> {
        let word = self.words.load(queue);
        word.map(Place::of_word).ok_or(QueueError::OutOfRange { queue })
    }

    /// Whether a socket waits in the other place.
    fn successor(&self, queue: u32) -> Result<&AtomicBool, QueueError> {
        self.successors
            .get(queue as usize)
            .ok_or(QueueError::OutOfRange { queue })
    }

    /// Changes the longest frame of an enabled queue, in bytes; see [`QueueConf::frame_limit`]. One store, no
    /// system call.
    ///
    /// A frame that is in the program at this moment may still have been measured against the old limit, so a
    /// buffer that is smaller than the old limit must not be posted in the same breath.
    ///
    /// # Errors
    /// [`QueueError::OutOfRange`], [`QueueError::NotEnabled`].
    pub fn set_frame_limit(&self, queue: u32, frame_limit: u32) -> Result<(), QueueError> {
        let word = self.words.load(queue).ok_or(QueueError::OutOfRange { queue })?;
        if !word_is_active(word) {
            return Err(QueueError::NotEnabled { queue });
        }
        self.set_word(queue, word_with_limit(word, frame_limit))
    }

    /// What the program did with the frames of `queue` since it was attached, summed over the CPUs. Frames in
    /// flight may be missing.
    ///
    /// # Errors
    /// [`QueueError::OutOfRange`], [`QueueError::Counters`] if the kernel refuses.
    pub fn counters(&self, queue: u32) -> Result<QueueCounters, QueueError> {
        if queue >= MAX_QUEUES {
            return Err(QueueError::OutOfRange { queue });
        }
        let (looked_up, _) = messages_of(|| self.counts.lookup_percpu(&queue.to_ne_bytes(), MapFlags::ANY));
        let cpus = looked_up
            .map_err(|source| QueueError::Counters { queue, source })?
            .unwrap_or_default();
        let mut sum = QueueCounters::default();
        if cpus.iter().all(|bytes| sum.add_cpu(bytes)) {
            Ok(sum)
        } else {
            Err(QueueError::Layout { queue })
        }
    }

    fn set_word(&self, queue: u32, word: u64) -> Result<(), QueueError> {
        if self.words.store(queue, word) {
            Ok(())
        } else {
            Err(QueueError::OutOfRange { queue })
        }
    }
}

/// The loaded program and handles of its maps, freed from the skeleton's lifetime.
struct Loaded {
    program: std::os::fd::OwnedFd,
    id: u32,
    queues: MapHandle,
    sockets: MapHandle,
    counts: MapHandle,
}

fn load(frags: bool) -> libbpf_rs::Result<Loaded> {
    let mut storage = MaybeUninit::uninit();
    let mut open = SteerSkelBuilder::default().open(&mut storage)?;
    open.progs.steer.set_autoload(!frags);
    open.progs.steer_frags.set_autoload(frags);
    let skel = open.load()?;
    let program = if frags {
        skel.progs.steer_frags.as_fd()
    } else {
        skel.progs.steer.as_fd()
    };
    let program = program.try_clone_to_owned()?;
    Ok(Loaded {
        id: libbpf_rs::Program::id_from_fd(program.as_fd())?,
        program,
        queues: MapHandle::try_from(&skel.maps.steer_queues)?,
        sockets: MapHandle::try_from(&skel.maps.steer_sockets)?,
        counts: MapHandle::try_from(&skel.maps.steer_counts)?,
    })
}
