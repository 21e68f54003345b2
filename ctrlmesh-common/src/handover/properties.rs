use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::ownership::{Revoked, UNSHARDED};

const HASH: NamespaceHash = NamespaceHash::Fnv1a;

/// Of the slots 9, 9, 16 and 30.
const NAMESPACES: [&str; 4] = ["shop", "ctrlmesh", "ns-a", "default"];

const UIDS: [&str; 5] = ["p1", "p2", "p3", "p4", "p5"];

/// Those of the namespaces, and another.
fn slots() -> [Slot; 4] {
    [9, 16, 30, 31].map(|number: i64| Slot::try_from(number).unwrap())
}

fn slot() -> impl Strategy<Value = Slot> {
    select(slots().to_vec())
}

fn text(of: &'static [&'static str]) -> impl Strategy<Value = String> {
    select(of).prop_map(str::to_owned)
}

fn owner() -> impl Strategy<Value = String> {
    text(&["op-a", "op-a", "op-b", "op-b", "op-c", UNSHARDED])
}

/// What somebody may have written by hand, too.
fn any_owner() -> impl Strategy<Value = String> {
    prop_oneof![9 => owner(), 1 => Just(EVERY_OWNER.to_owned())]
}

fn epoch() -> impl Strategy<Value = u64> {
    prop_oneof![20 => 0..8_u64, 1 => select([MAX_EPOCH - 1, MAX_EPOCH, u64::MAX].as_slice())]
}

prop_compose! {
    fn any_revoked()(
        epoch in epoch(),
        slots in btree_map(slot(), any_owner(), 0..4),
        namespaces in btree_map(text(&NAMESPACES), any_owner(), 0..3),
        pod_uids in btree_map(text(&UIDS), any_owner(), 0..3),
    ) -> Revoked {
        Revoked { epoch, slots, namespaces, pod_uids }
    }
}

prop_compose! {
    /// Whatever can stand in a status.
    fn any_table()(
        epoch in epoch(),
        slots in btree_map(slot(), any_owner(), 0..5),
        namespaces in btree_map(text(&NAMESPACES), any_owner(), 0..4),
        pods in btree_map(text(&["op-0", "op-1"]), owner(), 0..3),
        pod_uids in btree_map(text(&UIDS), any_owner(), 0..5),
        revoked in option::of(any_revoked()),
    ) -> Ownership {
        Ownership { epoch, slots, namespaces, pods, pod_uids, revoked }
    }
}

prop_compose! {
    /// A table that was written before, in an epoch that leaves room, and that holds nothing twice.
    fn sound_table()(table in any_table(), epoch in 1..8_u64, behind in 0..8_u64) -> Ownership {
        let mut table = Ownership { epoch, ..table };
        if let Some(revoked) = &mut table.revoked {
            revoked.epoch = epoch.saturating_sub(behind).max(1);
            revoked.slots.retain(|slot, _| !table.slots.contains_key(slot));
            revoked.namespaces.retain(|name, _| !table.namespaces.contains_key(name));
            revoked.pod_uids.retain(|uid, _| !table.pod_uids.contains_key(uid));
        }
        table
    }
}

prop_compose! {
    fn desired()(
        owners in vec(owner(), 4),
        namespaces in btree_map(text(&NAMESPACES), owner(), 0..3),
        pods in btree_map(text(&["op-0", "op-1"]), owner(), 0..3),
        pod_uids in btree_map(text(&UIDS), owner(), 0..5),
        epoch in 0..8_u64,
        taken_up in any::<bool>(),
    ) -> Desired {
        Desired { slots: slots().into_iter().zip(owners).collect(), namespaces, pods, pod_uids, epoch, taken_up }
    }
}

prop_compose! {
    fn pod_evidence()(acknowledged in option::of(0..9_u64), gone in 0..8_u8, lapsed in 0..8_u8) -> PodEvidence {
        PodEvidence { acknowledged, gone: gone == 0, lapsed: lapsed == 0 }
    }
}

prop_compose! {
    fn evidence()(
        server in option::of(0..9_u64),
        pods in btree_map(text(&UIDS), pod_evidence(), 0..6),
    ) -> Evidence {
        Evidence { server: server.map_or(Server::None, Server::Enforces), pods }
    }
}

/// The evidence, as far as it can be there: it names no epoch that was not written.
fn until(epoch: u64, evidence: &Evidence) -> Evidence {
    let mut evidence = evidence.clone();
    if let Server::Enforces(enforced) = &mut evidence.server {
        *enforced = epoch.min(*enforced);
    }
    for pod in evidence.pods.values_mut() {
        pod.acknowledged = pod.acknowledged.map(|acknowledged| epoch.min(acknowledged));
    }
    evidence
}

/// Everything that can be shown about `table`. A pod that is not wanted is gone.
fn full(table: &Ownership, desired: &Desired, server: bool) -> Evidence {
    let revoked = table.revoked.iter().flat_map(|revoked| revoked.pod_uids.keys());
    let uids = table.pod_uids.keys().chain(revoked).chain(desired.pod_uids.keys());
    let shown = |uid: &String| PodEvidence {
        acknowledged: Some(table.epoch),
        gone: !desired.pod_uids.contains_key(uid),
        lapsed: false,
    };
    let pods = uids.map(|uid| (uid.clone(), shown(uid))).collect();
    Evidence { server: if server { Server::Enforces(table.epoch) } else { Server::None }, pods }
}

/// A slot by itself, and one namespace of each.
fn objects() -> impl Iterator<Item = (Slot, Option<&'static str>)> {
    let namespaced = NAMESPACES.map(|name| (HASH.slot(name), Some(name)));
    slots().into_iter().map(|slot| (slot, None)).chain(namespaced)
}

/// The owner that `desired` wants for an object.
fn goal(desired: &Desired, slot: Slot, namespace: Option<&str>) -> Option<String> {
    let pin = namespace.and_then(|name| desired.namespaces.get(name));
    pin.or_else(|| desired.slots.get(&slot)).cloned()
}

/// Whether the evidence proves that `former` has lost to `new` what `before` has revoked, by the rules read once more.
fn proves(before: &Ownership, former: &str, new: &str, evidence: &Evidence) -> bool {
    let Some(revoked) = &before.revoked else { return false };
    let gone = |uid: &String| evidence.pods.get(uid).is_some_and(|pod| pod.gone);
    if before.pod_uids.keys().chain(revoked.pod_uids.keys()).all(gone) {
        return (1..=before.epoch).contains(&revoked.epoch);
    }
    let fenced = match evidence.server {
        Server::None => false,
        Server::Enforces(epoch) if epoch >= revoked.epoch => true,
        Server::Enforces(_) => return false,
    };
    let pods = before.pod_uids.iter().chain(&revoked.pod_uids);
    let others = pods.filter(|(_, owner)| *owner != new);
    let mut writers = others.filter(|(_, owner)| *owner == former || former.is_empty() || owner.is_empty());
    (1..=before.epoch).contains(&revoked.epoch)
        && writers.all(|(uid, owner)| {
            let shown = evidence.pods.get(uid).copied().unwrap_or_default();
            let stopped = shown.lapsed || shown.acknowledged.is_some_and(|epoch| epoch >= revoked.epoch);
            shown.gone || if owner == UNSHARDED { fenced } else { stopped }
        })
}

/// Whether the object may get the owner `new`, which it did not have in `before`.
fn may_be_granted(
    before: &Ownership,
    after: &Ownership,
    slot: Slot,
    namespace: Option<&str>,
    new: &str,
    evidence: &Evidence,
) -> bool {
    let Some(revoked) = &before.revoked else { return false };
    let is_proved = |former: Option<&String>| former.is_some_and(|former| proves(before, former, new, evidence));
    let by_slot = || {
        let kept = before.slots.get(&slot).is_some_and(|owner| owner == new);
        kept || !before.slots.contains_key(&slot) && is_proved(revoked.slots.get(&slot))
    };
    let Some(name) = namespace else { return by_slot() };
    let pinned = after.namespaces.contains_key(name);
    match revoked.namespaces.get(name) {
        Some(former) => !before.namespaces.contains_key(name) && is_proved(Some(former)) && (pinned || by_slot()),
        None => !before.namespaces.contains_key(name) && by_slot(),
    }
}

fn content(table: &Ownership) -> Ownership {
    Ownership { epoch: 0, ..table.clone() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_granted_without_proof(before in any_table(), desired in desired(), evidence in evidence()) {
        let after = next(&before, &desired, HASH, &evidence).table;
        let fresh = before == Ownership::default() && desired.epoch == 0 && !desired.taken_up;
        for (slot, namespace) in objects().filter(|_| !fresh) {
            let Some(new) = after.owner(slot, namespace) else { continue };
            if before.owner(slot, namespace) != Some(new) {
                let proved = may_be_granted(&before, &after, slot, namespace, new, &evidence);
                prop_assert!(proved, "{slot} {namespace:?} to {new}: {after:?}");
            }
        }
    }

    #[test]
    fn no_pod_changes_its_owner_without_proof(before in any_table(), desired in desired(), evidence in evidence()) {
        let after = next(&before, &desired, HASH, &evidence).table;
        let revoked = before.revoked.clone().unwrap_or_default();
        for (uid, new) in &after.pod_uids {
            let shown = evidence.pods.get(uid).copied().unwrap_or_default();
            match (before.pod_uids.get(uid), revoked.pod_uids.get(uid)) {
                (Some(owner), None) => prop_assert_eq!(owner, new),
                (None, Some(former)) => {
                    let stopped = shown.lapsed || shown.acknowledged.is_some_and(|epoch| epoch >= revoked.epoch);
                    let enforced = !matches!(evidence.server, Server::Enforces(epoch) if epoch < revoked.epoch);
                    let without_proxy = former == UNSHARDED && evidence.server != Server::None;
                    prop_assert!(enforced && (former == new || without_proxy || former != UNSHARDED && stopped));
                }
                (Some(_), Some(_)) => prop_assert_eq!(&after, &before, "only where no epoch is left"),
                (None, None) => prop_assert_eq!(desired.pod_uids.get(uid), Some(new)),
            }
        }
    }

    #[test]
    fn a_pod_leaves_only_when_it_is_gone(before in any_table(), desired in desired(), evidence in evidence()) {
        let after = next(&before, &desired, HASH, &evidence).table;
        let known = |table: &Ownership, uid: &str| {
            let revoked = table.revoked.as_ref().is_some_and(|revoked| revoked.pod_uids.contains_key(uid));
            revoked || table.pod_uids.contains_key(uid)
        };
        for uid in UIDS.iter().filter(|uid| known(&before, uid) && !known(&after, uid)) {
            prop_assert!(evidence.pods[*uid].gone);
        }
    }

    #[test]
    fn nothing_is_owned_and_revoked_at_once(before in any_table(), desired in desired(), evidence in evidence()) {
        let Step { table, waiting } = next(&before, &desired, HASH, &evidence);
        if let (Some(revoked), false) = (&table.revoked, waiting == [Waiting::Epoch]) {
            prop_assert!(!revoked.slots.keys().any(|slot| table.slots.contains_key(slot)));
            prop_assert!(!revoked.namespaces.keys().any(|name| table.namespaces.contains_key(name)));
            prop_assert!(!revoked.pod_uids.keys().any(|uid| table.pod_uids.contains_key(uid)));
            prop_assert!((1..=table.epoch).contains(&revoked.epoch));
        }
    }

    #[test]
    fn the_epoch_grows_exactly_with_the_content(
        before in any_table(),
        desired in desired(),
        evidence in evidence(),
    ) {
        let after = next(&before, &desired, HASH, &evidence).table;
        if content(&before) == content(&after) {
            prop_assert_eq!(after.epoch, before.epoch);
        } else {
            let revoked = before.revoked.map_or(0, |revoked| revoked.epoch);
            prop_assert!(after.epoch > before.epoch.max(desired.epoch).max(revoked));
        }
    }

    #[test]
    fn a_table_that_revokes_nothing_anew_stays(
        before in any_table(),
        desired in desired(),
        evidence in evidence(),
    ) {
        let evidence = until(before.epoch, &evidence);
        let after = next(&before, &desired, HASH, &evidence);
        prop_assert_eq!(&after, &next(&before, &desired, HASH, &evidence), "the same input");
        if after.table.revoked.as_ref().is_none_or(|revoked| revoked.epoch < after.table.epoch) {
            prop_assert_eq!(next(&after.table, &desired, HASH, &evidence), after);
        }
    }

    #[test]
    fn with_full_evidence_two_tables_lead_to_the_goal(
        before in any_table(),
        mut desired in desired(),
        server: bool,
    ) {
        prop_assume!(before.epoch < 8 && before.revoked.as_ref().is_none_or(|revoked| revoked.epoch < 8));
        if !server {
            // No unsharded pod is left.
            let revoked = before.revoked.clone().unwrap_or_default();
            let former = |uid: &String| before.pod_uids.get(uid).or(revoked.pod_uids.get(uid));
            desired.pod_uids.retain(|uid, owner| owner != UNSHARDED && former(uid).is_none_or(|one| one != UNSHARDED));
        }
        let mut table = before;
        for _ in 0..2 {
            let evidence = full(&table, &desired, server);
            table = next(&table, &desired, HASH, &evidence).table;
        }
        let last = next(&table, &desired, HASH, &full(&table, &desired, server));
        prop_assert_eq!((&last.table, last.waiting), (&table, vec![]));
        let Ownership { slots, namespaces, pods, pod_uids, revoked, .. } = table;
        prop_assert_eq!(Desired { slots, namespaces, pods, pod_uids, ..desired.clone() }, desired);
        prop_assert_eq!(revoked, None);
    }

    #[test]
    fn what_has_its_owner_already_does_not_move(
        before in sound_table(),
        desired in desired(),
        evidence in evidence(),
    ) {
        let after = next(&before, &desired, HASH, &evidence).table;
        for (slot, namespace) in objects() {
            let owner = before.owner(slot, namespace);
            if owner.is_some() && owner == goal(&desired, slot, namespace).as_deref() {
                prop_assert_eq!(after.owner(slot, namespace), owner, "{} {:?}: {:?}", slot, namespace, &after);
            }
        }
    }
}
