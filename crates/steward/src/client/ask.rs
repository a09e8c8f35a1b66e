//! Requests of a lease, and their answers.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::Lease;
use super::connection::{Connection, Incoming};
use super::error::LeaseError;
use crate::protocol::{Answer, Request};

/// The answer to a request, with the descriptors that came with it.
pub(super) struct Answered {
    pub(super) answer: Answer,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl Lease {
    pub(super) fn ask_done(&self, request: &Request) -> Result<(), LeaseError> {
        match self.ask(request)?.answer {
            Answer::Done => Ok(()),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// Asks, and waits for the answer. All requests can be repeated: the second does what the first would have done.
    pub(super) fn ask(&self, request: &Request) -> Result<Answered, LeaseError> {
        self.ask_by(&mut self.state(), request, self.deadline())
    }

    pub(super) fn ask_by(
        &self,
        state: &mut Connection,
        request: &Request,
        deadline: Instant,
    ) -> Result<Answered, LeaseError> {
        let asked = self.ask_again(state, request, deadline);
        self.show(state);
        asked
    }

    /// Over one connection after the other.
    fn ask_again(
        &self,
        state: &mut Connection,
        request: &Request,
        deadline: Instant,
    ) -> Result<Answered, LeaseError> {
        loop {
            self.await_connection(state, deadline)?;
            if let Some(answered) = self.ask_once(state, request, deadline)? {
                return Ok(answered);
            }
            self.disconnected(state)?;
        }
    }

    /// Asks, and waits for the answer; none if the connection is over.
    fn ask_once(
        &self,
        state: &mut Connection,
        request: &Request,
        deadline: Instant,
    ) -> Result<Option<Answered>, LeaseError> {
        let asked = state.next_serial();
        let Some(socket) = &state.socket else {
            return Ok(None);
        };
        // It may be stopped, and its queue full: that must not hold us up beyond the deadline.
        match send(
            socket,
            &request.encode(asked),
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        ) {
            // What it said before it went is worth reading.
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => return Err(LeaseError::Silent(self.waiting.answer)),
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        loop {
            let message = match state.receive()? {
                Incoming::Message(message) => message,
                Incoming::End => return Ok(None),
                Incoming::Nothing => {
                    self.wait(state, deadline)?;
                    continue;
                }
            };
            match Answer::decode(&message.bytes)? {
                (serial, Answer::Refused(refusal)) if serial == asked => {
                    return Err(LeaseError::Refused(refusal));
                }
                (serial, answer) if serial == asked => {
                    let descriptors = message.descriptors;
                    return Ok(Some(Answered { answer, descriptors }));
                }
                // Left over from a request that timed out.
                (serial, _) if serial != 0 => {}
                (_, answer) => state.note(answer)?,
            }
        }
    }

    /// Waits for a message.
    pub(super) fn wait(&self, state: &Connection, deadline: Instant) -> Result<(), LeaseError> {
        let silent = LeaseError::Silent(self.waiting.answer);
        let Some(socket) = &state.socket else {
            return Ok(());
        };
        let Ok(left) = Timespec::try_from(deadline.saturating_duration_since(Instant::now())) else {
            return Err(silent);
        };
        let mut fds = vec![PollFd::new(socket, PollFlags::IN)];
        fds.extend(
            self.waiting
                .end
                .as_deref()
                .map(|end| PollFd::new(end, PollFlags::IN)),
        );
        match poll(&mut fds, Some(&left)) {
            Ok(0) => Err(silent),
            Ok(_) if fds[1..].iter().any(|end| !end.revents().is_empty()) => Err(LeaseError::Ending),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }
}
