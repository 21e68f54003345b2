//! How much of each kind that is divided does each replica watch, and so keep: how many objects, how many bytes?
//!
//! Reckoning is pure: the objects that the API server has, and what each replica was seen to ask it for.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use ctrlmesh_common::selector::Labels;
use serde_json::Value;

use crate::audit::Resource;
use crate::ledger::Ledger;
use crate::scene::Scene;

/// An object, as far as it matters here.
#[derive(Clone, Debug)]
struct Weighed {
    namespace: String,
    labels: Labels,
    bytes: usize,
}

/// Some objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Weight {
    objects: usize,
    bytes: usize,
}

// === impl Weighed ===

impl Weighed {
    fn of(object: &Value) -> Self {
        let meta = &object["metadata"];
        let labels = meta["labels"].as_object().into_iter().flatten();
        Self {
            namespace: meta["namespace"].as_str().unwrap_or_default().to_owned(),
            labels: labels
                .map(|(key, value)| (key.clone(), value.as_str().unwrap_or_default().to_owned()))
                .collect(),
            bytes: object.to_string().len(),
        }
    }
}

/// That of each kind that is divided, and that the operator watches, each replica watches less than there is, and all
/// together each object once; gives what each has.
///
/// # Errors
/// What is not divided.
pub(crate) fn divided(scene: &Scene) -> Result<Vec<String>> {
    let mut told = Vec::new();
    for kind in scene.work.kinds() {
        let list = scene.api.get(&kind.list_path())?;
        let (resource, is_main) = (kind.resource(), *kind == scene.work.main());
        let line = scene.observer.both(|world, ledger| {
            let spaces: BTreeSet<&str> =
                world.work.iter().map(|work| work.namespace.as_str()).collect();
            let all = list["items"].as_array().into_iter().flatten().map(Weighed::of);
            let all: Vec<_> = all.filter(|one| spaces.contains(one.namespace.as_str())).collect();
            let pods: Vec<&str> = world.pods.keys().map(String::as_str).collect();
            let shares = weigh(&all, &resource, &pods, ledger);
            ensure!(!is_main || !shares.is_empty(), "nobody watches {resource}");
            let is_there = !shares.is_empty() && !all.is_empty();
            is_there.then(|| told_of(&resource, &shares, total(&all))).transpose()
        })?;
        told.extend(line);
    }
    Ok(told)
}

/// What each of the pods watches of `all`; those that watch nothing of the kind are left out.
fn weigh<'a>(
    all: &[Weighed],
    resource: &Resource,
    pods: &[&'a str],
    ledger: &Ledger,
) -> BTreeMap<&'a str, Weight> {
    let watching = pods.iter().filter_map(|pod| {
        let activity = ledger.pods().get(*pod)?;
        activity.watching(resource).next()?;
        let seen = all.iter().filter(|one| activity.sees(resource, &one.namespace, &one.labels));
        Some((*pod, total(seen)))
    });
    watching.collect()
}

fn total<'a>(objects: impl IntoIterator<Item = &'a Weighed>) -> Weight {
    objects.into_iter().fold(Weight::default(), |sum, one| Weight {
        objects: sum.objects + 1,
        bytes: sum.bytes + one.bytes,
    })
}

fn told_of(resource: &Resource, shares: &BTreeMap<&str, Weight>, all: Weight) -> Result<String> {
    let listed = |what: fn(&Weight) -> usize| {
        shares.values().map(|one| what(one).to_string()).collect::<Vec<_>>().join(" + ")
    };
    let told = format!(
        "{resource}: {} of {} objects watched, {} of {} kB",
        listed(|one| one.objects),
        all.objects,
        listed(|one| one.bytes / 1000),
        all.bytes / 1000
    );
    let sum: usize = shares.values().map(|one| one.objects).sum();
    let less = |one: &Weight| one.objects < all.objects && one.bytes < all.bytes;
    ensure!(sum == all.objects && shares.values().all(less), "not divided: {told}");
    Ok(told)
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::selector::Selector;
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use crate::audit::{Event, Request};

    fn pages() -> Resource {
        Resource::new("", "configmaps")
    }

    /// Who watches which pages.
    fn ledger(watches: &[(&str, &str)]) -> Ledger {
        let mut ledger = Ledger::of("ops", "op");
        for (pod, selector) in watches {
            let selector = Selector::parse(selector).ok();
            ledger.add(Event {
                id: (*pod).to_owned(),
                ended: false,
                at: Timestamp::from_second(1).unwrap(),
                user: "system:serviceaccount:ops:op".to_owned(),
                pod: Some((*pod).to_owned()),
                agent: "op".to_owned(),
                source: "10.0.0.1".to_owned(),
                request: Request::Read {
                    resource: pages(),
                    namespace: String::new(),
                    selector,
                    watch: true,
                },
                verb: "watch".to_owned(),
                code: 200,
            });
        }
        ledger
    }

    fn divided_by(watches: &[(&str, &str)]) -> Result<String> {
        let page = |slot: &str| {
            Weighed::of(&json!({"metadata": {"namespace": "a", "labels": {"slot": slot}}}))
        };
        let all = ["0", "1", "2"].map(page);
        let ledger = ledger(watches);
        told_of(&pages(), &weigh(&all, &pages(), &["x", "y", "z"], &ledger), total(&all))
    }

    #[test]
    fn shares_that_are_disjoint_and_whole_are_told_and_others_are_not() {
        let told = divided_by(&[("x", "slot in (0,1)"), ("y", "slot=2")]).unwrap();
        assert!(told.starts_with("configmaps: 2 + 1 of 3 objects watched"), "{told}");
        let whole = divided_by(&[("x", ""), ("y", "slot=9")]);
        assert!(whole.is_err(), "one has everything");
        assert!(
            divided_by(&[("x", "slot in (0,1)"), ("y", "slot in (1,2)")]).is_err(),
            "one twice"
        );
        assert!(divided_by(&[("x", "slot=0"), ("y", "slot=1")]).is_err(), "one missing");
    }
}
