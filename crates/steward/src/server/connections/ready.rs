//! The descriptors that a round of the server polls.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::server::connections::connection::Connection;
use crate::server::journal::restore::ORPHANS_LOOK;
use crate::server::{LOOKS, Server};
use program::backoff::RETRY;

/// Descriptors that are polled before those of connections.
const OF_THE_SERVER: usize = 5;

/// The descriptors that are ready.
#[derive(Default)]
pub(crate) struct Ready {
    pub(crate) end: bool,
    pub(crate) accept: bool,
    pub(crate) changes: bool,
    pub(crate) fdb: bool,
    pub(crate) reload: bool,
    /// Connections with something to do, or gone, by number.
    pub(crate) connections: BTreeMap<u64, PollFlags>,
}

impl Server {
    /// Waits until there is something to do: at a time that something falls due, or because somebody is ready.
    pub(crate) fn wait(&mut self, end: BorrowedFd<'_>, look_at: Option<Instant>) -> io::Result<Ready> {
        let now = Instant::now();
        let accepts = self.accepting.is_due(now);
        self.looks.refill(LOOKS, now);
        let mut wake = self.next_due(now, look_at);
        let mut interests = Vec::new();
        for connection in self.connections.values_mut() {
            let interest = connection.interest(now);
            wake = [wake, interest.wake].into_iter().flatten().min();
            interests.push(interest.events);
        }
        let mut fds = self.polled(end, (accepts, self.watches_bridges(now)), &interests);
        let timeout = wake.and_then(|at| Timespec::try_from(at.saturating_duration_since(now)).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => Ok(self.ready(&fds)),
            Err(Errno::INTR) => Ok(Ready::default()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// When the next timer is due, apart from timers of connections.
    fn next_due(&self, now: Instant, look_at: Option<Instant>) -> Option<Instant> {
        let orphans = (!self.orphans.is_empty()).then(|| now + ORPHANS_LOOK);
        let idle = self
            .interfaces
            .values()
            .filter_map(|interface| interface.idle_since);
        let lingering = idle.map(|since| since + self.linger).filter(|&at| at > now);
        let pause = self.accepting.due().filter(|&until| until > now);
        let next_look = (self.looks.left == 0).then(|| now + LOOKS.each);
        let is_late = self.connections.values().any(Connection::is_busy) || !self.unclosed.is_empty();
        let late = is_late.then(|| now + RETRY);
        let tap_programs = (!self.network_taps.is_empty()).then_some(self.tap_programs_due);
        let fdb_pause = (self.fdb_pause > now || self.has_stale_bridges()).then_some(self.fdb_pause);
        [
            look_at,
            next_look,
            pause,
            fdb_pause,
            tap_programs,
            orphans,
            lingering.min(),
            late,
            self.next_idle(),
            self.part_due(now),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Descriptors to poll: the five that [`OF_THE_SERVER`] counts, connections with their `interests`, and processes.
    fn polled<'a>(
        &'a self,
        end: BorrowedFd<'a>,
        (accepts, watches_bridges): (bool, bool),
        interests: &[PollFlags],
    ) -> Vec<PollFd<'a>> {
        let if_so = |is_so: bool| if is_so { PollFlags::IN } else { PollFlags::empty() };
        let of_the_server: [_; OF_THE_SERVER] = [
            PollFd::from_borrowed_fd(end, PollFlags::IN),
            PollFd::new(&self.listener, if_so(accepts)),
            PollFd::new(&self.changes, if_so(self.looks.left > 0)),
            match &self.reload {
                Some(reload) => PollFd::new(&reload.asked, PollFlags::IN),
                None => PollFd::from_borrowed_fd(end, PollFlags::IN),
            },
            PollFd::new(&self.fdb_changes, if_so(watches_bridges)),
        ];
        let mut fds = Vec::from(of_the_server);
        let connections = self.connections.values().zip(interests);
        fds.extend(connections.map(|(connection, &events)| PollFd::new(connection, events)));
        let jobs = self.jobs().map(|(_, _, pending)| &pending.job);
        fds.extend(jobs.map(|job| PollFd::new(job, PollFlags::IN)));
        let closing = self.closing.iter().map(|closing| &closing.child);
        let children = closing.chain(self.removals.children());
        fds.extend(children.map(|child| PollFd::new(child, PollFlags::IN)));
        fds
    }

    /// Those that are ready, of all that were [polled](Self::polled).
    fn ready(&self, fds: &[PollFd<'_>]) -> Ready {
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let numbers = self.connections.keys().copied();
        let events = fds[OF_THE_SERVER..].iter().map(PollFd::revents);
        Ready {
            end: is_ready(&fds[0]),
            accept: is_ready(&fds[1]),
            changes: is_ready(&fds[2]),
            reload: self.reload.is_some() && is_ready(&fds[3]),
            fdb: is_ready(&fds[4]),
            connections: numbers
                .zip(events)
                .filter(|(_, events)| !events.is_empty())
                .collect(),
        }
    }
}
