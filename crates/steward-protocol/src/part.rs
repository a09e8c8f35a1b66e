//! Pieces of memory that a lessee passes.

use super::wire::wire;
use super::{Malformed, SMALLEST_PAGE, UMEM_MAX};

/// A piece of the memory for frames: part of a file that several processes can map, without a file system server that
/// could block a reader (memfd_create(2), tmpfs, hugetlbfs).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Part {
    /// Where it begins in its file, bytes: on a page of the file.
    pub file_offset: u64,
    /// Length, bytes: whole pages of the file.
    pub len: u64,
}

wire!(Part { file_offset, len });

/// Checks limits, so that no later calculation can overflow.
pub(super) fn check_parts(parts: &[Part]) -> Result<(), Malformed> {
    let mut left = UMEM_MAX;
    for part in parts {
        let wrong = |field, value| Err(Malformed::Value { field, value });
        if part.len == 0 || part.len % SMALLEST_PAGE != 0 || part.len > left {
            return wrong("length of a part of memory", part.len);
        }
        let most = i64::MAX.cast_unsigned() - part.len;
        if part.file_offset % SMALLEST_PAGE != 0 || part.file_offset > most {
            return wrong("where a part of memory begins in its file", part.file_offset);
        }
        left -= part.len;
    }
    Ok(())
}
