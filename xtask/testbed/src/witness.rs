//! Checks by audit logs whether an operator's objects ever had two writers.
//!
//! The witness reads the logs of all API servers, and believes nothing else. Writes are ordered by the version of the
//! object that each made: all API servers have it from one etcd. The ownership table in force is that of the root
//! ShardingConfig with the greatest version below. So the logs need the bodies of writes to `shardingconfigs` and to
//! the operator's kinds ([`crate::Options::audit_bodies`]). A write that left no version, as the last of a deleted
//! object, is placed by its time: it counts as wrong where every table of its time forbids it.
//!
//! Pure, but for [`Witness::read`]. A `deletecollection` is not checked: the log does not say what it deleted.

mod event;
mod tables;
mod verdict;
mod versions;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::path::Path;

use ctrlmesh_common::slots::NamespaceHash;
use serde_json::Value;

use event::Write;
use tables::Tables;
use versions::Versions;

pub use event::{Author, Object};
pub use verdict::{Fault, Verdict};

/// The operator whose writes are checked.
#[derive(Clone, Debug)]
pub struct OperatorUnderTest {
    /// The namespace of the operator and its root.
    pub namespace: String,
    /// The service account of the operator's pods.
    pub account: String,
    /// The name of the root ShardingConfig.
    pub root: String,
    /// The kinds that are limited, as `plural.group`.
    pub resources: BTreeSet<String>,
    /// How a namespace gets its slot.
    pub hash: NamespaceHash,
}

/// What the logs said so far.
#[derive(Clone, Debug)]
pub struct Witness {
    operator: OperatorUnderTest,
    writes: Vec<Write>,
    roots: Vec<Write>,
    /// The latest moment that a log speaks of.
    latest: jiff::Timestamp,
}

impl Witness {
    /// Has heard nothing yet.
    pub fn of(operator: OperatorUnderTest) -> Self {
        Self { operator, writes: Vec::new(), roots: Vec::new(), latest: jiff::Timestamp::MIN }
    }

    /// Hears one line of a log; what is no event, or no write that came about, says only what time it is.
    pub fn hear(&mut self, line: &str) {
        self.hear_as(line, Some);
    }

    /// Hears all lines of a member cluster's log, whose objects are in namespaces with the names that members have on
    /// the host. Its versions compare with no table's, so that its writes are placed by their times.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn read_member(&mut self, log: &Path) -> io::Result<()> {
        for line in BufReader::new(File::open(log)?).lines() {
            self.hear_as(&line?, |write| {
                (!write.object.namespace.is_empty()).then_some(Write { version: None, ..write })
            });
        }
        Ok(())
    }

    fn hear_as(&mut self, line: &str, write: impl Fn(Write) -> Option<Write>) {
        let Some(event) = event::parse(line) else { return };
        self.latest = self.latest.max(event.answered);
        let Some(write) = event.write.and_then(write) else { return };
        let OperatorUnderTest { namespace, root, resources, .. } = &self.operator;
        if write.object.resource == ROOTS && write.object.namespace == *namespace && write.object.name == *root {
            self.roots.push(write);
        } else if resources.contains(&write.object.resource) {
            self.writes.push(write);
        }
    }

    /// Hears all lines of a log.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn read(&mut self, log: &Path) -> io::Result<()> {
        for line in BufReader::new(File::open(log)?).lines() {
            self.hear(&line?);
        }
        Ok(())
    }

    /// Checks all that was heard.
    pub fn verdict(&self) -> Verdict {
        let tables = Tables::of(&self.roots, self.operator.hash);
        let versions = Versions::of(self.roots.iter().chain(&self.writes));
        let writes: Vec<&Write> = self.writes.iter().filter(|write| !versions.is_older(write)).collect();
        verdict::check(&self.operator, &writes, &tables, self.latest)
    }
}

/// The kind of roots.
const ROOTS: &str = "shardingconfigs.ctrlmesh.kusionstack.io";

/// Of listed objects, as `namespace/name`, those whose status is not of the newest spec: nobody worked on them.
pub fn missed<'a>(objects: impl IntoIterator<Item = &'a Value>) -> Vec<String> {
    let objects = objects.into_iter().filter(|one| {
        let generation = one["metadata"]["generation"].as_i64();
        generation.is_none() || one["status"]["observedGeneration"].as_i64() != generation
    });
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    objects.map(|one| format!("{}/{}", text(&one["metadata"]["namespace"]), text(&one["metadata"]["name"]))).collect()
}
