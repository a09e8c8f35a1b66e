//! The connection of a lease: messages, and what comes unasked.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use super::error::LeaseError;
use crate::protocol::{Answer, Facts, MESSAGE_MAX, Malformed, QUEUES_MAX};

/// The connection to the steward, and what came by it.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: Option<OwnedFd>,
    pub(super) phase: Phase,
    /// Of the last request.
    serial: u32,
    pub(super) facts: Facts,
    /// Facts came that nobody has taken.
    pub(super) changed: bool,
    /// The lease is over.
    pub(super) over: bool,
}

/// How it stands with the connection.
#[derive(Debug, Clone, Copy)]
pub(super) enum Phase {
    /// There is no lease yet, hence nothing to come back to.
    New,
    Here,
    /// There is none; the next attempt is due then, after this pause.
    Away {
        next: Instant,
        pause: Duration,
    },
    /// There is one, and the steward was asked for the lease.
    Asked {
        serial: u32,
        until: Instant,
        pause: Duration,
    },
}

/// A message with the descriptors that came with it.
pub(super) struct Message {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// What a look at the connection found.
pub(super) enum Incoming {
    Nothing,
    Message(Message),
    /// The connection is over.
    End,
}

impl Connection {
    pub(super) fn new(facts: Facts) -> Self {
        Self {
            socket: None,
            phase: Phase::New,
            serial: 0,
            facts,
            changed: false,
            over: false,
        }
    }

    /// The next message, if there is one.
    pub(super) fn receive(&self) -> Result<Incoming, LeaseError> {
        let Some(socket) = &self.socket else {
            return Ok(Incoming::End);
        };
        let mut bytes = vec![0; MESSAGE_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(QUEUES_MAX as usize))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut read = || recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags);
        // A peer that closes with our request unread leaves this error behind, and what it said before (unix_release_sock,
        // net/unix/af_unix.c): asking again gives that.
        let received = match read().or_else(|errno| {
            if errno == Errno::CONNRESET {
                read()
            } else {
                Err(errno)
            }
        }) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Incoming::Nothing),
            Err(Errno::CONNRESET) => return Ok(Incoming::End),
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        if received.bytes == 0 {
            return Ok(Incoming::End);
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(Malformed::Long.into());
        }
        // Descriptors that found no room in our table; the others are closed by dropping them.
        let lost = received.flags.contains(ReturnFlags::CTRUNC);
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        if lost {
            descriptors.clear();
        }
        bytes.truncate(received.bytes);
        Ok(Incoming::Message(Message { bytes, descriptors }))
    }

    /// Takes note of what came unasked.
    pub(super) fn note(&mut self, answer: Answer) -> Result<(), LeaseError> {
        match answer {
            Answer::Changed(facts) => {
                (self.facts, self.changed) = (facts, true);
                Ok(())
            }
            Answer::Refused(refusal) => {
                self.over = true;
                Err(LeaseError::Refused(refusal))
            }
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// Serial number 0 is the steward's.
    pub(super) fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.checked_add(1).unwrap_or(1);
        self.serial
    }
}
