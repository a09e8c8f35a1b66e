//! How long a NIC takes to complete descriptors, so that an idle worker sleeps about as long.
//!
//! Theory of operation. In zero-copy no event announces a completion: a driver writes the completion ring and wakes
//! nothing (`xsk_tx_completed`, net/xdp/xsk.c). In copy mode the kernel would wake a waiter, once for each frame
//! (`xsk_destruct_skb`, `sock_wfree`). So an otherwise idle worker checks again after the time that the NIC last took.
//! Few frames are completed sooner than many, so there is a time for each power of two of outstanding descriptors
//! ([`CompletionTime::after`]): a lone frame behind a stream is not awaited like a ring full of frames.
//!
//! A wait is over when enough descriptors are completed ([`enough`]). If that is so at the first check, the time gets
//! an eighth shorter. Otherwise the worker waits half as long again, as often as needed; the time that was enough is
//! used for the next wait. So if a NIC takes the same time again, completions are found before one and a half times
//! that has passed, mostly at the first check.

use std::time::{Duration, Instant};

/// The shortest sleep: about the time that falling asleep and waking up take.
const LEAST: Duration = Duration::from_micros(8);
/// The longest sleep. A NIC without carrier may complete nothing for hours.
pub(crate) const MOST: Duration = Duration::from_millis(1);
/// Powers of two with a time of their own, the last one for all larger ones.
const KINDS: usize = 8;
/// Up to this many are awaited all together: their sender may wait for each.
const FEW: usize = 8;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct CompletionTime {
    /// The time for each power of two of outstanding descriptors.
    after: [Duration; KINDS],
    wait: Option<Wait>,
}

/// The present wait for completions.
#[derive(Debug)]
struct Wait {
    kind: usize,
    /// Completions still missing.
    missing: usize,
    since: Instant,
    until: Instant,
    /// A check found too few completions.
    is_late: bool,
}

/// How many completions of `out` descriptors end a wait: half of many, so that the NIC still has others to send.
fn enough(out: usize) -> usize {
    if out <= FEW { out } else { out / 2 }
}

impl CompletionTime {
    pub(crate) fn new() -> Self {
        Self {
            after: [LEAST; KINDS],
            wait: None,
        }
    }

    /// How long to sleep until enough of `out` outstanding descriptors (at least one) are completed.
    pub(crate) fn wait(&mut self, out: usize, now: Instant) -> Duration {
        let kind = (out.max(1).ilog2() as usize).min(KINDS - 1);
        let wait = self.wait.get_or_insert_with(|| Wait {
            kind,
            missing: enough(out),
            since: now,
            until: now + self.after[kind],
            is_late: false,
        });
        if wait.until <= now {
            let took = now.duration_since(wait.since);
            let more = (took / 2).clamp(LEAST, MOST);
            wait.is_late = true;
            wait.until = now + more;
            self.after[wait.kind] = (took + more).min(MOST);
        }
        wait.until.duration_since(now).max(LEAST)
    }

    /// `descriptors` were completed.
    #[inline]
    pub(crate) fn came_back(&mut self, descriptors: usize) {
        if let Some(wait) = &mut self.wait {
            wait.missing = wait.missing.saturating_sub(descriptors);
            if wait.missing == 0 {
                let after = &mut self.after[wait.kind];
                if !wait.is_late {
                    *after = (*after - *after / 8).max(LEAST);
                }
                self.wait = None;
            }
        }
    }

    /// No completion is awaited any more.
    pub(crate) fn forget(&mut self) {
        self.wait = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A NIC that completes a frame every `each`, and the worker that waits for it.
    struct World {
        time: CompletionTime,
        now: Instant,
        looks: u32,
    }

    impl World {
        fn new() -> Self {
            Self {
                time: CompletionTime::new(),
                now: Instant::now(),
                looks: 0,
            }
        }

        /// Sends `frames`; returns when the last one was found completed.
        fn send(&mut self, frames: u32, each: Duration) -> Duration {
            let (sent, mut back) = (self.now, 0);
            while back < frames {
                self.now += self.time.wait((frames - back) as usize, self.now);
                self.looks += 1;
                let done = self.now.duration_since(sent).as_nanos() / each.as_nanos();
                let found = frames.min(done as u32) - back;
                self.time.came_back(found as usize);
                back += found;
            }
            self.now.duration_since(sent)
        }
    }

    #[test]
    fn lone_frame_is_found_within_twice_the_time_of_the_nic() {
        for each in [10, 40, 90, 250, 600].map(Duration::from_micros) {
            let mut world = World::new();
            for frame in 0..100 {
                let found = world.send(1, each);
                assert!(found < each * 2, "frame {frame}: {found:?} of {each:?}");
            }
        }
    }

    #[test]
    fn burst_behind_which_others_wait_is_found_within_twice_the_time_of_the_nic() {
        for burst in [2, 8, 64, 1000] {
            let (mut world, each) = (World::new(), Duration::from_micros(12));
            for _ in 0..100 {
                let found = world.send(burst, each);
                assert!(found < each * burst * 2, "{burst} frames: {found:?}");
            }
        }
    }

    #[test]
    fn lone_frame_behind_a_stream_is_not_awaited_as_long_as_that() {
        let (mut world, each) = (World::new(), Duration::from_micros(20));
        world.send(1, each);
        for _ in 0..100 {
            world.send(256, each);
        }
        assert!(world.send(1, each) < each * 2);
    }

    #[test]
    fn nic_that_takes_the_same_time_again_is_looked_at_once_mostly() {
        let mut world = World::new();
        let mut send = |frames| (0..frames).for_each(|_| _ = world.send(1, Duration::from_micros(90)));
        send(10);
        send(100);
        assert!(world.looks < 150, "{} looks for 110 frames", world.looks);
    }

    #[test]
    fn wake_that_has_another_reason_makes_no_wait_longer() {
        let mut time = CompletionTime::new();
        let now = Instant::now();
        assert_eq!(time.wait(1, now), LEAST);
        time.came_back(0);
        assert_eq!(time.wait(2, now), LEAST, "the same wait");
        time.came_back(1);
        assert_eq!(time.after, [LEAST; KINDS]);
    }

    #[test]
    fn nic_without_carrier_is_looked_at_once_a_millisecond_and_forgotten_when_it_is_back() {
        let mut world = World::new();
        for _ in 0..100 {
            world.now += world.time.wait(1, world.now);
        }
        assert_eq!(world.time.wait(1, world.now), MOST);
        world.time.came_back(1);
        let each = Duration::from_micros(100);
        (0..20).for_each(|_| _ = world.send(1, each));
        assert!(world.send(1, each) < each * 2);
    }
}
