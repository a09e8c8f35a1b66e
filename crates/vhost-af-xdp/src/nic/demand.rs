//! How much memory the sockets of this daemon lock, and which RLIMIT_MEMLOCK is enough for it.
//!
//! The kernel counts the UMEM of each socket, and nothing else of it, for each user over all processes
//! (`xdp_umem_account_pages`, net/xdp/xdp_umem.c). A limit that is enough for one socket does not help if more follow,
//! so error messages name a limit that is enough for all.

use dataplane::nic::endpoint::COPY_BYTES;

/// Memory that is locked when all guests are connected.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Demand {
    /// Bytes that all ports of the daemon lock while they copy.
    pub(crate) copy_bytes: u64,
    /// Queue pairs of the present port: guest memory is locked for each.
    pub(crate) pairs: u32,
}

impl Demand {
    /// Bytes that this daemon locks in all, if one of its sockets has a UMEM of `umem_bytes`.
    pub(crate) fn in_all(self, umem_bytes: u64) -> u64 {
        let guest = match umem_bytes > u64::from(COPY_BYTES) {
            true => umem_bytes.saturating_mul(self.pairs.into()),
            false => 0,
        };
        self.copy_bytes.saturating_add(guest).max(umem_bytes)
    }

    /// A sufficient limit after `limit` was too low: what the daemon locks in all. If that is not more than `limit`,
    /// other processes of the user lock memory, too, at most `limit`: then this UMEM in addition to `limit`.
    pub(crate) fn target(self, umem_bytes: u64, limit: u64) -> u64 {
        let all = self.in_all(umem_bytes);
        match all > limit {
            true => all,
            false => limit.saturating_add(umem_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn limit_for_all_queues_is_named_and_not_for_one() {
        let two = Demand {
            copy_bytes: 12 * MIB,
            pairs: 2,
        };
        assert_eq!(two.target(6 * MIB, 8 * MIB), 12 * MIB);
        assert_eq!(two.target(6 * MIB, 12 * MIB), 18 * MIB, "others have the rest");
        assert_eq!(two.target(1024 * MIB, 64 * MIB), (2 * 1024 + 12) * MIB);
    }
}
