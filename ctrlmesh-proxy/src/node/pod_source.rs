//! Reads the list of pods from a file or from the manager.
//!
//! A file, or the manager. What neither of them has said yet is no reason to let go of a pod that a former process was
//! told to serve: its links are there still, and refuse what would otherwise pass.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use ctrlmesh_common::policy::Redirect;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::error::NotServed;
use super::pod_list::{self, CgroupLocation, Pod, PodsError, ServedBy};
use crate::metrics::Metrics;
use crate::policy::file_poll::FilePoll;
use crate::policy::subscription::{self, Followed};
use crate::policy::{self, Current, PodPolicies};
use ctrlmesh_runtime::drain::Drain;

/// Who says which pods are to be served.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file with a list of them.
    File(PathBuf),
    /// The manager.
    Manager(Followed),
}

/// What is said, as it changes.
#[derive(Debug)]
pub(super) enum PodSource {
    File(FilePoll),
    Manager(Followed),
}

impl PodSource {
    /// The first list.
    ///
    /// # Errors
    /// Where there is none.
    pub(super) fn open(source: Source) -> Result<(Self, Vec<Pod>), PodsError> {
        match source {
            Source::File(file) => {
                let first = pod_list::load(&file)?;
                Ok((Self::File(FilePoll::new(file)), first))
            }
            Source::Manager(mut followed) => {
                let first = of(&followed.policies.borrow_and_update());
                followed.servers.mark_changed();
                Ok((Self::Manager(followed), first))
            }
        }
    }

    /// The list, where it may have changed since.
    pub(super) fn changed(&mut self) -> Option<Result<Vec<Pod>, PodsError>> {
        match self {
            Self::File(watched) => watched.changed().then(|| pod_list::load(watched.file())),
            Self::Manager(followed) => {
                let changed = followed.policies.has_changed().unwrap_or_default();
                changed.then(|| Ok(of(&followed.policies.borrow_and_update())))
            }
        }
    }

    /// Where the API server is, besides what we were told, where that may have changed since.
    pub(super) fn moved(&mut self) -> Option<Arc<[SocketAddr]>> {
        let Self::Manager(Followed { servers, .. }) = self else { return None };
        let moved = servers.has_changed().unwrap_or_default();
        moved.then(|| servers.borrow_and_update().clone())
    }

    /// Completes when there is a change that need not wait for the next look.
    pub(super) async fn news(&mut self) {
        match self {
            Self::File(_) => std::future::pending().await,
            Self::Manager(Followed { policies, whole, servers }) => {
                let ended = tokio::select! {
                    changed = policies.changed() => changed.is_err(),
                    whole = whole.changed() => whole.is_err(),
                    moved = servers.changed() => {
                        servers.mark_changed();
                        moved.is_err()
                    }
                };
                // It is to be seen by who looks next.
                policies.mark_changed();
                if ended {
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    /// Whether everything was said that there is to say: who is not on the list now is not to be served.
    pub(super) fn is_whole(&self) -> bool {
        match self {
            Self::File(_) => true,
            Self::Manager(followed) => *followed.whole.borrow(),
        }
    }

    /// The policy of a pod of the list, until it is `gone`.
    ///
    /// # Errors
    /// Where there is none, or one that cannot be applied.
    pub(super) fn policy(
        &self,
        pod: &Pod,
        metrics: &Arc<Metrics>,
        drain: &Drain,
        gone: &CancellationToken,
    ) -> Result<Current, NotServed> {
        if let Self::Manager(followed) = self {
            let policies: watch::Receiver<Arc<PodPolicies>> = followed.policies.clone();
            let policy = subscription::policy_now(pod.name.clone(), policies, metrics, drain, gone);
            return policy.ok_or(NotServed::Untold);
        }
        let name = pod.name.to_string();
        Ok(policy::enforce(pod.policy.clone(), name, metrics, drain, gone.clone())?)
    }
}

/// The pods of which the manager says that the node redirects their connections.
fn of(policies: &PodPolicies) -> Vec<Pod> {
    let pods = policies.iter().filter_map(|(name, one)| {
        let container = one.policy.container.clone();
        let served_by = match one.policy.redirect {
            Redirect::Node => ServedBy::Node,
            Redirect::Sidecar => ServedBy::Sidecar { container },
            Redirect::Nowhere => return None,
        };
        Some(Pod {
            name: name.clone(),
            place: CgroupLocation::Uid(one.uid.clone()),
            except: Vec::new(),
            network: None,
            fail_open: one.policy.fail_open,
            policy: None,
            served_by,
        })
    });
    pods.collect()
}

#[cfg(test)]
mod tests {
    use ctrlmesh_common::policy::{PodPolicy, Policy};

    use super::*;
    use crate::policy::PodName;

    #[test]
    fn a_pod_that_dials_its_own_proxy_is_left_alone_by_the_kernel() {
        let entry = |name: &str, redirect, container: Option<&str>| {
            let container = container.map(str::to_owned);
            let policy = Policy { redirect, container, ..Policy::default() };
            let pod_policy = PodPolicy {
                namespace: "ns".to_owned(),
                name: name.to_owned(),
                uid: "u".to_owned(),
                digest: 0,
                operator: "ns/op".to_owned(),
                version: 1,
                policy: Arc::new(policy),
            };
            (PodName::of(&pod_policy), pod_policy)
        };
        let policies = PodPolicies::from([
            entry("a", Redirect::Node, None),
            entry("b", Redirect::Nowhere, None),
            entry("c", Redirect::Sidecar, Some("7c1f")),
        ]);
        let takers: Vec<_> =
            of(&policies).into_iter().map(|pod| (pod.name.name, pod.served_by)).collect();
        let sidecar = ServedBy::Sidecar { container: Some("7c1f".to_owned()) };
        assert_eq!(takers, [("a".to_owned(), ServedBy::Node), ("c".to_owned(), sidecar)]);
    }
}
