//! Brings a policy into force, and follows its source.

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::{Current, LoadError, Source, follow, load};
use crate::metrics::{Metrics, PodPolicyLabels};
use ctrlmesh_runtime::drain::Drain;

/// Brings the policy of `pod` into force and follows its source until shutdown, or until the pod is `gone`. Without a
/// source everything passes.
///
/// # Errors
/// Where there is no policy that could be applied.
pub fn enforce(
    source: Option<Source>,
    pod: String,
    metrics: &Arc<Metrics>,
    drain: &Drain,
    gone: CancellationToken,
) -> Result<Current, LoadError> {
    let first = source.as_ref().map(load).transpose()?.unwrap_or_default();
    let (sender, current) = watch::channel(Arc::new(first));
    let (stop, shown) = (drain.clone(), gone.clone());
    drain.spawn(async move {
        let following = async move {
            match source {
                Some(source) => follow(source, sender).await,
                // Keeps the sender alive, so that receivers wait for a change.
                None => sender.closed().await,
            }
        };
        tokio::select! {
            // Shutdown.
            () = stop.started() => {}
            // The pod is served no more.
            () = gone.cancelled() => {}
            () = following => {}
        }
    });
    drain.spawn(show(current.clone(), pod, metrics.clone(), drain.clone(), shown));
    Ok(current)
}

/// Says in the metrics which policy is in force, until shutdown or until the pod is `gone`.
pub(super) async fn show(
    mut current: Current,
    pod: String,
    metrics: Arc<Metrics>,
    drain: Drain,
    gone: CancellationToken,
) {
    loop {
        let policy = current.borrow_and_update().clone();
        let epoch = policy.epoch;
        let labels = PodPolicyLabels { epoch, shard: policy.shard().unwrap_or_default().to_owned() };
        metrics.pods.set_policy(&pod, labels, &gone);
        info!(pod, epoch, "policy in force");
        tokio::select! {
            biased;
            // The pod is served no more, and its epoch must not be set again.
            () = gone.cancelled() => return,
            // Shutdown.
            () = drain.started() => return,
            changed = current.changed() => if changed.is_err() { return },
        }
    }
}
