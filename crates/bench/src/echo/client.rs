//! The client: threads that share connections, each with one message under way.
//!
//! The server is measured, so the client does little. Without `--verify` it sends each message from one memory file by
//! `sendfile`, and the kernel discards the replies (MSG_TRUNC): the client copies nothing. With `--verify` it generates
//! each message, and compares the reply.
//!
//! A latency is from before a message's first byte is sent until the last byte of the reply is there.

use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hdrhistogram::Histogram;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::fs::{MemfdFlags, memfd_create, sendfile};
use rustix::io::{Errno, write};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::args::{Plan, Role};
use super::counts::Counts;
use super::message;
use crate::meter::Meter;

/// How long a server may take to accept a connection, and to send a message back.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest sleep, after which the flag to stop is checked.
const SLEEP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};
/// Longest latency that the histogram distinguishes, in nanoseconds.
const LONGEST_NS: u64 = 60_000_000_000;
/// The error message for a connection that ends while messages are under way.
const ENDED: &str =
    "the server ended it: it has no place for more (its --connections), takes no such client, or ended";
/// Bytes discarded by one call.
const THROWN_AWAY: usize = message::LONGEST;

/// One of the client's threads.
#[derive(Debug)]
pub(super) struct Thread<'a> {
    pub(super) plan: &'a Plan,
    pub(super) counts: &'a Counts,
    pub(super) meter: &'a Meter,
    /// Its number, from 0.
    pub(super) number: usize,
    /// Where the server is: not the plan's, if that left the port to the kernel.
    pub(super) server: std::net::SocketAddr,
}

/// One connection. `sent` and `received` are bytes of the message under way.
#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    number: u32,
    sent: usize,
    received: usize,
    messages: u64,
    begun: Instant,
    /// With `--verify`: the message, and what was received of its reply.
    checked: Option<Box<Checked>>,
}

#[derive(Debug)]
struct Checked {
    sent: Vec<u8>,
    received: Vec<u8>,
}

/// What all connections of a thread use.
#[derive(Debug)]
struct Tools {
    size: usize,
    /// Holds one message.
    source: OwnedFd,
}

/// Histogram of latencies in nanoseconds.
pub(super) fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("constants that it takes")
}

impl Thread<'_> {
    /// Sends and receives until the meter says stop; returns latencies of what was measured.
    /// Errors: no server, or it ended a connection, or sent something else back.
    pub(super) fn run(&self) -> anyhow::Result<Histogram<u64>> {
        // Best effort: with one CPU all are on it.
        let _ = rustix::thread::sched_setaffinity(None, &self.plan.others);
        if let Some(netns) = &self.plan.netns {
            move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
                .context("--client-netns: cannot enter it, run as root")?;
        }
        let epoll = epoll::create(CreateFlags::CLOEXEC).context("cannot make an epoll descriptor")?;
        let tools = Tools::new(self.plan.args.size as usize)?;
        let mut connections = self.connect(&epoll)?;
        let mut latencies = latencies();
        match self.go_on(&epoll, &tools, &mut connections, &mut latencies) {
            // At a stop the server ends, too: a connection that it closed is no error.
            Err(_) if self.meter.is_stopped() => Ok(latencies),
            done => done.map(|()| latencies),
        }
    }

    /// This thread's share of the connections.
    fn connect(&self, epoll: &OwnedFd) -> anyhow::Result<Vec<Connection>> {
        let args = &self.plan.args;
        let threads = self.plan.clients();
        let numbers = (0..args.connections).filter(|number| *number as usize % threads == self.number);
        let mut connections = Vec::new();
        for number in numbers {
            let stream = TcpStream::connect_timeout(&self.server, PATIENCE).with_context(|| {
                let (named, server) = (&self.plan.named, self.server);
                match self.plan.role {
                    Role::Both => format!(
                        "{named}: cannot connect, choose an --address that the client's network namespace has a way to"
                    ),
                    Role::Server | Role::Client => format!(
                        "{named}: cannot connect, start `vhost-af-xdp-bench echo --listen {server}` there, or see \
                         whether the way to it is open"
                    ),
                }
            })?;
            stream.set_nonblocking(true).context("cannot use a connection")?;
            let _ = stream.set_nodelay(true);
            let flags = EventFlags::IN | EventFlags::OUT | EventFlags::ET;
            let data = EventData::new_u64(connections.len() as u64);
            epoll::add(epoll, &stream, data, flags).context("cannot wait for a connection")?;
            connections.push(Connection::new(stream, number, self.plan));
            self.counts.add_connected();
        }
        Ok(connections)
    }

    fn go_on(
        &self,
        epoll: &OwnedFd,
        tools: &Tools,
        connections: &mut [Connection],
        latencies: &mut Histogram<u64>,
    ) -> anyhow::Result<()> {
        // The kernel writes nothing there.
        let mut scratch = vec![0; THROWN_AWAY];
        let mut events = [MaybeUninit::<Event>::uninit(); 64];
        let (mut messages, mut second) = (0, 0);
        connections.iter_mut().for_each(Connection::begin);
        while !self.meter.is_stopped() {
            let ready = match epoll::wait(epoll, &mut events, Some(&SLEEP)) {
                Ok((ready, _)) => ready,
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error).context("cannot wait for replies"),
            };
            for event in ready {
                let place = usize::try_from(event.data.u64()).unwrap_or(usize::MAX);
                let Some(connection) = connections.get_mut(place) else {
                    continue;
                };
                let mut replied = |begun: Instant, now: Instant| {
                    messages += 1;
                    if self.counts.is_measuring() {
                        let latency = now.duration_since(begun).as_nanos();
                        latencies.saturating_record(u64::try_from(latency).unwrap_or(u64::MAX));
                    }
                };
                connection
                    .step(tools, &mut scratch, &mut replied)
                    .with_context(|| self.about(connection))?;
            }
            self.counts
                .show(self.number + 1, messages, messages * tools.size as u64);
            let now = self.counts.seconds();
            if now != second {
                second = now;
                self.check_silence(connections)?;
            }
        }
        Ok(())
    }

    /// The beginning of error messages about a connection.
    fn about(&self, connection: &Connection) -> String {
        let (named, number, messages) = (&self.plan.named, connection.number, connection.messages);
        format!("{named}: connection {number}, after {messages} messages")
    }

    #[cold]
    fn check_silence(&self, connections: &[Connection]) -> anyhow::Result<()> {
        for connection in connections {
            if connection.begun.elapsed() > PATIENCE {
                let (about, seconds) = (self.about(connection), PATIENCE.as_secs());
                bail!(
                    "{about}: no reply for {seconds} s, is it `vhost-af-xdp-bench echo --listen` that listens there?"
                );
            }
        }
        Ok(())
    }
}

impl Tools {
    fn new(size: usize) -> anyhow::Result<Self> {
        let mut message = vec![0; size];
        message::write(&mut message, u32::MAX, 0);
        let source = memfd_create("echo", MemfdFlags::CLOEXEC).context("cannot make a file in memory")?;
        let mut left = &message[..];
        while !left.is_empty() {
            let count = write(&source, left).context("cannot fill a file in memory")?;
            left = left.get(count..).unwrap_or_default();
        }
        Ok(Self { size, source })
    }
}

impl Connection {
    fn new(stream: TcpStream, number: u32, plan: &Plan) -> Self {
        let size = plan.args.size as usize;
        let checked = || {
            Box::new(Checked {
                sent: vec![0; size],
                received: vec![0; size],
            })
        };
        Self {
            stream,
            number,
            sent: 0,
            received: 0,
            messages: 0,
            begun: Instant::now(),
            checked: plan.args.verify.then(checked),
        }
    }

    /// Makes the next message ready.
    fn begin(&mut self) {
        (self.sent, self.received) = (0, 0);
        if let Some(checked) = &mut self.checked {
            message::write(&mut checked.sent, self.number, self.messages);
        }
    }

    /// Sends and receives as much as possible: epoll is edge-triggered and reports readiness only once.
    #[inline]
    fn step(
        &mut self,
        tools: &Tools,
        scratch: &mut [u8],
        replied: &mut impl FnMut(Instant, Instant),
    ) -> anyhow::Result<()> {
        loop {
            self.send(tools)?;
            if !self.receive(tools, scratch)? {
                return Ok(());
            }
            if let Some(checked) = &self.checked {
                checked.compare()?;
            }
            self.messages += 1;
            self.begin();
            // The next message is generated by now: that time is not part of a latency.
            let now = Instant::now();
            replied(self.begun, now);
            self.begun = now;
        }
    }

    /// Sends until the message is sent, or the socket accepts no more.
    #[inline]
    fn send(&mut self, tools: &Tools) -> anyhow::Result<()> {
        while self.sent < tools.size {
            let done = match &self.checked {
                None => {
                    let mut offset = self.sent as u64;
                    sendfile(
                        &self.stream,
                        &tools.source,
                        Some(&mut offset),
                        tools.size - self.sent,
                    )
                }
                Some(checked) => {
                    let rest = checked.sent.get(self.sent..).unwrap_or_default();
                    send(&self.stream, rest, SendFlags::NOSIGNAL)
                }
            };
            match done {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(cut(error)),
            }
        }
        Ok(())
    }

    /// Receives until the reply is whole, or no more is there; whether it is whole.
    #[inline]
    fn receive(&mut self, tools: &Tools, scratch: &mut [u8]) -> anyhow::Result<bool> {
        while self.received < tools.size {
            let done = match &mut self.checked {
                None => {
                    let end = scratch.len().min(tools.size - self.received);
                    let room = scratch.get_mut(..end).unwrap_or_default();
                    recv(&self.stream, room, RecvFlags::TRUNC).map(|(_, count)| count)
                }
                Some(checked) => {
                    let room = checked.received.get_mut(self.received..).unwrap_or_default();
                    recv(&self.stream, room, RecvFlags::empty()).map(|(_, count)| count)
                }
            };
            match done {
                Ok(0) => bail!(ENDED),
                Ok(count) => self.received += count,
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(cut(error)),
            }
        }
        Ok(true)
    }
}

fn cut(error: Errno) -> anyhow::Error {
    anyhow::Error::from(error).context(ENDED)
}

impl Checked {
    /// Errors: the bytes received differ from those sent; the error says where, and how many.
    fn compare(&self) -> anyhow::Result<()> {
        if self.sent == self.received {
            return Ok(());
        }
        let differ = || {
            let pairs = self.sent.iter().zip(&self.received).enumerate();
            pairs.filter(|(_, (sent, received))| sent != received)
        };
        let first = differ().next().map_or(0, |(at, _)| at);
        let (count, size) = (differ().count(), self.sent.len());
        bail!("{count} of the {size} bytes of a reply are not those of its message, the first at {first}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_with_a_wrong_byte_is_told_with_its_place() {
        let mut checked = Checked {
            sent: vec![7; 100],
            received: vec![7; 100],
        };
        assert!(checked.compare().is_ok());
        checked.received[42] = 8;
        let said = checked.compare().expect_err("a byte is wrong").to_string();
        assert!(
            said.contains("1 of the 100 bytes") && said.contains("at 42"),
            "{said}"
        );
    }
}
