//! Decides whether a pod loses objects when its policy changes.

use std::collections::BTreeSet;

use ctrlmesh_common::policy::{Members, Mode, Policy};
use ctrlmesh_common::resource::WILDCARD;
use ctrlmesh_common::selector::Selector;
use ctrlmesh_common::slots::Slot;
use ctrlmesh_request::rewrite::watch::difference;

/// Stands for every group or resource that no limit names.
const OTHER: &str = "";

/// Whether an object may be seen under `before` and not under `after`. Where that cannot be told, it may.
pub fn loses(before: &Policy, after: &Policy) -> bool {
    if before.means_the_same(after) {
        return false;
    }
    if loses_members(before.members(), after.members()) {
        return true;
    }
    let groups = names(before, after, |one| &one.api_groups);
    let resources = names(before, after, |one| &one.resources);
    let selector = |policy: &Policy, group: &str, resource: &str| {
        policy.selector_for(group, resource).unwrap_or_else(Selector::everything)
    };
    groups.iter().any(|group| {
        resources.iter().any(|resource| {
            let (old, new) = (selector(before, group, resource), selector(after, group, resource));
            old != new && difference(&old, &new).is_none_or(|difference| !difference.leaves.is_empty())
        })
    })
}

/// Whether objects of a member may be seen under `before` and not under `after`.
pub(super) fn loses_members(before: Option<&Members>, after: Option<&Members>) -> bool {
    let Some(after) = after.filter(|members| members.sees.is_some()) else { return false };
    let Some(before) = before.filter(|before| before.paths == after.paths && before.hash == after.hash) else {
        return true;
    };
    let is_seen = |slot: &Slot| after.sees.as_ref().is_none_or(|slots| slots.contains(slot));
    before.sees.as_ref().is_none_or(|slots| !slots.iter().all(is_seen))
}

/// What the limits of both name, and one that none of them names.
fn names<'a>(
    before: &'a Policy,
    after: &'a Policy,
    of: impl Fn(&'a ctrlmesh_common::resource::ResourceMatch) -> &'a Vec<String>,
) -> BTreeSet<&'a str> {
    let policies = [before, after].into_iter().filter(|policy| policy.mode == Mode::Enforce);
    let limits = policies.flat_map(|policy| &policy.limits);
    let named = limits.flat_map(|limit| &limit.relate_resources).flat_map(of).map(String::as_str);
    named.filter(|name| *name != WILDCARD).chain([OTHER]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(limits: &[(&str, &str)]) -> Policy {
        let limits = limits.iter().map(|(resources, selector)| {
            let resources: serde_json::Value = serde_json::from_str(resources).unwrap();
            serde_json::json!({"relateResources": resources, "selector": selector})
        });
        serde_json::from_value(serde_json::json!({"limits": limits.collect::<Vec<_>>()})).unwrap()
    }

    const PODS: &str = r#"[{"apiGroups": [""], "resources": ["pods"]}]"#;
    const APPS: &str = r#"[{"apiGroups": ["apps"], "resources": ["*"]}]"#;

    #[test]
    fn what_only_grows_loses_nothing() {
        let two = policy(&[(PODS, "h in (1,2)"), (APPS, "h in (1,2)")]);
        let three = policy(&[(PODS, "h in (1,2,3)"), (APPS, "h in (1,2,3)")]);
        assert!(!loses(&two, &three) && !loses(&two, &two.clone()));
        assert!(loses(&three, &two));
        let moved = policy(&[(PODS, "h in (1,2)"), (APPS, "h in (2,3)")]);
        assert!(loses(&two, &moved));
        assert!(!loses(&Policy::nothing(), &two), "there was nothing to lose");
        assert!(loses(&two, &Policy::nothing()));
    }

    #[test]
    fn a_member_that_moves_away_is_lost() {
        let members = |sees: serde_json::Value| -> Policy {
            let members = serde_json::json!({"paths": ["/clusters/{cluster}"], "sees": sees});
            serde_json::from_value(serde_json::json!({ "members": members })).unwrap()
        };
        let numbers = |slots: &[i64]| serde_json::json!(slots.iter().map(ToString::to_string).collect::<Vec<_>>());
        let (one, two, all) = (members(numbers(&[1])), members(numbers(&[1, 2])), members(serde_json::Value::Null));
        assert!(loses(&two, &one) && loses(&all, &two) && loses(&Policy::default(), &one));
        assert!(!loses(&one, &two) && !loses(&two, &all) && !loses(&one, &Policy::default()));
    }

    #[test]
    fn a_limit_that_comes_takes_and_one_that_goes_gives() {
        let pods = policy(&[(PODS, "h in (1)")]);
        let both = policy(&[(PODS, "h in (1)"), (APPS, "h in (1)")]);
        assert!(loses(&pods, &both) && !loses(&both, &pods));
        let all = policy(&[("[]", "h in (1)")]);
        assert!(loses(&pods, &all) && !loses(&all, &pods));
        let passes = Policy { mode: Mode::Pass, ..pods.clone() };
        assert!(loses(&passes, &pods) && !loses(&pods, &passes));
    }
}
