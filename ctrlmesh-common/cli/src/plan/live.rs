//! Reads what plans start from: ShardingConfigs, namespaces, and the labels by which objects are shared out.

use std::collections::BTreeSet;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_manager::rules::shard::Labelling;
use ctrlmesh_manager::rules::validate;
use kube::api::{ApiResource, DynamicObject, ListParams, ObjectMeta};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt as _};

use super::PlanError;
use super::change::{Change, Selected, is_same};
use super::objects::{self, Counted};
use crate::cluster;
use crate::cluster::labelling::labelling;
use crate::cluster::paging;

/// A cluster as it is.
#[derive(Debug)]
pub(crate) struct Live {
    /// Without those that are being deleted: admission takes no notice of them.
    pub(crate) configs: Vec<ShardingConfig>,
    /// By name.
    pub(crate) namespaces: BTreeSet<String>,
    pub(crate) labelling: Labelling,
}

impl Live {
    /// # Errors
    /// The API server does not say it.
    pub(crate) async fn read(client: &Client) -> Result<Self, PlanError> {
        let failed = |kind| move |source| PlanError::Read { kind, source };
        let configs: Api<ShardingConfig> = Api::all(client.clone());
        let mut configs = paging::list(&configs, ListParams::default()).await.map_err(failed("shardingconfigs"))?;
        configs.retain(|one| one.metadata.deletion_timestamp.is_none());
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Namespace"));
        let namespaces: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
        let mut names = BTreeSet::new();
        let add = |object: &ObjectMeta| names.extend(object.name.clone());
        paging::each_metadata(&namespaces, ListParams::default(), add).await.map_err(failed("namespaces"))?;
        Ok(Self { configs, namespaces: names, labelling: labelling(client).await? })
    }

    /// What applying the root would do, beside what was admitted before.
    ///
    /// # Errors
    /// Admission would refuse it.
    pub(crate) fn change(&self, root: &ShardingConfig, admitted: &[ShardingConfig]) -> Result<Change, PlanError> {
        let live = self.configs.iter().find(|one| is_same(root, one));
        let mut problems = validate::sharding_config(root, admitted, None).errors;
        problems.extend(live.into_iter().flat_map(|live| validate::change(live, root).errors));
        if !problems.is_empty() {
            let problems = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            return Err(PlanError::Refused { name: root.name_any(), problems });
        }
        let change = Change::of(root, &self.configs, &self.namespaces, &self.labelling);
        change.map_err(|source| PlanError::Divide { name: root.name_any(), source })
    }
}

/// Counts the objects that the roots divide. Returns what cannot be counted, with the reason.
///
/// # Errors
/// The API server does not say which resources it has.
pub(crate) async fn count(client: &Client, changes: &mut [Change]) -> Result<Vec<String>, PlanError> {
    let groups = cluster::groups(client).await.map_err(PlanError::Discovery)?;
    let mut not_counted = Vec::new();
    for resource in objects::labelled(&groups) {
        let (group, plural) = (resource.group.as_str(), resource.plural.as_str());
        let mut selecting: Vec<(&mut Change, Selected)> = Vec::new();
        for change in &mut *changes {
            let selected = change.select(group, plural);
            selecting.extend(selected.map(|selected| (change, selected)));
        }
        if selecting.is_empty() {
            continue;
        }
        let listed = objects::list(client, &resource, |namespace, name, labels| {
            for (change, selected) in &mut selecting {
                change.count(selected, Counted { namespace, name, labels });
            }
        });
        match listed.await {
            Ok(()) => selecting.into_iter().for_each(|(change, selected)| change.add(selected)),
            Err(error) => not_counted.push(format!("{}: {error}", cluster::resource_name(group, plural))),
        }
    }
    Ok(not_counted)
}
