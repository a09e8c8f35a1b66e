//! Interfaces and NICs of the host, as the kernel reports them. Functions here read and need no privilege. The steward,
//! which changes interfaces and NICs, has the code for that, and passes its ethtool commands to
//! [`nic::Ethtool::command`], which is unsafe.
//!
//! | module | what |
//! |---|---|
//! | [`links`] | network interfaces, their stacks and bridges, by rtnetlink |
//! | [`nic`] | a driver's queues, n-tuple rules, RSS contexts and rings, by ethtool; users of queues |
//! | [`unserved_queues`] | queues outside a lease that may receive frames for the lessee |

pub mod links;
pub mod nic;
pub mod unserved_queues;

use std::fs;
use std::sync::OnceLock;

/// The boot id, different after each boot.
#[must_use]
pub fn boot_id() -> String {
    let read = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    read.unwrap_or_default().trim().to_owned()
}

/// Whether another process can map the rings of a bound socket: Linux 6.4 (`xsk_mmap`, net/xdp/xsk.c;
/// 5f5a7d8d8bd4). Then the steward binds sockets before it hands them over; else a lessee could bind its socket to any
/// free queue. Without a queue to bind this cannot be probed, so the version decides, once.
#[must_use]
pub fn maps_bound_rings() -> bool {
    static MAPS: OnceLock<bool> = OnceLock::new();
    *MAPS.get_or_init(|| {
        // In a debug build tests can simulate an old kernel.
        if cfg!(debug_assertions) && std::env::var_os("STEWARD_OLD_KERNEL").is_some() {
            return false;
        }
        let name = rustix::system::uname();
        let mut numbers = name.release().to_str().unwrap_or_default().split(['.', '-']);
        let mut next = || numbers.next().and_then(|number| number.parse::<u32>().ok());
        matches!((next(), next()), (Some(major), Some(minor)) if (major, minor) >= (6, 4))
    })
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use rustix::thread::{CapabilitySet, capabilities, set_thread_res_uid};
    use testkit::netns::NetNs;

    use super::links::bridge::{BridgeFdb, bridge_of};
    use super::links::{Changes, DriverSends, DriverXdp, Link, above, below, filters};
    use super::nic::{Ethtool, Steering, bound, rings, tags};
    use super::unserved_queues::unserved_queues;

    /// All that can be read of an interface, as text.
    fn read(name: &str) -> String {
        let (mut text, link) = (String::new(), Link::by_name(name).expect("it is there"));
        let (index, driver) = (link.index, Ethtool::open(name).expect("it is there"));
        let mut behind = BridgeFdb::default();
        let looked = behind
            .look_at_links(&link, "")
            .and_then(|()| behind.look_at_fdb());
        macro_rules! note {
            ($($read:expr),* $(,)?) => {$(
                let _ = writeln!(text, "{}: {:?}", stringify!($read), $read);
            )*};
        }
        note!(
            &link,
            Link::has_carrier(index),
            Link::is_loopback(index),
            DriverSends::by_index(index),
            DriverXdp::by_index(index),
            above::addresses_above(&link),
            below::losses_above(&link),
            bridge_of(index),
            looked,
            behind.count(),
            filters::of_networks(),
            Changes::subscribe().map(drop),
            driver.driver(),
            driver.receive_queues(),
            driver.most_receive_queues(),
            driver.tags(),
            driver.joins(),
            driver.has_tso(),
            driver.table(),
            driver.contexts(),
            driver.spread(0),
            bound::to(index, 0),
            bound::leased_to(index, 0),
            bound::has_socket(index, 0),
            rings::of(index),
            tags::tags_of(name, &steer::Filter::default()),
            unserved_queues(&link, &(0..1), true),
        );
        text
    }

    #[test]
    fn process_without_privileges_reads_what_root_reads() {
        testkit::require!(Root);
        let ns = NetNs::new("reads");
        for line in [
            "link add br0 type bridge",
            "link add nic0 numrxqueues 2 numtxqueues 2 type veth peer name wire0",
            "link add nic1 type veth peer name wire1",
            "link set nic0 master br0",
            "link set nic1 master br0",
            "link set nic0 up",
            "link set wire0 up",
            "link set br0 up",
        ] {
            ns.ip(&line.split(' ').collect::<Vec<_>>());
        }
        let [by_root, by_nobody] = [0, 65_534].map(|uid| {
            ns.enter(move || {
                let user = rustix::process::Uid::from_raw(uid);
                set_thread_res_uid(user, user, user).expect("root may");
                let own = capabilities(None).expect("own").effective;
                assert_eq!(own == CapabilitySet::empty(), uid != 0);
                read("nic0")
            })
        });
        assert!(
            by_root.contains("bridge_of(index): Ok(Some(\"br0\"))"),
            "{by_root}"
        );
        assert_eq!(by_nobody, by_root);
    }
}
