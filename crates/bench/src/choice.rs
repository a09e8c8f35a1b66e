//! What can be measured: benchmarks, and the paths that frames take between a driver and a program.

use clap::{Args, ValueEnum, value_parser};
use serde::Serialize;

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum What {
    /// Receive frames and drop them
    Rxdrop,
    /// Send frames
    Txonly,
    /// Receive frames and send them back with their MAC addresses swapped
    L2fwd,
    /// All three, in every mode of AF_XDP, over AF_PACKET, and by an XDP program alone: a table
    Matrix,
}

/// What to do with the frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Benchmark {
    /// Receive frames and drop them
    Rxdrop,
    /// Send frames
    Txonly,
    /// Receive frames and send them back with their MAC addresses swapped
    L2fwd,
}

impl Benchmark {
    pub(super) fn receives(self) -> bool {
        self != Self::Txonly
    }

    pub(super) fn sends(self) -> bool {
        self != Self::Rxdrop
    }
}

/// The path of frames between a driver and a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Path {
    /// AF_XDP, the NIC uses our memory
    ZeroCopy,
    /// AF_XDP, copied by the kernel at the driver's XDP hook
    NativeCopy,
    /// AF_XDP, copied by the kernel from and to socket buffers
    SkbCopy,
    /// AF_PACKET with mapped rings, version 3: blocks of frames
    PacketV3,
    /// AF_PACKET with mapped rings, version 2: one slot per frame
    PacketV2,
    /// An XDP program alone: XDP_DROP for rxdrop, XDP_TX for l2fwd
    Xdp,
}

impl Path {
    /// As in the table.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::ZeroCopy => "AF_XDP zero-copy",
            Self::NativeCopy => "AF_XDP copy (native)",
            Self::SkbCopy => "AF_XDP copy (skb)",
            Self::PacketV3 => "AF_PACKET TPACKET_V3",
            Self::PacketV2 => "AF_PACKET TPACKET_V2",
            Self::Xdp => "XDP program alone",
        }
    }
}

/// What only the matrix knows
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Options of matrix")]
pub(crate) struct MatrixArgs {
    /// Interface at the other end, of this network namespace: sends frames while a figure that receives is measured
    #[arg(long, value_name = "IFNAME")]
    pub(super) sender: Option<String>,
    /// These benchmarks only
    #[arg(long, value_enum, value_delimiter = ',')]
    benchmarks: Vec<Benchmark>,
    /// These paths only
    #[arg(long, value_enum, value_delimiter = ',')]
    paths: Vec<Path>,
    /// How often each figure is measured; the table has medians [default: 1]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1000))]
    pub(super) reps: Option<u32>,
}

impl MatrixArgs {
    /// Whether any of them was given.
    pub(super) fn is_used(&self) -> bool {
        self.sender.is_some() || !self.benchmarks.is_empty() || !self.paths.is_empty() || self.reps.is_some()
    }

    pub(super) fn benchmarks(&self) -> Vec<Benchmark> {
        chosen(&self.benchmarks)
    }

    pub(super) fn paths(&self) -> Vec<Path> {
        chosen(&self.paths)
    }
}

/// The named values, or all if none is named, in the order of their definition.
fn chosen<T: ValueEnum + PartialEq>(named: &[T]) -> Vec<T> {
    let all = T::value_variants().iter().cloned();
    all.filter(|value| named.is_empty() || named.contains(value))
        .collect()
}

/// As on the command line and in JSON.
pub(super) fn name_of(value: impl ValueEnum + Copy) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_json_are_those_of_the_command_line() {
        for &path in Path::value_variants() {
            assert_eq!(serde_json::json!(path), name_of(path));
        }
        for &benchmark in Benchmark::value_variants() {
            assert_eq!(serde_json::json!(benchmark), name_of(benchmark));
        }
    }
}
