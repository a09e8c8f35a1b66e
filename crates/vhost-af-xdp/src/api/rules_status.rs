//! Filter rules of a port, and how many frames each decided about: apart from the status, since there can be many.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::port::Port;
use crate::switch::filter::{Direction, Filter, Rule, Rules};

/// See the module's head.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RulesStatus {
    /// In their order: keys and values as they were said, and `frames`.
    pub(crate) rules: Vec<Map<String, Value>>,
    pub(crate) from_guest: DirectionStatus,
    pub(crate) to_guest: DirectionStatus,
}

/// What becomes of frames that no rule matches.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DirectionStatus {
    /// `allow` or `deny`.
    pub(crate) default: String,
    /// That this is said, and does not follow from whether there are rules.
    pub(crate) default_said: bool,
    /// Frames that it decided about.
    pub(crate) default_frames: u64,
    /// Frames that passed in spite of it: ARP, and what IPv6 needs in its place.
    pub(crate) link_frames: u64,
    /// Memory that the rules take, bytes.
    pub(crate) memory_bytes: usize,
}

impl RulesStatus {
    /// Those of a port.
    pub(crate) fn of(port: &Port) -> Self {
        let (config, compiled) = port.filter_rules();
        let mut frames = vec![0; config.rule.len()];
        for rules in [&compiled.from_guest, &compiled.to_guest].into_iter().flatten() {
            for (number, count) in rules.counts() {
                frames[number] = count;
            }
        }
        let with_frames = |(rule, frames): (&Rule, u64)| {
            let mut said = rule.json();
            said.insert("frames".to_owned(), frames.into());
            said
        };
        Self {
            rules: config.rule.iter().zip(frames).map(with_frames).collect(),
            from_guest: DirectionStatus::of(&config, Direction::FromGuest, compiled.from_guest.as_deref()),
            to_guest: DirectionStatus::of(&config, Direction::ToGuest, compiled.to_guest.as_deref()),
        }
    }
}

impl DirectionStatus {
    fn of(config: &Filter, direction: Direction, rules: Option<&Rules>) -> Self {
        let [default_frames, link_frames] = rules.map_or([0; 2], Rules::default_counts);
        Self {
            default: config.default_for(direction).name().to_owned(),
            default_said: config.set_default(direction).is_some(),
            default_frames,
            link_frames,
            memory_bytes: rules.map_or(0, Rules::bytes),
        }
    }
}
