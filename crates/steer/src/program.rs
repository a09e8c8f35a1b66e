//! The steering program on one interface.
//!
//! A [`Program`] owns one BPF link, whose closing detaches the program, and the program's maps: the
//! configuration of each queue (mapped, see `config.rs`), the sockets, the filters of queues, the counters,
//! the maps of networks (`network.rs`), and those for hints (`program_hints.rs`). A queue is changed in an
//! order in which no frame is lost uncounted:
//!
//! - enable: insert the socket into the unused slot, then make that slot active;
//! - disable: make the queue inactive, then empty both slots.
//!
//! A frame that is in the program during the change is handled by the word that was read: at worst the slot
//! is empty, and the frame is passed to the host, and counted as `no_socket`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context as _, bail, ensure};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapInfo};

use crate::attach::Target;
use crate::capture::messages_of;
use crate::config::QueueWords;
use crate::error::AttachError;
use crate::hints::HintSet;
use crate::layout::{
    Entry, Filter, LAST_VLAN, MAX_QUEUES, MapSlot, QueueConf, QueueCounters, filter_bits, lasting_bits,
    word_has_successor, word_with_hints, word_with_successor,
};
use crate::link::{self, Attached, cannot_open};
use crate::load;
use crate::map;
use crate::maps::{Maps, QUEUES};
use crate::marks::InterfaceMarks;
use crate::mode::{Mode, ModeRequest};
use crate::notes::{Note, Notes, Now, Turn};
use crate::own_layouts::Generation;
use crate::shape::Shape;

/// The steering program, attached to one interface for as long as this value exists, or until it is detached if it was
/// [pinned](Program::pin).
///
/// `Send` and `Sync`; the methods take `&self`, so the users of an interface's queues can share it. Two callers must
/// not change the same queue at the same time.
#[derive(Debug)]
pub struct Program {
    // Dropped first, so that the program is detached before its maps are closed.
    pub(crate) attached: Attached,
    words: QueueWords,
    pub(crate) maps: Maps,
    /// The kernel's id of the map behind `words`.
    number: u32,
    /// The program on the link, and its metadata layout.
    pub(crate) now: Now,
    pub(crate) notes: Notes,
    /// The generation of later programs; computed when first needed.
    pub(crate) generation: OnceLock<Generation>,
    /// Created when the first flow gets a mark.
    pub(crate) marks: OnceLock<InterfaceMarks>,
    /// Where link and maps are pinned.
    pub(crate) dir: Option<PathBuf>,
}

impl Program {
    /// Loads the program and attaches it to the interface with this index in the calling thread's network
    /// namespace. Frames of all its queues are passed to the host until [`Program::enable_queue`].
    ///
    /// `frags` selects the variant that supports frames in several buffers, which drivers require at an MTU
    /// whose frames do not fit one (veth: above 3,506 bytes).
    ///
    /// # Errors
    /// [`AttachError::Foreign`] if there is already an XDP program. With [`ModeRequest::Xdp`] and
    /// [`ModeRequest::Auto`] a rejection of native mode by the driver is no error: see [`Program::fallback`].
    /// With [`ModeRequest::Tap`] the program is not attached, and another one on the interface is no error.
    pub fn attach(ifindex: u32, request: ModeRequest, frags: bool) -> Result<Self, AttachError> {
        let target = match request {
            ModeRequest::Tap => Target::find(ifindex, frags)?,
            ModeRequest::Xdp | ModeRequest::Native | ModeRequest::Skb | ModeRequest::Auto => {
                Target::check(ifindex, frags)?
            }
        };
        let (loaded, said) = messages_of(|| {
            let (loaded, maps) = load::plain(frags, &[])?;
            let (number, notes) = (number_of(&maps.queues)?, Notes::new()?);
            Ok((loaded, maps, number, notes))
        });
        let (loaded, maps, number, notes) =
            loaded.map_err(|source| AttachError::Load { detail: said, source })?;
        let words = QueueWords::map(maps.queues.as_fd()).map_err(AttachError::Config)?;
        let attached = target.attach(loaded.program.as_fd(), loaded.id, request)?;
        let note = Note {
            program: loaded.id,
            turn: Turn::default(),
            frags,
            hints: HintSet::NONE,
            layout: None,
        };
        // An error does not matter: this program writes no metadata.
        let _ = notes.add(&note);
        Ok(Self {
            attached,
            words,
            maps,
            number,
            now: Now::new(ifindex, note),
            notes,
            generation: OnceLock::new(),
            marks: OnceLock::new(),
            dir: None,
        })
    }

    /// The mode in use.
    pub fn mode(&self) -> Mode {
        self.attached.mode
    }

    /// Why native mode was not possible, if [`ModeRequest::Xdp`] or [`ModeRequest::Auto`] chose another; one line.
    pub fn fallback(&self) -> Option<&str> {
        self.attached.fallback.as_deref()
    }

    /// The kernel's id of the program, as `bpftool prog` and `ip link` show it. It changes with
    /// [`Program::set_hints`].
    pub fn id(&self) -> u32 {
        self.now.get().program
    }

    /// A number that stays the same as long as the program is attached, whatever its hints, even for the next
    /// owner of a pinned one: the kernel's id of one of its maps.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Detaches the program before this value is dropped; does nothing if it is detached already.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn detach(&self) -> io::Result<()> {
        self.attached.detach()
    }

    /// Sends the frames of `queue` to the AF_XDP socket `xsk` from now on, with this configuration.
    ///
    /// `xsk` must be bound to this interface and queue, or the kernel drops the frames. If a queue is enabled
    /// already, this changes its socket and configuration.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`], or `xsk` is no AF_XDP socket; the queue stays as it was.
    pub fn enable_queue(&self, queue: u32, xsk: BorrowedFd<'_>, conf: QueueConf) -> anyhow::Result<()> {
        self.place_socket(queue, xsk)?;
        self.activate_queue(queue, conf)
    }

    /// The first half of [`Program::enable_queue`]: inserts `xsk`, which need not be bound yet, into the queue's
    /// unused slot. Nothing changes for frames until [`Program::activate_queue`]. The last of several placed
    /// sockets is used. It must have its RX ring: from Linux 7.1 on the kernel refuses it otherwise (ENOBUFS).
    ///
    /// # Errors
    /// As [`Program::enable_queue`].
    pub fn place_socket(&self, queue: u32, xsk: BorrowedFd<'_>) -> anyhow::Result<()> {
        let key = self.slot(queue)?.other().key(queue);
        map::set(&self.maps.sockets, &key, &xsk.as_raw_fd()).with_context(|| no_socket(queue))?;
        self.set_word(queue, word_with_successor(self.word(queue)?))
    }

    /// Whether a socket placed for the queue is still open in any process: the kernel empties its slot when
    /// it is closed (`xsk_map_try_sock_delete`, net/xdp/xskmap.c). The check inserts `other`, a socket with
    /// an RX ring, into an empty slot, and removes it again.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`], or the kernel's.
    pub fn has_socket(&self, queue: u32, other: BorrowedFd<'_>) -> anyhow::Result<bool> {
        let slot = self.slot(queue)?;
        for slot in [slot, slot.other()] {
            let key = slot.key(queue);
            match map::set_as(&self.maps.sockets, &key, &other.as_raw_fd(), MapFlags::NO_EXIST) {
                Err(error) if error.kind() == libbpf_rs::ErrorKind::AlreadyExists => return Ok(true),
                updated => updated.with_context(|| no_socket(queue))?,
            }
            map::remove(&self.maps.sockets, &key).with_context(|| no_socket(queue))?;
        }
        Ok(false)
    }

    /// The second half of [`Program::enable_queue`]: from now on the frames of `queue` go to the socket that
    /// was placed last, which must be bound by now. If none was placed since, the queue keeps its socket,
    /// with this configuration; without a socket, frames are passed to the host, and counted as `no_socket`.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`].
    pub fn activate_queue(&self, queue: u32, conf: QueueConf) -> anyhow::Result<()> {
        self.activate_judged(queue, conf, true)
    }

    /// As [`Program::activate_queue`], with hints only if `hints` allows them; [`Program::allow_hints`] changes that.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`].
    pub fn activate_judged(&self, queue: u32, conf: QueueConf, hints: bool) -> anyhow::Result<()> {
        let word = self.word(queue)?;
        let slot = match word_has_successor(word) {
            true => MapSlot::of_word(word).other(),
            false => MapSlot::of_word(word),
        };
        let word = conf.to_word(slot) | lasting_bits(word);
        self.set_word(queue, word_with_hints(word, hints))
    }

    /// Allows `queue` the hints that its [`QueueConf`] requests, or disables them.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`].
    pub fn allow_hints(&self, queue: u32, allowed: bool) -> anyhow::Result<()> {
        self.set_word(queue, word_with_hints(self.word(queue)?, allowed))
    }

    /// From now on the frames of `queue` are passed to the host; its sockets stay in the map.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`].
    pub fn deactivate_queue(&self, queue: u32) -> anyhow::Result<()> {
        let word = self.word(queue)?;
        let inactive = MapSlot::of_word(word).inactive_word() | lasting_bits(word);
        match word_has_successor(word) {
            true => self.set_word(queue, word_with_successor(inactive)),
            false => self.set_word(queue, inactive),
        }
    }

    /// From now on only frames that match `filter` go to the queue's socket, the others are passed to the
    /// host, whether the queue is enabled now or later. A new program has no filters. While a filter is
    /// changed, frames that match the old or the new one go to the socket.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`], a VLAN invalid, or the kernel's; only frames that match the old or the new
    /// filter go to the socket.
    pub fn set_filter(&self, queue: u32, filter: &Filter) -> anyhow::Result<()> {
        let word = self.word(queue)?;
        if let Some(&vlan) = filter.vlans.iter().find(|&&vlan| vlan > LAST_VLAN) {
            bail!("VLAN {vlan} is invalid: VLAN IDs are 1 to {LAST_VLAN}, and 0 for frames without one");
        }
        // The usual cause: the map has no room for more addresses and VLANs.
        let refused = || format!("cannot set the filter of queue {queue}");
        // New entries are added first, and stale ones removed last; the store of the word in between enables
        // the filter.
        for entry in filter.entries(queue) {
            map::set(&self.maps.entries, &entry, &1u8).with_context(refused)?;
        }
        self.set_word(queue, word & !filter_bits(u64::MAX) | filter.bits())?;
        let wanted: Vec<Entry> = filter.entries(queue).collect();
        let stale = self.entries_of(queue).filter(|entry| !wanted.contains(entry));
        let mut result = Ok(());
        for entry in stale.collect::<Vec<_>>() {
            if let Err(error) = map::remove(&self.maps.entries, &entry) {
                result = Err(error).with_context(refused);
            }
        }
        result
    }

    /// The filter of the queue.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`].
    pub fn filter(&self, queue: u32) -> anyhow::Result<Filter> {
        self.word(queue)?;
        let mut filter = Filter::default();
        self.entries_of(queue).for_each(|entry| filter.add(entry));
        filter.macs.sort_unstable();
        filter.vlans.sort_unstable();
        Ok(filter)
    }

    fn entries_of(&self, queue: u32) -> impl Iterator<Item = Entry> {
        map::keys(&self.maps.entries).filter(move |entry: &Entry| u32::from(entry.queue) == queue)
    }

    /// From now on the frames of `queue` are passed to the host, and it has no socket. Does nothing if it is
    /// disabled already. Its filter stays.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`], or the kernel keeps a socket in its slot; frames are passed to the host
    /// nevertheless.
    pub fn disable_queue(&self, queue: u32) -> anyhow::Result<()> {
        let word = self.word(queue)?;
        self.set_word(queue, MapSlot::of_word(word).inactive_word() | lasting_bits(word))?;
        let remove = |slot: MapSlot| {
            let removed = map::remove(&self.maps.sockets, &slot.key(queue)).map(drop);
            removed.with_context(|| socket_stays(queue))
        };
        // All are tried, even if the first fails.
        let removed = remove(MapSlot::First).and(remove(MapSlot::Second));
        removed.and(self.remove_own_map(queue))
    }

    /// The slot of the queue's present or last socket.
    fn slot(&self, queue: u32) -> anyhow::Result<MapSlot> {
        self.word(queue).map(MapSlot::of_word)
    }

    /// The word of a queue. Only this process changes it, and two callers must not change the same queue at the same
    /// time.
    pub(crate) fn word(&self, queue: u32) -> anyhow::Result<u64> {
        self.words.load(queue).with_context(|| out_of_range(queue))
    }

    /// What the program did with the frames of `queue` since it was attached, summed over the CPUs. Frames in
    /// flight may be missing.
    ///
    /// # Errors
    /// `queue` is beyond [`MAX_QUEUES`], or the kernel's.
    pub fn counters(&self, queue: u32) -> anyhow::Result<QueueCounters> {
        ensure!(queue < MAX_QUEUES, out_of_range(queue));
        let (looked_up, _) = messages_of(|| {
            self.maps
                .counts
                .lookup_percpu(&queue.to_ne_bytes(), MapFlags::ANY)
        });
        let cpus = looked_up
            .with_context(|| format!("cannot read the counters of queue {queue}"))?
            .unwrap_or_default();
        let mut sum = QueueCounters::default();
        // Otherwise a bug of this crate.
        ensure!(
            cpus.iter().all(|bytes| sum.add_cpu(bytes)),
            "the counters of queue {queue} have another layout than this version's"
        );
        Ok(sum)
    }

    pub(crate) fn set_word(&self, queue: u32, word: u64) -> anyhow::Result<()> {
        ensure!(self.words.store(queue, word), out_of_range(queue));
        Ok(())
    }
}

/// Pinning: a program that outlives the process which attached it, and its next owner.
impl Program {
    /// Pins link and maps into `dir`, which is empty and on a bpffs. From then on the program outlives this
    /// value and the process; [`Program::detach`] or [`detach_pinned`] removes it. The link is pinned last:
    /// if it is there, all is complete.
    ///
    /// # Errors
    /// An error of the kernel; the program is then detached with this value, and the caller must remove the pins.
    pub fn pin(&mut self, dir: &Path) -> anyhow::Result<()> {
        let marks = self.marks.get();
        let marks = marks.map(|marks| (InterfaceMarks::SHAPE, &marks.0));
        let hints = marks.into_iter().chain([(Notes::SHAPE, &self.notes.0)]);
        for (shape, map) in self.maps.all().into_iter().chain(hints) {
            let path = dir.join(shape.name);
            link::pin(map.as_fd(), &path).with_context(|| cannot_open(&path))?;
        }
        let last = match self.mode() {
            Mode::Native | Mode::Skb => LINK,
            Mode::Tap => UNATTACHED,
        };
        let last = dir.join(last);
        self.attached.pin(&last).with_context(|| cannot_open(&last))?;
        self.dir = Some(dir.to_owned());
        Ok(())
    }

    /// Takes over the program pinned in `dir`, which is on the interface with this index. Queues, sockets,
    /// counters and hints are unchanged.
    ///
    /// # Errors
    /// The pinned objects cannot be used, and are unchanged.
    pub fn open_pinned(ifindex: u32, dir: &Path) -> anyhow::Result<Self> {
        let unattached = dir.join(UNATTACHED);
        let attached = match unattached.exists() {
            true => Attached::open_unattached(ifindex, &unattached)?,
            false => Attached::open_pinned(ifindex, &dir.join(LINK))?,
        };
        let map = |shape: Shape| {
            let path = dir.join(shape.name);
            let (map, _) = messages_of(|| MapHandle::from_pinned_path(&path));
            let map = map.with_context(|| cannot_open(&path))?;
            ensure!(
                shape.is_of(&map),
                "{} is not a map of this version of the XDP program",
                path.display()
            );
            Ok(map)
        };
        let maps = Maps::each(map)?;
        let queues = || cannot_open(&dir.join(QUEUES.name));
        let words = QueueWords::map(maps.queues.as_fd()).with_context(queues)?;
        let number = number_of(&maps.queues).with_context(queues)?;
        let notes = Notes(map(Notes::SHAPE)?);
        let note = notes.of_program(attached.program).unwrap_or(Note {
            program: attached.program,
            turn: Turn::default(),
            frags: false,
            hints: HintSet::NONE,
            layout: None,
        });
        let marks = OnceLock::new();
        // They may not be in use.
        if dir.join(InterfaceMarks::SHAPE.name).exists() {
            let _ = marks.set(InterfaceMarks(map(InterfaceMarks::SHAPE)?));
        }
        Ok(Self {
            attached,
            words,
            maps,
            number,
            generation: OnceLock::new(),
            now: Now::new(ifindex, note),
            notes,
            marks,
            dir: Some(dir.to_owned()),
        })
    }
}

/// Detaches the program whose link is pinned in `dir`; does nothing if there is no link, or if it is detached
/// already. The pins stay.
///
/// # Errors
/// An error of the kernel.
pub fn detach_pinned(dir: &Path) -> io::Result<()> {
    link::detach_pinned(&dir.join(LINK))
}

fn out_of_range(queue: u32) -> String {
    format!("queue {queue} is beyond the {MAX_QUEUES} queues that the XDP program knows")
}

/// The kernel refused the socket: it is no AF_XDP socket, or has no RX ring (ENOBUFS).
pub(crate) fn no_socket(queue: u32) -> String {
    format!("cannot give queue {queue} its AF_XDP socket")
}

pub(crate) fn socket_stays(queue: u32) -> String {
    format!("cannot remove the AF_XDP socket of queue {queue}")
}

fn number_of(queues: &MapHandle) -> libbpf_rs::Result<u32> {
    Ok(MapInfo::new(queues.as_fd())?.info.id)
}

/// Name of the pinned link.
const LINK: &str = "link";
/// Name of the pinned program if it is not attached, so that there is no link.
const UNATTACHED: &str = "program";
