//! The command line of `capture`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, value_parser};

pub(crate) const CAPTURE_EXAMPLES: &str = "\
Examples:
  Frames from and to the guest of port vm1, live:
    vhost-af-xdp capture vm1 --write - | tcpdump -n -r -
    vhost-af-xdp capture vm1 --write - | wireshark -k -i -
  The next hundred frames that it sends, or those of ten seconds, to a file:
    vhost-af-xdp capture vm1 --write vm1.pcapng --direction from-guest --count 100
    vhost-af-xdp capture vm1 --write vm1.pcapng --duration 10
  Denied frames:
    vhost-af-xdp capture vm1 --write - --duration 10 |
        tshark -r - -Y 'frame.comment contains \"denied\"'";

/// Direction of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CaptureDirection {
    /// Frames that the guest sends
    FromGuest,
    /// Frames that the guest receives
    ToGuest,
    /// Both directions
    Both,
}

/// Clock of a frame's timestamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CaptureClock {
    /// The host's, when a worker handled the frame; the NIC's receive time, if known, in a comment
    Host,
    /// The NIC's, when it received the frame; the host's where that is not known
    Nic,
}

#[derive(Debug, Args)]
pub(crate) struct CaptureArgs {
    /// Name of the port, or its socket if it has no name
    #[arg(value_name = "PORT")]
    pub(crate) port: String,
    /// Write pcapng to this file, for its owner only; -: standard output
    #[arg(short, long, value_name = "FILE")]
    pub(crate) write: PathBuf,
    /// Frames of this direction only
    #[arg(long, value_enum, default_value_t = CaptureDirection::Both)]
    pub(crate) direction: CaptureDirection,
    /// End after so many frames
    #[arg(long, value_name = "FRAMES", value_parser = value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// End after so many seconds [default: at Ctrl-C]
    #[arg(long, value_name = "SECONDS", value_parser = value_parser!(u64).range(1..))]
    pub(crate) duration: Option<u64>,
    /// Clock of the timestamps
    #[arg(long, value_enum, default_value_t = CaptureClock::Host)]
    pub(crate) clock: CaptureClock,
    /// Control socket of the daemon [default: that of the one that has the port]
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,
}
