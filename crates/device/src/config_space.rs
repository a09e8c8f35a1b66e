//! The device's config space: what a driver may read of it beside features and queues (VirtIO 1.3, 5.1.4).

use virtio_bindings::bindings::virtio_net::{VIRTIO_NET_S_LINK_UP, virtio_net_config};

/// Longest read that is answered, bytes: the most that vhost-user carries.
const LONGEST_READ: u32 = 256;

/// Bytes that there are not.
#[derive(Debug, thiserror::Error)]
#[error("config space: {len} bytes at offset {offset} are not within its {size} bytes")]
pub struct ConfigError {
    offset: u32,
    len: u32,
    size: usize,
}

/// The fields of `struct virtio_net_config` up to the MTU. All are read-only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfigSpace {
    /// The device's address.
    pub mac: [u8; 6],
    /// Frames have somewhere to go.
    pub link_up: bool,
    /// Queue pairs, at most.
    pub max_pairs: u16,
    /// Bytes that a frame may have behind its Ethernet header.
    pub mtu: u16,
}

impl ConfigSpace {
    /// As the driver sees it, little-endian.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(size_of::<virtio_net_config>());
        bytes.extend(self.mac);
        // The status field is 16 bits wide and LINK_UP its bit 0.
        let status = if self.link_up {
            VIRTIO_NET_S_LINK_UP as u16
        } else {
            0
        };
        for field in [status, self.max_pairs, self.mtu] {
            bytes.extend(field.to_le_bytes());
        }
        bytes
    }

    /// `len` bytes at `offset`. Who asks for the whole structure gets zeros for the fields that are not there.
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
    };

    #[test]
    fn fields_are_where_virtio_has_them() {
        assert_eq!(SPACE.bytes(), [2, 1, 2, 3, 4, 5, 1, 0, 2, 1, 0xdc, 5]);
        let down = ConfigSpace {
            link_up: false,
            ..SPACE
        };
        assert_eq!(down.read(6, 2).expect("within"), [0, 0]);
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
