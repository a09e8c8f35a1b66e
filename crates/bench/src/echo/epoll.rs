//! The server by epoll: level-triggered readiness, then read and write without blocking.
//!
//! A connection waits for readiness to read until a message is complete. Then it writes at once, without waiting for
//! readiness, and waits only if the socket does not accept all. So a message costs a share of an `epoll_wait` for
//! several connections, one read for each piece, and one write.

use std::collections::HashMap;
use std::mem::MaybeUninit;

use anyhow::Context as _;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fd::{AsRawFd as _, OwnedFd};
use rustix::io::{Errno, read};
use rustix::net::{SendFlags, send};

use super::message::{self, Begun, HEADER, LONGEST};
use super::server::{Over, PATIENCE, Served, Serving};

/// Longest sleep, after which the flag to stop is checked.
const SLEEP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};
/// Events taken at a time.
const EVENTS: usize = 64;
/// epoll data of the listener.
const LISTENER: u64 = u64::MAX;

/// One connection. Its buffer holds the received message, which is then sent back from there.
#[derive(Debug)]
struct Connection {
    stream: OwnedFd,
    buffer: Box<[u8]>,
    filled: usize,
    /// Length of the message, once it is known.
    length: Option<usize>,
    sent: usize,
    /// Waits for readiness to write.
    blocked: bool,
    /// The second in which the last message was finished.
    since: u64,
}

/// What a connection did.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Nothing to report.
    Waits,
    /// It sent a message of so many bytes back.
    Replied(usize),
    Over(Over),
}

#[derive(Debug)]
struct Server<'a> {
    serving: &'a Serving<'a>,
    epoll: OwnedFd,
    /// By their epoll data ([`number_of`]).
    connections: HashMap<u64, Connection>,
    served: Served,
    /// Whether the listener is in the epoll set.
    listens: bool,
}

/// Serves until the meter says stop.
/// Errors: epoll failed.
pub(super) fn run(serving: &Serving<'_>) -> anyhow::Result<Served> {
    let mut server = Server {
        serving,
        epoll: epoll::create(CreateFlags::CLOEXEC).context("cannot make an epoll descriptor")?,
        connections: HashMap::with_capacity(serving.connections),
        served: Served::default(),
        listens: false,
    };
    server.listen()?;
    serving.counts.serve_here();
    let (mut events, mut second) = ([MaybeUninit::<Event>::uninit(); EVENTS], 0);
    while !serving.meter.is_stopped() {
        match epoll::wait(&server.epoll, &mut events, Some(&SLEEP)) {
            Ok((events, _)) => events.iter().for_each(|event| server.handle(event.data.u64())),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for connections"),
        }
        serving
            .counts
            .show(0, server.served.messages, server.served.bytes);
        let now = serving.counts.seconds();
        if now != second {
            second = now;
            server.sweep(now);
            server.listen()?;
        }
    }
    Ok(server.served)
}

impl Server<'_> {
    /// Adds the listener to the epoll set, if it is not there.
    fn listen(&mut self) -> anyhow::Result<()> {
        if !self.listens {
            let data = EventData::new_u64(LISTENER);
            epoll::add(&self.epoll, self.serving.listener, data, EventFlags::IN)
                .context("cannot wait for connections")?;
            self.listens = true;
        }
        Ok(())
    }

    fn handle(&mut self, of: u64) {
        if of == LISTENER {
            return self.accept();
        }
        let now = self.serving.counts.seconds();
        // An earlier event of the batch may have closed it.
        let Some(connection) = self.connections.get_mut(&of) else {
            return;
        };
        match connection.step(&self.epoll, now) {
            Step::Waits => {}
            Step::Replied(bytes) => {
                self.served.messages += 1;
                self.served.bytes += bytes as u64;
            }
            Step::Over(over) => self.close(of, over),
        }
    }

    #[cold]
    fn accept(&mut self) {
        let now = self.serving.counts.seconds();
        let (epoll, connections, most) = (&self.epoll, &mut self.connections, self.serving.connections);
        let may_go_on = self.serving.accept(&mut self.served, |stream| {
            let id = number_of(&stream);
            let data = EventData::new_u64(id);
            if connections.len() >= most || epoll::add(epoll, &stream, data, EventFlags::IN).is_err() {
                return false;
            }
            connections.insert(id, Connection::new(stream, now));
            true
        });
        if !may_go_on {
            // `run` adds the listener again in a second.
            self.listens = epoll::delete(&self.epoll, self.serving.listener).is_err();
        }
    }

    #[cold]
    fn close(&mut self, id: u64, over: Over) {
        // Closing takes it out of the epoll set.
        if self.connections.remove(&id).is_some() {
            self.served.count_over(over);
        }
    }

    /// Ends connections that did nothing for too long.
    #[cold]
    fn sweep(&mut self, now: u64) {
        let before = self.connections.len();
        self.connections
            .retain(|_, it| now.saturating_sub(it.since) <= PATIENCE);
        self.served.stalled += (before - self.connections.len()) as u64;
    }
}

/// The number of its descriptor, which no other connection has.
fn number_of(stream: &OwnedFd) -> u64 {
    u64::from(stream.as_raw_fd().unsigned_abs())
}

impl Connection {
    fn new(stream: OwnedFd, now: u64) -> Self {
        Self {
            stream,
            buffer: vec![0; LONGEST].into_boxed_slice(),
            filled: 0,
            length: None,
            sent: 0,
            blocked: false,
            since: now,
        }
    }

    /// Reads once, or continues a write; writes a message back when it is complete.
    #[inline]
    fn step(&mut self, epoll: &OwnedFd, now: u64) -> Step {
        if !self.blocked {
            match self.read() {
                Ok(true) => {}
                Ok(false) => return Step::Waits,
                Err(over) => return Step::Over(over),
            }
        }
        let Some(length) = self.length else {
            return Step::Waits;
        };
        let blocked = match self.write(length) {
            Ok(whole) => !whole,
            Err(over) => return Step::Over(over),
        };
        if blocked != self.blocked {
            let flags = if blocked { EventFlags::OUT } else { EventFlags::IN };
            let data = EventData::new_u64(number_of(&self.stream));
            if epoll::modify(epoll, &self.stream, data, flags).is_err() {
                return Step::Over(Over::Cut);
            }
            self.blocked = blocked;
        }
        if blocked {
            return Step::Waits;
        }
        (self.filled, self.sent, self.length, self.since) = (0, 0, None, now);
        Step::Replied(length)
    }

    /// Reads; returns whether the message is complete.
    #[inline]
    fn read(&mut self) -> Result<bool, Over> {
        // Never beyond the message, once its length is known.
        let end = self.length.unwrap_or(self.buffer.len());
        let Some(room) = self.buffer.get_mut(self.filled..end) else {
            return Err(Over::Malformed);
        };
        match read(&self.stream, room) {
            Ok(0) if self.filled == 0 => return Err(Over::Ended),
            Ok(0) => return Err(Over::Cut),
            Ok(count) => self.filled += count,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(_) => return Err(Over::Cut),
        }
        if self.length.is_none() {
            let come = self.buffer.get(..self.filled.min(HEADER)).unwrap_or_default();
            self.length = match message::begun(come) {
                Begun::Length(length) => Some(length),
                Begun::Unknown => return Ok(false),
                Begun::Garbage => return Err(Over::Malformed),
            };
        }
        match self.length {
            // The client sent its next message before it had the reply to this one.
            Some(length) if self.filled > length => Err(Over::Malformed),
            length => Ok(length == Some(self.filled)),
        }
    }

    /// Writes the rest of the reply; returns whether all is written.
    #[inline]
    fn write(&mut self, length: usize) -> Result<bool, Over> {
        while self.sent < length {
            let rest = self.buffer.get(self.sent..length).unwrap_or_default();
            match send(&self.stream, rest, SendFlags::NOSIGNAL) {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(_) => return Err(Over::Cut),
            }
        }
        Ok(true)
    }
}
