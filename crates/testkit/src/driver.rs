//! A guest without a machine: a vhost-user front end and a virtio-net driver in this process.
//!
//! Theory of operation. [`Driver`] speaks vhost-user as QEMU does (owner, features, protocol features, memory table,
//! then for each vring its size, base, addresses, call, kick, enable), with a reply asked for each request, so that a
//! refusal is seen where it happens. Its queue pairs, a [`Pair`] each, send and receive. After the back end went it
//! connects again as QEMU does: with the same memory and rings, from where used.idx stands.

pub mod pair;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::{virtio_config, virtio_net, virtio_ring};
use virtqueue::driver::GuestRam;
use virtqueue::{GuestAddr, Region, RingFormat};

use self::pair::Pair;
use crate::{message, wait};

/// VIRTIO_F_VERSION_1.
pub const F_VERSION_1: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1;
/// VIRTIO_F_RING_PACKED.
pub const F_RING_PACKED: u64 = 1 << virtio_config::VIRTIO_F_RING_PACKED;
/// VIRTIO_F_IN_ORDER.
pub const F_IN_ORDER: u64 = 1 << virtio_config::VIRTIO_F_IN_ORDER;
/// VIRTIO_F_RING_RESET.
pub const F_RING_RESET: u64 = 1 << virtio_config::VIRTIO_F_RING_RESET;
/// VIRTIO_F_ACCESS_PLATFORM.
pub const F_ACCESS_PLATFORM: u64 = 1 << virtio_config::VIRTIO_F_ACCESS_PLATFORM;
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
/// VIRTIO_NET_F_CTRL_VQ.
pub const F_CTRL_VQ: u64 = 1 << virtio_net::VIRTIO_NET_F_CTRL_VQ;
/// VIRTIO_NET_F_CTRL_GUEST_OFFLOADS.
pub const F_CTRL_GUEST_OFFLOADS: u64 = 1 << virtio_net::VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;
/// VIRTIO_NET_F_CSUM.
pub const F_CSUM: u64 = 1 << virtio_net::VIRTIO_NET_F_CSUM;
/// VIRTIO_NET_F_HOST_TSO4.
pub const F_HOST_TSO4: u64 = 1 << virtio_net::VIRTIO_NET_F_HOST_TSO4;
/// VIRTIO_NET_F_HOST_TSO6.
pub const F_HOST_TSO6: u64 = 1 << virtio_net::VIRTIO_NET_F_HOST_TSO6;
/// VIRTIO_NET_F_HOST_ECN.
pub const F_HOST_ECN: u64 = 1 << virtio_net::VIRTIO_NET_F_HOST_ECN;
/// VIRTIO_NET_F_HOST_USO.
pub const F_HOST_USO: u64 = 1 << virtio_net::VIRTIO_NET_F_HOST_USO;
/// Everything that the guest may leave to the device for frames that it sends.
pub const F_HOST_ALL: u64 = F_CSUM | F_HOST_TSO4 | F_HOST_TSO6 | F_HOST_ECN | F_HOST_USO;
/// VIRTIO_NET_F_GUEST_CSUM.
pub const F_GUEST_CSUM: u64 = 1 << virtio_net::VIRTIO_NET_F_GUEST_CSUM;
/// VIRTIO_NET_F_GUEST_TSO4.
pub const F_GUEST_TSO4: u64 = 1 << virtio_net::VIRTIO_NET_F_GUEST_TSO4;
/// VIRTIO_NET_F_GUEST_TSO6.
pub const F_GUEST_TSO6: u64 = 1 << virtio_net::VIRTIO_NET_F_GUEST_TSO6;
/// VIRTIO_NET_F_GUEST_ECN.
pub const F_GUEST_ECN: u64 = 1 << virtio_net::VIRTIO_NET_F_GUEST_ECN;
/// VIRTIO_NET_F_GUEST_USO4 and VIRTIO_NET_F_GUEST_USO6.
pub const F_GUEST_USO: u64 =
    1 << virtio_net::VIRTIO_NET_F_GUEST_USO4 | 1 << virtio_net::VIRTIO_NET_F_GUEST_USO6;
/// All offloads of frames to the guest.
pub const F_GUEST_ALL: u64 = F_GUEST_CSUM | F_GUEST_TSO4 | F_GUEST_TSO6 | F_GUEST_ECN | F_GUEST_USO;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;

/// Length of the virtio-net header with `num_buffers`, bytes (VirtIO 1.3, 5.1.6).
pub const HEADER: usize = 12;
/// Base of a packed ring that was never used: slot 0 in the lap with wrap counter 1.
const FIRST_PACKED_BASE: u16 = 1 << 15;

/// What the guest is like.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// Virtio features to acknowledge, of those that are offered.
    pub features: u64,
    /// Protocol features to acknowledge, of those that are offered.
    pub protocol: VhostUserProtocolFeatures,
    /// Queue pairs.
    pub pairs: usize,
    /// Entries of each vring.
    pub queue_size: u32,
    /// Memory: guest address and length in bytes of each region.
    pub regions: Vec<(GuestAddr, u64)>,
}

impl DriverConfig {
    /// The default, and these features, too.
    pub fn with(features: u64) -> Self {
        let config = Self::default();
        Self {
            features: config.features | features,
            ..config
        }
    }

    /// The default with so many queue pairs.
    pub fn with_pairs(pairs: usize) -> Self {
        Self {
            pairs,
            ..Self::default()
        }
    }

    /// The default with these regions.
    pub fn with_memory(regions: Vec<(GuestAddr, u64)>) -> Self {
        Self {
            regions,
            ..Self::default()
        }
    }

    /// The default with 4 MiB of memory and short queues.
    pub fn small() -> Self {
        Self {
            queue_size: 64,
            ..Self::with_memory(vec![(GuestAddr(0), 4 << 20)])
        }
    }
}

impl Default for DriverConfig {
    /// Everything but in-order and packed rings; one pair; 256 entries; memory below and above the PCI hole.
    fn default() -> Self {
        Self {
            features: F_VERSION_1 | F_MRG_RXBUF | F_EVENT_IDX | F_INDIRECT | F_MAC | F_MTU | F_STATUS | F_MQ,
            protocol: VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::REPLY_ACK
                | VhostUserProtocolFeatures::CONFIG
                | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS,
            pairs: 1,
            queue_size: 256,
            regions: vec![(GuestAddr(0), 8 << 20), (GuestAddr(4 << 30), 8 << 20)],
        }
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
    /// The last back end died without saying where packed rings stand.
    stale_bases: bool,
    /// The inflight region, which outlives back ends.
    inflight: Option<(VhostUserInflight, File)>,
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

    /// The same, but starts no queue pair.
    ///
    /// # Errors
    /// What the back end refused.
    ///
    /// # Panics
    /// If nobody listens, or there is no memory.
    pub fn connect_idle(path: &Path, config: &DriverConfig) -> Result<Self, Refused> {
        let ram = Arc::new(GuestRam::new(&config.regions).expect("memory for a guest"));
        Self::prepare(connect(path), config, ram)
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
        let mut driver = Self::prepare(socket, config, ram)?;
        driver.start_pairs()?;
        Ok(driver)
    }

    /// All but the queue pairs, which are there and not started.
    fn prepare(socket: UnixStream, config: &DriverConfig, ram: Arc<GuestRam>) -> Result<Self, Refused> {
        let mut driver = Self::greet(socket, config, ram)?;
        driver.features &= config.features | F_PROTOCOL_FEATURES;
        driver.pairs = (0..config.pairs)
            .map(|_| Pair::new(&driver.ram, config, driver.features))
            .collect();
        driver.acknowledge()?;
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
        let protocol = offered & config.protocol;
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
            stale_bases: false,
            inflight: None,
            pairs: Vec::new(),
        })
    }

    fn set_up(&mut self) -> Result<(), Refused> {
        self.acknowledge()?;
        self.start_pairs()
    }

    fn acknowledge(&mut self) -> Result<(), Refused> {
        self.frontend.set_features(self.features)?;
        self.set_inflight()?;
        self.set_memory()
    }

    fn start_pairs(&mut self) -> Result<(), Refused> {
        (0..self.pairs.len()).try_for_each(|pair| self.start_pair(pair))
    }

    /// Lets the first back end make an inflight region, and gives it to every later one, as QEMU does for devices that
    /// ask for one.
    fn set_inflight(&mut self) -> Result<(), Refused> {
        if !self.protocol.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD) {
            return Ok(());
        }
        let (region, file) = match self.inflight.take() {
            Some(kept) => kept,
            None => {
                let size = self.pairs[0].to_guest.driver.size().get();
                let queues = u16::try_from(2 * self.pairs.len()).expect("few");
                let wanted = VhostUserInflight::new(0, 0, queues, size);
                self.frontend.get_inflight_fd(&wanted)?
            }
        };
        self.frontend.set_inflight_fd(&region, file.as_raw_fd())?;
        self.inflight = Some((region, file));
        Ok(())
    }

    /// The inflight region and its file, if one was negotiated.
    pub fn inflight(&self) -> Option<&(VhostUserInflight, File)> {
        self.inflight.as_ref()
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
        for index in [2 * pair, 2 * pair + 1] {
            self.describe_vring(index)?;
            let ring = self.pairs[pair].ring(index);
            self.frontend.set_vring_call(index, &ring.call)?;
            self.frontend.set_vring_kick(index, &ring.kick)?;
        }
        for index in [2 * pair, 2 * pair + 1] {
            self.frontend.set_vring_enable(index, true)?;
        }
        // Whatever was shown before is to be looked at now.
        let rings = [&self.pairs[pair].to_guest, &self.pairs[pair].from_guest];
        rings.iter().for_each(|ring| ring.kick());
        Ok(())
    }

    /// Says how long a vring is, where it stands and where it lies.
    fn describe_vring(&mut self, index: usize) -> Result<(), Refused> {
        let ring = self.pairs[index / 2].ring(index);
        let size = ring.driver.size().get();
        let addresses = ring.driver.ring_user_addresses();
        self.frontend.set_vring_num(index, size)?;
        // The lower half says it all for split rings, and for packed ones to a back end that uses in order.
        #[allow(clippy::cast_possible_truncation)]
        let base = match ring.driver.format() {
            RingFormat::Packed if self.stale_bases => FIRST_PACKED_BASE,
            _ => ring.driver.base() as u16,
        };
        self.frontend.set_vring_base(index, base)?;
        self.frontend.set_vring_addr(
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
        )
    }

    /// Stops one vring; where it stands. So a VMM begins when its guest resets the queue (QEMU:
    /// `vhost_virtqueue_stop`).
    ///
    /// # Errors
    /// What the back end refused.
    pub fn stop_vring(&mut self, index: usize) -> Result<u32, Refused> {
        self.frontend.get_vring_base(index)
    }

    /// As [`stop_vring`](Self::stop_vring), and lets the guest do something with the pair again and again until the
    /// answer is there.
    ///
    /// # Errors
    /// What the back end refused.
    ///
    /// # Panics
    /// If there is no thread for it.
    pub fn stop_vring_while(
        &mut self,
        index: usize,
        mut meanwhile: impl FnMut(&mut Pair),
    ) -> Result<u32, Refused> {
        let (frontend, pair) = (&self.frontend, &mut self.pairs[index / 2]);
        std::thread::scope(|scope| {
            let stops = scope.spawn(|| frontend.get_vring_base(index));
            while !stops.is_finished() {
                meanwhile(pair);
            }
            stops.join().expect("it does not panic")
        })
    }

    /// Starts one vring as it is now. So a VMM goes on when its guest starts a queue again that it had reset (QEMU:
    /// `vhost_virtqueue_start`, which says nothing of the call eventfd).
    ///
    /// # Errors
    /// What the back end refused.
    pub fn start_vring(&mut self, index: usize) -> Result<(), Refused> {
        self.describe_vring(index)?;
        let ring = self.pairs[index / 2].ring(index);
        self.frontend.set_vring_kick(index, &ring.kick)?;
        ring.kick();
        Ok(())
    }

    /// Resets one vring and starts it again, as a Linux guest does at one go; what was in it: see [`Pair::renew`].
    ///
    /// # Errors
    /// What the back end refused.
    pub fn reset_vring(&mut self, index: usize) -> Result<usize, Refused> {
        self.stop_vring(index)?;
        let left = self.pairs[index / 2].renew(index);
        self.start_vring(index)?;
        Ok(left)
    }

    /// Tells the call eventfds of a pair again; they may be others.
    ///
    /// # Errors
    /// What the back end refused.
    pub fn replace_calls(&mut self, pair: usize) -> Result<(), Refused> {
        let rings = [&self.pairs[pair].to_guest, &self.pairs[pair].from_guest];
        for (index, ring) in (2 * pair..).zip(rings) {
            self.frontend.set_vring_call(index, &ring.call)?;
        }
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

    /// Connects again after the back end went, as QEMU does: same memory, same rings, split ones from where
    /// used.idx stands, packed ones from the base that was last known, here their very first.
    ///
    /// # Errors
    /// What the back end refused.
    pub fn resume(self, socket: UnixStream) -> Result<Self, Refused> {
        let config = DriverConfig {
            pairs: self.pairs.len(),
            protocol: self.protocol,
            ..DriverConfig::default()
        };
        let mut driver = Self::greet(socket, &config, self.ram)?;
        driver.features &= self.features;
        driver.stale_bases = true;
        driver.inflight = self.inflight;
        driver.pairs = self.pairs;
        driver.set_up()?;
        Ok(driver)
    }

    /// Sets everything up once more, with fresh rings: what a driver does after its device was reset.
    ///
    /// # Errors
    /// What the back end refused.
    pub fn start_over(&mut self, config: &DriverConfig) -> Result<(), Refused> {
        self.pairs = (0..config.pairs)
            .map(|_| Pair::new(&self.ram, config, self.features))
            .collect();
        (self.stale_bases, self.inflight) = (false, None);
        self.set_up()
    }

    /// Virtio features that both sides have.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Protocol features that both sides have.
    pub fn protocol(&self) -> VhostUserProtocolFeatures {
        self.protocol
    }

    /// The front end, for requests of a test's own.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// The connection, for what must not be said.
    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Sends a message that the `vhost` crate's front end has no function for, and returns the value of the
    /// answer: the acknowledgement where the message has no other.
    ///
    /// # Panics
    /// If the connection breaks or no answer comes.
    pub fn say(&mut self, request: FrontendReq, payload: &[u8], file: Option<BorrowedFd<'_>>) -> u64 {
        message::send(&self.socket, request, payload, file);
        message::receive(&self.socket)
    }

    /// Guest memory.
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
    pub fn await_close(&self, limit: Duration) -> bool {
        let timeout = Timespec::try_from(limit).expect("short");
        let mut fds = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::RDHUP)];
        poll(&mut fds, Some(&timeout)).expect("a good descriptor") > 0
    }
}

/// A region as the memory table has it.
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
pub fn connect(path: &Path) -> UnixStream {
    wait::until_some(wait::SOON, || UnixStream::connect(path).ok())
        .unwrap_or_else(|| panic!("nobody listens at {}", path.display()))
}

/// Waits for somebody to connect.
///
/// # Panics
/// If nobody does.
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
