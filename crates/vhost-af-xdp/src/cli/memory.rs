//! Options about the memory that a VMM may share.

use anyhow::anyhow;
use clap::{Args, ValueEnum};

use crate::control::memory::{FileKinds, MOST_BYTES, MemoryRules};

/// As a port has them.
#[derive(Debug, Clone, Args)]
pub(crate) struct MemoryArgs {
    /// Most memory that a guest may have, for instance 32G [default: what the machine has, with swap]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    max_memory: Option<u64>,
    /// Files that are accepted as memory of a VMM's. `any` lets a VMM whose file system does not answer (FUSE, NFS)
    /// hang the worker, and with it every guest on that
    #[arg(long, value_enum, default_value = "shared")]
    memory_files: FileKinds,
}

impl MemoryArgs {
    /// Their names as keys of `--port`.
    pub(super) const KEYS: &str = "max-memory, memory-files";

    /// Takes one key of `--port`; false if it is none of these.
    ///
    /// # Errors
    /// A value that cannot be.
    pub(super) fn apply(&mut self, key: &str, value: &str) -> anyhow::Result<bool> {
        match key {
            "max-memory" => {
                self.max_memory = Some(parse_size(value).map_err(|error| anyhow!("{key}={error}"))?);
            }
            "memory-files" => {
                self.memory_files =
                    FileKinds::from_str(value, false).map_err(|_| anyhow!("{key}={value}: shared or any"))?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

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
    let info = rustix::system::sysinfo();
    #[allow(clippy::unnecessary_cast, clippy::useless_conversion)] // other types on other machines
    let (ram, swap) = (u64::from(info.totalram), u64::from(info.totalswap));
    let bytes = ram.saturating_add(swap).saturating_mul(info.mem_unit.into());
    bytes.min(MOST_BYTES / ports.max(1) as u64)
}

fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size: bytes, or a number with K, M, G or T such as 32G");
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        Some((at, 'T' | 't')) => (&text[..at], 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number
        .checked_mul(1 << shift)
        .filter(|bytes| *bytes > 0)
        .ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(parse_size("4096"), Ok(4096));
        assert_eq!(parse_size("32G"), Ok(32 << 30));
        assert_eq!(parse_size("2T"), Ok(2 << 40));
        for wrong in ["", "G", "0", "-1", "1.5G", "32GiB", "99999999T"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn default_is_the_machines_and_leaves_room_for_all_ports() {
        assert!(machine(1) > 0);
        assert!(machine(1 << 30) * (1 << 30) <= MOST_BYTES);
    }
}
