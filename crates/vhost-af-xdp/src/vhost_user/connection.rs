//! A VMM's connection, and the thread that reads it: its messages, the kicks of its control queue, and looks at the
//! port's interface.

use std::cell::Cell;
use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{Timespec, epoll};
use rustix::net::{RecvFlags, recv};
use steer::with_sources;

use super::error::MessageError;
use crate::lock::Locked;
use crate::port::Port;
use crate::port::reasons::{Closed, Ended};
use crate::port::session::{Session, VmmConnection};
use crate::supervision::alarm::Alarm;

/// Between two looks at the control queue: a guest can have lanes rebuilt 200 times a second at most.
const CONTROL_PAUSE: Duration = Duration::from_millis(5);
/// A look is followed by a pause so many times as long: in direct placement lanes that are rebuilt register all guest
/// memory and bind the NIC's queue again.
const CONTROL_SHARE: u32 = 10;
/// At most so long: messages of the VMM wait meanwhile.
const LONGEST_CONTROL_PAUSE: Duration = Duration::from_secs(1);

/// Reads without taking, and does not wait.
const PEEK: RecvFlags = RecvFlags::PEEK.union(RecvFlags::DONTWAIT);

pub(crate) struct Connection {
    pub(crate) port: Arc<Port>,
    /// Protocol features that the VMM took.
    pub(super) protocol: u64,
    /// Of the control queue, once there is one.
    kicks: Option<Kicks>,
}

/// Kicks of the control queue, as workers wait for those of lanes: an epoll set that tells of each, and no read(2),
/// which waits where the VMM has made the eventfd do so.
struct Kicks(OwnedFd);

impl Kicks {
    fn of(kick: &OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, kick, epoll::EventData::new_u64(0), flags)?;
        Ok(Self(epoll))
    }

    /// Takes note of those that came.
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

    /// Waits for kicks of the control queue by that descriptor from now on.
    pub(super) fn watch(&mut self, kick: &OwnedFd) -> Result<(), MessageError> {
        self.kicks = Some(Kicks::of(kick).map_err(MessageError::Watch)?);
        Ok(())
    }

    /// Waits for a message, a kick of the control queue, whose commands are served, or for a look at the interface;
    /// whether there is a message. `pending`: a command may wait, and afterwards: another one may.
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
            *pending = served.map_err(|error| io::Error::other(with_sources(&error)))?;
            // A guest can have lanes rebuilt, and kick without end.
            if kicked || *pending {
                std::thread::sleep(control_pause(began.elapsed()));
            }
        }
        Ok(ready[0])
    }
}

/// Serves a VMM on a thread of its own, and calls `then` when its session is over.
/// Errors: no thread waits, and none can be started.
pub(crate) fn start(
    port: &Arc<Port>,
    stream: UnixStream,
    then: impl FnOnce(Ended) + Send + 'static,
) -> io::Result<()> {
    let served = Arc::clone(port);
    // The kernel keeps as much of a name.
    let name: String = format!("port {}", port.name()).chars().take(15).collect();
    let job: Job = Box::new(move |park| {
        let _ = rustix::thread::set_name(&CString::new(name).unwrap_or_default());
        let ended = serve_connection(&served, &stream);
        drop(stream);
        served.note_served(false);
        // Not before: to close the stream may take long (accept.rs).
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
    // It ends only when it is not kept there.
    let _ = thread.send(job);
    // Without another one the next VMM waits until a session is over, and the log says so.
    let _ = prepare();
    Ok(())
}

/// What a thread does for a session; it calls its argument when it can take the next one soon.
type Job = Box<dyn FnOnce(&dyn Fn()) + Send>;

/// A thread that waits for the next VMM: a daemon that may start no thread any more serves one VMM after the other.
static SPARE: Mutex<Option<Sender<Job>>> = Mutex::new(None);

/// Starts the thread that waits for the next VMM, unless one does.
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
    std::thread::Builder::new().name("port".to_owned()).spawn(body)?;
    *spare = Some(sender);
    Ok(())
}

/// Whether a connection is over before anything was said.
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
            // It may start the control queue.
            Ok(true) => pending = true,
            Err(error) => return port.end_session(Closed::Protocol(format!("vhost-user: {error}"))),
        }
        if let Err(closed) = connection.serve_message(stream) {
            return port.end_session(closed);
        }
    }
}

/// The pause after a look at the control queue that took so long.
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
