//! Reads the list of pods from a file or from the manager.
//!
//! A pod that is missing from an incomplete list is not released: a former process may have attached it, and its links
//! refuse connections that would otherwise pass.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use ctrlmesh_common::policy::{Policy, Redirect};
use ctrlmesh_intercept::Target;
use tokio_util::sync::CancellationToken;

use super::error::NotServed;
use super::pod_list::{self, CgroupLocation, Pod, PodsError, ServedBy};
use crate::metrics::Metrics;
use crate::net::accept::FORWARD_ADDRESSES;
use crate::policy::file_poll::FilePoll;
use crate::policy::subscription::{self, PodSubscription, Publications, Subscription};
use crate::policy::{self, BypassReports, PodPolicies, PublishEnded, PublishWebhook, Validity};
use ctrlmesh_runtime::drain::Drain;

/// Where the list of pods comes from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file with the list.
    File(PathBuf),
    /// The manager.
    Manager(Subscription),
}

/// The list of pods, as it changes.
#[derive(Debug)]
pub(super) enum PodSource {
    File(FilePoll),
    Manager(Subscription),
}

impl PodSource {
    /// Returns the first list, too.
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

    /// The API server's addresses beside the configured ones, where they may have changed since the last call.
    pub(super) fn changed_servers(&mut self) -> Option<Arc<[SocketAddr]>> {
        let Self::Manager(Subscription { servers, .. }) = self else { return None };
        let changed = servers.has_changed().unwrap_or_default();
        changed.then(|| servers.borrow_and_update().clone())
    }

    /// The API server's own addresses, as far as the manager has said.
    pub(super) fn servers(&self) -> Arc<[SocketAddr]> {
        match self {
            Self::File(_) => Arc::default(),
            Self::Manager(followed) => followed.servers.borrow().clone(),
        }
    }

    /// Completes at a change of the manager's list. A file is polled instead.
    pub(super) async fn wait_for_change(&mut self) {
        match self {
            Self::File(_) => std::future::pending().await,
            Self::Manager(Subscription { policies, whole, servers, .. }) => {
                let ended = tokio::select! {
                    changed = policies.changed() => changed.is_err(),
                    whole = whole.changed() => whole.is_err(),
                    changed = servers.changed() => {
                        servers.mark_changed();
                        changed.is_err()
                    }
                };
                // So that `changed` returns the list.
                policies.mark_changed();
                if ended {
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    /// Where it is reported what pods send past their proxy.
    pub(super) fn bypass_reports(&self) -> BypassReports {
        match self {
            Self::File(_) => BypassReports::default(),
            Self::Manager(followed) => followed.reports.bypass.clone(),
        }
    }

    /// Whether the list is complete, so that a pod which is not on it is not to be served.
    pub(super) fn is_whole(&self) -> bool {
        match self {
            Self::File(_) => true,
            Self::Manager(followed) => *followed.whole.borrow(),
        }
    }

    /// What the policy of a pod of the list has redirected beside connections to the API server, as far as it is known
    /// already: from the moment at which the pod is attached.
    pub(super) fn targets(&self, pod: &Pod) -> Vec<Target> {
        match (self, &pod.policy) {
            (Self::Manager(followed), _) => {
                followed.policies.borrow().get(&pod.name).map(|one| targets(&one.policy)).unwrap_or_default()
            }
            // One that cannot be read is reported where the pod is served by it.
            (Self::File(_), Some(source)) => policy::load(source).map(|policy| targets(&policy)).unwrap_or_default(),
            (Self::File(_), None) => Vec::new(),
        }
    }

    /// The policy of a pod of the manager's list now. `None` where a file lists the pods: it names none with a sidecar.
    pub(super) fn policy_now(&self, pod: &Pod) -> Option<Arc<Policy>> {
        let Self::Manager(followed) = self else { return None };
        followed.policies.borrow().get(&pod.name).map(|one| one.policy.clone())
    }

    /// Where the manager is told of the webhook of a pod.
    pub(super) fn publish_webhook(&self, pod: &Pod) -> PublishWebhook {
        match self {
            Self::File(_) => PublishWebhook::default(),
            Self::Manager(followed) => followed.reports.webhooks.begin(pod.name.clone()),
        }
    }

    /// Where the manager is told which containers of a pod have ended.
    pub(super) fn publish_ended(&self, pod: &Pod) -> PublishEnded {
        match self {
            Self::File(_) => PublishEnded::default(),
            Self::Manager(followed) => followed.reports.ended.begin(pod.name.clone()),
        }
    }

    /// The policy of a pod of the list, followed until the pod is `gone`.
    ///
    /// # Errors
    /// Where there is none, or one that cannot be applied.
    pub(super) fn policy(
        &self,
        pod: &Pod,
        metrics: &Arc<Metrics>,
        drain: &Drain,
        gone: &CancellationToken,
    ) -> Result<PodSubscription, NotServed> {
        if let Self::Manager(followed) = self {
            let policy = subscription::policy_now(pod.name.clone(), followed.clone(), metrics, drain, gone);
            return policy.ok_or(NotServed::Untold);
        }
        let name = pod.name.to_string();
        let policy = policy::enforce(pod.policy.clone(), name, metrics, drain, gone.clone())?;
        Ok(PodSubscription { policy, publish: Publications::default(), validity: Validity::default() })
    }
}

/// What a policy has redirected beside connections to the API server. A sidecar itself listens for clients of its
/// forward proxy.
pub(super) fn targets(policy: &Policy) -> Vec<Target> {
    let ports = policy.egress_ports().iter().copied().map(Target::any_address);
    let forward = FORWARD_ADDRESSES.into_iter().filter(|_| policy.forward_proxy && policy.redirect == Redirect::Node);
    ports.chain(forward.map(Target::exact)).collect()
}

/// The pods whose connections the node redirects, by the manager's list.
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
            (pod_policy.pod_name(), pod_policy)
        };
        let policies = PodPolicies::from([
            entry("a", Redirect::Node, None),
            entry("b", Redirect::Nowhere, None),
            entry("c", Redirect::Sidecar, Some("7c1f")),
        ]);
        let served_by: Vec<_> = of(&policies).into_iter().map(|pod| (pod.name.name, pod.served_by)).collect();
        let sidecar = ServedBy::Sidecar { container: Some("7c1f".to_owned()) };
        assert_eq!(served_by, [("a".to_owned(), ServedBy::Node), ("c".to_owned(), sidecar)]);
    }
}
