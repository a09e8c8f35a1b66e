//! Reasons why a queue cannot be leased for zero-copy receive, with remedies.

use std::io;

use rustix::io::Errno;

use super::apart::NotApart;
use super::split::{Kernel, Splits};
use host::links::Link;
use host::nic::rings::{self, Split};
use program::capabilities::are_at_hand;
use steward::capabilities::TO_TAKE_RINGS;
use steward::server::part::QueueKey;
use steward_protocol::{Reason, Refusal, Step};

const TAKES_NO_RING: &str = "the steward may not take a ring from its process: restart it with a policy that has \
                             `zcrx`, and with CAP_SYS_PTRACE (docs/zcrx.md)";
const OWNER_ENDED: &str = "the process that connected to the steward, which has the rings, has ended: connect from the \
                           one that has them";
const PAGES_MISSING: &str = "the memory has pages that do not exist, or ends before the area does: make its file as \
                             long as the area, write to each page, and leave it so";

/// Whether a ring could be taken later: a steward whose policy had no `zcrx` when it started has given that up.
pub(super) fn check_takes_rings() -> Result<(), Refusal> {
    match are_at_hand(TO_TAKE_RINGS) {
        true => Ok(()),
        false => Reason::Kernel.refuse(TAKES_NO_RING),
    }
}

/// Why the process that a ring is to be taken from is not known.
pub(super) fn no_owner(error: &io::Error) -> Refusal {
    match Errno::from_io_error(error) {
        Some(Errno::NOPROTOOPT) => Reason::Kernel.because(format!(
            "the kernel does not report the process of the connection (Linux 6.5 does): {error}"
        )),
        _ => Reason::Lease.because(format!("{OWNER_ENDED}: {error}")),
    }
}

/// Checks that the NIC splits header and data, or can be set up so, if the lease may have that done. Returns how it does
/// now, for [`switch_split_on`].
pub(super) fn check_split(link: &Link, may_set_up: bool) -> Result<Split, Refusal> {
    let name = &link.name;
    let refused = |text: String| Reason::Nic.refuse(text);
    let now = match rings::of(link.index) {
        Ok(rings) => rings.split,
        Err(error) => {
            return refused(format!(
                "{name} does not report whether it splits headers from data: {error}"
            ));
        }
    };
    let remedy = format!(
        "`ethtool -G {name} tcp-data-split on hds-thresh 0`, or let the steward do so by `zcrx-setup = true` in a rule"
    );
    match now {
        Split::Never => {
            let driver = &link.driver;
            refused(format!(
                "the driver of {name} ({driver}) does not split header and data (tcp-data-split), without which there \
                 is no zero-copy receive: receive by copy, or use a NIC that has it (bnxt, fbnic, gve, mlx5)"
            ))
        }
        Split::Off(_) if !may_set_up => refused(format!(
            "{name} does not split header and data (tcp-data-split is off): {remedy}"
        )),
        Split::Above(bytes) if !may_set_up => refused(format!(
            "{name} splits frames of more than {bytes} bytes only (hds-thresh): {remedy}"
        )),
        Split::On | Split::Off(_) | Split::Above(_) => Ok(now),
    }
}

/// Has the NIC split header and data. XDP programs without fragments cannot be attached then: it is done when all else
/// is checked.
pub(super) fn switch_split_on(splits: &mut Splits, link: &Link, now: Split) -> Result<(), Refusal> {
    splits.switch_on(&mut Kernel, link.index, now).or_else(|error| {
        Reason::Nic.refuse(format!(
            "{} refuses to split header and data (tcp-data-split), or that cannot be saved: {error}",
            link.name
        ))
    })
}

/// Why a queue was not registered, by what the kernel says (`io_register_zcrx`, io_uring/zcrx.c; `netif_mp_open_rxq`,
/// net/core/netdev_rx_queue.c).
pub(super) fn failed(name: &str, key: Option<QueueKey>, step: Step, errno: u32) -> Refusal {
    let errno = Errno::from_raw_os_error(errno.cast_signed());
    let of = key.map_or_else(
        || format!("{name} (no queue)"),
        |key| format!("queue {} of {name}", key.1),
    );
    let refused = |reason: Reason, why: &str| reason.because(format!("{of}: {why}: {errno}"));
    let other = "or lease another queue";
    let (reason, why) = match (step, errno) {
        (Step::Ring, Errno::EXIST) => (
            Reason::Lease,
            "the ring is in use already: make it with IORING_SETUP_R_DISABLED, and enable it when it is registered",
        ),
        (Step::Ring, Errno::PERM) => (Reason::Kernel, TAKES_NO_RING),
        (Step::Ring, Errno::BADF | Errno::OPNOTSUPP) => (
            Reason::Lease,
            "the descriptor is no ring of io_uring in the process that connected to the steward: make the ring there",
        ),
        (Step::Ring, Errno::SRCH) => (Reason::Lease, OWNER_ENDED),
        (Step::Ring, Errno::ACCESS) => (
            Reason::Lease,
            "the process that connected to the steward runs for another user or group by now (a setuid program?): \
             connect as the one that it runs for, from then on",
        ),
        (Step::Map, Errno::ACCESS | Errno::PERM) => (
            Reason::Lease,
            "the memory's file cannot be written to: open it for writing, and seal it against nothing but a change of \
             its length",
        ),
        (Step::Map, Errno::NODATA) | (Step::Queue, Errno::FAULT) => (Reason::Lease, PAGES_MISSING),
        (Step::Map, Errno::BADMSG) => (
            Reason::Lease,
            "the request came with no file of memory, or several: send one",
        ),
        (Step::Queue, Errno::OPNOTSUPP) => (
            Reason::Nic,
            "the driver has no queues for zero-copy receive (bnxt, fbnic, gve, mlx5 have), or not with such buffers",
        ),
        (Step::Queue, Errno::INVAL) if key.is_none() => (
            Reason::Kernel,
            "without a device that takes Linux 7.1, and a ring with SINGLE_ISSUER, DEFER_TASKRUN and CQE32",
        ),
        (Step::Queue, Errno::INVAL) => (
            Reason::Kernel,
            "that takes Linux 6.15, a ring with SINGLE_ISSUER, DEFER_TASKRUN and CQE32, and tcp-data-split on",
        ),
        (Step::Queue, Errno::EXIST) => {
            let text = format!(
                "an XDP program is on the interface, or memory on the queue: take the program off (`ip link set dev \
                 {name} xdp off`), end its process (`vhost-af-xdp queues {name}`), {other}"
            );
            return refused(Reason::Taken, &text);
        }
        (Step::Queue, Errno::BUSY) => {
            let text = format!(
                "an AF_XDP socket or a virtual interface has the queue: end its process (`vhost-af-xdp queues \
                 {name}`), {other}"
            );
            return refused(Reason::Taken, &text);
        }
        (Step::Queue, Errno::RANGE | Errno::NODEV) => {
            (Reason::NoInterface, "there is no such queue any more")
        }
        (Step::Queue, Errno::NOMEM) => (
            Reason::Memlock,
            "the ring's maker may not lock so much memory: raise its RLIMIT_MEMLOCK (LimitMEMLOCK)",
        ),
        _ => (Reason::Kernel, step.what()),
    };
    refused(reason, why)
}

/// Why an interface's queue is not had apart.
pub(super) fn not_apart(link: &Link, error: &NotApart) -> Refusal {
    let text = error.to_string().replace("NAME", &link.name);
    Reason::Nic.because(format!("{}: {text}", link.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taken_queue_is_rejected_with_the_remedy() {
        for (errno, remedy) in [
            (
                Errno::EXIST,
                "`ip link set dev eth1 xdp off`), end its process (`vhost-af-xdp queues eth1`)",
            ),
            (
                Errno::BUSY,
                "end its process (`vhost-af-xdp queues eth1`), or lease another queue",
            ),
        ] {
            let errno = errno.raw_os_error().cast_unsigned();
            let refusal = failed("eth1", Some((7, 3)), Step::Queue, errno);
            assert_eq!(refusal.reason, Reason::Taken);
            assert!(
                refusal.text.starts_with("queue 3 of eth1: ") && refusal.text.contains(remedy),
                "{refusal}"
            );
        }
    }
}
