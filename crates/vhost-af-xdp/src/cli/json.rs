//! A port's table as JSON has it: the file's keys, with numbers, booleans, lists and text as TOML has them.

use serde_json::{Map, Value};

use super::file::{is_name, name_rule, unknown};
use super::filter::{json_of_rules, rules_in_words};
use super::keys::{Keys, Takes, Written, words_of};
use super::port::PortTableArgs;
use crate::config::file::{Said, Table};

/// What is wrong with a table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mistake {
    /// The key, if it is one's.
    pub(crate) key: Option<String>,
    pub(crate) what: String,
}

/// The table of a port of that name. What is null is not said.
/// Errors: [`Mistake`]: a name that cannot be, a key that is not known, a value of another kind.
pub(crate) fn table_of(name: &str, json: &Map<String, Value>) -> Result<Table, Mistake> {
    if !is_name(name) {
        let what = format!("port {name:?}: {}", name_rule());
        return Err(Mistake { key: None, what });
    }
    let keys = PortTableArgs::keys();
    let mut table = Table {
        name: name.to_owned(),
        ..Table::default()
    };
    for (key, value) in json {
        let wrong = |what: String| Mistake {
            key: Some(key.clone()),
            what,
        };
        let takes = keys.takes(key).ok_or_else(|| wrong(unknown(key, &keys, name)))?;
        if value.is_null() {
            continue;
        }
        if takes == Takes::Rules {
            let value = rules_in_words(&Written::from(value)).map_err(|why| wrong(why.to_string()))?;
            table.say_rules(key, value, 0);
            continue;
        }
        let value = words_of(takes, &Written::from(value)).ok_or_else(|| {
            let written: String = value.to_string().chars().take(40).collect();
            wrong(format!("{key} = {written}: give {}", takes.meant()))
        })?;
        table.keys.insert(key.clone(), Said { value, line: 0 });
    }
    Ok(table)
}

/// What a port's table says, so that [`table_of`] makes the same of it again.
pub(crate) fn json_of(table: &Table) -> Map<String, Value> {
    let keys: Keys = PortTableArgs::keys();
    let value = |(key, said): (&String, &Said)| {
        let text = said.value.as_str();
        let value = match (keys.takes(key), text.parse::<i64>()) {
            // Text that is neither of both stays what it is: the reader refuses it.
            (Some(Takes::Rules), _) => json_of_rules(text),
            (Some(Takes::Flag | Takes::Switch), _) => text.parse().map_or_else(|_| text.into(), Value::Bool),
            (
                Some(Takes::Number | Takes::Size | Takes::Amount | Takes::NameOrNumber | Takes::List(_)),
                Ok(number),
            ) => number.into(),
            _ => text.into(),
        };
        (key.clone(), value)
    };
    table.keys.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table(json: &Value) -> Result<Table, Mistake> {
        table_of("vm1", json.as_object().expect("an object"))
    }

    #[test]
    fn table_comes_back_as_it_was_said() {
        let said = json!({
            "socket-path": "/run/vm1.sock", "ifname": "eth1", "queues": 2, "force-copy": true,
            "vlan": [100, "200-203"], "max-memory": "32GiB", "socket-group": 7, "mac": null,
        });
        let read = table(&said).expect("well said");
        assert_eq!(read.get("vlan"), Some("100,200-203"));
        assert_eq!(read.get("mac"), None);
        let json = Value::Object(json_of(&read));
        assert_eq!((&json["queues"], &json["force-copy"]), (&json!(2), &json!(true)));
        assert_eq!(table(&json).expect("the same"), read);
    }

    #[test]
    fn mistakes_name_the_key_and_say_what_belongs_there() {
        for (said, key, words) in [
            (
                json!({"queus": 1}),
                "queus",
                "unknown key \"queus\": did you mean \"queues\"?",
            ),
            (json!({"queues": "1"}), "queues", "queues = \"1\": give a number"),
            (json!({"queues": 1.5}), "queues", "give a number"),
            (json!({"force-copy": "yes"}), "force-copy", "give true or false"),
            (json!({"vlan": [[1]]}), "vlan", "give a list"),
            (json!({"vlan": {"a": 1}}), "vlan", "give a list"),
            (
                json!({"workers": 1}),
                "workers",
                "belongs below a line `[daemon]`",
            ),
        ] {
            let mistake = table(&said).expect_err(key);
            assert_eq!(mistake.key.as_deref(), Some(key));
            assert!(mistake.what.contains(words), "{}", mistake.what);
        }
        for flag in PortTableArgs::keys().flags() {
            for value in [
                json!("yes"),
                json!("true"),
                json!("TRUE"),
                json!(1),
                json!(0),
                json!([true]),
            ] {
                let mistake = table(&json!({flag: value})).expect_err(flag);
                assert_eq!(mistake.what, format!("{flag} = {value}: give true or false"));
            }
        }
        for name in ["", "a/b", "-a", &"x".repeat(33), "../x"] {
            assert!(table_of(name, &Map::new()).is_err(), "{name}");
        }
    }
}
