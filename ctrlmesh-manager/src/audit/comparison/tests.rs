use std::collections::BTreeSet;
use std::sync::Arc;

use ctrlmesh_common::api::ShardingConfigStatus;
use ctrlmesh_common::selector::Labels;
use ctrlmesh_common::wire::{Watched, WatchedKind};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::super::holders::{InForce, PolicyInForce, SentPolicies};
use super::super::operators::operators;
use super::*;
use crate::cluster::cache::Snapshot;
use crate::cluster::plan::{self, Plan};
use crate::cluster::served_resources::ServedResources;
use crate::labels::KeptBy;
use crate::push::policy_store::{PodWatches, Reported};
use crate::rules::compile::PoliciesByPod;
use crate::rules::object_name::full_name;
use crate::rules::pod::PodName;

const GROUP: &str = "web.example.com";

const SITES: (&str, &str) = (GROUP, "sites");

const TWO: &str = "prefix: r, targetStatefulSet: op, fence: 'Off', auto: {shardingSize: 2, everyShardReplicas: 1}, \
                   resourceSelector: [{relateResources: [{apiGroups: [web.example.com], resources: [sites]}]}]";

/// An operator, its pods `op-0`, `op-1` …, and what their proxies have said.
struct Bed {
    plan: Plan,
    in_force: InForce,
    watches: BTreeMap<PodName, PodWatches>,
    sent: SentPolicies,
    sites: Vec<ObjectMeta>,
    known: BTreeSet<KindKey>,
}

fn root(rule: &str) -> String {
    format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\n\
         metadata: {{name: op, namespace: ops}}\nspec: {{root: {{{rule}}}}}\n"
    )
}

fn by_hand(name: &str, teams: &str) -> String {
    format!(
        "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: {name}, namespace: ops}}\n\
         spec: {{controller: {{leaderElectionName: op}}, selector: {{matchLabels: {{shard: {name}}}}}, \
         limits: [{{relateResources: [{{apiGroups: [web.example.com], resources: [sites]}}], \
         selector: {{matchExpressions: [{{key: team, operator: In, values: [{teams}]}}]}}}}]}}\n---\n"
    )
}

fn pod(number: u32, shard: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: op-{number}, namespace: ops, uid: u-{number}, \
         annotations: {{ctrlmesh.kusionstack.io/injected: 'true'}}, \
         ownerReferences: [{{apiVersion: apps/v1, kind: StatefulSet, name: op, uid: x, controller: true}}], \
         labels: {{shard: {shard}, ctrlmesh.kusionstack.io/enable-proxy: 'true'}}}}\nspec: {{containers: []}}\n"
    )
}

/// Of namespace `shop-0`, `shop-1` …, by number, with the manager's labels and a team.
fn site(name: &str, number: usize, team: &str) -> ObjectMeta {
    let namespace = format!("shop-{number}");
    let ours = Labelling::default().of_namespace(&namespace).map(|(key, value)| (key.to_owned(), value));
    let labels: Labels = ours.into_iter().chain([("team".to_owned(), team.to_owned())]).collect();
    ObjectMeta {
        name: Some(name.to_owned()),
        namespace: Some(namespace),
        labels: Some(labels),
        ..ObjectMeta::default()
    }
}

fn watches(kinds: Vec<WatchedKind>) -> PodWatches {
    Reported { uid: String::new(), state: Watched { since: 1, kinds, more: false } }
}

fn sites_everywhere() -> WatchedKind {
    let text = str::to_owned;
    WatchedKind { group: text(SITES.0), resource: text(SITES.1), everywhere: true, ..WatchedKind::default() }
}

impl Bed {
    /// All pods have their policies in force, and watch everything. There are ten sites, each in its namespace, of the
    /// teams `a` and `b` in turns.
    fn new(configs: &str, pods: &[(u32, &str)]) -> Self {
        let pods: String = pods.iter().map(|(number, shard)| pod(*number, shard)).collect();
        let mut snapshot = Snapshot::of_manifests(&(configs.to_owned() + &pods));
        let nothing = PoliciesByPod::new();
        let first = plan::of(snapshot.clone(), &nothing);
        for config in &mut snapshot.configs {
            let Some(record) = first.compiled.operators.get(&full_name(&config.metadata)) else { continue };
            config.status = Some(ShardingConfigStatus {
                epoch: i64::try_from(record.epoch).ok(),
                policy_digest: Some(record.policy_digest.clone()),
                ownership: record.ownership.clone(),
                ..ShardingConfigStatus::default()
            });
        }
        let plan = plan::of(snapshot, &nothing);
        let in_force = plan.snapshot.members.iter().filter_map(|pod| {
            let policy = plan.sendable().get(&pod.name)?;
            let (uid, digest) = (pod.uid.clone(), policy.digest());
            Some((pod.name.clone(), PolicyInForce { uid, digest, is_away: false }))
        });
        let in_force: InForce = in_force.collect();
        let watches =
            plan.snapshot.members.iter().map(|pod| {
                (pod.name.clone(), PodWatches { uid: pod.uid.clone(), ..watches(vec![sites_everywhere()]) })
            });
        let watches = watches.collect();
        let sites = (0..10).map(|at| site(&format!("s{at}"), at, if at % 2 == 0 { "a" } else { "b" })).collect();
        Self { in_force, watches, sent: SentPolicies::default(), sites, plan, known: BTreeSet::new() }
    }

    fn watched(&mut self, pod: &str) -> &mut Vec<WatchedKind> {
        &mut self.watches.get_mut(&pod.parse().unwrap()).unwrap().state.kinds
    }

    fn all(&mut self, more_kinds: &[&str]) -> BTreeMap<KindKey, KindState> {
        self.sent.remember(&self.plan);
        let label_keys = Labelling::default().keys().map(str::to_owned).into_iter().chain(["team".to_owned()]);
        let by = KeptBy { label_keys: label_keys.collect(), ..KeptBy::default() };
        let objects = ObjectCounts::of_metadata(SITES.0, SITES.1, self.sites.clone(), &by);
        for kind in more_kinds {
            objects.add_unlisted(GROUP, kind);
        }
        let holders = self.sent.holders(&self.plan, &self.in_force, &self.watches);
        let operators = operators(&self.plan);
        assert_eq!(operators.len(), 1);
        let holders: Vec<_> =
            operators[0].operators.iter().filter_map(|config| holders.get(config.as_str())).flatten().collect();
        compare(&operators[0], &holders, &objects, &Labelling::default(), &mut self.known)
    }

    fn sites(&mut self) -> KindAudit {
        let key = (SITES.0.to_owned(), SITES.1.to_owned());
        match self.all(&[]).remove(&key) {
            Some(KindState::Audited(audit)) => audit,
            other => panic!("{other:?}"),
        }
    }

    /// How many are owned, and of each gap, how many have it.
    fn found(&mut self) -> (u64, Vec<(Gap, u64)>) {
        let audit = self.sites();
        let mut gaps: BTreeMap<Gap, u64> = BTreeMap::new();
        audit.gaps.iter().for_each(|((gap, _), objects)| *gaps.entry(*gap).or_default() += objects.count);
        (audit.owned, gaps.into_iter().collect())
    }
}

/// The two pods of a root, and how many of the ten sites are of the second one's shard.
fn sharded() -> (Bed, u64) {
    let mut bed = Bed::new(&root(TWO), &[(0, "x"), (1, "x")]);
    let second = bed.sites().by_shard["r-2-normal"];
    assert!(second > 0 && second < 10 && bed.found() == (10, vec![]), "{second}");
    (bed, second)
}

#[test]
fn every_object_of_a_root_has_an_owner_that_watches_it() {
    let (mut bed, second) = sharded();
    let audit = bed.sites();
    assert_eq!(audit.by_shard, BTreeMap::from([("r-1-normal".into(), 10 - second), ("r-2-normal".into(), second)]));
    let most = u32::try_from(second.max(10 - second)).unwrap();
    assert!((audit.imbalance().unwrap() - f64::from(most) / 5.0).abs() < 1e-9);
    bed.sites.clear();
    assert_eq!((bed.found(), bed.sites().imbalance()), ((0, vec![]), None));
}

#[test]
fn an_object_without_its_labels_is_seen_by_nobody() {
    let (mut bed, _) = sharded();
    bed.sites[3].labels = None;
    bed.sites[4].labels.as_mut().unwrap().remove(&Labelling::default().hash_key);
    assert_eq!(bed.found(), (8, vec![(Gap::Unlabelled, 2)]));
    let examples = |audit: KindAudit| audit.gaps.into_values().flat_map(|gap| gap.examples).collect::<BTreeSet<_>>();
    assert_eq!(examples(bed.sites()), ["shop-3/s3".to_owned(), "shop-4/s4".to_owned()].into());
}

#[test]
fn a_share_whose_pod_has_no_policy_or_is_gone_is_nobodys() {
    let (mut bed, second) = sharded();
    bed.in_force.remove(&"ops/op-1".parse().unwrap());
    assert_eq!(bed.found(), (10 - second, vec![(Gap::NoPolicy, second)]));
    let mut alone = Bed::new(&root(TWO), &[(0, "x")]);
    assert_eq!(alone.found(), (10 - second, vec![(Gap::NoPod, second)]));
    // A pod of the same name that was made anew has said nothing yet.
    let (mut bed, second) = sharded();
    bed.in_force.get_mut(&"ops/op-1".parse().unwrap()).unwrap().uid = "former".to_owned();
    assert_eq!(bed.found(), (10 - second, vec![(Gap::NoPolicy, second)]));
}

#[test]
fn a_share_is_unwatched_once_the_last_watch_of_it_ends() {
    let (mut bed, second) = sharded();
    *bed.watched("ops/op-1") = vec![WatchedKind { everywhere: false, last_watched: 77, ..sites_everywhere() }];
    assert_eq!(bed.found(), (10 - second, vec![(Gap::Unwatched, second)]));
    let audit = bed.sites();
    assert_eq!(audit.gaps[&(Gap::Unwatched, Some("r-2-normal".to_owned()))].last_watched, 77);
    // Of one namespace that it owns, it has a watch; nobody knows of one of the others.
    let slots = &bed.plan.compiled.operators["ops/op"].ownership.as_ref().unwrap().slots;
    let is_its = |at: &usize| {
        let namespace = format!("shop-{at}");
        slots[&Labelling::default().hash.slot(&namespace)] == "r-2-normal"
    };
    let own = (0..10).find(is_its).unwrap();
    bed.watched("ops/op-1")[0].namespaces = vec![format!("shop-{own}")];
    bed.watched("ops/op-1")[0].last_watched = 0;
    assert_eq!(bed.found(), (11 - second, vec![(Gap::NeverWatched, second - 1)]));
    bed.watched("ops/op-1").clear();
    assert_eq!(bed.found(), (10 - second, vec![(Gap::NeverWatched, second)]));
    bed.in_force.get_mut(&"ops/op-1".parse().unwrap()).unwrap().is_away = true;
    assert_eq!(bed.found(), (10 - second, vec![(Gap::ProxyAway, second)]));
    bed.in_force.get_mut(&"ops/op-1".parse().unwrap()).unwrap().is_away = false;
    // A proxy of an older version says nothing.
    bed.watches.remove(&"ops/op-1".parse().unwrap());
    assert_eq!(bed.found(), (10, vec![]));
}

#[test]
fn a_policy_that_was_replaced_may_still_be_in_force() {
    let (mut bed, second) = sharded();
    bed.sites();
    // Both proxies have had the policy of the only shard that there was.
    let whole = Bed::new(&root(&TWO.replace("shardingSize: 2", "shardingSize: 1")), &[(0, "x")]);
    let former = whole.plan.sendable().values().next().unwrap().digest();
    bed.in_force.get_mut(&"ops/op-0".parse().unwrap()).unwrap().digest = former;
    bed.sent.remember(&whole.plan);
    let seen = bed.sites();
    let doubled = &seen.gaps[&(Gap::Doubled, Some("r-1-normal and r-2-normal".to_owned()))];
    assert_eq!((seen.owned, doubled.count, seen.doubled()), (10 - second, second, second));
    assert_eq!(seen.unowned().count(), 0);
}

#[test]
fn only_what_a_root_selects_is_looked_at() {
    let selecting = TWO.replace("resources: [sites]}]", "resources: [sites]}], selector: {matchLabels: {team: a}}");
    let mut bed = Bed::new(&root(&selecting), &[(0, "x"), (1, "x")]);
    assert_eq!(bed.found(), (5, vec![]));
    bed.watched("ops/op-0").clear();
    bed.watched("ops/op-1").clear();
    assert_eq!(bed.found(), (0, vec![(Gap::NeverWatched, 5)]));
}

#[test]
fn of_a_wildcard_only_what_the_operator_knows_counts() {
    let every = TWO.replace("resources: [sites]", "resources: ['*']");
    let mut bed = Bed::new(&root(&every), &[(0, "x"), (1, "x")]);
    let kinds = |bed: &mut Bed| bed.all(&["pages"]).into_keys().map(|(_, plural)| plural).collect::<Vec<_>>();
    assert_eq!(kinds(&mut bed), ["sites"], "nobody ever watched pages");
    bed.watched("ops/op-0").push(WatchedKind { resource: "pages".to_owned(), ..sites_everywhere() });
    assert_eq!(kinds(&mut bed), ["pages", "sites"]);
    assert_eq!(bed.all(&["pages"]).values().next(), Some(&KindState::InProgress));
    // Proxies that are new or away say nothing of kinds that nobody knows.
    bed.watches.remove(&"ops/op-1".parse().unwrap());
    bed.in_force.get_mut(&"ops/op-0".parse().unwrap()).unwrap().is_away = true;
    assert_eq!(kinds(&mut bed), ["pages", "sites"], "it is known that they were watched");
    bed.known.clear();
    assert_eq!(kinds(&mut bed), [""; 0]);
}

#[test]
fn what_a_root_names_and_nobody_lists_is_unknown() {
    let pages = TWO.replace("resources: [sites]", "resources: [sites, pages]");
    let mut bed = Bed::new(&root(&pages), &[(0, "x"), (1, "x")]);
    let states =
        |bed: &mut Bed| bed.all(&[]).into_iter().map(|((_, plural), state)| (plural, state)).collect::<Vec<_>>();
    assert_eq!(states(&mut bed).len(), 1, "pages are not served");
    let served =
        ServedResources::from([(GROUP, "sites", "Site"), (GROUP, "pages", "Page"), ("", "namespaces", "Namespace")]);
    Arc::get_mut(&mut bed.plan.snapshot).unwrap().served = Arc::new(served);
    assert_eq!(states(&mut bed)[0], ("pages".to_owned(), KindState::Unknown));
}

#[test]
fn a_root_that_became_invalid_is_audited_by_what_it_wrote() {
    let (mut bed, second) = sharded();
    // Nothing is compiled of it any more, and its pods keep what they have.
    let written = bed.plan.compiled.operators.remove("ops/op").unwrap().ownership;
    assert!(written.is_some());
    bed.in_force.remove(&"ops/op-1".parse().unwrap());
    assert_eq!(bed.found(), (10 - second, vec![(Gap::NoPolicy, second)]));
    let snapshot = Arc::get_mut(&mut bed.plan.snapshot).unwrap();
    snapshot.configs[0].status = None;
    assert!(operators(&bed.plan).is_empty(), "it has never divided anything");
}

#[test]
fn shards_by_hand_own_what_they_select() {
    let both = by_hand("one", "a") + &by_hand("two", "b");
    let mut bed = Bed::new(&both, &[(0, "one"), (1, "two")]);
    assert_eq!(bed.found(), (10, vec![]));
    let other = site("other", 1, "c");
    bed.sites.push(other);
    assert_eq!(bed.found(), (10, vec![]), "no shard selects it");
    // Two that overlap: the one that was there first stays in force, and the other gets nothing.
    let overlap = by_hand("one", "a") + &by_hand("two", "a, b");
    let mut bed = Bed::new(&overlap, &[(0, "one"), (1, "two")]);
    assert_eq!(bed.found(), (5, vec![(Gap::NoPolicy, 5)]));
}
