//! Values as they are written on the command line: addresses, lists, numbers.

use anyhow::{Context, bail};
use steer::{LAST_VLAN, mac_bytes, ranges};

/// VLANs by number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VlanList(pub(super) Vec<u16>);

/// CPUs by number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CpuList(pub(super) Vec<usize>);

pub(super) fn parse_pause(text: &str) -> Result<u64, String> {
    let seconds = text.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
    seconds.ok_or_else(|| "1 to 86400 seconds between tables".to_owned())
}

pub(super) fn parse_mac(text: &str) -> Result<[u8; 6], String> {
    match mac_bytes(text) {
        None => Err(format!(
            "{text:?} is not a MAC address: six hex bytes such as 02:00:00:00:00:01"
        )),
        Some([first, ..]) if first & 1 != 0 => Err(format!(
            "{text} is a multicast address: the first byte must be even, as in 02:00:00:00:00:01"
        )),
        Some([0, 0, 0, 0, 0, 0]) => Err(format!(
            "{text} is no station's address: name one such as 02:00:00:00:00:01"
        )),
        Some(mac) => Ok(mac),
    }
}

/// Refuses CPUs that this process may not run on.
pub(super) fn check_cpus(cpus: &[usize]) -> anyhow::Result<()> {
    let allowed = rustix::thread::sched_getaffinity(None).context("cannot read the CPU affinity")?;
    match cpus.iter().find(|&&cpu| !allowed.is_set(cpu)) {
        None => Ok(()),
        Some(cpu) => {
            let may: Vec<String> = (0..1024)
                .filter(|&cpu| allowed.is_set(cpu))
                .map(|cpu| cpu.to_string())
                .collect();
            bail!(
                "--cpus: CPU {cpu} is not there or not allowed: this process may use {}",
                may.join(",")
            )
        }
    }
}

/// Joined by commas, or by `+` where commas have another meaning.
pub(super) fn parse_vlans(text: &str) -> Result<VlanList, String> {
    let mut vlans = ranges(&text.replace('+', ","), LAST_VLAN).ok_or_else(|| {
        format!(
            "{text:?} is not a list of VLANs: numbers and ranges such as 100,200-203, of 0 (untagged) to {LAST_VLAN}"
        )
    })?;
    vlans.sort_unstable();
    vlans.dedup();
    Ok(VlanList(vlans))
}

pub(super) fn parse_cpus(text: &str) -> Result<CpuList, String> {
    // The kernel's own limit of CPUs in a set (CPU_SETSIZE).
    let cpus = ranges(text, 1023);
    cpus.map(CpuList)
        .ok_or_else(|| format!("{text:?} is not a list of CPUs: numbers and ranges such as 2,4-7"))
}
