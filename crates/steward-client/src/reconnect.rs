//! Reconnecting to a steward that was away.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::net::{SendFlags, SocketFlags, send};
use rustix::time::{Itimerspec, TimerfdTimerFlags, timerfd_settime};

use super::connection::{Connection, Incoming, Phase, connect_to};
use super::error::LeaseError;
use super::{Lease, Waiting};
use steward_protocol::{Answer, Reason, Request};

/// Time limit for a steward that does not accept connections.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

impl Lease {
    pub(super) fn connect(&self, flags: SocketFlags) -> Result<OwnedFd, LeaseError> {
        let socket = connect_to(&self.path, flags, CONNECT_TIMEOUT)?;
        let data = epoll::EventData::new_u64(1);
        epoll::add(&self.waker, &socket, data, epoll::EventFlags::IN).map_err(io::Error::from)?;
        Ok(socket)
    }

    /// Waits until there is a connection with the lease.
    pub(super) fn await_connection(
        &self,
        state: &mut Connection,
        waiting: &Waiting,
        deadline: Instant,
    ) -> Result<(), LeaseError> {
        if state.over {
            return Err(LeaseError::Gone);
        }
        while !self.reconnect(state)? {
            if matches!(state.phase, Phase::Away { .. }) {
                let path = self.path.clone();
                return Err(LeaseError::Away { path });
            }
            state.wait(waiting, deadline)?;
        }
        Ok(())
    }

    /// Handles the end of the connection. If there was a lease, it reconnects.
    pub(super) fn disconnected(&self, state: &mut Connection) -> Result<(), LeaseError> {
        if matches!(state.phase, Phase::New) {
            state.over = true;
            return Err(LeaseError::Unanswered);
        }
        let now = Instant::now();
        let next = match state.phase {
            Phase::Away { .. } | Phase::Asked { .. } => now + state.pauses.failed(now),
            // Try at once.
            Phase::New | Phase::Here => {
                state.pauses.reset();
                now
            }
        };
        state.socket = None;
        state.phase = Phase::Away { next };
        self.wake_at(next)
    }

    /// Continues to reconnect, without blocking. Returns whether there is a connection with the lease.
    pub(super) fn reconnect(&self, state: &mut Connection) -> Result<bool, LeaseError> {
        match state.phase {
            Phase::New | Phase::Here => return Ok(true),
            Phase::Away { next } if Instant::now() < next => return Ok(false),
            Phase::Away { .. } => self.resume(state)?,
            Phase::Asked { .. } => {}
        }
        let Phase::Asked { serial: asked, until } = state.phase else {
            return Ok(false);
        };
        match state.receive()? {
            Incoming::Nothing if Instant::now() < until => return Ok(false),
            Incoming::Nothing | Incoming::End => self.disconnected(state)?,
            Incoming::Message(message) => match (message.serial, message.answer) {
                // The steward has the request for hints: now request the lease.
                (serial, Answer::Done) if serial == asked => self.ask_for_lease(state)?,
                (serial, Answer::Facts(facts)) if serial == asked => {
                    state.changed |= state.known.facts != facts;
                    (state.known.facts, state.phase) = (facts, Phase::Here);
                    state.known.returns = state.known.returns.wrapping_add(1);
                    self.sleep()?;
                    return Ok(true);
                }
                // Other connections have taken all places; try again later.
                (_, Answer::Refused(refusal)) if refusal.reason == Reason::Limit => {
                    self.disconnected(state)?;
                }
                (_, answer @ Answer::Refused(_)) => state.note(answer)?,
                _ => return Err(LeaseError::Mismatch),
            },
        }
        Ok(false)
    }

    /// Connects, and requests to resume the lease, after a request for its hints.
    fn resume(&self, state: &mut Connection) -> Result<(), LeaseError> {
        let Ok(socket) = self.connect(SocketFlags::NONBLOCK) else {
            return self.disconnected(state);
        };
        state.socket = Some(socket);
        match state.hint_request {
            Some(hint_request) => self.ask_on_return(state, &Request::Hints(hint_request)),
            None => self.ask_for_lease(state),
        }
    }

    fn ask_for_lease(&self, state: &mut Connection) -> Result<(), LeaseError> {
        self.ask_on_return(state, &Request::Resume { token: self.token })
    }

    fn ask_on_return(&self, state: &mut Connection, request: &Request) -> Result<(), LeaseError> {
        let serial = state.next_serial();
        let request = request.encode(serial);
        let sent = state
            .socket
            .as_ref()
            .is_some_and(|socket| send(socket, &request, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_ok());
        if !sent {
            return self.disconnected(state);
        }
        let until = self.deadline();
        state.phase = Phase::Asked { serial, until };
        self.wake_at(until)
    }

    /// Makes the descriptor readable at that time.
    fn wake_at(&self, at: Instant) -> Result<(), LeaseError> {
        // Zero would disarm the timer.
        let after = at
            .saturating_duration_since(Instant::now())
            .max(Duration::from_nanos(1));
        self.set_timer(after)
    }

    /// Disarms the timer: the descriptor becomes readable only when there is a message.
    fn sleep(&self) -> Result<(), LeaseError> {
        self.set_timer(Duration::ZERO)
    }

    fn set_timer(&self, after: Duration) -> Result<(), LeaseError> {
        let spec =
            |duration| Timespec::try_from(duration).map_err(|_| LeaseError::Silent(self.waiting.answer));
        let timer = Itimerspec {
            it_interval: spec(Duration::ZERO)?,
            it_value: spec(after)?,
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &timer).map_err(io::Error::from)?;
        Ok(())
    }
}
