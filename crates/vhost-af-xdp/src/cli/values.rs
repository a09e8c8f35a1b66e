//! Values as they are written on the command line: addresses, lists, numbers.

use anyhow::{Context, bail};
use steer::LAST_VLAN;

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

pub(super) fn on_off(value: &str) -> Option<bool> {
    match value {
        "on" | "true" | "1" => Some(true),
        "off" | "false" | "0" => Some(false),
        _ => None,
    }
}

pub(super) fn parse_mac(text: &str) -> Result<[u8; 6], String> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|part| u8::from_str_radix(part, 16).ok().filter(|_| part.len() == 2))
        .collect();
    let mac = bytes.and_then(|bytes| <[u8; 6]>::try_from(bytes).ok());
    let mac =
        mac.ok_or_else(|| format!("{text:?} is not a MAC address: six hex bytes such as 02:00:00:00:00:01"))?;
    match mac {
        [first, ..] if first & 1 != 0 => Err(format!(
            "{text} is a multicast address: the first byte must be even, as in 02:00:00:00:00:01"
        )),
        [0, 0, 0, 0, 0, 0] => Err(format!(
            "{text} is no station's address: name one such as 02:00:00:00:00:01"
        )),
        mac => Ok(mac),
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

pub(super) fn parse_vlans(text: &str) -> Result<VlanList, String> {
    let wrong = || {
        format!(
            "{text:?} is not a list of VLANs: numbers and ranges such as 100,200-203, of 0 (untagged) to {LAST_VLAN}"
        )
    };
    let mut vlans = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: u16 = first.parse().map_err(|_| wrong())?;
        let last: u16 = last.parse().map_err(|_| wrong())?;
        if first > last || last > LAST_VLAN {
            return Err(wrong());
        }
        vlans.extend(first..=last);
    }
    vlans.sort_unstable();
    vlans.dedup();
    Ok(VlanList(vlans))
}

pub(super) fn parse_cpus(text: &str) -> Result<CpuList, String> {
    let wrong = || format!("{text:?} is not a list of CPUs: numbers and ranges such as 2,4-7");
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.parse().map_err(|_| wrong())?;
        let last: usize = last.parse().map_err(|_| wrong())?;
        // The kernel's own limit of CPUs in a set (CPU_SETSIZE).
        if first > last || last >= 1024 {
            return Err(wrong());
        }
        cpus.extend(first..=last);
    }
    Ok(CpuList(cpus))
}
