//! Operations of the API: paths, methods, parameters, bodies and answers, each described once.
//!
//! [`answers`](crate::answers) performs an [`Operation`]. Crate `manual` generates docs/openapi.json from the table.

use hyper::{Method, Uri};
use model::config::{Network, Port};
use model::control::Changed;
use model::state::documents::{CountersDocument, DaemonDocument, NetworksDocument, PortsDocument};
use model::state::{NetworkStatus, PortStatus, RulesStatus, WorkersDocument};
use percent_encoding::percent_decode_str;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde_json::{Map, Value};

use crate::events::EventsDocument;
use crate::problem::Problem;
use crate::requests::RuleKeys;

/// Longest wait for events that a client may ask for, seconds.
const LONGEST_WAIT: u64 = 20;

/// The listening socket of a client's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listener {
    /// Socket with full access.
    ReadWrite,
    /// The same socket, for a user who may only read.
    ReadByOthers,
    /// Socket for reading.
    ReadOnly,
    /// Address with metrics only.
    Metrics,
}

/// Makes the JSON Schema of a type.
pub type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

const fn body<T: JsonSchema>() -> Option<SchemaOf> {
    Some(of::<T>)
}

/// An operation of the API.
#[derive(Debug)]
pub struct Operation {
    /// What it does.
    pub what: What,
    /// Summary, and a description after an empty line.
    pub about: &'static [&'static str],
    /// HTTP method; HEAD is handled as GET.
    pub method: &'static str,
    /// Path, which may contain `{name}`.
    pub path: &'static str,
    /// Parameters other than the name in the path.
    pub parameters: &'static [Parameter],
    /// Schema of the request's body, if it has one.
    pub body: Option<SchemaOf>,
    /// Schema of the answer.
    pub answer: SchemaOf,
}

/// A parameter: name, place (`query` or `header`), JSON type, and what it means.
pub type Parameter = (&'static str, &'static str, &'static str, &'static str);

const AFTER: Parameter = (
    "after",
    "query",
    "integer",
    "Only events after this sequence [default: 0]",
);
const WAIT: Parameter = (
    "wait",
    "query",
    "integer",
    "Seconds to wait for the first one, at most 20 [default: 0]",
);
const LAST: Parameter = (
    "Last-Event-ID",
    "header",
    "string",
    "As `after`: sent by clients that resume a stream",
);
const ONLY_NEW: Parameter = (
    "If-None-Match",
    "header",
    "string",
    "`*`: only if there is none of that name",
);
const DISCONNECT: Parameter = (
    "disconnect",
    "query",
    "boolean",
    "Allow the change to disconnect the guest [default: false]",
);

/// Describes all operations: method, path, what is sent, parameters, what it does, what is answered.
macro_rules! operations {
    ($(
        $(#[doc = $about:literal])+
        $method:ident $path:literal $(($body:ty))? $([$($parameter:ident),+])? $what:ident -> $answer:ty;
    )+) => {
        /// What an operation does.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum What { $($(#[doc = $about])+ $what),+ }

        /// All operations.
        pub const OPERATIONS: &[Operation] = &[$(Operation {
            what: What::$what,
            about: &[$($about),+],
            method: stringify!($method),
            path: $path,
            parameters: &[$($($parameter),+)?],
            body: [$(body::<$body>(),)? None][0],
            answer: of::<$answer>,
        }),+];
    };
}

operations! {
    /// The daemon
    GET "/v1/status" GetStatus -> DaemonDocument<'static>;
    /// All networks
    GET "/v1/networks" ListNetworks -> NetworksDocument<'static>;
    /// One network
    GET "/v1/networks/{name}" GetNetwork -> NetworkStatus;
    /// Adds or replaces a network
    ///
    /// It is added to the networks of the file, until it is removed, the file has one of its name, or the daemon ends.
    /// Guests of its ports stay connected.
    PUT "/v1/networks/{name}" (Network) [ONLY_NEW] PutNetwork -> Changed;
    /// Changes some keys of a network
    ///
    /// A key that is null is removed.
    PATCH "/v1/networks/{name}" (Network) PatchNetwork -> Changed;
    /// Removes a network that was added and has no ports
    DELETE "/v1/networks/{name}" DeleteNetwork -> Changed;
    /// All ports
    GET "/v1/ports" ListPorts -> PortsDocument<'static>;
    /// One port
    GET "/v1/ports/{name}" GetPort -> PortStatus;
    /// Adds or replaces a port
    ///
    /// It is added to the ports of the file, until it is removed, the file has one of its name, or the daemon ends.
    /// A change that a running port cannot follow disconnects its guest.
    PUT "/v1/ports/{name}" (Port) [ONLY_NEW] PutPort -> Changed;
    /// Changes some keys of a port
    ///
    /// A key that is null is removed.
    PATCH "/v1/ports/{name}" (Port) [DISCONNECT] PatchPort -> Changed;
    /// Removes a port that was added
    DELETE "/v1/ports/{name}" DeletePort -> Changed;
    /// Filter rules of a port, and how many frames each decided about
    GET "/v1/ports/{name}/rules" GetRules -> RulesStatus;
    /// Replaces all filter rules of a port
    ///
    /// They apply to every frame that arrives after the answer; the guest stays connected. Counters restart at 0 where
    /// something changed.
    PUT "/v1/ports/{name}/rules" (RuleKeys) PutRules -> Changed;
    /// All counters
    GET "/v1/counters" GetCounters -> CountersDocument<'static>;
    /// Statistics of workers, and the share of each port
    GET "/v1/workers" GetWorkers -> WorkersDocument;
    /// Resets the statistics of workers; counters and metrics go on
    POST "/v1/workers/reset" ResetWorkers -> Changed;
    /// Events so far, and new events
    ///
    /// A stream (`Accept: text/event-stream`) has Server-sent events: `id` is the sequence, `event` what happened,
    /// `data` an Event; an event `lost` has data of the form {"lost": N}.
    GET "/v1/events" [AFTER, WAIT, LAST] GetEvents -> EventsDocument;
    /// Reads the configuration file again
    POST "/v1/reload" Reload -> Changed;
    /// This document
    GET "/v1/openapi.json" GetDocument -> Map<String, Value>;
    /// All counters, in Prometheus' text format, version 0.0.4
    GET "/metrics" GetMetrics -> String;
}

/// The path whose answer may wait.
const EVENTS: &str = "/v1/events";

/// What a request asks for, and the `{name}` of its path.
pub(super) fn find(
    listener: Listener,
    method: &Method,
    path: &str,
) -> Result<(&'static Operation, String), Problem> {
    let is_had = |operation: &&Operation| listener != Listener::Metrics || operation.what == What::GetMetrics;
    let at = OPERATIONS.iter().filter(is_had);
    let mut at = at
        .filter_map(|operation| Some((operation, name_in(operation.path, path)?)))
        .peekable();
    let Some(&(Operation { path: route, .. }, _)) = at.peek() else {
        return Err(Problem::NoRoute(path.to_owned()));
    };
    let meant = if method == Method::HEAD {
        "GET"
    } else {
        method.as_str()
    };
    at.find(|(operation, _)| operation.method == meant)
        .ok_or_else(|| Problem::Method {
            method: method.to_string(),
            allowed: allowed(route),
        })
}

/// The methods of a route, as the header Allow lists them.
fn allowed(route: &str) -> String {
    let methods = OPERATIONS.iter().filter(|operation| operation.path == route);
    let methods: Vec<&str> = methods.map(|operation| operation.method).collect();
    methods.join(", ").replace("GET", "GET, HEAD")
}

/// The name that a path has in the place of `{name}`, empty where the route has none; `None`: it is another route's.
fn name_in(route: &str, path: &str) -> Option<String> {
    let Some((before, behind)) = route.split_once("{name}") else {
        return (route == path).then(String::new);
    };
    let name = path.strip_prefix(before)?.strip_suffix(behind)?;
    let decoded = percent_decode_str(name).decode_utf8().ok()?;
    (!name.contains('/')).then(|| decoded.into_owned())
}

/// Parameters in the query of a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Query {
    pub(super) after: Option<u64>,
    /// Seconds.
    pub(super) wait: Option<u64>,
    pub(super) disconnect: Option<bool>,
}

impl Query {
    /// Errors: a parameter is unknown, is not for this operation, or its value is not possible.
    pub(super) fn read(operation: &Operation, text: &str) -> Result<Self, Problem> {
        let mut query = Self::default();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let known = operation
                .parameters
                .iter()
                .filter(|(_, place, ..)| *place == "query");
            let known: Vec<&str> = known.map(|(name, ..)| *name).collect();
            if !known.contains(&name) {
                return Err(Problem::Query(match known.as_slice() {
                    [] => format!("{name:?}: this takes no parameters"),
                    known => format!(
                        "there is no parameter {name:?}: this takes {}",
                        known.join(" and ")
                    ),
                }));
            }
            let wrong = |what: &str| Problem::Query(format!("{pair:?}: {what}"));
            let number = || value.parse().map_err(|_| wrong("a number from 0 on"));
            match name {
                "after" => query.after = Some(number()?),
                "wait" => query.wait = Some(number()?),
                _ => query.disconnect = Some(value.parse().map_err(|_| wrong("true or false"))?),
            }
        }
        match query.wait {
            Some(wait) if wait > LONGEST_WAIT => {
                Err(Problem::Query(format!("wait: {LONGEST_WAIT} seconds at most")))
            }
            _ => Ok(query),
        }
    }
}

/// Whether the answer may wait for events.
pub(super) fn may_wait(uri: &Uri) -> bool {
    uri.path() == EVENTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(path: &str) -> Option<(What, String)> {
        let (operation, name) = find(Listener::ReadWrite, &Method::GET, path).ok()?;
        Some((operation.what, name))
    }

    #[test]
    fn name_in_a_path_is_decoded_and_ends_at_a_slash() {
        let named = |name: &str| Some((What::GetPort, name.to_owned()));
        assert_eq!(get("/v1/ports/vm1"), named("vm1"));
        assert_eq!(get("/v1/ports/%2Frun%2fa.sock"), named("/run/a.sock"));
        assert_eq!(get("/v1/ports/f%C3%BCr"), named("für"));
        assert_eq!(
            get("/v1/ports/vm1/rules"),
            Some((What::GetRules, "vm1".to_owned()))
        );
        for path in [
            "/v1/ports/a/b",
            "/v1/ports/%ff",
            "/v2/ports",
            "/",
            "",
            "/v1/ports%2Fa",
        ] {
            assert_eq!(get(path), None, "{path}");
        }
    }

    #[test]
    fn only_metrics_are_had_at_their_address() {
        for operation in OPERATIONS.iter().filter(|operation| operation.method == "GET") {
            let found = find(Listener::Metrics, &Method::GET, operation.path).is_ok();
            assert_eq!(found, operation.path == "/metrics", "{}", operation.path);
        }
    }

    #[test]
    fn other_methods_are_refused_with_those_that_there_are() {
        for (path, methods) in [
            ("/v1/ports/vm1", "GET, HEAD, PUT, PATCH, DELETE"),
            ("/v1/ports/vm1/rules", "GET, HEAD, PUT"),
            ("/v1/reload", "POST"),
            ("/metrics", "GET, HEAD"),
        ] {
            match find(Listener::ReadWrite, &Method::OPTIONS, path) {
                Err(Problem::Method { allowed, .. }) => assert_eq!(allowed, methods, "{path}"),
                other => panic!("{path}: {other:?}"),
            }
        }
        assert!(find(Listener::ReadWrite, &Method::HEAD, "/v1/status").is_ok());
    }

    #[test]
    fn parameters_that_mean_nothing_are_refused() {
        let of = |path, method| find(Listener::ReadWrite, method, path).expect("known").0;
        let (events, patch) = (of(EVENTS, &Method::GET), of("/v1/ports/a", &Method::PATCH));
        let query = Query::read(events, "after=7&wait=20").expect("both");
        assert_eq!((query.after, query.wait), (Some(7), Some(20)));
        let query = Query::read(patch, "disconnect=true").expect("known");
        assert_eq!(query.disconnect, Some(true));
        for wrong in [
            "wait=21",
            "after=-1",
            "after=",
            "after",
            "x=1",
            "disconnect=true",
            "wait=1s",
            "after=99999999999999999999",
        ] {
            Query::read(events, wrong).expect_err(wrong);
        }
        for wrong in ["disconnect=1", "disconnect", "wait=1"] {
            Query::read(patch, wrong).expect_err(wrong);
        }
        Query::read(of("/v1/ports", &Method::GET), "after=1").expect_err("it takes none");
    }
}
