//! What is answered to which request.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue, IF_NONE_MATCH};
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri};
use model::control::{Change, Changed, Done, Refused};
use model::state::{WorkersDocument, documents};
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::body::Body;
use crate::changes::Changes;
use crate::daemon::Daemon;
use crate::events::Events;
use crate::metrics;
use crate::problem::Problem;

/// The API's document.
const OPENAPI: &str = include_str!("../../../docs/openapi.json");
/// Longest wait for events that a client may ask for.
const LONGEST_WAIT: u64 = 20;
/// Most bytes of a body, and how long it may take.
const MOST_OF_A_BODY: usize = 8 << 10;
/// The same of one with filter rules, and how many of them are read at a time.
const MOST_OF_A_LONG_BODY: usize = 2 << 20;
pub(super) const LONG_BODIES: usize = 4;
const BODY: Duration = Duration::from_secs(10);
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Where a client came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Door {
    /// A socket on which all is had.
    All,
    /// The same, by somebody who may look only.
    Others,
    /// A socket on which nothing is changed.
    ReadOnly,
    /// An address at which only metrics are.
    Metrics,
}

/// What answers are made of.
#[derive(Clone)]
pub(super) struct State {
    pub(super) daemon: Daemon,
    pub(super) changes: Changes,
    pub(super) events: Events,
    pub(super) long_bodies: Arc<Semaphore>,
}

impl State {
    /// For root and the owner: what others hold of it is nothing to them.
    pub(super) fn for_owner(&self) -> Self {
        Self {
            changes: self.changes.for_owner(),
            long_bodies: Arc::new(Semaphore::new(LONG_BODIES)),
            ..self.clone()
        }
    }
}

/// Something that can be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Thing {
    Status,
    Networks,
    Network,
    Ports,
    Port,
    Rules,
    Counters,
    Workers,
    ResetWorkers,
    Events,
    Metrics,
    OpenApi,
    Reload,
}

impl Thing {
    /// What may be done with it, beside GET and HEAD.
    fn methods(self) -> (&'static [Method], &'static str) {
        match self {
            Self::Port => (
                &[
                    Method::GET,
                    Method::HEAD,
                    Method::PUT,
                    Method::PATCH,
                    Method::DELETE,
                ],
                "GET, HEAD, PUT, PATCH, DELETE",
            ),
            Self::Rules => (&[Method::GET, Method::HEAD, Method::PUT], "GET, HEAD, PUT"),
            Self::Reload | Self::ResetWorkers => (&[Method::POST], "POST"),
            _ => (&[Method::GET, Method::HEAD], "GET, HEAD"),
        }
    }
}

/// The path whose answer may wait.
const EVENTS: &str = "/v1/events";

/// Paths as the API's document has them.
const ROUTES: &[(&str, Thing)] = &[
    ("/v1/status", Thing::Status),
    ("/v1/networks", Thing::Networks),
    ("/v1/networks/{name}", Thing::Network),
    ("/v1/ports", Thing::Ports),
    ("/v1/ports/{name}", Thing::Port),
    ("/v1/ports/{name}/rules", Thing::Rules),
    ("/v1/counters", Thing::Counters),
    ("/v1/workers", Thing::Workers),
    ("/v1/workers/reset", Thing::ResetWorkers),
    (EVENTS, Thing::Events),
    ("/v1/reload", Thing::Reload),
    ("/v1/openapi.json", Thing::OpenApi),
    ("/metrics", Thing::Metrics),
];

/// Answers a request, whatever it is.
pub(super) async fn answer<B>(state: &State, door: Door, request: Request<B>) -> Response<Body>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let made = make(state, door, request).await;
    made.unwrap_or_else(|problem| problem.answer())
}

async fn make<B>(state: &State, door: Door, request: Request<B>) -> Result<Response<Body>, Problem>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let (thing, name) = find(door, request.uri().path())?;
    let (methods, allowed) = thing.methods();
    let method = request.method().clone();
    if !methods.contains(&method) {
        let method = method.to_string();
        return Err(Problem::Method { method, allowed });
    }
    let looks = [Method::GET, Method::HEAD].contains(&method);
    match door {
        _ if looks => {}
        Door::All => {}
        Door::Others => return Err(Problem::Others),
        Door::ReadOnly | Door::Metrics => return Err(Problem::ReadOnly),
    }
    let has_body = [Method::PUT, Method::PATCH].contains(&method);
    if !has_body && !request.body().is_end_stream() {
        return Err(Problem::Body);
    }
    let query = Query::read(request.uri().query().unwrap_or(""))?;
    query.check(thing, &method)?;
    if looks {
        return look(state, (thing, name), &request, &query).await;
    }
    let change = match thing {
        Thing::ResetWorkers => Change::ResetWorkers,
        _ => change_of(state, (thing, name), request, &query).await?,
    };
    let done = state.changes.make(change).await?;
    match done.failed.as_slice() {
        [] => Ok(changed(&done)),
        failed => Err(Problem::Refused(Refused::failed(failed.join("; ")))),
    }
}

/// What is to be changed of a thing.
async fn change_of<B>(
    state: &State,
    (thing, name): (Thing, String),
    request: Request<B>,
    query: &Query,
) -> Result<Change, Problem>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    Ok(match *request.method() {
        Method::PUT if thing == Thing::Rules => Change::Patch {
            name,
            keys: rules_of(long_keys_of(state, request.into_body()).await?)?,
            disconnect: false,
        },
        Method::PUT => Change::Put {
            name,
            only_new: is_new(request.headers())?,
            keys: long_keys_of(state, request.into_body()).await?,
        },
        Method::PATCH => Change::Patch {
            name,
            keys: long_keys_of(state, request.into_body()).await?,
            disconnect: query.disconnect.unwrap_or(false),
        },
        Method::DELETE => Change::Remove { name },
        _ => Change::Reload,
    })
}

/// What a thing looks like now.
async fn look<B>(
    state: &State,
    (thing, name): (Thing, String),
    request: &Request<B>,
    query: &Query,
) -> Result<Response<Body>, Problem> {
    Ok(match thing {
        Thing::Status => json_of(&documents::daemon(&*state.daemon.status().await?)),
        Thing::Networks => json_of(&documents::networks(&*state.daemon.status().await?)),
        Thing::Network => {
            let status = state.daemon.status().await?;
            let network = status.networks.iter().find(|network| network.name == name);
            json_of(&documents::network(network.ok_or(Problem::NoNetwork(name))?))
        }
        Thing::Ports => json_of(&documents::ports(&*state.daemon.status().await?)),
        Thing::Counters => json_of(&documents::counters(&*state.daemon.status().await?)),
        Thing::Port => {
            let status = state.daemon.status().await?;
            let port = status.ports.iter().find(|port| port.name == name);
            let port = port.ok_or_else(|| Problem::NoPort(name.clone()))?;
            let mut view = documents::port(&status, port);
            if port.rules.filter.is_some()
                && let Some(rules) = state.daemon.rules(&name).await?
            {
                documents::with_rules(&mut view, rules);
            }
            json_of(&view)
        }
        Thing::Rules => {
            let rules = state.daemon.rules(&name).await?;
            json_of(&json!(rules.ok_or(Problem::NoPort(name))?))
        }
        Thing::Events => events(state, request.headers(), request.method(), query).await,
        Thing::Workers => json_of(&json!(WorkersDocument::of(&*state.daemon.status().await?))),
        // They are done only.
        Thing::Reload | Thing::ResetWorkers => json_of(&Value::Null),
        Thing::OpenApi => whole("application/json", OPENAPI),
        Thing::Metrics => {
            let status = state.daemon.status().await?;
            whole(metrics::MEDIA_TYPE, metrics::render(status))
        }
    })
}

/// Whether nothing is to be replaced (RFC 9110, 13.1.2).
fn is_new(headers: &HeaderMap) -> Result<bool, Problem> {
    match headers.get(IF_NONE_MATCH).map(HeaderValue::as_bytes) {
        None => Ok(false),
        Some(b"*") => Ok(true),
        Some(_) => Err(Problem::Query(
            "If-None-Match: only `*` means something".to_owned(),
        )),
    }
}

/// What a body says of a port, which may be long where it says filter rules: few of these are read at a time.
async fn long_keys_of<B>(state: &State, body: B) -> Result<Map<String, Value>, Problem>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let is_short = body
        .size_hint()
        .upper()
        .is_some_and(|bytes| bytes <= MOST_OF_A_BODY as u64);
    if is_short {
        return keys_of(body, MOST_OF_A_BODY).await;
    }
    let Ok(_place) = state.long_bodies.try_acquire() else {
        return Err(Problem::Busy);
    };
    keys_of(body, MOST_OF_A_LONG_BODY).await
}

/// As keys of a port: all rules, and both defaults, which are not said where the body does not say them.
fn rules_of(mut body: Map<String, Value>) -> Result<Map<String, Value>, Problem> {
    let rules = body
        .remove("rules")
        .ok_or_else(|| Problem::Json("rules: is missing".to_owned()))?;
    if !matches!(rules, Value::Array(_) | Value::String(_)) {
        return Err(Problem::Json("rules: give a list, [] for none".to_owned()));
    }
    let mut keys = Map::new();
    keys.insert("rule".to_owned(), rules);
    for key in ["from-guest-default", "to-guest-default"] {
        keys.insert(key.to_owned(), body.remove(key).unwrap_or(Value::Null));
    }
    match body.keys().next() {
        Some(key) => Err(Problem::Json(format!(
            "{key}: there are rules, from-guest-default and to-guest-default"
        ))),
        None => Ok(keys),
    }
}

/// What a body of so many bytes at most says of a port.
async fn keys_of<B>(mut body: B, most: usize) -> Result<Map<String, Value>, Problem>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let read = async {
        let mut text = Vec::new();
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            let frame = frame.map_err(|_| Problem::Json("it ends too early".to_owned()))?;
            if let Ok(data) = frame.into_data() {
                if text.len() + data.len() > most {
                    return Err(Problem::LongBody(most));
                }
                text.extend_from_slice(&data);
            }
        }
        serde_json::from_slice(&text).map_err(|error| Problem::Json(error.to_string()))
    };
    timeout(BODY, read).await.unwrap_or(Err(Problem::SlowBody))
}

fn changed(changed: &Changed) -> Response<Body> {
    let mut response = json_of(&json!(changed));
    if changed.what == Done::Added {
        *response.status_mut() = StatusCode::CREATED;
    }
    response
}

/// What a path names, and what stands for `{name}` in it.
fn find(door: Door, path: &str) -> Result<(Thing, String), Problem> {
    let unknown = || Problem::NoRoute(path.to_owned());
    for (route, thing) in ROUTES {
        if door == Door::Metrics && *thing != Thing::Metrics {
            continue;
        }
        match route.split_once("{name}") {
            None if *route == path => return Ok((*thing, String::new())),
            Some((before, behind)) => {
                let name = path
                    .strip_prefix(before)
                    .and_then(|rest| rest.strip_suffix(behind));
                if let Some(name) = name.filter(|name| !name.contains('/')) {
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
    disconnect: Option<bool>,
}

impl Query {
    fn read(text: &str) -> Result<Self, Problem> {
        let mut query = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if name == "disconnect" {
                let value = value.parse().ok();
                let wrong = || Problem::Query(format!("{pair:?}: true or false"));
                query.disconnect = Some(value.ok_or_else(wrong)?);
                continue;
            }
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

    /// Errors: they are not for this.
    fn check(&self, thing: Thing, method: &Method) -> Result<(), Problem> {
        let of_events = self.after.is_some() || self.wait.is_some();
        let no = |words: &str| Err(Problem::Query(words.to_owned()));
        match (thing, method) {
            _ if *self == Self::default() => Ok(()),
            (Thing::Events, _) if self.disconnect.is_none() => Ok(()),
            (Thing::Port, &Method::PATCH) if !of_events => Ok(()),
            (Thing::Events | Thing::Port, _) => no("there is another parameter than this takes"),
            _ => no("this takes no parameters"),
        }
    }
}

/// Whether the answer may wait for events.
pub(super) fn may_wait(uri: &Uri) -> bool {
    uri.path() == EVENTS
}

async fn events(state: &State, headers: &HeaderMap, method: &Method, query: &Query) -> Response<Body> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    // A client that comes back says there where it was; it asks with the address that it has asked with before.
    let last = text(LAST_EVENT_ID).and_then(|id| id.parse().ok());
    let after = last.or(query.after).unwrap_or(0);
    let wants_stream = text(ACCEPT).is_some_and(|accepted| accepted.contains("text/event-stream"));
    if wants_stream {
        let body = match *method == Method::HEAD {
            true => Body::whole(Bytes::new()),
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
        let port = |path: &str| find(Door::All, path).ok();
        let named = |name: &str| Some((Thing::Port, name.to_owned()));
        assert_eq!(port("/v1/ports/vm1"), named("vm1"));
        assert_eq!(port("/v1/ports/%2Frun%2fa.sock"), named("/run/a.sock"));
        assert_eq!(port("/v1/ports/f%C3%BCr"), named("für"));
        let rules = Some((Thing::Rules, "vm1".to_owned()));
        assert_eq!(port("/v1/ports/vm1/rules"), rules);
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
            "disconnect=1",
            "disconnect",
            "wait=1s",
            "after=99999999999999999999",
        ] {
            read(wrong).expect_err(wrong);
        }
    }
}
