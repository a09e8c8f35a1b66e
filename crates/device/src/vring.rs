//! A vring as the VMM describes it, message by message, before and between lanes.

use std::os::fd::OwnedFd;

use virtqueue::{
    MemoryMap, QueueSize, QueueSizeError, RingAddresses, RingError, RingFormat, RingLayout, RingShape,
};

/// What is wrong with a vring.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages explain the fields.
pub enum VringError {
    /// SET_VRING_NUM with a size that such a ring cannot have.
    #[error("vring {index}: {source}")]
    Size { index: u32, source: QueueSizeError },
    /// SET_VRING_BASE beyond 16 bits.
    #[error("vring {index}: base {base} does not fit into the 16-bit index of a split ring")]
    Base { index: u32, base: u32 },
    /// Kicked before SET_VRING_NUM or SET_VRING_ADDR.
    #[error("vring {index} was started before its size and addresses were set")]
    Incomplete { index: u32 },
    /// The rings are misaligned or not in guest memory.
    #[error("vring {index}: {source}")]
    Layout { index: u32, source: RingError },
    /// The ring's addresses are not in guest memory; with ACCESS_PLATFORM the VMM should have translated them.
    #[error(
        "vring {index}: {source}: ACCESS_PLATFORM was acknowledged, so this may be an address of an IOMMU, and there \
         is no IOTLB here: leave the IOMMU out, or this device out of it (QEMU: no iommu_platform=on beside an IOMMU \
         device)"
    )]
    Translated { index: u32, source: RingError },
    /// No such vring.
    #[error(
        "vring {index} does not exist: there are {count} (2 per queue pair, and the control queue if CTRL_VQ was \
         acknowledged)"
    )]
    Unknown { index: u32, count: u32 },
}

/// State of one vring, from which lanes are created.
#[derive(Default)]
pub struct VringState {
    /// Its entries.
    pub size: Option<QueueSize>,
    /// Its addresses in the VMM's address space (SET_VRING_ADDR).
    pub addresses: Option<RingAddresses>,
    /// The next chain to take, set by the VMM or left by the last lane.
    pub base: u32,
    /// The driver notifies the device with it; `None`: the ring is polled.
    pub kick: Option<OwnedFd>,
    /// Interrupts the driver; `None`: it polls.
    pub call: Option<OwnedFd>,
    /// Reports a fault to the VMM.
    pub err: Option<OwnedFd>,
    /// SET_VRING_KICK was received, and no GET_VRING_BASE since.
    pub started: bool,
    /// It was started, and GET_VRING_BASE was received since.
    pub stopped: bool,
    /// SET_VRING_ENABLE: frames may pass.
    pub enabled: bool,
}

impl VringState {
    /// The layout of the ring in the map.
    ///
    /// # Errors
    /// [`VringError`].
    pub fn layout(&self, index: u32, map: &MemoryMap, packed: bool) -> Result<RingLayout, VringError> {
        let (Some(size), Some(addresses)) = (self.size, self.addresses) else {
            return Err(VringError::Incomplete { index });
        };
        RingLayout::from_user(map, RingShape::new(RingFormat::of(packed), size), addresses)
            .map_err(|source| VringError::Layout { index, source })
    }
}
