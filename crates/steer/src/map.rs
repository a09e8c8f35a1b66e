//! Accesses to the programs' maps, with keys and values in their binary form. libbpf's messages are dropped.

use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::capture::messages_of;

/// Sets the value of a key.
pub(crate) fn set<K, V>(map: &MapHandle, key: &K, value: &V) -> Result<()>
where
    K: IntoBytes + Immutable,
    V: IntoBytes + Immutable,
{
    set_as(map, key, value, MapFlags::ANY)
}

/// As [`set`], with these flags.
pub(crate) fn set_as<K, V>(map: &MapHandle, key: &K, value: &V, flags: MapFlags) -> Result<()>
where
    K: IntoBytes + Immutable,
    V: IntoBytes + Immutable,
{
    messages_of(|| map.update(key.as_bytes(), value.as_bytes(), flags)).0
}

/// The value of a key; `None` if there is none, or if it has another length.
pub(crate) fn get<V: FromBytes>(map: &MapHandle, key: &(impl IntoBytes + Immutable)) -> Result<Option<V>> {
    let (found, _) = messages_of(|| map.lookup(key.as_bytes(), MapFlags::ANY));
    Ok(found?.and_then(|value| V::read_from_bytes(&value).ok()))
}

/// Removes a key; returns whether it existed.
pub(crate) fn remove(map: &MapHandle, key: &(impl IntoBytes + Immutable)) -> Result<bool> {
    match messages_of(|| map.delete(key.as_bytes())).0 {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// All keys.
pub(crate) fn keys<K: FromBytes>(map: &MapHandle) -> impl Iterator<Item = K> {
    map.keys().filter_map(|key| K::read_from_bytes(&key).ok())
}
