//! What the tests stand on.

pub(crate) mod cluster;
pub(crate) mod kubelet;
pub(crate) mod scene;
