//! Measures how many objects and bytes of each divided kind each replica reads.
//!
//! The API server answers: it is asked for what each replica was seen to watch.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use ctrlmesh_common::selector::Selector;
use serde_json::Value;

use crate::checks::WHOLE_WITHIN;
use crate::environment::Environment;
use crate::history::ListOrWatch;
use crate::work::Kind;

/// Objects by namespace and name, and how many bytes each has.
type Objects = BTreeMap<(String, String), usize>;

/// Some objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Weight {
    objects: usize,
    bytes: usize,
}

/// What there is of a kind, and what of it each replica reads that reads any.
#[derive(Clone, Debug, Default)]
struct Shares {
    what: String,
    all: Weight,
    each: BTreeMap<String, Weight>,
}

/// That of each kind that is divided each replica that works reads less than there is, and all together each object
/// once; gives what each reads.
///
/// # Errors
/// What is not divided.
pub(crate) fn divided(environment: &Environment) -> Result<String> {
    report(environment, Shares::are_divided, "not divided")
}

/// That whoever reads any of these kinds reads all of it.
///
/// # Errors
/// What it does not read.
pub(crate) fn whole(environment: &Environment) -> Result<String> {
    report(environment, Shares::are_whole, "not whole")
}

fn report(environment: &Environment, is: fn(&Shares) -> bool, is_not: &str) -> Result<String> {
    let mut lines = Vec::new();
    for kind in environment.work.kinds() {
        let watched = format!("all that work to watch {}", kind.resource());
        let shares = environment.until(&watched, WHOLE_WITHIN, || watched_by_all(environment, *kind))?;
        let line = shares.report();
        ensure!(is(&shares), "{is_not}: {line}");
        lines.push(line);
    }
    Ok(format!("watched by each: {}", lines.join("; ")))
}

/// What each reads of a kind, once each that works reads it.
fn watched_by_all(environment: &Environment, kind: Kind) -> Result<Option<Shares>> {
    let working = environment.observer.both(|world, _| {
        let working = world.pods.keys().filter(|pod| world.works(pod));
        working.cloned().collect::<BTreeSet<_>>()
    });
    let shares = Shares::of(environment, kind)?;
    let by_all = !working.is_empty() && working.iter().all(|pod| shares.each.contains_key(pod));
    Ok(by_all.then_some(shares))
}

impl Shares {
    fn of(environment: &Environment, kind: Kind) -> Result<Self> {
        let resource = kind.resource();
        let (spaces, watches) = environment.observer.both(|world, history| {
            let spaces = world.work.iter().map(|work| work.namespace.clone());
            let of_pod = |pod: &String| {
                let watching = history.watching(pod, &resource);
                (pod.clone(), watching.cloned().collect::<Vec<ListOrWatch>>())
            };
            let watches = world.pods.keys().map(of_pod);
            (spaces.collect::<BTreeSet<_>>(), watches.collect::<Vec<_>>())
        });
        let list = |path: &str| environment.api.get(path);
        let all = Weight::of(&objects(&list(&kind.list_path())?, &spaces));
        let mut each = BTreeMap::new();
        for (pod, watches) in watches.into_iter().filter(|(_, watches)| !watches.is_empty()) {
            // Some watch a kind several times; an object is the same one each time.
            let mut read = Objects::new();
            for asked in watches {
                read.extend(objects(&list(&path(kind, asked.selector.as_ref()))?, &spaces));
            }
            each.insert(pod, Weight::of(&read));
        }
        Ok(Self { what: resource.to_string(), all, each })
    }

    fn report(&self) -> String {
        let listed = |what: fn(&Weight) -> usize| {
            self.each.values().map(|one| what(one).to_string()).collect::<Vec<_>>().join(" + ")
        };
        format!(
            "{} of {} {}, {} of {} kB",
            listed(|one| one.objects),
            self.all.objects,
            self.what,
            listed(|one| one.bytes / 1000),
            self.all.bytes / 1000
        )
    }

    fn are_divided(&self) -> bool {
        let sum: usize = self.each.values().map(|one| one.objects).sum();
        let less = |one: &Weight| one.objects < self.all.objects && one.bytes < self.all.bytes;
        sum == self.all.objects && self.each.values().all(less)
    }

    fn are_whole(&self) -> bool {
        self.each.values().all(|one| one.objects == self.all.objects)
    }
}

impl Weight {
    fn of(objects: &Objects) -> Self {
        Self { objects: objects.len(), bytes: objects.values().sum() }
    }
}

/// Of a list, what is in these namespaces.
fn objects(list: &Value, spaces: &BTreeSet<String>) -> Objects {
    let items = list["items"].as_array().into_iter().flatten();
    let read = items.filter_map(|item| {
        let text = |field: &str| Some(item["metadata"][field].as_str()?.to_owned());
        Some(((text("namespace")?, text("name")?), item.to_string().len()))
    });
    read.filter(|((space, _), _)| spaces.contains(space)).collect()
}

/// Where what a selector selects is listed; everything, where the selector could not be read.
fn path(kind: Kind, selector: Option<&Selector>) -> String {
    let query = selector.map(ToString::to_string).unwrap_or_default();
    let query: String = form_urlencoded::byte_serialize(query.as_bytes()).collect();
    format!("{}?labelSelector={query}", kind.list_path())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shares(each: &[usize]) -> Shares {
        let weight = |objects| Weight { objects, bytes: objects * 1000 };
        let numbered = each.iter().enumerate();
        let each = numbered.map(|(pod, objects)| (format!("op-{pod}"), weight(*objects))).collect();
        Shares { what: "pages".to_owned(), all: weight(3), each }
    }

    #[test]
    fn incomplete_or_whole_shares_are_not_divided() {
        assert!(shares(&[2, 1]).are_divided() && shares(&[2, 0, 1]).are_divided());
        assert!(!shares(&[3, 0]).are_divided(), "one has everything");
        assert!(!shares(&[2, 2]).are_divided(), "one object twice");
        assert!(!shares(&[1, 1]).are_divided(), "one object missing");
        assert!(shares(&[3, 3]).are_whole() && !shares(&[3, 2]).are_whole());
        assert_eq!(shares(&[2, 1]).report(), "2 + 1 of 3 pages, 2 + 1 of 3 kB");
    }

    #[test]
    fn only_what_is_in_a_namespace_of_work_counts() {
        let item = |space: &str, name: &str| json!({"metadata": {"namespace": space, "name": name}});
        let list = json!({"items": [item("a", "x"), item("kube-system", "x"), item("a", "y")]});
        let weight = Weight::of(&objects(&list, &BTreeSet::from(["a".to_owned()])));
        assert_eq!(weight.objects, 2);
        assert_eq!(weight.bytes, 2 * item("a", "x").to_string().len());
    }
}
