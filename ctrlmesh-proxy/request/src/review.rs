//! Decides who answers an admission review: the replica that was called, or the one that owns the object.
//!
//! Kubernetes calls any replica of an operator. One that answers from its cache knows only the objects of its share. So
//! a review goes to the owner of its object. Only what tells the owner is read; namespace and name are those of the
//! request, which the API server has written, and not those of the object, which its client has.

use std::collections::BTreeMap;

use ctrlmesh_common::policy::fence::{Access, NotOwned};
use ctrlmesh_common::policy::webhook::{Peer, Webhook};
use ctrlmesh_common::policy::{Mode, Policy};
use ctrlmesh_common::selector::{Labels, Selector};
use serde::Deserialize;

/// What a review says of its object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Review {
    pub group: String,
    pub resource: String,
    /// Empty for an object of cluster scope.
    pub namespace: String,
    /// Empty where the API server has not given it one yet.
    pub name: String,
    /// Those that the object has, or will have where it is made.
    pub labels: Labels,
}

/// Who answers a review.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answerer<'a> {
    /// The replica that was called: the object is its own, or nobody's in particular.
    Local,
    /// The same, because its shard owns the object.
    Own,
    /// A replica of another shard.
    Owner(&'a Peer),
    /// Nobody yet: the object is on its way from one shard to another.
    Moving,
    /// The object belongs to nobody, or to somebody who cannot be asked.
    Unowned,
}

/// `admission.k8s.io`, v1 and v1beta1: as much of it as is read.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AdmissionReview {
    api_version: String,
    kind: String,
    request: AdmissionRequest,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AdmissionRequest {
    resource: Resource,
    #[serde(default)]
    namespace: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    object: Option<Object>,
    #[serde(default)]
    old_object: Option<Object>,
}

#[derive(Deserialize)]
struct Resource {
    group: String,
    resource: String,
}

#[derive(Deserialize)]
struct Object {
    #[serde(default)]
    metadata: Option<Metadata>,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(default)]
    labels: Option<BTreeMap<String, Option<String>>>,
}

impl Review {
    /// Reads the body of a request; `None` where it is no admission review.
    pub fn parse(body: &[u8]) -> Option<Self> {
        let AdmissionReview { api_version, kind, request } = serde_json::from_slice(body).ok()?;
        let is_known = ["admission.k8s.io/v1", "admission.k8s.io/v1beta1"].contains(&api_version.as_str());
        if !is_known || kind != "AdmissionReview" {
            return None;
        }
        let Resource { group, resource } = request.resource;
        // Who has the object now, where it is there already.
        let object = request.old_object.or(request.object);
        let labels = object.and_then(|object| object.metadata?.labels).unwrap_or_default();
        let labels = labels.into_iter().map(|(key, value)| (key, value.unwrap_or_default()));
        let (namespace, name) = (request.namespace.unwrap_or_default(), request.name.unwrap_or_default());
        Some(Self { group, resource, namespace, name, labels: labels.collect() })
    }

    /// Who answers it, by the policy of the pod that was called, and the webhook in it.
    pub fn answerer<'a>(&self, policy: &Policy, webhook: &'a Webhook) -> Answerer<'a> {
        if policy.mode == Mode::Pass {
            return Answerer::Local;
        }
        match &policy.fence {
            Some(fence) => match fence.access((&self.group, &self.resource), &self.namespace, &self.name) {
                Access::Unfenced | Access::Unknown => Answerer::Local,
                Access::Owned(_) => Answerer::Own,
                Access::Refused(NotOwned { owner: None, .. }) => Answerer::Moving,
                Access::Refused(NotOwned { owner: Some(owner), .. }) => {
                    webhook.peers.iter().find(|peer| peer.shard == owner).into()
                }
            },
            None => self.answerer_by_labels(policy, webhook),
        }
    }

    fn answerer_by_labels<'a>(&self, policy: &Policy, webhook: &'a Webhook) -> Answerer<'a> {
        match policy.selector_for(&self.group, &self.resource) {
            None => Answerer::Local,
            Some(own) if own.matches(&self.labels) => Answerer::Local,
            Some(_) => webhook.peers.iter().find(|peer| self.is_of(peer)).into(),
        }
    }

    /// Whether the limits of a shard give it the object.
    fn is_of(&self, peer: &Peer) -> bool {
        let mut covering = peer.limits.iter().filter(|limit| limit.covers(&self.group, &self.resource)).peekable();
        covering.peek().is_some()
            && covering.fold(Selector::everything(), |all, limit| all.and(&limit.selector)).matches(&self.labels)
    }
}

impl<'a> From<Option<&'a Peer>> for Answerer<'a> {
    fn from(peer: Option<&'a Peer>) -> Self {
        peer.map_or(Self::Unowned, Self::Owner)
    }
}

#[cfg(test)]
mod tests;
