//! The daemon's side of `vhost-af-xdp capture`: shows who asks what a port's guest sends and gets.
//!
//! Theory of operation. Who asks comes by the control socket, which is for those who may control the daemon: its owner
//! and root ([`super::control_socket`]). What guests say is nobody else's business, so the API's sockets have nothing
//! of this. The thread of the connection takes records out of the queue that lanes put them into
//! ([`crate::switch::capture`]) and writes them to the connection, as [`link`] says. It waits for nobody: a client that
//! reads slowly or not at all makes the queue full, and what finds no room there is counted.
//!
//! A capture ends when the client has closed its side or is gone, and with the port; then lanes show nothing any more,
//! and what waits is written, with how many were lost. There is one of a port, and [`MOST`] in all, so memory is
//! bounded.

pub(crate) mod link;
#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use model::control::{CaptureBegun, CaptureRequest, Refused};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::socket_peercred;

use self::link::{End, SHOWN, put_end, put_record};
use crate::api::control_socket::answer;
use crate::config::Placement;
use crate::port::Port;
use crate::ports::Ports;
use crate::switch::capture::{Capture, Wanted};

/// Captures at a time: each has 2.5 MiB.
const MOST: usize = 8;
/// Bytes that are written at once.
const AT_ONCE: usize = 64 << 10;
/// Between two looks for records, and for the end of the port or the client.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 10_000_000,
};
/// How long a client may take for all that waits when the capture is over.
const LAST_WRITE: Duration = Duration::from_secs(2);

/// Finds the port of a name.
type Find = Box<dyn Fn(&str) -> Option<Arc<Port>> + Send + Sync>;

/// See the module's head. All captures of the daemon.
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

    /// Of these ports.
    pub(crate) fn of(ports: &Arc<Ports>) -> Arc<Self> {
        let ports = Arc::clone(ports);
        Self::new(move |name| ports.named(name))
    }

    /// Shows frames to a client, if that is possible, until the capture is over.
    /// Errors: the client is gone.
    pub(crate) fn serve(self: &Arc<Self>, stream: &UnixStream, request: CaptureRequest) -> io::Result<()> {
        match self.admit(request) {
            Ok(admitted) => admitted.run(stream),
            Err(why) => answer::<()>(stream, Err(Refused::failed(why))),
        }
    }

    /// Gives what is asked for a place, before there is a thread for it.
    /// Errors: why not, with the remedy.
    fn admit(self: &Arc<Self>, request: CaptureRequest) -> Result<Admitted, String> {
        let name = &request.port;
        let place = self.place(name)?;
        let port =
            (self.find)(name).ok_or_else(|| format!("there is no port {name}: `status` lists them"))?;
        Ok(Admitted { request, port, place })
    }

    /// Takes the place of a port's capture.
    /// Errors: there is one, or there are too many.
    fn place(self: &Arc<Self>, name: &str) -> Result<Place, String> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
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
        let mut running = self
            .captures
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        running.retain(|it| *it != self.name);
    }
}

/// What is captured, and has its place.
struct Admitted {
    request: CaptureRequest,
    port: Arc<Port>,
    place: Place,
}

impl Admitted {
    /// Lets lanes of the port show frames until the capture is over. It has its place until what waits is written,
    /// which has a limit.
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
        // When this returns lanes show nothing any more.
        port.set_capture(None);
        let lost = capture.lost();
        tracing::info!(port = %request.port, user, lost, "the capture is over");
        finish(stream, (&capture, waiting), shown?)
    }

    /// What is not captured although it was asked for.
    fn notes(&self) -> Vec<String> {
        let config = &self.port.config;
        let is_direct = config.placement == Placement::Direct && config.nic.queues().is_some();
        let direct = "frames to the guest are not captured where its memory is direct: the kernel writes them there, and \
                      nobody looks at them; use memory = \"send-direct\" or \"copy\" to see them";
        let notes = (is_direct && self.request.to_guest).then(|| direct.to_owned());
        notes.into_iter().collect()
    }

    /// Whether it is the same port still.
    fn is_there(&self) -> bool {
        let port = (self.place.captures.find)(&self.place.name);
        port.is_some_and(|port| Arc::ptr_eq(&port, &self.port))
    }
}

/// Shows what comes, until it is over.
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

/// Whether the client wants no more: it closes its side. It says nothing, and whoever does is told no more, either.
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

/// Takes records, as many as are written at once.
fn fill(waiting: &mut Vec<u8>, capture: &Capture) {
    while waiting.len() < AT_ONCE
        && let Some(record) = capture.take()
    {
        put_record(&record, waiting);
    }
}

/// Lanes show nothing any more: writes what waits, and why it is over.
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
        // A timeout of zero is none.
        let left = until.saturating_duration_since(Instant::now());
        stream.set_write_timeout(Some(left.max(Duration::from_millis(1))))?;
        let written = stream.write(&waiting)?;
        waiting.drain(..written);
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
    }
}
