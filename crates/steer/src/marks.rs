//! Marks: 32 bits that a rule of the user's gives a flow, which the program leaves before the flow's frames.

use std::net::{IpAddr, Ipv6Addr};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, libbpf_sys};

use crate::capture::messages_of;
use crate::shape::Shape;

/// Most flows of an interface that have a mark; `STEER_MAX_MARKS`.
pub const MAX_MARKS: u32 = 16_384;

/// What has a mark: a flow, or all flows to a service, which count where the flow has none of its own; `struct
/// steer_flow`.
///
/// Tags, up to two, are skipped over. Ports are those of TCP, UDP and SCTP; for other protocols, and fragments of IPv4
/// but the first, they are 0. Extension headers of IPv6 are not looked behind: the protocol is then their number, the
/// ports are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// As in the IP header: 6 TCP, 17 UDP, …
    pub protocol: u8,
    /// Source; `None`: a service. IPv4 addresses and `::ffff:` ones are the same.
    pub from: Option<(IpAddr, u16)>,
    /// Destination.
    pub to: (IpAddr, u16),
}

impl Flow {
    const KEY_BYTES: usize = 40;

    fn key(&self) -> [u8; Self::KEY_BYTES] {
        let mut key = [0; Self::KEY_BYTES];
        let wide = |address| match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        if let Some((address, port)) = self.from {
            key[..16].copy_from_slice(&wide(address).octets());
            key[32..34].copy_from_slice(&port.to_be_bytes());
        }
        let (address, port) = self.to;
        key[16..32].copy_from_slice(&wide(address).octets());
        key[34..36].copy_from_slice(&port.to_be_bytes());
        key[36] = self.protocol;
        key
    }

    fn of_key(key: &[u8]) -> Option<Self> {
        let (from, rest) = key.split_first_chunk::<16>()?;
        let (to, rest) = rest.split_first_chunk::<16>()?;
        let &[f0, f1, t0, t1, protocol, _, _, _] = rest else {
            return None;
        };
        let end = |address: [u8; 16], port| {
            let address = IpAddr::V6(Ipv6Addr::from(address)).to_canonical();
            (address, u16::from_be_bytes(port))
        };
        let from_anywhere = *from == [0; 16] && [f0, f1] == [0; 2];
        Some(Self {
            protocol,
            from: (!from_anywhere).then(|| end(*from, [f0, f1])),
            to: end(*to, [t0, t1]),
        })
    }
}

/// The map of marks.
#[derive(Debug)]
pub(crate) struct Marks(pub(crate) MapHandle);

impl Marks {
    pub(crate) const SHAPE: Shape = Shape {
        name: "marks",
        kind: MapType::Hash,
        key_bytes: Flow::KEY_BYTES as u32,
        value_bytes: 4,
        entries: MAX_MARKS,
    };

    pub(crate) fn new() -> libbpf_rs::Result<Self> {
        Self::SHAPE.create(libbpf_sys::BPF_F_NO_PREALLOC).map(Self)
    }

    pub(crate) fn set(&self, flow: &Flow, mark: Option<u32>) -> libbpf_rs::Result<()> {
        let (result, _) = messages_of(|| match mark {
            Some(mark) => self.0.update(&flow.key(), &mark.to_ne_bytes(), MapFlags::ANY),
            None => match self.0.delete(&flow.key()) {
                Err(error) if error.kind() == libbpf_rs::ErrorKind::NotFound => Ok(()),
                result => result,
            },
        });
        result
    }

    pub(crate) fn all(&self) -> Vec<(Flow, u32)> {
        let mark = |key: &[u8]| {
            let (found, _) = messages_of(|| self.0.lookup(key, MapFlags::ANY));
            let mark = u32::from_ne_bytes(*found.ok()??.first_chunk()?);
            Some((Flow::of_key(key)?, mark))
        };
        let mut all: Vec<(Flow, u32)> = self.0.keys().filter_map(|key| mark(&key)).collect();
        all.sort_unstable();
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_are_laid_out_as_steer_h_says() {
        let flow = Flow {
            protocol: 17,
            from: Some(("10.0.0.1".parse().expect("v4"), 0x1234)),
            to: ("fd00::2".parse().expect("v6"), 53),
        };
        let key = flow.key();
        assert_eq!(key[..16], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]);
        assert_eq!(key[16..32], [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(key[32..], [0x12, 0x34, 0, 53, 17, 0, 0, 0]);
        assert_eq!(Flow::of_key(&key), Some(flow));
        let service = Flow { from: None, ..flow };
        assert_eq!(service.key()[..16], [0; 16]);
        assert_eq!(Flow::of_key(&service.key()), Some(service));
        assert_eq!(Flow::of_key(&[0; 39]), None);
    }
}
