//! Which data path a queue is asked for, and how large the chunks of its memory are.
//!
//! Memory is registered before the kernel says which mode it grants. So both are decided before, by what is known of
//! the driver: chunks of 2048 bytes go with copy modes only, and where zero-copy may be granted chunks have 4096.
//!
//! What drivers make of a chunk in zero-copy mode, after 256 bytes of headroom (seen by running them, Linux 7.2 under
//! QEMU, and in their sources):
//!
//! - igb (`igb_setup_srrctl`; igc has the same register): 1024 bytes of a frame in a chunk of 2048, 3072 in one of
//!   4096: whole KiB. A longer frame goes on in the next chunk, without a mark that it does (XDP_PKT_CONTD), so that
//!   each piece looks like a frame.
//! - virtio_net: 1792 and 3840 bytes: multiples of 128. A longer frame is dropped; the bind is refused where the MTU
//!   does not fit.
//!
//! So a frame must not reach the end of a chunk. With an MTU of at most 1500 NICs drop what is much longer (igb: from
//! some 1,650 bytes on, `IGB_MAX_FRAME_BUILD_SKB` in `igb_set_rx_mode`); with a larger one igb takes up to 9,216 bytes,
//! and zero-copy is left to drivers that have multi-buffer there, which mark the pieces.

use steward::links::{DriverSends, Link};
use xsk::XDP_PACKET_HEADROOM;

/// Ethernet header and one VLAN tag, bytes: what a frame may be longer than the MTU.
pub(crate) const L2_BYTES: u32 = 18;
/// Chunk for frames up to 1,792 bytes, and for longer ones or zero-copy.
pub(crate) const SMALL_CHUNK: u32 = 2048;
pub(crate) const LARGE_CHUNK: u32 = 4096;
/// Longest frame that the kernel receives into one chunk, bytes.
pub(crate) const LONGEST_FRAME: u32 = LARGE_CHUNK - XDP_PACKET_HEADROOM;
/// Bytes of metadata before each frame sent, where there is any: `struct xsk_tx_metadata`
/// (include/uapi/linux/if_xdp.h) has 16 or, from 6.14 on, 24; this many leave the frame on a cache line of its own.
pub(crate) const TX_METADATA_BYTES: u32 = 64;
/// Longest frame in one piece in zero-copy mode, bytes: at an MTU of 1500.
pub(crate) const LONGEST_ZERO_COPY: u32 = 1500 + L2_BYTES;

/// What is known of a queue before it is bound.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish {
    /// The user wants no zero-copy.
    pub(crate) force_copy: bool,
    /// The UMEM is guest memory, or will be soon: the queue is not to change its mode meanwhile.
    pub(crate) direct: bool,
    /// The program is attached natively.
    pub(crate) native: bool,
    /// What the driver does.
    pub(crate) driver: DriverSends,
    /// Longest frame, bytes.
    pub(crate) frame_limit: u32,
}

/// How it is bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Binding {
    /// Zero-copy is not asked for.
    pub(crate) force_copy: bool,
    /// Chunks of copy placement, bytes.
    pub(crate) chunk_bytes: u32,
    /// Why it is not asked for, unless the user wanted that.
    pub(crate) note: Option<NoZeroCopy>,
}

/// Why zero-copy is not asked for, where the user did not want that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoZeroCopy {
    #[error(
        "with memory=direct the NIC would write frames into guest memory before the XDP program has judged them"
    )]
    GuestMemory,
    #[error("the XDP program is attached in skb mode")]
    SkbMode,
    #[error("the driver has no zero-copy")]
    Driver,
    #[error("beyond MTU 1500 a driver without multi-buffer in zero-copy may cut a frame into several")]
    LongFrames,
}

/// When zero-copy is not asked for, and what is said then.
type Rule = (fn(&Wish) -> bool, Option<NoZeroCopy>);

/// When zero-copy is not asked for, and what is said of it; the first that holds counts.
const NO_ZERO_COPY: [Rule; 5] = [
    (|wish| wish.force_copy, None),
    (|wish| wish.direct, Some(NoZeroCopy::GuestMemory)),
    (|wish| !wish.native, Some(NoZeroCopy::SkbMode)),
    (|wish| !wish.driver.zero_copy, Some(NoZeroCopy::Driver)),
    (
        |wish| wish.frame_limit > LONGEST_ZERO_COPY && wish.driver.most_pieces == 1,
        Some(NoZeroCopy::LongFrames),
    ),
];

/// What is known of an interface's driver: a veth has no zero-copy, which kernels before 6.3 do not say.
pub(crate) fn driver(link: &Link, driver: DriverSends) -> DriverSends {
    DriverSends {
        zero_copy: driver.zero_copy && !link.partial_checksums,
        ..driver
    }
}

impl Wish {
    pub(crate) fn binding(&self) -> Binding {
        let refused = NO_ZERO_COPY.iter().find(|(holds, _)| holds(self));
        let fits_small = self.frame_limit.saturating_add(XDP_PACKET_HEADROOM) <= SMALL_CHUNK;
        Binding {
            force_copy: refused.is_some(),
            chunk_bytes: match refused {
                Some(_) if fits_small => SMALL_CHUNK,
                _ => LARGE_CHUNK,
            },
            note: refused.and_then(|(_, note)| *note),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A NIC with zero-copy, as igb is.
    const IGB: Wish = Wish {
        force_copy: false,
        direct: false,
        native: true,
        driver: DriverSends {
            checksum: false,
            most_pieces: 1,
            zero_copy: true,
        },
        frame_limit: 1518,
    };

    #[test]
    fn zero_copy_is_asked_for_with_chunks_that_no_frame_fills() {
        let binding = IGB.binding();
        assert!(!binding.force_copy);
        // What igb makes of it: whole KiB.
        let window = (binding.chunk_bytes - XDP_PACKET_HEADROOM) / 1024 * 1024;
        assert!(window > 2 * 1024, "{binding:?}");
    }

    #[test]
    fn small_chunks_are_for_copy_modes() {
        let no_zero_copy = DriverSends {
            zero_copy: false,
            ..IGB.driver
        };
        for (wish, said) in [
            (
                Wish {
                    force_copy: true,
                    ..IGB
                },
                None,
            ),
            (Wish { direct: true, ..IGB }, Some(NoZeroCopy::GuestMemory)),
            (Wish { native: false, ..IGB }, Some(NoZeroCopy::SkbMode)),
            (
                Wish {
                    driver: no_zero_copy,
                    ..IGB
                },
                Some(NoZeroCopy::Driver),
            ),
        ] {
            let binding = wish.binding();
            assert_eq!(
                (binding.force_copy, binding.chunk_bytes),
                (true, 2048),
                "{wish:?}"
            );
            assert_eq!(binding.note, said, "{wish:?}");
        }
        let long = Wish {
            force_copy: true,
            frame_limit: 1793,
            ..IGB
        };
        assert_eq!(long.binding().chunk_bytes, 4096);
    }

    #[test]
    fn long_frames_are_zero_copy_only_where_their_pieces_are_marked() {
        let jumbo = Wish {
            frame_limit: 1519,
            ..IGB
        };
        let binding = jumbo.binding();
        assert_eq!(
            (binding.force_copy, binding.note),
            (true, Some(NoZeroCopy::LongFrames))
        );
        let driver = DriverSends {
            most_pieces: 8,
            ..IGB.driver
        };
        let marked = Wish {
            driver,
            frame_limit: 9018,
            ..IGB
        };
        assert!(!marked.binding().force_copy);
    }
}
