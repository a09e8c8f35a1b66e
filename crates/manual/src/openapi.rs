//! docs/openapi.json: generated from the gateway's table of operations and the types of its answers.

use gateway::problem::ProblemDocument;
use gateway::routes::{OPERATIONS, Operation, What};
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

const JSON: &str = "application/json";
const PROBLEM: &str = "application/problem+json";

/// The document as text.
///
/// # Errors
/// It cannot be written as JSON.
pub(crate) fn text() -> serde_json::Result<String> {
    Ok(serde_json::to_string_pretty(&document())? + "\n")
}

fn document() -> Value {
    let mut settings = SchemaSettings::draft2020_12().for_serialize();
    settings.definitions_path = "/components/schemas".into();
    settings.transforms = vec![Box::new(RecursiveTransform(close))];
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for operation in OPERATIONS {
        let methods = paths.entry(operation.path).or_insert_with(|| json!({}));
        methods[operation.method.to_lowercase()] = described(operation, &mut generator);
    }
    let mut schemas = generator.take_definitions(true);
    let keys = schemas
        .iter_mut()
        .filter(|(name, _)| ["Port", "Network"].contains(&name.as_str()));
    keys.for_each(|(_, schema)| allow_null(schema));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "vhost-af-xdp",
            "version": "1",
            "summary": "State, statistics and events of a daemon; adding, changing and removing ports and networks.",
            "description": "HTTP/1.1 on a Unix socket, by `serve --api PATH`; see docs/api.md.",
            "license": {
                "name": "Apache-2.0 OR BSD-3-Clause",
                "identifier": "Apache-2.0 OR BSD-3-Clause",
            },
        },
        "paths": paths,
        "components": { "schemas": schemas },
    })
}

/// Allows only the properties that are described, and removes the model's marks (`x-`).
fn close(schema: &mut Schema) {
    let Some(schema) = schema.as_object_mut() else {
        return;
    };
    if schema.contains_key("properties") {
        schema.entry("additionalProperties").or_insert(json!(false));
    }
    schema.retain(|key, _| !key.starts_with("x-"));
}

/// Keys of a table: none is required, and one that is null is not set.
fn allow_null(schema: &mut Value) {
    schema["description"] = "Keys of docs/keys.md. A key that is null is not set.".into();
    schema.as_object_mut().map(|schema| schema.remove("required"));
    for property in schema["properties"]
        .as_object_mut()
        .into_iter()
        .flat_map(Map::values_mut)
    {
        let description = property["description"].take();
        if let Some(property) = property.as_object_mut() {
            property.retain(|key, _| key != "default" && key != "description");
        }
        *property = json!({ "description": description, "anyOf": [property, { "type": "null" }] });
    }
}

/// Statuses besides 200, and when an operation answers with them.
fn statuses(operation: &Operation) -> Vec<(&'static str, &'static str)> {
    let is_look = operation.method == "GET";
    let adds = operation
        .parameters
        .iter()
        .any(|(name, ..)| *name == "If-None-Match");
    let mut statuses = vec![match operation.body {
        Some(_) => ("400", "The body is no JSON object, or a parameter is wrong."),
        None => ("400", "A parameter is wrong."),
    }];
    if !is_look {
        statuses.push(("403", "Nothing may be changed by this socket, or by this user."));
        let why = "The file has it or is wrong, the guest would be disconnected, or the host lacks what it needs; \
                   nothing has changed.";
        statuses.push(("409", why));
    }
    if adds {
        statuses.push(("201", "It was added."));
        statuses.push(("412", "There is one of that name."));
    } else if operation.path.contains("{name}") {
        statuses.push(("404", "There is none of that name."));
    }
    if operation.body.is_some() {
        statuses.push(("422", "A key or a value is not possible; `key` names it."));
    }
    statuses.push(match is_look {
        true => (
            "default",
            "The method is another (405), a body was sent (413), the daemon ends (503) or does not answer (504).",
        ),
        false => (
            "default",
            "The body does not come (408) or is too long (413), the daemon ends or is busy (503), or it takes longer \
             (504).",
        ),
    });
    statuses
}

fn described(operation: &Operation, generator: &mut SchemaGenerator) -> Value {
    let answer = (operation.answer)(generator);
    let answer = json!({ "schema": answer });
    let answer = match operation.what {
        What::GetMetrics => json!({ "text/plain": answer }),
        What::GetEvents => json!({ JSON: answer, "text/event-stream": { "schema": { "type": "string" } } }),
        _ => json!({ JSON: answer }),
    };
    let problem = json!({ PROBLEM: { "schema": generator.subschema_for::<ProblemDocument<'_>>() } });
    let mut responses = json!({ "200": { "description": "The answer.", "content": answer } });
    for (status, why) in statuses(operation) {
        let content = if status == "201" { &answer } else { &problem };
        responses[status] = json!({ "description": why, "content": content });
    }
    let what = format!("{:?}", operation.what);
    let (first, rest) = what.split_at(1);
    let (summary, about) = operation.about.split_first().unwrap_or((&"", &[]));
    let about: Vec<&str> = about.iter().map(|line| line.trim()).collect();
    let mut described = json!({
        "operationId": first.to_lowercase() + rest,
        "summary": summary.trim(),
        "description": about.join(" ").trim(),
        "parameters": parameters(operation),
        "responses": responses,
    });
    if let Some(body) = operation.body {
        let schema = json!({ "schema": body(generator) });
        let content = match operation.method {
            "PATCH" => json!({ JSON: schema, "application/merge-patch+json": schema }),
            _ => json!({ JSON: schema }),
        };
        described["requestBody"] = json!({ "required": true, "content": content });
    }
    if let Some(fields) = described.as_object_mut() {
        fields.retain(|_, value| *value != json!("") && *value != json!([]));
    }
    described
}

fn parameters(operation: &Operation) -> Vec<Value> {
    let name = ("name", "path", "string", "Its name, percent-encoded");
    let name = operation.path.contains("{name}").then_some(&name);
    let all = name.into_iter().chain(operation.parameters);
    all.map(|(name, place, kind, about)| {
        let is_required = *place == "path";
        json!({ "name": name, "in": place, "required": is_required, "description": about, "schema": { "type": kind } })
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_is_described_and_each_reference_leads_somewhere() {
        let document = document();
        for operation in OPERATIONS {
            let described = &document["paths"][operation.path][operation.method.to_lowercase()];
            assert!(described["summary"].is_string(), "{}", operation.path);
        }
        let text = document.to_string();
        for reference in text.split("\"#").skip(1) {
            let (pointer, _) = reference.split_once('"').expect("it ends");
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
    }
}
