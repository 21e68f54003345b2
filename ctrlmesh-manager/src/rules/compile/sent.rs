//! What does a policy look like as it is sent?
//!
//! It is written once for all pods of a shard, and kept with what they are told: a policy may have megabytes, and a
//! shard thousands of pods.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use ctrlmesh_common::policy::{Policy, Redirect};
use ctrlmesh_common::wire;

use crate::rules::pod::Member;

/// A policy as JSON, with its digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The JSON.
    pub text: Bytes,
    /// Its digest.
    pub digest: u64,
}

/// What was written already; by itself it says nothing that the policy does not say.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept(pub(super) Option<Arc<Sent>>);

/// What was written of the shards of one operator: by shard, and by what differs between its pods.
#[derive(Debug, Default)]
pub(super) struct Written<'a>(BTreeMap<Variant<'a>, Arc<Sent>>);

type Variant<'a> = (&'a str, u8, bool, Option<&'a str>);

// === impl Sent ===

impl Sent {
    /// Writes `policy`.
    pub(super) fn of(policy: &Policy) -> Self {
        // A policy's keys are texts and its values numbers, texts and lists of them: it can be written.
        let text = serde_json::to_vec(policy).unwrap_or_default();
        Self { digest: wire::digest(&text), text: text.into() }
    }
}

// === impl Kept ===

impl PartialEq for Kept {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

// === impl Written ===

impl<'a> Written<'a> {
    /// The policy of `shard` as it is for `pod`, written now if it was not yet.
    pub(super) fn of(&mut self, shard: &'a str, pod: &'a Member, policy: &Policy) -> Arc<Sent> {
        let redirect = match pod.redirect {
            Redirect::Node => 0,
            Redirect::Sidecar => 1,
            Redirect::Nowhere => 2,
        };
        let container = pod.container.as_deref().filter(|_| policy.container.is_some());
        let variant = (shard, redirect, pod.fail_open, container);
        self.0.entry(variant).or_insert_with(|| Arc::new(Sent::of(policy))).clone()
    }
}
