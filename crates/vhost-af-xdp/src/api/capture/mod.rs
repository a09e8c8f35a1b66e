//! The daemon's side of `vhost-af-xdp capture`: sends a client the frames that a port's guest sends and receives.
//!
//! Theory of operation. The client connects to the control socket, which is only for those who may control the daemon:
//! its owner and root ([`super::control_socket`]). The contents of frames are confidential, so the sockets of the API
//! offer no captures. The thread of the connection takes records from the queue that lanes fill
//! ([`dataplane::policy::capture`]) and writes them to the connection in the format of [`link`]. Lanes never wait: if a
//! client reads slowly or not at all, the queue fills up, and further frames are counted as lost.
//!
//! A capture ends when the client closes its side or disconnects, or when the port is removed. Then lanes add no more
//! records; the thread writes those in the queue, and then the number of lost frames. There is at most one capture for
//! each port, and [`MOST`] in all, so memory is bounded.

pub(crate) mod link;
#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use model::control::{CaptureBegun, CaptureRequest, Kind, Refused};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;

use self::link::{End, SHOWN, put_end, put_record};
use crate::api::control_socket::answer;
use crate::config::Placement;
use crate::port::Port;
use crate::ports::Ports;
use common::lock::Locked;
use dataplane::policy::capture::{Capture, Wanted};

/// Most captures at a time: each takes 2.5 MiB.
const MOST: usize = 8;
/// Bytes that are written at once.
const AT_ONCE: usize = 64 << 10;
/// Time between two checks for records, and for the end of the port or the client.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};
/// How long a client may take to read the records that are left when the capture ends.
const LAST_WRITE: Duration = Duration::from_secs(2);

/// Finds the port of a name.
type Find = Box<dyn Fn(&str) -> Option<Arc<Port>> + Send + Sync>;

/// All captures of the daemon. See the module's head.
pub(crate) struct Captures {
    find: Find,
    /// Ports that are captured.
    running: Mutex<Vec<String>>,
}

impl Captures {
    fn new(find: impl Fn(&str) -> Option<Arc<Port>> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            find: Box::new(find),
            running: Mutex::default(),
        })
    }

    /// Captures of these ports.
    pub(crate) fn of(ports: &Arc<Ports>) -> Arc<Self> {
        let ports = Arc::clone(ports);
        Self::new(move |name| ports.named(name))
    }

    /// Sends frames to a client, if that is possible, until the capture ends.
    /// Errors: the client is gone.
    pub(crate) fn serve(self: &Arc<Self>, stream: &UnixStream, request: CaptureRequest) -> io::Result<()> {
        match self.admit(request) {
            Ok(admitted) => admitted.run(stream),
            Err(why) => answer::<()>(stream, Err(Refused::new(Kind::Failed, why))),
        }
    }

    /// Reserves a place for a capture.
    /// Errors: why not, with the remedy.
    fn admit(self: &Arc<Self>, request: CaptureRequest) -> Result<Admitted, String> {
        let name = &request.port;
        let place = self.place(name)?;
        let port =
            (self.find)(name).ok_or_else(|| format!("there is no port {name}: `status` lists them"))?;
        Ok(Admitted { request, port, place })
    }

    /// Reserves the place for a port's capture.
    /// Errors: the port is captured already, or there are too many captures.
    fn place(self: &Arc<Self>, name: &str) -> Result<Place, String> {
        let mut running = self.running.locked();
        if running.iter().any(|it| it == name) {
            return Err(format!("port {name} is captured already: one at a time"));
        }
        if running.len() >= MOST {
            return Err(format!("there are {MOST} captures already: end one of them"));
        }
        running.push(name.to_owned());
        Ok(Place {
            captures: Arc::clone(self),
            name: name.to_owned(),
        })
    }
}

/// A place among the captures, until it is dropped.
struct Place {
    captures: Arc<Captures>,
    name: String,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.captures.running.locked().retain(|it| *it != self.name);
    }
}

/// A capture that has its place.
struct Admitted {
    request: CaptureRequest,
    port: Arc<Port>,
    place: Place,
}

impl Admitted {
    /// Lets the port's lanes record frames until the capture ends. It keeps its place until the last records are
    /// written, for which there is a time limit.
    fn run(&self, stream: &UnixStream) -> io::Result<()> {
        let Self { request, port, .. } = self;
        let capture = Arc::new(Capture::new(Wanted {
            from_guest: request.from_guest,
            to_guest: request.to_guest,
        }));
        port.set_capture(Some(Arc::clone(&capture)));
        let user = socket_peercred(stream).map(|peer| peer.uid.as_raw()).ok();
        tracing::info!(port = %request.port, user, "a capture begins");
        let notes = self.notes();
        let mut waiting = Vec::with_capacity(AT_ONCE + SHOWN);
        let shown = answer(stream, Ok(CaptureBegun { notes }))
            .and_then(|()| show(stream, (&capture, &mut waiting), || self.is_there()));
        // From here on, lanes add no more records.
        port.set_capture(None);
        let lost = capture.lost();
        tracing::info!(port = %request.port, user, lost, "the capture is over");
        finish(stream, (&capture, waiting), shown?)
    }

    /// Notes for the client: frames that it requested but that cannot be captured.
    fn notes(&self) -> Vec<String> {
        let config = &self.port.config;
        let is_direct = config.options.placement == Placement::Direct && config.nic.queues().is_some();
        let direct = "frames to the guest are not captured with memory = \"direct\": the kernel writes them, and the \
                      daemon does not see them; use memory = \"send-direct\" or \"copy\" to see them";
        let notes = (is_direct && self.request.to_guest).then(|| direct.to_owned());
        notes.into_iter().collect()
    }

    /// Whether the port has been neither removed nor replaced.
    fn is_there(&self) -> bool {
        let port = (self.place.captures.find)(&self.place.name);
        port.is_some_and(|port| Arc::ptr_eq(&port, &self.port))
    }
}

/// Sends records until the capture ends.
/// Errors: the client is gone.
fn show(
    stream: &UnixStream,
    (capture, waiting): (&Capture, &mut Vec<u8>),
    is_there: impl Fn() -> bool,
) -> io::Result<End> {
    stream.set_nonblocking(true)?;
    loop {
        fill(waiting, capture);
        if !is_there() {
            return Ok(End::PortGone);
        }
        let wanted = match waiting.is_empty() {
            true => PollFlags::IN,
            false => PollFlags::IN | PollFlags::OUT,
        };
        let mut polled = [PollFd::new(stream, wanted)];
        match poll(&mut polled, Some(&LOOK)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let ready = polled[0].revents();
        if ready.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) && has_ended(stream)? {
            return Ok(End::Asked);
        }
        if ready.contains(PollFlags::OUT) {
            write_some(stream, waiting)?;
        }
    }
}

/// Whether the client has closed its side, or sent something, which a client must not do during a capture.
fn has_ended(mut stream: &UnixStream) -> io::Result<bool> {
    match stream.read(&mut [0; 64]) {
        Ok(_) => Ok(true),
        Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => Ok(false),
        Err(error) => Err(error),
    }
}

fn write_some(mut stream: &UnixStream, waiting: &mut Vec<u8>) -> io::Result<()> {
    match stream.write(waiting) {
        Ok(written) => drop(waiting.drain(..written)),
        Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

/// Takes records until there are as many bytes as are written at once.
fn fill(waiting: &mut Vec<u8>, capture: &Capture) {
    while waiting.len() < AT_ONCE
        && let Some(record) = capture.take()
    {
        put_record(&record, waiting);
    }
}

/// Writes the last records, and then why the capture has ended; lanes add no more.
fn finish(mut stream: &UnixStream, (capture, mut waiting): (&Capture, Vec<u8>), why: End) -> io::Result<()> {
    let until = Instant::now() + LAST_WRITE;
    stream.set_nonblocking(false)?;
    let mut is_told = false;
    loop {
        fill(&mut waiting, capture);
        if waiting.is_empty() {
            if is_told {
                return Ok(());
            }
            put_end(why, capture.lost(), &mut waiting);
            is_told = true;
        }
        // `set_write_timeout` rejects zero.
        let left = until.saturating_duration_since(Instant::now());
        stream.set_write_timeout(Some(left.max(Duration::from_millis(1))))?;
        let written = stream.write(&waiting)?;
        waiting.drain(..written);
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
    }
}
