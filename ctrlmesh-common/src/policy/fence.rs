//! Decides which objects a pod may write.
//!
//! The fence is a copy of the operator's ownership table, with the one owner for whom the pod writes. It knows an
//! object by namespace and name alone, so that a proxy can decide by the path of a request.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ownership::{Ownership, STANDBY};
use crate::resource::{ResourceMatch, WILDCARD};
use crate::slots::{NamespaceHash, Slot, SlotSet};

/// How long the manager's confirmation of a policy that lapses is valid, from when it was asked for.
pub const CONFIRMED_FOR: Duration = Duration::from_secs(15);

/// How long after that a write may still be under way. Then the proxy cuts it.
pub const WRITES_END_WITHIN: Duration = Duration::from_secs(5);

/// How long after its last confirmation a policy has lapsed for certain: no write under it can pass. Two seconds more,
/// for clocks that do not run alike.
pub const LAPSED_AFTER: Duration =
    CONFIRMED_FOR.saturating_add(WRITES_END_WITHIN).saturating_add(Duration::from_secs(2));

/// Kinds that every pod of an operator writes, wherever it is, by API group and resource. A fence holds for them only
/// where it names them: a wildcard does not.
const COMMON_KINDS: [(&str, &str); 3] =
    [("", "events"), ("events.k8s.io", "events"), ("coordination.k8s.io", "leases")];

/// API groups of which a write stores no object. A fence holds for their kinds only where it names them.
pub const VIRTUAL_GROUPS: [&str; 2] = ["authentication.k8s.io", "authorization.k8s.io"];

/// Which objects a pod may write.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fence {
    /// The ShardingConfig whose ownership table this is, as `NAMESPACE/NAME`; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub operator: String,
    /// The owner for whom the pod writes. Absent: the pod may write nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// How a name becomes a slot.
    #[serde(default)]
    pub hash: NamespaceHash,
    /// The owner of each slot. A slot that is missing belongs to nobody.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub slots: BTreeMap<Slot, String>,
    /// The owner of each namespace that is pinned; here the slot of its name does not count.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub namespaces: BTreeMap<String, String>,
    /// Namespaces that belong to nobody, whatever slot or pin says.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub revoked: BTreeSet<String>,
    /// The kinds that are fenced; none at all means every kind.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub resources: Vec<ResourceMatch>,
    /// Whether writes to the fenced kinds pass only while the manager confirms the policy.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lapses: bool,
    /// Whether the pod's proxy counts requests by slot, where it reports what they come to.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub counts_slots: bool,
}

/// Whether a write may pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// The kind is not fenced.
    Unfenced,
    /// The object is the pod's to write.
    Owned(Slot),
    /// The path names no object and no namespace, so it does not tell the slot.
    Unknown,
    /// The object is not the pod's to write.
    Refused(NotOwned),
}

/// Says to whom an object belongs that a pod may not write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotOwned {
    /// The slot of the object.
    pub slot: Slot,
    /// Whose the object is; `None` while it belongs to nobody.
    pub owner: Option<String>,
    /// For whom the pod writes; `None` while it may write nothing.
    pub pod_owner: Option<String>,
}

impl Fence {
    /// The fence, by an operator's `table`, of the pod with this UID.
    pub fn of(table: &Ownership, uid: &str, hash: NamespaceHash, resources: Vec<ResourceMatch>) -> Self {
        let revoked = table.revoked.iter().flat_map(|revoked| revoked.namespaces.keys());
        Self {
            operator: String::new(),
            owner: table.pod_uids.get(uid).filter(|owner| *owner != STANDBY).cloned(),
            hash,
            slots: table.slots.clone(),
            namespaces: table.namespaces.clone(),
            revoked: revoked.cloned().collect(),
            resources,
            lapses: false,
            counts_slots: false,
        }
    }

    /// Whether writes to `resource` of the API group `group` are fenced.
    pub fn covers(&self, group: &str, resource: &str) -> bool {
        if COMMON_KINDS.contains(&(group, resource)) || VIRTUAL_GROUPS.contains(&group) {
            return self.names(group, resource);
        }
        self.resources.is_empty() || self.resources.iter().any(|one| one.covers_objects(group, resource))
    }

    /// Whether `resource` is fenced by its name, and not by a wildcard.
    pub fn names(&self, group: &str, resource: &str) -> bool {
        let named = |one: &ResourceMatch| one.resources.iter().any(|name| name == resource);
        self.resources.iter().any(|one| named(one) && one.covers_objects(group, resource))
    }

    /// Whether each kind that `later` fences is fenced here, too. What a wildcard of `later` stands for is known only
    /// where it stands here as well. No list is every kind, but for those that have to be named.
    pub fn covers_kinds_of(&self, later: &Self) -> bool {
        let is_listed = |group: &String, resource: &String| {
            self.resources.iter().any(|one| one.api_groups.contains(group) && one.resources.contains(resource))
        };
        let is_word = |text: &String| text != WILDCARD;
        let covers = |group: &String, resource: &String| {
            is_listed(group, resource) || is_word(group) && is_word(resource) && self.covers(group, resource)
        };
        let covers_all = |kinds: &ResourceMatch| {
            kinds.api_groups.iter().all(|group| kinds.resources.iter().all(|resource| covers(group, resource)))
        };
        self.resources == later.resources || !later.resources.is_empty() && later.resources.iter().all(covers_all)
    }

    /// Whether a write to an object may pass. `namespace` is empty for an object of cluster scope, and `name` where the
    /// request does not name an object.
    pub fn access(&self, (group, resource): (&str, &str), namespace: &str, name: &str) -> Access {
        if !self.covers(group, resource) {
            return Access::Unfenced;
        }
        // A namespace is in itself.
        let namespace = if (group, resource) == ("", "namespaces") { name } else { namespace };
        let named = if namespace.is_empty() { name } else { namespace };
        if named.is_empty() {
            return Access::Unknown;
        }
        let slot = self.hash.slot(named);
        let owner = self.owner_of(slot, namespace);
        if owner.is_some() && owner == self.owner.as_deref() {
            return Access::Owned(slot);
        }
        Access::Refused(NotOwned { slot, owner: owner.map(str::to_owned), pod_owner: self.owner.clone() })
    }

    /// The slot of an object, where the pod owns it by its slot. An object in a namespace counts whatever its kind is,
    /// and one of cluster scope if its kind is fenced. `None` also where the namespace is pinned.
    pub fn owned_slot(&self, (group, resource): (&str, &str), namespace: &str, name: &str) -> Option<Slot> {
        let is_namespace = (group, resource) == ("", "namespaces");
        let namespace = if is_namespace { name } else { namespace };
        if namespace.is_empty() && (name.is_empty() || !self.covers(group, resource)) {
            return None;
        }
        let slot = self.hash.slot(if namespace.is_empty() { name } else { namespace });
        let is_pinned = self.namespaces.contains_key(namespace);
        let owner = self.owner_of(slot, namespace).filter(|_| !is_pinned);
        (owner.is_some() && owner == self.owner.as_deref()).then_some(slot)
    }

    /// The slots of which the pod can write some object here that it may not write by `after`; all of them where the
    /// two do not compare. New kinds in `after` do not count.
    pub fn taken_by(&self, after: &Self) -> SlotSet {
        if self.hash != after.hash {
            return SlotSet::ALL;
        }
        let owns = |fence: &Self, slot, namespace: &str| {
            let owner = fence.owner_of(slot, namespace);
            owner.is_some() && owner == fence.owner.as_deref()
        };
        let lost = |slot, namespace: &str| owns(self, slot, namespace) && !owns(after, slot, namespace);
        let slots = SlotSet::ALL.iter().filter(|slot| lost(*slot, ""));
        let named = [self, after].into_iter().flat_map(|fence| fence.namespaces.keys().chain(&fence.revoked));
        let named = named.map(|namespace| (self.hash.slot(namespace), namespace));
        slots.chain(named.filter(|(slot, namespace)| lost(*slot, namespace)).map(|(slot, _)| slot)).collect()
    }

    /// The owner of the objects of `slot` in `namespace`, which is empty for objects of cluster scope.
    fn owner_of(&self, slot: Slot, namespace: &str) -> Option<&str> {
        if namespace.is_empty() {
            return self.slots.get(&slot).map(String::as_str);
        }
        if self.revoked.contains(namespace) {
            return None;
        }
        self.namespaces.get(namespace).or_else(|| self.slots.get(&slot)).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ownership::Revoked;

    const WIDGETS: (&str, &str) = ("example.com", "widgets");

    fn resources(group: &str, resource: &str) -> ResourceMatch {
        ResourceMatch { api_groups: vec![group.to_owned()], resources: vec![resource.to_owned()] }
    }

    /// `a` owns the slot of `ns-a` and all but one of the others, `b` owns that of `kube-public`; `shop` is pinned to
    /// `b`, and `moving` is taken away.
    fn table() -> Ownership {
        let hash = NamespaceHash::default();
        let owner = |slot| if slot == hash.slot("kube-public") { "b" } else { "a" };
        let mut slots: BTreeMap<Slot, String> =
            SlotSet::ALL.iter().map(|slot| (slot, owner(slot).to_owned())).collect();
        slots.remove(&hash.slot("nobody"));
        Ownership {
            epoch: 4,
            slots,
            namespaces: [("shop".to_owned(), "b".to_owned())].into(),
            pod_uids: [("u-a".to_owned(), "a".to_owned()), ("u-b".to_owned(), "b".to_owned())].into(),
            revoked: Some(Revoked {
                epoch: 4,
                namespaces: [("moving".to_owned(), "a".to_owned())].into(),
                ..Revoked::default()
            }),
            ..Ownership::default()
        }
    }

    fn fence(uid: &str) -> Fence {
        Fence::of(&table(), uid, NamespaceHash::default(), vec![resources("example.com", "widgets")])
    }

    #[test]
    fn a_pod_writes_what_its_owner_owns() {
        for (uid, namespace, name, passes) in [
            ("u-a", "ns-a", "w", true),
            ("u-b", "ns-a", "w", false),
            ("u-a", "kube-public", "w", false),
            ("u-b", "kube-public", "w", true),
            // A pin counts before the slot, and only for the namespace.
            ("u-a", "shop", "w", false),
            ("u-b", "shop", "w", true),
            ("u-a", "", "shop", true),
            // What is taken away or missing belongs to nobody.
            ("u-a", "moving", "w", false),
            ("u-a", "nobody", "w", false),
            ("u-b", "nobody", "w", false),
            // Cluster scope goes by the object's name.
            ("u-a", "", "ns-a", true),
            ("u-a", "", "kube-public", false),
            // A pod that is missing in the table writes nothing.
            ("u-c", "ns-a", "w", false),
            ("u-c", "nobody", "w", false),
        ] {
            let access = fence(uid).access(WIDGETS, namespace, name);
            assert_eq!(matches!(access, Access::Owned(_)), passes, "{uid} {namespace}/{name}: {access:?}");
            assert_eq!(matches!(access, Access::Refused(_)), !passes, "{uid} {namespace}/{name}: {access:?}");
        }
        assert_eq!(fence("u-a").access(WIDGETS, "", ""), Access::Unknown);
        assert_eq!(fence("u-a").access(("", "pods"), "kube-public", "p"), Access::Unfenced);
    }

    #[test]
    fn a_refusal_says_whose_the_object_is() {
        let refused = |namespace| match fence("u-a").access(WIDGETS, namespace, "w") {
            Access::Refused(refused) => refused,
            access => panic!("{namespace}: {access:?}"),
        };
        let slot = NamespaceHash::default().slot("shop");
        let owner = |name: &str| Some(name.to_owned());
        assert_eq!(refused("shop"), NotOwned { slot, owner: owner("b"), pod_owner: owner("a") });
        assert_eq!(refused("moving").owner, None);
        assert_eq!(refused("nobody").owner, None);
    }

    #[test]
    fn a_slot_is_owned_unless_its_namespace_is_pinned_or_moves() {
        let slot = |name| Some(NamespaceHash::default().slot(name));
        for (kind, namespace, name, expected) in [
            (WIDGETS, "ns-a", "w", slot("ns-a")),
            (("", "configmaps"), "ns-a", "", slot("ns-a")),
            (("", "namespaces"), "", "ns-a", slot("ns-a")),
            (WIDGETS, "", "ns-a", slot("ns-a")),
            // Neither its kind nor a namespace says that it is divided.
            (("", "nodes"), "", "ns-a", None),
            (WIDGETS, "", "", None),
            (WIDGETS, "kube-public", "w", None),
            (WIDGETS, "moving", "w", None),
            (WIDGETS, "nobody", "w", None),
        ] {
            assert_eq!(fence("u-a").owned_slot(kind, namespace, name), expected, "{kind:?} {namespace}/{name}");
        }
        assert_eq!(fence("u-b").owned_slot(WIDGETS, "shop", "w"), None, "it is pinned");
    }

    #[test]
    fn a_namespace_is_in_itself() {
        let mut fence = fence("u-a");
        fence.resources = vec![resources("", "namespaces")];
        let namespaces = ("", "namespaces");
        assert!(matches!(fence.access(namespaces, "shop", "shop"), Access::Refused(_)));
        assert!(matches!(fence.access(namespaces, "ns-a", "ns-a"), Access::Owned(_)));
        assert_eq!(fence.access(namespaces, "", ""), Access::Unknown);
    }

    #[test]
    fn kinds_that_every_pod_writes_are_fenced_by_name_only() {
        let covers = |resources: &[ResourceMatch], (group, resource): (&str, &str)| {
            Fence { resources: resources.to_vec(), ..Fence::default() }.covers(group, resource)
        };
        for kind in [
            ("", "events"),
            ("events.k8s.io", "events"),
            ("coordination.k8s.io", "leases"),
            ("authentication.k8s.io", "tokenreviews"),
            ("authorization.k8s.io", "subjectaccessreviews"),
        ] {
            assert!(!covers(&[], kind), "{kind:?}");
            assert!(!covers(&[resources("*", "*")], kind), "{kind:?}");
            assert!(!covers(&[resources(kind.0, "*")], kind), "{kind:?}");
            assert!(covers(&[resources(kind.0, kind.1)], kind), "{kind:?}");
        }
        assert!(covers(&[], ("", "pods")) && covers(&[resources("*", "*")], ("", "pods")));
    }

    #[test]
    fn what_a_later_fence_takes_away_is_known_by_slot() {
        let hash = NamespaceHash::default();
        let slots = |names: &[&str]| names.iter().map(|name| hash.slot(name)).collect::<SlotSet>();
        let before = fence("u-a");
        assert_eq!(before.taken_by(&before), SlotSet::EMPTY);
        let mut after = before.clone();
        after.slots.remove(&hash.slot("ns-a"));
        assert_eq!(before.taken_by(&after), slots(&["ns-a"]));
        assert_eq!(after.taken_by(&before), SlotSet::EMPTY);
        // A new pin, and one more namespace that is revoked.
        let mut after = before.clone();
        after.namespaces.insert("pay".to_owned(), "b".to_owned());
        after.revoked.insert("web".to_owned());
        assert_eq!(before.taken_by(&after), slots(&["pay", "web"]));
        // A pod that may write nothing any more, and another hash.
        let owned = SlotSet::ALL.intersection(slots(&["kube-public", "nobody"]).complement());
        assert_eq!(before.taken_by(&Fence { owner: None, ..before.clone() }), owned);
        assert_eq!(before.taken_by(&Fence { hash: NamespaceHash::Kusionstack, ..before.clone() }), SlotSet::ALL);
    }

    #[cfg(feature = "api")]
    #[test]
    fn a_fence_travels_as_json() {
        let fence = fence("u-a");
        let text = serde_json::to_string(&fence).unwrap();
        assert_eq!(serde_json::from_str::<Fence>(&text).unwrap(), fence);
        assert!(text.contains(r#""hash":"fnv1a""#) && !text.contains("lapses"), "{text}");
        let lapsing = Fence { lapses: true, ..fence };
        let text = serde_json::to_string(&lapsing).unwrap();
        assert_eq!(serde_json::from_str::<Fence>(&text).unwrap(), lapsing);
        assert!(serde_json::from_str::<Fence>(r#"{"fromTomorrow": 1}"#).is_err());
    }
}
