//! The daemon's side of its control socket: answers everybody who connects, one after the other.
//!
//! What takes longer than a look has a thread of its own, so that others get the status meanwhile. Of these there are
//! [few](MOST_RELOADS), as there are of captures: who asks for more is refused at once, without one.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::requests::{CAPTURE, LONGEST_REQUEST, RELOAD, RESET_WORKERS};
use crate::api::capture::Captures;
use crate::api::status::Status;
use crate::reload::changes::RESET;
use crate::reload::{Outcome, Reload};

/// How long a peer may take to read its answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a request is waited for. `status` says at once that it has none.
const REQUEST_WAIT: Duration = Duration::from_millis(100);
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// Readings of the file that are waited for at a time.
const MOST_RELOADS: usize = 8;

const NO_FILE: &str = "it was started without --config: there is nothing to read again";

/// Answers everybody who connects, for ever. `reload`: for a daemon that has a file.
pub(crate) fn serve(
    listener: &UnixListener,
    read: impl Fn() -> Status,
    reload: Option<&Reload>,
    reset: impl Fn(),
    captures: &Arc<Captures>,
) {
    let readings = Readings::default();
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // No descriptor is left, and the next attempt would fail at once, too.
            std::thread::sleep(PAUSE);
            continue;
        };
        match request_of(&stream).as_slice() {
            RELOAD => match reload.cloned() {
                Some(reload) => readings.answer(stream, move || reload.run()),
                None => drop(answer(stream, &Outcome::failed(NO_FILE.to_owned()))),
            },
            RESET_WORKERS => {
                reset();
                let done = vec![RESET.to_owned()];
                let failed = Vec::new();
                drop(answer(stream, &Outcome { done, failed }));
            }
            request => match request.strip_prefix(CAPTURE) {
                Some(request) => captures.serve(stream, request),
                None => drop(answer(stream, &read())),
            },
        }
    }
}

/// What somebody wants, as far as he says all of that in time: others wait meanwhile.
fn request_of(mut stream: &UnixStream) -> Vec<u8> {
    let (mut request, mut byte) = (Vec::new(), [0]);
    let until = Instant::now() + REQUEST_WAIT;
    let is_whole = |request: &[u8]| match CAPTURE.starts_with(&request[..request.len().min(CAPTURE.len())]) {
        true => request.len() >= LONGEST_REQUEST,
        false => request.len() >= RELOAD.len(),
    };
    while !is_whole(&request) && !request.ends_with(b"\n") {
        let left = until.saturating_duration_since(Instant::now());
        // What is there when the time is over still counts: it may have come while this thread was not running.
        let waits = match left.is_zero() {
            true => stream.set_nonblocking(true),
            false => stream.set_read_timeout(Some(left)),
        };
        if waits.is_err() {
            break;
        }
        match stream.read(&mut byte) {
            Ok(1..) => request.push(byte[0]),
            Ok(0) | Err(_) => break,
        }
    }
    let _ = stream.set_nonblocking(false);
    request
}

/// Readings of the file that somebody waits for: a clone for each.
#[derive(Default)]
struct Readings(Arc<()>);

impl Readings {
    /// Answers with what comes of a reading, on a thread of its own: it may take a while, and others want the status.
    fn answer(&self, stream: UnixStream, read: impl FnOnce() -> Outcome + Send + 'static) {
        if Arc::strong_count(&self.0) > MOST_RELOADS {
            let many =
                format!("{MOST_RELOADS} readings are waited for already: ask again when they are done");
            return drop(answer(stream, &Outcome::failed(many)));
        }
        let one = Arc::clone(&self.0);
        let body = move || {
            let _ = answer(stream, &read());
            drop(one);
        };
        // Who asks sees the end of the connection.
        let _ = std::thread::Builder::new().name("reload".to_owned()).spawn(body);
    }
}

fn answer(mut stream: UnixStream, document: &impl Serialize) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let mut text = serde_json::to_vec(document)?;
    text.push(b'\n');
    stream.write_all(&text)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::sync::mpsc::RecvTimeoutError::Timeout;

    use super::*;

    fn said(mut client: UnixStream) -> Outcome {
        let mut text = String::new();
        client.read_to_string(&mut text).expect("it is answered");
        serde_json::from_str(&text).expect("an outcome")
    }

    #[test]
    fn request_that_comes_byte_by_byte_is_not_waited_for() {
        let (mut client, stream) = UnixStream::pair().expect("sockets");
        let (is_over, over) = mpsc::channel::<()>();
        let sends = std::thread::spawn(move || {
            client.write_all(CAPTURE).expect("there is room");
            while over.recv_timeout(REQUEST_WAIT / 5) == Err(Timeout) && client.write_all(b" ").is_ok() {}
        });
        let request = request_of(&stream);
        assert!(request.len() < LONGEST_REQUEST, "it was waited for to its end");
        drop(is_over);
        sends.join().expect("it sends");
    }

    #[test]
    fn so_many_readings_are_waited_for_and_the_next_is_refused() {
        let readings = Readings::default();
        let ask = |end: mpsc::Receiver<()>| {
            let (client, stream) = UnixStream::pair().expect("sockets");
            readings.answer(stream, move || {
                // Until its sender is dropped.
                let _ = end.recv();
                Outcome::default()
            });
            client
        };
        let ends = || mpsc::channel::<()>();
        let (senders, waiting): (Vec<_>, Vec<_>) = (0..MOST_RELOADS)
            .map(|_| ends())
            .map(|(sender, end)| (sender, ask(end)))
            .unzip();
        let (sender, end) = ends();
        let refused = said(ask(end));
        assert!(refused.failed[0].contains("ask again"), "{refused:?}");
        drop((sender, senders));
        for client in waiting {
            assert!(said(client).failed.is_empty());
        }
        // The threads have answered, and end.
        while Arc::strong_count(&readings.0) > 1 {
            std::thread::yield_now();
        }
        let (sender, end) = ends();
        drop(sender);
        assert!(said(ask(end)).failed.is_empty(), "there is room again");
    }
}
