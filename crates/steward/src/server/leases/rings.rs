//! Rings of networks, which are kept for the users that had them.
//!
//! A lessee can keep a ring, 256 KiB of the kernel's memory, as long as it likes, and the kernel counts that memory
//! for the steward only. So a user gets the same ring again whenever it leases the same queue: there are at most as
//! many rings as users times queues. For groups of users with many numbers, a rate limits new rings.
//!
//! At the next lease of a user the unread frames of the last lease are removed. Another process of that user that
//! kept the ring can read its frames, and take them from the lessee: processes of one user are not separated here.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use steer::{MulticastReader, MulticastRing};

use program::rate::{Buckets, Rate};
use steward_protocol::{Reason, Refusal};

/// New rings under a rule of the policy: 64 MiB, and 2 GiB a day.
const NEW: Rate = Rate {
    burst: 256,
    each: Duration::from_secs(10),
};

/// Maximum number of rings kept, two descriptors each; above it, a new ring replaces another user's.
const KEPT: usize = 256;

/// Owner of a ring: name of the interface, user, and first queue.
pub(crate) type RingOf = (String, u32, u32);

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Rings {
    kept: BTreeMap<RingOf, Kept>,
    new: Buckets<usize>,
}

#[derive(Debug)]
struct Kept {
    ring: MulticastRing,
    /// While it is mapped for writing nobody can freeze it (BPF_MAP_FREEZE), after which no process could map it so.
    reader: MulticastReader,
}

impl Rings {
    pub(crate) fn new() -> Self {
        Self {
            kept: BTreeMap::new(),
            new: Buckets::new(NEW),
        }
    }

    /// The ring for a new lease under a rule. `is_used`: the one that it would have again is somebody's.
    /// Errors: the kernel has none, or there were too many.
    pub(crate) fn take(&mut self, of: &RingOf, is_used: bool, rule: usize) -> Result<MulticastRing, Refusal> {
        let refused = |error: io::Error| Reason::Kernel.because(format!("no ring for a network: {error}"));
        if let Some(kept) = self.kept.get_mut(of).filter(|_| !is_used) {
            kept.reader.skip();
            return kept.ring.try_clone().map_err(refused);
        }
        let now = Instant::now();
        if let Some(wait) = self.new.wait(&rule, 1, now) {
            return Reason::Limit.refuse(format!(
                "rule {} has had too many networks of different users: try again in {} s",
                rule + 1,
                wait.as_secs() + 1
            ));
        }
        let ring = MulticastRing::new().map_err(refused)?;
        self.new.take(&rule, 1, now);
        self.keep(of.clone(), &ring).map_err(refused)?;
        Ok(ring)
    }

    /// Stores a ring that a previous steward made.
    /// Errors: the kernel's.
    pub(crate) fn keep(&mut self, of: RingOf, ring: &MulticastRing) -> io::Result<()> {
        let ring = ring.try_clone()?;
        let reader = MulticastReader::new(ring.as_fd().try_clone_to_owned()?)?;
        if self.kept.len() >= KEPT {
            self.kept.pop_first();
        }
        self.kept.insert(of, Kept { ring, reader });
        Ok(())
    }
}
