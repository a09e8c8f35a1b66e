//! Filter rules of a port, with how many frames each decided about. They are not part of [`Status`](super::Status),
//! since there can be many.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::{Action, Rule};

/// Filter rules of a port.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct RulesStatus {
    /// In order: keys and values as configured, and `frames`.
    #[schemars(with = "Vec<Rule>")]
    pub rules: Vec<Map<String, Value>>,
    /// Frames that the guest sends.
    pub from_guest: DirectionStatus,
    /// Frames that the guest receives.
    pub to_guest: DirectionStatus,
}

/// What happens to frames that no rule matches.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
pub struct DirectionStatus {
    /// What happens to them.
    #[schemars(with = "Action")]
    pub default: String,
    /// The default is configured; else it follows from whether there are rules.
    pub default_said: bool,
    /// Frames that the default decided about.
    pub default_frames: u64,
    /// ARP and neighbour discovery that no rule matched, allowed although the default denies.
    pub link_frames: u64,
    /// Memory that the rules take, bytes.
    pub memory_bytes: usize,
}
