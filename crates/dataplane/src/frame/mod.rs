//! Frames on their way: copies between memories, checksums, VLAN tags, segmentation.

pub mod bytes;
pub(crate) mod checksums;
pub(crate) mod encapsulated;
pub(crate) mod gso;
pub(crate) mod retag;
pub(crate) mod segmenter;
