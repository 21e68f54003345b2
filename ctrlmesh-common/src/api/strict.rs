//! Finds fields that a schema does not know.
//!
//! The API server refuses such fields itself (`fieldValidation: Strict`, which kubectl asks for). A file that is read
//! here never reaches the API server, so without this a misspelled field would go unnoticed.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use serde_json::Value;

/// A field that is in a manifest, but not in the schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unknown {
    /// Where it stands: `spec.limits[0].limts`.
    pub(super) field: String,
    /// What may stand there.
    pub(super) allowed: Vec<String>,
}

/// The first field of the `spec` of `manifest` that its definition does not know.
pub(super) fn unknown_in_spec(definition: &CustomResourceDefinition, manifest: &Value) -> Option<Unknown> {
    let versions = definition.spec.versions.iter();
    let schemas = versions.filter_map(|version| version.schema.as_ref()?.open_api_v3_schema.as_ref());
    let mut specs = schemas.filter_map(|schema| schema.properties.as_ref()?.get("spec"));
    unknown(specs.next()?, manifest.get("spec")?, "spec")
}

fn unknown(schema: &JSONSchemaProps, value: &Value, path: &str) -> Option<Unknown> {
    match value {
        Value::Object(fields) => fields.iter().find_map(|(name, value)| {
            let field = format!("{path}.{name}");
            match (&schema.properties, &schema.additional_properties) {
                (Some(known), _) => match known.get(name) {
                    Some(schema) => unknown(schema, value, &field),
                    None => Some(Unknown { field, allowed: known.keys().cloned().collect() }),
                },
                (None, Some(JSONSchemaPropsOrBool::Schema(each))) => unknown(each, value, &field),
                (None, _) => None,
            }
        }),
        Value::Array(items) => {
            let Some(JSONSchemaPropsOrArray::Schema(each)) = &schema.items else { return None };
            let mut items = items.iter().enumerate();
            items.find_map(|(at, value)| unknown(each, value, &format!("{path}[{at}]")))
        }
        _ => None,
    }
}
