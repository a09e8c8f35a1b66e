//! Filter rules of a port: which frames its guest may send, and which it may receive.
//!
//! Theory of operation. A port has a list of rules for each direction ([`Rule`]), of which the first that
//! matches a frame decides, and a default for frames that none matches. Rules are stateless: connections are
//! not tracked, so replies need rules of their own. Control compiles a list as a whole ([`Rules`]), which is
//! immutable and is sent to lanes by message.
//!
//! A lane has a [`Classifier`] for each direction: the compiled rules, and in front of them a cache of decisions
//! for flows ([`FlowCache`]). A flow is identified by all fields that rules can match ([`FlowKey`], and its mark)
//! and by the frame's destination address. A cached decision costs the same for any number of rules. Otherwise the
//! flow is looked up in the rules, whose cost is bounded ([`Rules::find`]), and is charged to the sender of the
//! frame ([`Classifier::take_work`]): a flood of new flows reduces the budget of its sender.
//!
//! Each lane has its own caches, so that no guest evicts entries of another one's lane. Their memory is
//! fixed, and allocated by control before the lane gets it. A decision is valid for one generation: new
//! rules, or a new FDB, invalidate all older ones.
//!
//! Frames other than IP are matched by rules with their ethertype, and else by the default; ARP, and its
//! replacement in IPv6, pass unless a rule denies them ([`FlowKey::is_of_the_link`]). Malformed headers are
//! refused if there are any rules ([`Malformed`]).

mod cache;
mod classifier;
mod dimension;
mod flow_hints;
mod key;
mod rules;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use model::config::{Action, Direction, Filter, Rule};

pub use self::classifier::{Classifier, Decision, Facts};
pub use self::flow_hints::FlowHints;
pub use self::key::{FlowKey, Looked, Malformed, fold};
pub use self::rules::{RuleSlot, Rules, Verdict};

/// Compiles the rules of a direction; `None`: there are none, and all frames pass.
#[must_use]
pub fn compile(filter: &Filter, direction: Direction) -> Option<Arc<Rules>> {
    let numbered = (0..).zip(&filter.rule);
    let its: Vec<(usize, &Rule)> = numbered.filter(|(_, rule)| rule.direction == direction).collect();
    let default = filter.default_for(direction);
    (!its.is_empty() || default == Action::Deny).then(|| Arc::new(Rules::new(&its, default, direction)))
}
