//! docs/keys.md: generated from the model. `manual --docs TREE` writes it; a test compares it.

use std::fmt::Write as _;

use model::config::{Daemon, Network, Port, Table};
use model::policy::{Allow, Limits};
use serde_json::{Map, Value};

/// Longest line of a document.
const WIDTH: usize = 118;

const HEAD: &str = "\
# Keys

<!-- Written by `cargo run -p manual -- --docs .` from crates/model. Do not edit. -->

Each key of a port and of the daemon (except `socket-directories`) is an option of [`serve`](cli.md#serve), a key of the
[configuration file](config.md), and, of a port, of `--port`, `port add` and the [API](api.md#ports-and-networks).
*live*: another value takes effect while the guest stays connected. The last two tables are those of the
[steward's policy](cli.md#the-policy).
";

/// docs/keys.md.
pub(crate) fn keys() -> String {
    let mut text = HEAD.to_owned();
    section(&mut text, "Ports", "[port.NAME]", &Port::schema());
    section(&mut text, "Networks", "[network.NAME]", &Network::schema());
    section(&mut text, "The daemon", "[daemon]", &Daemon::schema());
    section(&mut text, "Limits of users", "[limits]", &Limits::schema());
    section(&mut text, "Rules of the policy", "[[allow]]", &Allow::schema());
    text
}

fn section(text: &mut String, title: &str, table: &str, keys: &Map<String, Value>) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "\n## {title}\n\nBelow `{table}` in a file.\n");
    let ports = Port::schema();
    let is_known =
        |(key, property): &(&String, &Value)| title == "Networks" && ports.get(*key) == Some(property);
    let known: Vec<String> = keys
        .iter()
        .filter(is_known)
        .map(|(key, _)| format!("`{key}`"))
        .collect();
    if !known.is_empty() {
        wrap(text, &format!("- As of a port: {}", known.join(", ")));
    }
    for (key, property) in keys.iter().filter(|entry| !is_known(entry)) {
        let live = if property.get("x-live").is_some() {
            ", *live*"
        } else {
            ""
        };
        let about = property["description"]
            .as_str()
            .unwrap_or_default()
            .replace('\n', " ");
        let line = format!("- `{key}` ({}{live}): {about}", kind(property));
        wrap(text, &line);
    }
}

/// What a key takes.
fn kind(property: &Value) -> String {
    let choices = choices(property);
    if !choices.is_empty() {
        return choices
            .iter()
            .map(|choice| format!("`{choice}`"))
            .collect::<Vec<_>>()
            .join(", ");
    }
    let kinds = match &property["type"] {
        Value::Array(kinds) => kinds.clone(),
        kind => vec![kind.clone()],
    };
    let has = |kind: &str| kinds.iter().any(|known| known == kind);
    let named = match (has("boolean"), has("array"), has("string"), has("integer")) {
        (true, ..) => "true or false",
        (_, true, true, _) => "list or text",
        (_, true, ..) => "list",
        (_, _, true, true) => "text or number",
        (_, _, true, false) => "text",
        (_, _, false, _) => "number",
    };
    named.to_owned()
}

/// Words that a key takes, if there are few.
fn choices(property: &Value) -> Vec<String> {
    let of = |schema: &Value| match (&schema["const"], &schema["enum"]) {
        (Value::String(word), _) => vec![word.clone()],
        (_, Value::Array(words)) => words
            .iter()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect(),
        _ => Vec::new(),
    };
    let variants = ["anyOf", "oneOf"]
        .iter()
        .filter_map(|key| property[*key].as_array());
    let nested = variants.flatten().flat_map(|variant| {
        let inner = variant["oneOf"].as_array().into_iter().flatten().flat_map(of);
        of(variant).into_iter().chain(inner.collect::<Vec<_>>())
    });
    of(property).into_iter().chain(nested).collect()
}

fn wrap(text: &mut String, line: &str) {
    let (mut width, mut is_first) = (0, true);
    for word in line.split(' ').filter(|word| !word.is_empty()) {
        let len = word.chars().count();
        if !is_first && width + 1 + len > WIDTH {
            text.push_str("\n  ");
            width = 2;
        } else if !is_first {
            text.push(' ');
            width += 1;
        }
        text.push_str(word);
        (width, is_first) = (width + len, false);
    }
    text.push('\n');
}
