//! A VMM's connection, and the thread that serves it: the thread handles the VMM's messages and the kicks of its
//! control queue, and checks the port's interface.

use std::cell::Cell;
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{Timespec, epoll};
use rustix::net::{RecvFlags, recv};
use steer::with_sources;

use crate::port::Port;
use crate::port::reasons::{Closed, Ended};
use crate::port::session::{Session, VmmConnection};
use crate::supervision::alarm::Alarm;
use crate::thread;
use common::lock::Locked;

/// Shortest pause after commands of the control queue: a guest can cause 200 rebuilds of lanes a second at most.
const CONTROL_PAUSE: Duration = Duration::from_millis(5);
/// The pause is this many times as long as the commands took: in direct placement, rebuilding lanes registers all guest
/// memory and binds the NIC's queue again.
const CONTROL_SHARE: u32 = 10;
/// Longest such pause: messages of the VMM wait meanwhile.
const LONGEST_CONTROL_PAUSE: Duration = Duration::from_secs(1);

/// Reads without removing what it reads, and without waiting.
const PEEK: RecvFlags = RecvFlags::PEEK.union(RecvFlags::DONTWAIT);

pub(crate) struct Connection {
    pub(crate) port: Arc<Port>,
    /// Protocol features that the VMM has set (VHOST_USER_SET_PROTOCOL_FEATURES).
    pub(super) protocol: u64,
    /// Kicks of the control queue, once the VMM has set its kick eventfd.
    kicks: Option<Kicks>,
}

/// Kicks of the control queue. As for the kicks of lanes, an edge-triggered epoll set reports each, and the eventfd is
/// not read: read(2) would block if the VMM has made the eventfd blocking.
struct Kicks(OwnedFd);

impl Kicks {
    fn of(kick: &OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, kick, epoll::EventData::new_u64(0), flags)?;
        Ok(Self(epoll))
    }

    /// Consumes the kicks that were reported.
    fn clear(&self) {
        let now = Timespec::default();
        let mut event = [MaybeUninit::<epoll::Event>::uninit(); 1];
        let _ = epoll::wait(&self.0, &mut event, Some(&now));
    }
}

impl Connection {
    pub(crate) fn new(port: &Arc<Port>) -> Self {
        Self {
            port: Arc::clone(port),
            protocol: 0,
            kicks: None,
        }
    }

    /// Sets the kick eventfd of the control queue, for [`Self::wait`].
    pub(super) fn watch(&mut self, kick: &OwnedFd) -> anyhow::Result<()> {
        self.kicks = Some(Kicks::of(kick).context("cannot wait for kicks of the control queue")?);
        Ok(())
    }

    /// Waits for a message, a kick of the control queue, or a due check of the interface. Handles the latter two, and
    /// returns whether there is a message. `pending`: the control queue may have commands; updated for the next call.
    /// Errors: the session is over.
    pub(super) fn wait(&self, alarm: &Alarm, stream: &UnixStream, pending: &mut bool) -> io::Result<bool> {
        let mut fds = vec![stream.as_fd(), self.port.looks.as_fd()];
        fds.extend(self.kicks.as_ref().map(|kicks| kicks.0.as_fd()));
        *pending &= self.kicks.is_some();
        let ready = alarm.await_any(&fds, *pending)?;
        if ready[1] {
            self.port.look_now();
        }
        let kicked = ready.get(2) == Some(&true);
        if let Some(kicks) = self.kicks.as_ref().filter(|_| kicked || *pending) {
            kicks.clear();
            let began = Instant::now();
            let served = self.port.with_session(Session::serve_control);
            *pending = served.map_err(|error| io::Error::other(with_sources(error)))?;
            // Limits a guest that sends commands or kicks all the time.
            if kicked || *pending {
                std::thread::sleep(control_pause(began.elapsed()));
            }
        }
        Ok(ready[0])
    }
}

/// Serves a VMM on a thread of its own, and calls `then` when its session is over.
/// Errors: there is no spare thread, and none can be started.
pub(crate) fn start(
    port: &Arc<Port>,
    stream: UnixStream,
    then: impl FnOnce(Ended) + Send + 'static,
) -> io::Result<()> {
    let served = Arc::clone(port);
    // The kernel keeps 15 bytes of a thread's name.
    let name: String = format!("port {}", port.name()).chars().take(15).collect();
    let job: Job = Box::new(move |park| {
        let _ = rustix::thread::set_name(&CString::new(name).unwrap_or_default());
        let ended = serve_connection(&served, &stream);
        drop(stream);
        served.note_served(false);
        // Only now, since closing the stream may take long (accept.rs).
        park();
        then(ended);
    });
    let thread = loop {
        prepare()?;
        if let Some(thread) = SPARE.locked().take() {
            break thread;
        }
    };
    port.note_served(true);
    // Cannot fail: a thread whose sender is in SPARE waits for a job.
    let _ = thread.send(job);
    // If this fails, the next VMM waits until a session is over, and the accepting thread logs that.
    let _ = prepare();
    Ok(())
}

/// A thread's work for one session. It calls its argument when the thread will soon be free for the next session.
type Job = Box<dyn FnOnce(&dyn Fn()) + Send>;

/// Sends a job to the thread that waits for the next VMM. So a daemon that can start no further thread still serves one
/// VMM after the other.
static SPARE: Mutex<Option<Sender<Job>>> = Mutex::new(None);

/// Starts a thread that waits for the next VMM, unless one waits already.
/// Errors: no thread can be started.
pub(crate) fn prepare() -> io::Result<()> {
    let mut spare = SPARE.locked();
    if spare.is_some() {
        return Ok(());
    }
    let (own, jobs) = mpsc::channel::<Job>();
    let sender = own.clone();
    let body = move || {
        while let Ok(job) = jobs.recv() {
            let is_parked = Cell::new(false);
            job(&|| {
                let mut spare = self::SPARE.locked();
                is_parked.set(spare.is_none());
                spare.get_or_insert_with(|| own.clone());
            });
            if !is_parked.get() {
                return;
            }
            let _ = rustix::thread::set_name(c"port");
        }
    };
    thread::start("port", body)?;
    *spare = Some(sender);
    Ok(())
}

/// Whether the peer has closed the connection, with nothing left to read.
pub(super) fn is_over(stream: &UnixStream) -> bool {
    recv(stream, &mut [0], PEEK) == Ok((0, 0))
}

/// Speaks vhost-user until the connection ends.
pub(crate) fn serve_connection(port: &Arc<Port>, stream: &UnixStream) -> Ended {
    let (Ok(second), Ok(alarm)) = (stream.try_clone(), Alarm::new()) else {
        port.warn(
            "no descriptors left, the connection is dropped: raise the limit of open files (`ulimit -n`, systemd: \
             LimitNOFILE=)",
        );
        return Ended::Wrong;
    };
    // A client that leaves without a message only probed the socket, and is no VMM.
    let came = port.removed.await_message(stream);
    if came.is_err() || is_over(stream) {
        return Ended::Idle;
    }
    let ours = VmmConnection {
        stream: second,
        alarm: alarm.clone(),
    };
    if !port.begin_session(ours) {
        return Ended::Wrong;
    }
    let mut connection = Connection::new(port);
    let mut pending = false;
    loop {
        match connection.wait(&alarm, stream, &mut pending) {
            Ok(false) => continue,
            // The message may start the control queue, which then may have commands.
            Ok(true) => pending = true,
            Err(error) => return port.end_session(Closed::Protocol(format!("vhost-user: {error}"))),
        }
        if let Err(closed) = connection.serve_message(stream) {
            return port.end_session(closed);
        }
    }
}

/// The pause after commands of the control queue that took this long.
fn control_pause(took: Duration) -> Duration {
    (took * CONTROL_SHARE).clamp(CONTROL_PAUSE, LONGEST_CONTROL_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_queue_pauses_longer_after_commands_that_take_long() {
        let paused = [0, 1, 20, 500].map(|ms| control_pause(Duration::from_millis(ms)).as_millis());
        assert_eq!(paused, [5, 10, 200, 1000]);
    }
}
