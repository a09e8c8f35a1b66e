//! Decides which bind mode to request for a queue, and the size of its UMEM chunks.
//!
//! The UMEM is registered before the kernel reports which mode it grants. So mode and chunk size are chosen in
//! advance, from the table of drivers (`drivers.rs`): chunks of 2048 bytes only if copy mode is forced, otherwise
//! of 4096.
//!
//! How much of a chunk drivers fill in zero-copy mode, after 256 bytes of headroom (measured with Linux 7.2 under
//! QEMU, and read in their sources):
//!
//! - igb (`igb_setup_srrctl`; igc has the same register): whole KiB, so 1024 bytes of a chunk of 2048, and 3072 of one
//!   of 4096. A longer frame continues in the next chunk, but without the flag for that (XDP_PKT_CONTD), so each piece
//!   looks like a whole frame.
//! - virtio_net: 1792 and 3840 bytes, multiples of 128. It drops a longer frame, and refuses the bind if the MTU does
//!   not fit.
//!
//! So a frame must not reach the end of a chunk. With an MTU of at most 1500, NICs drop much longer frames (igb: from
//! some 1,650 bytes on, `IGB_MAX_FRAME_BUILD_SKB` in `igb_set_rx_mode`). With a larger MTU igb receives up to 9,216
//! bytes, so zero-copy then needs a driver with multi-buffer in zero-copy mode, which marks the pieces.

use host::links::DriverSends;
use xsk::{BindRequest, XDP_PACKET_HEADROOM};

use crate::drivers::{Line, ZeroCopy};

/// Ethernet header and one VLAN tag, bytes: a frame may be longer than the MTU by this much.
pub const L2_BYTES: u32 = 18;
/// Bytes of a chunk for frames up to 1,792 bytes.
pub const SMALL_CHUNK: u32 = 2048;
/// Bytes of a chunk for longer frames, or for zero-copy.
pub const LARGE_CHUNK: u32 = 4096;
/// Longest frame that the kernel receives into one chunk, bytes.
pub const LONGEST_FRAME: u32 = LARGE_CHUNK - XDP_PACKET_HEADROOM;
/// Bytes of metadata before each frame sent, where there is any: `struct xsk_tx_metadata`
/// (include/uapi/linux/if_xdp.h) has 16 or, from 6.14 on, 24; this many leave the frame on a cache line of its own.
pub const TX_METADATA_BYTES: u32 = 64;
/// Longest frame that needs no multi-buffer in zero-copy mode, bytes: that of an MTU of 1500.
pub const LONGEST_ZERO_COPY: u32 = 1500 + L2_BYTES;

/// What is known of a queue before it is bound.
#[derive(Debug, Clone, Copy)]
pub struct QueueFacts {
    /// The bind mode that the user requests.
    pub asked: BindRequest,
    /// Set if frames are received into guest memory, now or later (a bound queue keeps its mode); `None`: they are not.
    pub into_guest: Option<IntoGuest>,
    /// The program is attached natively.
    pub native: bool,
    /// What the driver reports that it supports.
    pub driver: DriverSends,
    /// The driver's line in the table of drivers.
    pub line: Option<&'static Line>,
    /// Its memory is a slice of the UMEM that all queues of the daemon share.
    pub shares: bool,
    /// Longest frame, bytes.
    pub frame_limit: u32,
}

/// What decides, apart from the driver, whether a NIC may write frames directly into guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IntoGuest {
    /// Who decides which frames are the guest's.
    pub steered_by: SteeredBy,
    /// The steward is this daemon's own: no lease can end while the daemon is stopped and holds the socket.
    pub is_own: bool,
    /// An IOMMU translates for the NIC.
    pub translated: bool,
    /// `None`: no guest is connected yet.
    pub guest: Option<GuestBuffers>,
}

/// Properties of a guest's receive buffers that decide whether a NIC may write into them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestBuffers {
    /// In which order they are returned to it.
    pub order: BufferOrder,
    /// Some of its memory is in huge pages.
    pub huge_pages: bool,
}

/// Who decides whether a frame in a queue is the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SteeredBy {
    /// The NIC: all frames that it puts into the queue are the guest's.
    Nic,
    /// Our XDP program, by addresses and VLANs. This also holds if n-tuple rules of the NIC steer the guest's frames to
    /// the queue, because RSS puts other frames there, too.
    Program,
    /// An XDP program that the daemon did not load.
    Foreign,
}

/// In which order a guest's receive buffers are returned to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferOrder {
    /// As the NIC completes them.
    Any,
    /// As they were posted: the guest negotiated VIRTIO_F_IN_ORDER.
    InOrder,
    /// As they were posted: the VMM keeps no inflight region, and the ring alone does not show the next daemon which
    /// buffers are in use.
    NoRegion,
}

/// How a queue is bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// The bind mode that is requested from the kernel.
    pub ask: BindRequest,
    /// Chunks of copy placement, bytes.
    pub chunk_bytes: u32,
    /// If the NIC may write frames into guest memory: least room in a buffer from the start of the frame, bytes.
    pub window: Option<u32>,
    /// Why zero-copy is not requested, unless the user forces copies.
    pub note: Option<NoZeroCopy>,
}

/// Why zero-copy is not requested, although the user does not force copies.
// The messages are the documentation.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoZeroCopy {
    #[error(
        "with --shared-umem all queues are as the first that is opened, and not every interface may have zero-copy: \
         leave it out for a NIC that has it"
    )]
    Shared,
    #[error(
        "with memory=direct and an XDP program that filters (mac, vlan) the NIC would write frames of others \
         into guest memory before that: leave them out, or use memory=send-direct"
    )]
    ByProgram,
    #[error("with memory=direct a foreign XDP program may redirect frames that are not the guest's")]
    ForeignProgram,
    #[error(
        "with memory=direct a NIC whose driver is not known for it might write beyond a guest's buffers: use \
         memory=send-direct"
    )]
    Unbounded,
    #[error(
        "with memory=direct and a driver that takes several buffers for a frame the kernel would keep its own notes of \
         these in guest memory"
    )]
    Chains,
    #[error(
        "with memory=direct a guest that wants its buffers back in order (VIRTIO_F_IN_ORDER) would wait for those that \
         the NIC keeps: use memory=send-direct, or a driver without it"
    )]
    InOrder,
    #[error(
        "with memory=direct and no inflight region of the VMM's a daemon that takes over could not tell which buffers \
         the NIC keeps (QEMU has none for netdevs): use memory=send-direct"
    )]
    NoRegion,
    #[error(
        "with memory=direct and a steward of several daemons a lease may end while its lessee is stopped, and the \
         NIC would write on into guest memory: start this daemon as root and without --steward, or use \
         memory=send-direct"
    )]
    SharedSteward,
    #[error(
        "with memory=direct and an IOMMU that translates for the NIC (iommu_group/type in sysfs is not `identity`) \
         hardly any guest buffer can receive in zero-copy: use memory=send-direct, or boot with iommu.passthrough=1"
    )]
    Translated,
    #[error(
        "with memory=direct and guest memory in pages of 4 KiB hardly any guest buffer can receive in zero-copy: \
         huge pages are needed (QEMU: memory-backend-memfd,hugetlb=on)"
    )]
    SmallPages,
    #[error("with memory=direct zero-copy begins when the guest's memory is registered: wait")]
    NoGuest,
    #[error("the XDP program is attached in skb mode")]
    SkbMode,
    #[error("the driver has no zero-copy")]
    Driver,
    #[error("it is known bad with this driver (force-zero-copy overrides this): {}", .0.why)]
    KnownBad(&'static Line),
    #[error(
        "beyond MTU 1500 a driver without multi-buffer in zero-copy may cut a frame into several: set an MTU of 1500"
    )]
    LongFrames,
}

impl QueueFacts {
    /// The mode to request, and the chunk size.
    /// Errors: the user forces zero-copy, but it is not possible, could cut frames, or is not safe with guest
    /// memory.
    pub fn binding(&self) -> Result<Binding, NoZeroCopy> {
        let (ask, note) = match (self.asked, self.refusal()) {
            (BindRequest::ForceCopy, _) => (BindRequest::ForceCopy, None),
            (BindRequest::ForceZeroCopy, Some(why)) => return Err(why),
            (BindRequest::Auto, Some(why)) => (BindRequest::ForceCopy, Some(why)),
            (asked, None) => (asked, None),
        };
        let into_guest = self.into_guest.filter(|_| ask != BindRequest::ForceCopy);
        let window = into_guest.and_then(|_| self.window());
        let fits_small = self.frame_limit.saturating_add(XDP_PACKET_HEADROOM) <= SMALL_CHUNK;
        let chunk_bytes = match ask {
            BindRequest::ForceCopy if fits_small && !self.shares => SMALL_CHUNK,
            _ => LARGE_CHUNK,
        };
        Ok(Binding {
            ask,
            chunk_bytes,
            window,
            note,
        })
    }

    /// The least buffer size that the NIC does not write beyond, bytes. Even with a small MTU it holds frames of MTU
    /// 1500, which NICs still receive: igb would cut them, and the program could not distinguish the rest of a frame
    /// from a frame.
    fn window(&self) -> Option<u32> {
        let longest = self.frame_limit.max(LONGEST_ZERO_COPY);
        let window = self.line?.window.bytes(longest);
        window.filter(|&bytes| bytes <= LONGEST_FRAME)
    }

    /// Why zero-copy is not requested. The table of drivers is ignored if the user forces zero-copy.
    fn refusal(&self) -> Option<NoZeroCopy> {
        let insists = self.asked == BindRequest::ForceZeroCopy;
        let known = self.line.filter(|_| !insists);
        let missing = known.is_some_and(|line| line.zero_copy == ZeroCopy::Missing);
        let cut = self.frame_limit > LONGEST_ZERO_COPY && self.driver.most_pieces == 1;
        match known {
            _ if !self.native => Some(NoZeroCopy::SkbMode),
            _ if self.shares && self.driver.zero_copy => Some(NoZeroCopy::Shared),
            _ if missing || !(self.driver.zero_copy || insists) => Some(NoZeroCopy::Driver),
            _ if cut => Some(NoZeroCopy::LongFrames),
            Some(line) if line.zero_copy == ZeroCopy::Bad => Some(NoZeroCopy::KnownBad(line)),
            _ => self.danger(self.into_guest?),
        }
    }

    /// Why a NIC must not write frames directly into guest memory: the first of the conditions that is not met
    /// (docs/hardware.md).
    fn danger(&self, into_guest: IntoGuest) -> Option<NoZeroCopy> {
        let IntoGuest {
            steered_by,
            is_own,
            translated,
            guest,
        } = into_guest;
        Some(match (steered_by, guest) {
            (SteeredBy::Program, _) => NoZeroCopy::ByProgram,
            (SteeredBy::Foreign, _) => NoZeroCopy::ForeignProgram,
            _ if !is_own => NoZeroCopy::SharedSteward,
            _ if self.window().is_none() => NoZeroCopy::Unbounded,
            _ if self.driver.most_pieces > 1 => NoZeroCopy::Chains,
            _ if translated => NoZeroCopy::Translated,
            (SteeredBy::Nic, None) => NoZeroCopy::NoGuest,
            (SteeredBy::Nic, Some(GuestBuffers { order, huge_pages })) => match order {
                BufferOrder::InOrder => NoZeroCopy::InOrder,
                BufferOrder::NoRegion => NoZeroCopy::NoRegion,
                BufferOrder::Any if !huge_pages => NoZeroCopy::SmallPages,
                BufferOrder::Any => return None,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drivers::TABLE;

    /// A NIC with zero-copy, as igb is.
    const IGB: QueueFacts = QueueFacts {
        asked: BindRequest::Auto,
        into_guest: None,
        native: true,
        driver: DriverSends {
            checksum: false,
            most_pieces: 1,
            zero_copy: true,
        },
        line: None,
        shares: false,
        frame_limit: 1518,
    };
    const NO_ZERO_COPY: DriverSends = DriverSends {
        zero_copy: false,
        ..IGB.driver
    };

    fn line(driver: &str) -> Option<&'static Line> {
        TABLE.iter().find(|line| line.driver == driver)
    }

    /// Nothing is in the way there.
    const GOOD: IntoGuest = IntoGuest {
        steered_by: SteeredBy::Nic,
        is_own: true,
        translated: false,
        guest: Some(GuestBuffers {
            order: BufferOrder::Any,
            huge_pages: true,
        }),
    };

    /// igb, whose frames would go into guest memory.
    fn direct(steered_by: SteeredBy, order: Option<BufferOrder>) -> QueueFacts {
        let guest = order.map(|order| GuestBuffers {
            order,
            huge_pages: true,
        });
        igb_with(IntoGuest {
            steered_by,
            guest,
            ..GOOD
        })
    }

    fn igb_with(into_guest: IntoGuest) -> QueueFacts {
        QueueFacts {
            into_guest: Some(into_guest),
            line: line("igb"),
            ..IGB
        }
    }

    #[test]
    fn first_condition_of_guest_memory_that_is_not_met_is_said() {
        use super::BufferOrder::{Any, InOrder, NoRegion};
        let whole = |order| direct(SteeredBy::Nic, order);
        let driver = |driver| QueueFacts {
            line: line(driver),
            ..whole(Some(Any))
        };
        let small = Some(GuestBuffers {
            order: Any,
            huge_pages: false,
        });
        let skb = QueueFacts {
            native: false,
            ..direct(SteeredBy::Program, Some(InOrder))
        };
        let chains = QueueFacts {
            driver: DriverSends {
                most_pieces: 8,
                ..IGB.driver
            },
            ..driver("i40e")
        };
        for (facts, said) in [
            (skb, NoZeroCopy::SkbMode),
            (driver("veth"), NoZeroCopy::Driver),
            (direct(SteeredBy::Program, Some(InOrder)), NoZeroCopy::ByProgram),
            (direct(SteeredBy::Foreign, Some(Any)), NoZeroCopy::ForeignProgram),
            (driver("ixgbe"), NoZeroCopy::Unbounded),
            (driver("not in the table"), NoZeroCopy::Unbounded),
            (chains, NoZeroCopy::Chains),
            (whole(Some(InOrder)), NoZeroCopy::InOrder),
            (whole(Some(NoRegion)), NoZeroCopy::NoRegion),
            (
                igb_with(IntoGuest {
                    is_own: false,
                    translated: true,
                    ..GOOD
                }),
                NoZeroCopy::SharedSteward,
            ),
            (
                igb_with(IntoGuest {
                    translated: true,
                    ..GOOD
                }),
                NoZeroCopy::Translated,
            ),
            (
                igb_with(IntoGuest { guest: small, ..GOOD }),
                NoZeroCopy::SmallPages,
            ),
            (whole(None), NoZeroCopy::NoGuest),
        ] {
            let binding = facts.binding().expect("zero-copy is not forced");
            assert_eq!(
                (binding.ask, binding.note),
                (BindRequest::ForceCopy, Some(said)),
                "{facts:?}"
            );
            let asked = BindRequest::ForceZeroCopy;
            let forced = QueueFacts { asked, ..facts }.binding();
            assert!(forced.is_err() || said == NoZeroCopy::Driver, "{facts:?}");
        }
    }

    #[test]
    fn guest_memory_is_received_into_by_a_nic_that_cannot_write_beyond_its_buffers() {
        for (driver, window) in [("igb", 2048), ("virtio_net", 1536)] {
            for frame_limit in [86, 918, 1518] {
                let facts = QueueFacts {
                    line: line(driver),
                    frame_limit,
                    ..igb_with(GOOD)
                };
                let binding = facts.binding().expect("not forced");
                let found = (binding.ask, binding.note, binding.window);
                assert_eq!(
                    found,
                    (BindRequest::Auto, None, Some(window)),
                    "{driver}, {frame_limit}"
                );
            }
        }
        // Nothing is bounded where the kernel copies.
        let copied = QueueFacts {
            asked: BindRequest::ForceCopy,
            ..igb_with(GOOD)
        };
        assert_eq!(copied.binding().expect("not forced").window, None);
    }

    #[test]
    fn queues_that_share_a_umem_copy_in_large_chunks_whatever_the_driver_and_the_mtu() {
        for driver in [IGB.driver, NO_ZERO_COPY] {
            for frame_limit in [86, 1518, 9018] {
                for asked in [BindRequest::Auto, BindRequest::ForceCopy] {
                    let facts = QueueFacts {
                        asked,
                        driver,
                        frame_limit,
                        shares: true,
                        ..IGB
                    };
                    let binding = facts.binding().expect("not forced");
                    assert_eq!(
                        (binding.ask, binding.chunk_bytes),
                        (BindRequest::ForceCopy, LARGE_CHUNK)
                    );
                }
            }
        }
    }

    #[test]
    fn zero_copy_is_asked_for_with_chunks_that_no_frame_fills() {
        for line in [None, line("igb"), line("igc")] {
            let binding = QueueFacts { line, ..IGB }.binding().expect("not forced");
            assert_eq!((binding.ask, binding.note), (BindRequest::Auto, None));
            // What igb makes of it: whole KiB.
            let window = (binding.chunk_bytes - XDP_PACKET_HEADROOM) / 1024 * 1024;
            assert!(window > 2 * 1024, "{binding:?}");
        }
    }

    #[test]
    fn small_chunks_are_for_copy_modes() {
        let forced = QueueFacts {
            asked: BindRequest::ForceCopy,
            ..IGB
        };
        let none = QueueFacts {
            driver: NO_ZERO_COPY,
            ..IGB
        };
        let with = |line| QueueFacts { line, ..IGB };
        let bad = line("ice").expect("a line");
        for (facts, said) in [
            (forced, None),
            (direct(SteeredBy::Program, None), Some(NoZeroCopy::ByProgram)),
            (QueueFacts { native: false, ..IGB }, Some(NoZeroCopy::SkbMode)),
            (none, Some(NoZeroCopy::Driver)),
            (with(line("veth")), Some(NoZeroCopy::Driver)),
            (with(Some(bad)), Some(NoZeroCopy::KnownBad(bad))),
        ] {
            let binding = facts.binding().expect("zero-copy is not forced");
            assert_eq!(
                (binding.ask, binding.chunk_bytes),
                (BindRequest::ForceCopy, 2048),
                "{facts:?}"
            );
            assert_eq!(binding.note, said, "{facts:?}");
        }
        let long = QueueFacts {
            frame_limit: 1793,
            ..forced
        };
        assert_eq!(long.binding().expect("not forced").chunk_bytes, 4096);
    }

    #[test]
    fn long_frames_are_zero_copy_only_where_their_pieces_are_marked() {
        let jumbo = QueueFacts {
            frame_limit: 1519,
            ..IGB
        };
        let binding = jumbo.binding().expect("not forced");
        assert_eq!(
            (binding.ask, binding.note),
            (BindRequest::ForceCopy, Some(NoZeroCopy::LongFrames))
        );
        let driver = DriverSends {
            most_pieces: 8,
            ..IGB.driver
        };
        let marked = QueueFacts {
            driver,
            frame_limit: 9018,
            ..IGB
        };
        assert_eq!(marked.binding().expect("not forced").ask, BindRequest::Auto);
    }

    #[test]
    fn forced_zero_copy_overrides_the_table_and_nothing_that_frames_depend_on() {
        let forced = QueueFacts {
            asked: BindRequest::ForceZeroCopy,
            driver: NO_ZERO_COPY,
            line: line("ice"),
            ..IGB
        };
        let binding = forced.binding().expect("possible");
        assert_eq!(
            (binding.ask, binding.chunk_bytes, binding.note),
            (BindRequest::ForceZeroCopy, LARGE_CHUNK, None)
        );
        let jumbo = QueueFacts {
            frame_limit: 9018,
            ..forced
        };
        for (facts, why) in [
            (jumbo, NoZeroCopy::LongFrames),
            (
                QueueFacts {
                    native: false,
                    ..forced
                },
                NoZeroCopy::SkbMode,
            ),
            (
                QueueFacts {
                    into_guest: direct(SteeredBy::Program, None).into_guest,
                    ..forced
                },
                NoZeroCopy::ByProgram,
            ),
        ] {
            assert_eq!(facts.binding(), Err(why));
        }
    }
}
