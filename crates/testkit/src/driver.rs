//! A guest without a machine: a vhost-user front end and a virtio-net driver in this process.
//!
//! Theory of operation. [`Driver`] speaks vhost-user as QEMU does (owner, features, protocol features, memory table, then for each
//! vring its size, base, addresses, call, kick, enable), with a reply asked for each request, so that a refusal is
//! seen where it happens. Each [`Pair`] is one queue pair: it sends frames with a chosen [`Layout`] of descriptors and
//! receives into buffers of chosen sizes, merged ones too. It waits for calls and does not poll: a call that should have come and did not
//! is a failure ("lost call"). The rings' own model, [`SplitDriver`], is within reach for tests that lie.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::{virtio_config, virtio_net, virtio_ring};
use virtqueue::driver::{Buffer, DriverFeatures, GuestRam, SplitDriver};
use virtqueue::{GuestAddr, QueueSize, Region};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::wait;

/// VIRTIO_F_VERSION_1.
pub const F_VERSION_1: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1;
/// VIRTIO_F_IN_ORDER.
pub const F_IN_ORDER: u64 = 1 << virtio_config::VIRTIO_F_IN_ORDER;
/// VIRTIO_RING_F_INDIRECT_DESC.
pub const F_INDIRECT: u64 = 1 << virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
/// VIRTIO_RING_F_EVENT_IDX.
pub const F_EVENT_IDX: u64 = 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX;
/// VIRTIO_NET_F_MRG_RXBUF.
pub const F_MRG_RXBUF: u64 = 1 << virtio_net::VIRTIO_NET_F_MRG_RXBUF;
/// VIRTIO_NET_F_MAC.
pub const F_MAC: u64 = 1 << virtio_net::VIRTIO_NET_F_MAC;
/// VIRTIO_NET_F_MTU.
pub const F_MTU: u64 = 1 << virtio_net::VIRTIO_NET_F_MTU;
/// VIRTIO_NET_F_STATUS.
pub const F_STATUS: u64 = 1 << virtio_net::VIRTIO_NET_F_STATUS;
/// VIRTIO_NET_F_MQ.
pub const F_MQ: u64 = 1 << virtio_net::VIRTIO_NET_F_MQ;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Length of the virtio-net header with `num_buffers`, bytes (VirtIO 1.3, 5.1.6).
pub const HEADER: usize = 12;
/// The header of a frame without offloads.
const NO_OFFLOAD: [u8; HEADER] = [0; HEADER];
/// Room that a frame is given in guest memory, bytes.
const SLOT: u32 = 4096;

/// What the guest is like.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// Virtio features to acknowledge, of those that are offered.
    pub features: u64,
    /// Queue pairs.
    pub pairs: usize,
    /// Entries of each vring.
    pub queue_size: u32,
    /// Memory: guest address and length in bytes of each region.
    pub regions: Vec<(GuestAddr, u64)>,
}

impl Default for DriverConfig {
    /// Everything but in-order; one pair; 256 entries; memory below and above the PCI hole.
    fn default() -> Self {
        Self {
            features: F_VERSION_1 | F_MRG_RXBUF | F_EVENT_IDX | F_INDIRECT | F_MAC | F_MTU | F_STATUS | F_MQ,
            pairs: 1,
            queue_size: 256,
            regions: vec![(GuestAddr(0), 32 << 20), (GuestAddr(4 << 30), 32 << 20)],
        }
    }
}

/// How a frame, header in front, is spread over descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Header and frame in one.
    Whole,
    /// The header in one of its own, the frame in another.
    HeaderApart,
    /// In pieces of so many bytes, chained; the header is cut like the rest.
    Pieces(usize),
    /// As `Pieces`, in an indirect table.
    Indirect(usize),
}

/// A frame that came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its virtio-net header.
    pub header: [u8; HEADER],
    /// Its bytes.
    pub frame: Vec<u8>,
    /// Chains that it came in.
    pub chains: usize,
}

/// One vring with its eventfds.
pub struct Ring {
    /// The ring itself; has functions to lie with.
    pub driver: SplitDriver,
    kick: EventFd,
    call: EventFd,
}

impl Ring {
    fn new(ram: &Arc<GuestRam>, config: &DriverConfig, features: u64) -> Self {
        let eventfd = || EventFd::new(EFD_NONBLOCK).expect("a descriptor is left");
        let size = QueueSize::new(config.queue_size).expect("a good size");
        let features = DriverFeatures {
            event_idx: features & F_EVENT_IDX != 0,
            in_order: features & F_IN_ORDER != 0,
        };
        let driver = SplitDriver::new(ram, size, features).expect("room for a ring");
        Self {
            driver,
            kick: eventfd(),
            call: eventfd(),
        }
    }

    /// Shows the device what was added, and kicks it if it wants that.
    pub fn publish(&mut self) {
        if self.driver.publish() {
            self.kick();
        }
    }

    /// Kicks the device, whether it wants that or not.
    ///
    /// # Panics
    /// If the eventfd is full.
    pub fn kick(&self) {
        self.kick.write(1).expect("a kick fits");
    }

    /// Waits for the next chain that comes back; `None` if there is none in time.
    ///
    /// # Panics
    /// If one is there and no call came for it.
    pub fn await_used(&mut self, patience: Duration) -> Option<virtqueue::driver::Used> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(used) = self.driver.take_used() {
                return Some(used);
            }
            if self.driver.enable_calls() {
                continue;
            }
            if !wait::readable(&self.call, deadline.saturating_duration_since(Instant::now())) {
                let late = self.driver.take_used();
                assert!(
                    late.is_none(),
                    "a lost call: the device used a chain and did not say so"
                );
                return None;
            }
            let _ = self.call.read();
        }
    }
}

/// One queue pair.
pub struct Pair {
    ram: Arc<GuestRam>,
    /// The guest's receive queue.
    pub to_guest: Ring,
    /// The guest's transmit queue.
    pub from_guest: Ring,
    /// Buffers of the chains under way, by head: to read what came, and to post them again.
    posted: HashMap<u16, Vec<Buffer>>,
    /// Memory of the frames under way, by head.
    sending: HashMap<u16, GuestAddr>,
    /// Memory that held frames, to be used again.
    free: Vec<GuestAddr>,
    mergeable: bool,
}

impl Pair {
    fn new(ram: &Arc<GuestRam>, config: &DriverConfig, features: u64) -> Self {
        Self {
            ram: Arc::clone(ram),
            to_guest: Ring::new(ram, config, features),
            from_guest: Ring::new(ram, config, features),
            posted: HashMap::new(),
            sending: HashMap::new(),
            free: Vec::new(),
            mergeable: features & F_MRG_RXBUF != 0,
        }
    }

    /// Memory of the guest.
    #[must_use]
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Sends one frame, and shows it to the device at once.
    pub fn send(&mut self, frame: &[u8], layout: Layout) {
        self.send_batch(&[frame], layout);
    }

    /// Sends frames, shown to the device together.
    ///
    /// # Panics
    /// If the ring has no room although the device was given time, or a frame is too long for this model (4084 bytes).
    pub fn send_batch(&mut self, frames: &[&[u8]], layout: Layout) {
        for frame in frames {
            let bytes = [&NO_OFFLOAD[..], frame].concat();
            let addr = self.slot();
            self.ram.write(addr, &bytes);
            let buffers: Vec<_> = pieces(addr, bytes.len(), layout);
            let head = self.add_or_wait(&buffers, matches!(layout, Layout::Indirect(_)));
            self.sending.insert(head, addr);
        }
        self.from_guest.publish();
    }

    /// Sends what the buffers hold, which the caller wrote, and returns the head.
    ///
    /// # Panics
    /// As [`send_batch`](Self::send_batch).
    pub fn send_buffers(&mut self, buffers: &[Buffer], indirect: bool) -> u16 {
        let head = self.add_or_wait(buffers, indirect);
        self.from_guest.publish();
        head
    }

    fn add_or_wait(&mut self, buffers: &[Buffer], indirect: bool) -> u16 {
        loop {
            let ring = &mut self.from_guest;
            let head = if indirect {
                ring.driver.add_indirect(buffers)
            } else {
                ring.driver.add(buffers)
            };
            if let Some(head) = head {
                return head;
            }
            ring.publish();
            assert!(
                self.reap(wait::SOON),
                "the device gives nothing back: the transmit queue is full"
            );
        }
    }

    fn slot(&mut self) -> GuestAddr {
        self.free
            .pop()
            .unwrap_or_else(|| self.ram.alloc(SLOT.into(), 64).expect("guest memory is left"))
    }

    /// Takes back one frame that was sent.
    fn reap(&mut self, patience: Duration) -> bool {
        let Some(used) = self.from_guest.await_used(patience) else {
            return false;
        };
        self.free.extend(self.sending.remove(&used.head));
        true
    }

    /// Waits until the device has given everything back that was sent.
    ///
    /// # Panics
    /// If it does not.
    pub fn await_sent(&mut self) {
        while self.from_guest.driver.in_flight() > 0 {
            assert!(
                self.reap(wait::SOON),
                "{} frames never came back",
                self.from_guest.driver.in_flight()
            );
        }
    }

    /// Posts `count` receive chains, each of buffers with the given lengths, and shows them together.
    ///
    /// # Panics
    /// If ring or memory is full.
    pub fn post(&mut self, count: usize, lengths: &[u32]) {
        for _ in 0..count {
            let buffer = |&len: &u32| {
                let addr = self.ram.alloc(u64::from(len), 64).expect("guest memory is left");
                Buffer::writable(addr, len)
            };
            let buffers: Vec<_> = lengths.iter().map(buffer).collect();
            self.post_buffers(buffers);
        }
        self.to_guest.publish();
    }

    /// Posts one chain of buffers of the caller's choice; not shown yet, see [`Ring::publish`].
    ///
    /// # Panics
    /// If the ring is full.
    pub fn post_buffers(&mut self, buffers: Vec<Buffer>) {
        let head = self
            .to_guest
            .driver
            .add(&buffers)
            .expect("room in the receive queue");
        self.posted.insert(head, buffers);
    }

    /// The next frame, or `None` if none comes in time. Its chains are posted again.
    ///
    /// # Panics
    /// If the device breaks the rules: a used length shorter than the header, too few chains for `num_buffers`.
    pub fn receive(&mut self, patience: Duration) -> Option<Received> {
        let (head, bytes) = self.receive_chain(patience)?;
        let header: [u8; HEADER] = bytes
            .get(..HEADER)
            .expect("a whole header")
            .try_into()
            .expect("its length");
        let count = u16::from_le_bytes([header[10], header[11]]);
        assert!(
            count == 1 || (self.mergeable && count > 1),
            "num_buffers is {count}"
        );
        let mut frame = bytes[HEADER..].to_vec();
        let mut heads = vec![head];
        for _ in 1..count {
            let (head, bytes) = self
                .receive_chain(Duration::ZERO)
                .expect("all chains of a frame come together");
            frame.extend(bytes);
            heads.push(head);
        }
        let chains = heads.len();
        for buffers in heads {
            self.post_buffers(buffers);
        }
        self.to_guest.publish();
        Some(Received {
            header,
            frame,
            chains,
        })
    }

    /// One chain that came back: its buffers, and the bytes that the device says it wrote.
    fn receive_chain(&mut self, patience: Duration) -> Option<(Vec<Buffer>, Vec<u8>)> {
        let used = self.to_guest.await_used(patience)?;
        let buffers = self.posted.remove(&used.head).expect("it was posted");
        let mut left = used.len as usize;
        let mut bytes = Vec::with_capacity(left);
        for buffer in &buffers {
            let len = left.min(buffer.len as usize);
            bytes.extend(self.ram.read_vec(buffer.addr, len));
            left -= len;
        }
        assert_eq!(left, 0, "the device says that it wrote more than the chain holds");
        Some((buffers, bytes))
    }
}

/// Cuts `len` bytes at `addr` into readable buffers.
fn pieces(addr: GuestAddr, len: usize, layout: Layout) -> Vec<Buffer> {
    let cut = |at: usize, len: usize| {
        let addr = addr.checked_add(at as u64).expect("inside memory");
        Buffer::readable(addr, u32::try_from(len).expect("short"))
    };
    match layout {
        Layout::HeaderApart if len > HEADER => vec![cut(0, HEADER), cut(HEADER, len - HEADER)],
        Layout::Whole | Layout::HeaderApart => vec![cut(0, len)],
        Layout::Pieces(size) | Layout::Indirect(size) => (0..len)
            .step_by(size)
            .map(|at| cut(at, size.min(len - at)))
            .collect(),
    }
}

/// A guest, connected.
pub struct Driver {
    frontend: Frontend,
    /// To see the connection's end.
    socket: UnixStream,
    ram: Arc<GuestRam>,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    /// Its queue pairs.
    pub pairs: Vec<Pair>,
}

/// Why a guest could not be set up: what the back end refused.
pub type Refused = vhost::Error;

impl Driver {
    /// Connects to a back end that listens at `path`, and starts all queue pairs.
    ///
    /// # Errors
    /// What the back end refused.
    ///
    /// # Panics
    /// If nobody listens.
    pub fn connect(path: &Path, config: &DriverConfig) -> Result<Self, Refused> {
        Self::start(connect(path), config)
    }

    /// Waits for a back end to connect to `listener`, and starts all queue pairs.
    ///
    /// # Errors
    /// What the back end refused.
    ///
    /// # Panics
    /// If nobody connects.
    pub fn accept(listener: &UnixListener, config: &DriverConfig) -> Result<Self, Refused> {
        Self::start(accept(listener), config)
    }

    /// Over a connection that is there already.
    ///
    /// # Errors
    /// What the back end refused.
    ///
    /// # Panics
    /// If there is no memory.
    pub fn start(socket: UnixStream, config: &DriverConfig) -> Result<Self, Refused> {
        let ram = Arc::new(GuestRam::new(&config.regions).expect("memory for a guest"));
        Self::start_with(socket, config, ram)
    }

    /// Over a connection that is there already, with memory of the caller's.
    ///
    /// # Errors
    /// What the back end refused.
    ///
    /// # Panics
    /// If there is no descriptor left.
    pub fn start_with(
        socket: UnixStream,
        config: &DriverConfig,
        ram: Arc<GuestRam>,
    ) -> Result<Self, Refused> {
        let mut driver = Self::greet(socket, config, ram)?;
        driver.features &= config.features | F_PROTOCOL_FEATURES;
        driver.pairs = (0..config.pairs)
            .map(|_| Pair::new(&driver.ram, config, driver.features))
            .collect();
        driver.set_up()?;
        Ok(driver)
    }

    /// As far as the features: connected, nothing acknowledged but protocol features.
    ///
    /// # Errors
    /// What the back end refused.
    ///
    /// # Panics
    /// If there is no descriptor left.
    pub fn greet(socket: UnixStream, config: &DriverConfig, ram: Arc<GuestRam>) -> Result<Self, Refused> {
        let watched = socket.try_clone().expect("a descriptor is left");
        // Against a back end that never answers.
        watched.set_read_timeout(Some(wait::SOON)).expect("not zero");
        let mut frontend = Frontend::from_stream(socket, 2 * config.pairs as u64);
        frontend.set_owner()?;
        let features = frontend.get_features()?;
        let offered = frontend.get_protocol_features()?;
        let protocol = offered
            & (VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::REPLY_ACK
                | VhostUserProtocolFeatures::CONFIG
                | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);
        frontend.set_protocol_features(protocol)?;
        if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        Ok(Self {
            frontend,
            socket: watched,
            ram,
            features,
            protocol,
            pairs: Vec::new(),
        })
    }

    fn set_up(&mut self) -> Result<(), Refused> {
        self.frontend.set_features(self.features)?;
        self.set_memory()?;
        for pair in 0..self.pairs.len() {
            self.start_pair(pair)?;
        }
        Ok(())
    }

    /// Sends the memory table.
    ///
    /// # Errors
    /// What the back end refused.
    ///
    /// # Panics
    /// If there is no descriptor left.
    pub fn set_memory(&mut self) -> Result<(), Refused> {
        let regions = self.ram.regions().expect("a descriptor is left");
        let infos: Vec<_> = regions.iter().map(region_info).collect();
        self.frontend.set_mem_table(&infos).map(drop)
    }

    /// Starts both vrings of a pair, from where the device left off.
    ///
    /// # Errors
    /// What the back end refused.
    pub fn start_pair(&mut self, pair: usize) -> Result<(), Refused> {
        let frontend = &mut self.frontend;
        let rings = [&self.pairs[pair].to_guest, &self.pairs[pair].from_guest];
        for (index, ring) in (2 * pair..).zip(rings) {
            let size = ring.driver.size().get();
            let addresses = ring.driver.ring_user_addresses();
            frontend.set_vring_num(index, size)?;
            frontend.set_vring_base(index, ring.driver.used_idx())?;
            frontend.set_vring_addr(
                index,
                &VringConfigData {
                    queue_max_size: size,
                    queue_size: size,
                    flags: 0,
                    desc_table_addr: addresses.desc,
                    used_ring_addr: addresses.used,
                    avail_ring_addr: addresses.avail,
                    log_addr: None,
                },
            )?;
            frontend.set_vring_call(index, &ring.call)?;
            frontend.set_vring_kick(index, &ring.kick)?;
        }
        for index in [2 * pair, 2 * pair + 1] {
            frontend.set_vring_enable(index, true)?;
        }
        // Whatever was shown before is to be looked at now.
        rings.iter().for_each(|ring| ring.kick());
        Ok(())
    }

    /// Stops both vrings of a pair and returns their bases, receive first.
    ///
    /// # Errors
    /// What the back end refused.
    pub fn stop_pair(&mut self, pair: usize) -> Result<[u32; 2], Refused> {
        Ok([
            self.frontend.get_vring_base(2 * pair)?,
            self.frontend.get_vring_base(2 * pair + 1)?,
        ])
    }

    /// Connects again after the back end went, as QEMU does: same memory, same rings, from where used.idx stands.
    ///
    /// # Errors
    /// What the back end refused.
    pub fn resume(self, socket: UnixStream) -> Result<Self, Refused> {
        let config = DriverConfig {
            pairs: self.pairs.len(),
            ..DriverConfig::default()
        };
        let mut driver = Self::greet(socket, &config, self.ram)?;
        driver.features &= self.features;
        driver.pairs = self.pairs;
        driver.set_up()?;
        Ok(driver)
    }

    /// Virtio features that both sides have.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Protocol features that both sides have.
    #[must_use]
    pub fn protocol(&self) -> VhostUserProtocolFeatures {
        self.protocol
    }

    /// The front end, for requests of a test's own.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// Guest memory.
    #[must_use]
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// `len` bytes of the device's config space (VirtIO 1.3, 5.1.4): MAC at 0, status at 6, pairs at 8, MTU at 10.
    ///
    /// # Errors
    /// What the back end refused.
    pub fn config(&mut self, offset: u32, len: u32) -> Result<Vec<u8>, Refused> {
        let buffer = vec![0; len as usize];
        Ok(self
            .frontend
            .get_config(offset, len, VhostUserConfigFlags::empty(), &buffer)?
            .1)
    }

    /// Waits until the back end closes the connection; `false` if it does not in time.
    ///
    /// # Panics
    /// If poll(2) fails.
    #[must_use]
    pub fn await_close(&self, patience: Duration) -> bool {
        let timeout = Timespec::try_from(patience).expect("short");
        let mut fds = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::RDHUP)];
        poll(&mut fds, Some(&timeout)).expect("a good descriptor") > 0
    }
}

/// A region as the memory table has it.
#[must_use]
pub fn region_info(region: &Region) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: region.guest_addr.get(),
        memory_size: region.len,
        userspace_addr: region.user_addr,
        mmap_offset: region.file_offset,
        mmap_handle: region.file.as_raw_fd(),
    }
}

/// Connects to `path`; somebody must listen there soon.
///
/// # Panics
/// If nobody does.
#[must_use]
pub fn connect(path: &Path) -> UnixStream {
    wait::until_some(wait::SOON, || UnixStream::connect(path).ok())
        .unwrap_or_else(|| panic!("nobody listens at {}", path.display()))
}

/// Waits for somebody to connect.
///
/// # Panics
/// If nobody does.
#[must_use]
pub fn accept(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).expect("a socket");
    let stream = wait::until_some(wait::SOON, || match listener.accept() {
        Ok((stream, _)) => Some(stream),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(error) => panic!("accept: {error}"),
    });
    let stream = stream.expect("nobody connected");
    stream.set_nonblocking(false).expect("a socket");
    stream
}
