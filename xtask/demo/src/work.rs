//! The objects that an operator gets, and the objects that it has to make from them.
//!
//! What it has made is compared as a whole: what one replica alone made of some objects, three must make of them, too.

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use crate::api::Api;
use crate::audit::Resource;
use crate::operator::Operator;

/// Some work, and the operator that does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Of the example operator: pages of websites.
    Websites,
    /// Of prometheus-operator: what servers of Prometheus are made of, without the servers.
    Prometheuses,
}

/// A kind of objects that is divided among the shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// The version.
    pub version: &'static str,
    /// The kind, as manifests have it.
    pub kind: &'static str,
    /// The plural, as paths have it.
    pub plural: &'static str,
}

/// What an operator has made, by path.
pub type OperatorObjects = BTreeMap<String, Value>;

/// What the path of what an operator says ends in.
const STATUS: &str = "/status";

/// How many objects there are of what an operator has made, and of how many it says something.
pub fn count(made: &OperatorObjects) -> (usize, usize) {
    let statuses = made.keys().filter(|path| path.ends_with(STATUS)).count();
    (made.len() - statuses, statuses)
}

/// How many websites a namespace has.
const SITES: usize = 2;

const fn kind(group: &'static str, version: &'static str, kind: &'static str, plural: &'static str) -> Kind {
    Kind { group, version, kind, plural }
}

const WEBSITES: [Kind; 2] =
    [kind("web.example.com", "v1alpha1", "Website", "websites"), kind("", "v1", "ConfigMap", "configmaps")];

const PROMETHEUSES: [Kind; 6] = [
    kind("monitoring.coreos.com", "v1", "Prometheus", "prometheuses"),
    kind("monitoring.coreos.com", "v1", "ServiceMonitor", "servicemonitors"),
    kind("monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules"),
    kind("apps", "v1", "StatefulSet", "statefulsets"),
    kind("", "v1", "ConfigMap", "configmaps"),
    kind("", "v1", "Secret", "secrets"),
];

impl Kind {
    /// The path of an object in a namespace.
    pub fn path(self, namespace: &str, name: &str) -> String {
        format!("{}/namespaces/{namespace}/{}/{name}", self.version_path(), self.plural)
    }

    /// The path of all objects in all namespaces.
    pub fn list_path(self) -> String {
        format!("{}/{}", self.version_path(), self.plural)
    }

    fn version_path(self) -> String {
        if self.group.is_empty() {
            format!("/api/{}", self.version)
        } else {
            format!("/apis/{}/{}", self.group, self.version)
        }
    }

    /// As manifests have it.
    pub fn api_version(self) -> String {
        if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) }
    }

    /// As the audit log has it.
    pub fn resource(self) -> Resource {
        Resource::new(self.group, self.plural)
    }
}

impl Work {
    /// Who does it.
    pub fn operator(self) -> Operator {
        match self {
            Self::Websites => Operator::example(),
            Self::Prometheuses => Operator::prometheus(),
        }
    }

    /// What is divided among the shards; the first is what is asked for, the rest is made of it, or looked at for it.
    pub fn kinds(self) -> &'static [Kind] {
        match self {
            Self::Websites => &WEBSITES,
            Self::Prometheuses => &PROMETHEUSES,
        }
    }

    /// What is asked for, of which the table counts the objects.
    pub fn main(self) -> Kind {
        self.kinds()[0]
    }

    /// The same for a ShardingConfig's `resourceSelector`.
    pub fn resource_selector(self) -> Value {
        let one = |kind: &Kind| json!({"apiGroups": [kind.group], "resources": [kind.plural]});
        json!([{"relateResources": self.kinds().iter().map(one).collect::<Vec<_>>()}])
    }

    /// How many objects of the main kind there are in a namespace.
    pub fn each(self) -> usize {
        match self {
            Self::Websites => SITES,
            Self::Prometheuses => 1,
        }
    }

    /// The objects of a namespace: what is asked for.
    pub fn objects(self) -> Vec<(Kind, Value)> {
        let object = |kind: Kind, name: &str, spec: Value| {
            let object = json!({"apiVersion": kind.api_version(), "kind": kind.kind,
                "metadata": {"name": name, "labels": {"app": name}}, "spec": spec});
            (kind, object)
        };
        match self {
            Self::Websites => (0..SITES)
                .map(|number| object(self.main(), &format!("site-{number}"), json!({"title": "0", "pages": 2})))
                .collect(),
            Self::Prometheuses => {
                let here = json!({"matchLabels": {"app": "main"}});
                let server = json!({"replicas": 0, "scrapeInterval": "30s", "serviceMonitorSelector": here, "ruleSelector": here});
                let monitor = json!({"selector": here, "endpoints": [{"port": "web"}]});
                let rules = json!({"groups": [{"name": "main", "rules": [{"record": "one", "expr": "vector(1)"}]}]});
                vec![
                    object(PROMETHEUSES[1], "main", monitor),
                    object(PROMETHEUSES[2], "main", rules),
                    object(PROMETHEUSES[0], "main", server),
                ]
            }
        }
    }

    /// The change of this number to an object of the main kind, for which the operator has something to do. 0 is what
    /// the object was made with.
    pub fn change(self, number: u64) -> Value {
        match self {
            Self::Websites => json!({"spec": {"title": number.to_string()}}),
            Self::Prometheuses => json!({"spec": {"scrapeInterval": format!("{}s", 30 + number)}}),
        }
    }

    /// What is there of all that the operator makes, and what it says of what was asked for, as far as it is the
    /// operator's to decide.
    ///
    /// # Errors
    /// Where the API server does not answer.
    pub fn made(self, api: &Api, is_work: impl Fn(&str) -> bool) -> Result<OperatorObjects> {
        let kinds: &[Kind] = match self {
            Self::Websites => &WEBSITES[1..],
            Self::Prometheuses => {
                &[PROMETHEUSES[3], PROMETHEUSES[4], PROMETHEUSES[5], kind("", "v1", "Service", "services")]
            }
        };
        let mut made = OperatorObjects::new();
        for kind in kinds {
            let list = api.get(&kind.list_path())?;
            let ours = read(*kind, &list).filter(|(namespace, ..)| is_work(namespace));
            made.extend(ours.map(|(namespace, name, one)| (kind.path(&namespace, &name), one)));
        }
        let (asked, list) = (self.main(), api.get(&self.main().list_path())?);
        let ours = said(&list).filter(|(namespace, ..)| is_work(namespace));
        made.extend(
            ours.map(|(namespace, name, status)| (format!("{}{STATUS}", asked.path(&namespace, &name)), status)),
        );
        Ok(made)
    }
}

/// What an operator made: objects with an owner; of each the namespace, the name, and what is in it.
fn read(kind: Kind, list: &Value) -> impl Iterator<Item = (String, String, Value)> {
    let owned = |object: &&Value| object["metadata"].get("ownerReferences").is_some();
    items(list).filter(owned).map(move |object| {
        let meta = &object["metadata"];
        let owners = meta["ownerReferences"].as_array().into_iter().flatten();
        let owners: Vec<_> = owners.map(|one| json!([one["kind"], one["name"]])).collect();
        let content = match kind.plural {
            "configmaps" | "secrets" => object["data"].clone(),
            // Of a Service, what the API server does not choose itself.
            "services" => json!([object["spec"]["ports"], object["spec"]["selector"]]),
            _ => object["spec"].clone(),
        };
        (
            text(&meta["namespace"]),
            text(&meta["name"]),
            json!({"owners": owners, "labels": meta["labels"], "content": content}),
        )
    })
}

/// What an operator says of each object that it was asked for, where it says anything: the namespace, the name, and the
/// status.
fn said(list: &Value) -> impl Iterator<Item = (String, String, Value)> {
    items(list).filter(|object| object["status"].is_object()).map(|object| {
        let meta = &object["metadata"];
        let mut status = object["status"].clone();
        lasting(&mut status, &meta["generation"]);
        (text(&meta["namespace"]), text(&meta["name"]), status)
    })
}

/// Without what differs each time: when something was, and how often the object was changed before.
fn lasting(status: &mut Value, generation: &Value) {
    match status {
        Value::Object(fields) => {
            fields.retain(|key, _| !key.ends_with("Time"));
            for (key, value) in fields {
                match key.as_str() {
                    "observedGeneration" => *value = json!(value == generation),
                    _ => lasting(value, generation),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| lasting(value, generation)),
        _ => {}
    }
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list["items"].as_array().into_iter().flatten()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// The first difference between what is there and what there should be.
pub fn difference(made: &OperatorObjects, wanted: &OperatorObjects) -> Option<String> {
    let missing = wanted.iter().find_map(|(path, content)| match made.get(path) {
        None => Some(format!("{path} is missing")),
        Some(found) if found != content => Some(format!("{path} is {found}, not {content}")),
        Some(_) => None,
    });
    missing.or_else(|| {
        let extra = made.keys().find(|path| !wanted.contains_key(*path));
        extra.map(|path| format!("{path} should not be there"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str) -> Value {
        json!({"metadata": {"namespace": "a", "name": "p", "uid": text, "ownerReferences": [{"kind": "Website", "name": "s", "uid": text}]},
            "data": {"index.html": "T"}})
    }

    #[test]
    fn only_owned_objects_are_compared_and_equal_ones_match() {
        let made = |text: &str| -> Vec<_> {
            let stray = json!({"metadata": {"namespace": "a", "name": "kube-root-ca.crt"}, "data": {"ca.crt": text}});
            read(WEBSITES[1], &json!({"items": [page(text), stray]})).collect()
        };
        assert_eq!(made("x"), made("y"));
        assert_eq!(made("x").len(), 1);
    }

    #[test]
    fn a_status_is_compared_but_for_what_differs_each_time() {
        let of = |generation: u64, observed: u64, at: &str, pages: u64| {
            let condition = json!({"type": "Published", "status": "True", "lastTransitionTime": at, "observedGeneration": observed});
            let status = json!({"pages": pages, "observedGeneration": observed, "conditions": [condition]});
            let meta = json!({"namespace": "a", "name": "s", "generation": generation});
            said(&json!({"items": [{"metadata": meta, "status": status}]})).collect::<Vec<_>>()
        };
        assert_eq!(of(1, 1, "then", 2), of(9, 9, "now", 2));
        assert_ne!(of(1, 1, "then", 2), of(1, 1, "then", 3));
        assert_ne!(of(9, 9, "now", 2), of(9, 8, "now", 2), "it is about what was asked before");
    }

    #[test]
    fn statuses_are_counted_apart_from_objects_and_only_if_set() {
        let named = |name: &str| json!({"namespace": "a", "name": name});
        let list = json!({"items": [{"metadata": named("s"), "status": {"pages": 2}}, {"metadata": named("t")}]});
        let said =
            said(&list).map(|(space, name, status)| (format!("{}{STATUS}", WEBSITES[0].path(&space, &name)), status));
        let made = json!({"items": [page("x")]});
        let pages = read(WEBSITES[1], &made);
        let pages = pages.map(|(space, name, page)| (WEBSITES[1].path(&space, &name), page));
        assert_eq!(count(&pages.chain(said).collect()), (1, 1));
    }

    #[test]
    fn what_is_missing_differs_or_is_too_much_is_named() {
        let one = OperatorObjects::from([("/a".to_owned(), json!(1))]);
        assert_eq!(difference(&one, &one), None);
        assert_eq!(difference(&OperatorObjects::new(), &one).as_deref(), Some("/a is missing"));
        assert_eq!(difference(&one, &OperatorObjects::new()).as_deref(), Some("/a should not be there"));
        let other = OperatorObjects::from([("/a".to_owned(), json!(2))]);
        assert_eq!(difference(&one, &other).as_deref(), Some("/a is 1, not 2"));
    }
}
