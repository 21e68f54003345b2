//! The operator's pods, by their versions.

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::bed::Operator;
use crate::mesh::{operator, until};

impl Operator<'_> {
    /// The pods of a revision that are not on their way out.
    pub(crate) fn pods_of(self, revision: &str) -> Result<Vec<Value>> {
        let mut pods = operator::pods(self.space)?;
        pods.retain(|pod| pod["metadata"]["labels"][self.revision_label()] == revision);
        Ok(pods)
    }

    /// Waits until there are so many pods, all of this revision, and Ready; refuses one that was restarted.
    pub(crate) fn all_ready(self, revision: &str, replicas: usize) -> Result<()> {
        let mut last = Vec::new();
        let found = until("all pods to be of the revision, and Ready", || {
            let (all, its) = (operator::pods(self.space)?, self.pods_of(revision)?);
            let is_good = all.len() == replicas && its.len() == replicas && its.iter().all(|pod| has(pod, "Ready"));
            last = all;
            Ok(is_good.then_some(its))
        });
        operator::none_restarted(&found.with_context(|| summary(&last))?)
    }
}

/// Whether the condition of this type is true.
pub(crate) fn has(pod: &Value, condition: &str) -> bool {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().any(|one| one["type"] == condition && one["status"] == "True")
}

fn summary(pods: &[Value]) -> String {
    let one = |pod: &Value| {
        format!("{} {}: {}", pod["metadata"]["name"], pod["metadata"]["labels"], pod["status"]["conditions"])
    };
    pods.iter().map(one).collect::<Vec<_>>().join("\n")
}
