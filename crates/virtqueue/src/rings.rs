//! Where the three parts of a ring lie in the map, checked.

use std::fmt;

use crate::{MemoryMap, QueueSize, QueueSizeError, layout};

/// Which kind of ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingFormat {
    /// VirtIO 1.3, 2.7.
    #[default]
    Split,
    /// VirtIO 1.3, 2.8 (VIRTIO_F_RING_PACKED).
    Packed,
}

impl RingFormat {
    /// The format, from whether VIRTIO_F_RING_PACKED (34) was negotiated.
    #[must_use]
    pub const fn of(packed: bool) -> Self {
        if packed { Self::Packed } else { Self::Split }
    }

    /// The base of a ring that a driver has just set up: entry 0. For a packed ring this is the position of the
    /// next to take and of the next to use, both with wrap counter 1 (VirtIO 1.3, 2.8.1).
    #[must_use]
    pub const fn first_base(self) -> u32 {
        match self {
            Self::Split => 0,
            Self::Packed => 0x8000_8000,
        }
    }
}

impl fmt::Display for RingFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Split => "split",
            Self::Packed => "packed",
        })
    }
}

/// Addresses of the three parts of a ring, in the address space that the user of the value defines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table, or packed ring.
    pub desc: u64,
    /// Available ring, or the driver's event suppression ("driver area").
    pub avail: u64,
    /// Used ring, or the device's event suppression ("device area").
    pub used: u64,
}

/// A part of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingPart {
    /// Descriptor table, or packed ring.
    DescriptorTable,
    /// Available ring.
    AvailableRing,
    /// Used ring.
    UsedRing,
    /// The driver's event suppression structure.
    DriverEvents,
    /// The device's event suppression structure.
    DeviceEvents,
}

impl fmt::Display for RingPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DescriptorTable => "descriptor table",
            Self::AvailableRing => "available ring",
            Self::UsedRing => "used ring",
            Self::DriverEvents => "driver event suppression",
            Self::DeviceEvents => "device event suppression",
        })
    }
}

/// A ring that cannot be used: the VMM's or the guest's fault.
///
/// `part` is the ring's part at fault, `len` and `align` are what it needs, in bytes; `addr` is in the
/// caller's address space. `size` is the ring's, `entries` the inflight region's, both in entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "fields are described above")]
pub enum RingError {
    /// Not wholly inside one region of guest memory.
    #[error("{part}: {len} bytes at {addr:#x} are not inside guest memory")]
    OutsideMemory { part: RingPart, addr: u64, len: u64 },
    /// Not aligned as the table in VirtIO 1.3, 2.7 demands.
    #[error("{part} at {addr:#x} is not aligned to {align} bytes")]
    Misaligned { part: RingPart, addr: u64, align: u64 },
    /// The kind of ring cannot have that size.
    #[error(transparent)]
    Size(#[from] QueueSizeError),
    /// Laid out as one kind of ring, negotiated as the other: a bug of the caller.
    #[error("a ring laid out as {0:?} does not match the negotiated format")]
    Format(RingFormat),
    /// The inflight region is for a ring of another kind, or for a shorter one.
    #[error(
        "a {ring} ring of {size} entries does not fit the inflight region, which is for {region} rings of at most \
         {entries}: the VMM must request another region"
    )]
    Inflight {
        ring: RingFormat,
        size: u16,
        region: RingFormat,
        entries: u16,
    },
    /// Packed ring: neither the base nor the ring gives a valid slot to start from.
    #[error("vring base {base:#x} is outside a packed ring of {size} entries")]
    Base {
        /// As the VMM sent it.
        base: u32,
        size: u16,
    },
}

/// Which kind of ring, with how many entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingShape {
    /// Split or packed.
    pub format: RingFormat,
    /// Entries.
    pub size: QueueSize,
}

impl RingShape {
    /// A ring of that kind and size.
    #[must_use]
    pub const fn new(format: RingFormat, size: QueueSize) -> Self {
        Self { format, size }
    }

    /// Its three parts: see [`RingAddresses`].
    pub(crate) fn parts(self) -> [PartShape; 3] {
        let size = self.size.get();
        let of = |part, len, align| PartShape { part, len, align };
        let events = |part| of(part, layout::EVENT_BYTES, layout::EVENT_BYTES);
        let (avail, used) = match self.format {
            RingFormat::Split => (
                of(
                    RingPart::AvailableRing,
                    layout::avail_bytes(size),
                    layout::AVAIL_ALIGN,
                ),
                of(RingPart::UsedRing, layout::used_bytes(size), layout::USED_ALIGN),
            ),
            RingFormat::Packed => (events(RingPart::DriverEvents), events(RingPart::DeviceEvents)),
        };
        let desc = of(
            RingPart::DescriptorTable,
            layout::desc_bytes(size),
            layout::DESC_ALIGN,
        );
        [desc, avail, used]
    }
}

/// Length and alignment of a part of a ring, bytes.
#[derive(Clone, Copy)]
pub(crate) struct PartShape {
    part: RingPart,
    pub(crate) len: u64,
    align: u64,
}

/// A ring's kind, size and the offsets of its parts in a [`MemoryMap`]: inside guest memory and aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    format: RingFormat,
    size: QueueSize,
    offsets: RingAddresses,
}

impl RingLayout {
    /// From addresses in the VMM's address space, as vhost-user sends them (VHOST_USER_SET_VRING_ADDR).
    ///
    /// # Errors
    /// A part that is misaligned or not wholly inside one region.
    pub fn from_user(
        memory: &MemoryMap,
        shape: RingShape,
        addresses: RingAddresses,
    ) -> Result<Self, RingError> {
        Self::locate(shape, addresses, |addr, len| memory.translate_user(addr, len))
    }

    /// From offsets in the map.
    ///
    /// # Errors
    /// A part that is misaligned or not wholly inside the guest's part of the map.
    pub fn from_offsets(
        memory: &MemoryMap,
        shape: RingShape,
        offsets: RingAddresses,
    ) -> Result<Self, RingError> {
        let guest_len = memory.guest_len();
        Self::locate(shape, offsets, |offset, len| {
            (offset <= guest_len && len <= guest_len - offset).then_some(offset)
        })
    }

    fn locate(
        shape: RingShape,
        addresses: RingAddresses,
        translate: impl Fn(u64, u64) -> Option<u64>,
    ) -> Result<Self, RingError> {
        let RingShape { format, size } = shape;
        let find = |PartShape { part, len, align }, addr: u64| {
            let offset = translate(addr, len).ok_or(RingError::OutsideMemory { part, addr, len })?;
            // The map starts on a page, so an aligned offset is an aligned pointer. For a region that starts in the
            // middle of a page the address may be aligned and the offset not, or the reverse, so both are checked.
            let aligned = addr.is_multiple_of(align) && offset.is_multiple_of(align);
            aligned
                .then_some(offset)
                .ok_or(RingError::Misaligned { part, addr, align })
        };
        if format == RingFormat::Split {
            QueueSize::new(size.get().into())?;
        }
        let [desc, avail, used] = shape.parts();
        let offsets = RingAddresses {
            desc: find(desc, addresses.desc)?,
            avail: find(avail, addresses.avail)?,
            used: find(used, addresses.used)?,
        };
        Ok(Self {
            format,
            size,
            offsets,
        })
    }

    /// Which kind of ring.
    pub fn format(&self) -> RingFormat {
        self.format
    }

    /// Entries of the queue.
    pub fn size(&self) -> QueueSize {
        self.size
    }

    /// Offsets of the parts in the map, in bytes.
    pub fn offsets(&self) -> RingAddresses {
        self.offsets
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::GuestAddr;
    use crate::driver::GuestRam;

    fn ram() -> GuestRam {
        GuestRam::new(&[(GuestAddr(0), 1 << 16)]).unwrap()
    }

    fn layout(desc: u64, avail: u64, used: u64) -> Result<RingLayout, RingError> {
        let ram = ram();
        let size = QueueSize::new(256).unwrap();
        let addresses = RingAddresses { desc, avail, used };
        RingLayout::from_offsets(ram.map(), RingShape::new(RingFormat::Split, size), addresses)
    }

    #[test]
    fn ring_parts_must_be_aligned() {
        assert!(layout(0, 4096, 8192).is_ok());
        for (parts, refusal) in [
            (
                [8, 4096, 8192],
                "descriptor table at 0x8 is not aligned to 16 bytes",
            ),
            (
                [0, 4097, 8192],
                "available ring at 0x1001 is not aligned to 2 bytes",
            ),
            ([0, 4096, 8194], "used ring at 0x2002 is not aligned to 4 bytes"),
        ] {
            let [desc, avail, used] = parts;
            assert_eq!(layout(desc, avail, used).unwrap_err().to_string(), refusal);
        }
        assert_eq!(RingFormat::Packed.first_base(), 0x8000_8000);
    }

    /// In memory that starts in the middle of a page, addresses and map offsets differ in alignment.
    #[test]
    fn ring_parts_must_be_aligned_in_both_spaces() {
        let file = crate::mapping::sealed_file("ring", 1 << 16).unwrap();
        let region = crate::Region {
            guest_addr: GuestAddr(0),
            user_addr: 0,
            len: 1 << 15,
            file,
            file_offset: 8,
        };
        let memory = MemoryMap::new(vec![region], 0, &crate::TrustedFiles).unwrap();
        let shape = RingShape::new(RingFormat::Split, QueueSize::new(8).unwrap());
        for desc in [0, 8] {
            let addresses = RingAddresses {
                desc,
                avail: 4096,
                used: 8192,
            };
            let refused = RingLayout::from_user(&memory, shape, addresses);
            assert!(matches!(refused, Err(RingError::Misaligned { align: 16, .. })));
        }
    }

    #[test]
    fn packed_ring_has_four_bytes_of_events_each_way_and_any_size() {
        let ram = ram();
        let layout = |size, avail, used| {
            let size = QueueSize::packed(size).unwrap();
            let addresses = RingAddresses { desc: 0, avail, used };
            RingLayout::from_offsets(ram.map(), RingShape::new(RingFormat::Packed, size), addresses)
        };
        assert!(layout(100, (1 << 16) - 4, 1600).is_ok());
        assert!(matches!(
            layout(100, 1602, 1604),
            Err(RingError::Misaligned {
                part: RingPart::DriverEvents,
                align: 4,
                ..
            })
        ));
        assert!(matches!(
            layout(100, 1600, 1 << 16),
            Err(RingError::OutsideMemory {
                part: RingPart::DeviceEvents,
                len: 4,
                ..
            })
        ));
        let split = RingLayout::from_offsets(
            ram.map(),
            RingShape::new(RingFormat::Split, QueueSize::packed(100).unwrap()),
            RingAddresses {
                desc: 0,
                avail: 4096,
                used: 8192,
            },
        );
        assert!(matches!(split, Err(RingError::Size(QueueSizeError::Split(100)))));
    }

    #[test]
    fn ring_parts_must_be_wholly_inside_memory() {
        let end = 1u64 << 16;
        assert!(layout(end - 4096, 0, 1024).is_ok());
        for (desc, avail, used) in [
            (end - 4080, 0, 1024),
            (0, end - 516, 1024),
            (0, 4096, end - 2052),
            (u64::MAX - 15, 0, 0),
            (0, u64::MAX - 1, 0),
        ] {
            assert!(matches!(
                layout(desc, avail, used),
                Err(RingError::OutsideMemory { .. })
            ));
        }
    }
}
