//! How long moves took: from a change of the root to the grant of all that it moves, by the audit logs.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Result, ensure};
use ctrlmesh_common::ownership::Ownership;
use ctrlmesh_common::slots::Slot;
use ctrlmesh_testbed::audit_log::AuditEvent;
use jiff::Timestamp;
use serde_json::Value;

use crate::bed::{Bed, ROOT, slots_of};
use crate::moves::CANARY;

/// A change of the canary's slots, and when the API server got it.
struct Asked {
    at: Timestamp,
    slots: BTreeSet<Slot>,
}

/// For people: the pace of every move of the canary's slots.
pub(crate) fn say(bed: &Bed, what: &str) -> Result<()> {
    let mut events = Vec::new();
    for log in bed.plane.audit_logs() {
        events.extend(AuditEvent::read(log, "shardingconfigs")?);
    }
    events.retain(|event| event.stage == "ResponseComplete" && event.object.name == ROOT);
    events.sort_by_key(|event| event.at);
    let mut moves = paces(&events);
    ensure!(!moves.is_empty(), "nothing moved");
    moves.sort_unstable();
    let at = |hundredths: usize| moves[(moves.len() - 1) * hundredths / 100];
    eprintln!("{what}: {} moves granted, p50 {:?}, p99 {:?}", moves.len(), at(50), at(99));
    Ok(())
}

fn paces(events: &[AuditEvent]) -> Vec<Duration> {
    let (mut asked, mut paces): (Option<Asked>, Vec<Duration>) = (None, Vec::new());
    let mut present = BTreeSet::new();
    for event in events {
        let status = &event.response_object["status"]["ownership"];
        let table: Option<Ownership> = serde_json::from_value(status.clone()).ok();
        let slots = wanted(&event.response_object);
        // The probe of a fence is refused, and answered without a root.
        if event.is_write() && event.object.subresource.is_empty() && !slots.is_empty() {
            let moves = !present.is_empty() && slots != present;
            asked = moves.then_some(Asked { at: event.received, slots });
        }
        let Some(table) = table.filter(|table| table.revoked.is_none()) else { continue };
        let granted = slots_of(&table, CANARY);
        if let Some(move_) = asked.take_if(|asked| asked.slots == granted) {
            paces.push(Duration::try_from(event.at.duration_since(move_.at)).unwrap_or_default());
        }
        present = granted;
    }
    paces
}

/// The slots that a root gives its canary.
fn wanted(root: &Value) -> BTreeSet<Slot> {
    let hashes = root["spec"]["root"]["canary"]["inShardHash"].as_array().into_iter().flatten();
    hashes.filter_map(|hash| hash.as_str()?.parse().ok()).collect()
}
