//! Header split: the NIC writes payload and headers to different buffers.
//!
//! # Theory of operation
//!
//! It is one setting of a NIC for all of its queues. Where the policy allows it, the steward switches it on for a lease,
//! and restores it a while after the NIC's last lease for zero-copy receive was taken back: while it is on, no XDP
//! program without fragments can be attached. Each change may restart all rings of the NIC, so a lessee that takes and
//! ends leases must not cause many. The earlier setting is saved first, an entry of the journal for each NIC, so that
//! the next steward restores it if this one dies. A setting that another program has changed meanwhile stays.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use host::links::Link;
use host::nic::rings::{self, ENABLED, Split};
use netlink_bindings::ethtool;
use netlink_socket2::NetlinkSocket;
use program::backoff::Backoff;
use serde::{Deserialize, Serialize};
use steer::with_sources;
use steward::server::file::may_crash;
use steward::server::{Entry, Journal};

use super::saved::QUIET_TRIES;

/// Names of the entries begin so.
const PREFIX: &str = "header-split-";
/// `ETHTOOL_MSG_RINGS_SET`, include/uapi/linux/ethtool_netlink_generated.h; see [`host::nic::rings`].
const RINGS_SET: u8 = 16;
/// `ETHTOOL_TCP_DATA_SPLIT_DISABLED`, include/uapi/linux/ethtool.h.
const DISABLED: u8 = 1;

/// The setting of NICs, by the interface's index.
pub(super) trait Rings {
    /// The setting; `None`: there is no such interface any more.
    fn read(&self, ifindex: u32) -> io::Result<Option<Split>>;
    /// Changes it. `now`: as it is.
    fn set(&mut self, ifindex: u32, now: Split, wanted: Split) -> io::Result<()>;
}

/// An error of the kernel.
pub(super) struct Kernel;

impl Rings for Kernel {
    fn read(&self, ifindex: u32) -> io::Result<Option<Split>> {
        match Link::find(ifindex) {
            Ok(None) => Ok(None),
            Ok(Some(_)) => Ok(Some(rings::of(ifindex)?.split)),
            Err(error) => Err(io::Error::other(with_sources(&error))),
        }
    }

    /// The NIC may restart its rings.
    fn set(&mut self, ifindex: u32, now: Split, wanted: Split) -> io::Result<()> {
        let bytes = |split| match split {
            Split::Off(bytes) | Split::Above(bytes) => bytes,
            Split::On | Split::Never => 0,
        };
        let mut socket = NetlinkSocket::new();
        let mut request = ethtool::Request::new().op_rings_set_do();
        request.header_mut().cmd = RINGS_SET;
        let rings = request.encode();
        let rings = rings.nested_header().push_dev_index(ifindex).end_nested();
        let rings = rings.push_tcp_data_split(match wanted {
            Split::Off(_) => DISABLED,
            _ => ENABLED,
        });
        // Not every driver has a threshold.
        match bytes(now) == bytes(wanted) {
            true => drop(rings),
            false => drop(rings.push_hds_thresh(bytes(wanted))),
        }
        let mut replies = socket.request(&request)?;
        replies.recv_ack().map_err(io::Error::from)
    }
}

/// The setting of a NIC before the first lease, as it is saved.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Saved {
    ifindex: u32,
    before: Split,
}

#[derive(Debug)]
struct Changed {
    before: Split,
    /// When it was first seen that no lease needs it any more.
    unused_since: Option<Instant>,
    tries: u32,
    retry: Backoff,
}

impl Changed {
    fn new(before: Split) -> Self {
        Self {
            before,
            unused_since: None,
            tries: 0,
            retry: Backoff::default(),
        }
    }
}

/// NICs that split headers because a steward has switched that on.
#[derive(Debug, Default)]
pub(super) struct Splits {
    journal: Journal,
    changed: BTreeMap<u32, Changed>,
}

impl Splits {
    /// With what a predecessor saved.
    pub(super) fn open(journal: &Journal) -> Self {
        let left = journal.contents::<Saved>(PREFIX).into_iter();
        let changed = left.map(|saved| (saved.ifindex, Changed::new(saved.before)));
        Self {
            changed: changed.collect(),
            journal: journal.clone(),
        }
    }

    /// Whether a previous steward left something.
    pub(super) fn are_left(journal: &Journal) -> bool {
        !journal.entries(PREFIX).is_empty()
    }

    /// Has a NIC split all headers. The setting until now is saved before.
    pub(super) fn switch_on(&mut self, rings: &mut impl Rings, ifindex: u32, now: Split) -> io::Result<()> {
        // It lingers from the end of this lease on.
        let known = self.changed.get_mut(&ifindex);
        let is_saved = known.map(|changed| changed.unused_since = None).is_some();
        if now == Split::On {
            return Ok(());
        }
        if !is_saved {
            self.entry(ifindex).write(&Saved { ifindex, before: now })?;
            self.changed.insert(ifindex, Changed::new(now));
        }
        may_crash("zcrx-split-saved");
        rings.set(ifindex, now, Split::On)
    }

    /// Restores the setting of the NICs that have not been in use for `linger`, as far as an attempt is due.
    pub(super) fn go_on(
        &mut self,
        rings: &mut impl Rings,
        is_used: impl Fn(u32) -> bool,
        now: Instant,
        linger: Duration,
    ) {
        let mut done = Vec::new();
        for (&ifindex, changed) in &mut self.changed {
            if is_used(ifindex) {
                changed.unused_since = None;
                continue;
            }
            let since = *changed.unused_since.get_or_insert(now);
            if now < since + linger || !changed.retry.is_due(now) {
                continue;
            }
            match restore(rings, ifindex, changed.before) {
                Ok(()) => done.push(ifindex),
                Err(error) => {
                    changed.tries = changed.tries.saturating_add(1);
                    changed.retry.failed(now);
                    if changed.tries == QUIET_TRIES {
                        tracing::warn!(ifindex, "the NIC splits headers yet (tcp-data-split): {error}");
                    }
                }
            }
        }
        done.into_iter().for_each(|ifindex| self.forget(ifindex));
    }

    /// Restores the setting of a NIC that no lease uses, without waiting: an XDP program is about to be attached.
    pub(super) fn restore_now(&mut self, rings: &mut impl Rings, ifindex: u32) {
        let known = self.changed.get(&ifindex);
        // Otherwise the kernel may refuse the program, and the restoration is tried again later.
        if known.is_some_and(|changed| restore(rings, ifindex, changed.before).is_ok()) {
            self.forget(ifindex);
        }
    }

    fn forget(&mut self, ifindex: u32) {
        self.changed.remove(&ifindex);
        let _ = self.entry(ifindex).remove();
    }

    /// When [`Self::go_on`] has something to do.
    pub(super) fn next_due(
        &self,
        is_used: impl Fn(u32) -> bool,
        now: Instant,
        linger: Duration,
    ) -> Option<Instant> {
        let unused = self.changed.iter().filter(|&(&ifindex, _)| !is_used(ifindex));
        let due = |changed: &Changed| {
            let lingers = changed.unused_since.map_or(now, |since| since + linger);
            changed.retry.due().map_or(lingers, |due| due.max(lingers))
        };
        unused.map(|(_, changed)| due(changed)).min()
    }

    /// Whether a setting is still to be restored.
    pub(super) fn is_unfinished(&self) -> bool {
        !self.changed.is_empty()
    }

    fn entry(&self, ifindex: u32) -> Entry {
        self.journal.entry(&format!("{PREFIX}{ifindex}"))
    }
}

/// Errors: the driver's. It refuses while memory is bound to a queue of the NIC.
fn restore(rings: &mut impl Rings, ifindex: u32, before: Split) -> io::Result<()> {
    match rings.read(ifindex)? {
        Some(Split::On) => rings.set(ifindex, Split::On, before),
        // The interface is gone, or another program has changed the setting.
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use program::backoff::RETRY;

    use super::*;

    const LINGER: Duration = Duration::from_secs(5);

    /// One NIC.
    struct Played {
        split: Option<Split>,
        /// Its driver refuses to change it.
        refuses: bool,
    }

    impl Rings for Played {
        fn read(&self, _: u32) -> io::Result<Option<Split>> {
            Ok(self.split)
        }

        fn set(&mut self, _: u32, now: Split, wanted: Split) -> io::Result<()> {
            assert_eq!(self.split, Some(now));
            if self.refuses {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            self.split = Some(wanted);
            Ok(())
        }
    }

    const NIC: u32 = 0x7fff_fff0;

    fn nic(split: Split) -> Played {
        Played {
            split: Some(split),
            refuses: false,
        }
    }

    #[test]
    fn setting_is_restored_when_the_last_lease_of_the_nic_is_over() {
        let dir = tempfile::tempdir().expect("a directory");
        for before in [Split::Off(0), Split::Off(256), Split::Above(512)] {
            let (mut nic, mut splits, now) = (
                nic(before),
                Splits::open(&Journal::open(dir.path())),
                Instant::now(),
            );
            splits.switch_on(&mut nic, NIC, before).expect("it can");
            // A second lease.
            splits.switch_on(&mut nic, NIC, Split::On).expect("it is on");
            splits.go_on(&mut nic, |_| true, now, LINGER);
            assert_eq!(splits.next_due(|_| true, now, LINGER), None);
            assert_eq!(splits.next_due(|_| false, now, LINGER), Some(now));
            // Another lease soon after the last one, during which there is nothing to do.
            splits.go_on(&mut nic, |_| false, now, LINGER);
            splits.switch_on(&mut nic, NIC, Split::On).expect("it is on");
            let over = now + LINGER * 2;
            splits.go_on(&mut nic, |_| false, over, LINGER);
            assert_eq!(splits.next_due(|_| false, over, LINGER), Some(over + LINGER));
            assert_eq!(nic.split, Some(Split::On));
            splits.go_on(&mut nic, |_| false, over + LINGER, LINGER);
            assert_eq!((nic.split, splits.is_unfinished()), (Some(before), false));
            assert!(!Splits::are_left(&Journal::open(dir.path())));
        }
    }

    #[test]
    fn setting_is_restored_at_once_for_an_xdp_program() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut nic, mut splits) = (nic(Split::Off(0)), Splits::open(&Journal::open(dir.path())));
        splits.switch_on(&mut nic, NIC, Split::Off(0)).expect("it can");
        splits.restore_now(&mut nic, NIC + 1);
        assert_eq!(nic.split, Some(Split::On), "it is another NIC's");
        nic.refuses = true;
        splits.restore_now(&mut nic, NIC);
        assert!(splits.is_unfinished() && Splits::are_left(&Journal::open(dir.path())));
        nic.refuses = false;
        splits.restore_now(&mut nic, NIC);
        assert_eq!((nic.split, splits.is_unfinished()), (Some(Split::Off(0)), false));
        assert!(!Splits::are_left(&Journal::open(dir.path())));
    }

    #[test]
    fn successor_restores_the_setting_and_one_that_was_on_before_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut nic = nic(Split::Above(64));
        let mut splits = Splits::open(&Journal::open(dir.path()));
        splits.switch_on(&mut nic, NIC, Split::Above(64)).expect("it can");
        drop(splits);
        assert!(Splits::are_left(&Journal::open(dir.path())));
        let mut next = Splits::open(&Journal::open(dir.path()));
        next.go_on(&mut nic, |_| false, Instant::now(), Duration::ZERO);
        assert_eq!((nic.split, next.is_unfinished()), (Some(Split::Above(64)), false));
        nic.split = Some(Split::On);
        next.switch_on(&mut nic, NIC, Split::On).expect("it is on");
        next.go_on(&mut nic, |_| false, Instant::now(), Duration::ZERO);
        assert_eq!(
            (nic.split, Splits::are_left(&Journal::open(dir.path()))),
            (Some(Split::On), false)
        );
    }

    #[test]
    fn driver_that_refuses_is_asked_again_and_a_setting_of_another_program_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let (mut nic, mut splits, now) = (
            nic(Split::Off(0)),
            Splits::open(&Journal::open(dir.path())),
            Instant::now(),
        );
        splits.switch_on(&mut nic, NIC, Split::Off(0)).expect("it can");
        nic.refuses = true;
        splits.go_on(&mut nic, |_| false, now, Duration::ZERO);
        assert_eq!(
            (nic.split, splits.next_due(|_| false, now, Duration::ZERO)),
            (Some(Split::On), Some(now + RETRY))
        );
        (nic.refuses, nic.split) = (false, Some(Split::Above(9)));
        splits.go_on(&mut nic, |_| false, now, Duration::ZERO);
        assert!(splits.is_unfinished(), "its pause is not over");
        splits.go_on(&mut nic, |_| false, now + RETRY, Duration::ZERO);
        assert_eq!(
            (nic.split, splits.is_unfinished()),
            (Some(Split::Above(9)), false)
        );
    }

    #[test]
    fn nothing_is_switched_on_without_a_journal() {
        let mut nic = nic(Split::Off(0));
        let refused = Splits::default().switch_on(&mut nic, NIC, Split::Off(0));
        assert!(refused.is_err() && nic.split == Some(Split::Off(0)));
    }
}
