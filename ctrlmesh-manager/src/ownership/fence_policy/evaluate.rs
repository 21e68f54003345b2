//! Says what the API server answers to a write of a pod, by the policy that [`Fence`] builds and a table.
//!
//! Pure. The API server evaluates the expressions of the policy; this follows them part by part, for people who ask
//! what it would say. A test with a real API server compares both.

use ctrlmesh_common::names::{self, GROUP};
use ctrlmesh_common::slots::COUNT;
use regex::Regex;

use super::pod_names::pattern;
use super::resources::{self, LOCKS, ROOTS, are_matched};
use super::{Fence, NO_SLOT, NOBODY, REFUSAL};
use crate::ownership::fence_table::{Data, EPOCH, NAMESPACE, PODS, REVOKED, SLOTS};

/// A write of a pod that is no dry run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodWrite<'a> {
    pub group: &'a str,
    pub resource: &'a str,
    /// Empty where the object itself is written.
    pub subresource: &'a str,
    /// Empty for an object of cluster scope.
    pub namespace: &'a str,
    /// Empty where the API server makes the name.
    pub name: &'a str,
    /// The value of the label with the slot: that of the namespace, or of an object of cluster scope its own.
    pub slot: Option<&'a str>,
    pub pod: &'a str,
    pub uid: &'a str,
    pub account: &'a str,
}

/// What the API server answers, as far as the fence goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Evaluation {
    /// The policy does not hold for the write.
    Exempt(Exemption),
    Allowed,
    /// The message of the policy. The API server puts its own words before it.
    Refused(String),
    /// The label is no slot. The API server refuses what it cannot evaluate.
    Failed,
}

/// Why a fence does not hold for a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exemption {
    /// The kind is not fenced.
    Kind,
    /// It is the leader-election lock, which every pod writes.
    Lock,
    /// The pod has another service account than the workload, or a name that the workload gives to none.
    Pod,
}

impl Fence {
    /// What the API server answers to `write`, by the table with this `data`.
    pub fn evaluate(&self, write: &PodWrite<'_>, data: &Data) -> Evaluation {
        if let Some(exemption) = self.exemption(write) {
            return Evaluation::Exempt(exemption);
        }
        let Some(owner) = self.owner_in(write, data) else { return Evaluation::Failed };
        let caller = format!(" {} ", write.uid);
        if data.get(&format!("{PODS}{owner}")).is_some_and(|pods| pods.contains(&caller)) {
            return Evaluation::Allowed;
        }
        let or_nobody = |owner: String| if owner.is_empty() { NOBODY.to_owned() } else { owner };
        let writers = data.iter().filter(|(key, pods)| key.starts_with(PODS) && pods.contains(&caller));
        let writers: Vec<&str> = writers.map(|(key, _)| &key[PODS.len()..]).collect();
        let place =
            if write.namespace.is_empty() { String::new() } else { format!("namespace {} in ", write.namespace) };
        let epoch = data.get(EPOCH).map_or("", String::as_str);
        let values =
            [write.slot.unwrap_or(NO_SLOT), &or_nobody(owner), write.pod, &or_nobody(writers.join(", ")), epoch];
        let said = REFUSAL.iter().zip(values).flat_map(|(words, value)| [*words, value]);
        Evaluation::Refused(place + &said.collect::<String>())
    }

    /// `None` where the fence holds for the write.
    fn exemption(&self, write: &PodWrite<'_>) -> Option<Exemption> {
        let PodWrite { group, resource, subresource, namespace, name, pod, account, .. } = *write;
        let is_of_workload =
            || Regex::new(&pattern(&self.workload)).is_ok_and(|pattern| pattern.is_match(pod)) && self.has(account);
        if !are_matched(&self.limited, group, resource, subresource)
            || resource == ROOTS && !resources::covers(&self.limited, GROUP, ROOTS)
        {
            return Some(Exemption::Kind);
        }
        let covered = |(group, plural): &(&str, &str)| resources::covers(&self.limited, group, plural);
        let is_lock = |lock: &String| {
            LOCKS.iter().filter(|one| covered(one)).any(|(_, plural)| *plural == resource)
                && namespace == self.namespace
                && (name == lock || name.starts_with(&names::lock(lock, "")))
        };
        if self.lock.as_ref().is_some_and(is_lock) {
            return Some(Exemption::Lock);
        }
        (!is_of_workload()).then_some(Exemption::Pod)
    }

    fn has(&self, account: &str) -> bool {
        self.accounts.contains(account)
    }

    /// The object's owner; empty where it is nobody's. `None` where the label is no slot.
    fn owner_in(&self, write: &PodWrite<'_>, data: &Data) -> Option<String> {
        let is_namespace = write.namespace.is_empty()
            && write.resource == "namespaces"
            && resources::covers(&self.limited, "", "namespaces");
        let namespace = if is_namespace { write.name } else { write.namespace };
        if data.contains_key(&format!("{REVOKED}{namespace}")) {
            return Some(String::new());
        }
        if let Some(owner) = data.get(&format!("{NAMESPACE}{namespace}")) {
            return Some(owner.clone());
        }
        let number = write.slot.map_or(Ok(usize::from(COUNT)), str::parse).ok()?;
        data.get(SLOTS)?.split(',').nth(number).map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use ctrlmesh_common::api::RelatedResources;
    use ctrlmesh_common::names::label;

    use super::super::Workload;
    use super::*;

    fn kinds(group: &str, plural: &str) -> RelatedResources {
        RelatedResources { api_groups: vec![group.to_owned()], resources: vec![plural.to_owned()] }
    }

    fn fence(limited: Vec<RelatedResources>) -> Fence {
        Fence {
            home: "ctrlmesh-system".to_owned(),
            namespace: "ops".to_owned(),
            root: "op".to_owned(),
            uid: "u".to_owned(),
            workload: Workload::StatefulSet("op".to_owned()),
            accounts: ["robot".to_owned()].into(),
            limited,
            lock: Some("lock".to_owned()),
            hash_key: label::SHARDING_HASH.to_owned(),
        }
    }

    /// Pod `u-0` writes for `a`, which owns slot 7; `u-1` writes for `b`, which owns slot 8 and namespace `pinned`.
    fn table() -> Data {
        let owner = |slot| match slot {
            7 => "a,",
            8 => "b,",
            _ => ",",
        };
        let slots: String = (0..COUNT).map(owner).collect();
        let entries = [
            (EPOCH, "3"),
            (SLOTS, &slots),
            ("namespace.pinned", "b"),
            ("revoked.moving", "a"),
            ("pods.a", " u-0 "),
            ("pods.b", " u-1 u-2 "),
        ];
        entries.map(|(key, value)| (key.to_owned(), value.to_owned())).into_iter().collect::<BTreeMap<_, _>>()
    }

    fn write<'a>(namespace: &'a str, slot: Option<&'a str>) -> PodWrite<'a> {
        PodWrite {
            group: "",
            resource: "configmaps",
            subresource: "",
            namespace,
            name: "object",
            slot,
            pod: "op-0",
            uid: "u-0",
            account: "robot",
        }
    }

    fn says(namespace: &str, slot: Option<&str>) -> Evaluation {
        fence(vec![kinds("", "configmaps")]).evaluate(&write(namespace, slot), &table())
    }

    #[test]
    fn a_pod_writes_for_its_owner_only() {
        assert_eq!(says("shop", Some("7")), Evaluation::Allowed);
        let refused = |text: &str| Evaluation::Refused(text.to_owned());
        let other = "namespace shop in slot 8 belongs to b, and pod op-0 writes for a, by epoch 3";
        assert_eq!(says("shop", Some("8")), refused(other));
        let pinned = "namespace pinned in slot 7 belongs to b, and pod op-0 writes for a, by epoch 3";
        assert_eq!(says("pinned", Some("7")), refused(pinned));
        let moving = "namespace moving in slot 7 belongs to nobody, and pod op-0 writes for a, by epoch 3";
        assert_eq!(says("moving", Some("7")), refused(moving));
        let unlabelled = "namespace shop in slot none belongs to nobody, and pod op-0 writes for a, by epoch 3";
        assert_eq!(says("shop", None), refused(unlabelled));
        let cluster = "slot 9 belongs to nobody, and pod op-0 writes for a, by epoch 3";
        assert_eq!(says("", Some("9")), refused(cluster));
        assert_eq!(says("shop", Some("x")), Evaluation::Failed);
        assert_eq!(says("shop", Some("99")), Evaluation::Failed);
        let stranger = PodWrite { uid: "u-9", ..write("shop", Some("7")) };
        let said = fence(Vec::new()).evaluate(&stranger, &table());
        assert_eq!(said, refused("namespace shop in slot 7 belongs to a, and pod op-0 writes for nobody, by epoch 3"));
    }

    #[test]
    fn what_the_policy_does_not_match_is_exempt() {
        let maps = fence(vec![kinds("", "configmaps")]);
        let other = write("shop", Some("8"));
        let exempt = |fence: &Fence, write: PodWrite<'_>| match fence.evaluate(&write, &table()) {
            Evaluation::Exempt(exemption) => Some(exemption),
            _ => None,
        };
        assert_eq!(exempt(&maps, PodWrite { resource: "secrets", ..other }), Some(Exemption::Kind));
        assert_eq!(exempt(&maps, PodWrite { subresource: "status", ..other }), None, "subresources are fenced, too");
        for name in ["lock", "lock---a"] {
            let lock = PodWrite { namespace: "ops", name, ..other };
            assert_eq!(exempt(&maps, lock), Some(Exemption::Lock), "{name}");
            assert_eq!(exempt(&maps, PodWrite { namespace: "shop", ..lock }), None, "another namespace's");
        }
        assert_eq!(exempt(&maps, PodWrite { pod: "agent-0", ..other }), Some(Exemption::Pod));
        assert_eq!(exempt(&maps, PodWrite { account: "other", ..other }), Some(Exemption::Pod));
    }

    #[test]
    fn a_wildcard_leaves_out_what_the_rules_leave_out() {
        let of = |limited: &[RelatedResources], group, plural, sub| are_matched(limited, group, plural, sub);
        for wildcard in [Vec::new(), vec![kinds("*", "*")]] {
            assert!(of(&wildcard, "", "pods", "") && of(&wildcard, "", "pods", "status"));
            for (group, plural, sub) in [
                ("coordination.k8s.io", "leases", ""),
                ("", "events", ""),
                ("", "serviceaccounts", "token"),
                ("authorization.k8s.io", "subjectaccessreviews", ""),
            ] {
                assert!(!of(&wildcard, group, plural, sub), "{group} {plural} {sub}");
            }
        }
        assert!(of(&[kinds("coordination.k8s.io", "leases")], "coordination.k8s.io", "leases", ""));
        let both = [kinds("*", "*"), kinds("coordination.k8s.io", "leases")];
        assert!(of(&both, "coordination.k8s.io", "leases", "") && !of(&both, "", "events", ""));
    }
}
