//! The server by io_uring: by zero-copy receive, or by multishot receives into buffers of a provided-buffer ring.
//!
//! Messages are not copied here, except as described below: the reply consists of the pieces that the kernel filled,
//! whose buffers are returned when they are sent. One call waits for all connections, and submits the replies of the
//! last round, too: under load one system call moves several messages.
//!
//! # Memory
//! A message that arrives in many small pieces would hold a buffer for each. So a connection holds at most
//! [`Held::pieces`]; more are copied into a buffer of the connection, and these bytes are counted. So incomplete
//! messages never use up the buffers, however slowly they arrive.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::Context as _;
use rustix::net::sockopt;
use steward_client::QueueLease;
use zcrx::{Config, ConnectionId, Event, ListenerId, Memory, Mode, Piece, Receiver, Request};

use super::args::{Engine, Unavailable};
use super::message::{self, Begun, HEADER, LONGEST};
use super::server::{Over, PATIENCE, Received, Served, Serving};

/// Longest sleep, after which the flag to stop is checked.
const SLEEP: Duration = Duration::from_millis(50);

/// What a connection may hold, and how large the buffers are.
#[derive(Debug, Clone, Copy)]
struct Held {
    pieces: usize,
    buffer_bytes: usize,
}

impl Held {
    /// Buffers for a whole message: it arrives in one piece, mostly, and in two now and then.
    const COPY: Self = Self {
        pieces: 2,
        buffer_bytes: LONGEST,
    };
    /// Buffers of a page, each of which has a segment's payload.
    const ZERO_COPY: Self = Self {
        pieces: 64,
        buffer_bytes: 4096,
    };

    /// Memory for so many connections, in bytes, with half as much again for what is under way.
    fn memory_bytes(self, connections: usize) -> usize {
        (self.pieces + self.pieces / 2) * self.buffer_bytes * connections.max(8)
    }
}

/// One connection.
#[derive(Debug)]
struct Connection {
    /// Pieces of the message that is being received.
    pieces: Vec<Piece>,
    /// Its beginning, copied, if it arrived in too many pieces.
    gathered: Vec<u8>,
    filled: usize,
    /// Length of the message, once it is known.
    length: Option<usize>,
    /// Bytes of the reply that is under way, and its pieces.
    replying: Option<(usize, usize)>,
    /// The second in which the last message was finished.
    since: u64,
    /// It is being closed; later pieces are ignored.
    leaving: bool,
}

struct Server<'a> {
    serving: &'a Serving<'a>,
    receiver: Receiver,
    lease: Option<QueueLease>,
    connections: HashMap<ConnectionId, Connection>,
    held: Held,
    served: Served,
    gathered_bytes: u64,
    /// A listener that failed to accept, to be retried in a second.
    deaf: Option<ListenerId>,
}

/// Serves until the meter says stop.
/// Errors: [`Unavailable`] if there is no such ring, or no zero-copy; waiting fails, or the lease ends.
pub(super) fn run(serving: &Serving<'_>, engine: Engine) -> anyhow::Result<Served> {
    let held = match engine {
        Engine::Zcrx => Held::ZERO_COPY,
        Engine::Epoll | Engine::IoUring => Held::COPY,
    };
    let mut config = Config::new(serving.source);
    config.request = match engine {
        Engine::Zcrx => Request::ForceZcrx,
        Engine::Epoll | Engine::IoUring => Request::ForceCopy,
    };
    config.copy_buffer_bytes = LONGEST as u32;
    config.memory = Memory::Own {
        bytes: held.memory_bytes(serving.connections),
    };
    let (receiver, lease) =
        open(serving, engine, &config).map_err(|error| Unavailable::new(engine, &error))?;
    let mut server = Server {
        serving,
        receiver,
        lease,
        connections: HashMap::with_capacity(serving.connections),
        held,
        served: Served::default(),
        gathered_bytes: 0,
        deaf: None,
    };
    let listener = serving.listener.try_clone().context("cannot listen")?;
    server.receiver.listen(listener).context("cannot listen")?;
    serving.counts.serve_here();
    server.serve()?;
    Ok(server.finish())
}

/// The receiver, and the lease of its queue where it has one.
fn open(
    serving: &Serving<'_>,
    engine: Engine,
    config: &Config,
) -> anyhow::Result<(Receiver, Option<QueueLease>)> {
    let Some(request) = serving.lease.filter(|_| engine == Engine::Zcrx) else {
        return Ok((Receiver::open(config)?, None));
    };
    let address = serving
        .listener
        .local_addr()
        .context("cannot ask for the address")?;
    let (receiver, lease) = request.take(address, config)?;
    Ok((receiver, Some(lease)))
}

impl Server<'_> {
    fn serve(&mut self) -> anyhow::Result<()> {
        let mut second = 0;
        while !self.serving.meter.is_stopped() {
            self.receiver
                .wait(Some(SLEEP))
                .context("cannot wait for connections")?;
            while let Some(event) = self.receiver.next_event() {
                self.handle(event);
            }
            self.serving
                .counts
                .show(0, self.served.messages, self.served.bytes);
            let now = self.serving.counts.seconds();
            if now != second {
                second = now;
                self.sweep(now);
                if let Some(lease) = &mut self.lease {
                    lease
                        .check()
                        .context("the steward ended the lease of the queue")?;
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn handle(&mut self, event: Event) {
        match event {
            Event::Received { from, piece } => self.take(from, piece),
            Event::Sent { to } => self.sent(to),
            Event::Accepted { socket, .. } => self.accept(socket),
            Event::AcceptFailed { listener, .. } => {
                self.served.refused += 1;
                self.deaf = Some(listener);
            }
            Event::Ended { connection, error } => {
                let between = self
                    .connections
                    .get(&connection)
                    .is_some_and(Connection::is_between);
                let over = if error.is_none() && between {
                    Over::Ended
                } else {
                    Over::Cut
                };
                self.end(connection, over);
            }
            Event::SendFailed { to, .. } => self.end(to, Over::Cut),
            Event::Closed { connection } => _ = self.connections.remove(&connection),
            // `Event` is non-exhaustive; the server needs no other events.
            _ => {}
        }
    }

    #[cold]
    fn accept(&mut self, socket: OwnedFd) {
        if self.connections.len() >= self.serving.connections {
            self.served.refused += 1;
            return;
        }
        // Replies are sent whole: nothing is to be waited for.
        let _ = sockopt::set_tcp_nodelay(&socket, true);
        let Ok(id) = self.receiver.add(socket) else {
            self.served.refused += 1;
            return;
        };
        self.served.accepted += 1;
        self.connections
            .insert(id, Connection::new(self.serving.counts.seconds()));
    }

    /// Takes a received piece, and sends the message back when it is complete.
    #[inline]
    fn take(&mut self, from: ConnectionId, piece: Piece) {
        let Some(connection) = self.connections.get_mut(&from).filter(|it| !it.leaving) else {
            return;
        };
        match connection.take(piece, self.held.pieces, &mut self.gathered_bytes) {
            Ok(true) if connection.replying.is_none() => self.reply(from),
            // The reply to the last one is under way still.
            Ok(_) => {}
            Err(over) => self.end(from, over),
        }
    }

    #[inline]
    fn reply(&mut self, to: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&to) else {
            return;
        };
        connection.replying = Some((connection.filled, connection.pieces.len()));
        (connection.filled, connection.length) = (0, None);
        if !connection.gathered.is_empty() {
            self.receiver.send(to, std::mem::take(&mut connection.gathered));
        }
        for piece in connection.pieces.drain(..) {
            self.receiver.send(to, piece);
        }
    }

    #[inline]
    fn sent(&mut self, to: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&to) else {
            return;
        };
        let Some((bytes, _)) = connection.replying.take() else {
            return;
        };
        self.served.messages += 1;
        self.served.bytes += bytes as u64;
        connection.since = self.serving.counts.seconds();
        if connection.is_whole() {
            self.reply(to);
        }
    }

    #[cold]
    fn end(&mut self, id: ConnectionId, over: Over) {
        let Some(connection) = self.connections.get_mut(&id).filter(|it| !it.leaving) else {
            return;
        };
        // Its buffers are returned at once; its place is freed at `Event::Closed`.
        connection.leaving = true;
        connection.pieces.clear();
        connection.gathered = Vec::new();
        self.served.count_over(over);
        if self.receiver.abort(id).is_err() {
            // The receiver does not have this connection.
            self.connections.remove(&id);
        }
    }

    /// Ends connections that did nothing for too long.
    #[cold]
    fn sweep(&mut self, now: u64) {
        let stalled = |it: &Connection| !it.leaving && now.saturating_sub(it.since) > PATIENCE;
        let these = self.connections.iter().filter(|(_, it)| stalled(it));
        let these: Vec<_> = these.map(|(id, _)| *id).collect();
        for id in these {
            self.end(id, Over::Stalled);
        }
        let deaf = self.deaf.take();
        self.deaf = deaf.filter(|&listener| self.receiver.listen_again(listener).is_err());
    }

    fn finish(mut self) -> Served {
        let statistics = self.receiver.statistics();
        let copied = statistics.kernel_copies;
        let share = |copied: u64| 1.0 - copied as f64 / statistics.bytes.max(1) as f64;
        self.served.received = Some(Received {
            mode: self.receiver.mode().to_string(),
            zero_copy_share: match self.receiver.mode() {
                Mode::Zcrx => copied.map(|(_, bytes)| share(bytes).max(0.0)),
                Mode::ZcrxNoDevice | Mode::Copy | Mode::Blocks => Some(0.0),
            },
            pieces: statistics.pieces,
            kernel_copies: copied.map(|(count, _)| count),
            kernel_copied_bytes: copied.map(|(_, bytes)| bytes),
            gathered_bytes: self.gathered_bytes,
            ran_out: statistics.ran_out,
        });
        self.served
    }
}

impl Connection {
    fn new(now: u64) -> Self {
        Self {
            pieces: Vec::new(),
            gathered: Vec::new(),
            filled: 0,
            length: None,
            replying: None,
            since: now,
            leaving: false,
        }
    }

    /// Nothing of a message is here, and no reply is under way.
    fn is_between(&self) -> bool {
        self.filled == 0 && self.replying.is_none()
    }

    fn is_whole(&self) -> bool {
        self.length == Some(self.filled)
    }

    /// Adds a piece to the message; returns if it is complete. `most` pieces may be held, those of the reply included.
    #[inline]
    fn take(&mut self, piece: Piece, most: usize, gathered_bytes: &mut u64) -> Result<bool, Over> {
        // A complete message waits for the last reply to be sent: the client must not send more.
        if self.is_whole() {
            return Err(Over::Malformed);
        }
        self.filled += piece.len();
        let held = self.pieces.len() + self.replying.map_or(0, |(_, pieces)| pieces);
        self.pieces.push(piece);
        if self.length.is_none() {
            let mut head = [0; HEADER];
            let count = self.head(&mut head);
            let come = head.get(..count).unwrap_or_default();
            self.length = match message::begun(come) {
                Begun::Length(length) => Some(length),
                Begun::Unknown => None,
                Begun::Garbage => return Err(Over::Malformed),
            };
        }
        if self.length.is_some_and(|length| self.filled > length) {
            // The client sent its next message before it had the reply to this one.
            return Err(Over::Malformed);
        }
        let whole = self.is_whole();
        if (!whole && held >= most) || !self.gathered.is_empty() {
            *gathered_bytes += self.gather();
        }
        Ok(whole)
    }

    /// Copies the first bytes of the message; returns how many.
    fn head(&self, into: &mut [u8; HEADER]) -> usize {
        let pieces = self.pieces.iter().map(|piece| &piece[..]);
        let bytes = std::iter::once(&self.gathered[..]).chain(pieces).flatten();
        into.iter_mut().zip(bytes).map(|(to, from)| *to = *from).count()
    }

    /// Copies the pieces into one buffer, at most a message, and frees them. Returns how many bytes.
    #[cold]
    fn gather(&mut self) -> u64 {
        let before = self.gathered.len();
        for piece in self.pieces.drain(..) {
            self.gathered.extend_from_slice(&piece);
        }
        (self.gathered.len() - before) as u64
    }
}
