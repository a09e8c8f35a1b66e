//! Whether a test can run here.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use kvm_bindings::KVM_API_VERSION;
use kvm_ioctls::Kvm;

use crate::guest::qemu;
use crate::{cgroup, systemd};

/// What a test needs that not every machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Root: namespaces, XDP programs.
    Root,
    /// DPDK's testpmd, and huge pages that it can have.
    Dpdk,
    /// What `scripts/guest` boots: QEMU (Debian's, or what `GUEST_QEMU` names) and a kernel.
    Qemu,
    /// User-mode Linux, and its modules.
    Uml,
    /// libvirtd with its QEMU driver, and virsh.
    Libvirt,
    /// File systems that a process serves.
    Fuse,
    /// `/dev/kvm`: virtual machines of the kernel's.
    Kvm,
    /// dnsmasq: a server of addresses.
    Dnsmasq,
    /// Prometheus and its promtool.
    Prometheus,
    /// systemd's program, and control groups of version 2 for it.
    Systemd,
    /// What makes a Debian package, and what installs one.
    Packager,
    /// zsh and fish.
    Shells,
    /// FRR's programs, in the directory that `FRR_DIR` names.
    Frr,
}

/// `true` if all is there. Otherwise says `SKIPPED: reason`.
///
/// # Panics
/// If something is missing and `REQUIRE_PRIV=1`.
pub fn have(needs: &[Need]) -> bool {
    let Some(reason) = needs.iter().find_map(|&need| missing(need)) else {
        return true;
    };
    assert!(
        std::env::var("REQUIRE_PRIV").as_deref() != Ok("1"),
        "REQUIRE_PRIV=1, but {reason}"
    );
    // Not by `println`, which cargo test keeps to itself when a test passes. nextest has all that a process writes.
    let _ = writeln!(io::stderr(), "SKIPPED: {reason}");
    false
}

fn missing(need: Need) -> Option<String> {
    match need {
        Need::Root => {
            (!rustix::process::geteuid().is_root()).then(|| "this needs root: namespaces and XDP".to_owned())
        }
        Need::Dpdk => missing_program("dpdk-testpmd").or_else(missing_hugepages),
        Need::Qemu => missing_program(&qemu()),
        Need::Uml => missing_program("linux.uml"),
        Need::Libvirt => missing_program("virsh").or_else(|| missing_program("libvirtd")),
        Need::Dnsmasq => missing_program("dnsmasq"),
        Need::Prometheus => missing_program("promtool").or_else(|| missing_program("prometheus")),
        Need::Fuse => missing_device("/dev/fuse"),
        Need::Kvm => missing_kvm(c"/dev/kvm"),
        Need::Packager => [
            "dpkg-deb",
            "dpkg-gencontrol",
            "dpkg-shlibdeps",
            "strip",
            "pivot_root",
        ]
        .into_iter()
        .find_map(missing_program),
        Need::Shells => missing_program("zsh").or_else(|| missing_program("fish")),
        Need::Frr => {
            let dir = std::env::var_os("FRR_DIR").unwrap_or_default();
            let there = Path::new(&dir).join("usr/lib/frr/bgpd").exists();
            (!there).then(|| "FRR_DIR names no directory with FRR".to_owned())
        }
        Need::Systemd => missing_program(systemd::PROGRAM).or_else(|| {
            let none = cgroup::mounted().is_none();
            none.then(|| "there are no control groups (cgroup2) that can be changed".to_owned())
        }),
    }
}

fn missing_program(name: &str) -> Option<String> {
    let found = Command::new("sh")
        .args(["-c", &format!("command -v {name}")])
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    (!found).then(|| format!("{name} is not installed"))
}

/// Opened, so that its module is loaded.
fn missing_device(path: &str) -> Option<String> {
    let opened = File::options().read(true).write(true).open(path);
    opened
        .err()
        .map(|error| format!("{path} cannot be opened: {error}"))
}

/// Asked, too: a container may have another file there.
fn missing_kvm(path: &CStr) -> Option<String> {
    let name = path.to_string_lossy();
    match Kvm::new_with_path(path) {
        Err(error) => Some(format!("{name} cannot be opened: {error}")),
        Ok(kvm) => (kvm.get_api_version() != KVM_API_VERSION as i32).then(|| format!("{name} is no KVM")),
    }
}

fn missing_hugepages() -> Option<String> {
    (!Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").exists())
        .then(|| "there are no 2 MiB huge pages".to_owned())
}

/// Returns from a test that cannot run here: `require!(Root, Dpdk)`.
#[macro_export]
macro_rules! require {
    ($($need:ident),+) => {
        if !$crate::privilege::have(&[$($crate::privilege::Need::$need),+]) {
            return;
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_is_no_kvm_is_missing() {
        assert_eq!(missing_kvm(c"/dev/null").as_deref(), Some("/dev/null is no KVM"));
        assert!(missing_kvm(c"/dev/null/kvm").is_some());
    }
}
