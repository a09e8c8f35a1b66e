//! The command line.

use std::fmt;

use clap::{Parser, ValueEnum};

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

impl fmt::Display for SinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Echo => f.write_str("echo"),
            Self::Xdp(name) => write!(f, "af-xdp:{name}"),
        }
    }
}

/// A value as the command line and JSON have it.
pub(crate) fn name(value: &impl ValueEnum) -> String {
    let named = value.to_possible_value();
    named.map_or_else(String::new, |named| named.get_name().to_owned())
}

/// Why options do not go together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// The guest would wait for what never comes.
    #[error("--work {} with --sink {sink}: it needs frames {need}", name(.work))]
    NoFrames {
        /// What the guest was to do.
        work: Work,
        /// Where it was to have frames from.
        sink: SinkChoice,
        /// Frames of which kind, and who has them.
        need: &'static str,
    },
    /// It would be ignored.
    #[error("--work {} has no use for {option}: leave it out", name(.work))]
    Unused {
        /// What the guest was to do.
        work: Work,
        /// The option.
        option: &'static str,
    },
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
    /// Where frames go and come from: null (counts them; makes those that --work receive and echo want), echo (gives
    /// them back), af-xdp:IFACE (attaches an XDP program that takes all frames of IFACE's first queue away from the
    /// host: use one end of a veth pair, or an interface to spare)
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
    /// CPU of the vCPU's thread; --work interrupts ignores it [default: any]
    #[arg(long, value_name = "CPU")]
    pub vcpu_cpu: Option<usize>,
    /// CPU of the worker and of the notifiers' thread; --work interrupts ignores it [default: any]
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
    /// Whether the work can be done so, and each option has a part in it.
    ///
    /// CPUs are left out: scripts/bench says them for all works.
    ///
    /// # Errors
    /// [`OptionsError`].
    pub fn check(&self) -> Result<(), OptionsError> {
        let work = self.work;
        let need = match (work, &self.sink) {
            (Work::RoundTrip, SinkChoice::Null) => "that come back: --sink echo or --sink af-xdp:IFACE",
            (Work::Receive | Work::Echo, SinkChoice::Echo) => {
                "that it did not send: --sink null, which makes them, or --sink af-xdp:IFACE"
            }
            _ => return self.check_used(),
        };
        Err(OptionsError::NoFrames {
            work,
            sink: self.sink.clone(),
            need,
        })
    }

    fn check_used(&self) -> Result<(), OptionsError> {
        let work = self.work;
        let has_devices = work != Work::Interrupts;
        let has_net = has_devices && work != Work::Entropy;
        let has_frames = has_net && work != Work::Notify;
        let is_long = has_frames && work != Work::Control;
        let is_batched = is_long && work != Work::RoundTrip;
        let plain = Self::parse_from(["tiny-vmm"]);
        let options = [
            ("--notify", has_devices, self.notify != plain.notify),
            ("--packed", has_devices, self.packed),
            ("--ioeventfds", has_devices, self.ioeventfds.is_some()),
            ("--pairs", has_net, self.pairs != plain.pairs),
            ("--event-idx", has_net, self.event_idx),
            ("--sink", has_frames, self.sink != plain.sink),
            ("--frame-bytes", is_long, self.frame_bytes != plain.frame_bytes),
            (
                "--frames-per-kick",
                is_batched,
                self.frames_per_kick != plain.frames_per_kick,
            ),
        ];
        match options
            .into_iter()
            .find(|&(_, is_used, is_set)| is_set && !is_used)
        {
            Some((option, ..)) => Err(OptionsError::Unused { work, option }),
            None => Ok(()),
        }
    }

    /// How many frames, notifications, rounds or interrupts. A round of control is 20 commands and more.
    #[must_use]
    pub fn frames(&self) -> u64 {
        self.frames.unwrap_or(match self.work {
            Work::Control => 1_000,
            _ => 100_000,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupts::InterruptBy;

    fn check(words: &str) -> Result<(), String> {
        let options = Options::try_parse_from(["tiny-vmm"].into_iter().chain(words.split_whitespace()));
        let options = options.unwrap_or_else(|error| panic!("{words}: {error}"));
        options.check().map_err(|error| error.to_string())
    }

    #[test]
    fn work_whose_frames_never_come_is_refused() {
        assert_eq!(
            check("--work round-trip").unwrap_err(),
            "--work round-trip with --sink null: it needs frames that come back: --sink echo or --sink af-xdp:IFACE"
        );
        for work in ["receive", "echo"] {
            let refused = check(&format!("--work {work} --sink echo")).unwrap_err();
            assert!(
                refused.starts_with(&format!("--work {work} with --sink echo: ")),
                "{refused}"
            );
            assert!(refused.contains("--sink null"), "{refused}");
        }
        for words in [
            "--work round-trip --sink echo",
            "--work round-trip --sink af-xdp:veth0",
            "--work receive",
            "--work echo --sink af-xdp:veth0",
            "--work send --sink echo",
            "--work kick",
        ] {
            assert_eq!(check(words), Ok(()), "{words}");
        }
    }

    #[test]
    fn option_that_would_be_ignored_is_refused() {
        for (work, option, value) in [
            ("interrupts", "--sink", "af-xdp:veth0"),
            ("interrupts", "--notify", "poll"),
            ("interrupts", "--packed", ""),
            ("interrupts", "--ioeventfds", "1"),
            ("entropy", "--pairs", "2"),
            ("entropy", "--event-idx", ""),
            ("notify", "--sink", "echo"),
            ("control", "--frame-bytes", "100"),
            ("round-trip --sink echo", "--frames-per-kick", "8"),
        ] {
            let refused = check(&format!("--work {work} {option} {value}")).unwrap_err();
            assert!(
                refused.contains(&format!("has no use for {option}:")),
                "{work}: {refused}"
            );
            assert_eq!(check(&format!("--work {work}")), Ok(()));
        }
        for words in [
            // What scripts/bench says.
            "--work interrupts --notify eventfd --vcpu-cpu 0 --worker-cpu 1",
            "--work control --pairs 4 --packed --event-idx --sink echo",
            "--work entropy --packed --notify exit --ioeventfds 0",
            "--work echo --frame-bytes 1514 --frames-per-kick 64",
        ] {
            assert_eq!(check(words), Ok(()), "{words}");
        }
    }

    #[test]
    fn values_have_one_name_in_options_reports_and_json() {
        fn agree<T: ValueEnum + serde::Serialize>() {
            for value in T::value_variants() {
                assert_eq!(serde_json::json!(value), name(value));
            }
        }
        agree::<Work>();
        agree::<Notify>();
        agree::<InterruptBy>();
        for sink in ["null", "echo", "af-xdp:veth0"] {
            let parsed: SinkChoice = sink.parse().expect("a sink");
            assert_eq!(parsed.to_string(), sink);
        }
    }
}
