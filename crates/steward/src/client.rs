//! A lease, seen by its holder.
//!
//! One connection is one lease: dropping the [`Lease`] ends it, as does the end of the process. All methods take `&self`; threads may share
//! it, one request at a time goes out.
//!
//! Changes of the interface come unasked. Whoever waits for them polls the lease's descriptor ([`AsFd`]) and calls
//! [`Lease::take_changes`], which does not wait; what another thread's request found on its way is not lost.
//!
//! A steward may go away and come back (a restart, an upgrade, a crash). Sockets are not concerned, frames go on. The
//! lease connects again, less and less often, and shows the token that it had given ([`Request::Resume`]); nothing
//! waits for that: [`Lease::take_changes`] goes on with it whenever it is called, and the descriptor becomes readable
//! when it should be. Meanwhile requests fail with [`LeaseError::Away`]. A steward that does not know the lease any
//! more ends it, with [`LeaseError::Refused`].

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use steer::{QueueConf, QueueCounters};

use crate::links::DriverSends;
use crate::protocol::{
    Answer, Facts, MESSAGE_MAX, Malformed, QUEUES_MAX, Reason, Refusal, Request, Steered, Token, Wanted,
};
use crate::sys;

/// How long a steward that does not accept connections is waited for.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Between two looks at a lock that another thread has.
const PAUSE: Duration = Duration::from_millis(1);

/// Why there is no lease, or no answer.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// Nobody listens.
    #[error("no steward at {}: start vhost-af-xdp-steward, or name its socket with --steward", .path.display())]
    Connect {
        /// As given.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The steward said no, and why.
    #[error("the steward refuses: {0}")]
    Refused(Refusal),
    /// The steward is away; what is set up goes on.
    #[error("no steward at {} at the moment: queues in use go on, changes wait until vhost-af-xdp-steward is started again", .path.display())]
    Away {
        /// Where it was.
        path: PathBuf,
    },
    /// The steward is gone, and the lease with it.
    #[error("the steward has ended the connection; the lease is over: its log says why")]
    Gone,
    /// The steward does not answer.
    #[error("the steward runs, but has not answered for {} s: if that goes on, start it again", .0.as_secs())]
    Silent(Duration),
    /// Nothing is waited for any more; see [`Waiting::end`].
    #[error("the steward has not answered, and this process ends")]
    Ending,
    /// The steward does not keep to the protocol.
    #[error("the steward does not keep to the protocol: {0}")]
    Protocol(#[from] Malformed),
    /// An answer to something else, or without its descriptors.
    #[error(
        "the steward's answer is not one to the request, or lacks its descriptors (is LimitNOFILE too low?)"
    )]
    Mismatch,
    /// Another failure of the socket.
    #[error("talking to the steward")]
    Io(#[from] io::Error),
}

/// Pauses between attempts to reach a steward that is away: the first, and the longest, to which they double.
const PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(320));

/// How long, and until when, a steward is waited for.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// For one answer; attaching a program takes the longest, some 100 ms.
    pub answer: Duration,
    /// Readable as soon as nothing is to be waited for any more.
    pub end: Option<Arc<OwnedFd>>,
}

impl Default for Waiting {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(10),
            end: None,
        }
    }
}

/// A lease of queues.
#[derive(Debug)]
pub struct Lease {
    path: PathBuf,
    waiting: Waiting,
    token: Token,
    /// Readable when the connection is, or when `timer` is.
    waker: OwnedFd,
    /// Readable when it is time to go on with coming back.
    timer: OwnedFd,
    /// Held by who asks something, until it is answered.
    state: Mutex<State>,
    /// What the last one who asked knew; under this lock nothing waits.
    seen: Mutex<Seen>,
}

/// What is known of a lease without asking.
#[derive(Debug)]
struct Seen {
    facts: Facts,
    away: bool,
}

#[derive(Debug)]
struct State {
    socket: Option<OwnedFd>,
    phase: Phase,
    serial: u32,
    facts: Facts,
    /// Facts came that nobody has taken.
    changed: bool,
    over: bool,
}

/// How it stands with the connection.
#[derive(Debug, Clone, Copy)]
enum Phase {
    /// No lease yet that could be come back to.
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
type Received<T> = (T, Vec<OwnedFd>);

/// What a look at the connection found.
enum Incoming {
    Nothing,
    Message(Received<Vec<u8>>),
    /// The connection is over.
    End,
}

impl Lease {
    /// Asks the steward at `path` for a lease. With it come the AF_XDP sockets of its queues, in order: unbound, each with an RX ring of
    /// [`RECEIVE_RING`](crate::protocol::RECEIVE_RING) entries.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn take(path: &Path, wanted: &Wanted) -> Result<(Self, Vec<OwnedFd>), LeaseError> {
        Self::take_with(path, wanted, Waiting::default())
    }

    /// As [`Lease::take`]; this and all that follows waits for so long.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn take_with(
        path: &Path,
        wanted: &Wanted,
        waiting: Waiting,
    ) -> Result<(Self, Vec<OwnedFd>), LeaseError> {
        let waker = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(io::Error::from)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&waker, &timer, data, epoll::EventFlags::IN).map_err(io::Error::from)?;
        let lease = Self {
            path: path.to_owned(),
            waiting,
            token: sys::random()?,
            waker,
            timer,
            state: Mutex::new(State {
                socket: None,
                phase: Phase::New,
                serial: 0,
                facts: Facts::nothing(wanted),
                changed: false,
                over: false,
            }),
            seen: Mutex::new(Seen {
                facts: Facts::nothing(wanted),
                away: false,
            }),
        };
        let socket = lease
            .connect(SocketFlags::empty())
            .map_err(|errno| LeaseError::Connect {
                path: path.to_owned(),
                source: errno.into(),
            })?;
        lease.state().socket = Some(socket);
        let (answer, sockets) = lease.ask(&Request::Lease(wanted.clone()))?;
        let Answer::Facts(facts) = answer else {
            return Err(LeaseError::Mismatch);
        };
        if sockets.len() != wanted.queues as usize {
            return Err(LeaseError::Mismatch);
        }
        lease.state().facts = facts;
        lease.do_it(&Request::Keep { token: lease.token })?;
        let mut state = lease.state();
        state.phase = Phase::Here;
        lease.show(&state);
        drop(state);
        Ok((lease, sockets))
    }

    fn connect(&self, flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
        let flags = flags | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // Connecting waits while the queue of a steward that does not accept is full.
        set_socket_timeout(&socket, Timeout::Send, Some(CONNECT_TIMEOUT))?;
        connect(&socket, &SocketAddrUnix::new(&self.path)?)?;
        let data = epoll::EventData::new_u64(1);
        epoll::add(&self.waker, &socket, data, epoll::EventFlags::IN)?;
        Ok(socket)
    }

    /// Whether the steward is away, and the lease not over for all that is known.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.seen().away
    }

    /// The interface as it is, as far as the steward told.
    #[must_use]
    pub fn facts(&self) -> Facts {
        self.seen().facts.clone()
    }

    /// A new socket for a queue of the lease, like those that came with it; frames go on as before until [`Lease::activate`]. So a successor can be prepared while the
    /// queue's socket is in use; it can be bound once that is closed.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn socket(&self, queue: u32) -> Result<OwnedFd, LeaseError> {
        match self.ask(&Request::Socket { queue })? {
            (Answer::Done, mut sockets) if sockets.len() == 1 => sockets.pop().ok_or(LeaseError::Mismatch),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// From now on the queue's frames go to its last socket, which is bound.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn activate(&self, queue: u32, conf: QueueConf) -> Result<(), LeaseError> {
        self.do_it(&Request::Activate { queue, conf })
    }

    /// From now on the queue's frames go to the host.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn deactivate(&self, queue: u32) -> Result<(), LeaseError> {
        self.do_it(&Request::Deactivate { queue })
    }

    /// Sees to it that this process's locked-memory limit is so many bytes at least; the steward is asked where the
    /// process may not raise it itself.
    ///
    /// The kernel counts locked memory for each user, over all of its processes, against the limit of the process
    /// that locks more: a user of its own for each holder keeps their sums apart.
    ///
    /// # Errors
    /// [`LeaseError`]; refused beyond what the policy allows.
    pub fn raise_memlock(&self, bytes: u64) -> Result<(), LeaseError> {
        let limit = getrlimit(Resource::Memlock);
        if limit.current.is_none_or(|current| current >= bytes) {
            return Ok(());
        }
        if limit.maximum.is_none_or(|maximum| maximum >= bytes) {
            let raised = Rlimit {
                current: Some(bytes),
                ..limit
            };
            return setrlimit(Resource::Memlock, raised).map_err(|errno| io::Error::from(errno).into());
        }
        self.do_it(&Request::Memlock { bytes })
    }

    /// What the program did with the queue's frames.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn counters(&self, queue: u32) -> Result<QueueCounters, LeaseError> {
        self.counters_by(queue, self.deadline())
    }

    /// As [`Lease::counters`]; waits until `deadline` at most, also for another thread that is asking something.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn counters_by(&self, queue: u32, deadline: Instant) -> Result<QueueCounters, LeaseError> {
        let mut state = self
            .state_by(deadline)
            .ok_or(LeaseError::Silent(self.waiting.answer))?;
        match self.ask_by(&mut state, &Request::Counters { queue }, deadline)?.0 {
            Answer::Counters(counters) => Ok(counters),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// What changed since it was asked last: the interface as it is now, or nothing. Goes on with coming back to a steward that is away.
    /// Nothing while another thread waits for an answer, which takes note of changes, too.
    ///
    /// # Errors
    /// [`LeaseError::Gone`], or [`LeaseError::Refused`], when the lease is over.
    pub fn take_changes(&self) -> Result<Option<Facts>, LeaseError> {
        let Some(mut state) = self.state_by(Instant::now()) else {
            return Ok(None);
        };
        let read = self.read_changes(&mut state);
        self.show(&state);
        read?;
        Ok(std::mem::take(&mut state.changed).then(|| state.facts.clone()))
    }

    fn read_changes(&self, state: &mut State) -> Result<(), LeaseError> {
        if state.over {
            return Err(LeaseError::Gone);
        }
        while self.come_back(state)? {
            match receive(state)? {
                Incoming::Nothing => break,
                Incoming::Message((bytes, _)) => {
                    // Others answer requests that are not waited for any longer.
                    if let (0, answer) = Answer::decode(&bytes)? {
                        state.note(answer)?;
                    }
                }
                Incoming::End => self.lose(state)?,
            }
        }
        Ok(())
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets others know what is known by now.
    fn show(&self, state: &State) {
        let mut seen = self.seen();
        seen.facts.clone_from(&state.facts);
        seen.away = matches!(state.phase, Phase::Away { .. } | Phase::Asked { .. });
    }

    /// An answer that is asked for now is waited for until then.
    fn deadline(&self) -> Instant {
        Instant::now() + self.waiting.answer
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, if it can be had until then.
    fn state_by(&self, deadline: Instant) -> Option<MutexGuard<'_, State>> {
        loop {
            match self.state.try_lock() {
                Ok(state) => return Some(state),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
                // Seldom: another thread is asking something.
                Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            }
        }
    }

    fn do_it(&self, request: &Request) -> Result<(), LeaseError> {
        match self.ask(request)?.0 {
            Answer::Done => Ok(()),
            _ => Err(LeaseError::Mismatch),
        }
    }

    /// Asks, and waits for the answer. All requests can be repeated: the second does what the first would have done.
    fn ask(&self, request: &Request) -> Result<Received<Answer>, LeaseError> {
        self.ask_by(&mut self.state(), request, self.deadline())
    }

    fn ask_by(
        &self,
        state: &mut State,
        request: &Request,
        deadline: Instant,
    ) -> Result<Received<Answer>, LeaseError> {
        let asked = self.ask_again(state, request, deadline);
        self.show(state);
        asked
    }

    /// Over one connection after the other.
    fn ask_again(
        &self,
        state: &mut State,
        request: &Request,
        deadline: Instant,
    ) -> Result<Received<Answer>, LeaseError> {
        loop {
            self.reach(state, deadline)?;
            if let Some(answered) = self.ask_once(state, request, deadline)? {
                return Ok(answered);
            }
            self.lose(state)?;
        }
    }

    /// Asks, and waits for the answer; none if the connection is over.
    fn ask_once(
        &self,
        state: &mut State,
        request: &Request,
        deadline: Instant,
    ) -> Result<Option<Received<Answer>>, LeaseError> {
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
            let (bytes, descriptors) = match receive(state)? {
                Incoming::Message(message) => message,
                Incoming::End => return Ok(None),
                Incoming::Nothing => {
                    self.wait(state, deadline)?;
                    continue;
                }
            };
            match Answer::decode(&bytes)? {
                (serial, Answer::Refused(refusal)) if serial == asked => {
                    return Err(LeaseError::Refused(refusal));
                }
                (serial, answer) if serial == asked => return Ok(Some((answer, descriptors))),
                // Left over from a request that timed out.
                (serial, _) if serial != 0 => {}
                (_, answer) => state.note(answer)?,
            }
        }
    }

    /// Waits for a message.
    fn wait(&self, state: &State, deadline: Instant) -> Result<(), LeaseError> {
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

    /// Sees to it that there is a connection with the lease.
    fn reach(&self, state: &mut State, deadline: Instant) -> Result<(), LeaseError> {
        if state.over {
            return Err(LeaseError::Gone);
        }
        while !self.come_back(state)? {
            if matches!(state.phase, Phase::Away { .. }) {
                let path = self.path.clone();
                return Err(LeaseError::Away { path });
            }
            self.wait(state, deadline)?;
        }
        Ok(())
    }

    /// The connection is over; there will be another one, if there was a lease.
    fn lose(&self, state: &mut State) -> Result<(), LeaseError> {
        if matches!(state.phase, Phase::New) {
            state.over = true;
            return Err(LeaseError::Gone);
        }
        let now = Instant::now();
        let (next, pause) = match state.phase {
            Phase::Away { pause, .. } | Phase::Asked { pause, .. } => {
                (now + pause, (pause * 2).min(PAUSES.1))
            }
            // At once.
            Phase::New | Phase::Here => (now, PAUSES.0),
        };
        state.socket = None;
        state.phase = Phase::Away { next, pause };
        self.wake_at(next)
    }

    /// Goes on with coming back, without waiting; true if there is a connection with the lease.
    fn come_back(&self, state: &mut State) -> Result<bool, LeaseError> {
        match state.phase {
            Phase::New | Phase::Here => return Ok(true),
            Phase::Away { next, .. } if Instant::now() < next => return Ok(false),
            Phase::Away { .. } => self.resume(state)?,
            Phase::Asked { .. } => {}
        }
        let Phase::Asked {
            serial: asked, until, ..
        } = state.phase
        else {
            return Ok(false);
        };
        match receive(state)? {
            Incoming::Nothing if Instant::now() < until => return Ok(false),
            Incoming::Nothing | Incoming::End => self.lose(state)?,
            Incoming::Message((bytes, _)) => match Answer::decode(&bytes)? {
                (serial, Answer::Facts(facts)) if serial == asked => {
                    state.changed |= state.facts != facts;
                    (state.facts, state.phase) = (facts, Phase::Here);
                    self.sleep()?;
                    return Ok(true);
                }
                // Others have taken all connections; it may go better the next time.
                (_, Answer::Refused(refusal)) if refusal.reason == Reason::Limit => self.lose(state)?,
                (_, answer @ Answer::Refused(_)) => state.note(answer)?,
                _ => return Err(LeaseError::Mismatch),
            },
        }
        Ok(false)
    }

    /// Connects, and asks for the lease.
    fn resume(&self, state: &mut State) -> Result<(), LeaseError> {
        let pause = match state.phase {
            Phase::Away { pause, .. } => pause,
            _ => PAUSES.0,
        };
        let serial = state.next_serial();
        let request = Request::Resume { token: self.token }.encode(serial);
        let asked = self.connect(SocketFlags::NONBLOCK).and_then(|socket| {
            send(&socket, &request, SendFlags::NOSIGNAL)?;
            Ok(socket)
        });
        let Ok(socket) = asked else {
            return self.lose(state);
        };
        let until = self.deadline();
        state.socket = Some(socket);
        state.phase = Phase::Asked { serial, until, pause };
        self.wake_at(until)
    }

    /// The descriptor becomes readable then.
    fn wake_at(&self, at: Instant) -> Result<(), LeaseError> {
        // No time at all would mean never.
        let after = at
            .saturating_duration_since(Instant::now())
            .max(Duration::from_nanos(1));
        self.set_timer(after)
    }

    /// The descriptor becomes readable only when there is a message.
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

/// The next message, if there is one.
fn receive(state: &State) -> Result<Incoming, LeaseError> {
    let Some(socket) = &state.socket else {
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
    Ok(Incoming::Message((bytes, descriptors)))
}

impl AsFd for Lease {
    /// Readable when there may be changes, or when it is time to look for the steward: then call [`Lease::take_changes`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waker.as_fd()
    }
}

impl State {
    /// Takes note of what came unasked.
    fn note(&mut self, answer: Answer) -> Result<(), LeaseError> {
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
    fn next_serial(&mut self) -> u32 {
        self.serial = self.serial.checked_add(1).unwrap_or(1);
        self.serial
    }
}

impl Facts {
    /// Before anything was told.
    fn nothing(wanted: &Wanted) -> Self {
        Self {
            ifindex: 0,
            name: wanted.interface.clone(),
            mtu: 0,
            mac: [0; 6],
            rx_queues: 0,
            up: false,
            partial_checksums: false,
            mode: None,
            program: 0,
            sends: DriverSends::NOTHING,
            generation: 0,
            steered: Steered::ByQueue,
            impaired: false,
            note: String::new(),
            steering: String::new(),
        }
    }
}
