//! Gives a workload the pod template of an earlier revision back, and removes pods that it would not replace.
//!
//! A revision is what the pods of the workload are labelled with. Of a Deployment it is the value of
//! `pod-template-hash`. Of a StatefulSet it is that of `controller-revision-hash`, the name of a `ControllerRevision`.
//! Templates are passed on as they are, with fields that our types do not know.

use std::fmt;

use k8s_openapi::Resource as Kind;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::{Api, Client, Resource};
use serde_json::Value;

use crate::rules::pod::PodName;

mod template;

/// The workload of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workload {
    /// By name.
    Deployment(String),
    /// By name.
    StatefulSet(String),
}

/// What came of [`roll_back`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RollBack {
    /// The workload has the earlier template.
    RolledBack,
    /// Its template is of another revision than the failed one: there is nothing to do.
    NotCurrent,
}

/// Why a workload did not get its template back.
#[derive(Debug, thiserror::Error)]
pub enum RollBackError {
    #[error("{workload} of namespace {namespace:?} is not there")]
    NoWorkload { workload: Workload, namespace: String },
    #[error(
        "{workload}: its controller has not seen generation {generation} yet, so its revision is unknown; wait for kube-controller-manager"
    )]
    NotObserved { workload: Workload, generation: i64 },
    #[error(
        "{workload}: no {kind} {name:?} of it is kept, and so no template of that revision; put the template back yourself, and raise spec.revisionHistoryLimit"
    )]
    NoRevision { workload: Workload, kind: &'static str, name: String },
    #[error("read {kind} {name:?} of namespace {namespace:?}")]
    Read { kind: &'static str, namespace: String, name: String, source: kube::Error },
    /// The workload may have changed in between: then the API server says so by 409.
    #[error("write the template of {workload} of namespace {namespace:?}")]
    Write { workload: Workload, namespace: String, source: kube::Error },
}

/// Reads and writes the workload, and what is kept of its revisions.
#[derive(Clone, Copy)]
struct Objects<'a> {
    client: &'a Client,
    namespace: &'a str,
    workload: &'a Workload,
}

impl fmt::Display for Workload {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deployment(name) => write!(out, "Deployment {name:?}"),
            Self::StatefulSet(name) => write!(out, "StatefulSet {name:?}"),
        }
    }
}

/// Gives `workload` the pod template of revision `to` back, as `kubectl rollout undo` does, where its template is that
/// of revision `from`. Its annotations stay as they are.
///
/// # Errors
/// If the template of `to` is not kept, or the API server refuses a request. It can be repeated in any case.
pub async fn roll_back(
    client: &Client,
    namespace: &str,
    workload: &Workload,
    from: &str,
    to: &str,
) -> Result<RollBack, RollBackError> {
    let objects = Objects { client, namespace, workload };
    match workload {
        Workload::Deployment(name) => objects.roll_back_deployment(name, from, to).await,
        Workload::StatefulSet(name) => objects.roll_back_stateful_set(name, from, to).await,
    }
}

/// Deletes a pod that does not become Ready, and that its StatefulSet therefore does not replace, even after its
/// template was put back (kubernetes/kubernetes#67250). The pod gets its usual grace period.
///
/// # Errors
/// If the API server refuses it. A pod that is gone, or that was replaced, is none.
pub async fn replace_stuck(client: &Client, pod: &PodName, uid: &str) -> kube::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    let exactly = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
    let params = DeleteParams { preconditions: Some(exactly), ..DeleteParams::default() };
    match pods.delete(&pod.name, &params).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}

impl Objects<'_> {
    /// Kubernetes, too, finds the present `ReplicaSet` by the same template. So a change counts before a `ReplicaSet`
    /// is made of it, also while the Deployment is paused.
    async fn roll_back_deployment(self, name: &str, from: &str, to: &str) -> Result<RollBack, RollBackError> {
        let there = self.workload::<Deployment>(name).await?;
        let of_revision = async |revision: &str| {
            let set = self.get::<ReplicaSet>(&format!("{name}-{revision}")).await?;
            Ok(set.and_then(|set| template::of_replica_set(&set, revision, &there.metadata)))
        };
        let failed = of_revision(from).await?;
        if failed.is_none() || failed.as_ref() != template::of_workload(&there) {
            return Ok(RollBack::NotCurrent);
        }
        let before = of_revision(to).await?;
        let before = before.ok_or_else(|| self.no_revision::<ReplicaSet>(format!("{name}-{to}")))?;
        self.write::<Deployment>(&there, before).await
    }

    async fn roll_back_stateful_set(self, name: &str, from: &str, to: &str) -> Result<RollBack, RollBackError> {
        let there = self.workload::<StatefulSet>(name).await?;
        match template::update_revision(&there) {
            Some(current) if current == from => {}
            Some(_) => return Ok(RollBack::NotCurrent),
            None => {
                let generation = there.metadata.generation.unwrap_or_default();
                return Err(RollBackError::NotObserved { workload: self.workload.clone(), generation });
            }
        }
        let before = self.get::<ControllerRevision>(to).await?;
        let before = before.and_then(|revision| template::of_controller_revision(&revision, &there.metadata));
        let before = before.ok_or_else(|| self.no_revision::<ControllerRevision>(to.to_owned()))?;
        self.write::<StatefulSet>(&there, before).await
    }

    async fn workload<K>(self, name: &str) -> Result<DynamicObject, RollBackError>
    where
        K: Kind + Resource<DynamicType = ()>,
    {
        let (workload, namespace) = (self.workload.clone(), self.namespace.to_owned());
        self.get::<K>(name).await?.ok_or(RollBackError::NoWorkload { workload, namespace })
    }

    async fn get<K>(self, name: &str) -> Result<Option<DynamicObject>, RollBackError>
    where
        K: Kind + Resource<DynamicType = ()>,
    {
        let (namespace, name) = (self.namespace.to_owned(), name.to_owned());
        let found = self.api::<K>().get_opt(&name).await;
        found.map_err(|source| RollBackError::Read { kind: K::KIND, namespace, name, source })
    }

    async fn write<K>(self, there: &DynamicObject, template: Value) -> Result<RollBack, RollBackError>
    where
        K: Kind + Resource<DynamicType = ()>,
    {
        let patch = Patch::Strategic(template::patch(&there.metadata, template));
        let name = there.metadata.name.as_deref().unwrap_or_default();
        let written = self.api::<K>().patch_metadata(name, &PatchParams::default(), &patch).await;
        let (workload, namespace) = (self.workload.clone(), self.namespace.to_owned());
        written.map_err(|source| RollBackError::Write { workload, namespace, source })?;
        Ok(RollBack::RolledBack)
    }

    fn api<K: Resource<DynamicType = ()>>(self) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), self.namespace, &ApiResource::erase::<K>(&()))
    }

    fn no_revision<K: Kind>(self, name: String) -> RollBackError {
        RollBackError::NoRevision { workload: self.workload.clone(), kind: K::KIND, name }
    }
}

#[cfg(test)]
mod tests;
