//! Handles the requests of each [operation](crate::routes).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue, IF_NONE_MATCH};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use model::config::TableKind;
use model::control::{Change, Changed, Done, Kind, Refused};
use model::state::{WorkersDocument, documents};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::body::Body;
use crate::changes::Changes;
use crate::daemon::Daemon;
use crate::events::{Events, EventsDocument};
use crate::metrics;
use crate::problem::Problem;
use crate::requests::{self, RuleKeys};
use crate::routes::{Listener, Query, What, find};

/// The API's document.
const OPENAPI: &str = include_str!("../../../docs/openapi.json");
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// What is needed to answer requests.
#[derive(Clone)]
pub(super) struct State {
    pub(super) daemon: Daemon,
    pub(super) changes: Changes,
    pub(super) events: Events,
    pub(super) long_bodies: Arc<Semaphore>,
}

impl State {
    /// The same for requests of root and the owner, with capacity that requests of other users cannot use up.
    pub(super) fn for_owner(&self) -> Self {
        Self {
            changes: self.changes.for_owner(),
            long_bodies: Arc::new(Semaphore::new(requests::LONG_BODIES)),
            ..self.clone()
        }
    }
}

/// Answers a request; a problem with it is an answer, too.
pub(super) async fn answer<B>(state: &State, listener: Listener, request: Request<B>) -> Response<Body>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let made = make(state, listener, request).await;
    made.unwrap_or_else(|problem| problem.answer())
}

async fn make<B>(state: &State, listener: Listener, request: Request<B>) -> Result<Response<Body>, Problem>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let (operation, name) = find(listener, request.method(), request.uri().path())?;
    let looks = operation.method == "GET";
    match listener {
        _ if looks => {}
        Listener::ReadWrite => {}
        Listener::ReadByOthers => return Err(Problem::Others),
        Listener::ReadOnly | Listener::Metrics => return Err(Problem::ReadOnly),
    }
    if operation.body.is_none() && !request.body().is_end_stream() {
        return Err(Problem::Body);
    }
    let query = Query::read(operation, request.uri().query().unwrap_or(""))?;
    if looks {
        return look(state, (operation.what, name), &request, &query).await;
    }
    let change = change_of(state, (operation.what, name), request, &query).await?;
    let mut done = state.changes.make(change).await?;
    if done.what == Done::Reloaded && !done.failed.is_empty() {
        return Err(Problem::Refused(Refused::new(
            Kind::Failed,
            done.failed.join("; "),
        )));
    }
    // The change is in force, but not kept for the next start.
    done.done.append(&mut done.failed);
    Ok(changed(&done))
}

/// The change that a request asks for.
async fn change_of<B>(
    state: &State,
    (what, name): (What, String),
    request: Request<B>,
    query: &Query,
) -> Result<Change, Problem>
where
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let long = &*state.long_bodies;
    let table = match what {
        What::PutNetwork | What::PatchNetwork | What::DeleteNetwork => TableKind::Network,
        _ => TableKind::Port,
    };
    Ok(match what {
        What::PutPort | What::PutNetwork => Change::Put {
            table,
            name,
            only_new: is_new(request.headers())?,
            keys: requests::read(long, request.into_body()).await?,
        },
        What::PatchPort | What::PatchNetwork => Change::Patch {
            table,
            name,
            keys: requests::read(long, request.into_body()).await?,
            disconnect: query.disconnect.unwrap_or(false),
        },
        What::PutRules => Change::Patch {
            table,
            name,
            keys: requests::read::<RuleKeys, _>(long, request.into_body())
                .await?
                .into_keys(),
            disconnect: false,
        },
        What::DeletePort | What::DeleteNetwork => Change::Remove { table, name },
        What::ResetWorkers => Change::ResetWorkers,
        What::Reload => Change::Reload,
        other => unreachable!("{other:?} changes nothing"),
    })
}

/// Answers a request that only reads.
async fn look<B>(
    state: &State,
    (what, name): (What, String),
    request: &Request<B>,
    query: &Query,
) -> Result<Response<Body>, Problem> {
    match what {
        What::GetEvents => return Ok(events(state, request.headers(), request.method(), query).await),
        What::GetDocument => return Ok(whole("application/json", OPENAPI)),
        What::GetRules => {
            let rules = state.daemon.rules(&name).await?;
            return Ok(json_of(&json!(rules.ok_or(Problem::NoPort(name))?)));
        }
        _ => {}
    }
    let status = state.daemon.status().await?;
    Ok(match what {
        What::GetMetrics => whole(metrics::MEDIA_TYPE, metrics::render(status)),
        What::ListNetworks => json_of(&documents::networks(&status)),
        What::GetNetwork => {
            let network = status.networks.iter().find(|network| network.name == name);
            let network = network.ok_or(Problem::NoNetwork(name))?;
            json_of(&documents::without_counters(json!(network)))
        }
        What::ListPorts => json_of(&documents::ports(&status)),
        What::GetCounters => json_of(&documents::counters(&status)),
        What::GetPort => {
            let port = status.ports.iter().find(|port| port.name == name);
            let port = port.ok_or_else(|| Problem::NoPort(name.clone()))?;
            let mut view = documents::without_counters(json!(port));
            if port.rules.filter.is_some()
                && let Some(rules) = state.daemon.rules(&name).await?
            {
                documents::with_rules(&mut view, rules);
            }
            json_of(&view)
        }
        What::GetWorkers => json_of(&json!(WorkersDocument::of(&status))),
        What::GetStatus => json_of(&documents::daemon(&status)),
        other => unreachable!("{other:?} has no document"),
    })
}

/// Whether the request must not replace a port or network: `If-None-Match: *` (RFC 9110, 13.1.2).
fn is_new(headers: &HeaderMap) -> Result<bool, Problem> {
    match headers.get(IF_NONE_MATCH).map(HeaderValue::as_bytes) {
        None => Ok(false),
        Some(b"*") => Ok(true),
        Some(_) => Err(Problem::Query("If-None-Match: only `*` is supported".to_owned())),
    }
}

fn changed(changed: &Changed) -> Response<Body> {
    let mut response = json_of(&json!(changed));
    if changed.what == Done::Added {
        *response.status_mut() = StatusCode::CREATED;
    }
    response
}

async fn events(state: &State, headers: &HeaderMap, method: &Method, query: &Query) -> Response<Body> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    // A client that resumes a stream sends this header with the URL of its first request, whose `after` is older.
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
    json_of(&json!(EventsDocument {
        lost: read.lost,
        last: next,
        events: read.events,
    }))
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
