//! Limits of log lines that others cause.
//!
//! A line that a guest, a VMM or a neighbour causes is logged at once, and so are the next few. After that, one line
//! is logged from time to time, with the number of lines that were left out.

use std::fmt;
use std::time::{Duration, Instant};

use crate::rate::{Bucket, Rate};

/// The first lines are logged without a pause.
const LINES: Rate = Rate {
    burst: 20,
    each: Duration::from_secs(30),
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
