//! Answers that say what is wrong and what to do about it (RFC 9457).

use bytes::Bytes;
use hyper::header::{ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use serde_json::json;

use super::body::Body;

/// Why a request is not answered as it was meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Problem {
    #[error("there is no {0:?}")]
    NoRoute(String),
    #[error("{0} is not for this")]
    Method(String),
    #[error("there is no port {0:?}")]
    NoPort(String),
    #[error("the request has a body")]
    Body,
    #[error("{0}")]
    Query(String),
    #[error("the daemon has not answered in time")]
    Silent,
    #[error("the daemon ends")]
    Ending,
}

impl Problem {
    fn status(&self) -> StatusCode {
        match self {
            Self::NoRoute(_) | Self::NoPort(_) => StatusCode::NOT_FOUND,
            Self::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::Body => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Query(_) => StatusCode::BAD_REQUEST,
            Self::Silent => StatusCode::GATEWAY_TIMEOUT,
            Self::Ending => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn remedy(&self) -> &'static str {
        match self {
            Self::NoRoute(_) => "GET /v1/openapi.json lists what there is; docs/api.md explains it",
            Self::Method(_) => "use a method that the header Allow names",
            Self::NoPort(_) => "GET /v1/ports lists their names; a name goes into the path percent-encoded",
            Self::Body => "send none with this method",
            Self::Query(_) => "leave the parameter out, or give it a value that docs/api.md names",
            Self::Silent => {
                "see whether its process is stopped (ps -o stat), or the machine overloaded; ask again"
            }
            Self::Ending => "ask again once it was started again",
        }
    }

    /// As an answer.
    pub(super) fn answer(&self) -> Response<Body> {
        let status = self.status();
        let text = json!({
            "type": "about:blank",
            "title": status.canonical_reason(),
            "status": status.as_u16(),
            "detail": self.to_string(),
            "remedy": self.remedy(),
        });
        let mut response = Response::new(Body::whole(Bytes::from(text.to_string())));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        match self {
            Self::Method(_) => drop(headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"))),
            // What it sends is not read.
            Self::Body => drop(headers.insert(CONNECTION, HeaderValue::from_static("close"))),
            _ => {}
        }
        response
    }
}
