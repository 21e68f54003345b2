//! Reads ShardingConfigs, CircuitBreakers, FaultInjections, pods, namespaces and `StatefulSets` from manifests.
//!
//! Takes several documents, and lists as `kubectl get` prints them. Other kinds are passed over.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{self, ReadError, ShardingConfig};
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::rules::breaker::Breaker;
use crate::rules::injection::Injection;
use crate::rules::pod::{self, Member};
use crate::rules::shared::Shared;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifests {
    pub configs: Vec<Shared<ShardingConfig>>,
    pub breakers: Vec<Breaker>,
    pub injections: Vec<Injection>,
    pub pods: Vec<Pod>,
    /// Namespaces that are listed or have something in them.
    pub namespaces: BTreeSet<String>,
    /// By `NAMESPACE/NAME` of the StatefulSet.
    pub first_ordinals: BTreeMap<String, u32>,
}

#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("read the ShardingConfigs")]
    ShardingConfig(#[from] ReadError),
    #[error("document {document}")]
    Document {
        /// Counted from 1.
        document: usize,
        source: Box<serde_saphyr::Error>,
    },
    /// The API server would read the document otherwise.
    #[error("document {document}: as the API server reads it")]
    Typed { document: usize, source: serde_json::Error },
    #[error("document {document}: items[{item}]")]
    Item { document: usize, item: usize, source: serde_json::Error },
}

#[derive(Deserialize)]
struct Kind {
    kind: Option<String>,
}

#[derive(Deserialize)]
struct List {
    items: Vec<Value>,
}

impl Manifests {
    /// Adds the objects in `text`.
    ///
    /// # Errors
    /// The first document that cannot be read.
    pub fn read(&mut self, text: &str) -> Result<(), ManifestError> {
        for config in api::read_sharding_configs(text)? {
            self.add_config(config);
        }
        for (at, document) in api::documents(text).enumerate() {
            let number = at + 1;
            match parsed::<Option<Kind>>(number, &document)?.and_then(|kind| kind.kind).as_deref() {
                Some("ShardingConfig") => typed::<ShardingConfig>(number, &document).map(drop)?,
                Some("CircuitBreaker") => self.breakers.push(Breaker::from(&typed(number, &document)?)),
                Some("FaultInjection") => self.injections.push(Injection::from(&typed(number, &document)?)),
                Some("Pod") => self.add_pod(typed(number, &document)?),
                Some("Namespace") => self.add_namespace(typed(number, &document)?),
                Some("StatefulSet") => self.add_stateful_set(&typed(number, &document)?),
                Some(kind) if kind.ends_with("List") => {
                    let list: List = parsed(number, &document)?;
                    for (item, value) in list.items.into_iter().enumerate() {
                        let failed = |source| ManifestError::Item { document: number, item, source };
                        self.add_item(kind, value).map_err(failed)?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Pods that do not ask for a proxy, by namespace, for every namespace.
    pub fn unenrolled(&self) -> BTreeMap<String, Vec<Shared<Member>>> {
        let mut unenrolled: BTreeMap<String, Vec<Shared<Member>>> =
            self.namespaces.iter().map(|namespace| (namespace.clone(), Vec::new())).collect();
        for member in self.pods.iter().map(Member::from).filter(|member| !member.wants_proxy()) {
            unenrolled.entry(member.name.namespace.clone()).or_default().push(member.into());
        }
        unenrolled
    }

    /// Items of a typed list, such as `PodList`, may have no kind. ShardingConfigs were read before.
    fn add_item(&mut self, list: &str, item: Value) -> Result<(), serde_json::Error> {
        let kind = item.get("kind").and_then(Value::as_str);
        let kind = kind.or(list.strip_suffix("List")).unwrap_or_default().to_owned();
        match kind.as_str() {
            "CircuitBreaker" => self.breakers.push(Breaker::from(&serde_json::from_value(item)?)),
            "FaultInjection" => self.injections.push(Injection::from(&serde_json::from_value(item)?)),
            "Pod" => self.add_pod(serde_json::from_value(item)?),
            "Namespace" => self.add_namespace(serde_json::from_value(item)?),
            "StatefulSet" => self.add_stateful_set(&serde_json::from_value(item)?),
            _ => {}
        }
        Ok(())
    }

    fn add_config(&mut self, config: ShardingConfig) {
        self.namespaces.extend(config.metadata.namespace.clone());
        self.configs.push(config.into());
    }

    fn add_pod(&mut self, pod: Pod) {
        self.namespaces.extend(pod.metadata.namespace.clone());
        self.pods.push(pod);
    }

    fn add_stateful_set(&mut self, set: &StatefulSet) {
        let (name, first) = pod::first_ordinal(set);
        self.namespaces.extend(set.metadata.namespace.clone());
        self.first_ordinals.insert(name, first);
    }

    fn add_namespace(&mut self, namespace: Namespace) {
        self.namespaces.extend(namespace.metadata.name);
    }
}

fn parsed<T: DeserializeOwned>(document: usize, text: &str) -> Result<T, ManifestError> {
    serde_saphyr::from_str(text).map_err(|source| ManifestError::Document { document, source: Box::new(source) })
}

/// Refuses what the API server would read otherwise: in its YAML `y` is no string.
fn typed<T: DeserializeOwned>(document: usize, text: &str) -> Result<T, ManifestError> {
    let read = parsed(document, text)?;
    let value: Value = parsed(document, text)?;
    serde_json::from_value::<T>(value).map(|_| read).map_err(|source| ManifestError::Typed { document, source })
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: p, namespace: a}\n";

    #[test]
    fn documents_and_lists_say_the_same() {
        let config = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: c, namespace: b}\nspec: {}\n";
        let mut documents = Manifests::default();
        let namespace = "kind: Namespace\napiVersion: v1\nmetadata: {name: d}\n";
        let other = "kind: Secret\napiVersion: v1\nmetadata: {name: s}\n";
        documents.read(&[POD, config, namespace, other].join("---\n")).unwrap();
        assert_eq!((documents.pods.len(), documents.configs.len()), (1, 1));
        assert_eq!(documents.namespaces.iter().collect::<Vec<_>>(), ["a", "b", "d"]);
        let item = |text: &str| format!("- {}", text.trim_end().replace('\n', "\n  "));
        let items = [POD, config, namespace, other].map(item).join("\n");
        let mut list = Manifests::default();
        list.read(&format!("apiVersion: v1\nkind: List\nitems:\n{items}\n")).unwrap();
        assert_eq!(list, documents);
        let misspelled = items.replace("spec: {}", "spec: {limts: []}");
        let error =
            Manifests::default().read(&format!("apiVersion: v1\nkind: List\nitems:\n{misspelled}\n")).unwrap_err();
        let field = error.source().unwrap().to_string();
        assert_eq!(error.to_string(), "read the ShardingConfigs");
        assert!(field.starts_with("document 1: items[1].spec.limts: no such field"), "{field}");
        let mut typed = Manifests::default();
        typed.read("apiVersion: v1\nkind: PodList\nitems:\n- metadata: {name: p, namespace: a}\n").unwrap();
        assert_eq!(typed.pods, documents.pods);
    }

    #[test]
    fn values_that_the_api_server_reads_otherwise_are_refused() {
        for (kind, version) in [("Pod", "v1"), ("ShardingConfig", "ctrlmesh.kusionstack.io/v1alpha1")] {
            let of = |value: &str| {
                format!(
                    "apiVersion: {version}\nkind: {kind}\nmetadata: {{name: p, namespace: a, labels: {{app: {value}}}}}\nspec: {{containers: []}}\n"
                )
            };
            let of = |value: &str| {
                of(value).replace(
                    "spec: {containers: []}",
                    if kind == "Pod" { "spec: {containers: []}" } else { "spec: {}" },
                )
            };
            let error = Manifests::default().read(&of("y")).unwrap_err();
            assert_eq!(error.to_string(), "document 1: as the API server reads it", "{kind}");
            Manifests::default().read(&of("'y'")).unwrap();
        }
    }

    #[test]
    fn an_unreadable_document_is_named_with_its_line() {
        let wrong = POD.replace("{name: p, namespace: a}", "5");
        let error = Manifests::default().read(&format!("{POD}---\n{wrong}")).unwrap_err();
        assert_eq!(error.to_string(), "document 2");
        assert!(error.source().unwrap().to_string().contains('7'), "{:?}", error.source());
        let list = "apiVersion: v1\nkind: PodList\nitems:\n- metadata: 5\n";
        assert_eq!(Manifests::default().read(list).unwrap_err().to_string(), "document 1: items[0]");
    }
}
