//! Frames on their way: copies between memories, checksums, VLAN tags, segmentation.

pub mod bytes;
pub(crate) mod checksums;
pub(crate) mod gso;
pub(crate) mod new_head;
pub(crate) mod retag;
pub(crate) mod segmenter;
