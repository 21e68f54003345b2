//! Reports what an ownership table takes away and grants, in one event for each batch.

use std::collections::BTreeMap;

use ctrlmesh_common::ownership::{Ownership, Revoked};
use ctrlmesh_common::slots::{Slot, SlotSet};

use super::EventNote;

/// Reasons of the events.
const REVOKED: &str = "Revoked";
pub const GRANTED: &str = "Granted";

/// Most pairs of owners in one message.
const LISTED: usize = 5;

/// What moves from one owner, or to one.
#[derive(Default)]
struct Batch {
    slots: SlotSet,
    namespaces: Vec<String>,
}

/// `before` is the table in the status, `after` the one that is to be written.
pub(super) fn events(before: Option<&Ownership>, after: &Ownership) -> Vec<EventNote> {
    let nothing = Ownership::default();
    let before = before.unwrap_or(&nothing);
    [revoked(before, after), granted(before, after)].into_iter().flatten().collect()
}

/// What the note of an event [`GRANTED`] has to say, to tell since when an object belongs to its owner.
#[derive(Clone, Copy, Debug)]
pub struct GrantedShare<'a> {
    pub owner: &'a str,
    pub slot: Slot,
    /// Where the root names the object's namespace, so that the slot does not count.
    pub namespace: Option<&'a str>,
}

impl GrantedShare<'_> {
    /// Whether the event with this `note` gives it. A long note names only its beginning.
    pub fn is_in(&self, note: &str) -> bool {
        let parts = note.split_once(": ").map_or("", |(_, parts)| parts).split("; ");
        let given = parts.filter_map(|part| part.strip_prefix("given ")?.split_once(": "));
        let to_owner = given.filter(|(owners, _)| owners.rsplit("to ").next() == Some(self.owner));
        to_owner.into_iter().any(|(_, batch)| self.is_in_batch(batch))
    }

    fn is_in_batch(&self, batch: &str) -> bool {
        let (slots, namespaces) = match batch.split_once(" and namespaces ") {
            Some(both) => both,
            None => batch.strip_prefix("namespaces ").map_or((batch, ""), |namespaces| ("", namespaces)),
        };
        if let Some(namespace) = self.namespace {
            return namespaces.split(", ").any(|name| name == namespace);
        }
        let mut slots = slots.strip_prefix("slots ").unwrap_or_default().split(',');
        slots.any(|slot| slot.parse() == Ok(self.slot))
    }
}

fn revoked(before: &Ownership, after: &Ownership) -> Option<EventNote> {
    let nothing = Revoked::default();
    let was = before.revoked.as_ref().unwrap_or(&nothing);
    let now = after.revoked.as_ref()?;
    let mut batches: BTreeMap<String, Batch> = BTreeMap::new();
    for (slot, former) in now.slots.iter().filter(|(slot, _)| !was.slots.contains_key(slot)) {
        batches.entry(from(former)).or_default().add(*slot);
    }
    for (namespace, former) in now.namespaces.iter().filter(|(name, _)| !was.namespaces.contains_key(*name)) {
        batches.entry(from(former)).or_default().namespaces.push(namespace.clone());
    }
    note(REVOKED, after.epoch, "taken", &batches)
}

fn granted(before: &Ownership, after: &Ownership) -> Option<EventNote> {
    let nothing = Revoked::default();
    let was = before.revoked.as_ref().unwrap_or(&nothing);
    let mut batches: BTreeMap<String, Batch> = BTreeMap::new();
    let is_new = |slot: &Slot, owner: &String| before.slots.get(slot) != Some(owner);
    for (slot, owner) in after.slots.iter().filter(|(slot, owner)| is_new(slot, owner)) {
        let from = was.slots.get(slot).map(|former| format!("{} ", from(former))).unwrap_or_default();
        batches.entry(format!("{from}to {owner}")).or_default().add(*slot);
    }
    let is_new = |name: &String, owner: &String| before.namespaces.get(name) != Some(owner);
    for (namespace, owner) in after.namespaces.iter().filter(|(name, owner)| is_new(name, owner)) {
        batches.entry(format!("to {owner}")).or_default().namespaces.push(namespace.clone());
    }
    note(GRANTED, after.epoch, "given", &batches)
}

fn note(reason: &str, epoch: u64, verb: &str, batches: &BTreeMap<String, Batch>) -> Option<EventNote> {
    let parts = batches.iter().take(LISTED).map(|(owners, batch)| format!("{verb} {owners}: {}", batch.text()));
    let mut parts: Vec<String> = parts.collect();
    let more = batches.len().saturating_sub(LISTED);
    if more > 0 {
        parts.push(format!("and {more} more"));
    }
    let message = format!("epoch {epoch}: {}", parts.join("; "));
    (!batches.is_empty()).then(|| EventNote { warning: false, reason: reason.to_owned(), message })
}

/// Nobody is called "": then it is not known who had it.
fn from(former: &str) -> String {
    let former = if former.is_empty() { "every owner" } else { former };
    format!("from {former}")
}

impl Batch {
    fn add(&mut self, slot: Slot) {
        self.slots = self.slots.union([slot].into_iter().collect());
    }

    fn text(&self) -> String {
        let slots = (!self.slots.is_empty()).then(|| format!("slots {}", self.slots));
        let names = self.namespaces.join(", ");
        let namespaces = (!names.is_empty()).then(|| format!("namespaces {names}"));
        slots.into_iter().chain(namespaces).collect::<Vec<_>>().join(" and ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: i64) -> Slot {
        number.try_into().unwrap()
    }

    #[test]
    fn a_batch_is_one_event_when_taken_and_one_when_given() {
        let owned = |slots: &[(i64, &str)]| slots.iter().map(|(at, owner)| (slot(*at), (*owner).to_owned())).collect();
        let first = Ownership { epoch: 1, slots: owned(&[(1, "a"), (2, "a"), (3, "b")]), ..Ownership::default() };
        let says = |before: Option<&Ownership>, after: &Ownership| -> Vec<String> {
            events(before, after).into_iter().map(|event| format!("{} {}", event.reason, event.message)).collect()
        };
        assert_eq!(says(None, &first), ["Granted epoch 1: given to a: slots 1,2; given to b: slots 3"]);
        assert!(says(Some(&first), &first).is_empty());
        let revoked = Revoked { epoch: 2, slots: owned(&[(1, "a"), (2, "a")]), ..Revoked::default() };
        let second = Ownership { epoch: 2, slots: owned(&[(3, "b")]), revoked: Some(revoked), ..Ownership::default() };
        assert_eq!(says(Some(&first), &second), ["Revoked epoch 2: taken from a: slots 1,2"]);
        let third = Ownership { epoch: 3, slots: owned(&[(1, "b"), (2, "b"), (3, "b")]), ..Ownership::default() };
        assert_eq!(says(Some(&second), &third), ["Granted epoch 3: given from a to b: slots 1,2"]);
    }

    #[test]
    fn a_note_tells_what_it_gives() {
        let owned = |slots: &[(i64, &str)]| slots.iter().map(|(at, owner)| (slot(*at), (*owner).to_owned())).collect();
        let namespaces = [("shop".to_owned(), "a".to_owned()), ("pay".to_owned(), "a".to_owned())].into();
        let slots = owned(&[(1, "a"), (12, "a"), (3, "b-2")]);
        let after = Ownership { epoch: 4, slots, namespaces, ..Ownership::default() };
        let note = &events(None, &after)[0].message;
        let gives = |owner, number, namespace| GrantedShare { owner, slot: slot(number), namespace }.is_in(note);
        assert!(gives("a", 1, None) && gives("a", 12, None), "{note}");
        assert!(
            !gives("a", 2, None) && !gives("b", 1, None) && !gives("a", 3, None) && gives("b-2", 3, None),
            "{note}"
        );
        assert!(gives("a", 9, Some("shop")) && gives("a", 9, Some("pay")) && !gives("a", 1, Some("late")), "{note}");
        let revoked = Revoked { epoch: 5, slots: owned(&[(1, "b")]), ..Revoked::default() };
        let before = Ownership { epoch: 5, revoked: Some(revoked), ..Ownership::default() };
        let note =
            &events(Some(&before), &Ownership { epoch: 6, slots: owned(&[(1, "a")]), ..Ownership::default() })[0];
        assert!(GrantedShare { owner: "a", slot: slot(1), namespace: None }.is_in(&note.message), "{}", note.message);
    }

    #[test]
    fn a_namespace_is_named_and_an_unknown_owner_too() {
        let names = [("shop".to_owned(), String::new())].into();
        let revoked = Revoked { epoch: 5, namespaces: names, ..Revoked::default() };
        let after = Ownership { epoch: 5, revoked: Some(revoked), ..Ownership::default() };
        let found = events(Some(&Ownership { epoch: 4, ..Ownership::default() }), &after);
        assert_eq!(found[0].message, "epoch 5: taken from every owner: namespaces shop");
    }
}
