//! Reads the events of a namespace or of the cluster, and the names that they have to be about.

use std::collections::BTreeSet;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_manager::rules::shard::is_made_by;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use kube::{Api, Client, Resource, ResourceExt as _};

use super::EventsError;
use super::entry::{Entry, config_name};
use crate::cluster::paging;

/// Events, as kubectl names them.
const EVENTS: &str = "events.events.k8s.io";

/// Whose events are shown.
pub(super) struct Scope {
    pub(super) client: Client,
    /// `None`: of all namespaces.
    pub(super) namespace: Option<String>,
    /// Of this ShardingConfig, and of the shards that it made. `None`: of everything of ours.
    pub(super) root: Option<String>,
}

/// The ShardingConfigs of a namespace, by what they have to do with a root.
#[derive(Debug)]
pub(super) struct Family {
    /// Of the root, and of the shards that it made.
    pub(super) names: BTreeSet<String>,
    /// Of all others.
    others: BTreeSet<String>,
    /// Whether the root is there.
    pub(super) is_there: bool,
}

impl Scope {
    pub(super) fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        match &self.namespace {
            Some(namespace) => Api::namespaced(self.client.clone(), namespace),
            None => Api::all(self.client.clone()),
        }
    }

    /// All events, ours and others.
    pub(super) async fn events(&self) -> Result<Vec<Event>, EventsError> {
        paging::list(&self.api(), ListParams::default()).await.map_err(|source| self.unread(source))
    }

    /// `None`: no root is named.
    pub(super) async fn family(&self) -> Result<Option<Family>, EventsError> {
        let Some(root) = &self.root else { return Ok(None) };
        let configs = paging::list(&self.api(), ListParams::default()).await;
        let configs = configs.map_err(|source| self.failed("shardingconfigs", source))?;
        Ok(Some(Family::of(root, &configs)))
    }

    /// Why events were not read.
    pub(super) fn unread(&self, source: kube::Error) -> EventsError {
        self.failed(EVENTS, source)
    }

    /// # Errors
    /// A root is named that is not there, and that no event is about.
    pub(super) fn refuse_unknown(&self, family: Option<&Family>, entries: &[Entry]) -> Result<(), EventsError> {
        match (&self.root, &self.namespace) {
            (Some(name), Some(namespace)) if entries.is_empty() && family.is_some_and(|family| !family.is_there) => {
                Err(EventsError::NoSuchConfig { name: name.clone(), namespace: namespace.clone() })
            }
            _ => Ok(()),
        }
    }

    /// As in `the events of PLACE`.
    pub(super) fn place(&self) -> String {
        let place = self.namespace.as_ref().map(|namespace| format!("namespace {namespace:?}"));
        place.unwrap_or_else(|| "all namespaces".to_owned())
    }

    fn failed(&self, kind: &'static str, source: kube::Error) -> EventsError {
        EventsError::Read { kind, place: self.place(), source }
    }
}

impl Family {
    fn of(root: &str, configs: &[ShardingConfig]) -> Self {
        let roots = || configs.iter().filter(|config| config.name_any() == root);
        let made = roots().flat_map(|root| configs.iter().filter(|config| is_made_by(root, config)));
        let names: BTreeSet<String> = made.map(ShardingConfig::name_any).chain([root.to_owned()]).collect();
        let others = configs.iter().map(ShardingConfig::name_any).filter(|name| !names.contains(name)).collect();
        Self { others, is_there: roots().next().is_some(), names }
    }

    /// Whether it has every ShardingConfig that the events are about. A shard may be newer than the family.
    pub(super) fn has_all(&self, events: &[Event]) -> bool {
        let mut about = events.iter().filter_map(config_name);
        about.all(|name| self.names.contains(name) || self.others.contains(name))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn config(name: &str, labels: Value, spec: Value) -> ShardingConfig {
        serde_json::from_value(json!({"apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
            "metadata": {"namespace": "ops", "name": name, "labels": labels}, "spec": spec}))
        .unwrap()
    }

    fn about(kind: &str, name: &str) -> Event {
        serde_json::from_value(json!({"metadata": {"name": "e"}, "regarding": {"kind": kind, "name": name}})).unwrap()
    }

    #[test]
    fn a_shard_that_is_newer_than_the_family_is_missed() {
        let root = config("web", json!({}), json!({"root": {"prefix": "web", "targetDeployment": "web"}}));
        let made = json!({"ctrlmesh.kusionstack.io/auto-sharding-root": "web"});
        let configs = [root, config("web-1", made, json!({})), config("other", json!({}), json!({}))];
        let family = Family::of("web", &configs);
        assert_eq!((family.names.len(), family.is_there), (2, true));
        assert!(family.has_all(&[about("ShardingConfig", "web-1"), about("ShardingConfig", "other")]));
        assert!(family.has_all(&[about("Pod", "web-2")]), "no ShardingConfig");
        assert!(!family.has_all(&[about("ShardingConfig", "web"), about("ShardingConfig", "web-2")]));
        assert!(!Family::of("nobody", &configs).is_there);
    }
}
