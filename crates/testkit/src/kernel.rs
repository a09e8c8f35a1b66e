//! The kernel that runs.

use std::process::Command;

use serde_json::Value;

use crate::daemon::binary;

/// Its version.
///
/// # Panics
/// If its release does not begin with two numbers.
pub fn version() -> (u32, u32) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|word| word.parse().ok());
    let numbers = (numbers.next(), numbers.next());
    let (Some(major), Some(minor)) = numbers else {
        panic!("release {release}");
    };
    (major, minor)
}

/// Whether it has hints of NICs, for programs bound to an interface; else that is said.
///
/// # Panics
/// If `vhost-af-xdp check` says nothing of it.
pub fn has_hints() -> bool {
    let output = Command::new(binary()).args(["check", "lo", "--json"]).output();
    let report: Value = serde_json::from_slice(&output.expect("it runs").stdout).expect("JSON");
    let kernel = report["hints"]["kernel"].as_array().expect("a list");
    let has = ["hash", "vlan"]
        .iter()
        .all(|hint| kernel.iter().any(|its| its == hint));
    if !has {
        println!("SKIPPED: this kernel has no hints but {kernel:?}");
    }
    has
}
