//! Serialises policies, once for all pods of a shard that share one.
//!
//! A policy may have megabytes, and a shard thousands of pods.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use ctrlmesh_common::policy::{Policy, Redirect};
use ctrlmesh_common::wire;

use crate::rules::pod::Member;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// JSON.
    pub text: Bytes,
    pub digest: u64,
}

/// Cache of the serialised policy. It is not part of the value, so all are equal.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept(pub(super) Option<Arc<Sent>>);

/// Serialised policies of one operator, by shard and by what differs between its pods.
#[derive(Debug, Default)]
pub(super) struct Written<'a>(BTreeMap<Variant<'a>, Arc<Sent>>);

type Variant<'a> = (&'a str, u8, bool, Option<&'a str>, Option<String>);

impl Sent {
    pub(super) fn of(policy: &Policy) -> Self {
        // Maps, strings, lists and numbers always serialise.
        let text = serde_json::to_vec(policy).unwrap_or_default();
        Self { digest: wire::digest(&text), text: text.into() }
    }
}

impl PartialEq for Kept {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl<'a> Written<'a> {
    /// Serialises `policy` at the first call for a variant.
    pub(super) fn of(&mut self, shard: &'a str, pod: &'a Member, policy: &Policy) -> Arc<Sent> {
        let redirect = match pod.redirect {
            Redirect::Node => 0,
            Redirect::Sidecar => 1,
            Redirect::Nowhere => 2,
        };
        let container = pod.container.as_deref().filter(|_| policy.container.is_some());
        let owner = policy.fence.as_ref().and_then(|fence| fence.owner.clone());
        let variant = (shard, redirect, pod.fail_open, container, owner);
        self.0.entry(variant).or_insert_with(|| Arc::new(Sent::of(policy))).clone()
    }
}
