//! Says for people who owns an object.
//!
//! Pure.

use ctrlmesh_common::ownership::UNSHARDED;
use jiff::Timestamp;

use super::owners::{Object, Owners, RootOwner, Rule};
use crate::status::overview::PodOverview;
use crate::text::{described, table};

/// One screen about an object.
pub(super) fn screen(owners: &Owners, now: Timestamp) -> String {
    let Object { group, resource, namespace, name, .. } = &owners.object;
    let dot = if group.is_empty() { "" } else { "." };
    let path = namespace.as_ref().map_or_else(|| name.clone(), |namespace| format!("{namespace}/{name}"));
    let labels = if owners.missing_labels.is_empty() {
        "it has those by which shards see it".to_owned()
    } else {
        format!("no shard sees it before it has {}", owners.missing_labels.join(" and "))
    };
    let object = ("Object", format!("{resource}{dot}{group} {path}"));
    if owners.roots.is_empty() {
        let nothing = "No root divides it. Shards by hand may limit it: see `kubectl get shardingconfigs -A`.";
        return format!("{}\n{nothing}\n", described(&[object]));
    }
    let fields = [object, ("Slot", owners.slot.to_string()), ("Labels", labels)];
    let roots = owners.roots.iter().map(|root| format!("\n{}", of_root(root, owners, now)));
    described(&fields) + &roots.collect::<Vec<_>>().concat()
}

fn of_root(root: &RootOwner, owners: &Owners, now: Timestamp) -> String {
    let epoch = root.epoch.map_or_else(|| "no epoch yet".to_owned(), |epoch| format!("epoch {epoch}"));
    let rule = match root.rule {
        Rule::Slot => format!("by slot {}", owners.slot),
        Rule::Namespace => "by its namespace, which the root names".to_owned(),
    };
    let shard = match (&root.shard, &root.taken_from) {
        (Some(shard), _) if shard == UNSHARDED => format!("the pods that are not enrolled, {rule}"),
        (Some(shard), _) => format!("{shard}, {rule}"),
        (None, Some(former)) if former.is_empty() => format!("none now: it is being taken from whoever had it, {rule}"),
        (None, Some(former)) => format!("none now: it is being taken from {former}, {rule}"),
        (None, None) => format!("none, {rule}"),
    };
    let mut fields =
        vec![("Root", format!("{}/{}, {}, {epoch}", root.namespace, root.name, root.workload)), ("  Owner", shard)];
    if root.disabled {
        fields.push((
            "  Disabled",
            "the root is switched off: this is from before, and its shards stand alone".to_owned(),
        ));
    }
    if !root.selected {
        fields.push((
            "  Selected",
            "no: resourceSelector leaves it out, so none of the root's shards sees it".to_owned(),
        ));
    }
    let mut rows = vec![PodOverview::HEAD.map(str::to_owned).to_vec()];
    rows.extend(root.pods.iter().map(|pod| pod.cells(now).to_vec()));
    let is_shard = root.shard.as_ref().is_some_and(|shard| shard != UNSHARDED);
    let pods = if root.pods.is_empty() && is_shard {
        "  no pod works for that shard\n".to_owned()
    } else if root.pods.is_empty() {
        String::new()
    } else {
        table(&rows, "  ")
    };
    described(&fields) + &pods
}
