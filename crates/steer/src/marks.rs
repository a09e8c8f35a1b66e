//! Marks: 32 bits that a rule of the user assigns to a flow. The program writes them before the flow's frames.

use std::net::{IpAddr, Ipv6Addr};

use anyhow::{Context, bail};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{MapCore, MapHandle, MapType, libbpf_sys};

use crate::capture::messages_of;
use crate::foreign::unnamed_program_on;
use crate::load::MARKS;
use crate::map;
use crate::shape::Shape;

/// Maximum number of flows with a mark per interface; `STEER_MAX_MARKS`.
pub const MAX_MARKS: u32 = 16_384;

/// The key of a mark: a flow, or all flows to a service, used if the flow has no mark of its own; `struct
/// steer_flow`.
///
/// Up to two tags are skipped. Ports are those of TCP, UDP and SCTP; for other protocols, and for later
/// fragments of IPv4, they are 0. Extension headers of IPv6 are not skipped: the protocol is then their
/// number, and the ports are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// As in the IP header: 6 TCP, 17 UDP, …
    pub protocol: u8,
    /// Source; `None`: a service. An IPv4 address and the corresponding `::ffff:` address of IPv6 are different.
    pub from: Option<(IpAddr, u16)>,
    /// Destination; its IP version is the flow's.
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
        key[37] = if address.is_ipv4() { 4 } else { 6 };
        key
    }

    fn of_key(key: &[u8]) -> Option<Self> {
        let (from, rest) = key.split_first_chunk::<16>()?;
        let (to, rest) = rest.split_first_chunk::<16>()?;
        let &[f0, f1, t0, t1, protocol, version, _, _] = rest else {
            return None;
        };
        let end = |address: [u8; 16], port| {
            let address = Ipv6Addr::from(address);
            let address = match version {
                4 => address.to_canonical(),
                _ => address.into(),
            };
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

fn cannot_change() -> String {
    format!(
        "cannot change the mark of a flow: an interface has at most {MAX_MARKS}; remove some if it has them"
    )
}

/// The marks of the program on an interface, even of another process. They exist as long as the interface has
/// programs of this crate, even while one replaces another.
#[derive(Debug)]
pub struct InterfaceMarks(pub(crate) MapHandle);

impl InterfaceMarks {
    pub(crate) const SHAPE: Shape = Shape {
        name: "marks",
        kind: MapType::Hash,
        key_bytes: Flow::KEY_BYTES as u32,
        value_bytes: 4,
        entries: MAX_MARKS,
    };

    /// A new map, for a program that will be loaded.
    pub(crate) fn new() -> libbpf_rs::Result<Self> {
        Self::SHAPE.create(libbpf_sys::BPF_F_NO_PREALLOC).map(Self)
    }

    /// Opens the marks of an interface.
    ///
    /// # Errors
    /// The interface's program has no marks, there is none, or CAP_SYS_ADMIN is missing.
    pub fn of(ifindex: u32) -> anyhow::Result<Self> {
        let on = unnamed_program_on(ifindex).context("cannot query the interface's XDP program")?;
        let program = on.context(
            "no XDP program is attached; start a daemon there, with `mark` among the hints (hints=mark)",
        )?;
        let program = program.id;
        let options = ProgInfoQueryOptions::default().include_map_ids(true);
        let (found, _) = messages_of(|| {
            let mut all = ProgInfoIter::with_query_opts(options);
            all.find(|it| it.id == program).map(|it| it.map_ids)
        });
        let maps = found.with_context(|| {
            format!("cannot query the attached XDP program (id {program}): that needs CAP_SYS_ADMIN; run this as root")
        })?;
        for id in maps {
            let (map, _) = messages_of(|| MapHandle::from_map_id(id));
            let map = map.context("cannot open the map of marks")?;
            if map.name() == MARKS && Self::SHAPE.is_of(&map) {
                return Ok(Self(map));
            }
        }
        bail!(
            "the attached XDP program (id {program}) has no map of marks; set `mark` among the hints of the daemon's \
             configuration (hints=mark)"
        )
    }

    /// Sets the mark of a flow; replaces an existing one.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn set(&self, flow: &Flow, mark: u32) -> anyhow::Result<()> {
        map::set(&self.0, &flow.key(), &mark).with_context(cannot_change)
    }

    /// Removes the mark of a flow; returns whether it had one.
    ///
    /// # Errors
    /// An error of the kernel.
    pub fn remove(&self, flow: &Flow) -> anyhow::Result<bool> {
        map::remove(&self.0, &flow.key()).with_context(cannot_change)
    }

    /// All marks, in order.
    #[must_use]
    pub fn all(&self) -> Vec<(Flow, u32)> {
        let mark =
            |key: [u8; Flow::KEY_BYTES]| Some((Flow::of_key(&key)?, map::get(&self.0, &key).ok().flatten()?));
        let mut all: Vec<(Flow, u32)> = map::keys(&self.0).filter_map(mark).collect();
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
            from: Some(("fd00::1".parse().expect("v6"), 0x1234)),
            to: ("fd00::2".parse().expect("v6"), 53),
        };
        let key = flow.key();
        assert_eq!(key[..16], [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(key[16..32], [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(key[32..], [0x12, 0x34, 0, 53, 17, 6, 0, 0]);
        assert_eq!(Flow::of_key(&key), Some(flow));
        let service = Flow { from: None, ..flow };
        assert_eq!(service.key()[..16], [0; 16]);
        assert_eq!(Flow::of_key(&service.key()), Some(service));
        assert_eq!(Flow::of_key(&[0; 39]), None);
        let [v4, like_it] = ["10.0.0.1", "::ffff:10.0.0.1"].map(|to| Flow {
            to: (to.parse().expect("an address"), 53),
            ..service
        });
        assert_eq!(
            v4.key()[16..32],
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1]
        );
        for (flow, version) in [(v4, 4), (like_it, 6)] {
            assert_eq!(flow.key()[37], version);
            assert_eq!(Flow::of_key(&flow.key()), Some(flow));
        }
    }
}
