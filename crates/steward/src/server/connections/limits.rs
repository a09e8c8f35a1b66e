//! Rates and order of requests, so that each user gets its share.
//!
//! Users are identified by number. A user with subordinate numbers (subuid(5)) has many numbers, so requests that an
//! attacker could misuse are also limited over all users.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use program::rate::{Buckets, Rate};

use crate::server::LINGER;
use steward_protocol::{Reason, Refusal};

/// Rates of device changes of one interface, in units ([`DeviceChange::cost`]): of one user, and of all together.
const OF_USER: Rate = Rate {
    burst: 512,
    each: Duration::from_nanos(LINGER.as_nanos() as u64 / 128),
};
const OF_ALL: Rate = Rate {
    burst: 4 * OF_USER.burst,
    each: Duration::from_nanos(LINGER.as_nanos() as u64 / 512),
};

/// A change of a device that a request causes. The kernel makes most of them under a lock that all interfaces share
/// (RTNL), a NIC may restart its rings, and the steward serves no lessee meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChange {
    /// The program is attached; it is detached a while after the last lease.
    Program,
    /// A tap between a network and the host or the wire is made, with its programs.
    NetworkTap,
    /// A tap is made, through which GSO packets are sent unsegmented from a queue.
    SendTap,
    /// The NIC is queried or configured for a netkit or for zero-copy receive: twice for each queue.
    NicSetUp,
    /// Steering rules for a lease's frames are set on the NIC.
    NicRules,
    /// The program is replaced by one that writes other hints.
    Hints,
}

impl DeviceChange {
    /// Cost in units. `linger`: how long the program stays without a lease. In that time a user earns the units for one
    /// more attach, so a user that attaches no more often than that is never refused.
    pub(crate) fn cost(self, linger: Duration) -> u32 {
        match self {
            Self::Program => {
                let times = linger.min(LINGER).as_nanos() / OF_USER.each.as_nanos();
                u32::try_from(times).unwrap_or(u32::MAX)
            }
            Self::NetworkTap => 16,
            Self::Hints => 8,
            Self::NicSetUp => 4,
            Self::SendTap => 2,
            Self::NicRules => 1,
        }
    }

    fn words(self, interface: &str) -> String {
        match self {
            Self::Program => format!("had the program attached to {interface}, or tried to,"),
            Self::NetworkTap => format!("had taps made for networks of {interface}"),
            Self::SendTap => format!("had tap devices made to send by {interface}"),
            Self::NicSetUp => format!("had {interface} set up for queues"),
            Self::NicRules => format!("had rules made in {interface}"),
            Self::Hints => format!("asked for other hints of {interface}"),
        }
    }
}

/// The account that a change is charged to: an interface's name, and a user.
type Account<'a> = (&'a str, u32);

/// Limits how often requests change devices: one account for all kinds of request.
#[derive(Debug)]
pub(crate) struct DeviceChanges {
    by_user: Buckets<(String, u32)>,
    by_all: Buckets<String>,
    linger: Duration,
}

impl DeviceChanges {
    pub(crate) fn new(linger: Duration) -> Self {
        Self {
            by_user: Buckets::new(OF_USER),
            by_all: Buckets::new(OF_ALL),
            linger,
        }
    }

    /// Takes the cost of a change from the accounts.
    ///
    /// # Errors
    /// Why this user may not cause it now.
    pub(crate) fn take(
        &mut self,
        change: DeviceChange,
        of: Account<'_>,
        now: Instant,
    ) -> Result<(), Refusal> {
        self.check(change, of, now)?;
        self.note(change, of, now, true);
        Ok(())
    }

    /// Whether this user may cause a change now.
    pub(crate) fn check(
        &mut self,
        change: DeviceChange,
        of: Account<'_>,
        now: Instant,
    ) -> Result<(), Refusal> {
        let (interface, uid) = of;
        let (cost, key) = (change.cost(self.linger), self.user(of, now));
        let own = self.by_user.wait(&key, cost, now);
        let all = self.by_all.wait(&interface.to_owned(), cost, now);
        let Some(wait) = own.max(all) else {
            return Ok(());
        };
        let who = match own {
            Some(_) => format!("user {uid}"),
            None => "all users together".to_owned(),
        };
        let (words, seconds) = (change.words(interface), wait.as_secs() + 1);
        Reason::Limit.refuse(format!(
            "{who} {words} too often: try again in {seconds} s, or keep the leases that there are"
        ))
    }

    /// Charges a change. A failed one only to the user: it costs the steward time but no frames, so other users do not
    /// pay.
    pub(crate) fn note(&mut self, change: DeviceChange, of: Account<'_>, now: Instant, is_made: bool) {
        let (cost, key) = (change.cost(self.linger), self.user(of, now));
        self.by_user.take(&key, cost, now);
        if is_made {
            self.by_all.take(&of.0.to_owned(), cost, now);
        }
    }

    /// The account of a user; beyond a number of users, all share one.
    fn user(&mut self, (interface, uid): Account<'_>, now: Instant) -> (String, u32) {
        let of = |uid| (interface.to_owned(), uid);
        self.by_user.known_or(of(uid), of(u32::MAX), now)
    }
}

/// The order of requests: in each round one of each user, however many connections it has; the next round continues
/// with the user's next connection.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// For each user that waits: its connection that was served last.
    last: BTreeMap<u32, u64>,
}

impl Turns {
    /// Numbers of the connections whose turn it is, of those with a request, by user.
    pub(crate) fn next(&mut self, waiting: &BTreeMap<u32, BTreeSet<u64>>) -> BTreeSet<u64> {
        self.last.retain(|uid, _| waiting.contains_key(uid));
        let mut turns = BTreeSet::new();
        for (&uid, numbers) in waiting {
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

    use program::rate::KEYS_MAX;

    use super::*;

    #[test]
    fn each_user_has_one_request_done_in_a_round_however_many_connections_it_has() {
        let mut turns = Turns::default();
        let many = [(7, (1..=16).collect()), (8, [17, 18].into())].into();
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
        assert!(turns.next(&BTreeMap::new()).is_empty() && turns.last.is_empty());
    }

    #[test]
    fn attaching_again_and_again_is_refused_until_time_has_passed() {
        let (mut changes, start) = (DeviceChanges::new(LINGER), Instant::now());
        let program = DeviceChange::Program;
        for _ in 0..4 {
            changes.take(program, ("eth1", 7), start).expect("not often yet");
        }
        let refusal = changes.check(program, ("eth1", 7), start).expect_err("too often");
        let why = &refusal.text;
        assert!(
            why.contains("user 7") && why.contains("eth1") && why.contains("again in 6 s"),
            "{why}"
        );
        // Other users and other interfaces are not concerned.
        assert_eq!(changes.check(program, ("eth1", 8), start), Ok(()));
        assert_eq!(changes.check(program, ("eth2", 7), start), Ok(()));
        // Unless there are very many of them.
        (8..20).for_each(|uid| changes.note(program, ("eth1", uid), start, true));
        let refusal = changes
            .check(program, ("eth1", 20), start)
            .expect_err("too often");
        assert!(refusal.text.contains("all users"), "{refusal}");
        assert!(changes.check(program, ("eth1", 7), start + LINGER / 2).is_err());
        assert_eq!(changes.check(program, ("eth1", 7), start + LINGER), Ok(()));
    }

    #[test]
    fn changes_of_all_kinds_have_one_account() {
        let (mut changes, start) = (DeviceChanges::new(LINGER), Instant::now());
        let mut made = |change, uid, at| {
            let all = (0..10_000).take_while(|_| changes.take(change, ("eth1", uid), at).is_ok());
            all.count()
        };
        assert_eq!(made(DeviceChange::NetworkTap, 7, start), 32);
        let [program, tap, set_up, rules, hints] = [
            DeviceChange::Program,
            DeviceChange::NetworkTap,
            DeviceChange::NicSetUp,
            DeviceChange::NicRules,
            DeviceChange::Hints,
        ];
        for change in [program, tap, set_up, rules, hints] {
            assert_eq!(made(change, 7, start), 0, "{change:?}");
        }
        assert_eq!(made(DeviceChange::NicRules, 8, start), 512);
        // With time that comes back: eight taps in five seconds.
        assert_eq!(made(DeviceChange::NetworkTap, 7, start + LINGER), 8);
    }

    #[test]
    fn program_that_goes_at_once_may_come_again_at_once() {
        let (mut changes, start) = (DeviceChanges::new(Duration::ZERO), Instant::now());
        let program = DeviceChange::Program;
        assert!((0..1000).all(|_| changes.take(program, ("eth1", 7), start).is_ok()));
        (0..32).for_each(|_| changes.note(DeviceChange::NetworkTap, ("eth1", 7), start, true));
        assert!(
            changes
                .check(DeviceChange::NetworkTap, ("eth1", 7), start)
                .is_err()
        );
    }

    #[test]
    fn failed_attaching_is_limited_for_each_user_alone() {
        let (mut changes, start) = (DeviceChanges::new(LINGER), Instant::now());
        let program = DeviceChange::Program;
        (0..200).for_each(|_| changes.note(program, ("eth1", 7), start, false));
        assert!(changes.check(program, ("eth1", 7), start).is_err());
        assert_eq!(changes.check(program, ("eth1", 8), start), Ok(()));
    }

    #[test]
    fn crowd_of_users_has_one_account_and_takes_no_room() {
        let (mut changes, start) = (DeviceChanges::new(LINGER), Instant::now());
        (0..10_000).for_each(|uid| changes.note(DeviceChange::Program, ("eth1", uid), start, false));
        assert!(changes.by_user.count() <= KEYS_MAX + 1);
        assert!(
            changes
                .check(DeviceChange::NicRules, ("eth1", 10_000), start)
                .is_err()
        );
    }
}
