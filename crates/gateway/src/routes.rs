//! What can be asked for: paths, methods, parameters, bodies and answers, each described once.
//!
//! [`answers`](crate::answers) does what an [`Operation`] names, and docs/openapi.json is [made](crate::openapi) of the
//! table.

use hyper::{Method, Uri};
use model::config::Port;
use model::control::Changed;
use model::state::documents::{
    CountersDocument, DaemonDocument, KeysOf, NetworksDocument, PortDocument, PortsDocument,
};
use model::state::{NetworkStatus, RulesStatus, WorkersDocument};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use crate::events::EventsDocument;
use crate::metrics;
use crate::problem::Problem;
use crate::requests::RuleKeys;

/// Longest wait for events that a client may ask for, seconds.
const LONGEST_WAIT: u64 = 20;

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

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Status,
    Networks,
    Network,
    Ports,
    Port,
    Rules,
    Counters,
    Workers,
    Events,
    Metrics,
    OpenApi,
    PutPort,
    PatchPort,
    RemovePort,
    PutRules,
    ResetWorkers,
    Reload,
}

pub(super) type SchemaOf = fn(&mut SchemaGenerator) -> Schema;
/// A media type, and what is sent in it.
pub(super) type Form = (&'static str, SchemaOf);

/// What a client can ask for.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) path: &'static str,
    /// HEAD is what GET is.
    pub(super) method: &'static str,
    pub(super) what: What,
    /// Name in docs/openapi.json.
    pub(super) id: &'static str,
    pub(super) summary: &'static str,
    /// Further sentences.
    pub(super) about: &'static str,
    pub(super) parameters: &'static [Parameter],
    pub(super) body: &'static [Form],
    pub(super) answer: &'static [Form],
    /// Statuses besides those of all operations of its kind, and why.
    pub(super) others: &'static [(u16, &'static str)],
}

/// A parameter besides `{name}`.
#[derive(Debug)]
pub(super) struct Parameter {
    pub(super) name: &'static str,
    /// `query` or `header`.
    pub(super) place: &'static str,
    pub(super) about: &'static str,
    pub(super) schema: fn() -> Value,
}

fn of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<T>()
}

const JSON: &str = "application/json";
const PORT: &str = "/v1/ports/{name}";
const RULES: &str = "/v1/ports/{name}/rules";
const EVENTS: &str = "/v1/events";
const NO_PORT: (u16, &str) = (404, "There is no such port.");
const WRONG_KEY: (u16, &str) = (422, "A key or a value is not possible; `key` names it.");

/// What is read.
const fn look(
    (path, what): (&'static str, What),
    id: &'static str,
    summary: &'static str,
    answer: &'static [Form],
) -> Operation {
    Operation {
        path,
        method: "GET",
        what,
        id,
        summary,
        about: "",
        parameters: &[],
        body: &[],
        answer,
        others: &[],
    }
}

/// What changes something.
const fn change(
    (method, path, what): (&'static str, &'static str, What),
    id: &'static str,
    summary: &'static str,
) -> Operation {
    Operation {
        method,
        ..look((path, what), id, summary, &[(JSON, of::<Changed>)])
    }
}

/// All that there is.
pub(super) const OPERATIONS: &[Operation] = &[
    look(
        ("/v1/status", What::Status),
        "getStatus",
        "The daemon",
        &[(JSON, of::<DaemonDocument<'_>>)],
    ),
    look(
        ("/v1/networks", What::Networks),
        "listNetworks",
        "All networks",
        &[(JSON, of::<NetworksDocument<'_>>)],
    ),
    Operation {
        others: &[(404, "There is no such network.")],
        ..look(
            ("/v1/networks/{name}", What::Network),
            "getNetwork",
            "One network",
            &[(JSON, of::<NetworkStatus>)],
        )
    },
    look(
        ("/v1/ports", What::Ports),
        "listPorts",
        "All ports",
        &[(JSON, of::<PortsDocument<'_>>)],
    ),
    Operation {
        others: &[NO_PORT],
        ..look(
            (PORT, What::Port),
            "getPort",
            "One port",
            &[(JSON, of::<PortDocument<'_>>)],
        )
    },
    Operation {
        about: "It is kept besides the ports of the file, until it is removed, the file has one of its name, or the \
                daemon ends. A change that a running port cannot follow disconnects its guest.",
        parameters: &[Parameter {
            name: "If-None-Match",
            place: "header",
            about: "`*`: only if there is none of that name.",
            schema: || json!({ "type": "string", "const": "*" }),
        }],
        body: &[(JSON, of::<KeysOf<'_, Port>>)],
        others: &[
            (201, "It was added."),
            (
                409,
                "The port is one of the file, or the host lacks what it needs; nothing has changed.",
            ),
            (412, "There is one of that name."),
            WRONG_KEY,
        ],
        ..change(("PUT", PORT, What::PutPort), "putPort", "Adds or replaces a port")
    },
    Operation {
        about: "A key that is null is removed.",
        parameters: &[Parameter {
            name: "disconnect",
            place: "query",
            about: "The guest may be disconnected if a changed key requires it.",
            schema: || json!({ "type": "boolean", "default": false }),
        }],
        body: &[
            (JSON, of::<KeysOf<'_, Port>>),
            ("application/merge-patch+json", of::<KeysOf<'_, Port>>),
        ],
        others: &[
            NO_PORT,
            (
                409,
                "The port is one of the file, cannot change this without disconnecting its guest, or the host lacks \
                 what it needs; nothing has changed.",
            ),
            WRONG_KEY,
        ],
        ..change(
            ("PATCH", PORT, What::PatchPort),
            "patchPort",
            "Changes some keys of a port",
        )
    },
    Operation {
        others: &[NO_PORT, (409, "The port is one of the file.")],
        ..change(
            ("DELETE", PORT, What::RemovePort),
            "deletePort",
            "Removes a port that was added",
        )
    },
    Operation {
        others: &[NO_PORT],
        ..look(
            (RULES, What::Rules),
            "getRules",
            "Filter rules of a port, and how many frames each decided about",
            &[(JSON, of::<RulesStatus>)],
        )
    },
    Operation {
        about: "They hold for every frame that arrives after the answer; the guest stays connected. Counters restart at \
                0 where something changed.",
        body: &[(JSON, of::<RuleKeys>)],
        others: &[NO_PORT, (409, "The port is one of the file."), WRONG_KEY],
        ..change(
            ("PUT", RULES, What::PutRules),
            "putRules",
            "Replaces all filter rules of a port",
        )
    },
    look(
        ("/v1/counters", What::Counters),
        "getCounters",
        "All counters",
        &[(JSON, of::<CountersDocument<'_>>)],
    ),
    look(
        ("/v1/workers", What::Workers),
        "getWorkers",
        "What workers do, and which ports take how much of it",
        &[(JSON, of::<WorkersDocument>)],
    ),
    change(
        ("POST", "/v1/workers/reset", What::ResetWorkers),
        "resetWorkers",
        "Resets the statistics of workers; counters and metrics go on",
    ),
    Operation {
        parameters: &[
            Parameter {
                name: "after",
                place: "query",
                about: "Only events after this sequence [default: 0]",
                schema: || json!({ "type": "integer", "minimum": 0 }),
            },
            Parameter {
                name: "wait",
                place: "query",
                about: "Seconds to wait for the first one [default: 0]",
                schema: || json!({ "type": "integer", "minimum": 0, "maximum": LONGEST_WAIT }),
            },
            Parameter {
                name: "Last-Event-ID",
                place: "header",
                about: "Takes precedence over `after`: what a client of a stream sends when it comes back.",
                schema: || json!({ "type": "string" }),
            },
        ],
        ..look(
            (EVENTS, What::Events),
            "getEvents",
            "What happened, and what happens",
            &[
                (JSON, of::<EventsDocument>),
                ("text/event-stream", |_| {
                    json_schema!({
                        "type": "string",
                        "description": "Server-sent events: `id` is the sequence, `event` what happened, `data` an \
                                        Event; an event `lost` has data of the form {\"lost\": N}.",
                    })
                }),
            ],
        )
    },
    Operation {
        others: &[(
            409,
            "What is wrong with the file, what could not be done for which port, or that there is no file.",
        )],
        ..change(
            ("POST", "/v1/reload", What::Reload),
            "reload",
            "Reads the configuration file again",
        )
    },
    look(
        ("/v1/openapi.json", What::OpenApi),
        "getDocument",
        "This document",
        &[(JSON, |_| json_schema!({ "type": "object" }))],
    ),
    look(
        ("/metrics", What::Metrics),
        "getMetrics",
        "All counters, for Prometheus",
        &[(
            metrics::MEDIA_TYPE,
            |_| json_schema!({ "type": "string", "description": "Prometheus' text format, version 0.0.4." }),
        )],
    ),
];

/// What a request asks for, and the `{name}` of its path.
pub(super) fn find(door: Door, method: &Method, path: &str) -> Result<(&'static Operation, String), Problem> {
    let is_had = |operation: &&Operation| door != Door::Metrics || operation.what == What::Metrics;
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

/// The methods of a route, as the header Allow has them.
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
    decoded(name).filter(|_| !name.contains('/'))
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
            let known = operation.parameters.iter().filter(|it| it.place == "query");
            let known: Vec<&str> = known.map(|it| it.name).collect();
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
        let (operation, name) = find(Door::All, &Method::GET, path).ok()?;
        Some((operation.what, name))
    }

    #[test]
    fn name_in_a_path_is_decoded_and_ends_at_a_slash() {
        let named = |name: &str| Some((What::Port, name.to_owned()));
        assert_eq!(get("/v1/ports/vm1"), named("vm1"));
        assert_eq!(get("/v1/ports/%2Frun%2fa.sock"), named("/run/a.sock"));
        assert_eq!(get("/v1/ports/f%C3%BCr"), named("für"));
        assert_eq!(get("/v1/ports/vm1/rules"), Some((What::Rules, "vm1".to_owned())));
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
            assert_eq!(get(path), None, "{path}");
        }
    }

    #[test]
    fn only_metrics_are_had_at_their_address() {
        for operation in OPERATIONS.iter().filter(|operation| operation.method == "GET") {
            let found = find(Door::Metrics, &Method::GET, operation.path).is_ok();
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
            match find(Door::All, &Method::OPTIONS, path) {
                Err(Problem::Method { allowed, .. }) => assert_eq!(allowed, methods, "{path}"),
                other => panic!("{path}: {other:?}"),
            }
        }
        assert!(find(Door::All, &Method::HEAD, "/v1/status").is_ok());
    }

    #[test]
    fn parameters_that_mean_nothing_are_refused() {
        let of = |path, method| find(Door::All, method, path).expect("known").0;
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
