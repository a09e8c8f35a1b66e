//! A queue of an interface. It exists as long as the daemon has the interface, whoever owns the XDP program on that
//! (`steering.rs`).
//!
//! The daemon opens it once: socket, memory of its own, bind. A lane borrows it to move its frames
//! ([`InterfaceQueue::lend`]) and returns it; guests start and stop, and the socket stays bound and filled. Drivers
//! such as ice take the carrier of the whole NIC down when a queue's pool is set up or torn down, so neither a guest's
//! reboot nor a change of its memory may do that. No guest influences how it is opened; the features that a guest
//! negotiated decide only which of its capabilities are used. It is opened again if frames of the interface's MTU need
//! larger chunks, multi-buffer, or another data path.
//!
//! While it is not lent, the program passes its frames on to the host. If that cannot be set (the steward is away), the
//! socket is closed instead, which has the same effect. A foreign program is not changed: its frames wait meanwhile,
//! and are discarded.
//!
//! In tap mode frames come by a tap ([`super::interface_tap`]): a queue only sends, in copy mode and without a program.
//! Where the kernel has no multi-buffer sockets (before Linux 6.6), frames that are longer than a chunk are sent by the
//! queue's tap, as GSO packets are.
//!
//! Direct placement is the exception: the queue is *coupled* to one guest's memory ([`InterfaceQueue::couple`]), and
//! closed when that lane ends. Its port opens it with memory of the daemon only while frames of its guest are copied.
//!
//! All functions may wait: for the kernel, which keeps a queue some 20 ms after its socket was closed, and for the
//! steward.

use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use anyhow::anyhow;
use common::binding::{Binding, GuestBuffers, LONGEST_FRAME, LONGEST_ZERO_COPY, TX_METADATA_BYTES};
use device::counters::PairCounters;
use steer::{QueueConf, VirtioHeader, with_sources};
use xsk::{BindRequest, Mode, OpenError, Socket, Umem};

use super::error::InterfaceError;
use super::interface::{BIND_TIMEOUT, Interface, QueueRequest};
use super::mode::Checksums;
use super::queue_state::{Ended, NotesEnd, OpenQueue, Opened, QueueState};
use super::shared_memory::{OpenedSlice, SliceUse};
use super::steering::{Prepared, RELEASE};
use crate::config::{Placement, Segments};
use dataplane::nic::SEND_RING;
use dataplane::nic::coupled::{Coupled, Release};
use dataplane::nic::endpoint::{Chunks, NicQueue, to_send_only};
use dataplane::nic::queue::{MOST_PIECES, Nic, Sends};
use dataplane::nic::tap::{SendTap, Tap};
use dataplane::nic::xdp::XdpNic;

/// Why there is no tap: program and sockets are another program's.
const NO_TAPS: &str = "the owner of the XDP program provides no tap for them";

#[derive(Clone)]
pub(crate) struct InterfaceQueue {
    pub(crate) interface: Arc<Interface>,
    pub(crate) number: u32,
}

/// A socket with registered memory, which is not bound to a queue yet.
pub(crate) struct RegisteredSocket {
    socket: Prepared,
    opened: Opened,
}

impl RegisteredSocket {
    /// The registered memory, with room for TX metadata if the kernel supports that.
    pub(crate) fn umem(&self) -> &Umem {
        self.socket.umem()
    }

    /// Whether the interface still has the MTU that it was registered for.
    pub(crate) fn is_for(&self, interface: &Interface) -> bool {
        self.opened.frame_limit == interface.frame_limit()
    }
}

/// What has to change of a lane's queue for the interface's present MTU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Nothing: it is open for that MTU.
    Same,
    /// Only the frame limits: its socket and memory suit that MTU.
    Limit,
    /// Socket and memory: both have to be replaced.
    Replace,
}

/// A coupled queue that is used by DMA. If it received into guest memory, its frames are dropped until the driver has
/// released that: the kernel would copy frames that the program passes to the host from there, and the guest could write
/// to them before.
struct ReleaseByDma {
    queue: InterfaceQueue,
    into_guest: bool,
}

impl Release for ReleaseByDma {
    fn begin(&self) {
        if self.into_guest {
            // Fails only when the interface or the steward is gone, or away.
            let _ = self
                .queue
                .interface
                .steering
                .ask(|lease| lease.withhold(self.queue.number));
        }
    }

    fn wait(self: Box<Self>) -> Result<(), Box<dyn Error>> {
        let Self { queue, into_guest } = *self;
        let interface = &queue.interface;
        interface.steering.await_free(queue.number, BIND_TIMEOUT)?;
        if into_guest {
            interface.pass_to_host(queue.number);
        }
        Ok(())
    }
}

/// Kept with a coupled socket: passes the queue's frames to the host when the socket is closed, unless
/// [`Release::wait`] does that later.
struct CouplingGuard {
    queue: InterfaceQueue,
    passes: bool,
    _ended: NotesEnd,
}

impl Drop for CouplingGuard {
    fn drop(&mut self) {
        if self.passes {
            // Fails only when the interface or the steward is gone, and the program with it.
            let _ = self.queue.interface.pass_to_host(self.queue.number);
        }
    }
}

impl InterfaceQueue {
    /// The queue of that number.
    pub(crate) fn new(interface: &Arc<Interface>, number: u32) -> Self {
        Self {
            interface: Arc::clone(interface),
            number,
        }
    }

    /// Opens the queue with memory of the daemon, if it is closed. Its frames go to the host.
    /// Errors: [`InterfaceError`], naming interface, queue and remedy.
    pub(crate) fn open(&self) -> Result<(), InterfaceError> {
        let mut state = self.interface.state(self.number)?;
        self.open_locked(state.now())
    }

    /// As [`Self::open`], and retries until `deadline` while another socket uses the queue.
    pub(crate) fn open_until(&self, deadline: Instant) -> Result<(), InterfaceError> {
        let begun = Instant::now();
        loop {
            match self.open() {
                Err(InterfaceError::Open(OpenError::Busy { ifindex, queue, .. })) => {
                    let waited = begun.elapsed();
                    if Instant::now() >= deadline {
                        let busy = OpenError::Busy {
                            ifindex,
                            queue,
                            waited,
                        };
                        return Err(busy.into());
                    }
                }
                result => return result,
            }
        }
    }

    /// Lends the queue to a lane, and opens it before that if it is closed. Frames that arrived before are discarded,
    /// and counted.
    /// Errors: [`InterfaceError`]; [`InterfaceError::InUse`] while a lane has it.
    pub(crate) fn lend(&self, counters: &PairCounters) -> Result<NicQueue<XdpNic>, InterfaceError> {
        let mut state = self.interface.state(self.number)?;
        let state = state.now();
        self.renew(state)?;
        self.open_locked(state)?;
        let QueueState::Open(open) = &mut *state else {
            return Err(InterfaceError::InUse);
        };
        open.nic.discard(counters);
        self.open_send_tap(&mut open.nic);
        // Before the NIC gets a chunk: a foreign program may leave metadata at once.
        let metadata = self.interface.metadata(self.number);
        open.nic.set_metadata(&metadata);
        open.nic.seen = Arc::clone(&self.interface.seen);
        open.nic.frame_limit = open.opened.frame_limit;
        open.nic.fill();
        open.opened.leaves = metadata.leaves;
        let conf = open.opened.conf();
        if let Err(error) = self.interface.steering.activate(self.number, conf) {
            // A steward that did not answer in time may still activate it: then the program finds no socket for its
            // frames, and passes them to the host.
            state.close();
            self.interface.forget_metadata(self.number);
            return Err(error);
        }
        let lent = state.lend().ok_or(InterfaceError::InUse)?;
        Ok(lent.nic)
    }

    /// Takes the queue back; its frames go to the host again. Undelivered frames are discarded, and counted, and so are
    /// unsent ones if the queue is closed.
    pub(crate) fn give_back(&self, mut nic: NicQueue<XdpNic>, counters: &PairCounters) {
        let copies = self.interface.options.placement == Placement::Copy;
        let stays = copies && self.interface.pass_to_host(self.number);
        self.interface.forget_metadata(self.number);
        nic.discard(counters);
        if !stays {
            counters.from_guest_queue_stopped.add(nic.nic.unsent() as u64);
        }
        let Ok(mut state) = self.interface.state(self.number) else {
            return;
        };
        if let QueueState::Lent { opened, ended } = &*state {
            nic.fill();
            let open = OpenQueue {
                nic,
                opened: *opened,
                ended: Arc::clone(ended),
            };
            *state = QueueState::Open(Box::new(open));
        }
        if !stays {
            state.close();
        }
        if !copies {
            self.interface.pass_to_host(self.number);
        }
    }

    /// The headroom that chunks of a guest's memory need before each received frame, in addition to the kernel's own,
    /// so that the NIC's DMA never writes behind the guest's buffers.
    pub(crate) fn headroom(&self, guest: GuestBuffers) -> Result<u32, InterfaceError> {
        let window = self.binding(Some(guest))?.window;
        Ok(window.map_or(0, |window| LONGEST_FRAME - window))
    }

    /// Registers a guest's memory with a new socket; `guest` describes its receive buffers. The queue is not touched,
    /// and may be in use.
    pub(crate) fn register(
        &self,
        umem: &Umem,
        guest: GuestBuffers,
    ) -> Result<RegisteredSocket, InterfaceError> {
        let _near = self.interface.near();
        let wanted = self.wanted(Some(guest))?;
        let opened = Opened {
            pieces: wanted.pieces || wanted.ask == BindRequest::ForceCopy,
            chunk_bytes: umem.chunk_size(),
            ..wanted
        };
        let socket = self.prepare(umem, &self.request(&opened))?;
        Ok(RegisteredSocket { socket, opened })
    }

    /// Couples the queue to the registered memory, instead of any earlier use. Its frames go there from now on, each
    /// behind `header_bytes` of virtio-net header that the program writes.
    /// Errors: [`InterfaceError`]; [`InterfaceError::InUse`] while a lane has it.
    pub(crate) fn couple(
        &self,
        registered: RegisteredSocket,
        header_bytes: u32,
    ) -> Result<Coupled<XdpNic>, InterfaceError> {
        let _near = self.interface.near();
        let mut state = self.interface.state(self.number)?;
        let state = state.now();
        state.close();
        let QueueState::Closed { since } = *state else {
            return Err(InterfaceError::InUse);
        };
        if let Some(since) = since.filter(|_| !self.interface.steering.is_leased()) {
            // A bind to a queue that is not free fails only after the kernel has made its tables for all chunks. From
            // some 100 MiB on, that takes longer than this wait.
            std::thread::sleep(RELEASE.saturating_sub(since.elapsed()));
        }
        let socket = self.bind(registered.socket)?;
        let conf = QueueConf {
            virtio_header: (header_bytes > 0).then_some(VirtioHeader::Basic),
            ..registered.opened.conf()
        };
        self.interface.steering.activate(self.number, conf)?;
        let ended = Ended::default();
        *state = QueueState::Coupled {
            opened: registered.opened,
            ended: Arc::clone(&ended),
        };
        let by_dma = socket.mode() == Mode::ZeroCopy;
        let into_guest = by_dma && self.interface.options.placement == Placement::Direct;
        let guard = CouplingGuard {
            queue: self.clone(),
            passes: !into_guest,
            _ended: NotesEnd(ended),
        };
        let nic = XdpNic::new(socket, guard);
        let sends = self.sends(&nic);
        let queue = self.clone();
        let release = by_dma.then(|| Box::new(ReleaseByDma { queue, into_guest }) as Box<dyn Release>);
        Ok(Coupled { nic, sends, release })
    }

    /// What has to change of the queue, which a lane has, for the interface's present MTU. A queue that receives into a
    /// guest's buffers is set up again in any case: the limit decided which buffers the kernel got.
    pub(crate) fn fit(&self) -> Fit {
        let Ok(mut state) = self.interface.state(self.number) else {
            return Fit::Same;
        };
        let (opened, into_guest) = match state.now() {
            QueueState::Lent { opened, .. } => (*opened, false),
            QueueState::Coupled { opened, .. } => {
                (*opened, self.interface.options.placement == Placement::Direct)
            }
            // The next lane has it opened for the MTU at that time.
            QueueState::Open(_) | QueueState::Closed { .. } => return Fit::Same,
        };
        match opened.frame_limit == self.interface.frame_limit() {
            true => Fit::Same,
            false if self.suits(&opened) && !into_guest => Fit::Limit,
            false => Fit::Replace,
        }
    }

    /// Sets the program's limit to the interface's present MTU, if the queue suits it ([`Fit::Limit`]).
    /// Errors: [`InterfaceError`]: the steward did not do it; call it again.
    pub(crate) fn follow_limit(&self) -> Result<(), InterfaceError> {
        let frame_limit = self.interface.frame_limit();
        let mut state = self.interface.state(self.number)?;
        let (QueueState::Lent { opened, .. } | QueueState::Coupled { opened, .. }) = state.now() else {
            return Ok(());
        };
        let told = Opened {
            frame_limit,
            ..*opened
        };
        self.interface.steering.activate(self.number, told.conf())?;
        *opened = told;
        Ok(())
    }

    /// Closes a queue that was opened for another MTU, unless it suits the present one. If it cannot be opened again
    /// (its socket was passed in), it stays open, provided that frames fit its chunks or it takes several pieces.
    fn renew(&self, state: &mut QueueState) -> Result<(), InterfaceError> {
        let interface = &self.interface;
        let QueueState::Open(open) = state else {
            return Ok(());
        };
        let frame_limit = interface.frame_limit();
        if open.opened.frame_limit == frame_limit {
            return Ok(());
        }
        if self.suits(&open.opened) {
            open.opened.frame_limit = frame_limit;
            return Ok(());
        }
        if interface.steering.is_leased() {
            state.close();
            return Ok(());
        }
        let chunk = match open.nic.nic.is_zero_copy() {
            true => LONGEST_ZERO_COPY,
            false => open.nic.umem.max_frame_bytes(),
        };
        if frame_limit > chunk && !open.nic.nic.socket().multi_buffer() {
            let (name, mtu) = (interface.link.name.clone(), interface.mtu());
            return Err(InterfaceError::Other(anyhow!(
                "frames of MTU {mtu} do not fit the {chunk} bytes of a chunk that was registered when {name} had a \
                 smaller one: restart the daemon"
            )));
        }
        open.opened.frame_limit = frame_limit;
        Ok(())
    }

    /// Whether a queue that was opened for another MTU suits the present one.
    fn suits(&self, opened: &Opened) -> bool {
        self.wanted(None).is_ok_and(|wanted| opened.does_for(&wanted))
    }

    /// The configuration to open the queue with, with memory of the daemon, or with that of a guest if there is one.
    fn wanted(&self, guest: Option<GuestBuffers>) -> Result<Opened, InterfaceError> {
        let Binding { ask, chunk_bytes, .. } = self.binding(guest)?;
        Ok(Opened {
            frame_limit: self.interface.frame_limit(),
            ask,
            chunk_bytes,
            pieces: self.wants_pieces(),
            leaves: false,
        })
    }

    fn request(&self, opened: &Opened) -> QueueRequest {
        QueueRequest {
            queue: self.number,
            bind: opened.ask,
            multi_buffer: opened.pieces,
        }
    }

    /// How the queue is bound for the longest frames that the interface carries, and for a guest if one is there.
    fn binding(&self, guest: Option<GuestBuffers>) -> Result<Binding, InterfaceError> {
        let refused = |why| InterfaceError::NoZeroCopy {
            name: self.interface.name(),
            why,
        };
        self.interface.binding(guest).map_err(refused)
    }

    fn open_locked(&self, state: &mut QueueState) -> Result<(), InterfaceError> {
        if !matches!(state, QueueState::Closed { .. }) {
            return Ok(());
        }
        let interface = &self.interface;
        let _near = interface.near();
        let opened = self.wanted(None)?;
        let (socket, chunks, in_use) = self.open_socket(&self.request(&opened), opened.chunk_bytes)?;
        let ended = Ended::default();
        let to_receive = match interface.is_by_tap() {
            true => 0,
            false => chunks.to_receive.min(socket.rx.size() as usize),
        };
        let chunks = Chunks {
            umem: socket.umem().clone(),
            to_receive,
            ..chunks
        };
        let nic = XdpNic::new(socket, (in_use, NotesEnd(Arc::clone(&ended))));
        let sends = self.sends(&nic);
        let mut nic = NicQueue::new(nic, chunks, sends);
        nic.fill();
        *state = QueueState::Open(Box::new(OpenQueue { nic, opened, ended }));
        Ok(())
    }

    /// Opens the tap for unsegmented GSO packets: in copy mode always, in zero-copy mode only if the NIC has TSO.
    fn open_send_tap(&self, nic: &mut NicQueue<XdpNic>) {
        let options = &self.interface.options;
        let is_wanted = options.segments == Segments::Auto && options.placement == Placement::Copy;
        if !is_wanted || nic.send_tap.is_some() {
            return;
        }
        nic.no_tap_because = None;
        let zero_copy = nic.sends.zero_copy;
        match self
            .interface
            .steering
            .ask(|lease| lease.send_tap(self.number, zero_copy))
        {
            Ok(None) if !zero_copy => nic.no_tap_because = Some(NO_TAPS.to_owned()),
            Ok(tap) => {
                nic.send_tap = tap.map(|(end, tap)| SendTap {
                    tap: Tap::new(tap),
                    segments_udp: end.cuts_udp,
                });
            }
            Err(error) => nic.no_tap_because = Some(with_sources(&error)),
        }
    }

    /// A bound socket, with chunks of `chunk_bytes`: in memory of its own, or in a slice of the shared memory, which
    /// the last value reserves.
    fn open_socket(
        &self,
        request: &QueueRequest,
        chunk_bytes: u32,
    ) -> Result<(Socket, Chunks, Option<SliceUse>), InterfaceError> {
        let interface = &self.interface;
        let Some(slice) = interface.slice(self.number) else {
            let bytes = match interface.is_by_tap() {
                true => to_send_only(interface.options.packet_bytes),
                false => interface.options.packet_bytes,
            };
            let chunks = Chunks::new(bytes, chunk_bytes, SEND_RING)?;
            let socket = self.bind(self.prepare(&chunks.umem, request)?)?;
            return Ok((socket, chunks, None));
        };
        let OpenedSlice {
            socket,
            chunks,
            in_use,
        } = slice.open(
            (interface.link.index, self.number),
            |first| self.note_busy(interface.share(first, request)),
            |umem| self.bind(self.prepare(umem, request)?),
        )?;
        Ok((socket, chunks, Some(in_use)))
    }

    /// Registers memory with a new socket, with room for TX metadata if the kernel supports that (Linux 6.8, or 6.11
    /// and kernels with a backport of the flag).
    fn prepare(&self, umem: &Umem, request: &QueueRequest) -> Result<Prepared, InterfaceError> {
        let roomy = umem.clone().with_tx_metadata(TX_METADATA_BYTES)?;
        match self.interface.prepare(&roomy, request) {
            Err(InterfaceError::Open(OpenError::Umem { .. })) => self.interface.prepare(umem, request),
            prepared => prepared,
        }
    }

    /// Binds a socket to the queue, and puts it into the program's map.
    fn bind(&self, socket: Prepared) -> Result<Socket, InterfaceError> {
        self.note_busy(self.interface.steering.bind(socket))
    }

    /// Records whether a bind found the queue in use.
    fn note_busy(&self, bound: Result<Socket, InterfaceError>) -> Result<Socket, InterfaceError> {
        let busy = matches!(bound, Err(InterfaceError::Open(OpenError::Busy { .. })));
        self.interface.note_busy(self.number, busy);
        bound
    }

    /// Whether the queue takes frames in several pieces: with shared memory, always; for frames that are longer than a
    /// chunk; and for segments that refer to their payload, by default only where the driver takes several pieces in
    /// zero-copy mode.
    fn wants_pieces(&self) -> bool {
        let several = self.interface.driver_sends().most_pieces > 1;
        let needs = self.interface.frame_limit() > LONGEST_FRAME;
        self.interface.shares() || needs || self.interface.options.segments.refer(several)
    }

    /// Capabilities of a socket of the queue for frames that are sent.
    fn sends(&self, nic: &XdpNic) -> Sends {
        let zero_copy = nic.is_zero_copy();
        let driver = self.interface.driver_sends();
        let most_pieces = match (nic.socket().multi_buffer(), zero_copy) {
            (false, _) => 1,
            (true, true) => driver.most_pieces.clamp(1, MOST_PIECES),
            (true, false) => MOST_PIECES,
        };
        let is_veth = self.interface.link.partial_checksums;
        let metadata = nic.socket().umem().tx_metadata_len() > 0;
        Sends {
            most_pieces,
            checksum: Checksums::completed(metadata, driver, is_veth, zero_copy) != Checksums::Daemon,
            zero_copy,
            by_dma: zero_copy,
            refers: self.interface.options.segments.refer(zero_copy),
        }
    }
}
