//! The device's config space (VirtIO 1.3, 5.1.4).

use virtio_bindings::bindings::virtio_net::{VIRTIO_NET_S_ANNOUNCE, VIRTIO_NET_S_LINK_UP, virtio_net_config};

use crate::hash::HashTypes;

/// Longest supported read, bytes: the maximum of vhost-user.
const LONGEST_READ: u32 = 256;

/// A read beyond the config space.
#[derive(Debug, thiserror::Error)]
#[error("config space: {len} bytes at offset {offset} are not within its {size} bytes")]
pub struct ConfigError {
    offset: u32,
    len: u32,
    size: usize,
}

/// Limits for a driver's hash and RSS requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashLimits {
    /// Longest key, bytes: `rss_max_key_size`.
    pub key_bytes: u8,
    /// Longest indirection table, entries: `rss_max_indirection_table_length`.
    pub table_entries: u16,
    /// `supported_hash_types`.
    pub types: HashTypes,
}

/// The fields of `struct virtio_net_config` that this device has. All are read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfigSpace {
    /// The device's address.
    pub mac: [u8; 6],
    /// VIRTIO_NET_S_LINK_UP: the port has a link.
    pub link_up: bool,
    /// Maximum number of queue pairs.
    pub max_pairs: u16,
    /// MTU: maximum bytes of a frame after its Ethernet header.
    pub mtu: u16,
    /// The guest should announce itself; only if the device serves the control queue.
    pub announce: bool,
    /// `None`: neither RSS nor hash reports are offered.
    pub hashing: Option<HashLimits>,
}

impl ConfigSpace {
    /// As the driver sees it, little-endian.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(size_of::<virtio_net_config>());
        bytes.extend(self.mac);
        let flag = |on, flag: u32| if on { flag } else { 0 };
        let status = flag(self.link_up, VIRTIO_NET_S_LINK_UP) | flag(self.announce, VIRTIO_NET_S_ANNOUNCE);
        // The status field is 16 bits wide, and these are its bits 0 and 1.
        for field in [status as u16, self.max_pairs, self.mtu] {
            bytes.extend(field.to_le_bytes());
        }
        if let Some(hashing) = self.hashing {
            // Speed and duplex: unknown, as VIRTIO_NET_F_SPEED_DUPLEX is not offered.
            bytes.extend([0xff; 5]);
            bytes.push(hashing.key_bytes);
            bytes.extend(hashing.table_entries.to_le_bytes());
            bytes.extend(hashing.types.bits().to_le_bytes());
        }
        bytes
    }

    /// `len` bytes at `offset`. In a read from offset 0, absent fields of the structure read as zeros.
    ///
    /// # Errors
    /// [`ConfigError`]; a VMM chooses both numbers.
    pub fn read(&self, offset: u32, len: u32) -> Result<Vec<u8>, ConfigError> {
        let mut bytes = self.bytes();
        let size = bytes.len();
        let end = (offset as usize).saturating_add(len as usize);
        if let Some(asked) = bytes.get(offset as usize..end) {
            return Ok(asked.to_vec());
        }
        if offset != 0 || len > LONGEST_READ {
            return Err(ConfigError { offset, len, size });
        }
        bytes.resize(len as usize, 0);
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: ConfigSpace = ConfigSpace {
        mac: [2, 1, 2, 3, 4, 5],
        link_up: true,
        max_pairs: 0x0102,
        mtu: 0x05dc,
        announce: false,
        hashing: None,
    };

    #[test]
    fn fields_are_where_virtio_has_them() {
        assert_eq!(SPACE.bytes(), [2, 1, 2, 3, 4, 5, 1, 0, 2, 1, 0xdc, 5]);
        let down = ConfigSpace {
            link_up: false,
            ..SPACE
        };
        assert_eq!(down.read(6, 2).expect("within"), [0, 0]);
        let announced = ConfigSpace {
            announce: true,
            ..SPACE
        };
        assert_eq!(announced.read(6, 2).expect("within"), [3, 0]);
    }

    #[test]
    fn limits_of_hashing_are_where_virtio_has_them() {
        let space = ConfigSpace {
            hashing: Some(HashLimits {
                key_bytes: 40,
                table_entries: 0x0180,
                types: HashTypes::ALL,
            }),
            ..SPACE
        };
        assert_eq!(space.bytes().len(), 24);
        assert_eq!(space.read(12, 5).expect("within"), [0xff; 5]);
        assert_eq!(space.read(17, 7).expect("within"), [40, 0x80, 1, 0xff, 1, 0, 0]);
    }

    #[test]
    fn read_beyond_the_end_is_refused_unless_it_is_of_the_whole_structure() {
        assert_eq!(SPACE.read(10, 2).expect("within"), [0xdc, 5]);
        let whole = SPACE.read(0, 60).expect("the whole structure");
        assert_eq!((whole.len(), &whole[12..]), (60, &[0; 48][..]));
        for (offset, len) in [(10, 3), (12, 1), (0, 257), (u32::MAX, u32::MAX)] {
            assert!(SPACE.read(offset, len).is_err(), "{len} at {offset}");
        }
    }
}
