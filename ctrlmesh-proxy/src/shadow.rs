//! What became of the writes that a pod meant, and that were sent as dry runs.
//!
//! Until it is known of a write, others of the same object wait for its verdict, and count as it does. So a pod that
//! writes the same again and again has one comparison at a time.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use ctrlmesh_common::wire::{self, MAX_SHADOW_DIFFERENCES, ShadowDifference};
use ctrlmesh_request::shadow::IntendedWrite;
use ctrlmesh_runtime::sync::lock;

/// Most objects that are being compared.
const MAX_PENDING: usize = 256;

/// The writes of one pod. They outlive its policies.
#[derive(Debug, Default)]
pub struct PodShadow(Mutex<Writes>);

#[derive(Debug, Default)]
struct Writes {
    /// Without the differences.
    counts: wire::Shadow,
    /// How many writes wait for the verdict.
    pending: HashMap<IntendedWrite, u64>,
    /// The newest first.
    differences: VecDeque<(IntendedWrite, Vec<String>)>,
}

/// What became of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Equal,
    /// With the fields that differ; none: the object was to be deleted.
    Different(Vec<String>),
    /// The API server refused it.
    Refused,
    Unknown,
}

impl PodShadow {
    /// It is known at once what became of a write, or it will never be.
    pub(crate) fn known(&self, verdict: &Verdict) {
        let mut writes = lock(&self.0);
        writes.counts.intended += 1;
        writes.count(verdict, 1);
    }

    /// The API server took a write. Returns whether it is to be compared, and [`Self::ended`] called then.
    pub(crate) fn took(&self, write: &IntendedWrite) -> bool {
        let mut writes = lock(&self.0);
        writes.counts.intended += 1;
        if let Some(waiting) = writes.pending.get_mut(write) {
            *waiting += 1;
            return false;
        }
        if writes.pending.len() >= MAX_PENDING {
            writes.count(&Verdict::Unknown, 1);
            return false;
        }
        writes.pending.insert(write.clone(), 1);
        true
    }

    /// It is known what became of a write, or it will never be.
    pub(crate) fn ended(&self, write: &IntendedWrite, verdict: Verdict) {
        let mut writes = lock(&self.0);
        let waiting = writes.pending.remove(write).unwrap_or_default();
        writes.count(&verdict, waiting);
        if let Verdict::Different(fields) = verdict {
            writes.differences.retain(|(other, _)| other != write);
            writes.differences.push_front((write.clone(), fields));
            writes.differences.truncate(MAX_SHADOW_DIFFERENCES);
        }
    }

    /// As the manager is told; `None` where nothing was meant.
    pub(crate) fn report(&self) -> Option<wire::Shadow> {
        let writes = lock(&self.0);
        let differences = writes.differences.iter().map(|(write, fields)| ShadowDifference {
            verb: write.verb.clone(),
            resource: write.resource.clone(),
            namespace: write.namespace.clone(),
            name: write.name.clone(),
            fields: fields.clone(),
        });
        (writes.counts.intended > 0)
            .then(|| wire::Shadow { differences: differences.collect(), ..writes.counts.clone() })
    }
}

impl Writes {
    fn count(&mut self, verdict: &Verdict, more: u64) {
        let count = match verdict {
            Verdict::Equal => &mut self.counts.equal,
            Verdict::Different(_) => &mut self.counts.different,
            Verdict::Refused => &mut self.counts.refused,
            Verdict::Unknown => &mut self.counts.unknown,
        };
        *count += more;
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_request::request::RequestInfo;

    use super::*;

    fn write(name: &str) -> IntendedWrite {
        let target = format!("/api/v1/namespaces/a/pods/{name}");
        IntendedWrite::of(&RequestInfo::parse("PUT", &target).unwrap(), &target).unwrap()
    }

    #[test]
    fn each_write_counts_as_the_comparison_that_it_waits_for() {
        let shadow = PodShadow::default();
        assert_eq!(shadow.report(), None);
        assert!(shadow.took(&write("x")) && !shadow.took(&write("x")) && shadow.took(&write("y")));
        shadow.known(&Verdict::Refused);
        shadow.ended(&write("x"), Verdict::Equal);
        shadow.ended(&write("y"), Verdict::Different(vec!["f".to_owned()]));
        assert!(shadow.took(&write("y")));
        let report = shadow.report().unwrap();
        let counts = [report.intended, report.equal, report.different, report.refused, report.unknown];
        assert_eq!(counts, [5, 2, 1, 1, 0]);
        assert_eq!((report.differences.len(), report.differences[0].name.as_str()), (1, "y"));
        shadow.ended(&write("y"), Verdict::Different(Vec::new()));
        assert_eq!(shadow.report().unwrap().differences[0].fields, [""; 0], "the newest counts");
    }

    #[test]
    fn comparisons_and_differences_are_bounded() {
        let shadow = PodShadow::default();
        let names: Vec<IntendedWrite> = (0..=MAX_PENDING).map(|number| write(&number.to_string())).collect();
        let begun = names.iter().filter(|write| shadow.took(write)).count();
        assert_eq!((begun, shadow.report().unwrap().unknown), (MAX_PENDING, 1));
        for write in &names {
            shadow.ended(write, Verdict::Different(Vec::new()));
        }
        assert_eq!(shadow.report().unwrap().differences.len(), MAX_SHADOW_DIFFERENCES);
    }
}
