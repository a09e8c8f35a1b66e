//! How often, and in which order: what one user may cause here, so that others get their share.
//!
//! Users are told apart by number. Who has subordinate numbers (subuid(5)) has many, so what would be worth the trouble
//! is also limited over all users.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// So many at once, and then one in each such time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    pub(super) burst: u32,
    pub(super) each: Duration,
}

/// How often one user may have the program attached to one interface at once, or try to. A NIC's rings may start anew
/// each time.
const ATTACHES: u32 = 4;
/// The same for all users together.
const ATTACHES_OF_ALL: u32 = 16;
/// Most users that are kept apart; beyond that they share.
const USERS_MAX: usize = 1024;

/// Pause before what was tried so often in vain is tried again: twice as long each time, up to `most`.
pub(super) fn pause_after(tries: u32, first: Duration, most: Duration) -> Duration {
    let doublings = tries.saturating_sub(1).min(16);
    first.saturating_mul(1 << doublings).min(most)
}

/// What is left of a rate.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) left: u32,
    /// When `left` was right.
    since: Instant,
}

impl Bucket {
    pub(super) fn full(rate: Rate, now: Instant) -> Self {
        Self {
            left: rate.burst,
            since: now,
        }
    }

    /// What time has given back since it was looked at last.
    pub(super) fn refill(&mut self, rate: Rate, now: Instant) {
        let earned = now.saturating_duration_since(self.since).as_nanos() / rate.each.as_nanos().max(1);
        let earned = u32::try_from(earned).unwrap_or(rate.burst).min(rate.burst);
        if earned > 0 {
            self.left = self.left.saturating_add(earned).min(rate.burst);
            self.since = match self.left == rate.burst {
                true => now,
                false => self.since + rate.each * earned,
            };
        }
    }
}

/// A rate for each of several.
#[derive(Debug)]
pub(super) struct Buckets<K> {
    rate: Rate,
    /// Those who have used some of it.
    used: BTreeMap<K, Bucket>,
}

impl<K: Ord + Clone> Buckets<K> {
    pub(super) fn new(rate: Rate) -> Self {
        Self {
            rate,
            used: BTreeMap::new(),
        }
    }

    /// After which time this one may do it once; none: now.
    pub(super) fn wait(&mut self, of: &K, now: Instant) -> Option<Duration> {
        let bucket = self.used.get_mut(of)?;
        bucket.refill(self.rate, now);
        let next = bucket.since + self.rate.each;
        (bucket.left == 0 && next > now).then(|| next.saturating_duration_since(now))
    }

    fn forget_full(&mut self, now: Instant) {
        let rate = self.rate;
        self.used.retain(|_, bucket| {
            bucket.refill(rate, now);
            bucket.left < rate.burst
        });
    }

    pub(super) fn take(&mut self, of: &K, now: Instant) {
        let rate = self.rate;
        if !self.used.contains_key(of) {
            self.forget_full(now);
            self.used.insert(of.clone(), Bucket::full(rate, now));
        }
        if let Some(bucket) = self.used.get_mut(of) {
            bucket.refill(rate, now);
            bucket.left = bucket.left.saturating_sub(1);
        }
    }
}

/// How often programs are attached because somebody asks for a lease.
#[derive(Debug)]
pub(super) struct Attaches {
    by_user: Buckets<(String, u32)>,
    by_all: Buckets<String>,
}

impl Attaches {
    /// One more in the time that a program stays without a lease: then nobody who asks for leases like that is refused
    /// one.
    pub(super) fn new(linger: Duration) -> Self {
        let rate = |burst, each| Rate { burst, each };
        Self {
            by_user: Buckets::new(rate(ATTACHES, linger)),
            by_all: Buckets::new(rate(ATTACHES_OF_ALL, linger / 4)),
        }
    }

    /// Why this user may not have the program attached now.
    pub(super) fn check(&mut self, interface: &str, uid: u32, now: Instant) -> Result<(), String> {
        let own = self.by_user.wait(&(interface.to_owned(), uid), now);
        let all = self.by_all.wait(&interface.to_owned(), now);
        let Some(wait) = own.max(all) else {
            return Ok(());
        };
        let who = match own {
            Some(_) => format!("user {uid}"),
            None => "all users together".to_owned(),
        };
        let seconds = wait.as_secs() + 1;
        Err(format!(
            "{who} had the program attached to {interface}, or tried to, too often: try again in {seconds} s, or keep \
             a lease (the program stays with it)"
        ))
    }

    pub(super) fn note(&mut self, interface: &str, uid: u32, now: Instant) {
        self.note_in_vain(interface, uid, now);
        self.by_all.take(&interface.to_owned(), now);
    }

    /// It could not be attached. That costs time, and no frames: others are not refused for it.
    pub(super) fn note_in_vain(&mut self, interface: &str, uid: u32, now: Instant) {
        self.by_user.take(&(interface.to_owned(), uid), now);
    }
}

/// Limits the lines of one kind that are logged because of what holders do, and counts the others.
#[derive(Debug)]
pub(super) struct Quiet {
    by_user: Buckets<u32>,
    by_all: Buckets<()>,
    left_out: u64,
}

impl Quiet {
    /// So many lines at once because of one user, eight times as many because of all.
    pub(super) fn new(burst: u32) -> Self {
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
            left_out: 0,
        }
    }

    pub(super) fn may_say(&mut self, uid: u32) -> bool {
        self.may_say_at(uid, Instant::now())
    }

    fn may_say_at(&mut self, uid: u32, now: Instant) -> bool {
        if self.by_user.used.len() >= USERS_MAX {
            self.by_user.forget_full(now);
        }
        // A crowd of users is one.
        let known = self.by_user.used.contains_key(&uid) || self.by_user.used.len() < USERS_MAX;
        let uid = if known { uid } else { u32::MAX };
        if self.by_user.wait(&uid, now).is_some() || self.by_all.wait(&(), now).is_some() {
            self.left_out += 1;
            return false;
        }
        self.by_user.take(&uid, now);
        self.by_all.take(&(), now);
        let left_out = std::mem::take(&mut self.left_out);
        if left_out > 0 {
            tracing::warn!("{left_out} lines of this kind were left out: holders cause them too often");
        }
        true
    }
}

/// A connection with a request.
pub(super) struct Waiting {
    pub(super) number: u64,
    pub(super) uid: u32,
}

/// In which order requests are done: in a round one of each user's, however many connections it has; the next round
/// goes on with its next connection.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The connection of each user that had its turn last, of those users that wait.
    last: BTreeMap<u32, u64>,
}

impl Turns {
    /// Numbers of the connections whose turn it is.
    pub(super) fn next(&mut self, waiting: &[Waiting]) -> BTreeSet<u64> {
        let mut by_user: BTreeMap<u32, BTreeSet<u64>> = BTreeMap::new();
        for &Waiting { number, uid } in waiting {
            by_user.entry(uid).or_default().insert(number);
        }
        self.last.retain(|uid, _| by_user.contains_key(uid));
        let mut turns = BTreeSet::new();
        for (uid, numbers) in by_user {
            let last = self.last.get(&uid).copied().unwrap_or(0);
            let after = numbers.range(last + 1..).next();
            if let Some(&number) = after.or_else(|| numbers.first()) {
                self.last.insert(uid, number);
                turns.insert(number);
            }
        }
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_one_request_done_in_a_round_however_many_connections_it_has() {
        let mut turns = Turns::default();
        let of_user = |number| Waiting {
            number,
            uid: if number <= 16 { 7 } else { 8 },
        };
        let many: Vec<Waiting> = (1..=18).map(of_user).collect();
        let mut done = BTreeMap::new();
        for _ in 0..32 {
            let now = turns.next(&many);
            assert_eq!(now.len(), 2, "one of each user: {now:?}");
            now.into_iter()
                .for_each(|number| *done.entry(number).or_insert(0) += 1);
        }
        // And within a user all come in turn.
        assert!((1..=16).all(|number| done[&number] == 2), "{done:?}");
        assert_eq!((done[&17], done[&18]), (16, 16));
        assert!(turns.next(&[]).is_empty() && turns.last.is_empty());
    }

    #[test]
    fn pause_doubles_with_each_try_up_to_its_bound() {
        let (first, most) = (Duration::from_millis(500), Duration::from_secs(32));
        let pauses = [0, 1, 2, 3, 7, 8, u32::MAX].map(|tries| pause_after(tries, first, most).as_millis());
        assert_eq!(pauses, [500, 500, 1000, 2000, 32_000, 32_000, 32_000]);
    }

    #[test]
    fn bucket_is_refilled_by_time_up_to_its_burst() {
        let (rate, start) = (
            Rate {
                burst: 512,
                each: Duration::from_millis(1),
            },
            Instant::now(),
        );
        let mut bucket = Bucket::full(rate, start);
        bucket.left = 0;
        bucket.refill(rate, start);
        assert_eq!(bucket.left, 0);
        bucket.refill(rate, start + Duration::from_millis(20));
        assert_eq!(bucket.left, 20);
        bucket.refill(rate, start + Duration::from_secs(3600));
        assert_eq!(bucket.left, 512);
    }

    #[test]
    fn attaching_again_and_again_is_refused_until_time_has_passed() {
        let each = Duration::from_secs(5);
        let (mut attaches, start) = (Attaches::new(each), Instant::now());
        for _ in 0..ATTACHES {
            assert_eq!(attaches.check("eth1", 7, start), Ok(()));
            attaches.note("eth1", 7, start);
        }
        let why = attaches.check("eth1", 7, start).expect_err("too often");
        assert!(
            why.contains("user 7") && why.contains("eth1") && why.contains("again in 6 s"),
            "{why}"
        );
        // Other users and other interfaces are not concerned.
        assert_eq!(attaches.check("eth1", 8, start), Ok(()));
        assert_eq!(attaches.check("eth2", 7, start), Ok(()));
        // Unless there are very many of them.
        (8..20).for_each(|uid| attaches.note("eth1", uid, start));
        let why = attaches.check("eth1", 20, start).expect_err("too often");
        assert!(why.contains("all users"), "{why}");
        assert!(attaches.check("eth1", 7, start + each / 2).is_err());
        assert_eq!(attaches.check("eth1", 7, start + each), Ok(()));
    }

    #[test]
    fn attaching_in_vain_is_limited_for_each_user_and_at_nobody_elses_cost() {
        let (mut attaches, start) = (Attaches::new(Duration::from_secs(5)), Instant::now());
        (0..10 * ATTACHES_OF_ALL).for_each(|_| attaches.note_in_vain("eth1", 7, start));
        assert!(attaches.check("eth1", 7, start).is_err());
        assert_eq!(attaches.check("eth1", 8, start), Ok(()));
    }

    #[test]
    fn lines_are_limited_for_each_user_and_over_all() {
        let (mut quiet, start) = (Quiet::new(10), Instant::now());
        let mut said = |uid, times, at| (0..times).filter(|_| quiet.may_say_at(uid, at)).count();
        assert_eq!(said(7, 1000, start), 10);
        assert_eq!(said(8, 1, start), 1);
        assert_eq!(said(7, 1000, start + Duration::from_secs(20)), 2);
        let all: usize = (100..10_000)
            .map(|uid| said(uid, 1, start + Duration::from_secs(20)))
            .sum();
        assert_eq!(all, 80 - 2);
        assert!(quiet.by_user.used.len() <= USERS_MAX + 1);
    }
}
