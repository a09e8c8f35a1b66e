//! The command line.

use clap::Parser;

use crate::machine::Notify;
use crate::mailbox::Work;

/// Where frames go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SinkChoice {
    /// They are counted.
    Null,
    /// They come back.
    Echo,
    /// To a network interface of that name.
    Xdp(String),
}

impl std::str::FromStr for SinkChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.split_once(':')) {
            ("null", _) => Ok(Self::Null),
            ("echo", _) => Ok(Self::Echo),
            (_, Some(("af-xdp", name))) if !name.is_empty() => Ok(Self::Xdp(name.to_owned())),
            _ => Err(format!(
                "{text} is no sink: null, echo, or af-xdp:IFACE such as af-xdp:veth0"
            )),
        }
    }
}

/// A VMM of one guest program that embeds the virtio-net device: runs one piece of work, and says what it cost
#[derive(Clone, Debug, Parser)]
#[command(after_help = "Examples:
  tiny-vmm --work notify --notify exit --frames 100000
  tiny-vmm --work send --notify eventfd --sink null --frames-per-kick 64
  tiny-vmm --work send --notify poll --sink af-xdp:veth0 --frames-per-kick 64 --vcpu-cpu 0 --worker-cpu 1 --json
  tiny-vmm --work round-trip --sink echo --frames 10000
  tiny-vmm --work control --pairs 4
  tiny-vmm --work interrupts --frames 10000 --json

Needs /dev/kvm; with af-xdp also CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF.")]
pub struct Options {
    /// How the guest's notifications reach who serves its queues
    #[arg(long, value_enum, default_value = "eventfd")]
    pub notify: Notify,
    /// Where frames go and come from: null, echo, af-xdp:IFACE
    #[arg(long, default_value = "null", value_name = "SINK")]
    pub sink: SinkChoice,
    /// What the guest does
    #[arg(long, value_enum, default_value = "send")]
    pub work: Work,
    /// How many frames, notifications, rounds or interrupts [default: 100000, of control 1000]
    #[arg(long, value_name = "N")]
    pub frames: Option<u64>,
    /// Frames that the guest puts into the ring for each kick
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub frames_per_kick: u32,
    /// Length of a frame, from its Ethernet header on
    #[arg(long, default_value_t = 64, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(22..=1514))]
    pub frame_bytes: u32,
    /// Queue pairs of the network device; the guest sends and receives on the first
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=8))]
    pub pairs: u16,
    /// Packed rings
    #[arg(long)]
    pub packed: bool,
    /// Notifications and interrupts by the index that the other side waits for: VIRTIO_F_EVENT_IDX
    #[arg(long)]
    pub event_idx: bool,
    /// Bind at most so many eventfds, as if the kernel had room for no more [default: what it has]
    #[arg(long, value_name = "N")]
    pub ioeventfds: Option<usize>,
    /// CPU of the vCPU's thread [default: any]
    #[arg(long, value_name = "CPU")]
    pub vcpu_cpu: Option<usize>,
    /// CPU of the worker and of the notifiers' thread [default: any]
    #[arg(long, value_name = "CPU")]
    pub worker_cpu: Option<usize>,
    /// After so long a guest that does not end is given up
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub time_limit: u64,
    /// Say the figures as one JSON object
    #[arg(long)]
    pub json: bool,
}

impl Options {
    /// How many frames, notifications, rounds or interrupts. A round of control is 20 commands and more.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames.unwrap_or(match self.work {
            Work::Control => 1_000,
            _ => 100_000,
        })
    }
}
