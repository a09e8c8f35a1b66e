//! Addresses that the host has on an interface, wherever they are configured.

use std::collections::BTreeSet;
use std::io;

use super::Link;
use super::all::{Links, read_links};

/// The host's addresses on an interface: its own, those of the bridge or bond that it is part of, and those of
/// interfaces on any of these (VLANs, macvlans). Interfaces in other network namespaces are not seen.
///
/// # Errors
/// An error of the kernel.
pub fn addresses_above(link: &Link) -> io::Result<BTreeSet<[u8; 6]>> {
    let mut of_host = addresses(&read_links()?, link.index);
    of_host.insert(link.mac);
    of_host.retain(|&mac| mac[0] & 1 == 0 && mac != [0; 6]);
    Ok(of_host)
}

/// Those of an interface and of all that are above it.
fn addresses(all: &Links, index: u32) -> BTreeSet<[u8; 6]> {
    let mut above = BTreeSet::from([index]);
    loop {
        let before = above.len();
        for (&at, seen) in all {
            // For a veth, the interface below is its peer.
            let below = seen.below.filter(|_| seen.kind != "veth");
            if below.is_some_and(|below| above.contains(&below)) {
                above.insert(at);
            }
            if above.contains(&at) {
                above.extend(seen.master);
            }
        }
        if above.len() == before {
            break;
        }
    }
    above.iter().filter_map(|at| Some(all.get(at)?.mac)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::all::Seen;

    fn seen(index: u32, below: Option<u32>, master: Option<u32>) -> (u32, Seen) {
        let mac = [2, 0, 0, 0, 0, index as u8];
        let seen = Seen {
            mac,
            below,
            master,
            ..Seen::default()
        };
        (index, seen)
    }

    #[test]
    fn interfaces_above_are_found_however_far_up() {
        let (on, part) = (
            |index, below| seen(index, Some(below), None),
            |index, of| seen(index, None, Some(of)),
        );
        // A VLAN on a macvlan on a bridge that the first is part of; beside it another port of that bridge, an
        // interface of its own, and what is on that one.
        let all = Links::from([
            on(9, 8),
            on(8, 7),
            part(1, 7),
            seen(7, None, None),
            part(2, 7),
            part(3, 6),
            seen(6, None, None),
            on(4, 3),
        ]);
        let last = |index| -> Vec<u8> { addresses(&all, index).iter().map(|mac| mac[5]).collect() };
        assert_eq!(last(1), [1, 7, 8, 9]);
        assert_eq!(last(3), [3, 4, 6]);
        assert_eq!(last(4), [4]);
        // A circle, which the kernel does not make, has an end.
        assert_eq!(addresses(&Links::from([on(1, 2), on(2, 1)]), 1).len(), 2);
    }
}
