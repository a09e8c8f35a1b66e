//! Turns completions into the events of a receiver.

use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use crate::connection::{ConnectionId, ListenerId, Receiving};
use crate::event::Event;
use crate::receiver::{MOST_BARREN, Receiver};
use crate::ring::{Completion, Kind};

impl Receiver {
    /// The next thing that happened; `None` when [`wait`](Self::wait) is due.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            let done = self.done.pop_front()?;
            let event = match done.tag.kind {
                Kind::Receive => self.received(&done),
                Kind::Send => self.sent(&done),
                Kind::Accept => self.accepted(&done),
                Kind::Bell => self.rung(),
                Kind::CancelReceive | Kind::CancelSend => self.cancelled(&done),
                Kind::CancelAccepts => self.accepts_cancelled(done.tag.slot),
            };
            if event.is_some() {
                return event;
            }
        }
    }

    fn received(&mut self, done: &Completion) -> Option<Event> {
        let slot = done.tag.slot;
        let (place, connection) = self.connections.at(slot)?;
        let from = ConnectionId(place);
        let block = match connection.receiving {
            Receiving::Armed(block) => block,
            _ => None,
        };
        if done.result <= 0 {
            self.supply.unused(done, block);
            return self.receive_ended(done);
        }
        connection.barren = 0;
        let closing = connection.closing;
        let piece = self.supply.piece(done, block);
        if !done.more {
            connection.receiving = Receiving::Idle;
            // A block is one receive; multishot receives end seldom.
            self.statistics.rearmed += u64::from(block.is_none());
            if let Err(error) = self.arm(slot) {
                return self.over(slot, Some(error));
            }
            self.free_if_over(slot);
        }
        // If the completion names no buffer of ours, there is nothing to read.
        let piece = piece?;
        self.statistics.pieces += 1;
        self.statistics.bytes += piece.len() as u64;
        (!closing).then_some(Event::Received { from, piece })
    }

    /// A receive that returned no bytes.
    fn receive_ended(&mut self, done: &Completion) -> Option<Event> {
        let slot = done.tag.slot;
        let nothing_out = self.supply.pool().out() == 0;
        let (_, connection) = self.connections.at(slot)?;
        if done.more {
            return None;
        }
        connection.receiving = Receiving::Idle;
        let error = (done.result < 0).then(|| io::Error::from_raw_os_error(-done.result));
        if connection.closing {
            self.free_if_over(slot);
            return None;
        }
        match -done.result {
            libc::ENOBUFS | libc::ENOMEM => {
                connection.barren = if nothing_out { connection.barren + 1 } else { 0 };
                if connection.barren > MOST_BARREN {
                    return self.over(slot, error);
                }
                connection.receiving = Receiving::Starved;
                self.starved.push_back(slot);
                self.statistics.ran_out += 1;
                None
            }
            libc::ENOSPC | libc::EAGAIN | libc::EINTR | libc::ECANCELED => {
                self.statistics.rearmed += u64::from(!connection.paused);
                match self.arm(slot) {
                    Ok(()) => None,
                    Err(error) => self.over(slot, Some(error)),
                }
            }
            _ => self.over(slot, error),
        }
    }

    fn over(&mut self, slot: u32, error: Option<io::Error>) -> Option<Event> {
        let (place, it) = self.connections.at(slot)?;
        let connection = ConnectionId(place);
        it.receiving = Receiving::Over;
        Some(Event::Ended { connection, error })
    }

    fn sent(&mut self, done: &Completion) -> Option<Event> {
        let slot = done.tag.slot;
        let (place, connection) = self.connections.at(slot)?;
        let to = ConnectionId(place);
        connection
            .outbox
            .complete(usize::try_from(done.result).unwrap_or(0));
        let again = matches!(-done.result, libc::EAGAIN | libc::EINTR);
        let (closing, aborted) = (connection.closing, connection.aborted);
        if aborted || (done.result <= 0 && !again) {
            connection.outbox.clear();
            self.free_if_over(slot);
            let error = io::Error::from_raw_os_error(match done.result {
                0.. => libc::EPIPE,
                error => -error,
            });
            return (!closing).then_some(Event::SendFailed { to, error });
        }
        if !connection.outbox.is_empty() {
            self.list_to_send(slot);
            return None;
        }
        self.free_if_over(slot);
        (!closing).then_some(Event::Sent { to })
    }

    fn accepted(&mut self, done: &Completion) -> Option<Event> {
        let socket = match done.result {
            descriptor @ 0.. => Ok(own(descriptor)),
            error => Err(io::Error::from_raw_os_error(-error)),
        };
        let (place, it) = self.listeners.at(done.tag.slot)?;
        let listener = ListenerId(place);
        it.accepts = it.accepts.saturating_sub(1);
        if it.stopping {
            // If the kernel takes no requests, the next `wait` says so.
            let _ = self.cancel_accepts(place.slot);
            let socket = socket.ok()?;
            return Some(Event::Accepted { listener, socket });
        }
        if it.failed {
            // The failure was reported; the caller decides when to accept again.
            let socket = socket.ok()?;
            return Some(Event::Accepted { listener, socket });
        }
        // Errors of the connection to be accepted (accept(2)), or transient ones.
        let passes = matches!(
            -done.result,
            libc::ECONNABORTED
                | libc::EPROTO
                | libc::ENETDOWN
                | libc::EHOSTUNREACH
                | libc::EAGAIN
                | libc::EINTR
        );
        if socket.is_err() && !passes {
            it.failed = true;
            let error = socket.err()?;
            return Some(Event::AcceptFailed { listener, error });
        }
        if let Err(error) = self.listen_again(listener) {
            return Some(Event::AcceptFailed { listener, error });
        }
        let socket = socket.ok()?;
        Some(Event::Accepted { listener, socket })
    }

    /// Accepts that the cancellation did not find have ended, or still run and are cancelled again.
    fn accepts_cancelled(&mut self, slot: u32) -> Option<Event> {
        let (_, it) = self.listeners.at(slot)?;
        it.cancels = false;
        // If the kernel takes no requests, the next `wait` says so.
        let _ = self.cancel_accepts(slot);
        None
    }

    /// A cancellation found nothing: the request has ended, or still runs and is cancelled again.
    fn cancelled(&mut self, done: &Completion) -> Option<Event> {
        let slot = done.tag.slot;
        let (_, it) = self.connections.at(slot).filter(|_| done.result < 0)?;
        let (receives, sends) = (
            matches!(it.receiving, Receiving::Armed(_)),
            it.outbox.is_under_way(),
        );
        // If the kernel takes no requests, the next `wait` says so.
        let _ = match done.tag.kind {
            Kind::CancelReceive if receives && (it.closing || it.paused) => self.ring.cancel_receive(slot),
            Kind::CancelSend if sends && it.aborted => self.ring.cancel_send(slot),
            _ => Ok(()),
        };
        None
    }

    /// Drops all completions when the receiver ends: closes descriptors, and returns buffers for other receivers of
    /// the same queue.
    pub(crate) fn give_up_completed(&mut self) {
        loop {
            let done = &mut self.done;
            self.ring.completed(|completion| done.push_back(completion));
            if done.is_empty() {
                return;
            }
            while let Some(done) = self.done.pop_front() {
                match done.tag.kind {
                    Kind::Accept if done.result >= 0 => drop(own(done.result)),
                    // No other receiver uses blocks.
                    Kind::Receive if done.result > 0 => drop(self.supply.piece(&done, None)),
                    _ => {}
                }
            }
            // There may be more than the queue has room for, and a receive that was not found.
            self.ring.cancel_all();
        }
    }

    /// The bell woke the receiver: watch it again.
    fn rung(&mut self) -> Option<Event> {
        self.bell.silence();
        // If the kernel takes no requests, the next `wait` says so.
        let _ = self.ring.watch(self.bell.as_fd());
        None
    }
}

#[allow(unsafe_code)]
fn own(descriptor: i32) -> OwnedFd {
    // SAFETY: an accept just made the descriptor, and its completion is read once.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::config::{Config, Memory, Request, Source};
    use crate::ring::Tag;

    #[test]
    fn a_cancellation_that_found_nothing_is_made_again() {
        let config = Config {
            request: Request::ForceCopy,
            memory: Memory::Own { bytes: 1 << 16 },
            copy_buffer_bytes: 4096,
            ..Config::new(Source::NoDevice)
        };
        let mut receiver = Receiver::open(&config).unwrap();
        let (ours, _never_reads) = UnixStream::pair().unwrap();
        let connection = receiver.add(ours).unwrap();
        // More than a socket takes.
        assert!(receiver.send(connection, vec![0; 64 << 20]));
        receiver.wait(Some(Duration::ZERO)).unwrap();
        let it = receiver.connections.get_mut(connection.0).unwrap();
        assert!(it.outbox.is_under_way() && it.receiving == Receiving::Armed(None));
        (it.closing, it.aborted) = (true, true);
        for kind in [Kind::CancelReceive, Kind::CancelSend] {
            receiver.done.push_back(Completion {
                tag: Tag {
                    kind,
                    slot: connection.0.slot,
                },
                result: -libc::ENOENT,
                more: false,
                buffer: None,
                offset: 0,
            });
        }
        let started = Instant::now();
        while !matches!(receiver.next_event(), Some(Event::Closed { .. })) {
            assert!(started.elapsed() < Duration::from_secs(60));
            receiver.wait(Some(Duration::from_millis(100))).unwrap();
        }
        assert_eq!(receiver.connections(), 0);
    }
}
