//! Shows any part of the state in full, as indented text with the keys of its JSON: one renderer for all of it.
//!
//! Values that are null or empty are left out, and so are rows of a table whose `value` or `count` is 0. An object of
//! plain values is one line, a list of such objects is a table. Sentences and commands have a line each.

use comfy_table::Table;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{or_dash, table};

/// Renders a value, ending with a newline.
///
/// # Errors
/// It has no JSON form, which state always has.
pub fn tree(value: &impl Serialize) -> serde_json::Result<String> {
    let mut text = String::new();
    if let Value::Object(fields) = serde_json::to_value(value)? {
        write_fields(&mut text, 0, &fields);
    }
    Ok(text)
}

fn write_fields(text: &mut String, indent: usize, fields: &Map<String, Value>) {
    for (key, value) in fields {
        write_field(text, indent, key, value);
    }
}

fn write_field(text: &mut String, indent: usize, key: &str, value: &Value) {
    let mut line = |words: &str| *text += &format!("{:indent$}{words}\n", "");
    match value {
        Value::Object(fields)
            if fields
                .values()
                .all(|value| is_plain(value) && !is_sentence(value)) =>
        {
            let present = fields.iter().filter(|(_, value)| !is_absent(value));
            let words: Vec<String> = present
                .map(|(key, value)| format!("{key} {}", plain(value)))
                .collect();
            if !words.is_empty() {
                line(&format!("{key}: {}", words.join(", ")));
            }
        }
        Value::Object(fields) => {
            line(&format!("{key}:"));
            write_fields(text, indent + 2, fields);
        }
        Value::Array(items) if items.iter().all(is_plain) => {
            let words: Vec<String> = items.iter().map(plain).collect();
            if words.iter().any(|words| words.contains(' ')) {
                line(&format!("{key}:"));
                words.iter().for_each(|words| line(&format!("  {words}")));
            } else if !words.is_empty() {
                line(&format!("{key}: {}", words.join(", ")));
            }
        }
        Value::Array(items) => match rows(items) {
            Some(rows) if rows.is_empty() => {}
            Some(rows) => {
                line(&format!("{key}:"));
                for row in table_of(&rows).trim_fmt().lines() {
                    *text += &format!("{:width$}{row}\n", "", width = indent + 2);
                }
            }
            None => write_items(text, indent, key, items),
        },
        value if is_absent(value) => {}
        value => line(&format!("{key}: {}", plain(value))),
    }
}

/// Writes each item below a heading: the list's key in the singular, and the item's name or number.
fn write_items(text: &mut String, indent: usize, key: &str, items: &[Value]) {
    for (index, item) in items.iter().enumerate() {
        let mut fields = item.as_object().into_iter().flatten().peekable();
        // A name is not repeated below the heading.
        let name = fields.next_if(|(_, value)| value.is_string() && !is_absent(value));
        let name = name.or_else(|| fields.peek().copied().filter(|(_, value)| value.is_number()));
        let name = name.map_or_else(|| index.to_string(), |(_, value)| plain(value));
        *text += &format!("{:indent$}{} {name}:\n", "", key.strip_suffix('s').unwrap_or(key));
        fields.for_each(|(key, value)| write_field(text, indent + 2, key, value));
    }
}

/// A row of a table: headings and values.
type Cells = Vec<(String, Value)>;

/// Items as rows of a table, without rows whose `value` or `count` is 0; `None` if an item contains a list.
fn rows(items: &[Value]) -> Option<Vec<Cells>> {
    let mut rows = Vec::new();
    for item in items {
        let fields = item.as_object()?;
        let mut cells = Cells::new();
        for (key, value) in fields {
            match value {
                Value::Object(inner) if inner.values().all(is_plain) => {
                    cells.extend(
                        inner
                            .iter()
                            .map(|(part, value)| (format!("{key}.{part}"), value.clone())),
                    );
                }
                value if is_plain(value) => cells.push((key.clone(), value.clone())),
                _ => return None,
            }
        }
        let count = fields.get("value").or(fields.get("count"));
        let is_zero = count.is_some_and(|count| *count == 0);
        if !is_zero {
            rows.push(cells);
        }
    }
    Some(rows)
}

/// The columns in which any row has a value.
fn table_of(rows: &[Cells]) -> Table {
    let mut columns: Vec<&str> = Vec::new();
    for (key, value) in rows.iter().flatten() {
        if !is_absent(value) && !columns.contains(&key.as_str()) {
            columns.push(key);
        }
    }
    let value = |row: &'_ Cells, column: &str| {
        row.iter()
            .find(|(key, _)| key == column)
            .map(|(_, value)| value.clone())
    };
    let is_number = |at: usize| {
        let mut values = rows.iter().filter_map(|row| value(row, columns[at]));
        values.all(|value| value.is_number() || value.is_null())
    };
    let mut table = table(columns.clone(), is_number);
    for row in rows {
        let cells = columns.iter().map(|column| {
            let value = value(row, column).filter(|value| !is_absent(value));
            or_dash(value.as_ref().map(plain))
        });
        table.add_row(cells);
    }
    table
}

fn is_plain(value: &Value) -> bool {
    !matches!(value, Value::Object(_) | Value::Array(_)) || is_absent(value)
}

/// Whether commas around it would mislead.
fn is_sentence(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.contains(", "))
}

fn is_absent(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => format!("{:.1}", number.as_f64().unwrap_or_default()),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_kind_of_value_has_its_form() {
        let state = json!({
            "name": "vm1", "vlan": null, "macs": [], "connected": true, "vlans": [5, 6],
            "limits": {"from_guest": {"per_second": 100, "burst": null}},
            "lanes": [{
                "pair": 0,
                "busy": 12.34,
                "counters": [
                    {"name": "kicks", "source": "lane", "value": 0},
                    {"name": "from_guest_frames", "source": "lane", "value": 7},
                ],
            }],
            "shares": [{"port": "a", "time": {"percent": 2.5}}, {"port": null, "time": null}],
        });
        let wanted = "name: vm1\nconnected: true\nvlans: 5, 6\nlimits:\n  from_guest: per_second 100\nlane 0:\n  pair: 0\n  \
            busy: 12.3\n  counters:\n    name               source  value\n    from_guest_frames  lane        7\nshares:\n  \
            port  time.percent\n  a              2.5\n  -                -\n";
        assert_eq!(tree(&state).expect("JSON"), wanted);
    }
}
