//! Events for clients: keeps the newest events of the daemon, and offers two ways to read them.
//!
//! A client that reads too slowly does not delay others: it loses the oldest events and receives their number.

use std::fmt::Write as _;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use model::control::Request;
use model::events::{Event, Read, Ring};
use schemars::JsonSchema;
use serde::Serialize;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};

use crate::body::Body;
use crate::link::Link;

/// Interval of comments on a stream without events; writing one shows whether the connection is lost.
const BEAT: Duration = Duration::from_secs(15);
/// Pieces that are made ahead for a client that does not read.
const AHEAD: usize = 4;

/// Events after one that the client names.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct EventsDocument {
    /// Number of events after that one that are not kept any more.
    pub(super) lost: u64,
    /// Sequence of the last one here: `after` of the next request.
    pub(super) last: u64,
    /// Oldest first.
    pub(super) events: Vec<Event>,
}

/// See the module's head.
#[derive(Clone)]
pub(super) struct Events {
    ring: Arc<Mutex<Ring>>,
    newest: watch::Sender<u64>,
}

impl Events {
    pub(super) fn new() -> Self {
        Self {
            ring: Arc::new(Mutex::new(Ring::new())),
            newest: watch::Sender::new(0),
        }
    }

    /// Stores the events of the daemon, until it ends.
    /// Errors: the daemon has ended, or sends an invalid event.
    pub(super) async fn serve(self, mut link: Link) -> io::Result<()> {
        link.send(&Request::Events { after: 0 }).await?;
        loop {
            let read = link.receive::<Read>().await?.map_err(io::Error::other)?;
            for event in read.events {
                let sequence = event.sequence;
                self.ring().push(event);
                self.newest.send_replace(sequence);
            }
        }
    }

    /// Waits for events after `sequence`, at most for `wait`.
    pub(super) async fn after(&self, sequence: u64, wait: Duration) -> Read {
        let sequence = self.known(sequence);
        let deadline = Instant::now() + wait;
        let mut newest = self.newest.subscribe();
        // An error means that no event arrived in time, or that the daemon has ended.
        let _ = timeout_at(deadline, newest.wait_for(|&newest| newest > sequence)).await;
        self.ring().after(sequence)
    }

    /// A number newer than all events is of an earlier daemon: this one began at 1 again.
    fn known(&self, sequence: u64) -> u64 {
        match sequence > self.ring().newest() {
            true => 0,
            false => sequence,
        }
    }

    /// Streams all events after `sequence` (server-sent events).
    pub(super) fn stream(&self, mut sequence: u64) -> Body {
        let (chunks, body) = mpsc::channel(AHEAD);
        let events = self.clone();
        tokio::spawn(async move {
            // A first comment: the client sees at once that the stream is open.
            let mut text = ": vhost-af-xdp\n\n".to_owned();
            while chunks.send(Bytes::from(text)).await.is_ok() {
                let read = tokio::select! {
                    read = events.after(sequence, BEAT) => read,
                    () = chunks.closed() => return,
                };
                sequence = read.events.last().map_or(sequence, |event| event.sequence);
                text = rendered(&read);
            }
        });
        Body::coming(body)
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Encodes events as the HTML standard defines (9.2.5, interpreting an event stream).
fn rendered(read: &Read) -> String {
    if read.events.is_empty() {
        return ":\n\n".to_owned();
    }
    let mut text = String::new();
    // Writing to a String cannot fail.
    if read.lost > 0 {
        let _ = write!(text, "event: lost\ndata: {{\"lost\":{}}}\n\n", read.lost);
    }
    for event in &read.events {
        let data = serde_json::to_string(event).unwrap_or_default();
        let name = serde_json::to_string(&event.event).unwrap_or_default();
        let name = name.trim_matches('"');
        let _ = write!(text, "id: {}\nevent: {name}\ndata: {data}\n\n", event.sequence);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::events::What;

    fn event(sequence: u64) -> Event {
        Event {
            sequence,
            unix_ms: 0,
            port: Some("a\nid: 7".to_owned()),
            network: None,
            event: What::LinkDown,
            reason: None,
            detail: None,
        }
    }

    #[test]
    fn name_with_a_newline_makes_no_line_of_its_own() {
        let read = Read {
            lost: 3,
            events: vec![event(4)],
        };
        let text = rendered(&read);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[..3], ["event: lost", "data: {\"lost\":3}", ""]);
        assert_eq!(lines[3..5], ["id: 4", "event: link-down"]);
        assert!(lines[5].starts_with("data: {") && lines.len() == 7, "{text}");
    }

    #[test]
    fn events_of_another_daemon_are_not_waited_for() {
        let events = Events::new();
        events.ring().push(event(1));
        assert_eq!((events.known(0), events.known(1), events.known(2)), (0, 1, 0));
    }
}
