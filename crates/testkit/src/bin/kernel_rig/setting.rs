//! Options of the daemon that the cases go through, and what they come to on a driver.

use std::time::Duration;

use testkit::daemon::{Mode, Placement};
use testkit::{DriverConfig, Serve, VethPair, kernel};
use vhost::vhost_user::message::VhostUserProtocolFeatures;

/// The guest's address: where [`testkit::frame`] sends all frames.
pub(crate) const GUEST: &str = "02:00:00:00:00:0b";

/// Longer than a case lasts.
pub(crate) const VERY_LONG: Duration = Duration::from_secs(3600);

/// How the daemon is asked to use its NIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    /// `--memory`.
    pub(crate) placement: Placement,
    /// `--mode`; none: auto.
    pub(crate) mode: Option<Mode>,
    /// `--force-copy`.
    pub(crate) force_copy: bool,
    /// Queues come from a steward of root's, and the daemon is nobody; else the daemon is started by root.
    pub(crate) leased: bool,
    /// `--mac`: frames to other stations are the host's.
    pub(crate) filtered: bool,
    /// `--sock-fds`: somebody else attached a program, and put a socket into its map.
    pub(crate) passed_in: bool,
    /// `--busy-poll-us`, by a worker that never sleeps.
    pub(crate) busy_poll: bool,
    /// The guest is one that a NIC may write to by itself: its VMM keeps an inflight region, and its buffers are as
    /// long as the NIC may write.
    pub(crate) into_guest: bool,
}

impl Setting {
    /// Copied by AF_XDP, in the best mode.
    pub(crate) const DEFAULT: Self = Self {
        placement: Placement::Copy,
        mode: None,
        force_copy: false,
        leased: true,
        filtered: true,
        passed_in: false,
        busy_poll: false,
        into_guest: false,
    };

    /// What nobody asks otherwise: copied, in the mode that is chosen.
    pub(crate) const AUTO: Self = Self {
        mode: Some(Mode::Auto),
        ..Self::DEFAULT
    };

    /// Sent from the guest's memory, received into the daemon's.
    pub(crate) const SEND_DIRECT: Self = Self {
        placement: Placement::SendDirect,
        ..Self::DEFAULT
    };

    /// Received into the guest's memory as well, from a queue that is the guest's alone.
    pub(crate) const WHOLE_QUEUE: Self = Self {
        placement: Placement::Direct,
        filtered: false,
        ..Self::DEFAULT
    };

    /// Received into the guest's memory by the NIC itself, where it has zero-copy: the queue is the guest's alone, and
    /// the steward the daemon's.
    pub(crate) const INTO_GUEST: Self = Self {
        placement: Placement::Direct,
        leased: false,
        filtered: false,
        into_guest: true,
        ..Self::DEFAULT
    };

    /// Leased, in each placement.
    pub(crate) fn leased() -> [Self; 3] {
        let direct = Self {
            placement: Placement::Direct,
            ..Self::DEFAULT
        };
        [Self::DEFAULT, Self::SEND_DIRECT, direct]
    }

    /// Those that most people have.
    pub(crate) fn few() -> Vec<Self> {
        let by_root = |placement| Self {
            placement,
            leased: false,
            ..Self::DEFAULT
        };
        let direct = [Placement::SendDirect, Placement::Direct].map(by_root);
        [Self::DEFAULT].into_iter().chain(direct).collect()
    }

    /// All that differ in what kernel and driver do.
    pub(crate) fn all() -> Vec<Self> {
        let copy = Self::DEFAULT;
        let mode = |mode| Self {
            mode: Some(mode),
            ..copy
        };
        let send_direct = |setting| Self {
            placement: Placement::SendDirect,
            ..setting
        };
        let direct = |setting| Self {
            placement: Placement::Direct,
            ..setting
        };
        let passed_in = |in_mode| Self {
            leased: false,
            filtered: false,
            passed_in: true,
            ..mode(in_mode)
        };
        vec![
            copy,
            Self {
                filtered: false,
                ..copy
            },
            Self {
                leased: false,
                ..copy
            },
            Self::AUTO,
            mode(Mode::Native),
            mode(Mode::Skb),
            Self {
                force_copy: true,
                ..copy
            },
            send_direct(copy),
            send_direct(mode(Mode::Skb)),
            Self {
                force_copy: true,
                ..send_direct(copy)
            },
            direct(copy),
            direct(mode(Mode::Skb)),
            Self::INTO_GUEST,
            passed_in(Mode::Native),
            passed_in(Mode::Skb),
        ]
    }

    /// The daemon's options.
    pub(crate) fn serve(self) -> Serve {
        let mut serve = Serve::interface(VethPair::NIC).placement(self.placement);
        if let Some(mode) = self.mode {
            serve = serve.mode(mode);
        }
        if self.force_copy {
            serve = serve.flag("--force-copy");
        }
        if self.filtered {
            serve = serve.with("--mac", GUEST);
        }
        if self.passed_in {
            serve = serve.flag("--inhibit");
        }
        if self.busy_poll {
            serve = serve
                .with("--busy-poll-us", "20")
                .with("--spin-us", VERY_LONG.as_micros().to_string());
        }
        if self.leased {
            // Interpreted, and beside other work, it takes many seconds to load and attach a program.
            serve.with("--steward-timeout", "60").leased()
        } else {
            serve.by_root()
        }
    }

    /// The mode that a driver of this kernel is to be used in, as `status` has it.
    pub(crate) fn expected(self, driver: &str) -> &'static str {
        match (self.mode, self.placement) {
            (Some(Mode::Skb), _) => "copy (skb)",
            // Older kernels do not say that a NIC has none.
            (Some(Mode::Auto), Placement::Copy)
                if !has_zero_copy(driver) && (driver == "veth" || kernel::version() >= (6, 3)) =>
            {
                "tap"
            }
            (_, Placement::Copy | Placement::SendDirect) if has_zero_copy(driver) && !self.force_copy => {
                "zero-copy"
            }
            (_, Placement::Direct) if has_zero_copy(driver) && self.into_guest => "zero-copy",
            _ => "copy (native)",
        }
    }

    /// How long receive buffers of the guest are, bytes: as the longest frame with its header, or what the NIC may
    /// write.
    pub(crate) fn buffer(self, driver: &str) -> u32 {
        let longest = match (self.into_guest, driver) {
            (true, "igb") => 2048,
            (true, "virtio_net" | "rig_nic") => 1536,
            _ => 1518,
        };
        longest + testkit::driver::HEADER as u32
    }

    /// The guest.
    pub(crate) fn guest(self) -> DriverConfig {
        let mut config = DriverConfig::default();
        if self.into_guest {
            config.protocol |= VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        }
        config
    }

    /// Whether the kernel polls the driver for the daemon's sockets: from 6.13 on for zero-copy only (`napi_enable`,
    /// net/core/dev.c; 6.14, `xsk_bind`, net/xdp/xsk.c).
    pub(crate) fn is_polled(self, driver: &str) -> bool {
        match self.expected(driver) {
            "zero-copy" => true,
            "copy (native)" => kernel::version() < (6, 13),
            _ => false,
        }
    }

    /// In words.
    pub(crate) fn name(self) -> String {
        let mut words = vec![format!("--memory {}", self.placement.name())];
        words.extend(self.mode.map(|mode| format!("--mode {}", mode.name())));
        words.extend(self.force_copy.then(|| "--force-copy".to_owned()));
        words.extend(self.filtered.then(|| "--mac".to_owned()));
        words.extend(self.passed_in.then(|| "--sock-fds".to_owned()));
        words.extend(
            self.into_guest
                .then(|| "of a guest that takes zero-copy".to_owned()),
        );
        words.extend(self.busy_poll.then(|| "--busy-poll-us".to_owned()));
        words.push(if self.leased { "leased" } else { "by root" }.to_owned());
        words.join(" ")
    }
}

/// Since which kernel drivers have zero-copy, of those that a virtual machine can have
/// (`drivers/net/ethernet/intel/igb/igb_xsk.c`, and
/// `virtnet_xsk_pool_enable` in `drivers/net/virtio_net.c`), and the rig's own.
const ZERO_COPY_SINCE: [(&str, (u32, u32)); 3] =
    [("igb", (6, 14)), ("virtio_net", (6, 14)), ("rig_nic", (7, 2))];

fn has_zero_copy(driver: &str) -> bool {
    let since = ZERO_COPY_SINCE.iter().find(|(name, _)| *name == driver);
    since.is_some_and(|&(_, since)| kernel::version() >= since)
}
