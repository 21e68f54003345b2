//! A label selector as it is written in a resource.
//!
//! The shape is `metav1.LabelSelector`. It is a type of our own so that its schema has bounds: without them the API
//! server refuses every CEL rule that looks into it as too expensive.

use std::collections::BTreeMap;

use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::rules;
use crate::selector::{Condition, Requirement, RequirementError, Selector};

/// Selects by labels; all requirements must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.matchLabels) || self.matchLabels.all(key, key.matches('^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))")
        .message("matchLabels: every key must be a label key: an optional DNS subdomain and '/', then 1 to 63 of A-Z a-z 0-9 - _ . with an alphanumeric at both ends"),
    validation = Rule::new("!has(self.matchLabels) || self.matchLabels.all(key, key.indexOf('/') <= 253)")
        .message("matchLabels: the part of a key before '/' must have at most 253 characters")
)]
pub struct LabelSelector {
    /// Labels that must be there with just these values, all of them. Absent or empty: none is asked for. At most 64.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "match_labels_schema")]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements on labels, each with an operator; all must hold. Absent or empty: none is asked for. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub match_expressions: Vec<Expression>,
}

/// One requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : !has(self.values) || size(self.values) == 0")
        .message("values: must have at least one value with the operators In and NotIn, and none with Exists and DoesNotExist"),
    validation = Rule::new("self.key.indexOf('/') <= 253")
        .message("key: the part before '/' must have at most 253 characters")
)]
pub struct Expression {
    /// The label's key.
    #[schemars(
        length(min = 1, max = 317),
        regex(
            pattern = rules::LABEL_KEY
        )
    )]
    pub key: String,
    /// How the label relates to `values`: In, `NotIn`, Exists or `DoesNotExist`.
    pub operator: SelectorOperator,
    /// The values for In and `NotIn`; absent for the others. At most 4096.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096), inner(length(max = 63), regex(pattern = rules::LABEL_VALUE)), extend("x-kubernetes-list-type" = "atomic"))]
    pub values: Vec<String>,
}

/// How a label relates to the values of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SelectorOperator {
    /// The label is there and has one of the values.
    In,
    /// The label is not there or has none of the values.
    NotIn,
    /// The label is there.
    Exists,
    /// The label is not there.
    DoesNotExist,
}

impl LabelSelector {
    /// Selects where the label `key` has one of `values`.
    pub fn any_of(key: &str, values: impl IntoIterator<Item = String>) -> Self {
        let expression =
            Expression { key: key.to_owned(), operator: SelectorOperator::In, values: values.into_iter().collect() };
        Self { match_expressions: vec![expression], ..Self::default() }
    }

    /// Whether it has no requirement, and so selects everything.
    pub fn is_empty(&self) -> bool {
        self.match_labels.is_empty() && self.match_expressions.is_empty()
    }
}

impl TryFrom<&LabelSelector> for Selector {
    type Error = RequirementError;

    fn try_from(selector: &LabelSelector) -> Result<Self, RequirementError> {
        let labels =
            selector.match_labels.iter().map(|(key, value)| Requirement::new(key, Condition::Equals(value.clone())));
        let expressions = selector
            .match_expressions
            .iter()
            .map(|expression| Requirement::new(&expression.key, expression.condition()?));
        labels.chain(expressions).collect()
    }
}

impl Expression {
    fn condition(&self) -> Result<Condition, RequirementError> {
        let values = || self.values.iter().cloned().collect();
        match self.operator {
            SelectorOperator::In => Ok(Condition::In(values())),
            SelectorOperator::NotIn => Ok(Condition::NotIn(values())),
            _ if !self.values.is_empty() => Err(RequirementError::UnwantedValues),
            SelectorOperator::Exists => Ok(Condition::Exists),
            SelectorOperator::DoesNotExist => Ok(Condition::DoesNotExist),
        }
    }
}

fn match_labels_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": {
            "type": "string",
            "maxLength": 63,
            "pattern": rules::LABEL_VALUE,
        },
    })
}
