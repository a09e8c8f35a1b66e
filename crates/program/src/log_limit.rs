//! Limits of log lines that others cause.
//!
//! A line that a guest, a VMM or a neighbour causes is logged at once, and so are the next few. After that, one line
//! is logged from time to time, with the number of lines that were left out.

use std::fmt;
use std::time::{Duration, Instant};

use crate::peer::Credentials;
use crate::rate::{Bucket, Buckets, Rate};

/// The first lines are logged without a pause.
const LINES: Rate = Rate {
    burst: 20,
    each: Duration::from_secs(30),
};

/// How often the same refusal of a process is logged.
const REPEATED: Rate = Rate {
    burst: 1,
    each: Duration::from_secs(3600),
};

/// Lines of one kind.
#[derive(Debug, Default)]
pub struct LogLimit {
    /// `None`: none was logged.
    lines: Option<Bucket>,
    left_out: u64,
}

/// The number of lines that were left out before a logged one; for the end of that line.
#[derive(Debug, PartialEq, Eq)]
pub struct LeftOut(u64);

impl LogLimit {
    /// Whether a line may be logged now.
    pub fn allow(&mut self) -> Option<LeftOut> {
        self.allow_at(Instant::now())
    }

    /// Whether [`Self::allow`] would allow a line now. For a caller that logs the line later if not, so that it does
    /// not count as left out.
    pub fn would_allow(&mut self) -> bool {
        self.lines_at(Instant::now()).left > 0
    }

    fn lines_at(&mut self, now: Instant) -> &mut Bucket {
        let lines = self.lines.get_or_insert_with(|| Bucket::full(LINES, now));
        lines.refill(LINES, now);
        lines
    }

    fn allow_at(&mut self, now: Instant) -> Option<LeftOut> {
        let lines = self.lines_at(now);
        if lines.left == 0 {
            self.left_out += 1;
            return None;
        }
        lines.left -= 1;
        Some(LeftOut(std::mem::take(&mut self.left_out)))
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            lines => write!(f, " ({lines} lines like this were left out before)"),
        }
    }
}

/// Lines of one kind that users of a program cause by its socket: each user has a limit, and all together.
#[derive(Debug)]
pub struct LogLimits {
    by_user: Buckets<u32>,
    by_all: Buckets<()>,
    /// Refusals: process, user and text.
    repeated: Buckets<Option<(i32, u32, String)>>,
    left_out: u64,
}

impl LogLimits {
    /// `burst`: lines at once for one user; all users together get eight times as many.
    #[must_use]
    pub fn new(burst: u32) -> Self {
        let rate = Rate {
            burst,
            each: Duration::from_secs(10),
        };
        let of_all = Rate {
            burst: burst * 8,
            each: Duration::from_secs(1),
        };
        Self {
            by_user: Buckets::new(rate),
            by_all: Buckets::new(of_all),
            repeated: Buckets::new(REPEATED),
            left_out: 0,
        }
    }

    /// Logs a refusal, and the same refusal of a process that tries again at level debug.
    pub fn log_refusal(&mut self, peer: &Credentials, refusal: &str) {
        let (pid, uid) = (peer.pid, peer.uid);
        match self.may_log_refusal((pid, uid, refusal.to_owned()), Instant::now()) {
            true => tracing::warn!(pid, "{refusal}"),
            false => tracing::debug!(pid, "{refusal}"),
        }
    }

    fn may_log_refusal(&mut self, refusal: (i32, u32, String), now: Instant) -> bool {
        let uid = refusal.1;
        // Those that find no room are all logged.
        let refusal = self.repeated.known_or(Some(refusal), None, now);
        let is_repeated = refusal.is_some() && self.repeated.wait(&refusal, 1, now).is_some();
        let may_log = !is_repeated && self.may_log_at(uid, now);
        if may_log && refusal.is_some() {
            self.repeated.take(&refusal, 1, now);
        }
        may_log
    }

    /// Whether a line that this user causes may be logged now; the number of those left out is logged before it.
    pub fn may_log(&mut self, uid: u32) -> bool {
        self.may_log_at(uid, Instant::now())
    }

    fn may_log_at(&mut self, uid: u32, now: Instant) -> bool {
        let uid = self.by_user.known_or(uid, u32::MAX, now);
        if self.by_user.wait(&uid, 1, now).is_some() || self.by_all.wait(&(), 1, now).is_some() {
            self.left_out += 1;
            return false;
        }
        self.by_user.take(&uid, 1, now);
        self.by_all.take(&(), 1, now);
        let left_out = std::mem::take(&mut self.left_out);
        if left_out > 0 {
            tracing::warn!("{left_out} lines of this kind were left out: lessees cause them too often");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate::KEYS_MAX;

    #[test]
    fn a_thousand_lines_in_a_minute_become_twenty_two() {
        let (mut lines, begun) = (LogLimit::default(), Instant::now());
        let logged: Vec<_> = (0..1000)
            .filter_map(|line| lines.allow_at(begun + Duration::from_millis(61) * line))
            .collect();
        assert_eq!(logged.len(), 22);
        let left_out: u64 = logged.iter().map(|left_out| left_out.0).sum();
        assert_eq!(left_out + lines.left_out, 1000 - 22);
    }

    #[test]
    fn line_after_a_long_silence_is_logged_at_once() {
        let (mut lines, begun) = (LogLimit::default(), Instant::now());
        while lines.allow_at(begun).is_some() {}
        let later = begun + LINES.each * 100;
        assert_eq!(lines.allow_at(later), Some(LeftOut(1)));
        assert_eq!(lines.allow_at(later), Some(LeftOut(0)));
    }

    #[test]
    fn lines_are_limited_for_each_user_and_over_all() {
        let (mut limits, start) = (LogLimits::new(10), Instant::now());
        let mut logged = |uid, times, at| (0..times).filter(|_| limits.may_log_at(uid, at)).count();
        assert_eq!(logged(7, 1000, start), 10);
        assert_eq!(logged(8, 1, start), 1);
        assert_eq!(logged(7, 1000, start + Duration::from_secs(20)), 2);
        let all: usize = (100..10_000)
            .map(|uid| logged(uid, 1, start + Duration::from_secs(20)))
            .sum();
        assert_eq!(all, 80 - 2);
        assert!(limits.by_user.count() <= KEYS_MAX + 1);
        // The same refusal of a process is logged once.
        let (later, mut limits) = (start + REPEATED.each, LogLimits::new(10));
        let mut logged = |pid, text: &str, at| limits.may_log_refusal((pid, 7, text.to_owned()), at);
        assert_eq!(
            [1, 1, 2].map(|pid| logged(pid, "taken", start)),
            [true, false, true]
        );
        assert!(logged(1, "other", start) && !logged(1, "taken", start));
        assert!(logged(1, "taken", later));
    }
}
