//! The daemon's side of the control protocol.
//!
//! One thread accepts connections, and each connection has a thread; there are few ([`Connections`]). A request has a
//! limited length, and no client can delay others for long: one connection at a time reads the state, each at most once
//! in a [`PAUSE`], and a client that does not read its answer within [`WRITE`] is disconnected. Reading the
//! state needs no answer of a worker, and no port's lock.

use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use model::config::TableKind;
use model::control::{Answer, Change, Changed, Done, Kind, LONGEST_REQUEST, Refused, Request, line};
use model::state::{Sandbox, Status};
use program::descriptors;
use serde_json::Value;

use super::connections::{Connections, Place};
use super::writing::{WRITE, answer, write_within};
use crate::api::capture::Captures;
use crate::api::{rules_status, status};
use crate::journal::JOURNAL;
use crate::ports::Ports;
use crate::reload::Reload;
use crate::supervision::watchdog::Watchdog;
use crate::thread;
use common::lock::Locked;
use dataplane::worker::workers::Workers;

/// Time between two reads of the state by one connection.
const PAUSE: Duration = Duration::from_millis(50);
/// How often to check whether a client that waits for events is gone.
const LOOK: Duration = Duration::from_secs(5);
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long the accepting thread waits for a client that it answers itself.
const AT_ONCE: Duration = Duration::from_secs(1);
/// Most changes in progress, of the connections of one socket.
const MOST_CHANGES: usize = 8;
/// Longest request of a connection that may not change anything.
const LONGEST_GET: usize = 4096;

/// What a connection may do besides reading the state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub(crate) change: bool,
    /// It may capture frames of guests.
    pub(crate) capture: bool,
}

/// Answers clients of the control socket and the gateway.
pub(crate) struct Server {
    pub(crate) ports: Arc<Ports>,
    pub(crate) workers: Arc<Workers>,
    pub(crate) watchdog: Watchdog,
    /// The layers of the sandbox that are in force.
    pub(crate) sandbox: Sandbox,
    /// The socket of the API, as an absolute path.
    pub(crate) api: Option<PathBuf>,
    /// Changes ports; `None`: the daemon has no configuration file.
    pub(crate) reload: Option<Reload>,
    pub(crate) captures: Arc<Captures>,
    /// Held while the state is read.
    pub(crate) look: Mutex<()>,
}

impl Server {
    /// Reads the daemon's state, at least the part at this path.
    pub(crate) fn status(&self, path: &[String]) -> Status {
        let (ports, networks) = (self.ports.all(), self.ports.networks());
        let of = (&ports[..], &networks[..]);
        let mut status = status::read(path, of, &self.workers, &self.watchdog, &self.sandbox);
        status.api.clone_from(&self.api);
        if let Some(reload) = &self.reload {
            reload.add_configuration(&mut status);
        }
        status
    }

    /// Accepts clients, for ever.
    pub(crate) fn accept(self: &Arc<Self>, listener: &UnixListener, of: &Arc<Connections>, access: Access) {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => self.serve(stream, of, access),
                // No descriptor is left, and the next attempt would fail at once, too.
                Err(_) => std::thread::sleep(ACCEPT_PAUSE),
            }
        }
    }

    /// Serves a connection on a thread of its own, if there is a place. If no thread can be started, the calling thread
    /// answers one request to read the state.
    pub(crate) fn serve(self: &Arc<Self>, stream: UnixStream, of: &Arc<Connections>, access: Access) {
        let Some(place) = of.take(stream) else { return };
        let (server, stream) = (Arc::clone(self), Arc::clone(&place.stream));
        // When the thread ends, the connection is closed.
        if thread::start("control", move || drop(server.converse(&place, access))).is_err() {
            let _ = self.answer_once(&stream);
        }
    }

    /// Answers a request to read the state, if it arrives within [`AT_ONCE`].
    fn answer_once(&self, mut stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(AT_ONCE))?;
        let mut text = [0; LONGEST_GET];
        let count = stream.read(&mut text)?;
        match read_request(&mut &text[..count], LONGEST_GET)? {
            Some(Ok(Request::Get(path))) => write_within(stream, &self.get(&path)?, AT_ONCE),
            Some(Err(refused)) => refuse(stream, refused),
            _ => {
                let why = "no thread can be started (ulimit -u, systemd: TasksMax=)";
                refuse(stream, Refused::new(Kind::Busy, why))
            }
        }
    }

    /// Answers requests until the client closes the connection.
    /// Errors: the client is gone, does not read, or sends an invalid request.
    fn converse(&self, place: &Place, access: Access) -> io::Result<()> {
        let stream = &*place.stream;
        let mut from = BufReader::new(stream);
        let longest = if access.change {
            LONGEST_REQUEST
        } else {
            LONGEST_GET
        };
        let mut next_look = Instant::now();
        while let Some(request) = read_request(&mut from, longest)? {
            place.set_busy(true);
            match request {
                Ok(Request::Get(path)) => {
                    std::thread::sleep(next_look.saturating_duration_since(Instant::now()));
                    next_look = Instant::now() + PAUSE;
                    write_within(stream, &self.get(&path)?, WRITE)?;
                }
                Ok(Request::Change(_)) if !access.change => refuse(stream, not_allowed())?,
                Ok(Request::Change(change)) => answer(stream, self.change(change, place))?,
                Ok(Request::Events { after }) => return tell(place, after),
                Ok(Request::Capture(_)) if !access.capture => refuse(stream, not_allowed())?,
                Ok(Request::Capture(request)) => return self.captures.serve(stream, request),
                Err(refused) => return refuse(stream, refused),
            }
            place.set_busy(false);
        }
        Ok(())
    }

    /// The part of the state at this path, as a line.
    fn get(&self, path: &[String]) -> io::Result<Vec<u8>> {
        if let [ports, name, rules] = path
            && (ports.as_str(), rules.as_str()) == ("ports", "rules")
        {
            let rules = self.ports.named(name).map(|port| rules_status::read(&port));
            let rules = rules.ok_or_else(|| Refused::absent(TableKind::Port, name));
            return Ok(line(&Answer::from(rules))?);
        }
        let status = {
            let _one = self.look.locked();
            self.status(path)
        };
        if path.is_empty() {
            return Ok(line(&Answer::Ok(status))?);
        }
        let all = serde_json::to_value(status)?;
        let part = path.iter().try_fold(&all, |value, name| part_of(value, name));
        let no_such = || Refused::new(Kind::NoSuch, format!("there is no {:?}", path.join("/")));
        Ok(line(&Answer::from(part.ok_or_else(no_such)))?)
    }

    fn change(&self, change: Change, place: &Place) -> Result<Changed, Refused> {
        if change == Change::ResetWorkers {
            self.workers.reset_statistics();
            return Ok(Changed {
                what: Done::Reset,
                done: vec!["statistics of workers were reset".to_owned()],
                failed: Vec::new(),
            });
        }
        let fixed = "the daemon was started without --config FILE, so its ports and networks are fixed";
        let reload = self
            .reload
            .as_ref()
            .ok_or_else(|| Refused::new(Kind::NoFile, fixed))?;
        if !place.begin_change(MOST_CHANGES) {
            let why = format!("{MOST_CHANGES} changes are under way already");
            return Err(Refused::new(Kind::Busy, why));
        }
        reload.change(change)
    }
}

fn not_allowed() -> Refused {
    let what = "nothing can be changed or captured by this connection";
    Refused::new(Kind::NotAllowed, what)
}

fn no_request(why: &str) -> Refused {
    Refused::new(Kind::NoRequest, format!("this is no request: {why}"))
}

/// The field of that name; in a list the entry of that name, else of that index.
fn part_of<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Array(list) => {
            let named = list
                .iter()
                .find(|entry| entry.get("name").is_some_and(|its| its == name));
            named.or_else(|| list.get(name.parse::<usize>().ok()?))
        }
        value => value.get(name),
    }
}

/// Reads a request; `None`: the client has closed its side.
/// Errors: the client is gone in the middle of a line.
fn read_request(from: &mut impl BufRead, longest: usize) -> io::Result<Option<Result<Request, Refused>>> {
    let mut text = Vec::new();
    from.take(longest as u64).read_until(b'\n', &mut text)?;
    match text.last() {
        None => Ok(None),
        Some(b'\n') => {
            let request = serde_json::from_slice(&text);
            Ok(Some(request.map_err(|error| no_request(&error.to_string()))))
        }
        Some(_) if text.len() < longest => Err(ErrorKind::UnexpectedEof.into()),
        Some(_) => {
            let why = format!("it is longer than {longest} bytes");
            Ok(Some(Err(no_request(&why))))
        }
    }
}

/// Sends events until the client closes the connection.
/// Errors: the client is gone, or does not read.
fn tell(place: &Place, after: u64) -> io::Result<()> {
    place.set_busy(false);
    let (mut sequence, mut read) = JOURNAL.read(after);
    loop {
        write_within(&place.stream, &line(&Answer::Ok(&read))?, WRITE)?;
        sequence = read.events.last().map_or(sequence, |event| event.sequence);
        read = loop {
            match JOURNAL.wait(sequence, LOOK) {
                Some(read) => break read,
                None if has_ended(&place.stream) => return Ok(()),
                None => {}
            }
        };
    }
}

/// Whether the client has closed its side, or sends something.
fn has_ended(stream: &UnixStream) -> bool {
    descriptors::await_readable(stream, Some(Instant::now())).unwrap_or(false)
}

fn refuse(stream: &UnixStream, refused: Refused) -> io::Result<()> {
    answer::<()>(stream, Err(refused))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request(text: &[u8]) -> io::Result<Option<Result<Request, Refused>>> {
        read_request(&mut BufReader::new(text), LONGEST_GET)
    }

    #[test]
    fn line_that_is_no_request_is_refused_with_a_remedy() {
        assert_eq!(
            request(b"{\"get\":[]}\n").expect("read"),
            Some(Ok(Request::Get(Vec::new())))
        );
        assert_eq!(request(b"").expect("the end"), None);
        request(b"{\"get\":").expect_err("the client is gone");
        let long = [b"\"".repeat(5000), b"\n".to_vec()].concat();
        for wrong in [
            b"\n" as &[u8],
            b"\"other\"\n",
            b"{}\n",
            b"reload\n",
            &[b' '; 5000],
            &long,
        ] {
            let refused = request(wrong)
                .expect("read")
                .expect("a line")
                .expect_err("no request");
            assert!(refused.message.starts_with("this is no request: "), "{refused}");
            assert!(refused.remedy.contains("docs/control.md"));
        }
    }

    #[test]
    fn part_of_a_list_is_found_by_name_or_index() {
        let value = json!({"ports": [{"name": "/run/a", "mtu": 1}, {"name": "0", "mtu": 2}]});
        let part = |path: &[&str]| {
            path.iter()
                .try_fold(&value, |value, name| part_of(value, name))
                .cloned()
        };
        assert_eq!(part(&["ports", "/run/a", "mtu"]), Some(json!(1)));
        assert_eq!(part(&["ports", "0", "mtu"]), Some(json!(2)), "a name comes first");
        assert_eq!(part(&["ports", "1", "mtu"]), Some(json!(2)));
        assert_eq!(part(&["ports", "2"]), None);
        assert_eq!(part(&["ports", "1", "mtu", "x"]), None);
    }
}
