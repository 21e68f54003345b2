//! The member clusters that a pod reaches behind paths of its API server, and those whose objects it sees.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Lock, Mode, Policy};
use crate::member_path::PathTemplate;
use crate::resource::ResourceKey;
use crate::selector::Selector;
use crate::slots::{NamespaceHash, Slot};

/// The most paths.
pub const MAX_PATHS: usize = 16;

/// The members behind an API server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Members {
    /// The paths that lead to members.
    pub paths: Vec<PathTemplate>,
    /// How a member's name becomes a slot.
    #[serde(default)]
    pub hash: NamespaceHash,
    /// The pod sees the objects of members in these slots. Absent: those of all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sees: Option<BTreeSet<Slot>>,
}

/// Paths by which nobody can tell a member.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MembersError {
    /// None, or too many.
    #[error("paths: are {count}, and there must be 1 to {MAX_PATHS}")]
    Count {
        /// How many there are.
        count: usize,
    },
    /// One path could be of two templates.
    #[error("paths[{at}]: {path} and {other} could both be of one path; give each a word of its own in the same place")]
    Overlap {
        /// Which.
        at: usize,
        /// The template.
        path: PathTemplate,
        /// An earlier one.
        other: PathTemplate,
    },
}

impl Members {
    /// Whether the pod sees the objects of a member.
    pub fn sees(&self, cluster: &str) -> bool {
        self.sees.as_ref().is_none_or(|slots| slots.contains(&self.hash.slot(cluster)))
    }

    /// Whether a proxy can tell members by it.
    ///
    /// # Errors
    /// The first path that is wrong.
    pub fn check(&self) -> Result<(), MembersError> {
        let count = self.paths.len();
        if count == 0 || count > MAX_PATHS {
            return Err(MembersError::Count { count });
        }
        for (at, path) in self.paths.iter().enumerate() {
            if let Some(other) = self.paths[..at].iter().find(|other| other.overlaps(path)) {
                return Err(MembersError::Overlap { at, path: path.clone(), other: other.clone() });
            }
        }
        Ok(())
    }
}

impl Policy {
    /// The members, where they are told apart.
    pub fn members(&self) -> Option<&Members> {
        self.members.as_ref().filter(|_| self.mode == Mode::Enforce)
    }

    /// What narrows a collection, on the API server or on a member.
    pub fn selector_of(&self, key: ResourceKey<'_>) -> Option<Selector> {
        // Without a word about members, a pod sees as much there as of the API server's own.
        let Some((member, members)) = key.member.zip(self.members()) else {
            return self.selector_for(key.group, key.resource);
        };
        (!members.sees(member.name)).then(Selector::nothing)
    }

    /// As [`Self::lock_for`]; a member has no lock of the operator's.
    pub fn lock_of(&self, key: ResourceKey<'_>) -> Option<&Lock> {
        if key.member.is_some() { None } else { self.lock_for(key.group, key.resource) }
    }

    /// As [`Self::changed_at`]; the versions of a member compare with none of the API server's.
    pub fn changed_at_of(&self, key: ResourceKey<'_>) -> Option<u64> {
        if key.member.is_some() { None } else { self.changed_at(key.group, key.resource) }
    }

    /// The paths that lead to members, and whether those are divided.
    pub fn member_division(&self) -> (&[PathTemplate], bool) {
        (self.member_paths(), self.members().is_some_and(|members| members.sees.is_some()))
    }

    /// The paths that lead to members.
    pub fn member_paths(&self) -> &[PathTemplate] {
        self.members().map_or(&[], |members| &members.paths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(paths: &[&str]) -> Members {
        Members { paths: paths.iter().map(|path| path.parse().unwrap()).collect(), ..Members::default() }
    }

    #[test]
    fn paths_are_few_and_tell_members_apart() {
        members(&["/clusters/{cluster}", "/workspaces/{cluster}"]).check().unwrap();
        assert_eq!(members(&[]).check(), Err(MembersError::Count { count: 0 }));
        let many: Vec<String> = (0..=MAX_PATHS).map(|at| format!("/clusters-{at}/{{cluster}}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(members(&many).check(), Err(MembersError::Count { count: MAX_PATHS + 1 }));
        let error = members(&["/a/{cluster}", "/clusters/{cluster}", "/clusters/{cluster}/proxy"]).check().unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("paths[2]: /clusters/{cluster}/proxy and /clusters/{cluster} could"), "{text}");
    }

    #[test]
    fn a_pod_sees_members_by_the_slots_of_their_names() {
        let mut members = members(&["/clusters/{cluster}"]);
        assert!(members.sees("m-1"));
        members.sees = Some([members.hash.slot("m-1")].into());
        assert!(members.sees("m-1") && !members.sees("m-2"));
    }
}
