//! Tables: keys with values, from a file, a JSON object or words `KEY=VALUE`.

use std::collections::BTreeMap;
use std::fmt::Write;

use schemars::{JsonSchema, schema_for};
use serde::de::{self, DeserializeOwned, Deserializer, Error as _, Visitor};
use serde::{Serialize, forward_to_deserialize_any};
use serde_json::{Map, Value, json};

use crate::mistakes::nearest;

/// Most known keys that an error message lists.
const FEW_KEYS: usize = 12;

/// What is wrong with a table, in one sentence that begins with the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The key that is wrong, if it is a single one.
    pub key: Option<String>,
    /// The wrong element of the value, if that is a list: counted from 1.
    pub number: Option<usize>,
    /// The wrong key in that element.
    pub inner_key: Option<String>,
    /// The sentence.
    pub what: String,
}

impl Mistake {
    /// A mistake that is not about a key.
    pub fn of_no_key(what: impl Into<String>) -> Self {
        Self {
            key: None,
            number: None,
            inner_key: None,
            what: what.into(),
        }
    }

    /// A mistake in the value of a key.
    #[must_use]
    pub fn of_key(key: &str, what: String) -> Self {
        Self {
            key: Some(key.to_owned()),
            ..Self::of_no_key(what)
        }
    }
}

/// A structure that a table is read into.
///
/// Its fields are sections: structures whose keys are together those of the table.
pub trait Table: Sized + Default + Clone + PartialEq + Serialize + JsonSchema {
    /// Reads the values of keys; null counts as absent.
    ///
    /// # Errors
    /// A key is unknown, or its value is not possible.
    fn read(keys: Map<String, Value>) -> Result<Self, Mistake>;

    /// The keys of words `KEY=VALUE`, for [`Self::read`]; a word without a value is true.
    ///
    /// # Errors
    /// A key is given twice.
    fn keys_of_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Map<String, Value>, Mistake> {
        keys_of_words(words, &Self::schema())
    }

    /// Those keys that are set, as JSON.
    fn keys(&self) -> Map<String, Value> {
        set_keys(self)
    }

    /// Whether another value of this key takes effect at run time, while guests stay connected.
    fn is_live(&self, key: &str) -> bool {
        let schema = Self::schema();
        let is_live = schema
            .get(key)
            .is_some_and(|property| property.get("x-live").is_some());
        is_live && !self.keeps(key)
    }

    /// Whether other keys that are set prevent this live key from changing at run time.
    fn keeps(&self, _key: &str) -> bool {
        false
    }

    /// The header of the table, in the same file, that has this key.
    fn table_with(key: &str) -> Option<&'static str> {
        super::table_with(key)
    }

    /// Names of keys whose values differ.
    fn differences(&self, other: &Self) -> Vec<String> {
        let (mine, others) = (self.keys(), other.keys());
        let names: BTreeMap<&String, ()> = mine.keys().chain(others.keys()).map(|key| (key, ())).collect();
        let differs = names.into_keys().filter(|key| mine.get(*key) != others.get(*key));
        differs.cloned().collect()
    }

    /// Those keys that are set, with their values as text.
    fn lines(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let line = |(key, value): (String, Value)| match &value {
            Value::Array(list) => (key, list.iter().map(text).collect::<Vec<_>>().join(", ")),
            value => (key, text(value)),
        };
        self.keys().into_iter().map(line).collect()
    }

    /// Defaults of the keys whose documentation has `[default: …]`.
    fn defaults() -> Vec<(String, String)> {
        let default = |(key, property): (String, Value)| {
            let (_, default) = property["description"].as_str()?.split_once("[default: ")?;
            Some((key, default.split(']').next()?.replace('\n', " ")))
        };
        Self::schema().into_iter().filter_map(default).collect()
    }

    /// The JSON Schema of the table: each property with its documentation, and `x-live` if it can change at run time.
    fn schema() -> Map<String, Value> {
        schema::<Self>()
    }
}

/// Implements [`Table`] for a structure whose fields are sections.
macro_rules! table {
    ($table:ident { $($section:ident),* } $($method:item)*) => {
        impl $crate::config::table::Table for $table {
            fn read(mut keys: serde_json::Map<String, serde_json::Value>)
                -> Result<Self, $crate::config::table::Mistake> {
                keys.retain(|_, value| !value.is_null());
                let read = Self { $($section: $crate::config::table::take_section(&mut keys)?),* };
                $crate::config::table::reject_unknown::<Self>(&keys)?;
                Ok(read)
            }

            $($method)*
        }

        impl<'de> serde::Deserialize<'de> for $table {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let keys = serde_json::Map::deserialize(from)?;
                let read = <Self as $crate::config::table::Table>::read(keys);
                read.map_err(|mistake| serde::de::Error::custom(mistake.what))
            }
        }
    };
}
pub(crate) use table;

/// Defines a [`Table`] whose keys are also options of a command.
macro_rules! options {
    ($(#[$about:meta])* $table:ident { $($(#[$of:meta])* $section:ident: $kind:ident,)* } $($method:item)*) => {
        $(#[$about])*
        #[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema, Args)]
        pub struct $table {
            $($(#[$of])* #[serde(flatten)] #[command(flatten)] pub $section: $kind,)*
        }

        impl $table {
            /// Names of the clap groups of these options, for an option that conflicts with all of them.
            pub const GROUPS: &[&'static str] = &[$(stringify!($kind)),*];
        }

        $crate::config::table::table! { $table { $($section),* } $($method)* }
    };
}
pub(crate) use options;

/// Removes and reads the keys of a section.
pub(crate) fn take_section<T: DeserializeOwned>(keys: &mut Map<String, Value>) -> Result<T, Mistake> {
    let its = fields::<T>().iter().filter_map(|key| keys.remove_entry(*key));
    let its: Map<String, Value> = its.collect();
    serde_path_to_error::deserialize(Value::Object(its.clone())).map_err(|error| {
        let (path, error) = (error.path().clone(), error.into_inner());
        mistake(&path, &error.to_string(), &its)
    })
}

/// Fails if a key is left after all sections were taken: it is unknown.
pub(crate) fn reject_unknown<T: Table>(keys: &Map<String, Value>) -> Result<(), Mistake> {
    let Some(key) = keys.keys().min() else {
        return Ok(());
    };
    let known = T::schema();
    let what = match T::table_with(key) {
        Some(table) => format!("{key} belongs below a line `{table}`"),
        None => unknown_key(key, known.keys().map(String::as_str)),
    };
    Err(Mistake::of_key(key, what))
}

fn unknown_key<'a>(key: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    match nearest(key, known.clone()) {
        Some(near) => format!("unknown key {key:?}: did you mean {near:?}?"),
        None if known.clone().count() > FEW_KEYS => format!("unknown key {key:?}: docs/keys.md lists them"),
        None => format!(
            "unknown key {key:?}: give one of {}",
            known.collect::<Vec<_>>().join(", ")
        ),
    }
}

/// The mistake that serde found in the value at this path.
fn mistake(path: &serde_path_to_error::Path, error: &str, written: &Map<String, Value>) -> Mistake {
    use serde_path_to_error::Segment;
    let (mut keys, mut number) = (Vec::new(), None);
    for segment in path {
        match segment {
            Segment::Map { key } => keys.push(key.clone()),
            Segment::Seq { index } => number = Some(index + 1),
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    let mut keys = keys.into_iter();
    let (key, inner_key) = (keys.next(), keys.next());
    let reason = reason(error);
    let what = match (&key, number) {
        (Some(key), Some(number)) => {
            let inner = inner_key
                .as_ref()
                .map_or_else(String::new, |inner| format!("{inner}: "));
            format!("{key} {number}: {inner}{reason}")
        }
        (Some(key), None) => {
            let written = written.get(key);
            let written = written.map_or_else(String::new, |value| crate::mistakes::cut(&value.to_string()));
            format!("{key} = {written}: {reason}")
        }
        (None, _) => reason,
    };
    Mistake {
        key,
        number,
        inner_key,
        what,
    }
}

/// Turns an error message of serde into one that names the remedy.
pub(super) fn reason(error: &str) -> String {
    if let Some(key) = error.strip_prefix("missing field ") {
        return format!("{} is missing: add it", key.trim_matches('`'));
    }
    let Some((wrong, expected)) = error.rsplit_once(", expected ") else {
        return error.to_owned();
    };
    let expected = expected.replace('`', "");
    if let Some(key) = wrong.strip_prefix("unknown field ") {
        return unknown_key(
            key.trim_matches('`'),
            expected.trim_start_matches("one of ").split(", "),
        );
    }
    match expected.as_str() {
        "u16" => "give a number of 0 to 65535, without quotes".to_owned(),
        "u32" | "u64" | "usize" => format!("give a number such as 1, without quotes{}", most(&expected)),
        "a nonzero u16" => "give a number of 1 to 65535, without quotes".to_owned(),
        "a nonzero u32" => "give a number of 1 or more, without quotes".to_owned(),
        "i32" => "give the number of a descriptor, without quotes".to_owned(),
        "a boolean" => "give true or false".to_owned(),
        "a string" | "path string" => "give text in quotes".to_owned(),
        "a sequence" => "give a list such as [\"one\", \"two\"]".to_owned(),
        expected => format!("give {expected}"),
    }
}

fn most(kind: &str) -> &'static str {
    match kind {
        "u32" => ", up to 4294967295",
        _ => "",
    }
}

/// Names of the keys that a structure is read from.
pub(crate) fn fields<T: DeserializeOwned>() -> &'static [&'static str] {
    struct Fields<'a>(&'a mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Fields<'_> {
        type Error = de::value::Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(Self::Error::custom("not a structure"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Self::Error> {
            *self.0 = fields;
            Err(Self::Error::custom("only the names are of interest"))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut names: &'static [&'static str] = &[];
    // Always ends with an error: only the names are needed.
    let _ = T::deserialize(Fields(&mut names));
    names
}

/// Keys of a table or a section that are set, as JSON: those that differ from a table without keys.
pub fn set_keys<T: Serialize + Default>(section: &T) -> Map<String, Value> {
    let fields = |section: &T| match serde_json::to_value(section) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
    };
    let (unset, mut keys) = (fields(&T::default()), fields(section));
    keys.retain(|key, value| !value.is_null() && unset.get(key) != Some(value));
    keys
}

/// Names of the keys of a section that are true, in its order.
#[must_use]
pub fn names_of_set<T: Serialize + DeserializeOwned + Default>(section: &T) -> Vec<String> {
    let keys = set_keys(section);
    let set = fields::<T>()
        .iter()
        .filter(|name| keys.get(**name) == Some(&Value::Bool(true)));
    set.map(|name| (*name).to_owned()).collect()
}

/// Writes keys with their values below a title.
///
/// # Errors
/// Those of the writer.
pub fn write_block(to: &mut impl Write, title: &str, lines: &[(String, String)]) -> std::fmt::Result {
    writeln!(to, "{title}")?;
    let mut lines = lines.iter();
    lines.try_for_each(|(key, value)| writeln!(to, "  {key:<24} {value}"))
}

/// The properties of a structure's JSON Schema.
pub(crate) fn schema<T: JsonSchema>() -> Map<String, Value> {
    let mut schema = schema_for!(T);
    match schema.remove("properties") {
        Some(Value::Object(properties)) => properties,
        _ => Map::new(),
    }
}

/// The keys of words `KEY=VALUE` for a structure with this schema; a word without a value is true.
///
/// # Errors
/// A key is given twice.
pub(crate) fn keys_of_words<'a>(
    words: impl IntoIterator<Item = &'a str>,
    schema: &Map<String, Value>,
) -> Result<Map<String, Value>, Mistake> {
    let mut keys = Map::new();
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, "true"));
        match keys.get_mut(key) {
            None => drop(keys.insert(key.to_owned(), typed(value, schema.get(key)))),
            // `rule=` may be given several times: each word adds rules to the list.
            Some(Value::String(before)) if key == "rule" && !before.is_empty() && !value.is_empty() => {
                before.push_str(&format!("\n{value}"));
            }
            Some(_) => {
                let what = format!("{key} is given more than once: give it once");
                return Err(Mistake::of_key(key, what));
            }
        }
    }
    Ok(keys)
}

/// A word as JSON of the type that the schema has for its key. A word that is not of that type stays text, and is
/// reported when the key is read.
fn typed(word: &str, property: Option<&Value>) -> Value {
    let kind = property.map_or(&Value::Null, |property| &property["type"]);
    let is = |name: &str| kind == name || *kind == json!([name, "null"]);
    let value = match () {
        () if is("boolean") => word.parse().ok().map(Value::Bool),
        () if is("integer") => word.parse::<i64>().ok().map(Value::from),
        () => None,
    };
    value.unwrap_or_else(|| word.into())
}
