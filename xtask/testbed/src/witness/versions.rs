//! Which versions there were already at a moment: etcd gives each write a greater one than all before it.

use jiff::Timestamp;

use super::event::Write;

/// The greatest version that was answered until each moment, in the order of time.
#[derive(Clone, Debug)]
pub(super) struct Versions(Vec<(Timestamp, u64)>);

impl Versions {
    pub(super) fn of<'a>(writes: impl IntoIterator<Item = &'a Write>) -> Self {
        let answers = writes.into_iter().filter_map(|write| Some((write.answered, write.version?)));
        let mut answers: Vec<_> = answers.collect();
        answers.sort_unstable();
        let mut greatest = 0;
        for (_, version) in &mut answers {
            greatest = greatest.max(*version);
            *version = greatest;
        }
        Self(answers)
    }

    /// Whether a write was answered with a version from before it came: then it changed nothing, and whoever made that
    /// version may have had no answer. The last of a delete may be answered with the version that was deleted.
    pub(super) fn is_older(&self, write: &Write) -> bool {
        let before = self.0.partition_point(|(answered, _)| *answered < write.received);
        let known = before.checked_sub(1).map_or(0, |last| self.0[last].1);
        !write.is_delete && write.version.is_some_and(|version| version < known)
    }
}
