//! What is known of drivers in zero-copy, as data: a line a driver, each with its source.
//!
//! `auto` follows it ([`crate::binding`]): it does not request zero-copy where a line says that it is bad or missing;
//! `--force-zero-copy` requests it anyway. For a driver without a line, the driver's own report counts. Pieces and
//! checksums are queried from the kernel (`xdp-zc-max-segs`, `xsk-features`), not taken from here: these columns are
//! for people. docs/hardware.md has the same lines, and a test compares them.

use std::fmt;
use std::sync::OnceLock;

use derive_more::Display;
use rustix::system::uname;

use self::Bind::{AddsQueues, NotRead, StopsCarrier, StopsQueue};
use self::ZeroCopy::{Bad, Good, Missing, Untried};

/// Whether zero-copy works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
pub enum ZeroCopy {
    /// Known good.
    #[display("good")]
    Good,
    /// The driver supports it; no thorough test is known. It is requested.
    #[display("not tried")]
    Untried,
    /// Known bad: not requested.
    #[display("bad")]
    Bad,
    /// The driver has none: not requested.
    #[display("none")]
    Missing,
}

/// What happens to the link when a socket is bound in zero-copy, and when it is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
pub enum Bind {
    /// That queue pair stops and starts; the carrier stays.
    #[display("stops the queue")]
    StopsQueue,
    /// The queue pair stops and starts, and the carrier of the whole interface goes down and up.
    #[display("stops the carrier")]
    StopsCarrier,
    /// Additional queues are opened; the carrier stays.
    #[display("adds queues")]
    AddsQueues,
    /// Unknown: the sources were not read for that.
    #[display("not read")]
    NotRead,
}

/// How far a NIC writes into the memory that it receives a frame into, in zero-copy mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display)]
pub enum Window {
    /// Up to the buffer size that the driver is given (the chunk without headroom, `xsk_pool_get_rx_frame_size`,
    /// include/net/xdp_sock_drv.h), rounded down to a multiple of this, whatever the frame's length.
    #[display("multiples of {_0}")]
    Multiples(u32),
    /// It is not known how far.
    #[display("not known")]
    NotKnown,
}

impl Window {
    /// The least buffer size for frames of so many bytes that the NIC does not write beyond; `None` if that is not
    /// known. Eight bytes more than such a frame, and a multiple of 128, is what virtio_net accepts (seen on
    /// Linux 7.2: a bind with less is refused).
    pub fn bytes(self, frame_limit: u32) -> Option<u32> {
        match self {
            Self::Multiples(of) => frame_limit.checked_add(8)?.checked_next_multiple_of(of.max(128)),
            Self::NotKnown => None,
        }
    }
}

/// Every kernel.
const ANY: (u32, u32) = (0, 0);

/// A line of the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Line {
    /// As `ethtool -i` names it.
    pub driver: &'static str,
    /// What people call it.
    pub devices: &'static str,
    /// First version of Linux that it holds for.
    pub from: (u32, u32),
    /// Whether zero-copy works.
    pub zero_copy: ZeroCopy,
    /// Most descriptors of a frame in zero-copy; 0: several, and how many was not read.
    pub pieces: u8,
    /// It completes checksums that TX metadata asks for, in zero-copy.
    pub checksums: bool,
    /// It takes n-tuple rules by destination address.
    pub by_address: &'static str,
    /// It has RSS contexts.
    pub contexts: bool,
    /// What a bind does to the link.
    pub bind: Bind,
    /// How far the NIC writes.
    pub window: Window,
    /// What is known, and by whom.
    pub why: &'static str,
}

/// Defaults of the lines below.
const READ: Line = Line {
    driver: "",
    devices: "",
    from: (6, 12),
    zero_copy: Untried,
    pieces: 1,
    checksums: false,
    by_address: "no",
    contexts: false,
    bind: NotRead,
    window: Window::NotKnown,
    why: "read in the sources of Linux 6.12 and 7.2",
};

/// Of several lines for a driver, the last one counts whose kernel is not newer than this machine's.
pub const TABLE: &[Line] = &[
    Line {
        driver: "ice",
        devices: "Intel E810",
        from: ANY,
        zero_copy: Bad,
        pieces: 8,
        by_address: "yes",
        bind: StopsCarrier,
        window: Window::Multiples(128),
        why: "frames from the wire corrupt the kernel's memory, as reported in May 2026; which kernels are fixed was \
              not found (github.com/firedancer-io/firedancer/pull/11245). Before 6.11 a bind or close under load may \
              be taken for a hung queue, and the NIC be reset and lost (github.com/intel/ethernet-linux-ice/issues/61)",
        ..READ
    },
    Line {
        driver: "i40e",
        devices: "Intel X710",
        from: (5, 19),
        zero_copy: Good,
        pieces: 8,
        bind: StopsQueue,
        window: Window::Multiples(128),
        why: "by Firedancer's tests (src/app/shared/fd_config_auto.c there); not tried here",
        ..READ
    },
    Line {
        driver: "ixgbe",
        devices: "Intel X520, X540",
        bind: StopsQueue,
        why: "read in the sources of Linux 6.12 and 7.2; one report of frames that left only after the socket was \
              closed, its cause not found (X540, Linux 6.18, github.com/xdp-project/xdp-tutorial/issues/471)",
        ..READ
    },
    Line {
        driver: "igc",
        devices: "Intel I225, I226",
        by_address: "yes",
        bind: StopsQueue,
        window: Window::Multiples(1024),
        ..READ
    },
    Line {
        driver: "igb",
        devices: "Intel I210, I350, 82576",
        from: (6, 14),
        zero_copy: Good,
        by_address: "from I350 on",
        bind: StopsQueue,
        window: Window::Multiples(1024),
        why: "tested byte-exact, Linux 7.2 under QEMU (scripts/kernels); no real NIC was tried",
        ..READ
    },
    Line {
        driver: "idpf",
        devices: "Intel IPU",
        from: (7, 2),
        pieces: 0,
        checksums: true,
        why: "read in the sources of Linux 7.2",
        ..READ
    },
    Line {
        driver: "mlx5_core",
        devices: "ConnectX-4 and later",
        from: (6, 1),
        zero_copy: Good,
        checksums: true,
        by_address: "yes",
        contexts: true,
        bind: AddsQueues,
        why: "by Firedancer's tests (src/app/shared/fd_config_auto.c there); not tried here",
        ..READ
    },
    Line {
        driver: "st_gmac",
        devices: "stmmac",
        ..READ
    },
    Line {
        driver: "gve",
        devices: "Google",
        ..READ
    },
    Line {
        driver: "fsl_dpaa2_eth",
        devices: "NXP dpaa2",
        by_address: "yes",
        ..READ
    },
    Line {
        driver: "nfp",
        devices: "Netronome NFD3",
        ..READ
    },
    Line {
        driver: "tsnep",
        devices: "Engleder TSN",
        ..READ
    },
    Line {
        driver: "rvu-nicpf",
        devices: "Marvell otx2",
        from: (7, 2),
        by_address: "yes",
        contexts: true,
        why: "read in the sources of Linux 7.2",
        ..READ
    },
    Line {
        driver: "icssg-prueth",
        devices: "TI icssg",
        from: (7, 2),
        why: "read in the sources of Linux 7.2",
        ..READ
    },
    Line {
        driver: "fec",
        devices: "NXP fec",
        from: (7, 2),
        why: "read in the sources of Linux 7.2",
        ..READ
    },
    Line {
        driver: "virtio_net",
        devices: "virtio",
        from: (6, 14),
        zero_copy: Good,
        bind: StopsQueue,
        window: Window::Multiples(128),
        why: "tested byte-exact, Linux 7.2 under QEMU with iommu_platform=on (scripts/kernels); refused without",
        ..READ
    },
    Line {
        driver: "rig_nic",
        devices: "the kernel rig's",
        from: (7, 2),
        zero_copy: Good,
        by_address: "yes",
        contexts: true,
        bind: StopsQueue,
        window: Window::Multiples(128),
        why: "no NIC, but a driver for tests (tests/nic), tested byte-exact, Linux 7.2 (scripts/kernels --wire nic)",
        ..READ
    },
    Line {
        driver: "ena",
        devices: "Amazon",
        from: ANY,
        zero_copy: Bad,
        why: "Linux's own has none; Amazon's module has it from 2.7.0 on: it was reset under load before 2.7.4 \
              (github.com/amzn/amzn-drivers/issues/221), and memory was corrupted under load with 2.13.1 \
              (github.com/amzn/amzn-drivers/issues/330)",
        ..READ
    },
    Line {
        driver: "veth",
        devices: "veth",
        from: ANY,
        zero_copy: Missing,
        why: "tested, Linux 6.1 to 7.2 (scripts/kernels)",
        ..READ
    },
];

/// The line for a driver on this machine's kernel.
pub fn line(driver: &str) -> Option<&'static Line> {
    line_for(driver, kernel()?)
}

fn line_for(driver: &str, kernel: (u32, u32)) -> Option<&'static Line> {
    let applies = |line: &&Line| line.driver == driver && line.from <= kernel;
    TABLE.iter().rfind(applies)
}

/// What status and `bench` report about a driver: its line, or that there is none.
pub fn said_of(driver: &str) -> String {
    match (line(driver), driver) {
        (Some(line), _) => line.to_string(),
        (None, "") => "the kernel does not name the driver".to_owned(),
        (None, driver) => format!("{driver}: no line in the table of drivers for this kernel"),
    }
}

/// Version of this kernel. It is first read before the sandbox is entered, which denies uname(2).
pub fn kernel() -> Option<(u32, u32)> {
    static KERNEL: OnceLock<Option<(u32, u32)>> = OnceLock::new();
    *KERNEL.get_or_init(ask_kernel)
}

fn ask_kernel() -> Option<(u32, u32)> {
    let uname = uname();
    let release = uname.release().to_str().ok()?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The message if busy polling is requested but [`is_polled`] is false.
pub const NOT_POLLED: &str =
    "no busy polling: the kernel does it for zero-copy sockets and, before Linux 6.13, in native mode";

/// Whether a kernel polls the driver for sockets of a mode. From 6.13 on a receive queue does not get its NAPI
/// ID (`napi_enable`, net/core/dev.c), and a socket gets it at its bind, in zero-copy only (6.14, `xsk_bind`,
/// net/xdp/xsk.c). In skb mode no driver is behind it.
#[must_use]
pub fn is_polled(mode: xsk::Mode, kernel: Option<(u32, u32)>) -> bool {
    match mode {
        xsk::Mode::ZeroCopy => true,
        xsk::Mode::NativeCopy => kernel.is_none_or(|version| version < (6, 13)),
        xsk::Mode::SkbCopy => false,
    }
}

impl fmt::Display for Line {
    /// In one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            driver, zero_copy, ..
        } = self;
        write!(f, "{driver}{}: zero-copy {zero_copy}", self.since())?;
        if *zero_copy != Missing {
            write!(f, ", pieces {}, checksums {}", self.most(), yes(self.checksums))?;
            let contexts = yes(self.contexts);
            write!(
                f,
                ", rules by address {}, RSS contexts {contexts}",
                self.by_address
            )?;
            write!(f, ", bind {}, window {}", self.bind, self.window)?;
        }
        write!(f, "; {}", self.why)
    }
}

impl Line {
    /// From which kernel on, if that matters.
    fn since(&self) -> String {
        match self.from {
            ANY => String::new(),
            (major, minor) => format!(" from Linux {major}.{minor} on"),
        }
    }

    fn most(&self) -> String {
        match self.pieces {
            0 => "several".to_owned(),
            pieces => pieces.to_string(),
        }
    }
}

fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = include_str!("../../../docs/hardware.md");

    /// Words between single blanks, as lines are broken elsewhere there.
    fn words(text: &str) -> String {
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn document_has_each_line_and_no_other() {
        let begin = "\n| driver | devices | from | zero-copy |";
        let begin = DOCUMENT.find(begin).expect("the table") + 1;
        let end = DOCUMENT[begin..].find("\n\n").expect("its end") + begin;
        let rows: Vec<_> = DOCUMENT[begin..end].lines().skip(2).map(words).collect();
        let lines = TABLE.iter().map(|line| {
            let from = match line.from {
                ANY => "any".to_owned(),
                (major, minor) => format!("{major}.{minor}"),
            };
            let Line {
                driver,
                devices,
                zero_copy,
                by_address,
                bind,
                window,
                ..
            } = line;
            let (most, checksums, contexts) = (line.most(), yes(line.checksums), yes(line.contexts));
            format!(
                "| {driver} | {devices} | {from} | {zero_copy} | {most} | {checksums} | {by_address} | {contexts} \
                 | {bind} | {window} |"
            )
        });
        assert_eq!(rows, lines.collect::<Vec<_>>());
        let document = words(DOCUMENT);
        let sources: Vec<_> = document
            .split("- **")
            .filter_map(|item| item.split_once("**: "))
            .collect();
        for Line { driver, why, .. } in TABLE {
            let tells = |(drivers, text): &(&str, &str)| {
                drivers.split(", ").any(|named| named == *driver) && text.starts_with(why)
            };
            assert!(
                sources.iter().any(tells),
                "docs/hardware.md lacks the source of {driver}: {why}"
            );
        }
    }

    #[test]
    fn window_holds_the_longest_frame_and_ends_where_the_driver_ends_it() {
        let bytes = |driver, mtu: u32| line_for(driver, (7, 2)).and_then(|line| line.window.bytes(mtu + 18));
        assert_eq!(bytes("virtio_net", 1500), Some(1536));
        assert_eq!(bytes("virtio_net", 1511), Some(1664));
        assert_eq!(bytes("igb", 1500), Some(2048));
        assert_eq!(bytes("igb", 68), Some(1024));
        assert_eq!(bytes("ixgbe", 1500), None);
        assert_eq!(Window::Multiples(128).bytes(u32::MAX), None);
    }

    #[test]
    fn lines_of_newer_kernels_do_not_apply() {
        assert!(line_for("igb", (6, 13)).is_none());
        for kernel in [(6, 14), (6, 18), (7, 2)] {
            assert_eq!(line_for("igb", kernel).map(|line| line.zero_copy), Some(Good));
        }
        assert_eq!(
            line_for("veth", (5, 18)).map(|line| line.zero_copy),
            Some(Missing)
        );
        assert!(line_for("no such driver", (7, 2)).is_none());
    }

    #[test]
    fn lines_say_what_applied_in_words() {
        let said = line_for("igb", (7, 2)).expect("a line").to_string();
        assert!(
            said.starts_with("igb from Linux 6.14 on: zero-copy good, pieces 1, checksums no, "),
            "{said}"
        );
        assert!(said_of("").contains("does not name"));
        assert!(said_of("other").contains("other: no line"));
        assert!(kernel().is_some());
    }

    #[test]
    fn copied_frames_are_polled_for_by_older_kernels_and_in_native_mode_only() {
        let [old, new] = [(6, 12), (6, 13)].map(Some);
        for (mode, polled) in [
            (xsk::Mode::ZeroCopy, [true, true]),
            (xsk::Mode::NativeCopy, [true, false]),
            (xsk::Mode::SkbCopy, [false, false]),
        ] {
            assert_eq!([old, new].map(|kernel| is_polled(mode, kernel)), polled, "{mode}");
        }
    }
}
