//! What can be chosen to be measured: benchmarks, and the paths that frames take between a driver and a program.

use anyhow::ensure;
use clap::{Args, ValueEnum};

/// What is to be measured.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Benchmark {
    /// Receive frames and drop them
    Rxdrop,
    /// Send frames
    Txonly,
    /// Receive frames and send them back with their MAC addresses swapped
    L2fwd,
}

impl Benchmark {
    pub(super) const ALL: [Self; 3] = [Self::Rxdrop, Self::Txonly, Self::L2fwd];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rxdrop => "rxdrop",
            Self::Txonly => "txonly",
            Self::L2fwd => "l2fwd",
        }
    }

    pub(super) fn receives(self) -> bool {
        self != Self::Txonly
    }

    pub(super) fn sends(self) -> bool {
        self != Self::Rxdrop
    }
}

/// Which way frames go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Path {
    /// AF_XDP, the NIC uses our memory
    ZeroCopy,
    /// AF_XDP, copied by the kernel at the driver's XDP hook
    NativeCopy,
    /// AF_XDP, copied by the kernel from and to socket buffers
    SkbCopy,
    /// AF_PACKET with mapped rings, version 3: blocks of frames
    PacketV3,
    /// AF_PACKET with mapped rings, version 2: a slot a frame
    PacketV2,
    /// An XDP program alone: XDP_DROP for rxdrop, XDP_TX for l2fwd
    Xdp,
}

impl Path {
    pub(super) const ALL: [Self; 6] = [
        Self::ZeroCopy,
        Self::NativeCopy,
        Self::SkbCopy,
        Self::PacketV3,
        Self::PacketV2,
        Self::Xdp,
    ];

    /// As on the command line and in JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ZeroCopy => "zero-copy",
            Self::NativeCopy => "native-copy",
            Self::SkbCopy => "skb-copy",
            Self::PacketV3 => "packet-v3",
            Self::PacketV2 => "packet-v2",
            Self::Xdp => "xdp",
        }
    }

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
    #[arg(long, value_name = "N")]
    pub(super) reps: Option<u32>,
}

impl MatrixArgs {
    /// Errors: one of these options was used with another benchmark.
    pub(super) fn check_unused(&self) -> anyhow::Result<()> {
        let unused = self.sender.is_none()
            && self.benchmarks.is_empty()
            && self.paths.is_empty()
            && self.reps.is_none();
        ensure!(
            unused,
            "--sender, --benchmarks, --paths and --reps are for matrix: see `vhost-af-xdp-bench --help`"
        );
        Ok(())
    }

    pub(super) fn benchmarks(&self) -> Vec<Benchmark> {
        let chosen =
            |benchmark: &Benchmark| self.benchmarks.is_empty() || self.benchmarks.contains(benchmark);
        Benchmark::ALL.into_iter().filter(chosen).collect()
    }

    pub(super) fn paths(&self) -> Vec<Path> {
        let chosen = |path: &Path| self.paths.is_empty() || self.paths.contains(path);
        Path::ALL.into_iter().filter(chosen).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        for path in Path::ALL {
            let value = path.to_possible_value().expect("none is hidden");
            assert_eq!(value.get_name(), path.name());
        }
    }
}
