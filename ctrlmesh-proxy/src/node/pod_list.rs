//! Parses the file that lists the pods to serve.
//!
//! The file is YAML or JSON; paths in it are relative to its folder. A list with any error is refused as a whole:
//! half of a list would release the pods of the other half.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use crate::guard::{GuardFile, PodGuards};
use crate::metrics::Metrics;
use crate::policy::{Current, History, HistoryFile, PodLabel, PodName, Source};
use crate::session::ServedPod;
use crate::session::own_lock::OwnLock;

/// The most that is read, in bytes: some thousand pods.
const MAX_FILE_BYTES: u64 = 8 * 1024 * 1024;

/// A pod that is to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace and name.
    pub name: PodName,
    /// Its cgroup.
    pub place: CgroupLocation,
    /// Cgroups below its own whose connections pass.
    pub except: Vec<PathBuf>,
    /// Its network namespace, as a file: `/proc/PID/ns/net` or one that has a name. Without it, that of its processes.
    pub network: Option<PathBuf>,
    /// Whether its connections pass while it cannot be served, rather than fail. Default no.
    pub fail_open: bool,
    /// The file that its policy comes from; without it, the manager tells.
    pub policy: Option<Source>,
    /// Who takes its connections.
    pub served_by: ServedBy,
}

/// Who takes a pod's connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServedBy {
    /// The node's proxy.
    Node,
    /// The proxy inside it.
    Sidecar {
        /// The container of that, once it is known: its own connections pass.
        container: Option<String>,
    },
}

/// How a pod's cgroup is found.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CgroupLocation {
    /// By its folder.
    Cgroup(PathBuf),
    /// By the pod's UID, wherever the kubelet put it.
    Uid(String),
}

/// A list of pods that is not taken.
#[derive(Debug, thiserror::Error)]
pub enum PodsError {
    /// The file cannot be read.
    #[error("read the list of pods")]
    Read(#[source] io::Error),
    /// The file is larger than any list.
    #[error("the list of pods has {bytes} bytes, at most {MAX_FILE_BYTES} are read")]
    TooLarge {
        /// Its size.
        bytes: u64,
    },
    /// It is no list of pods.
    #[error("parse the list of pods: line {line}, column {column}")]
    Parse {
        /// From 1; 0 where the whole file is meant.
        line: u64,
        /// From 1; 0 where the whole file is meant.
        column: u64,
        /// What is wrong.
        source: Box<serde_saphyr::Error>,
    },
    /// A pod's name is none.
    #[error("pods[{at}].pod: {pod:?} is not NAMESPACE/NAME")]
    Name {
        /// Which pod.
        at: usize,
        /// What was given.
        pod: String,
    },
    /// Of several fields that say the same, a pod has none or more than one.
    #[error("pods[{at}]: exactly one of {fields} is allowed")]
    OneOf {
        /// Which pod.
        at: usize,
        /// The fields.
        fields: &'static str,
    },
    /// A pod, or a cgroup, stands twice.
    #[error("pods[{at}]: {what} is another pod's, too")]
    Twice {
        /// Which pod.
        at: usize,
        /// What stands twice.
        what: String,
    },
}

impl Pod {
    /// The policies under which the pod may have read before, as far as `state` holds them.
    pub(super) fn history(&self, state: Option<&Path>) -> Arc<History> {
        let Some(state) = state else { return History::unknown() };
        History::load(HistoryFile::of(state, Some(&self.name), self.uid()))
    }

    /// The pod as it is served until it is `gone`. Its guards begin with the breakers that `state` holds as open.
    pub(super) fn served(
        &self,
        policy: Current,
        history: Arc<History>,
        state: Option<&Path>,
        metrics: &Arc<Metrics>,
        gone: &CancellationToken,
    ) -> ServedPod {
        let kept = state.map(|state| GuardFile::of(state, Some(&self.name), self.uid()));
        let guards = PodGuards::new(policy.clone(), metrics, kept);
        let requests = metrics.pods.requests(&self.name.to_string());
        let own_lock = OwnLock::of(&self.name.name);
        ServedPod { requests, own_lock, ..ServedPod::new(policy, history, guards, Some(gone.clone())) }
    }

    /// Empty if it is not known.
    fn uid(&self) -> &str {
        match &self.place {
            CgroupLocation::Uid(uid) => uid.as_str(),
            CgroupLocation::Cgroup(_) => "",
        }
    }
}

/// The file.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct List {
    pods: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Entry {
    pod: String,
    cgroup: Option<PathBuf>,
    uid: Option<String>,
    #[serde(default)]
    except: Vec<PathBuf>,
    network: Option<PathBuf>,
    pid: Option<u32>,
    #[serde(default)]
    fail_open: bool,
    policy: Option<PathBuf>,
    sharding_config: Option<PathBuf>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

/// Reads the pods that are to be served.
///
/// # Errors
/// Where there is no list, or one that says too little or too much.
pub(super) fn load(file: &Path) -> Result<Vec<Pod>, PodsError> {
    let bytes = fs::metadata(file).map_err(PodsError::Read)?.len();
    if bytes > MAX_FILE_BYTES {
        return Err(PodsError::TooLarge { bytes });
    }
    let text = fs::read_to_string(file).map_err(PodsError::Read)?;
    parse(&text, file.parent().unwrap_or(Path::new("")))
}

fn parse(text: &str, folder: &Path) -> Result<Vec<Pod>, PodsError> {
    let list: List = serde_saphyr::from_str(text).map_err(|error| {
        let (line, column) = error.location().map_or((0, 0), |location| (location.line(), location.column()));
        PodsError::Parse { line, column, source: Box::new(error) }
    })?;
    let pods = list.pods.into_iter().enumerate();
    let pods: Vec<Pod> = pods.map(|(at, entry)| entry.pod(at, folder)).collect::<Result<_, _>>()?;
    let (mut names, mut places) = (HashSet::new(), HashSet::new());
    for (at, pod) in pods.iter().enumerate() {
        let twice = |what: String| Err(PodsError::Twice { at, what });
        if !names.insert(&pod.name) {
            return twice(pod.name.to_string());
        }
        if !places.insert(&pod.place) {
            return twice(pod.place.to_string());
        }
    }
    Ok(pods)
}

impl fmt::Display for CgroupLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CgroupLocation::Cgroup(path) => path.display().fmt(f),
            CgroupLocation::Uid(uid) => uid.fmt(f),
        }
    }
}

impl Entry {
    fn pod(self, at: usize, folder: &Path) -> Result<Pod, PodsError> {
        let name: PodName = self.pod.parse().map_err(|_unfit| PodsError::Name { at, pod: self.pod.clone() })?;
        let place = match (self.cgroup, self.uid) {
            (Some(cgroup), None) => CgroupLocation::Cgroup(cgroup),
            (None, Some(uid)) => CgroupLocation::Uid(uid),
            _ => return Err(PodsError::OneOf { at, fields: "cgroup, uid" }),
        };
        let network = match (self.network, self.pid) {
            (Some(network), None) => folder.join(network),
            (None, Some(pid)) => PathBuf::from(format!("/proc/{pid}/ns/net")),
            _ => return Err(PodsError::OneOf { at, fields: "network, pid" }),
        };
        let labels = self.labels.into_iter().map(|(key, value)| PodLabel { key, value });
        let policy = match (self.policy, self.sharding_config) {
            (Some(file), None) => Source::Policy(folder.join(file)),
            (None, Some(file)) => {
                Source::ShardingConfig { file: folder.join(file), pod: name.clone(), labels: labels.collect() }
            }
            _ => return Err(PodsError::OneOf { at, fields: "policy, shardingConfig" }),
        };
        let (except, fail_open) = (self.except, self.fail_open);
        let (network, policy) = (Some(network), Some(policy));
        Ok(Pod { name, place, except, network, fail_open, policy, served_by: ServedBy::Node })
    }
}

#[cfg(test)]
mod tests {
    use ctrlmesh_runtime::telemetry;

    use super::*;

    fn read(text: &str) -> Result<Vec<Pod>, String> {
        parse(text, Path::new("/etc/pods")).map_err(|error| telemetry::chain(&error))
    }

    #[test]
    fn a_pod_is_where_the_list_says() {
        let pods = read(
            "pods:\n\
             - {pod: a/b, uid: 4b2f, pid: 7, policy: b.yaml}\n\
             - {pod: a/c, cgroup: /kubepods/x, network: /run/netns/c, shardingConfig: /s.yaml, labels: {k: v}, failOpen: true, except: [/kubepods/x/y]}\n",
        )
        .unwrap();
        assert_eq!(pods[0].place, CgroupLocation::Uid("4b2f".into()));
        assert_eq!(pods[0].network.as_deref(), Some(Path::new("/proc/7/ns/net")));
        assert!(matches!(&pods[0].policy, Some(Source::Policy(file)) if file == Path::new("/etc/pods/b.yaml")));
        assert!(!pods[0].fail_open && pods[1].fail_open);
        assert_eq!(pods[1].place, CgroupLocation::Cgroup("/kubepods/x".into()));
        assert_eq!(pods[1].except, [Path::new("/kubepods/x/y")]);
        let Some(Source::ShardingConfig { file, pod, labels }) = &pods[1].policy else { panic!() };
        assert_eq!((file.to_str(), pod.name.as_str()), (Some("/s.yaml"), "c"));
        assert_eq!(labels, &[PodLabel { key: "k".into(), value: "v".into() }]);
        assert_eq!(read("pods: []"), Ok(Vec::new()));
    }

    #[test]
    fn a_bad_list_is_refused_with_pod_and_field() {
        let good = "pod: a/b, uid: u, pid: 7, policy: p";
        for (entry, wanted) in [
            ("pod: b, uid: u, pid: 7, policy: p", "pods[1].pod: \"b\""),
            ("pod: a/c, pid: 7, policy: p", "pods[1]: exactly one of cgroup, uid"),
            ("pod: a/c, uid: u, cgroup: c, pid: 7, policy: p", "exactly one of cgroup, uid"),
            ("pod: a/c, uid: v, policy: p", "exactly one of network, pid"),
            ("pod: a/c, uid: v, pid: 7", "exactly one of policy, shardingConfig"),
            ("pod: a/b, uid: v, pid: 7, policy: p", "pods[1]: a/b is another pod's"),
            ("pod: a/c, uid: u, pid: 7, policy: p", "pods[1]: u is another pod's"),
            ("pod: a/c, uid: v, pid: 7, policy: p, polcy: q", "line 3"),
        ] {
            let error = read(&format!("pods:\n- {{{good}}}\n- {{{entry}}}\n")).unwrap_err();
            assert!(error.contains(wanted), "{entry}: {error}");
        }
    }
}
