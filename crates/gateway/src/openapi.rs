//! docs/openapi.json: made of the [table of operations](crate::routes) and of the types that are sent.

use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use crate::problem::ProblemDocument;
use crate::routes::{Form, OPERATIONS, Operation, Parameter};

const PROBLEM: &str = "application/problem+json";
const PARAMETER: (u16, &str) = (400, "A parameter is wrong.");
const BODY: (u16, &str) = (400, "The body is no JSON object, or a parameter is wrong.");
const NOT_ALLOWED: (u16, &str) = (403, "Nothing may be changed by this socket, or by this user.");
const OTHERS: &str =
    "The method is another (405), a body was sent (413), the daemon ends (503) or does not answer (504).";
const OTHERS_OF_A_CHANGE: &str = "The body does not come (408) or is too long (413), the daemon ends or is busy (503), or it takes longer (504).";

/// The document.
#[must_use]
pub fn document() -> Value {
    let mut settings = SchemaSettings::draft2020_12().for_serialize();
    settings.definitions_path = "/components/schemas".into();
    settings.meta_schema = None;
    settings.transforms = vec![Box::new(RecursiveTransform(close))];
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for operation in OPERATIONS {
        let methods = paths.entry(operation.path).or_insert_with(|| json!({}));
        methods[operation.method.to_lowercase()] = described(operation, &mut generator);
    }
    let schemas = generator.take_definitions(true);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "vhost-af-xdp",
            "version": "1",
            "summary": "What a daemon does, what happens to its ports, and ports that are added, changed and removed.",
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

/// Objects have the properties that are described, and no others. Marks of the model are left out.
fn close(schema: &mut Schema) {
    let Some(schema) = schema.as_object_mut() else {
        return;
    };
    if schema.contains_key("properties") {
        schema.entry("additionalProperties").or_insert(json!(false));
    }
    schema.retain(|key, _| !key.starts_with("x-"));
}

fn described(operation: &Operation, generator: &mut SchemaGenerator) -> Value {
    let is_look = operation.method == "GET";
    let mut statuses = vec![(200, "The answer.")];
    statuses.push(if operation.body.is_empty() {
        PARAMETER
    } else {
        BODY
    });
    statuses.extend((!is_look).then_some(NOT_ALLOWED));
    statuses.extend(operation.others);
    let problem = generator.subschema_for::<ProblemDocument>();
    let mut responses = Map::new();
    for (status, about) in statuses {
        let content = match status {
            200 | 201 => content(operation.answer, generator),
            _ => json!({ PROBLEM: { "schema": problem } }),
        };
        responses.insert(
            status.to_string(),
            json!({ "description": about, "content": content }),
        );
    }
    let others = if is_look { OTHERS } else { OTHERS_OF_A_CHANGE };
    responses.insert(
        "default".to_owned(),
        json!({ "description": others, "content": { PROBLEM: { "schema": problem } } }),
    );
    let mut described = json!({
        "operationId": operation.id,
        "summary": operation.summary,
        "responses": responses,
    });
    if !operation.about.is_empty() {
        described["description"] = operation.about.into();
    }
    let parameters = parameters(operation);
    if !parameters.is_empty() {
        described["parameters"] = parameters.into();
    }
    if !operation.body.is_empty() {
        described["requestBody"] = json!({ "required": true, "content": content(operation.body, generator) });
    }
    described
}

fn content(forms: &[Form], generator: &mut SchemaGenerator) -> Value {
    let mut content = Map::new();
    for (media_type, schema) in forms {
        // Without its own parameters.
        let media_type = media_type.split(';').next().unwrap_or_default();
        let mut schema = schema(generator);
        close(&mut schema);
        content.insert(media_type.to_owned(), json!({ "schema": schema }));
    }
    content.into()
}

fn parameters(operation: &Operation) -> Vec<Value> {
    let name = operation.path.contains("{name}").then(|| {
        let about = "Its name, percent-encoded.";
        json!({ "name": "name", "in": "path", "required": true, "description": about, "schema": { "type": "string" } })
    });
    let others = operation.parameters.iter().map(|parameter| {
        let Parameter {
            name,
            place,
            about,
            schema,
        } = parameter;
        json!({ "name": name, "in": place, "description": about, "schema": schema() })
    });
    name.into_iter().chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_is_described_and_each_reference_leads_somewhere() {
        let document = document();
        for operation in OPERATIONS {
            let described = &document["paths"][operation.path][operation.method.to_lowercase()];
            assert_eq!(described["operationId"], operation.id);
        }
        let text = document.to_string();
        for reference in text.split("\"#").skip(1) {
            let (pointer, _) = reference.split_once('"').expect("it ends");
            assert!(document.pointer(pointer).is_some(), "{pointer}");
        }
    }
}
