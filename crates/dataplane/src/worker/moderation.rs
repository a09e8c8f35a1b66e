//! How long a worker that would sleep pauses first, so that frames of busy guests accumulate, where that increases
//! throughput.
//!
//! Theory of operation. A worker that asks for kicks as soon as it has no work is woken for each packet of a stream,
//! and interrupts the receiving guest as often. All that takes CPU time from the guests that make the stream. NICs
//! delay their interrupts for this reason, and Linux adapts the delay to the throughput (Dynamic Interrupt Moderation,
//! Documentation/networking/net_dim.rst). Here it is a pause in which the busy lanes ask for no kicks.
//!
//! The length is found by trial. There are a few lengths ([`Moderation::length`]), zero among them. For [`TRIED`]
//! windows two neighbouring lengths alternate, and their throughput decides which is better; while that is the longer
//! one, the next longer one is tried. Then the length stays for [`KEPT`]. The shortest pause needs only as much
//! throughput as none, since it saves calls; longer ones need more ([`Level::percent`]). A guest that waits for answers
//! gets fewer of them with each pause, so such guests cause no pauses.
//!
//! A worker that is never idle makes no pause, whatever is tried: then nothing is learned about pauses, and none is
//! used later ([`PAUSES_A_WINDOW`]). And a result holds only while its throughput does: a guest that begins to wait for
//! answers would get few of them for seconds otherwise ([`POOR`]).
//!
//! Only lanes with much traffic ([`BUSY_BYTES_A_US`]) take part. The others have their notifications enabled, and wake
//! the worker at once; then it polls all lanes. So only frames that arrive by a pausing lane wait, whatever their
//! destination: frames of a NIC and of the host may be for guests with little traffic. After a pause without frames the
//! lane's notifications are enabled, too, until it has moved a frame.
//!
//! A guest that waits for answers sends nothing more in a pause, and the pause only delays it. So a lane that carries
//! less than half of its usual rate in [`FUTILE`] pauses in a row takes no part for a while, whatever is tried.

use std::time::{Duration, Instant};

/// Length of a window: throughput is measured for each.
const WINDOW: Duration = Duration::from_millis(8);
/// Windows of a trial.
const TRIED: u32 = 16;
/// How long the result of a trial is used.
const KEPT: Duration = Duration::from_secs(4);
/// Least average number of pauses in windows with pauses; with fewer nothing is learned about them.
const PAUSES_A_WINDOW: u32 = 4;
/// Windows in a row with less than half of the kept throughput after which another trial begins.
const POOR: u32 = 4;
/// Pauses in a row with less than half of a lane's usual rate after which it takes no part.
const FUTILE: u32 = 2;
/// A lane that carries as much is busy: 512 Mbit/s.
const BUSY_BYTES_A_US: u64 = 64;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Moderation {
    most: Duration,
    /// When the window began.
    since: Instant,
    /// Pauses made in the window.
    pauses: u32,
    level: Level,
    /// Direction of the next trial.
    way: Direction,
    phase: Phase,
}

/// The index of a pause's length ([`Moderation::length`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Level(u8);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Longer,
    Shorter,
}

#[derive(Debug)]
enum Phase {
    /// A trial of the length `lower` and the next longer one: the throughput of both, and the number of windows so far.
    Tried {
        lower: Level,
        windows: u32,
        sums: [Sum; 2],
    },
    /// The length stays until this time, unless [`POOR`] windows in a row (`poor` so far) fall below half of `found`.
    Kept { until: Instant, found: Sum, poor: u32 },
}

/// Sums over windows with the same length of a pause.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    bytes: u64,
    time: Duration,
    pauses: u32,
}

/// A lane's part in moderation.
#[derive(Debug, Default)]
pub(crate) struct Share {
    /// Bytes that it had carried when the window began.
    carried: u64,
    is_busy: bool,
    stage: Stage,
    /// What it carried in the best of the last windows.
    usual: Sum,
    /// When its last pause began, and the bytes carried until then; until that is evaluated.
    pause: Option<(Instant, u64)>,
    /// Pauses in a row with less than half of the usual rate.
    futile: u32,
    /// It takes no part before this time.
    waits_until: Option<Instant>,
}

/// Whether a lane may pause next.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    /// It has moved frames since its notifications were enabled or its last pause.
    #[default]
    Moved,
    /// In a pause.
    Alone,
    /// Its pause brought no frames, or its notifications are enabled.
    Spent,
}

impl Level {
    const NONE: Self = Self(0);
    const LONGEST: Self = Self(3);

    fn next(self, way: Direction) -> Option<Self> {
        match way {
            Direction::Longer if self != Self::LONGEST => Some(Self(self.0 + 1)),
            Direction::Shorter if self != Self::NONE => Some(Self(self.0 - 1)),
            _ => None,
        }
    }

    /// Throughput that the next longer pause needs, in percent of this one's.
    fn percent(self) -> u128 {
        // The shortest pause needs as much throughput as none, less what chance explains; longer ones need more.
        if self == Self::NONE { 97 } else { 103 }
    }
}

impl Direction {
    fn back(self) -> Self {
        match self {
            Self::Longer => Self::Shorter,
            Self::Shorter => Self::Longer,
        }
    }
}

impl Moderation {
    /// `most`: the longest pause; zero: none.
    pub(crate) fn new(most: Duration, now: Instant) -> Self {
        Self {
            most,
            since: now,
            pauses: 0,
            level: Level::NONE,
            way: Direction::Longer,
            phase: Phase::tried(Level::NONE),
        }
    }

    /// The length of a pause: zero, a quarter of the longest one, a half of it, or the longest one.
    fn length(&self, level: Level) -> Duration {
        match level.0 {
            0 => Duration::ZERO,
            level => self.most / 8 * (1 << level),
        }
    }

    /// How long busy lanes pause now.
    pub(crate) fn pause(&self) -> Duration {
        self.length(match self.phase {
            Phase::Tried { lower, windows, .. } if windows % 2 == 1 => Level(lower.0 + 1),
            Phase::Tried { lower, .. } => lower,
            Phase::Kept { .. } => self.level,
        })
    }

    /// Counts a pause.
    pub(crate) fn note_pause(&mut self) {
        self.pauses += 1;
    }

    /// Ends the window if it is over. `lanes`: what each has carried so far, and its share.
    pub(crate) fn look<'a>(&mut self, now: Instant, lanes: impl Iterator<Item = (u64, &'a mut Share)>) {
        let time = now.saturating_duration_since(self.since);
        if self.most.is_zero() || time < WINDOW {
            return;
        }
        self.since = now;
        let (mut bytes, mut is_any_busy) = (0_u64, false);
        for (carried, share) in lanes {
            bytes = bytes.saturating_add(share.carry(carried, time));
            is_any_busy |= share.is_busy;
        }
        let pauses = std::mem::take(&mut self.pauses);
        self.end_window(now, is_any_busy, Sum { bytes, time, pauses });
    }

    fn end_window(&mut self, now: Instant, is_any_busy: bool, came: Sum) {
        match &mut self.phase {
            Phase::Kept { until, found, poor } if now < *until => {
                *poor = match is_any_busy && !came.is_so_much_of(*found, 50) {
                    true => *poor + 1,
                    false => 0,
                };
                if *poor == POOR {
                    self.begin_trial();
                }
            }
            Phase::Tried { lower, windows, sums } if is_any_busy => {
                sums[(*windows % 2) as usize].add(came);
                *windows += 1;
                if *windows == TRIED {
                    let ([shorter, longer], lower) = (*sums, *lower);
                    let is_known = longer.pauses >= PAUSES_A_WINDOW * TRIED / 2;
                    match is_known && longer.is_so_much_of(shorter, lower.percent()) {
                        true => self.decide(now, Level(lower.0 + 1), longer),
                        false => self.decide(now, lower, shorter),
                    }
                }
            }
            _ => self.begin_trial(),
        }
    }

    /// Ends a trial, which has found the better length, and its throughput.
    fn decide(&mut self, now: Instant, level: Level, found: Sum) {
        let has_moved = std::mem::replace(&mut self.level, level) != level;
        if has_moved && level.next(self.way).is_some() {
            return self.begin_trial();
        }
        self.way = self.way.back();
        self.phase = Phase::Kept {
            until: now + KEPT,
            found,
            poor: 0,
        };
    }

    fn begin_trial(&mut self) {
        let other = self.level.next(self.way).unwrap_or_else(|| {
            self.way = self.way.back();
            self.level.next(self.way).unwrap_or(self.level)
        });
        self.phase = Phase::tried(Level(self.level.0.min(other.0)));
    }
}

impl Phase {
    fn tried(lower: Level) -> Self {
        Self::Tried {
            lower,
            windows: 0,
            sums: [Sum::default(); 2],
        }
    }
}

impl Sum {
    fn add(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.time += other.time;
        self.pauses = self.pauses.saturating_add(other.pauses);
    }

    /// Whether its rate is at least `percent` of the other's.
    fn is_so_much_of(self, other: Self, percent: u128) -> bool {
        let times = |bytes: u64, time: Duration| u128::from(bytes).saturating_mul(time.as_micros());
        times(self.bytes, other.time).saturating_mul(100)
            >= times(other.bytes, self.time).saturating_mul(percent)
    }
}

impl Share {
    /// Sets the bytes carried so far; returns those of the last window.
    fn carry(&mut self, carried: u64, time: Duration) -> u64 {
        // Counters may restart at 0 with another guest.
        let more = carried.saturating_sub(self.carried);
        self.carried = carried;
        self.is_busy = u128::from(more) >= u128::from(BUSY_BYTES_A_US) * time.as_micros();
        let came = Sum {
            bytes: more,
            time,
            pauses: 0,
        };
        match came.is_so_much_of(self.usual, 100) {
            true => self.usual = came,
            false => self.usual.bytes -= self.usual.bytes / 8,
        }
        more
    }

    /// The lane moved frames.
    #[inline]
    pub(crate) fn moved(&mut self) {
        self.stage = Stage::Moved;
    }

    /// The worker is about to sleep. Returns whether the lane pauses in that sleep; `pauses`: there are pauses now.
    pub(crate) fn begin(&mut self, pauses: bool, now: Instant, carried: impl Fn() -> u64) -> bool {
        if let Some(pause) = self.pause.take() {
            self.evaluate(pause, now, carried());
        }
        let takes_part = self.is_busy && self.waits_until.is_none_or(|until| until <= now);
        let is_let_alone = pauses && takes_part && self.stage == Stage::Moved;
        if is_let_alone {
            self.pause = Some((now, carried()));
        }
        self.stage = match is_let_alone {
            true => Stage::Alone,
            false => Stage::Spent,
        };
        is_let_alone
    }

    /// Evaluates the last pause: whether frames have accumulated.
    fn evaluate(&mut self, (since, before): (Instant, u64), now: Instant, carried: u64) {
        let gathered = Sum {
            bytes: carried.saturating_sub(before),
            time: now.saturating_duration_since(since),
            pauses: 1,
        };
        self.futile = match gathered.is_so_much_of(self.usual, 50) {
            true => 0,
            false => self.futile + 1,
        };
        if self.futile == FUTILE {
            self.futile = 0;
            self.waits_until = Some(now + KEPT);
        }
    }

    /// Whether it pauses in this sleep.
    pub(crate) fn is_let_alone(&self) -> bool {
        self.stage == Stage::Alone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: Duration = Duration::from_micros(800);
    const TRIAL: Duration = WINDOW.saturating_mul(TRIED);

    /// Which of the lengths of a pause it is.
    fn level_of(pause: Duration) -> usize {
        match pause.as_micros() {
            0 => 0,
            pause => (pause / 200).ilog2() as usize + 1,
        }
    }

    /// Runs for that time with a lane that carries a number of bytes a microsecond for each length; returns how many
    /// windows had which.
    fn run(moderation: &mut Moderation, time: Duration, share: &mut Share, rates: [u64; 4]) -> [u32; 4] {
        run_with(moderation, time, share, rates, PAUSES_A_WINDOW)
    }

    /// The same, with this many pauses in a window with pauses.
    fn run_with(
        moderation: &mut Moderation,
        time: Duration,
        share: &mut Share,
        rates: [u64; 4],
        pauses: u32,
    ) -> [u32; 4] {
        let end = moderation.since + time;
        let (mut carried, mut windows) = (share.carried, [0; 4]);
        while moderation.since < end {
            let level = level_of(moderation.pause());
            windows[level] += 1;
            (0..if level > 0 { pauses } else { 0 }).for_each(|_| moderation.note_pause());
            carried += rates[level] * WINDOW.as_micros() as u64;
            moderation.look(moderation.since + WINDOW, std::iter::once((carried, &mut *share)));
        }
        windows
    }

    /// The worker sleeps; returns whether the lane pauses.
    fn rest(share: &mut Share, pauses: bool) -> bool {
        share.begin(pauses, Instant::now(), || 0)
    }

    /// A second of a lane that carries a burst of bytes before each sleep, and `rate` bytes a microsecond meanwhile:
    /// returns the number of sleeps, and of those in which it pauses.
    fn sleeps(burst: u64, rate: u64) -> [u32; 2] {
        const PAUSE: Duration = Duration::from_micros(200);
        let (mut now, mut share) = (Instant::now(), Share::default());
        let (mut carried, mut since, mut counts) = (0, now, [0; 2]);
        let end = now + Duration::from_secs(1);
        while now < end {
            carried += burst;
            share.moved();
            let is_let_alone = share.begin(true, now, || carried);
            let time = if is_let_alone {
                PAUSE
            } else {
                Duration::from_micros(40)
            };
            carried += rate * time.as_micros() as u64;
            now += time;
            counts[0] += 1;
            counts[1] += u32::from(is_let_alone);
            if now >= since + WINDOW {
                share.carry(carried, now - since);
                since = now;
            }
        }
        counts
    }

    fn moderation() -> (Moderation, Share) {
        (Moderation::new(MOST, Instant::now()), Share::default())
    }

    #[test]
    fn pauses_are_as_long_as_brings_most_through() {
        let cases = [
            ([100, 80, 200, 200], 0),
            ([100, 98, 98, 98], 200),
            ([100, 120, 140, 130], 400),
            ([100, 120, 140, 160], 800),
        ];
        for (rates, pause) in cases {
            let pause = Duration::from_micros(pause);
            let (mut moderation, mut share) = moderation();
            run(&mut moderation, TRIAL * 3, &mut share, rates);
            assert_eq!(moderation.pause(), pause, "{rates:?}");
            // It tries other lengths now and then, and returns to this one.
            let windows = run(&mut moderation, (KEPT + TRIAL * 2) * 4, &mut share, rates);
            assert!(
                windows[level_of(pause)] * 10 > windows.iter().sum::<u32>() * 9,
                "{rates:?}: {windows:?}"
            );
        }
    }

    #[test]
    fn it_is_tried_again_when_things_may_have_changed() {
        let (mut moderation, mut share) = moderation();
        run(&mut moderation, TRIAL, &mut share, [100, 70, 70, 70]);
        let windows = run(&mut moderation, KEPT, &mut share, [100, 200, 300, 400]);
        assert_eq!(windows[1..], [0; 3], "what was found holds");
        run(&mut moderation, TRIAL * 4, &mut share, [100, 200, 300, 400]);
        assert_eq!(moderation.pause(), MOST);
        run(
            &mut moderation,
            (KEPT + TRIAL) * 4,
            &mut share,
            [400, 300, 200, 100],
        );
        assert_eq!(moderation.pause(), Duration::ZERO);
    }

    #[test]
    fn pauses_that_are_not_made_are_not_known() {
        let (mut moderation, mut share) = moderation();
        let few = PAUSES_A_WINDOW - 1;
        run_with(&mut moderation, TRIAL, &mut share, [100; 4], few);
        assert_eq!(moderation.pause(), Duration::ZERO);
    }

    #[test]
    fn what_was_found_holds_as_long_as_it_brings_half_of_that() {
        let (mut moderation, mut share) = moderation();
        run(&mut moderation, TRIAL * 3, &mut share, [1000, 1100, 1200, 1300]);
        assert_eq!(moderation.pause(), MOST);
        run(&mut moderation, WINDOW * 100, &mut share, [700; 4]);
        assert_eq!(moderation.pause(), MOST);
        // The guest waits for answers now: one trial for each length.
        let rates = [1000, 400, 300, 200];
        run(&mut moderation, WINDOW * POOR + TRIAL * 3, &mut share, rates);
        assert_eq!(moderation.pause(), Duration::ZERO);
    }

    #[test]
    fn nothing_is_tried_without_busy_lanes_or_pauses() {
        let (mut little, mut share) = moderation();
        let windows = run(&mut little, KEPT * 2, &mut share, [BUSY_BYTES_A_US - 1; 4]);
        assert_eq!(windows[1..], [0; 3]);
        assert!(!rest(&mut share, true));
        let mut none = Moderation::new(Duration::ZERO, Instant::now());
        none.look(none.since + KEPT, std::iter::once((u64::MAX, &mut share)));
        assert!(!rest(&mut share, true), "no lane is evaluated");
    }

    #[test]
    fn lane_pauses_once_until_it_moves_a_frame() {
        let mut share = Share {
            is_busy: true,
            ..Share::default()
        };
        assert!(!rest(&mut share, false) && !share.is_let_alone());
        share.moved();
        assert!(rest(&mut share, true) && share.is_let_alone());
        assert!(!rest(&mut share, true) && !share.is_let_alone(), "nothing came");
        share.moved();
        assert!(rest(&mut share, true));
    }

    #[test]
    fn guest_that_waits_for_each_answer_is_not_delayed_but_twice() {
        let [sleeps, let_alone] = sleeps(8 * 1514, 0);
        assert!(sleeps > 20_000);
        assert_eq!(let_alone, FUTILE);
    }

    #[test]
    fn stream_pauses_for_as_long_as_it_lasts() {
        let [sleeps, let_alone] = sleeps(0, 1000);
        assert!(let_alone > 4000 && sleeps < 6000, "{let_alone} of {sleeps}");
    }

    #[test]
    fn restarted_counters_count_for_nothing() {
        let mut share = Share::default();
        assert_eq!(share.carry(1000, WINDOW), 1000);
        assert_eq!(share.carry(10, WINDOW), 0);
        assert_eq!(share.carry(u64::MAX, Duration::from_secs(1)), u64::MAX - 10);
        assert!(share.is_busy);
    }
}
