//! Keeps track of what is to be labelled: the listed kinds, and those that roots name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::Client;

use crate::cluster::cache::Cache;
use crate::cluster::served_resources::ServedResources;
use crate::labels::named::{self, NamedResources, named_resources};
use crate::labels::progress::{Named, NamedRoot, Progress};
use crate::labels::rights::{Rights, kind_name};
use crate::labels::selected::SelectedLabels;
use crate::labels::{Kind, Kinds, KindsError, Served, served};
use crate::rules::label_coverage::KindName;

#[derive(Default)]
pub(super) struct WantedKinds {
    /// Of the list, as it was read last.
    listed: Kinds,
    roots: BTreeMap<String, NamedResources>,
    /// What ShardingConfigs select by, beside the labels of the manager.
    selected: BTreeMap<String, Vec<SelectedLabels>>,
    served: Arc<ServedResources>,
    rights: Rights,
    /// Kinds that the manager may label.
    pub(super) granted: Kinds,
}

impl WantedKinds {
    /// Finds out what is to be labelled now. Returns what was found of the list, and what is to be published of roots
    /// once the followers run.
    pub(super) async fn look(
        &mut self,
        client: &Client,
        namespace: &str,
        cache: &Cache,
        progress: &Progress,
    ) -> (Result<Served, KindsError>, Named) {
        let found = served(client, namespace, &self.listed).await;
        if let Ok(found) = &found {
            self.listed.clone_from(&found.kinds);
        }
        (self.roots, self.served) = cache.roots(named_resources);
        self.selected = cache.in_configs(SelectedLabels::of);
        let mut all = self.listed.clone();
        let of_roots = named::add(&mut all, &self.roots, &self.served);
        self.rights.ask(client, &all, &progress.failing()).await;
        let only = all.keys().filter(|kind| !self.listed.contains_key(*kind)).cloned().collect();
        let missing = self.rights.missing().clone();
        all.retain(|kind, _| !missing.contains_key(kind));
        self.granted = all;
        let root = |(name, kinds): (String, _)| {
            let resources = self.roots.get(&name).cloned().unwrap_or_default();
            (name, NamedRoot { resources, kinds })
        };
        // While it is not known what is served, nothing is known of any root.
        let roots = if self.served.is_empty() { BTreeMap::new() } else { of_roots.into_iter().map(root).collect() };
        (found, Named { roots, only, missing })
    }

    /// Whether a right is missing.
    pub(super) fn lacks_rights(&self) -> bool {
        !self.rights.missing().is_empty()
    }

    /// All listed kinds, if some of them may not be labelled.
    pub(super) fn listed_without_rights(&self) -> Vec<KindName> {
        let is_missing = self.listed.keys().any(|kind| self.rights.missing().contains_key(kind));
        let mut all: Vec<KindName> = self.listed.values().map(|kind| kind_name(&kind.resource)).collect();
        all.sort();
        all.dedup();
        if is_missing { all } else { Vec::new() }
    }

    /// The labels of the kind's objects that a ShardingConfig selects by, beside those of the manager.
    pub(super) fn label_keys(&self, kind: &Kind) -> BTreeSet<String> {
        let (group, plural) = (&kind.resource.group, &kind.resource.plural);
        let covering = self.selected.values().flatten().filter(|one| one.covers(group, plural));
        covering.flat_map(|one| one.keys.iter().cloned()).collect()
    }

    /// Completes when roots name something else, something else is selected by, or something else is served.
    pub(super) async fn changed(&self, cache: &Cache) {
        let mut changes = cache.changes();
        loop {
            let (roots, served) = cache.roots(named_resources);
            let selected = cache.in_configs(SelectedLabels::of);
            let is_other = roots != self.roots || served != self.served || selected != self.selected;
            if is_other || changes.changed().await.is_err() {
                return;
            }
        }
    }
}
