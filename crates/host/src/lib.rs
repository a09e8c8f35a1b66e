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
