//! Options as keys: of `--port`, and of a file's tables. Each is defined once, as an option.

use std::error::Error as _;

use clap::builder::BoolishValueParser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Args, Command};
use serde_json::Value;
use toml::Spanned;
use toml::de::{DeString, DeValue};

use steward::text_file::nearest;

use super::{reason, sentence};
use crate::config::file::Table;

/// What a file may have as the value of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Takes {
    Flag,
    /// A flag that is on where it is not said.
    Switch,
    Number,
    /// A number, or with a unit, in quotes.
    Size,
    /// A number, or with a unit of another kind.
    Amount,
    Text,
    /// A user or a group.
    NameOrNumber,
    /// Of numbers or text, joined by this character where it is an option's value.
    List(char),
    /// Filter rules.
    Rules,
}

impl Takes {
    /// Seen from the name that the option gives to its value.
    fn of(arg: &Arg) -> Self {
        let name = arg.get_value_names().and_then(<[_]>::first);
        match name.map_or("", |name| name.as_str()) {
            _ if matches!(arg.get_action(), ArgAction::SetTrue) => Self::Flag,
            "N" | "M" | "BYTES" | "MICROSECONDS" | "SECONDS" | "FRAMES" | "FDNUM" | "FD" => Self::Number,
            "BOOL" => Self::Switch,
            "SIZE" => Self::Size,
            "RATE" | "BURST" => Self::Amount,
            "USER" | "GROUP" => Self::NameOrNumber,
            "RULES" => Self::Rules,
            "LIST" => Self::List(','),
            "FD:FD..." => Self::List(':'),
            _ => Self::Text,
        }
    }

    /// What belongs there, in words.
    pub(super) fn meant(self) -> &'static str {
        match self {
            Self::Flag | Self::Switch => "true or false",
            Self::Number => "a number such as 1, without quotes",
            Self::Size => "a size in quotes such as \"32GiB\", or a number of bytes",
            Self::Amount => "an amount in quotes such as \"100M\", or a number",
            Self::Text => "text in quotes",
            Self::NameOrNumber => "a name in quotes, or a number",
            Self::List(_) => "a list such as [\"one\", 2], or text in quotes",
            Self::Rules => "a list of tables, or `[[port.NAME.rule]]` each",
        }
    }
}

/// A value as TOML and JSON have it.
pub(super) enum Written<'a> {
    Flag(bool),
    Number(i64),
    Text(&'a str),
    List(Vec<Self>),
    Table(Vec<(&'a str, Self)>),
    /// What no key takes.
    Other,
}

impl<'a> From<&'a DeValue<'_>> for Written<'a> {
    fn from(value: &'a DeValue<'_>) -> Self {
        match value {
            DeValue::Boolean(on) => Self::Flag(*on),
            DeValue::Integer(number) => {
                i64::from_str_radix(number.as_str(), number.radix()).map_or(Self::Other, Self::Number)
            }
            DeValue::String(text) => Self::Text(text),
            DeValue::Array(list) => Self::List(list.iter().map(|value| value.get_ref().into()).collect()),
            DeValue::Table(table) => {
                let entries = table.iter();
                let entry = |(key, value): (&'a Spanned<_>, &'a Spanned<DeValue<'_>>)| {
                    let key: &DeString<'_> = key.get_ref();
                    (key.as_ref(), value.get_ref().into())
                };
                Self::Table(entries.map(entry).collect())
            }
            _ => Self::Other,
        }
    }
}

impl<'a> From<&'a Value> for Written<'a> {
    fn from(value: &'a Value) -> Self {
        match value {
            Value::Bool(on) => Self::Flag(*on),
            Value::Number(number) => number.as_i64().map_or(Self::Other, Self::Number),
            Value::String(text) => Self::Text(text),
            Value::Array(list) => Self::List(list.iter().map(Self::from).collect()),
            Value::Object(keys) => {
                let keys = keys.iter().map(|(key, value)| (key.as_str(), value.into()));
                Self::Table(keys.collect())
            }
            Value::Null => Self::Other,
        }
    }
}

/// A value in the words of the command line, if it is of the right kind.
pub(super) fn words_of(takes: Takes, value: &Written<'_>) -> Option<String> {
    match (takes, value) {
        (Takes::Flag | Takes::Switch, Written::Flag(on)) => Some(on.to_string()),
        (
            Takes::Number | Takes::Size | Takes::Amount | Takes::NameOrNumber | Takes::List(_),
            Written::Number(number),
        ) => Some(number.to_string()),
        (
            Takes::Size | Takes::Amount | Takes::NameOrNumber | Takes::Text | Takes::List(_),
            Written::Text(text),
        ) => Some((*text).to_owned()),
        (Takes::List(joint), Written::List(list)) => {
            let word = |value: &Written<'_>| match value {
                Written::List(_) | Written::Table(_) => None,
                value => words_of(takes, value),
            };
            let words: Option<Vec<_>> = list.iter().map(word).collect();
            Some(words?.join(&joint.to_string()))
        }
        _ => None,
    }
}

/// The keys that a kind of table may have.
pub(super) struct Keys {
    known: Vec<(String, Takes)>,
    /// Which reads them as options.
    command: Command,
}

impl Keys {
    /// Those that these options are; what is not said has the option's default.
    pub(super) fn of<A: Args>() -> Self {
        let options = A::augment_args(without_program("table"));
        let key = |arg: &Arg| Some((arg.get_long()?.to_owned(), Takes::of(arg)));
        let known: Vec<_> = options.get_arguments().filter_map(key).collect();
        let flag = |arg: &Arg| matches!(arg.get_action(), ArgAction::SetTrue);
        let options = options.mut_args(|arg| match flag(&arg) {
            true => arg.default_value("false"),
            false => arg,
        });
        Self {
            known,
            command: with_values(options),
        }
    }

    /// But for this one.
    pub(super) fn without(mut self, key: &str) -> Self {
        self.known.retain(|(known, _)| known != key);
        self
    }

    /// What a key takes, if there is such a key.
    pub(super) fn takes(&self, key: &str) -> Option<Takes> {
        let known = self.known.iter().find(|(known, _)| known == key);
        known.map(|&(_, takes)| takes)
    }

    /// Those that are true or false.
    #[cfg(test)]
    pub(super) fn flags(&self) -> impl Iterator<Item = &str> {
        let is_flag = |takes| matches!(takes, Takes::Flag | Takes::Switch);
        let flags = self.known.iter().filter(move |(_, takes)| is_flag(*takes));
        flags.map(|(name, _)| name.as_str())
    }

    /// All of them.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.known.iter().map(|(name, _)| name.as_str())
    }

    /// What a table's keys say, as options.
    /// Errors: one sentence, which begins with the key.
    pub(super) fn read<A: Args>(&self, table: &Table) -> Result<A, String> {
        let is_said = |key: &str, value: &str| self.takes(key) != Some(Takes::Flag) || value != "false";
        let said = table.keys.iter().map(|(key, said)| (key, &said.value));
        let words = said
            .filter(|(key, value)| is_said(key, value))
            .map(|(key, value)| format!("--{key}={value}"));
        let matches = self.command.clone().try_get_matches_from(words);
        let read = matches.and_then(|matches| A::from_arg_matches(&matches));
        read.map_err(|error| in_words(table, &error))
    }
}

/// What to say of a key that is none of these.
pub(super) fn unknown_key<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> String {
    match nearest(key, known) {
        Some(near) => format!("unknown key {key:?}: did you mean {near:?}?"),
        None => format!("unknown key {key:?}: docs/config.md lists them"),
    }
}

/// What is wrong, with the key and its value first.
fn in_words(table: &Table, error: &clap::Error) -> String {
    let named = |context| match error.get(context) {
        Some(ContextValue::String(option)) => key_of(option),
        Some(ContextValue::Strings(options)) => options.first().map_or("", |option| key_of(option)),
        _ => "",
    };
    let key = named(ContextKind::InvalidArg);
    if error.kind() == ErrorKind::ArgumentConflict {
        let other = named(ContextKind::PriorArg);
        return format!("{key} excludes {other}: leave one out");
    }
    let reason = match (error.source(), error.get(ContextKind::ValidValue)) {
        (Some(source), _) => reason(source),
        (None, Some(ContextValue::Strings(valid))) => format!("give one of {}", valid.join(", ")),
        (None, _) => return without_dashes(&sentence(error)),
    };
    match table.get(key) {
        Some(value) => format!("{key} = {value:?}: {reason}"),
        None => format!("{key}: {reason}"),
    }
}

/// The key that an option is: `--mac <MAC>`.
fn key_of(option: &str) -> &str {
    let option = option.trim_start_matches('-');
    option.split([' ', '=']).next().unwrap_or_default()
}

/// Options as keys.
pub(super) fn without_dashes(text: &str) -> String {
    let text = text.strip_prefix("--").unwrap_or(text);
    text.replace(" --", " ").replace("'--", "'").replace("(--", "(")
}

/// A command whose words are all options.
pub(super) fn without_program(name: &'static str) -> Command {
    Command::new(name)
        .no_binary_name(true)
        .disable_help_flag(true)
        .args_override_self(true)
}

/// Flags take a value.
pub(super) fn with_values(command: Command) -> Command {
    command.mut_args(|arg| match arg.get_action() {
        ArgAction::SetTrue => arg.action(ArgAction::Set).value_parser(BoolishValueParser::new()),
        _ => arg,
    })
}
