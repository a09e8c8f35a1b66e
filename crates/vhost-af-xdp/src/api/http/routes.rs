//! What is answered to which request.

use std::time::Duration;

use bytes::Bytes;
use hyper::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response};
use serde_json::{Value, json};

use super::body::Body;
use super::daemon::Daemon;
use super::events::Events;
use super::metrics;
use super::problem::Problem;
use super::views;

/// The API's document.
const OPENAPI: &str = include_str!("../../../../../docs/openapi.json");
/// Longest wait for events that a client may ask for.
const LONGEST_WAIT: u64 = 20;
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Where a client came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Door {
    /// A socket on which all is had.
    Api,
    /// An address at which only metrics are.
    Metrics,
}

/// What answers are made of.
#[derive(Clone)]
pub(super) struct State {
    pub(super) daemon: Daemon,
    pub(super) events: Events,
}

/// Something that can be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thing {
    Status,
    Networks,
    Ports,
    Port,
    Counters,
    Events,
    Metrics,
    OpenApi,
}

/// Paths as the API's document has them.
const ROUTES: &[(&str, Thing)] = &[
    ("/v1/status", Thing::Status),
    ("/v1/networks", Thing::Networks),
    ("/v1/ports", Thing::Ports),
    ("/v1/ports/{name}", Thing::Port),
    ("/v1/counters", Thing::Counters),
    ("/v1/events", Thing::Events),
    ("/v1/openapi.json", Thing::OpenApi),
    ("/metrics", Thing::Metrics),
];

/// Answers a request, whatever it is.
pub(super) async fn answer<B: hyper::body::Body>(
    state: &State,
    door: Door,
    request: Request<B>,
) -> Response<Body> {
    let made = make(state, door, &request).await;
    made.unwrap_or_else(|problem| problem.answer())
}

async fn make<B: hyper::body::Body>(
    state: &State,
    door: Door,
    request: &Request<B>,
) -> Result<Response<Body>, Problem> {
    let (thing, name) = find(door, request.uri().path())?;
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        return Err(Problem::Method(request.method().to_string()));
    }
    if !request.body().is_end_stream() {
        return Err(Problem::Body);
    }
    let query = Query::read(request.uri().query().unwrap_or(""))?;
    if thing != Thing::Events && query != Query::default() {
        return Err(Problem::Query("this takes no parameters".to_owned()));
    }
    Ok(match thing {
        Thing::Status => json_of(&views::daemon(&*state.daemon.status().await?)),
        Thing::Networks => json_of(&views::networks(&*state.daemon.status().await?)),
        Thing::Ports => json_of(&views::ports(&*state.daemon.status().await?)),
        Thing::Counters => json_of(&views::counters(&*state.daemon.status().await?)),
        Thing::Port => {
            let status = state.daemon.status().await?;
            let port = status.ports.iter().find(|port| port.name == name);
            json_of(&views::port(port.ok_or(Problem::NoPort(name))?))
        }
        Thing::Events => events(state, request.headers(), request.method(), &query).await,
        Thing::OpenApi => whole("application/json", OPENAPI),
        Thing::Metrics => {
            let status = state.daemon.status().await?;
            whole(metrics::MEDIA_TYPE, metrics::render(&status))
        }
    })
}

/// What a path names, and what stands for `{name}` in it.
fn find(door: Door, path: &str) -> Result<(Thing, String), Problem> {
    let unknown = || Problem::NoRoute(path.to_owned());
    for (route, thing) in ROUTES {
        if door == Door::Metrics && *thing != Thing::Metrics {
            continue;
        }
        match route.strip_suffix("{name}") {
            None if *route == path => return Ok((*thing, String::new())),
            Some(before) => {
                if let Some(name) = path.strip_prefix(before).filter(|name| !name.contains('/')) {
                    return Ok((*thing, decoded(name).ok_or_else(unknown)?));
                }
            }
            None => {}
        }
    }
    Err(unknown())
}

/// Percent-encoded text (RFC 3986, 2.1).
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, tail) = rest.split_at_checked(2)?;
        let digit = |at: usize| char::from(digits[at]).to_digit(16);
        bytes.push(u8::try_from(digit(0)? * 16 + digit(1)?).ok()?);
        rest = tail;
    }
    String::from_utf8(bytes).ok()
}

/// Parameters of a request for events.
#[derive(Debug, Default, PartialEq, Eq)]
struct Query {
    after: Option<u64>,
    /// Seconds.
    wait: Option<u64>,
}

impl Query {
    fn read(text: &str) -> Result<Self, Problem> {
        let mut query = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let into = match name {
                "after" => &mut query.after,
                "wait" => &mut query.wait,
                _ => return Err(Problem::Query(format!("there is no parameter {name:?}"))),
            };
            let number = value.parse().ok();
            *into = Some(number.ok_or_else(|| Problem::Query(format!("{pair:?}: a number from 0 on")))?);
        }
        if query.wait.is_some_and(|wait| wait > LONGEST_WAIT) {
            return Err(Problem::Query(format!("wait: {LONGEST_WAIT} seconds at most")));
        }
        Ok(query)
    }
}

async fn events(state: &State, headers: &HeaderMap, method: &Method, query: &Query) -> Response<Body> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    // A client that comes back says there where it was; it asks with the address that it has asked with before.
    let last = text(LAST_EVENT_ID).and_then(|id| id.parse().ok());
    let after = last.or(query.after).unwrap_or(0);
    let wants_stream = text(ACCEPT).is_some_and(|accepted| accepted.contains("text/event-stream"));
    if wants_stream {
        let body = match *method == Method::HEAD {
            true => Body::Whole(None),
            false => state.events.stream(after),
        };
        return with_type("text/event-stream", body);
    }
    let wait = Duration::from_secs(query.wait.unwrap_or(0));
    let read = state.events.after(after, wait).await;
    let next = read.events.last().map_or(after, |event| event.sequence);
    json_of(&json!({ "lost": read.lost, "last": next, "events": read.events }))
}

fn json_of(value: &Value) -> Response<Body> {
    whole("application/json", value.to_string())
}

fn whole(media_type: &'static str, text: impl Into<Bytes>) -> Response<Body> {
    with_type(media_type, Body::whole(text))
}

fn with_type(media_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn document_has_the_routes_that_there_are() {
        let document: Value = serde_json::from_str(OPENAPI).expect("JSON");
        let paths = document["paths"].as_object().expect("paths");
        let documented: BTreeSet<&str> = paths.keys().map(String::as_str).collect();
        assert_eq!(documented, ROUTES.iter().map(|(path, _)| *path).collect());
    }

    #[test]
    fn name_in_a_path_is_decoded_and_ends_at_a_slash() {
        let port = |path: &str| find(Door::Api, path).ok();
        let named = |name: &str| Some((Thing::Port, name.to_owned()));
        assert_eq!(port("/v1/ports/vm1"), named("vm1"));
        assert_eq!(port("/v1/ports/%2Frun%2fa.sock"), named("/run/a.sock"));
        assert_eq!(port("/v1/ports/f%C3%BCr"), named("für"));
        for path in [
            "/v1/ports/a/b",
            "/v1/ports/%",
            "/v1/ports/%2",
            "/v1/ports/%zz",
            "/v1/ports/%ff",
            "/v2/ports",
            "/",
            "",
            "/v1/ports%2Fa",
        ] {
            assert_eq!(port(path), None, "{path}");
        }
    }

    #[test]
    fn only_metrics_are_had_at_their_address() {
        for (path, _) in ROUTES {
            let found = find(Door::Metrics, path).is_ok();
            assert_eq!(found, *path == "/metrics", "{path}");
        }
    }

    #[test]
    fn parameters_that_mean_nothing_are_refused() {
        let read = |text: &str| Query::read(text);
        let query = read("after=7&wait=20").expect("both");
        assert_eq!((query.after, query.wait), (Some(7), Some(20)));
        for wrong in [
            "wait=21",
            "after=-1",
            "after=",
            "after",
            "x=1",
            "wait=1s",
            "after=99999999999999999999",
        ] {
            read(wrong).expect_err(wrong);
        }
    }
}
