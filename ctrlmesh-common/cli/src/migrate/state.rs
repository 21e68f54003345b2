//! What a migration has done, and what takes it back: the content of a ConfigMap.
//!
//! Pure. The record of a step is written before its first change. So a run that is cut can go on, and be undone.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::change::{Action, Change, Reversible};
use super::object::ObjectRef;
use super::snapshot::Predecessor;

/// In the order in which they are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Step {
    /// Refuse new pods with the label enable-proxy, until our managers answer
    Guard,
    /// Delete the predecessor's webhook configurations
    Webhooks,
    /// Scale the predecessor's manager to zero
    Stop,
    /// Copy objects of Kridge's group into ours
    Convert,
    /// Drop the predecessor's finalizers, which nobody serves any more
    Finalizers,
    /// Replace the children of roots by ones that the root owns
    Adopt,
    /// Take over the labels of objects, and the hash in them
    Labels,
    /// Let our managers lead, and new pods in
    Managers,
    /// Replace the operators' pods by enrolled ones
    Enrol,
    /// Delete what is left. It cannot be undone
    Finish,
}

impl Step {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        Self::value_variants().iter().copied()
    }

    /// As the command line has it.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct State {
    /// Whose cluster it is. `None`: nothing has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) predecessor: Option<Predecessor>,
    /// Steps that came to their end.
    #[serde(default)]
    pub(super) done: BTreeSet<Step>,
    /// What takes each step back, in the order in which the step did it.
    #[serde(default)]
    pub(super) undo: BTreeMap<Step, Vec<Change>>,
    /// What gives our managers back, which an undo has stopped, and webhook configurations that nobody answered.
    #[serde(default)]
    pub(super) resume: Vec<Change>,
}

impl State {
    /// Notes what takes the changes of a step back. What an earlier run noted stays.
    pub(super) fn record(&mut self, step: Step, changes: &[Reversible]) {
        for inverse in changes.iter().filter_map(|one| one.inverse.as_ref()) {
            self.note(step, inverse.clone());
        }
        self.undo.entry(step).or_default();
    }

    /// Notes one change that takes a step back.
    pub(super) fn note(&mut self, step: Step, inverse: Change) {
        let noted = self.undo.entry(step).or_default();
        if is_new(noted, &inverse) {
            noted.push(inverse);
        }
    }

    /// Notes what a full undo does at its very end: behind all else of the first step.
    pub(super) fn note_last(&mut self, change: Change) {
        let noted = self.undo.entry(Step::Guard).or_default();
        if is_new(noted, &change) {
            noted.insert(0, change);
        }
    }

    /// Notes what starts our managers again.
    pub(super) fn note_resume(&mut self, change: Change) {
        if is_new(&self.resume, &change) {
            self.resume.push(change);
        }
    }

    /// What gives our managers back, without the objects that somebody has made again meanwhile.
    pub(super) fn to_resume(&self, there: &[ObjectRef]) -> Vec<Change> {
        let is_there = |one: &Change| matches!(one.action, Action::Create(_)) && there.contains(&one.object);
        self.resume.iter().filter(|one| !is_there(one)).cloned().collect()
    }

    /// Steps that an undo takes back, the last one first, down to `until`.
    pub(super) fn to_undo(&self, until: Step) -> Vec<Step> {
        self.undo.keys().rev().copied().filter(|step| *step >= until).collect()
    }

    /// The changes that take a step back, the last one first.
    pub(super) fn inverses(&self, step: Step) -> Vec<Change> {
        self.undo.get(&step).into_iter().flatten().rev().cloned().collect()
    }

    /// How many bytes it takes when it is written.
    pub(super) fn size(&self) -> usize {
        bytes(self)
    }

    /// The objects in it, the largest first, with their bytes.
    pub(super) fn largest(&self) -> Vec<(&ObjectRef, usize)> {
        let changes = self.undo.values().flatten().chain(&self.resume);
        let mut sizes: Vec<_> = changes.map(|change| (&change.object, bytes(change))).collect();
        sizes.sort_by_key(|(_, size)| std::cmp::Reverse(*size));
        sizes
    }

    pub(super) fn forget(&mut self, step: Step) {
        self.done.remove(&step);
        self.undo.remove(&step);
        if self.undo.is_empty() {
            self.predecessor = None;
        }
    }
}

fn bytes(value: &impl Serialize) -> usize {
    serde_json::to_string(value).map_or(0, |text| text.len())
}

/// Whether none of those noted does the same: an earlier one saw the object as it was.
fn is_new(noted: &[Change], change: &Change) -> bool {
    !noted.iter().any(|one| one.replaces(change))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::migrate::object::CONFIG_MAP;

    fn scaled(before: u32) -> Reversible {
        Reversible::merge(CONFIG_MAP.named(Some("a"), "b"), json!({"n": 0}), json!({ "n": before }))
    }

    #[test]
    fn a_second_run_keeps_what_was_there_first() {
        let mut state = State::default();
        state.record(Step::Stop, &[scaled(3)]);
        state.record(Step::Stop, &[scaled(0)]);
        let [Change { action: Action::Merge(before), .. }] = &state.inverses(Step::Stop)[..] else {
            panic!("{state:?}")
        };
        assert_eq!(before, &json!({"n": 3}));
    }

    #[test]
    fn the_last_change_is_taken_back_first() {
        let mut state = State::default();
        let made = |name: &str| Reversible::create(CONFIG_MAP.named(None, name), json!({}));
        state.record(Step::Adopt, &[made("a"), made("b")]);
        state.record(Step::Guard, &[]);
        let names: Vec<String> = state.inverses(Step::Adopt).into_iter().map(|one| one.object.name).collect();
        assert_eq!(names, ["b", "a"]);
        assert_eq!(state.to_undo(Step::Guard), [Step::Adopt, Step::Guard]);
        assert_eq!(state.to_undo(Step::Stop), [Step::Adopt]);
    }

    #[test]
    fn what_somebody_made_again_is_not_resumed() {
        let (webhooks, other) = (CONFIG_MAP.named(None, "webhooks"), CONFIG_MAP.named(None, "other"));
        let mut state = State::default();
        state.note_resume(Change::new(webhooks.clone(), Action::Create(json!({}))));
        state.note_resume(Change::new(other.clone(), Action::Create(json!({}))));
        state.note_resume(Change::new(webhooks.clone(), Action::Merge(json!({}))));
        let resumed: Vec<ObjectRef> =
            state.to_resume(std::slice::from_ref(&webhooks)).into_iter().map(|one| one.object).collect();
        assert_eq!(resumed, [other, webhooks]);
    }

    #[test]
    fn the_record_is_read_as_it_was_written() {
        let mut state = State { done: [Step::Guard].into(), ..State::default() };
        state.record(Step::Stop, &[scaled(3)]);
        let written = serde_json::to_string(&state).unwrap();
        assert_eq!(serde_json::from_str::<State>(&written).unwrap(), state);
    }

    #[test]
    fn steps_are_called_as_the_command_line_calls_them() {
        for step in Step::all() {
            assert_eq!(Step::from_str(&step.name(), false), Ok(step));
        }
    }
}
