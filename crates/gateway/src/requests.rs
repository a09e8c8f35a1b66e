//! Bodies of requests: each is read up to a length and for a time.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use model::config::{Action, MOST_RULES, Rule};
use schemars::JsonSchema;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::problem::Problem;

/// Most bytes of a body without filter rules.
const MOST_OF_A_BODY: usize = 8 << 10;
/// Most bytes of a body with filter rules, and how many such bodies are read at a time.
const MOST_OF_A_LONG_BODY: usize = 2 << 20;
pub(super) const LONG_BODIES: usize = 4;
const BODY: Duration = Duration::from_secs(10);

/// Reads a body, which may be long if it has filter rules: few of these are read at a time.
pub(super) async fn read<T, B>(long_bodies: &Semaphore, body: B) -> Result<T, Problem>
where
    T: DeserializeOwned,
    B: hyper::body::Body<Data = Bytes> + Unpin,
{
    let is_short = body
        .size_hint()
        .upper()
        .is_some_and(|bytes| bytes <= MOST_OF_A_BODY as u64);
    if is_short {
        return read_body(body, MOST_OF_A_BODY).await;
    }
    let Ok(_place) = long_bodies.try_acquire() else {
        return Err(Problem::Busy);
    };
    read_body(body, MOST_OF_A_LONG_BODY).await
}

/// All filter rules of a port.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(super) struct RuleKeys {
    /// In their order: the first that matches a frame decides.
    #[schemars(with = "Vec<Rule>", length(max = MOST_RULES))]
    #[serde(deserialize_with = "not_null")]
    rules: Value,
    /// What happens to frames of the guest that no rule matches; without it `deny` where there are rules of that
    /// direction, else `allow`.
    #[schemars(with = "Option<Action>", skip_serializing_if = "Value::is_null")]
    #[serde(default)]
    from_guest_default: Value,
    /// What happens to frames to the guest that no rule matches; without it as for `from-guest-default`.
    #[schemars(with = "Option<Action>", skip_serializing_if = "Value::is_null")]
    #[serde(default)]
    to_guest_default: Value,
}

/// Null would remove all rules.
fn not_null<'de, D: Deserializer<'de>>(from: D) -> Result<Value, D::Error> {
    let value = Option::<Value>::deserialize(from)?;
    value.ok_or_else(|| D::Error::custom("rules: give a list, [] for none"))
}

impl RuleKeys {
    /// As keys of a port: a default that is not given is removed.
    pub(super) fn into_keys(self) -> Map<String, Value> {
        let keys = [
            ("rule", self.rules),
            ("from-guest-default", self.from_guest_default),
            ("to-guest-default", self.to_guest_default),
        ];
        keys.map(|(key, value)| (key.to_owned(), value))
            .into_iter()
            .collect()
    }
}

/// Reads a body of so many bytes at most.
async fn read_body<T, B>(mut body: B, most: usize) -> Result<T, Problem>
where
    T: DeserializeOwned,
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
