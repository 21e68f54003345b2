//! Tells the cache what proxies report of pods.

use std::collections::BTreeMap;
use std::collections::btree_map::IntoValues;
use std::sync::Arc;

use ctrlmesh_common::wire::Traffic;

use crate::app::context::Context;
use crate::cluster::balancer::Balancer;
use crate::cluster::cache::Cache;
use crate::cluster::plan::Plans;
use crate::cluster::silence::{ProxyContact, SilenceFollower};
use crate::leader::lease::Leadership;
use crate::push::policy_store::{PolicyStore, ProxyState, Receipt, Reported, Reports};
use crate::rules::pod::PodName;

pub(super) fn follow(context: &Context, cache: &Arc<Cache>, plans: &Plans) {
    let (drain, store) = (&context.drain, &context.store);
    let to = Arc::clone(cache);
    drain.spawn_until_started(follow_reports(PolicyStore::ended, Arc::clone(store), move |all| {
        to.take_ended(all.map(|of| (of.uid, of.state.containers.into_iter().collect())).collect());
    }));
    let to = Arc::clone(cache);
    drain.spawn_until_started(follow_reports(PolicyStore::locks, Arc::clone(store), move |all| {
        to.take_waiting(all.filter(|of| of.state.waits).map(|of| of.uid).collect());
    }));
    drain.spawn_until_started(balancer(context, cache).run());
    let leadership = context.leadership.clone();
    drain.spawn_until_started(follow_silence(Arc::clone(store), Arc::clone(cache), plans.clone(), leadership));
}

/// Divides elastic roots by load, while this replica leads.
fn balancer(
    context: &Context,
    cache: &Arc<Cache>,
) -> Balancer<impl Fn() -> BTreeMap<String, Traffic> + Send + Sync + use<>> {
    let store = Arc::clone(&context.store);
    Balancer {
        cache: Arc::clone(cache),
        reports: move || store.traffic().connected().into_values().map(|of| (of.uid, of.state)).collect(),
        interval: context.args.balance_interval,
        leadership: context.leadership.clone(),
    }
}

/// Says which pods are on silent nodes, while this replica leads.
async fn follow_silence(store: Arc<PolicyStore>, cache: Arc<Cache>, plans: Plans, leadership: Leadership) {
    let contacts = || store.read_receipts(|receipt| (receipt.uid.clone(), contact(receipt)));
    let take = |silent| cache.take_silent(silent);
    SilenceFollower { plans, contacts, take, leadership }.run().await;
}

fn contact(receipt: &Receipt) -> ProxyContact {
    match receipt {
        Receipt { connected: true, .. } => ProxyContact::Connected,
        Receipt { lost: true, .. } => ProxyContact::Lost,
        _ => ProxyContact::Left,
    }
}

/// Gives `take` all reports, and again each time that one changes.
async fn follow_reports<S: ProxyState + Clone>(
    reports: fn(&PolicyStore) -> &Reports<S>,
    store: Arc<PolicyStore>,
    take: impl Fn(IntoValues<PodName, Reported<S>>),
) {
    let mut changes = reports(&store).changes();
    loop {
        changes.mark_unchanged();
        take(reports(&store).newest().into_values());
        // The store is ours, so the sender lives.
        drop(changes.changed().await);
    }
}
