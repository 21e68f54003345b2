//! Says for people who owns an object.
//!
//! Pure.

use ctrlmesh_common::ownership::UNSHARDED;
use jiff::Timestamp;

use super::alone::LoneShard;
use super::object::Object;
use super::owners::{Owners, RootOwner, Rule};
use crate::status::shards::PodOverview;
use crate::text::{cut, described, table};

/// Of a selector, in characters. One may name thousands of namespaces.
const SELECTOR_WIDTH: usize = 100;

/// One screen about an object.
pub(super) fn screen(owners: &Owners, now: Timestamp) -> String {
    let Object { group, resource, namespace, name, .. } = &owners.object;
    let dot = if group.is_empty() { "" } else { "." };
    let path = namespace.as_ref().map_or_else(|| name.clone(), |namespace| format!("{namespace}/{name}"));
    let mut fields = vec![("Object", format!("{resource}{dot}{group} {path}"))];
    if owners.roots.is_empty() && owners.shards.is_empty() {
        let nothing = "No root divides it, and no shard by hand limits it: every pod sees it.";
        return format!("{}\n{nothing}\n", described(&fields));
    }
    if owners.roots.iter().any(|root| root.rule != Rule::Unlabelled) {
        let labels = if owners.missing_labels.is_empty() {
            "it has those by which shards see it".to_owned()
        } else {
            format!("no shard sees it before it has {}", owners.missing_labels.join(" and "))
        };
        fields.extend([("Slot", owners.slot.to_string()), ("Labels", labels)]);
    }
    let (selected, others): (Vec<_>, Vec<_>) = owners.shards.iter().partition(|shard| shard.selected);
    let roots = owners.roots.iter().map(|root| of_root(root, owners, now));
    let shards = selected.into_iter().map(|shard| of_shard(shard, now));
    let parts = roots.chain(shards).map(|part| format!("\n{part}")).collect::<Vec<_>>().concat();
    described(&fields) + &parts + &left_out(&others)
}

fn of_root(root: &RootOwner, owners: &Owners, now: Timestamp) -> String {
    let epoch = root.epoch.map_or_else(|| "no epoch yet".to_owned(), |epoch| format!("epoch {epoch}"));
    let title = ("Root", format!("{}/{}, {}, {epoch}", root.namespace, root.name, root.workload));
    let (slot, text) = (owners.slot, str::to_owned);
    let mut fields = match root.rule {
        Rule::Slot => vec![title, ("  Owner", owner(root, &format!("by slot {slot}")))],
        Rule::Namespace => vec![title, ("  Owner", owner(root, "by its namespace, which the root names"))],
        Rule::Disabled => {
            let off = "none by slot: the root is switched off, and each of its shards goes by its own limits";
            vec![title, ("  Owner", text(off))]
        }
        Rule::Unlabelled => {
            let writes = if root.fenced {
                format!("only pods of the owner of slot {slot} may write it")
            } else {
                text("every pod of the root may write it")
            };
            let reads = "lists and watches of its shards leave it out; every pod gets it by its name";
            let none = "none: `*` in the root does not stand for this resource, so the manager does not label it";
            vec![title, ("  Owner", text(none)), ("  Reads", text(reads)), ("  Writes", writes)]
        }
    };
    if !root.selected {
        let reason = "no: resourceSelector leaves it out, so none of the root's shards sees it";
        fields.push(("  Selected", text(reason)));
    }
    let is_shard = root.shard.as_ref().is_some_and(|shard| shard != UNSHARDED);
    described(&fields) + &pods(&root.pods, is_shard, now)
}

/// The owner by the root's table.
fn owner(root: &RootOwner, rule: &str) -> String {
    match (&root.shard, &root.taken_from) {
        (Some(shard), _) if shard == UNSHARDED => format!("the pods that are not enrolled, {rule}"),
        (Some(shard), _) => format!("{shard}, {rule}"),
        (None, Some(former)) if former.is_empty() => format!("none now: it is being taken from whoever had it, {rule}"),
        (None, Some(former)) => format!("none now: it is being taken from {former}, {rule}"),
        (None, None) => format!("none, {rule}"),
    }
}

/// A shard that stands alone, and selects the object.
fn of_shard(shard: &LoneShard, now: Timestamp) -> String {
    let by = shard.root.as_ref().map_or_else(|| "by hand".to_owned(), |root| format!("of root {root}, switched off"));
    let selectors: Vec<String> = shard.limits.iter().map(|limit| cut(&limit.selector, SELECTOR_WIDTH)).collect();
    let fields = [
        ("Shard", format!("{}/{}, {by}", shard.namespace, shard.name)),
        ("  Sees it", format!("by its labels: {}", selectors.join(" and "))),
    ];
    described(&fields) + &pods(&shard.pods, true, now)
}

fn pods(pods: &[PodOverview], are_wanted: bool, now: Timestamp) -> String {
    if pods.is_empty() {
        return if are_wanted { "  no pod works for that shard\n".to_owned() } else { String::new() };
    }
    let mut rows = vec![PodOverview::HEAD.map(str::to_owned).to_vec()];
    rows.extend(pods.iter().map(|pod| pod.cells(now).to_vec()));
    table(&rows, "  ")
}

/// Shards that stand alone, and limit the resource to other objects.
fn left_out(shards: &[&LoneShard]) -> String {
    if shards.is_empty() {
        return String::new();
    }
    let names: Vec<String> = shards.iter().map(|shard| format!("{}/{}", shard.namespace, shard.name)).collect();
    format!("\nLimits of these shards do not select it: {}\n", names.join(", "))
}
