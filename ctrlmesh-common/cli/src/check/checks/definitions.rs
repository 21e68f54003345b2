//! Checks that the kinds are defined as this version defines them.

use std::collections::BTreeSet;

use ctrlmesh_common::api;
use ctrlmesh_common::names::VERSION;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt as _;
use serde_json::Value;

use super::super::finding::{Finding, Group, listed};
use super::super::pages;
use super::super::snapshot::Installed;
use crate::text::counted;

const CHECK: &str = "definitions";

/// What differs in meaning nothing.
const DESCRIPTION: &str = "description";

/// How a definition of the cluster differs from that of this program.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Difference {
    /// It lacks these fields.
    Older(Vec<String>),
    /// It has these fields besides.
    Newer(Vec<String>),
    /// Each has fields that the other lacks.
    Both,
    /// The fields are the same, and what they may hold is not.
    Rules,
}

/// The check of all kinds. Where the managers have the version of this program, a difference is a failure.
pub(super) fn check(installed: &Installed, same_version: bool) -> Vec<Finding> {
    let (mut findings, mut unread, mut good) = (Vec::new(), Vec::new(), 0);
    for expected in api::definitions() {
        let name = expected.name_any();
        let Some(answer) = installed.definitions.get(&name) else { continue };
        match answer {
            Err(why) => unread.push(why),
            Ok(live) => match of_kind(&expected, live.as_ref(), same_version) {
                Some(finding) => findings.push(finding),
                None => good += 1,
            },
        }
    }
    findings.extend(Group::Installation.all_unanswered(CHECK, &unread));
    if good > 0 {
        findings.insert(0, Group::Installation.ok(CHECK, format!("{} as in this version", counted(good, "kind"))));
    }
    findings
}

/// `None`: the definition is as expected.
fn of_kind(
    expected: &CustomResourceDefinition,
    live: Option<&CustomResourceDefinition>,
    same_version: bool,
) -> Option<Finding> {
    let name = expected.name_any();
    let apply = format!("apply `deploy/` of the managers' version: {}", pages::UPGRADE);
    let Some(live) = live else {
        let advice = format!("install ctrlmesh, `kubectl apply -k deploy/`: {}", pages::INSTALL);
        return Some(Group::Installation.failed(CHECK, format!("{name} does not exist"), advice));
    };
    if !is_established(live) {
        let advice = format!("see its conditions: `kubectl describe customresourcedefinition {name}`");
        return Some(Group::Installation.failed(CHECK, format!("{name} is not established"), advice));
    }
    let Some(schema) = schema(live) else {
        let found = format!("{name} does not serve {VERSION}");
        return Some(Group::Installation.failed(CHECK, found, apply));
    };
    let found = match difference(&self::schema(expected)?, &schema)? {
        Difference::Older(fields) => format!("{name} is older than this program: it lacks {}", listed(&fields)),
        Difference::Newer(fields) => format!("{name} is newer than this program: it also has {}", listed(&fields)),
        Difference::Both => format!("{name} is of another version than this program: each has fields of its own"),
        Difference::Rules => format!("{name} has the fields of this program, with other values or rules"),
    };
    Some(if same_version {
        Group::Installation.failed(CHECK, found, apply)
    } else {
        let advice = format!("take `ctrlmesh` of the managers' version, or {apply}");
        Group::Installation.warning(CHECK, found, advice)
    })
}

fn is_established(live: &CustomResourceDefinition) -> bool {
    let conditions = live.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|one| one.type_ == "Established" && one.status == "True")
}

/// The schema of the served version, in the form that is compared.
fn schema(definition: &CustomResourceDefinition) -> Option<Value> {
    let version = definition.spec.versions.iter().find(|one| one.name == VERSION && one.served)?;
    let mut schema = serde_json::to_value(version.schema.as_ref()?.open_api_v3_schema.as_ref()?).ok()?;
    normalize(&mut schema);
    Some(schema)
}

/// Removes descriptions, and rounds numbers: 1 and 1.0 are the same, and large numbers are read with a small error. A
/// field with the name of descriptions is an object, and stays.
fn normalize(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|key, value| !(key == DESCRIPTION && value.is_string()));
            fields.values_mut().for_each(normalize);
        }
        Value::Array(items) => items.iter_mut().for_each(normalize),
        Value::Number(number) => *value = Value::String(format!("{:.12e}", number.as_f64().unwrap_or_default())),
        _ => {}
    }
}

fn difference(expected: &Value, live: &Value) -> Option<Difference> {
    if expected == live {
        return None;
    }
    let (mut ours, mut theirs) = (BTreeSet::new(), BTreeSet::new());
    fields(expected, "", &mut ours);
    fields(live, "", &mut theirs);
    let lacking: Vec<String> = ours.difference(&theirs).cloned().collect();
    let besides: Vec<String> = theirs.difference(&ours).cloned().collect();
    Some(match (lacking.is_empty(), besides.is_empty()) {
        (true, true) => Difference::Rules,
        (false, true) => Difference::Older(lacking),
        (true, false) => Difference::Newer(besides),
        (false, false) => Difference::Both,
    })
}

/// The paths of all fields of a schema, as `spec.root.prefix`.
fn fields(schema: &Value, path: &str, all: &mut BTreeSet<String>) {
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        fields(field, &path, all);
        all.insert(path);
    }
    for inner in ["items", "additionalProperties"] {
        if schema[inner].is_object() {
            fields(&schema[inner], &format!("{path}[]"), all);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::finding::State;
    use super::super::super::snapshot::samples;
    use super::*;
    use crate::cluster::answer::Unanswered;

    const ROOTS: &str = "shardingconfigs.ctrlmesh.kusionstack.io";

    fn changed(change: impl FnOnce(&mut CustomResourceDefinition)) -> Installed {
        let mut installed = samples::installed();
        let live = installed.definitions.get_mut(ROOTS).unwrap();
        change(live.as_mut().unwrap().as_mut().unwrap());
        installed
    }

    /// The message of the only finding that is not good.
    fn bad(installed: &Installed, same_version: bool) -> (State, String) {
        let mut findings = check(installed, same_version);
        assert_eq!((findings.len(), findings[0].state), (2, State::Ok), "{findings:?}");
        let bad = findings.remove(1);
        (bad.state, bad.message)
    }

    /// The fields of the spec in the live definition.
    fn spec(
        live: &mut CustomResourceDefinition,
    ) -> &mut std::collections::BTreeMap<
        String,
        k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::JSONSchemaProps,
    > {
        let schema = live.spec.versions[0].schema.as_mut().unwrap().open_api_v3_schema.as_mut().unwrap();
        schema.properties.as_mut().unwrap().get_mut("spec").unwrap().properties.as_mut().unwrap()
    }

    #[test]
    fn definitions_of_this_version_are_good() {
        let other_words = changed(|live| spec(live).get_mut("root").unwrap().description = Some("other".to_owned()));
        let good = [Group::Installation.ok(CHECK, "4 kinds as in this version")];
        assert_eq!(check(&samples::installed(), true), good);
        assert_eq!(check(&other_words, true), good);
    }

    #[test]
    fn a_definition_that_was_written_and_read_is_the_same() {
        for definition in api::definitions() {
            let text = serde_json::to_string(&definition).unwrap();
            let read: CustomResourceDefinition = serde_json::from_str(&text.replace(".0,", ",")).unwrap();
            assert_eq!(schema(&read), schema(&definition));
        }
    }

    #[test]
    fn an_older_definition_lacks_fields_and_a_newer_one_has_more() {
        let older = changed(|live| drop(spec(live).remove("webhook")));
        let (state, message) = bad(&older, true);
        assert!(message.contains("is older than this program: it lacks spec.webhook"), "{message}");
        assert_eq!((state, bad(&older, false).0), (State::Failed, State::Warning));
        let newer = changed(|live| {
            let field = spec(live)["root"].clone();
            spec(live).insert("more".to_owned(), field);
        });
        assert!(bad(&newer, false).1.contains("is newer than this program: it also has spec.more"));
        let rules = changed(|live| spec(live).get_mut("root").unwrap().x_kubernetes_validations = None);
        assert!(bad(&rules, true).1.ends_with("with other values or rules"));
    }

    #[test]
    fn a_missing_definition_and_one_that_is_not_served_fail() {
        let mut missing = samples::installed();
        missing.definitions.insert(ROOTS.to_owned(), Ok(None));
        assert_eq!(bad(&missing, false), (State::Failed, format!("{ROOTS} does not exist")));
        let waiting = changed(|live| live.status = None);
        assert!(bad(&waiting, false).1.ends_with("is not established"));
        let unserved = changed(|live| live.spec.versions[0].served = false);
        assert!(bad(&unserved, false).1.ends_with("does not serve v1alpha1"));
    }

    #[test]
    fn a_missing_right_is_said_once() {
        let mut installed = samples::installed();
        let forbidden = Unanswered::Forbidden { right: "get customresourcedefinitions".to_owned() };
        installed.definitions.values_mut().for_each(|one| *one = Err(forbidden.clone()));
        let findings = check(&installed, true);
        assert_eq!(findings, [Group::Installation.unanswered(CHECK, &forbidden)]);
    }
}
