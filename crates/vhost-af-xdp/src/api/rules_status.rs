//! Reads the filter rules of a port.

use model::state::{DirectionStatus, RulesStatus};

use crate::port::Port;
use acl::Rules;
use model::config::{Direction, Filter, Rule};

/// Reads the rules of a port.
pub(crate) fn read(port: &Port) -> RulesStatus {
    let (keys, compiled) = port.filter_rules();
    let config = &keys.filter;
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
    RulesStatus {
        rules: config.rule.iter().zip(frames).map(with_frames).collect(),
        from_guest: read_direction(config, Direction::FromGuest, compiled.from_guest.as_deref()),
        to_guest: read_direction(config, Direction::ToGuest, compiled.to_guest.as_deref()),
    }
}

fn read_direction(config: &Filter, direction: Direction, rules: Option<&Rules>) -> DirectionStatus {
    let [default_frames, link_frames] = rules.map_or([0; 2], Rules::default_counts);
    DirectionStatus {
        default: config.default_for(direction).name().to_owned(),
        default_said: config.set_default(direction).is_some(),
        default_frames,
        link_frames,
        memory_bytes: rules.map_or(0, Rules::bytes),
    }
}
