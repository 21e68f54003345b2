//! The manager counts the objects of a share, and a pod may delete so many percent of them.

use std::ops::Range;

use ctrlmesh_common::api::CircuitBreaker;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::bed::eventually;
use crate::full::{OPERATOR, ROOT};
use crate::guards::{BREAKER, Bed, Operator, PREFIX};

const PERCENT: usize = 2;

/// The name of the limit.
const LIMIT: &str = "deletes";

/// A share of this many objects more than a multiple of 50 has the same budget while it is spent.
const REST: usize = 40;

fn limit() -> Value {
    let deletes = json!({"apiGroups": [""], "resources": ["configmaps"], "verbs": ["delete"], "namespaces": ["*"]});
    let bucket = json!({"percentOfShare": PERCENT, "interval": "1h"});
    json!([{"name": LIMIT, "bucket": bucket, "resourceRules": [deletes]}])
}

/// The objects that the operator makes and deletes.
struct Objects<'a> {
    bed: &'a Bed,
    operator: Operator,
    /// What it sees: its share.
    all: Api<ConfigMap>,
    /// Those that are there.
    there: Range<usize>,
}

impl Objects<'_> {
    async fn share(&self) -> usize {
        self.all.list(&ListParams::default()).await.unwrap().items.len()
    }

    /// Makes objects until there are at least so many, and the budget is the same while it is spent.
    async fn fill(&mut self, at_least: usize) {
        let maps: Api<ConfigMap> = Api::namespaced(self.bed.client.clone(), &self.bed.team);
        let mut share = self.share().await;
        while share < at_least || share % 50 != REST {
            let map = json!({"metadata": {"name": format!("{PREFIX}{}", self.there.end)}});
            maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
            self.there.end += 1;
            share += 1;
        }
        // Those that were made just now may get their label a moment later.
        eventually("all to be seen", async || (self.share().await == share).then_some(())).await;
    }

    /// Waits until the status has a count with the same budget, and gives that.
    async fn budget(&self) -> usize {
        let breakers: Api<CircuitBreaker> = Api::namespaced(self.bed.client.clone(), OPERATOR);
        let budget = |objects: usize| objects * PERCENT / 100;
        eventually("the objects to be counted", async || {
            let share = self.share().await;
            let shares = breakers.get(BREAKER).await.ok()?.status?.shares;
            let is_own = |shard: &str| shard.starts_with(&format!("{OPERATOR}/{ROOT}/"));
            let mut own = shares.iter().filter(|one| is_own(&one.shard));
            own.any(|one| budget(usize::try_from(one.objects).unwrap()) == budget(share)).then(|| budget(share))
        })
        .await
    }

    /// Deletes until it is refused; gives how many it could.
    async fn delete(&mut self) -> usize {
        let begun = self.there.start;
        while self.operator.deletes(self.there.start).await {
            self.there.start += 1;
        }
        self.there.start - begun
    }

    /// Resets the breaker, with this text behind the limit's name.
    async fn reset(&self, text: &str) {
        let breakers: Api<CircuitBreaker> = Api::namespaced(self.bed.client.clone(), OPERATOR);
        let value = format!("{LIMIT} {text}");
        let reset = json!({"metadata": {"annotations": {"circuitbreaker.ctrlmesh.kusionstack.io/reset": value}}});
        breakers.patch(BREAKER, &PatchParams::default(), &Patch::Merge(reset)).await.unwrap();
        self.operator.until_open(LIMIT, Some(false)).await;
    }
}

#[tokio::test]
async fn a_pod_deletes_at_most_a_percentage_of_its_share() {
    let bed = Bed::new().await;
    let (operator, there) = (bed.operator().await, 0..0);
    let mut objects = Objects { bed: &bed, all: operator.all_maps(), operator, there };
    objects.fill(200).await;
    bed.apply(&json!({}), &limit()).await;
    let budget = objects.budget().await;
    assert!(budget >= 4, "{budget}");
    // Until its proxy knows how many there are, it is refused, and no breaker opens.
    objects.operator.until_open(LIMIT, Some(false)).await;
    let first = eventually("a delete that passes", async || {
        let passes = objects.operator.deletes(objects.there.start).await;
        passes.then_some(())
    });
    first.await;
    objects.there.start += 1;
    // By a first count that was less, if there was one.
    assert!((1..budget).contains(&objects.delete().await));
    objects.operator.until_open(LIMIT, Some(true)).await;

    // The share as it is now, and after it has grown.
    for (text, at_least) in [("once", 0), ("twice", 350)] {
        objects.fill(at_least).await;
        let budget = objects.budget().await;
        objects.reset(text).await;
        assert_eq!(objects.delete().await, budget, "{text}");
    }
}
