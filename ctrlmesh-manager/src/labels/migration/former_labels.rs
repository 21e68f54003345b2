//! Finds users of former label keys.
//!
//! Pure. A ShardingConfig may name them, and a proxy uses them until it acknowledges a newer policy.

use std::collections::{BTreeMap, BTreeSet};

use ctrlmesh_common::api::{LabelSelector, ShardingConfig};
use ctrlmesh_common::policy::Policy;

use crate::cluster::plan::Plan;
use crate::rules::object_name::full_name;
use crate::rules::pod::{Member, PodName};
use crate::rules::shared::each;
use crate::status::compute::Contact;

/// Describes the first user.
pub(super) fn used_by(plan: &Plan, contacts: &BTreeMap<PodName, Contact>, keys: &BTreeSet<&str>) -> Option<String> {
    let configs = plan.snapshot.configs.iter();
    let mut configs = configs.filter_map(|config| Some((config, asks(config, keys)?)));
    if let Some((config, key)) = configs.next() {
        return Some(format!("ShardingConfig {} names {key}", full_name(&config.metadata)));
    }
    // A terminating pod may work until it has ended.
    let at_work = |pod: &&Member| pod.enrolled() && pod.node.is_some() && !pod.ended;
    let mut pods = each(&plan.snapshot.members).filter(at_work);
    pods.find_map(|pod| {
        let why = match plan.sendable().get(&pod.name) {
            None => "gets no new policy yet",
            Some(compiled) if has_any(&compiled.policy, keys) => "has a policy with them",
            Some(compiled) => {
                let contact = contacts.get(&pod.name);
                let acknowledged = contact.is_some_and(|contact| contact.acknowledged(compiled));
                (!acknowledged).then_some("has not acknowledged a policy without them")?
            }
        };
        Some(format!("the proxy of pod {} {why}", pod.name))
    })
}

fn asks<'a>(config: &ShardingConfig, keys: &BTreeSet<&'a str>) -> Option<&'a str> {
    let limits = config.spec.limits.iter().filter_map(|limit| limit.objects());
    let root = config.spec.root.iter().flat_map(|root| &root.resource_selector);
    let root = root.filter_map(|one| one.selector.as_ref());
    let mut selectors = limits.chain(root);
    selectors.find_map(|selector| keys.iter().find(|key| names(selector, key)).copied())
}

fn names(selector: &LabelSelector, key: &str) -> bool {
    selector.match_labels.contains_key(key) || selector.match_expressions.iter().any(|one| one.key == key)
}

fn has_any(policy: &Policy, keys: &BTreeSet<&str>) -> bool {
    let mut requirements = policy.limits.iter().flat_map(|limit| limit.selector.requirements());
    requirements.any(|requirement| keys.contains(requirement.key()))
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::names::label;

    use super::*;
    use crate::cluster::cache::Snapshot;
    use crate::cluster::plan;
    use crate::rules::label_scheme::Scheme;
    use crate::rules::shard::Labelling;

    const ROOT: &str = "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {name: root, namespace: ops}\n\
        spec: {root: {prefix: r, targetStatefulSet: op, auto: {shardingSize: 1, everyShardReplicas: 1}}}\n---\n";

    const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: op-0, namespace: ops, uid: a, annotations: {ctrlmesh.kusionstack.io/injected: 'true'}, \
        labels: {ctrlmesh.kusionstack.io/enable-proxy: 'true'}, ownerReferences: [{apiVersion: apps/v1, kind: StatefulSet, name: op, uid: b, controller: true}]}\n\
        spec: {nodeName: node-a, containers: []}\n---\n";

    /// The plan after shards were switched to `x/hash`, with written statuses.
    fn switched(text: &str) -> Plan {
        let mut snapshot = Snapshot::of_manifests(text);
        let labelling = Labelling { hash_key: "x/hash".to_owned(), ..Labelling::default() };
        let former = Some(Labelling::default());
        snapshot.scheme = Scheme { former, ..Scheme::settled(labelling) }.into();
        // Shares are taken from whoever may have had them, and then given.
        for _ in 0..2 {
            let decided = plan::of(snapshot.clone(), &BTreeMap::new());
            for config in &mut snapshot.configs {
                let record = &decided.compiled.operators[&full_name(&config.metadata)];
                config.status = Some(ctrlmesh_common::api::ShardingConfigStatus {
                    epoch: i64::try_from(record.epoch).ok(),
                    policy_digest: Some(record.policy_digest.clone()),
                    ownership: record.ownership.clone(),
                    ..Default::default()
                });
            }
        }
        plan::of(snapshot, &BTreeMap::new())
    }

    fn by_former(plan: &Plan, contacts: &BTreeMap<PodName, Contact>) -> Option<String> {
        used_by(plan, contacts, &plan.snapshot.scheme.former_keys())
    }

    #[test]
    fn a_proxy_uses_them_until_it_acknowledges_others() {
        let plan = switched(&format!("{ROOT}{POD}"));
        let pod: PodName = "ops/op-0".parse().unwrap();
        let contact = |digest| [(pod.clone(), Contact { digest, ..Contact::default() })].into();
        let waits = Some("the proxy of pod ops/op-0 has not acknowledged a policy without them".to_owned());
        assert_eq!(by_former(&plan, &BTreeMap::new()), waits);
        assert_eq!(by_former(&plan, &contact(7)), waits);
        let digest = plan.sendable()[&pod].digest();
        assert_eq!(by_former(&plan, &contact(digest)), None);
        let mut unwritten = plan;
        unwritten.sendable = Some(BTreeMap::new());
        assert!(by_former(&unwritten, &contact(digest)).is_some_and(|why| why.ends_with("no new policy yet")));
    }

    #[test]
    fn a_pod_without_a_node_uses_none() {
        let unbound = POD.replace("nodeName: node-a, ", "");
        assert_eq!(by_former(&switched(&format!("{ROOT}{unbound}")), &BTreeMap::new()), None);
    }

    #[test]
    fn keys_that_a_sharding_config_names_count() {
        let named = format!(
            "apiVersion: ctrlmesh.kusionstack.io/v1alpha1\nkind: ShardingConfig\nmetadata: {{name: a, namespace: ops}}\n\
             spec: {{selector: {{matchLabels: {{app: a}}}}, limits: [{{selector: {{matchExpressions: [{{key: {}, operator: In, values: ['1']}}]}}}}]}}\n---\n",
            label::SHARDING_HASH
        );
        let why = format!("ShardingConfig ops/a names {}", label::SHARDING_HASH);
        assert_eq!(by_former(&switched(&named), &BTreeMap::new()), Some(why));
        let other = named.replace(label::SHARDING_HASH, "x/hash");
        assert_eq!(by_former(&switched(&other), &BTreeMap::new()), None);
    }
}
