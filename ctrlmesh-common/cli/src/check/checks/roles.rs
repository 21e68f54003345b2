//! Checks that the accounts of managers and node proxies exist, and have the rights of this version.

use ctrlmesh_manager::install::rbac;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde::Deserialize;
use serde_json::Value;

use super::super::expected;
use super::super::finding::{Finding, Group, listed};
use super::super::pages;
use crate::cluster::answer::Answer;
use crate::cluster::resource_name;
use crate::text::counted;

const CHECK: &str = "accounts and roles";

/// Stands for everything in a rule.
const ALL: &str = "*";

/// A rule of a role.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Rule {
    api_groups: Vec<String>,
    resources: Vec<String>,
    resource_names: Vec<String>,
    verbs: Vec<String>,
}

/// The check of all accounts, roles and bindings, which are in the order of [`expected::rights`].
pub(super) fn check(live: &[Answer<Option<DynamicObject>>]) -> Vec<Finding> {
    let group = Group::Installation;
    let (mut findings, mut missing, mut unread, mut good) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (wanted, live) in expected::rights().iter().zip(live) {
        match live {
            Err(why) => unread.push(why),
            // Left out where no versions are tried.
            Ok(None) if wanted.name_any() == rbac::ROLLOUTS => {}
            Ok(None) => missing.push(title(wanted)),
            Ok(Some(live)) => match difference(wanted, live) {
                Some(difference) => findings.push(group.failed(CHECK, difference, apply())),
                None => good += 1,
            },
        }
    }
    if !missing.is_empty() {
        findings.push(group.failed(CHECK, format!("there is no {}", listed(&missing)), apply()));
    }
    findings.extend(group.all_unanswered(CHECK, &unread));
    if good > 0 {
        findings.insert(0, group.ok(CHECK, format!("{} as in this version", counted(good, "object"))));
    }
    findings
}

/// How an object differs from what it should be. `None`: it does not.
fn difference(wanted: &DynamicObject, live: &DynamicObject) -> Option<String> {
    let name = title(wanted);
    let missing = missing_rights(&rules(wanted), &rules(live));
    if !missing.is_empty() {
        return Some(format!("{name} lacks the right to {}", listed(&missing)));
    }
    if wanted.data["roleRef"] != live.data["roleRef"] || !has_subjects(wanted, live) {
        return Some(format!("{name} binds another role or account"));
    }
    (wanted.data["aggregationRule"] != live.data["aggregationRule"]).then(|| format!("{name} aggregates other roles"))
}

/// As `KIND NAME in namespace NAMESPACE`.
fn title(object: &DynamicObject) -> String {
    let kind = object.types.as_ref().map_or("", |types| types.kind.as_str());
    let place = object.namespace().map_or_else(String::new, |namespace| format!(" in namespace {namespace}"));
    format!("{kind} {}{place}", object.name_any())
}

fn apply() -> String {
    format!("apply `deploy/` of the managers' version: {}", pages::UPGRADE)
}

/// A rule that cannot be read gives no right.
fn rules(role: &DynamicObject) -> Vec<Rule> {
    let rules = role.data["rules"].as_array().into_iter().flatten();
    rules.filter_map(|rule| Rule::deserialize(rule).ok()).collect()
}

/// The rights of the wanted rules that no live rule gives, each as `VERB RESOURCE [NAME]`.
fn missing_rights(wanted: &[Rule], live: &[Rule]) -> Vec<String> {
    let mut missing = Vec::new();
    for rule in wanted {
        for (group, resource, verb) in each(rule) {
            // A rule without names is about all objects.
            let names: Vec<Option<&str>> = if rule.resource_names.is_empty() {
                vec![None]
            } else {
                rule.resource_names.iter().map(|name| Some(name.as_str())).collect()
            };
            for name in names {
                if !live.iter().any(|live| gives(live, (group, resource, verb), name)) {
                    let name = name.map_or_else(String::new, |name| format!(" {name}"));
                    missing.push(format!("{verb} {}{name}", resource_name(group, resource)));
                }
            }
        }
    }
    missing
}

/// Every group, resource and verb of a rule.
fn each(rule: &Rule) -> impl Iterator<Item = (&str, &str, &str)> {
    rule.api_groups.iter().flat_map(move |group| {
        rule.resources.iter().flat_map(move |resource| {
            rule.verbs.iter().map(move |verb| (group.as_str(), resource.as_str(), verb.as_str()))
        })
    })
}

fn gives(live: &Rule, (group, resource, verb): (&str, &str, &str), name: Option<&str>) -> bool {
    let has = |all: &[String], one: &str| all.iter().any(|it| it == ALL || it == one);
    let of_name =
        live.resource_names.is_empty() || name.is_some_and(|name| live.resource_names.iter().any(|one| one == name));
    has(&live.api_groups, group) && has(&live.resources, resource) && has(&live.verbs, verb) && of_name
}

/// Whether a binding has the subjects that it should have. It may have others besides.
fn has_subjects(wanted: &DynamicObject, live: &DynamicObject) -> bool {
    let subjects = |binding: &DynamicObject| -> Vec<[Value; 3]> {
        let all = binding.data["subjects"].as_array().into_iter().flatten();
        all.map(|one| ["kind", "namespace", "name"].map(|field| one[field].clone())).collect()
    };
    let live = subjects(live);
    subjects(wanted).iter().all(|subject| live.contains(subject))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::super::finding::State;
    use super::*;
    use crate::cluster::answer::Unanswered;

    fn live() -> Vec<Answer<Option<DynamicObject>>> {
        expected::rights().into_iter().map(|one| Ok(Some(one))).collect()
    }

    /// The only finding, after a change of the object of this kind and name.
    fn changed(kind: &str, name: &str, change: impl FnOnce(&mut DynamicObject)) -> Finding {
        let mut all = live();
        let is_it = |one: &&mut DynamicObject| one.types.as_ref().unwrap().kind == kind && one.name_any() == name;
        change(all.iter_mut().filter_map(|one| one.as_mut().unwrap().as_mut()).find(is_it).unwrap());
        let mut findings = check(&all);
        assert_eq!((findings.len(), findings[0].state), (2, State::Ok), "{findings:?}");
        findings.remove(1)
    }

    #[test]
    fn the_rights_of_this_version_are_good() {
        let findings = check(&live());
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0], Group::Installation.ok(CHECK, "21 objects as in this version"));
    }

    #[test]
    fn wider_rights_are_enough() {
        let all = json!({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]});
        let mut wide = live();
        for role in wide.iter_mut().filter_map(|one| one.as_mut().unwrap().as_mut()) {
            if role.data["rules"].is_array() {
                role.data["rules"] = json!([all]);
            }
        }
        assert_eq!(check(&wide).len(), 1);
    }

    #[test]
    fn a_missing_right_is_named() {
        let finding = changed("ClusterRole", "ctrlmesh-manager", |role| {
            role.data["rules"][1]["verbs"] = json!(["list", "watch"]);
        });
        let expected = "ClusterRole ctrlmesh-manager lacks the right to patch pods";
        assert_eq!((finding.state, finding.message.as_str()), (State::Failed, expected));
        let finding = changed("ClusterRole", "ctrlmesh-node", |role| {
            role.data["rules"][0]["resourceNames"] = json!(["other"]);
        });
        assert!(finding.message.ends_with("lacks the right to watch namespaces ctrlmesh-system"), "{finding:?}");
    }

    #[test]
    fn rights_for_rollouts_may_be_left_out() {
        let is_left_out = |one: &DynamicObject| one.name_any() == rbac::ROLLOUTS;
        let all = expected::rights().into_iter().map(|one| Ok((!is_left_out(&one)).then_some(one))).collect::<Vec<_>>();
        assert_eq!(check(&all), [Group::Installation.ok(CHECK, "19 objects as in this version")]);
    }

    #[test]
    fn a_binding_and_an_aggregation_are_compared() {
        let finding = changed("ClusterRoleBinding", "ctrlmesh-node", |binding| {
            binding.data["subjects"][0]["name"] = json!("other");
        });
        assert!(finding.message.ends_with("binds another role or account"), "{finding:?}");
        let finding = changed("ClusterRole", "ctrlmesh-manager-labels", |role| {
            role.data["aggregationRule"] = json!(null);
        });
        assert!(finding.message.ends_with("aggregates other roles"), "{finding:?}");
    }

    #[test]
    fn what_is_missing_fails_and_what_may_not_be_read_is_said_once() {
        let none: Vec<_> = live().into_iter().map(|_| Ok(None)).collect();
        assert!(check(&none).iter().all(|one| one.state == State::Failed));
        let forbidden = Unanswered::Forbidden { right: "get clusterroles".to_owned() };
        let unread: Vec<_> = live().into_iter().map(|_| Err(forbidden.clone())).collect();
        assert_eq!(check(&unread), [Group::Installation.unanswered(CHECK, &forbidden)]);
    }
}
