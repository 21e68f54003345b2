//! Asks the API server which kinds the manager may label.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::{FutureExt as _, StreamExt as _, stream};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::core::ApiResource;
use kube::{Api, Client};
use tokio::time;
use tracing::warn;

use super::Kinds;
use crate::rules::label_coverage::{KindName, MissingRule, VERBS};

/// For one answer.
const DEADLINE: Duration = Duration::from_secs(3);

/// Questions at a time.
const CONCURRENT: usize = 8;

/// What is known of the manager's rights, by kind.
#[derive(Debug, Default)]
pub(super) struct Rights {
    granted: BTreeSet<String>,
    missing: BTreeMap<String, MissingRule>,
}

/// The verbs that are not granted, or why they are not known.
type Answer = Result<Vec<&'static str>, String>;

impl Rights {
    /// The rights that are missing.
    pub(super) fn missing(&self) -> &BTreeMap<String, MissingRule> {
        &self.missing
    }

    /// Asks about `kinds` that are not known to be granted, and about those that are `doubted`. A kind about which the
    /// API server does not answer counts as granted; its own answer to a list or patch decides.
    pub(super) async fn ask(&mut self, client: &Client, kinds: &Kinds, doubted: &BTreeSet<String>) {
        self.granted.retain(|name| kinds.contains_key(name) && !doubted.contains(name));
        let asked = kinds.iter().filter(|(name, _)| !self.granted.contains(*name));
        let asked = asked.map(|(name, kind)| ask(client.clone(), name.clone(), kind.resource.clone()).boxed());
        let asked: Vec<_> = asked.collect();
        let answers: Vec<_> = stream::iter(asked).buffer_unordered(CONCURRENT).collect().await;
        self.missing.clear();
        for (name, resource, answer) in answers {
            match answer {
                Ok(verbs) if verbs.is_empty() => drop(self.granted.insert(name)),
                Ok(verbs) => drop(self.missing.insert(name, MissingRule { kind: kind_name(&resource), verbs })),
                Err(error) => warn!(kind = name, error, "whether it may be labelled is not known"),
            }
        }
    }
}

/// The kind as RBAC rules name it.
pub(super) fn kind_name(resource: &ApiResource) -> KindName {
    KindName { group: resource.group.clone(), resource: resource.plural.clone() }
}

async fn ask(client: Client, name: String, resource: ApiResource) -> (String, ApiResource, Answer) {
    let answer = missing(&client, &resource).await;
    (name, resource, answer)
}

async fn missing(client: &Client, resource: &ApiResource) -> Answer {
    let mut verbs = Vec::new();
    for verb in VERBS {
        let asked = time::timeout(DEADLINE, is_granted(client, resource, verb)).await;
        match asked {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) => verbs.push(verb),
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_elapsed) => return Err("no answer in time".to_owned()),
        }
    }
    Ok(verbs)
}

async fn is_granted(client: &Client, resource: &ApiResource, verb: &str) -> kube::Result<bool> {
    let attributes = ResourceAttributes {
        group: Some(resource.group.clone()),
        resource: Some(resource.plural.clone()),
        verb: Some(verb.to_owned()),
        ..ResourceAttributes::default()
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let answer = Api::all(client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}
