//! Which receive buffers of a guest can be posted directly, and at which address: see the head of `direct`.

use common::binding::LARGE_CHUNK;
use device::pair::Vring;
use virtqueue::{Buffer, HUGE_PAGE_BYTES};
use xsk::{Umem, UmemOffset, XDP_PACKET_HEADROOM};

#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Bytes from the start of a chunk to the virtio-net header.
    before: u32,
    /// Least length of a buffer, bytes: header and longest frame, or all that the NIC may write.
    least: u32,
    /// Chunks must be in one huge page: the first bytes of the UMEM that are in huge pages. `None`: anywhere.
    huge_bytes: Option<u64>,
}

impl Place {
    /// For frames to a guest. `by_dma`: the NIC writes them by DMA, and so many bytes of the UMEM are in huge pages.
    pub(super) fn new(guest: &Vring, umem: &Umem, by_dma: Option<u64>) -> Self {
        let longest = match by_dma {
            Some(_) => umem.max_frame_bytes(),
            None => guest.guest.frame_limit,
        };
        Self {
            before: XDP_PACKET_HEADROOM + umem.headroom() - guest.guest.header_bytes,
            least: guest.guest.header_bytes + longest,
            huge_bytes: by_dma,
        }
    }

    /// The fill address that makes the kernel put header and frame at the start of a buffer; `None`: the buffer cannot
    /// be posted.
    #[inline]
    pub(super) fn fill_address(&self, buffer: &Buffer) -> Option<u64> {
        if buffer.len < self.least || buffer.room_before < self.before {
            return None;
        }
        let fill = buffer.offset - u64::from(self.before);
        let last = fill + u64::from(LARGE_CHUNK) - 1;
        let in_one_page = |huge_bytes| last < huge_bytes && fill / HUGE_PAGE_BYTES == last / HUGE_PAGE_BYTES;
        self.huge_bytes.is_none_or(in_one_page).then_some(fill)
    }

    /// The start of the buffer that belongs to a fill address, where the header is written.
    #[inline]
    pub(super) fn start(&self, fill: UmemOffset) -> UmemOffset {
        UmemOffset::new(fill.get() + u64::from(self.before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As with igb: it may write 2048 bytes behind the header, and the chunk begins 2036 bytes before the header.
    const BY_DMA: Place = Place {
        before: XDP_PACKET_HEADROOM + 1792 - 12,
        least: 12 + 2048,
        huge_bytes: Some(2 * HUGE_PAGE_BYTES),
    };

    fn buffer(offset: u64, len: u32) -> Buffer {
        Buffer {
            offset,
            len,
            room_before: u32::try_from(offset).expect("not that far"),
        }
    }

    #[test]
    fn buffer_must_hold_all_that_the_nic_may_write() {
        let place = |len| BY_DMA.fill_address(&buffer(1 << 20, len));
        assert_eq!(place(2060), Some((1 << 20) - 2036));
        assert_eq!(place(2059), None);
        // The NIC may write to the end of the chunk.
        assert_eq!(2036 + 12 + 2048, LARGE_CHUNK);
    }

    #[test]
    fn chunk_must_lie_in_memory_of_the_guest() {
        assert_eq!(BY_DMA.fill_address(&buffer(2036, 2060)), Some(0));
        assert_eq!(BY_DMA.fill_address(&buffer(2035, 2060)), None);
    }

    #[test]
    fn chunk_must_lie_in_one_huge_page_where_it_is_for_dma() {
        let copied = Place {
            huge_bytes: None,
            ..BY_DMA
        };
        let page = HUGE_PAGE_BYTES;
        for (offset, fits) in [
            (page - 2060, true),
            (page - 2059, false),
            (page + 2035, false),
            (page + 2036, true),
            (2 * page - 2060, true),
            // In small pages, which are behind the two huge ones.
            (2 * page + 4096, false),
        ] {
            let buffer = buffer(offset, 2060);
            assert_eq!(BY_DMA.fill_address(&buffer).is_some(), fits, "{offset}");
            assert!(copied.fill_address(&buffer).is_some(), "{offset}");
        }
    }
}
