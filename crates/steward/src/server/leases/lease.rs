//! Grants leases: checks the whole request, attaches the program, then reserves all queues or none. Lists leases.

use std::sync::Arc;
use std::time::Instant;

use crate::server::connections::connection::{Held, lessees};
use crate::server::connections::limits::DeviceChange;
use crate::server::interface::{self, Interface, LeaseHints};
use crate::server::journal::file::may_crash;
use crate::server::leases::entries::Entries;
use crate::server::leases::rings::RingOf;
use crate::server::{Answered, Server};
use steer::{ModeRequest, MulticastRing, with_sources};

use host::links::Link;
use program::peer::Credentials;
use steward_protocol::{Answer, Facts, Listed, Reason, Refusal, Wanted};

/// A lease: of a connection, or one whose lessee has not come back yet.
#[derive(Clone, Copy)]
pub(crate) struct LeaseRef<'a> {
    pub(crate) number: u64,
    pub(crate) peer: &'a Credentials,
    pub(crate) held: &'a Held,
}

/// Refuses a netkit without a peer: it accepts the program, in skb mode, but the program never sees a frame.
fn check_programs_run_on(link: &Link) -> Result<(), Refusal> {
    if !link.has_leased_only {
        return Ok(());
    }
    let name = &link.name;
    Reason::Program.refuse(format!(
        "{name} is a netkit without a peer: frames come by the queue of a NIC that is leased to it, which only a \
         program on that NIC sees: have that one use a socket map, and give the map with inhibit and map-path, and \
         the leased queue's number with start-queue"
    ))
}

impl Server {
    /// Handles a request for a lease.
    pub(crate) fn lease(&mut self, number: u64, wanted: &Wanted) -> Answered {
        self.end_orphans(Instant::now());
        let peer = self.newcomer(number)?;
        self.end_given_up(&peer, wanted);
        let rule = self.policy.find(&peer, wanted, |rule| self.leased(rule))?;
        let link = Link::by_name(&wanted.interface)
            .map_err(|error| Reason::NoInterface.because(with_sources(&error)))?;
        if let Some(part) = &self.part {
            part.check_program(&link)?;
        }
        check_programs_run_on(&link)?;
        let hint_request = self.connections.get(&number).and_then(|asker| asker.hint_request);
        let hint_request = hint_request.unwrap_or_default();
        let hints = self.hints_under(rule, hint_request);
        let at = self.interface_for(link, wanted, &peer, hints)?;
        let gone = || Reason::NoInterface.because("the interface is gone");
        let interface = self.interfaces.get(&at).ok_or_else(gone)?;
        let mode = Interface::mode_of(interface.mode(), &interface.link, wanted.mode);
        let (asked, wanted) = (wanted.mode, &wanted.in_mode(mode));
        match self.give(at, number, wanted, (rule, hints)) {
            Ok(()) => {
                if let Some(interface) = self.interfaces.get_mut(&at) {
                    interface.note_mode(asked);
                }
                let held = Held {
                    interface: at,
                    wanted: wanted.clone(),
                    rule,
                    hint_request,
                };
                may_crash("leased");
                let facts = self.note_lease(number, held, "leased")?;
                Ok(Answer::Facts(facts).into())
            }
            Err(refusal) => {
                self.forget_if_idle(at);
                Err(refusal)
            }
        }
    }

    /// The peer of a connection, which must not have a lease yet.
    ///
    /// # Errors
    /// It has one.
    pub fn newcomer(&self, number: u64) -> Result<Arc<Credentials>, Refusal> {
        let refused = |text| Reason::Lease.refuse(text);
        match self.connections.get(&number) {
            None => refused("this connection is over"),
            Some(connection) if connection.has_lease() => {
                refused("this connection has a lease: connect once more for another")
            }
            Some(connection) => Ok(Arc::clone(&connection.peer)),
        }
    }

    /// The number of the interface with the program. The program is attached if nothing else prevents the lease and the
    /// user has not caused that too often.
    fn interface_for(
        &mut self,
        link: Link,
        wanted: &Wanted,
        peer: &Credentials,
        hints: LeaseHints,
    ) -> Result<u64, Refusal> {
        let find =
            |is: &dyn Fn(&Interface) -> bool| self.interfaces.iter().find(|(_, interface)| is(interface));
        let known = find(&|interface| interface.link.index == link.index)
            .or_else(|| find(&|interface| interface.was(&link.name)));
        let attached = known.and_then(|(_, interface)| interface.mode());
        let mode = Interface::mode_of(attached, &link, wanted.mode);
        interface::check(&link, &wanted.in_mode(mode), hints)?;
        let known = known.map(|(&at, interface)| (at, interface.is_idle(), interface.suits(wanted.mode)));
        if let Some((at, _, true)) = known {
            return Ok(at);
        }
        let (now, name) = (Instant::now(), link.name.clone());
        let (change, account) = (DeviceChange::Program, (name.as_str(), peer.uid));
        if let Some((at, false, _)) = known {
            let interface = self.interfaces.get(&at);
            if interface.is_some_and(|interface| interface.may_leave_tap_mode(mode))
                && self.has_all_of(at, peer)
                && self.device_changes.check(change, account, now).is_ok()
            {
                let is_left = self.leave_tap_mode(at, mode);
                self.device_changes.note(change, account, now, is_left);
            }
            return Ok(at);
        }
        self.device_changes.check(change, account, now)?;
        // The program is attached in another mode, for leases that have ended.
        if let Some((at, ..)) = known
            && !self.forget(at)
        {
            return Reason::Program.refuse(format!(
                "the program of other leases cannot be taken off {name} yet: try again"
            ));
        }
        let at = self.next;
        self.next += 1;
        let netkits = self.netkits;
        let places = self.store.as_ref().map(|store| (store.places_of(at), netkits));
        if let Some(part) = &mut self.part {
            part.make_room(&link);
        }
        let opened = Interface::open(link, wanted.mode, places);
        self.device_changes.note(change, account, now, opened.is_ok());
        self.interfaces.insert(at, opened?);
        Ok(at)
    }

    /// Whether this user has all leases of an interface, or is root. Leaving tap mode costs guests the frames of queues
    /// that are not leased; no other user may cause that.
    fn has_all_of(&self, at: u64, peer: &Credentials) -> bool {
        let mut others = self.all_leases().filter(|lease| lease.held.interface == at);
        peer.uid == 0 || others.all(|lease| lease.peer.uid == peer.uid)
    }

    /// Tries to continue all leases of an interface in `mode` instead of tap mode. Returns whether tap mode was left.
    fn leave_tap_mode(&mut self, at: u64, mode: ModeRequest) -> bool {
        let Some(interface) = self.interfaces.get_mut(&at) else {
            return false;
        };
        let before = interface.facts();
        interface.leave_tap_mode(mode);
        let (is_left, is_other) = (!interface.is_by_tap(), interface.facts() != before);
        if is_other {
            self.end_taps_without_tap_mode();
            let theirs = lessees(&mut self.connections, |held| held.interface == at);
            theirs.for_each(|lessee| lessee.dirty = true);
        }
        is_left
    }

    /// The lease with the lowest number above `after`, among those that the connection's user may see.
    pub(crate) fn next_lease(&self, number: u64, after: u64) -> Answer {
        let asker = self.peer(number).map(|asker| asker.uid);
        let leases = self
            .all_leases()
            .map(|lease| (lease.number, lease.peer, Some(lease.held)));
        let by_part = self
            .connections
            .iter()
            .filter(|(_, other)| other.by_part.is_some());
        let by_part = by_part.map(|(&number, other)| (number, &*other.peer, None));
        let next = leases
            .chain(by_part)
            .filter(|&(number, peer, _)| number > after && (asker == Some(0) || asker == Some(peer.uid)))
            .min_by_key(|&(number, ..)| number);
        let listed = next.and_then(|(number, peer, held)| {
            Some(Listed {
                number,
                namespace: self.namespace,
                pid: peer.pid.try_into().unwrap_or(0),
                uid: peer.uid,
                orphaned: self.orphans.contains_key(&number),
                ..match held {
                    Some(held) => self.listed(held)?,
                    None => self.part.as_ref()?.listed(number)?,
                }
            })
        });
        listed.map_or(Answer::Done, Answer::Lease)
    }

    fn listed(&self, held: &Held) -> Option<Listed> {
        let interface = self.interfaces.get(&held.interface)?;
        let facts = interface.facts_for(&held.wanted.range());
        Some(Listed {
            interface: facts.name,
            start_queue: held.wanted.start_queue,
            queues: held.wanted.queues,
            filter: held.wanted.filter.clone(),
            steered: facts.steered,
            impaired: facts.impaired,
            ..Listed::default()
        })
    }

    /// All leases, including those whose lessees have not come back yet.
    pub(crate) fn all_leases(&self) -> impl Iterator<Item = LeaseRef<'_>> {
        let connected = self.connections.iter().filter_map(|(&number, other)| {
            Some(LeaseRef {
                number,
                peer: &other.peer,
                held: other.held.as_ref()?,
            })
        });
        let orphaned = self.orphans.iter().map(|(&number, orphan)| LeaseRef {
            number,
            peer: &orphan.peer,
            held: &orphan.held,
        });
        connected.chain(orphaned)
    }

    /// Reserves queues; all or nothing.
    fn give(
        &mut self,
        at: u64,
        number: u64,
        wanted: &Wanted,
        (rule, hints): (usize, LeaseHints),
    ) -> Result<(), Refusal> {
        let gone = || Reason::NoInterface.because("the interface is gone");
        let peer = &self.connections.get(&number).ok_or_else(gone)?.peer;
        let names = self.policy.rule(rule).names.clone();
        let uid = peer.uid;
        let tells_nic = Entries::new(wanted.range(), wanted.filter.clone(), names.clone()).may_steer();
        if tells_nic {
            self.take_units(DeviceChange::NicRules, &wanted.interface, uid)?;
        }
        let of = (wanted.interface.clone(), uid, wanted.start_queue);
        let ring = match wanted.network {
            true => Some(self.ring_for(at, &of, rule)?),
            false => None,
        };
        let interface = self.interfaces.get_mut(&at).ok_or_else(gone)?;
        interface.reserve(wanted, number, names, (ring, hints))
    }

    /// The multicast ring for a network's lease.
    fn ring_for(&mut self, at: u64, of: &RingOf, rule: usize) -> Result<MulticastRing, Refusal> {
        let (name, _, first) = of;
        // An interface that was leased by this name and renamed since still uses the ring.
        let is_used = |(&other, interface): (&u64, &Interface)| {
            other != at && interface.name() == name && interface.ring(*first).is_some()
        };
        let is_used = self.interfaces.iter().any(is_used);
        self.rings.take(of, is_used, rule)
    }

    /// Stores a lease with its connection. Returns the facts for the lessee.
    pub(crate) fn note_lease(&mut self, number: u64, held: Held, what: &str) -> Result<Facts, Refusal> {
        let gone = || Reason::Lease.because("this connection or its interface is gone");
        let (at, rule, queues) = (held.interface, held.rule, held.wanted.range());
        let connection = self.connections.get_mut(&number).ok_or_else(gone)?;
        let (pid, uid) = (connection.peer.pid, connection.peer.uid);
        connection.hold(held);
        self.charge(number, rule);
        let facts = self.interfaces.get(&at).ok_or_else(gone)?.facts_for(&queues);
        if self.leases.may_log(uid) {
            let (steered, why) = (facts.steered.name(), &facts.steering);
            tracing::info!(
                pid,
                uid,
                interface = facts.name,
                ?queues,
                rule = rule + 1,
                steered,
                why,
                "{what}"
            );
        }
        Ok(facts)
    }

    /// The number of queues that are leased under a rule.
    #[must_use]
    pub fn leased(&self, rule: usize) -> u32 {
        let of_rule = self.all_leases().filter(|lease| lease.held.rule == rule);
        let queues = of_rule.map(|lease| lease.held.wanted.queues);
        let connections = self.connections.values();
        let by_part = connections.filter(|other| other.by_part == Some(rule)).map(|_| 1);
        let ended = self.part.as_ref().map(|part| part.charged(rule));
        queues.chain(by_part).chain(ended).fold(0, u32::saturating_add)
    }
}
