//! Filter rules of a port: which IP packets its guest may send, and which it gets.
//!
//! Theory of operation. A port has a list of rules for each direction ([`Rule`]), of which the first that matches a
//! frame decides, and a default for frames that none matches. Rules are stateless: nothing is known of connections, so
//! replies need rules of their own. Control compiles a list as a whole ([`Rules`]); it is never changed, and reaches a
//! lane by message.
//!
//! A lane has for each direction what it judges by ([`Classifier`]): the compiled rules, and in front of them a cache
//! of decisions for flows that were seen ([`FlowCache`]). A flow is all that rules look at ([`FlowKey`], and its mark)
//! and the station that the frame is for. What is found there costs the same however many rules there are. What is not
//! found is looked up in the rules, whose cost is bounded ([`Rules::find`]), and counts as work of whoever sends the
//! frame ([`Classifier::take_work`]): a flood of new flows shortens the turns of who floods.
//!
//! Caches are a lane's own, so that no guest displaces what another one's lane knows. Their memory is fixed, and taken
//! by control before the lane gets it. A decision is valid for one generation: with other rules, or another table of
//! stations, those before are as if they were not there.
//!
//! What is not IP is judged by rules that name its ethertype, and else by the default; ARP, and what IPv6 needs instead
//! of it, pass unless a rule says otherwise ([`FlowKey::is_of_the_link`]). Headers that contradict themselves are
//! refused wherever there are rules ([`Malformed`]).

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
pub use self::key::{FlowKey, Looked, Malformed, is_long};
pub use self::rules::{RuleSlot, Rules, Verdict};

/// Bytes of a frame that are looked at; of those that [`is_long`] knows, [`packet::HEADERS_MAX`].
pub const SHORT_LOOK_BYTES: usize = 64;

/// Compiles the rules of a direction; `None`: all frames pass.
#[must_use]
pub fn compile(filter: &Filter, direction: Direction) -> Option<Arc<Rules>> {
    let numbered = (0..).zip(&filter.rule);
    let its: Vec<(usize, &Rule)> = numbered.filter(|(_, rule)| rule.direction == direction).collect();
    let default = filter.default_for(direction);
    (!its.is_empty() || default == Action::Deny).then(|| Arc::new(Rules::new(&its, default, direction)))
}
