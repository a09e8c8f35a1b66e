//! Pauses between attempts: each pause is twice as long as the one before, up to a bound. A change of the state that an
//! attempt depends on makes it due at once.
//!
//! An attempt may itself change what it depends on: it makes a device and removes it, or resets a NIC's rings. Then
//! attempts would follow each other without end. So changes bring an attempt forward [`HURRIES`] times
//! in [`WINDOW`] at most; after that its pause counts. Together with pauses of one second, two, and so on there are
//! at most ten attempts in ten seconds, whatever their cause is.

use std::time::{Duration, Instant};

/// First pause after a failed attempt, and the longest one to which it doubles, by default.
pub const RETRY: Duration = Duration::from_secs(1);
/// See [`RETRY`].
pub const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// Most attempts that changes bring forward in each [`WINDOW`].
const HURRIES: u32 = 3;
/// See [`HURRIES`].
const WINDOW: Duration = Duration::from_secs(10);

/// Pauses between attempts at one thing.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    /// The last one; zero: nothing failed.
    pause: Duration,
    /// No attempt is made before this time; none: the next one is due at once.
    next: Option<Instant>,
    /// When changes began to bring attempts forward, and how often they did since.
    hurried: Option<(Instant, u32)>,
}

impl Backoff {
    /// The first and the longest pause.
    #[must_use]
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            pause: Duration::ZERO,
            next: None,
            hurried: None,
        }
    }

    /// Whether it is time for an attempt.
    #[must_use]
    pub fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| next <= now)
    }

    /// When the next attempt is due; none: at once.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.next
    }

    /// An attempt failed; the pause that follows. One that comes long after the last pause is the first again.
    pub fn failed(&mut self, now: Instant) -> Duration {
        if self.next.is_some_and(|next| now > next + self.longest) {
            self.pause = Duration::ZERO;
        }
        self.pause = self.pause.saturating_mul(2).clamp(self.first, self.longest);
        self.next = Some(now + self.pause);
        self.pause
    }

    /// The same, with no pause beyond `end`; none: it has come, and there is no further attempt.
    pub fn failed_before(&mut self, end: Instant, now: Instant) -> Option<Duration> {
        (now < end).then(|| self.failed(now).min(end - now))
    }

    /// Forgets what failed: the next attempt is due at once.
    pub fn reset(&mut self) {
        (self.pause, self.next) = (Duration::ZERO, None);
    }

    /// An attempt succeeded: pauses begin with the first one again, and no attempt is due before it is over.
    pub fn succeeded(&mut self, now: Instant) {
        (self.pause, self.next) = (Duration::ZERO, Some(now + self.first));
    }

    /// Something that the attempt depends on has changed: it is due now, if that was not so too often.
    pub fn hurry(&mut self, now: Instant) {
        let (began, times) = self
            .hurried
            .filter(|&(began, _)| now < began + WINDOW)
            .unwrap_or((now, 0));
        if times < HURRIES {
            self.hurried = Some((began, times + 1));
            self.reset();
        }
    }
}

impl Default for Backoff {
    /// For attempts that need a privilege, or that a privileged process makes for this one.
    fn default() -> Self {
        Self::new(RETRY, LONGEST_RETRY)
    }
}

/// Attempts that depend on a state. The state is read more often than attempts are made.
#[derive(Debug, Clone)]
pub struct Retry<S> {
    backoff: Backoff,
    /// The state as it was seen last.
    seen: Option<S>,
    /// It has changed since the last attempt.
    is_stale: bool,
}

impl<S> Retry<S> {
    /// Attempts with these pauses.
    #[must_use]
    pub const fn new(backoff: Backoff) -> Self {
        Self {
            backoff,
            seen: None,
            is_stale: false,
        }
    }

    /// When the next attempt is due, if nothing changes; none: at once.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        self.backoff.due()
    }
}

impl<S> Default for Retry<S> {
    fn default() -> Self {
        Self::new(Backoff::default())
    }
}

impl<S: PartialEq> Retry<S> {
    /// Whether it is time for an attempt, the state being this. `is_whole`: the last attempt succeeded, and nothing is
    /// lost since; then only another state is a reason.
    pub fn is_due(&mut self, seen: S, is_whole: bool, now: Instant) -> bool {
        if self.seen.as_ref() != Some(&seen) {
            self.seen = Some(seen);
            self.hurry(now);
        }
        (self.is_stale || !is_whole) && self.backoff.is_due(now)
    }

    /// Something has changed that the state does not show.
    pub fn hurry(&mut self, now: Instant) {
        self.is_stale = true;
        self.backoff.hurry(now);
    }

    /// Records an attempt.
    pub fn record(&mut self, is_whole: bool, now: Instant) {
        self.is_stale = false;
        match is_whole {
            true => self.backoff.succeeded(now),
            false => drop(self.backoff.failed(now)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When attempts are made, milliseconds, in so many seconds. `try_it` makes one, and says which state is seen then.
    fn attempts(seconds: u64, mut try_it: impl FnMut(usize) -> (bool, u32)) -> Vec<u64> {
        let (mut retry, begun, mut seen) = (Retry::default(), Instant::now(), 0);
        let (mut made, mut is_whole) = (Vec::new(), false);
        for ms in (0..seconds * 1000).step_by(10) {
            let now = begun + Duration::from_millis(ms);
            if retry.is_due(seen, is_whole, now) {
                (is_whole, seen) = try_it(made.len());
                retry.record(is_whole, now);
                made.push(ms);
            }
        }
        made
    }

    #[test]
    fn pause_ends_at_the_end_of_all_attempts() {
        let (second, begun) = (Duration::from_secs(1), Instant::now());
        let (mut backoff, end) = (Backoff::new(second / 4, second), begun + second);
        let (mut now, mut pauses) = (begun, Vec::new());
        while let Some(pause) = backoff.failed_before(end, now) {
            pauses.push(pause);
            now += pause;
        }
        assert_eq!((pauses, now), (vec![second / 4, second / 2, second / 4], end));
    }

    #[test]
    fn failed_attempts_have_growing_pauses() {
        let seconds: Vec<u64> = attempts(300, |_| (false, 0)).iter().map(|ms| ms / 1000).collect();
        assert_eq!(seconds, [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]);
    }

    #[test]
    fn attempts_that_change_their_own_conditions_end() {
        let made = attempts(60, |attempt| (false, attempt as u32 + 1));
        for (at, ms) in made.iter().enumerate() {
            let within = made[at..].iter().filter(|&later| later - ms < 10_000);
            assert!(within.count() <= 10, "{made:?}");
        }
    }

    #[test]
    fn success_that_is_lost_at_once_is_tried_once_in_the_first_pause() {
        let (mut retry, now) = (Retry::default(), Instant::now());
        assert!(retry.is_due(0, false, now));
        retry.record(true, now);
        assert!(!retry.is_due(0, false, now), "lost");
        assert!(retry.is_due(0, false, now + RETRY));
    }

    #[test]
    fn another_state_is_tried_at_once_and_then_often_again() {
        let (mut retry, now) = (Retry::default(), Instant::now());
        assert!(retry.is_due(0, false, now));
        for _ in 0..5 {
            retry.record(false, now);
        }
        assert!(!retry.is_due(0, false, now + RETRY) && retry.is_due(1, false, now + RETRY));
        retry.record(false, now);
        assert!(retry.is_due(1, false, now + RETRY));
    }

    #[test]
    fn complete_state_is_checked_once_for_each_change_however_fast_they_follow() {
        let (mut retry, now) = (Retry::default(), Instant::now());
        assert!(retry.is_due(0, true, now), "it was not looked at yet");
        retry.record(true, now);
        assert!(!retry.is_due(0, true, now + LONGEST_RETRY));
        for state in 1..=HURRIES {
            assert!(retry.is_due(state, true, now + LONGEST_RETRY));
            retry.record(true, now + LONGEST_RETRY);
        }
        // Too often: it waits, and is not forgotten.
        assert!(!retry.is_due(9, true, now + LONGEST_RETRY));
        assert!(retry.is_due(9, true, now + LONGEST_RETRY + RETRY));
    }
}
