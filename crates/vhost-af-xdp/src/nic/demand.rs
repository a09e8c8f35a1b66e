//! How much memory the sockets of this daemon lock: the limit has to be raised by that.
//!
//! The kernel counts the UMEM of each socket, and nothing else of it, against RLIMIT_MEMLOCK, for each user over all
//! processes (`xdp_umem_account_pages`, net/xdp/xdp_umem.c). A limit for one socket
//! does not help where more follow, so the limit that is named is enough for all.

use super::endpoint::COPY_BYTES;

/// What is locked when all guests are there.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Demand {
    /// Of all ports of the daemon, while they copy.
    pub(crate) copy_bytes: u64,
    /// Pairs of this port: guest memory is locked for each.
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

    /// A sufficient limit where `limit` was not: for all of the daemon, and if that is not more, for this UMEM in
    /// addition to the locked memory of other processes of the user, which is `limit` at most.
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
