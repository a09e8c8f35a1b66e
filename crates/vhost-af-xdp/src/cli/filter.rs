//! Keys of a port's table that are filter rules: a list of tables, `[[port.NAME.rule]]` each.
//!
//! In a [`Table`](crate::config::file::Table) they stand as they are written by themselves, a line each, so that two
//! readings that mean the same say the same.

use anyhow::bail;
use clap::Args;

use super::keys::Written;
use crate::config::Placement;
use crate::switch::filter::{Action, Direction, FilterConfig, MOST_RULES, Rule};

/// See the module's head.
#[derive(Debug, Clone, Args)]
pub(super) struct FilterArgs {
    /// Which frames the guest may send and gets: rules, of which the first that matches a frame decides, as words with
    /// `;` between two, for instance "direction=to-guest action=allow protocol=tcp destination-ports=22". May be
    /// repeated. docs/filter.md has the words
    #[arg(long, value_name = "RULES", value_parser = parse_rules)]
    rule: Vec<RuleList>,
    /// What becomes of frames of the guest that no rule matches, allow or deny [default: allow; deny, if there are
    /// rules from-guest]
    #[arg(long, value_name = "ACTION", value_parser = Action::of)]
    from_guest_default: Option<Action>,
    /// The same of frames to the guest [default: allow; deny, if there are rules to-guest]
    #[arg(long, value_name = "ACTION", value_parser = Action::of)]
    to_guest_default: Option<Action>,
}

impl FilterArgs {
    /// Errors: one line, naming the key.
    pub(super) fn build(self, placement: Placement) -> anyhow::Result<FilterConfig> {
        let rules: Vec<Rule> = self.rule.into_iter().flat_map(|RuleList(rules)| rules).collect();
        if rules.len() > MOST_RULES {
            bail!("rule: {}", too_many());
        }
        let keys = [
            (
                rules.iter().any(|rule| rule.direction == Direction::ToGuest),
                "rule",
            ),
            (self.to_guest_default == Some(Action::Deny), "to-guest-default"),
        ];
        if placement == Placement::Direct
            && let Some((_, key)) = keys.iter().find(|(is_said, _)| *is_said)
        {
            bail!(
                "{key}: with memory=direct a frame is in the guest's memory before anybody could judge it: use \
                 memory=send-direct or copy for rules of what a guest gets"
            );
        }
        Ok(FilterConfig {
            rules,
            from_guest_default: self.from_guest_default,
            to_guest_default: self.to_guest_default,
        })
    }
}

/// Rules in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RuleList(Vec<Rule>);

/// What is wrong with a list of rules.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WrongRule {
    /// Which one, counted from 1; 0: all of them.
    pub(super) number: usize,
    pub(super) what: String,
}

impl std::fmt::Display for WrongRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.number {
            0 => write!(f, "rule: {}", self.what),
            number => write!(f, "rule {number}: {}", self.what),
        }
    }
}

/// As they stand in a table.
/// Errors: [`WrongRule`].
pub(super) fn rules_in_words(value: &Written<'_>) -> Result<String, WrongRule> {
    let all = |what: String| WrongRule { number: 0, what };
    let read: Vec<Result<Rule, String>> = match value {
        Written::Text(text) => rules_of(text).take(MOST_RULES + 1).collect(),
        Written::List(list) if list.len() > MOST_RULES => return Err(all(too_many())),
        Written::List(list) => list.iter().map(rule_of).collect(),
        _ => {
            return Err(all(
                "give a list of tables, or `[[port.NAME.rule]]` each".to_owned()
            ));
        }
    };
    if read.len() > MOST_RULES {
        return Err(all(too_many()));
    }
    let words = (1..).zip(read).map(|(number, rule)| {
        let words = rule.map(|rule| rule.to_string());
        words.map_err(|what| WrongRule { number, what })
    });
    Ok(words.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn too_many() -> String {
    format!("a port has {MOST_RULES} rules at most: networks and lists of ports make one of several")
}

/// A rule as a table has it.
fn rule_of(value: &Written<'_>) -> Result<Rule, String> {
    let Written::Table(keys) = value else {
        return Err("give a table of keys such as direction and action".to_owned());
    };
    let mut said = Vec::new();
    // How many frames it decided about is told with a rule, and means nothing in one.
    for (key, value) in keys.iter().filter(|(key, _)| *key != "frames") {
        let word = word_of(value)
            .ok_or_else(|| format!("{key}: give text in quotes, a number, or a list of these"))?;
        said.push((*key, word));
    }
    let said: Vec<_> = said.iter().map(|(key, value)| (*key, value.as_str())).collect();
    Rule::of(&said)
}

fn word_of(value: &Written<'_>) -> Option<String> {
    match value {
        Written::Text(text) => Some((*text).to_owned()),
        Written::Number(number) => Some(number.to_string()),
        Written::List(list) => {
            let words: Option<Vec<_>> = list.iter().map(word_of).collect();
            Some(words?.join(","))
        }
        Written::Flag(_) | Written::Table(_) | Written::Other => None,
    }
}

/// Those that are written as words, a line each, or with semicolons between.
fn rules_of(text: &str) -> impl Iterator<Item = Result<Rule, String>> {
    let lines = text.split(['\n', ';']).map(str::trim);
    lines.filter(|line| !line.is_empty()).map(Rule::of_words)
}

fn parse_rules(text: &str) -> Result<RuleList, String> {
    rules_of(text).collect::<Result<_, _>>().map(RuleList)
}

/// What stands in a table, as JSON has it; text that is no rules stays what it is: the reader refuses it.
pub(super) fn json_of_rules(text: &str) -> serde_json::Value {
    match parse_rules(text) {
        Ok(RuleList(rules)) => rules
            .iter()
            .map(|rule| rule.json().into())
            .collect::<Vec<serde_json::Value>>()
            .into(),
        Err(_) => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn words(json: &serde_json::Value) -> Result<String, WrongRule> {
        rules_in_words(&Written::from(json))
    }

    #[test]
    fn rules_are_the_same_however_they_are_written() {
        let said = json!([
            {
                "direction": "from-guest", "action": "allow", "protocol": "tcp",
                "destination-ports": [443, "80-81"], "frames": 7,
            },
            {"action": "deny", "direction": "to-guest", "source": "10.0.0.0/8", "mark": 9},
        ]);
        let text = "direction=from-guest action=allow protocol=tcp destination-ports=80-81,443\n\
                    direction=to-guest action=deny source=10.0.0.0/8 mark=9";
        assert_eq!(words(&said).expect("well said"), text);
        assert_eq!(words(&json!(text.replace('\n', " ; "))).expect("well said"), text);
        assert_eq!(words(&json_of_rules(text)).expect("well said"), text);
    }

    #[test]
    fn wrong_rule_is_told_by_its_number() {
        let good = json!({"direction": "from-guest", "action": "allow"});
        let wrong =
            words(&json!([good, {"direction": "from-guest", "action": "alow"}])).expect_err("misspelt");
        assert_eq!(
            wrong.to_string(),
            "rule 2: action = \"alow\": give one of allow, deny"
        );
        let wrong = words(&json!([{"direction": "from-guest", "action": true}])).expect_err("no text");
        assert!(
            wrong.to_string().starts_with("rule 1: action: give text"),
            "{wrong}"
        );
        assert_eq!(words(&json!(7)).expect_err("no list").number, 0);
        let many = vec![good; MOST_RULES + 1];
        let wrong = words(&json!(many)).expect_err("too many").to_string();
        assert!(
            wrong.starts_with("rule: a port has 10000 rules at most"),
            "{wrong}"
        );
    }
}
