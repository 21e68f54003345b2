//! The ownership table as the parameter of a fence: a `ConfigMap` in the manager's namespace.
//!
//! The root itself would do, without a copy. But for half a minute after its start an API server does not know kinds of
//! custom resources as parameters. It then refuses what the policy matches, whoever writes.

use std::collections::BTreeMap;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::{COUNT, Slot};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::fence_names::{labels, object_name};

/// Of the table.
pub(super) const EPOCH: &str = "epoch";

/// Of the root: another root of the same name has other epochs.
pub(super) const UID: &str = "uid";

/// The owners of all slots, in order, each followed by a comma; empty for a slot that is nobody's.
pub(super) const SLOTS: &str = "slots";

/// Begins the keys of pinned namespaces, by name; the value is the owner.
pub(super) const NAMESPACE: &str = "namespace.";

/// Begins the keys of namespaces that are taken away; the value is the former owner.
pub(super) const REVOKED: &str = "revoked.";

/// Begins the keys of owners; the value has the UIDs of the pods that write for them, each between two spaces.
pub(super) const PODS: &str = "pods.";

/// The data of the `ConfigMap`.
pub type Data = BTreeMap<String, String>;

/// Which table a fence is to have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version {
    /// Of the root.
    pub uid: String,
    pub epoch: u64,
}

/// What is to be done about the table that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Keep,
    Write,
    /// It is newer: another replica leads.
    Yield,
}

/// The version of the table in the root's status; none where there is no table.
pub fn version(root: &ShardingConfig) -> Option<Version> {
    let epoch = root.status.as_ref()?.ownership.as_ref()?.epoch;
    Some(Version { uid: root.metadata.uid.clone().unwrap_or_default(), epoch })
}

/// The data for the table in the root's status. For each write of the operator, the API server copies it entry by
/// entry, so that there are few. Names that nothing in Kubernetes has are left out.
pub fn data(root: &ShardingConfig) -> Option<Data> {
    let Version { uid, epoch } = version(root)?;
    let table = root.status.as_ref()?.ownership.as_ref()?;
    let Ownership { slots, namespaces, pod_uids, revoked, .. } = table;
    let owner = |slot: Slot| slots.get(&slot).filter(|owner| is_name(owner)).map_or("", String::as_str);
    let all_slots = (0..COUNT).filter_map(|number| Slot::try_from(i64::from(number)).ok());
    let slots = all_slots.flat_map(|slot| [owner(slot), ","]).collect();
    let entry = |begin: &str, name: &str, owner: &str| (format!("{begin}{name}"), owner.to_owned());
    let pinned = namespaces.iter().map(|(name, owner)| entry(NAMESPACE, name, owner));
    let revoked = revoked.iter().flat_map(|revoked| &revoked.namespaces);
    let revoked = revoked.map(|(name, owner)| entry(REVOKED, name, owner));
    let mut pods = BTreeMap::<&str, String>::new();
    for (pod, owner) in pod_uids.iter().filter(|(pod, _)| is_name(pod)) {
        let all = pods.entry(owner).or_insert_with(|| " ".to_owned());
        all.extend([pod, " "]);
    }
    let pods = pods.into_iter().map(|(owner, pods)| entry(PODS, owner, &pods));
    let all = pinned.chain(revoked).chain(pods).filter(|(key, _)| is_name(key));
    let of_all = [(EPOCH, epoch.to_string()), (UID, uid), (SLOTS, slots)];
    Some(all.chain(of_all.map(|(key, value)| (key.to_owned(), value))).collect())
}

/// The `ConfigMap`, in the version that was observed.
pub(super) fn config_map(namespace: &str, root: &str, home: &str, data: Data, observed: Option<String>) -> ConfigMap {
    let metadata = ObjectMeta {
        name: Some(object_name(namespace, root)),
        namespace: Some(home.to_owned()),
        labels: Some(labels(namespace, root)),
        resource_version: observed,
        ..ObjectMeta::default()
    };
    ConfigMap { metadata, data: Some(data), ..ConfigMap::default() }
}

/// Compares what is `there` with what is `wanted`.
pub(super) fn step(there: &Data, wanted: &Data) -> Step {
    let epoch = |data: &Data| data.get(EPOCH).and_then(|epoch| epoch.parse::<u64>().ok());
    if there == wanted {
        Step::Keep
    } else if there.get(UID) == wanted.get(UID) && epoch(there) > epoch(wanted) {
        Step::Yield
    } else {
        Step::Write
    }
}

/// Whether a `ConfigMap` may have it as a key (`IsConfigMapKey` of Kubernetes).
fn is_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    text.len() <= 253 && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::api::{ShardingConfigSpec, ShardingConfigStatus};
    use ctrlmesh_common::ownership::Revoked;

    use super::*;

    fn text(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn root(table: Option<Ownership>) -> ShardingConfig {
        let mut root = ShardingConfig::new("op", ShardingConfigSpec::default());
        root.metadata.uid = Some("u".to_owned());
        root.status = Some(ShardingConfigStatus { ownership: table, ..ShardingConfigStatus::default() });
        root
    }

    #[test]
    fn the_table_is_written_in_few_entries() {
        let revoked = Revoked { namespaces: text(&[("shop", "b")]), ..Revoked::default() };
        let slot = |number: i64| Slot::try_from(number).unwrap();
        let slots = [(slot(0), "b"), (slot(3), "a"), (slot(4), "no,name"), (slot(31), "b")];
        let table = Ownership {
            epoch: 7,
            slots: slots.map(|(slot, owner)| (slot, owner.to_owned())).into(),
            namespaces: text(&[("pay", "b")]),
            pods: text(&[("op-0", "a")]),
            pod_uids: text(&[("1-2", "a"), ("1-3", "b"), ("1-4", "a"), ("no key", "a"), ("1-5", "no key")]),
            revoked: Some(revoked),
        };
        let slots = format!("b,,,a,{}b,", ",".repeat(27));
        let expected = [
            ("epoch", "7"),
            ("uid", "u"),
            ("slots", &slots),
            ("namespace.pay", "b"),
            ("revoked.shop", "b"),
            ("pods.a", " 1-2 1-4 "),
            ("pods.b", " 1-3 "),
        ];
        assert_eq!(data(&root(Some(table))), Some(text(&expected)));
        assert_eq!(slots.matches(',').count(), 32);
        assert_eq!(data(&root(None)), None);
    }

    #[test]
    fn an_older_table_replaces_a_newer_one_only_of_another_root() {
        let table = |uid, epoch, owner| text(&[(UID, uid), (EPOCH, epoch), ("pods.1", owner)]);
        let wanted = table("u", "9", "a");
        for (there, expected) in [
            (wanted.clone(), Step::Keep),
            (table("u", "8", "a"), Step::Write),
            (table("u", "10", "a"), Step::Yield),
            (table("u", "9", "b"), Step::Write),
            (table("former", "99", "a"), Step::Write),
            (Data::new(), Step::Write),
        ] {
            assert_eq!(step(&there, &wanted), expected, "{there:?}");
        }
    }
}
