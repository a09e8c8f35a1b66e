//! Huge pages of the machine's for a test that needs some, beside others that do the same.
//!
//! The number of pages is one for the whole machine. So each adds what it needs to what it finds and takes away as much
//! in the end, under a lock; who went back to what it had found would take from the others.

use std::fs::File;

use rustix::fs::{FlockOperation, flock};

/// The number of pages; scripts/test takes its lock, too.
const NUMBER: &str = "/proc/sys/vm/nr_hugepages";

/// So many more pages, until dropped.
#[must_use]
pub struct HugePages(u64);

impl HugePages {
    /// So many more, or none at all if there are not as many.
    pub fn more(count: u64) -> Option<Self> {
        let _lock = lock()?;
        let found = number()?;
        set(found + count)?;
        if number()? < found + count {
            set(found)?;
            return None;
        }
        Some(Self(count))
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _lock = lock();
        let _ = number().and_then(|found| set(found.saturating_sub(self.0)));
    }
}

/// Held until it is closed.
fn lock() -> Option<File> {
    let file = File::open(NUMBER).ok()?;
    flock(&file, FlockOperation::LockExclusive).ok()?;
    Some(file)
}

fn number() -> Option<u64> {
    std::fs::read_to_string(NUMBER).ok()?.trim().parse().ok()
}

fn set(count: u64) -> Option<()> {
    std::fs::write(NUMBER, count.to_string()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::require;

    #[test]
    fn pages_of_one_test_stay_when_those_of_another_go() {
        require!(Root);
        // Others may add some meanwhile, and take only theirs away.
        let Some(first) = HugePages::more(2) else { return };
        let Some(second) = HugePages::more(3) else { return };
        drop(first);
        assert!(number().expect("a number") >= 3);
        drop(second);
    }
}
