//! When something that a network lacks is tried again: less and less often, and at once when the uplink's lease
//! changed.

use std::time::{Duration, Instant};

/// Shortest pause between two attempts, and how often an interface is looked at of which nobody tells.
pub(super) const RETRY: Duration = Duration::from_secs(1);
/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Retry {
    /// Changes of the lease that were seen when it was tried last.
    seen: u32,
    /// Not tried again before; and the pause after that.
    next: Option<Instant>,
    pause: Duration,
}

impl Retry {
    /// Whether it is time to try: the lease has changed so often by now; what is whole is looked at again only when it
    /// changed.
    pub(super) fn is_due(&mut self, changes: u32, is_whole: bool, now: Instant) -> bool {
        if std::mem::replace(&mut self.seen, changes) != changes {
            self.hurry();
            return true;
        }
        !is_whole && self.next.is_none_or(|next| now >= next)
    }

    /// It is tried the next time, whenever that is.
    pub(super) fn hurry(&mut self) {
        (self.next, self.pause) = (None, Duration::ZERO);
    }

    /// Takes note of an attempt.
    pub(super) fn note(&mut self, is_whole: bool, now: Instant) {
        (self.next, self.pause) = if is_whole {
            (None, Duration::ZERO)
        } else {
            let pause = (self.pause * 2).clamp(RETRY, LONGEST_PAUSE);
            (Some(now + pause), pause)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lacking_is_tried_less_and_less_often() {
        let (mut retry, begun) = (Retry::default(), Instant::now());
        let mut tried = Vec::new();
        for second in 0..300 {
            let now = begun + Duration::from_secs(second);
            if retry.is_due(0, false, now) {
                retry.note(false, now);
                tried.push(second);
            }
        }
        assert_eq!(tried, [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]);
    }

    #[test]
    fn lease_that_changed_is_tried_at_once_and_then_often_again() {
        let (mut retry, now) = (Retry::default(), Instant::now());
        for _ in 0..5 {
            retry.note(false, now);
        }
        assert!(!retry.is_due(0, false, now + RETRY) && retry.is_due(1, false, now + RETRY));
        retry.note(false, now);
        assert!(retry.is_due(1, false, now + RETRY));
    }

    #[test]
    fn what_is_whole_is_looked_at_when_the_lease_changes() {
        let (mut retry, now) = (Retry::default(), Instant::now());
        retry.note(true, now);
        assert!(!retry.is_due(0, true, now + LONGEST_PAUSE));
        assert!(retry.is_due(1, true, now) && !retry.is_due(1, true, now));
        assert!(retry.is_due(1, false, now), "it is lost");
    }
}
