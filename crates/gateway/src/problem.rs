//! Error responses: what is wrong, and the remedy (RFC 9457).

use bytes::Bytes;
use hyper::header::{ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use model::control::{Kind, Refused};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::body::Body;

const NAMES_OF_NETWORKS: &str = "GET /v1/networks lists their names";
const NAMES_OF_PORTS: &str =
    "GET /v1/ports (`port list`) lists their names; a name goes into the path percent-encoded";

/// Why a request fails.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Problem {
    #[error("there is no {0:?}")]
    NoRoute(String),
    #[error("{method} is not allowed")]
    Method { method: String, allowed: String },
    #[error("nothing can be changed by this socket")]
    ReadOnly,
    #[error("this user may only read")]
    Others,
    #[error("there is no port {0:?}")]
    NoPort(String),
    #[error("there is no network {0:?}")]
    NoNetwork(String),
    #[error("the request has a body")]
    Body,
    #[error("the body is longer than {0} bytes")]
    LongBody(usize),
    #[error("the body came too late")]
    SlowBody,
    #[error("the body is no JSON object: {0}")]
    Json(String),
    #[error("{0}")]
    Query(String),
    #[error("{0}")]
    Refused(Refused),
    #[error("too many changes wait already")]
    Busy,
    #[error("earlier answers have not been read")]
    Unread,
    #[error("the change is still in progress")]
    UnderWay,
    #[error("the daemon has not answered in time")]
    Silent,
    #[error("the daemon ends")]
    Ending,
}

/// A problem (RFC 9457).
#[derive(Debug, Serialize, JsonSchema)]
pub struct ProblemDocument<'a> {
    /// Always `about:blank`.
    #[serde(rename = "type")]
    kind: &'static str,
    /// The status in words.
    #[schemars(with = "String")]
    title: Option<&'static str>,
    /// The status of the response.
    status: u16,
    /// What is wrong, with the values.
    detail: String,
    /// What to do about it.
    remedy: &'a str,
    /// The key that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "String")]
    key: Option<&'a str>,
}

impl Problem {
    fn status(&self) -> StatusCode {
        match self {
            Self::NoRoute(_) | Self::NoPort(_) | Self::NoNetwork(_) => StatusCode::NOT_FOUND,
            Self::Method { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::ReadOnly | Self::Others => StatusCode::FORBIDDEN,
            Self::Body | Self::LongBody(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::SlowBody => StatusCode::REQUEST_TIMEOUT,
            Self::Query(_) | Self::Json(_) => StatusCode::BAD_REQUEST,
            Self::Refused(refused) => match refused.kind {
                Kind::NoPort | Kind::NoNetwork | Kind::NoSuch => StatusCode::NOT_FOUND,
                Kind::Mistake => StatusCode::UNPROCESSABLE_ENTITY,
                Kind::Exists => StatusCode::PRECONDITION_FAILED,
                Kind::Ending | Kind::Busy => StatusCode::SERVICE_UNAVAILABLE,
                Kind::NoFile | Kind::InFile | Kind::InUse | Kind::Disconnects | Kind::Failed => {
                    StatusCode::CONFLICT
                }
                Kind::NoRequest | Kind::NotAllowed => StatusCode::FORBIDDEN,
            },
            Self::Silent | Self::UnderWay => StatusCode::GATEWAY_TIMEOUT,
            Self::Busy | Self::Unread | Self::Ending => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn remedy(&self) -> &str {
        match self {
            Self::NoRoute(_) => "GET /v1/openapi.json lists what there is; docs/api.md explains it",
            Self::Method { .. } => "use a method that the header Allow names",
            Self::ReadOnly => "use the socket of --api",
            Self::Others => "use the user or the group of the socket, or root",
            Self::NoPort(_) => NAMES_OF_PORTS,
            Self::Refused(refused) if refused.kind == Kind::NoPort => NAMES_OF_PORTS,
            Self::NoNetwork(_) => NAMES_OF_NETWORKS,
            Self::Refused(refused) if refused.kind == Kind::NoNetwork => NAMES_OF_NETWORKS,
            Self::Body => "send none with this method",
            Self::LongBody(_) => {
                "send less: a port has some 60 keys, and ranges such as \"100-199\" are short"
            }
            Self::SlowBody => "send it at once",
            Self::Json(_) => {
                "send an object with the keys that [port.NAME] or [network.NAME] of a file has (docs/config.md)"
            }
            Self::Query(_) => "leave the parameter out, or give it a value that docs/api.md names",
            Self::Refused(refused) => &refused.remedy,
            Self::Busy => "retry in a second",
            Self::Unread => "read them, or close their connections; ask again in a second",
            Self::UnderWay => "GET /v1/ports, /v1/networks and /v1/events show the result",
            Self::Silent => "check for a stopped process (ps -o stat) or an overloaded machine; retry",
            Self::Ending => "retry after its restart",
        }
    }

    /// The key that it is about.
    fn key(&self) -> Option<&str> {
        match self {
            Self::Refused(refused) => refused.keys.first().map(String::as_str),
            _ => None,
        }
    }

    /// Builds the response.
    pub(super) fn answer(&self) -> Response<Body> {
        let status = self.status();
        let text = json!(ProblemDocument {
            kind: "about:blank",
            title: status.canonical_reason(),
            status: status.as_u16(),
            detail: self.to_string(),
            remedy: self.remedy(),
            key: self.key(),
        });
        let mut response = Response::new(Body::whole(Bytes::from(text.to_string())));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        match self {
            Self::Method { allowed, .. } => {
                drop(HeaderValue::from_str(allowed).map(|allowed| headers.insert(ALLOW, allowed)));
            }
            Self::Busy | Self::Unread => drop(headers.insert(RETRY_AFTER, HeaderValue::from_static("1"))),
            // The request's body is not read, so the connection cannot be reused.
            Self::Body | Self::LongBody(_) | Self::SlowBody | Self::ReadOnly | Self::Others => {
                drop(headers.insert(CONNECTION, HeaderValue::from_static("close")));
            }
            _ => {}
        }
        response
    }
}
