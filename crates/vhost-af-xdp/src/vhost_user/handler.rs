//! The vhost-user messages, as the `vhost` crate dispatches them.
//!
//! One line each: the message is turned into the call of [`Session`] that means it. Messages that
//! belong to protocol features which are not offered are refused here by name.

use std::fs::File;
use std::io;

use vhost::vhost_user::message::{
    FrontendReq, VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags,
    VhostUserInflight, VhostUserLog, VhostUserMemoryRegion, VhostUserMsgValidator, VhostUserProtocolFeatures,
    VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags,
    VhostUserVringState,
};
use vhost::vhost_user::{Error, Result, VhostUserBackendReqHandler};
use virtqueue::{FileRange, GuestAddr, Region, RingAddresses};

use super::connection::Connection;
use super::error::MessageError;
use super::files;
use super::front;
use crate::config::FileKinds;
use crate::port::features;
use crate::port::memory::RegionKey;
use crate::port::session::{InflightQueues, PortContext, Session, SessionError};

type MemoryBase = vhost::VhostUserMemoryRegionBase;

impl Connection {
    fn handle<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Session, &PortContext<'_>) -> std::result::Result<R, SessionError> + Send + 'static,
    ) -> Result<R> {
        self.port.with_session(act).map_err(|error| answer(&error))
    }

    /// Of a message whose header came in pieces; others are taken in front of the crate.
    fn set_event(&self, request: FrontendReq, index: u8, file: Option<File>) -> Result<()> {
        front::set_event(request, index.into(), file, self).map_err(|error| answer(&error))
    }

    /// Judges files that the VMM gives as memory. On this thread: those that are refused are closed by it (`files.rs`).
    fn judge<'a>(&self, files: impl IntoIterator<Item = &'a File>) -> std::result::Result<(), SessionError> {
        if self.port.config.memory.files == FileKinds::Any {
            return Ok(());
        }
        match files.into_iter().try_for_each(files::check) {
            Ok(()) => Ok(()),
            Err(refused) => self.refuse(refused.into()),
        }
    }

    /// SET_MEM_TABLE: a file for each region.
    pub(super) fn set_table(
        &self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
    ) -> std::result::Result<(), SessionError> {
        if let Some(region) = regions.iter().position(|region| !region.is_valid()) {
            return self.refuse(MessageError::Region(region));
        }
        self.judge(&files)?;
        let regions = regions.iter().zip(files);
        let regions = regions.map(|(region, file)| region_of(region, file)).collect();
        self.port
            .with_session(move |session, context| session.set_memory(regions, context))
    }

    fn unsupported<R: Send + 'static>(&self, message: &'static str) -> Result<R> {
        self.refuse(MessageError::Unsupported(message))
            .map_err(|error| answer(&error))
    }
}

/// The protocol features that every port offers. REPLY_ACK is added by the `vhost` crate, which
/// implements it.
fn offered_protocol() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::RARP
        | VhostUserProtocolFeatures::MTU
        | VhostUserProtocolFeatures::STATUS
        | VhostUserProtocolFeatures::RESET_DEVICE
        | VhostUserProtocolFeatures::BACKEND_REQ
}

fn region_of(region: &VhostUserMemoryRegion, file: File) -> Region {
    Region {
        guest_addr: GuestAddr(region.guest_phys_addr),
        user_addr: region.user_addr,
        len: region.memory_size,
        file: file.into(),
        file_offset: region.mmap_offset,
    }
}

fn answer(error: &SessionError) -> Error {
    Error::ReqHandlerError(io::Error::other(error.to_string()))
}

impl VhostUserBackendReqHandler for Connection {
    fn set_owner(&self) -> Result<()> {
        self.handle(|session, _| {
            session.reached.counted = false;
            Ok(())
        })
    }

    fn reset_owner(&self) -> Result<()> {
        // Deprecated; the specification asks for nothing.
        Ok(())
    }

    fn get_features(&self) -> Result<u64> {
        self.handle(|session, _| {
            (session.reached.asked, session.reached.counted) = (true, false);
            Ok(())
        })?;
        Ok(features::offered(&self.port.config))
    }

    fn set_features(&self, features: u64) -> Result<()> {
        self.handle(move |session, context| session.set_features(features, context))
    }

    fn get_protocol_features(&self) -> Result<VhostUserProtocolFeatures> {
        Ok(offered_protocol())
    }

    fn set_protocol_features(&self, features: u64) -> Result<()> {
        self.negotiate(features);
        Ok(())
    }

    fn get_queue_num(&self) -> Result<u64> {
        // For a net device: queue pairs (vhost-user, "Multiple queue support").
        self.handle(|session, _| {
            session.reached.counted = true;
            Ok(())
        })?;
        Ok(self.port.config.queues.into())
    }

    fn set_mem_table(
        &self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<MemoryBase>>> {
        let set = self.set_table(regions, files);
        set.map(|()| None).map_err(|error| answer(&error))
    }

    fn get_max_mem_slots(&self) -> Result<u64> {
        // QEMU's own limit for memory slots here is 32 and more.
        Ok(virtqueue::MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<MemoryBase>> {
        self.judge([&file]).map_err(|error| answer(&error))?;
        let region = region_of(region, file);
        self.handle(move |session, context| session.add_memory(region, context))
            .map(|()| None)
    }

    fn remove_mem_region(&self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let key = RegionKey {
            guest_addr: GuestAddr(region.guest_phys_addr),
            user_addr: region.user_addr,
            len: region.memory_size,
        };
        self.handle(move |session, context| session.remove_memory(key, context))
    }

    fn set_vring_num(&self, index: u32, num: u32) -> Result<()> {
        self.handle(move |session, context| Ok(session.idle_vring(index, context)?.set_size(index, num)?))
    }

    fn set_vring_addr(
        &self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let addresses = RingAddresses {
            desc: descriptor,
            avail: available,
            used,
        };
        self.handle(move |session, context| session.set_vring_addr(index, addresses, context))
    }

    fn set_vring_base(&self, index: u32, base: u32) -> Result<()> {
        self.handle(move |session, context| Ok(session.idle_vring(index, context)?.set_base(index, base)?))
    }

    fn get_vring_base(&self, index: u32) -> Result<VhostUserVringState> {
        let base = self.handle(move |session, context| session.stop_vring(index, context))?;
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&self, index: u8, file: Option<File>) -> Result<()> {
        self.set_event(FrontendReq::SET_VRING_KICK, index, file)
    }

    fn set_vring_call(&self, index: u8, file: Option<File>) -> Result<()> {
        self.set_event(FrontendReq::SET_VRING_CALL, index, file)
    }

    fn set_vring_err(&self, index: u8, file: Option<File>) -> Result<()> {
        self.set_event(FrontendReq::SET_VRING_ERR, index, file)
    }

    fn set_vring_enable(&self, index: u32, enable: bool) -> Result<()> {
        self.handle(move |session, context| session.set_vring_enable(index, enable, context))
    }

    fn get_config(&self, offset: u32, len: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        match self.port.config_space().read(offset, len) {
            Ok(bytes) => Ok(bytes),
            Err(error) => self.handle(move |_, _| Err(error.into())),
        }
    }

    fn set_config(&self, _offset: u32, _bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // Every field is read-only for a driver of VIRTIO 1.0; a legacy one may write its MAC
        // address, which means nothing to a port that does not filter.
        Ok(())
    }

    fn reset_device(&self) -> Result<()> {
        self.handle(|session, context| {
            session.reset(context.workers);
            Ok(())
        })
    }

    fn get_shared_object(&self, _uuid: VhostUserSharedMsg) -> Result<File> {
        self.unsupported("GET_SHARED_OBJECT")
    }

    fn get_inflight_fd(&self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let queues = inflight_queues(wanted);
        let region = self.handle(move |session, _| session.make_inflight(queues))?;
        let made = VhostUserInflight::new(region.bytes, 0, wanted.num_queues, wanted.queue_size);
        Ok((made, region.file.into()))
    }

    fn set_inflight_fd(&self, region: &VhostUserInflight, file: File) -> Result<()> {
        self.judge([&file]).map_err(|error| answer(&error))?;
        let queues = inflight_queues(region);
        let range = FileRange {
            offset: region.mmap_offset,
            bytes: region.mmap_size,
        };
        self.handle(move |session, context| session.set_inflight(range, queues, &file, context))
    }

    fn set_gpu_socket(&self, _gpu: vhost::vhost_user::GpuBackend) -> Result<()> {
        self.unsupported("GPU_SET_SOCKET")
    }

    fn set_device_state_fd(
        &self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        self.unsupported("SET_DEVICE_STATE_FD")
    }

    fn check_device_state(&self) -> Result<()> {
        self.unsupported("CHECK_DEVICE_STATE")
    }

    fn get_shmem_config(&self) -> Result<VhostUserShMemConfig> {
        self.unsupported("GET_SHMEM_CONFIG")
    }

    fn set_log_base(&self, log: &VhostUserLog, file: File) -> Result<()> {
        self.judge([&file]).map_err(|error| answer(&error))?;
        let range = FileRange {
            offset: log.mmap_offset,
            bytes: log.mmap_size,
        };
        self.handle(move |session, context| session.set_log(range, &file, context))
    }
}

fn inflight_queues(inflight: &VhostUserInflight) -> InflightQueues {
    InflightQueues {
        queues: inflight.num_queues,
        size: inflight.queue_size,
    }
}
