//! Options about the memory that a VMM may share.

use std::sync::OnceLock;

use anyhow::{Context, bail};
use clap::Args;

use crate::config::{FileKinds, MOST_BYTES, MemoryRules, PortConfig};
use crate::nic::binding::LARGE_CHUNK;
use crate::nic::endpoint::{COPY_BYTES, LEAST_COPY_BYTES};

/// Fewest bytes that are taken for the memory of a guest: what is less was meant in another unit.
const LEAST_BYTES: u64 = 1 << 20;

/// As a port has them.
#[derive(Debug, Clone, Args)]
pub(crate) struct MemoryArgs {
    /// Most memory that a guest may have, for instance 32GiB [default: what the machine has, with swap]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_memory: Option<u64>,
    /// Files that are accepted as memory of a VMM's. `any` lets a VMM whose file system does not answer (FUSE, NFS)
    /// hang the worker, and with it every guest on that
    #[arg(long, value_enum, default_value = "shared")]
    memory_files: FileKinds,
}

impl MemoryArgs {
    /// What they mean for one of so many ports.
    pub(super) fn build(&self, ports: usize) -> MemoryRules {
        MemoryRules {
            most_bytes: self.max_memory.unwrap_or_else(|| machine(ports)),
            files: self.memory_files,
        }
    }
}

/// What the machine has, but so little that guests of all ports fit into the address space.
fn machine(ports: usize) -> u64 {
    machine_bytes().min(MOST_BYTES / ports.max(1) as u64)
}

/// Memory of the machine, with swap. To be asked for first before the sandbox, in which the kernel does not tell.
pub(crate) fn machine_bytes() -> u64 {
    static BYTES: OnceLock<u64> = OnceLock::new();
    *BYTES.get_or_init(|| {
        let info = rustix::system::sysinfo();
        #[allow(clippy::unnecessary_cast, clippy::useless_conversion)] // other types on other machines
        let (ram, swap) = (u64::from(info.totalram), u64::from(info.totalswap));
        ram.saturating_add(swap).saturating_mul(info.mem_unit.into())
    })
}

/// `--packet-memory`: whole pages, so that they are whole chunks; as much as several pairs have, if it is for all.
pub(super) fn parse_packet_memory(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    match bytes >= LEAST_COPY_BYTES.into() && bytes.is_multiple_of(LARGE_CHUNK.into()) {
        true => Ok(bytes),
        false => Err(format!("{text:?} {NOT_OF_A_PAIR}")),
    }
}

const NOT_OF_A_PAIR: &str = "is not from 512KiB to 6MiB, in whole pages of 4KiB: say 1MiB, for instance";

/// Packet memory of a queue pair that has a UMEM of its own.
pub(super) fn of_a_pair(said: Option<u64>) -> anyhow::Result<u32> {
    let Some(bytes) = said else {
        return Ok(COPY_BYTES);
    };
    let fits = u32::try_from(bytes).ok().filter(|&bytes| bytes <= COPY_BYTES);
    fits.with_context(|| format!("--packet-memory: {bytes} bytes for each queue pair {NOT_OF_A_PAIR}"))
}

/// `--shared-umem`: gives each queue pair that copies a slice of memory that all share; of the size that was said,
/// which is for all of them together.
/// Errors: one line: there are none; slices would be too small, or too large.
pub(super) fn share(ports: &mut [PortConfig], said: Option<u64>) -> anyhow::Result<()> {
    let sharing = || ports.iter().filter(|port| port.can_share());
    let pairs: u64 = sharing().map(|port| u64::from(port.queues)).sum();
    if pairs == 0 {
        bail!(
            "--shared-umem: no port has queues of an interface with memory=copy, which it is for: leave it out"
        );
    }
    let least = pairs * u64::from(LEAST_COPY_BYTES);
    let bytes = said.unwrap_or_else(|| least.max(COPY_BYTES.into()));
    let slice = bytes / pairs / u64::from(LARGE_CHUNK) * u64::from(LARGE_CHUNK);
    let slice = u32::try_from(slice)
        .ok()
        .filter(|slice| (LEAST_COPY_BYTES..=COPY_BYTES).contains(slice))
        .with_context(|| {
            format!(
                "--packet-memory with --shared-umem is for all {pairs} queue pair(s) together, and {bytes} bytes make \
                 {slice} for each, which is not from 512KiB to 6MiB: say {}KiB to {}KiB, or leave it out",
                least >> 10,
                (pairs * u64::from(COPY_BYTES)) >> 10
            )
        })?;
    let mut next = 0;
    for port in ports.iter_mut().filter(|port| port.can_share()) {
        (port.packet_bytes, port.slices_from) = (slice, Some(next));
        next += u32::from(port.queues);
    }
    Ok(())
}

fn parse_size(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        bytes @ 0..LEAST_BYTES => Err(format!(
            "{text:?} is {bytes} byte(s), less than any guest has: name the unit, such as 32GiB"
        )),
        bytes => Ok(bytes),
    }
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("{text:?} is not a size: a number with KiB, MiB, GiB or TiB such as 32GiB, or of bytes");
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].trim_start() {
        "" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "m" | "MiB" => 20,
        "G" | "g" | "GiB" => 30,
        "T" | "t" | "TiB" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in [
            ("1048576", 1 << 20),
            ("1024K", 1 << 20),
            ("1MiB", 1 << 20),
            ("32G", 32 << 30),
            ("32GiB", 32 << 30),
            ("32 GiB", 32 << 30),
            ("2T", 2 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for wrong in ["", "G", "-1", "1.5G", "32GB", "32 G x", "99999999T", "32Gi"] {
            let said = parse_size(wrong).expect_err(wrong);
            assert!(
                said.contains(&format!("{wrong:?} is not a size")) && said.contains("32GiB"),
                "{said}"
            );
        }
        for less in ["0", "32", "4096", "1023K"] {
            let said = parse_size(less).expect_err(less);
            assert!(said.contains(&format!("{less:?} is ")), "{said}");
            assert!(said.contains("name the unit, such as 32GiB"), "{said}");
        }
    }

    #[test]
    fn packet_memory_is_whole_pages_between_its_limits() {
        for (text, bytes) in [
            ("512KiB", 512 << 10),
            ("1M", 1 << 20),
            ("6MiB", 6 << 20),
            ("528384", 516 << 10),
        ] {
            assert_eq!(parse_packet_memory(text), Ok(u64::from(bytes)), "{text}");
            assert_eq!(of_a_pair(Some(bytes.into())).expect("it fits"), bytes);
        }
        for wrong in ["0", "511KiB", "514KiB"] {
            let said = parse_packet_memory(wrong).expect_err(wrong);
            assert!(
                said.contains(wrong) && said.contains("from 512KiB to 6MiB"),
                "{said}"
            );
        }
        for wrong in [(6 << 20) + 4096, 4 << 30, 8 << 40] {
            let said = of_a_pair(Some(wrong)).expect_err("too much").to_string();
            assert!(
                said.contains(&wrong.to_string()) && said.contains("from 512KiB to 6MiB"),
                "{said}"
            );
        }
        assert!(
            parse_packet_memory("1.5M")
                .expect_err("no size")
                .contains("is not a size")
        );
    }

    #[test]
    fn default_is_the_machines_and_leaves_room_for_all_ports() {
        assert!(machine(1) > 0);
        assert!(machine(1 << 30) * (1 << 30) <= MOST_BYTES);
    }
}
