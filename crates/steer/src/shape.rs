//! The expected properties of a pinned map.

use libbpf_rs::{MapCore, MapHandle, MapType};

/// A map: the name of its pin, and its properties in this version. A version that changes a map's meaning
/// without its shape gives it another name: a pinned program of an older version whose maps all match is used
/// until its last lease ends.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) name: &'static str,
    pub(crate) kind: MapType,
    pub(crate) key_bytes: u32,
    pub(crate) value_bytes: u32,
    pub(crate) entries: u32,
}

impl Shape {
    /// Its name in `bpf/`.
    pub(crate) fn name_of_map(self) -> String {
        format!("steer_{}", self.name)
    }

    pub(crate) fn is_of(self, map: &MapHandle) -> bool {
        (
            map.map_type(),
            map.key_size(),
            map.value_size(),
            map.max_entries(),
        ) == (self.kind, self.key_bytes, self.value_bytes, self.entries)
    }
}
