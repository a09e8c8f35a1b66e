//! A NIC that completes frames when the test lets it: a macvlan over a veth whose qdisc sends a bit a second.

use crate::{NetNs, VethPair};

/// Its name.
pub const LATE: &str = "late0";

/// Makes it over the NIC of that namespace. The qdisc lets two frames of 1,514 bytes through at once.
///
/// # Panics
/// If that is not allowed.
pub fn make(near: &NetNs) {
    let slow = ["rate", "8bit", "burst", "3200", "limit", "100mb"];
    near.run(
        "tc",
        &[&["qdisc", "add", "dev", VethPair::NIC, "root", "tbf"], &slow[..]].concat(),
    );
    near.ip(&["link", "add", LATE, "link", VethPair::NIC, "type", "macvlan"]);
    near.ip(&["link", "set", LATE, "up"]);
}

/// Lets it complete all that it has, and from now on what it gets.
///
/// # Panics
/// If it is not there.
pub fn complete(near: &NetNs) {
    near.run("tc", &["qdisc", "del", "dev", VethPair::NIC, "root"]);
}
