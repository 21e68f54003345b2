//! Log lines for `run --explain`: what the proxy does to each request.
//!
//! Nothing but `run --explain` listens to the log target `explain`.

use ctrlmesh_common::policy::Policy;
use tracing::info;

use crate::trace::readable;

/// The log target.
pub const TARGET: &str = "explain";

pub fn note(text: std::fmt::Arguments<'_>) {
    info!(target: TARGET, "{text}");
}

/// Logs a policy's limits, guards and faults, and the lock that it renames.
pub fn policy(policy: &Policy) {
    for limit in &policy.limits {
        let resources = limit.relate_resources.iter();
        let resources: Vec<String> =
            resources.map(|it| format!("{} of {:?}", it.resources.join(","), it.api_groups)).collect();
        let resources = if resources.is_empty() { "*".to_owned() } else { resources.join(", ") };
        note(format_args!("limit on {resources}: {}", limit.selector));
    }
    for guard in policy.guards() {
        note(format_args!("guard: rule {:?} of CircuitBreaker {}", guard.rule, guard.breaker));
    }
    for fault in policy.faults() {
        note(format_args!("fault {:?} of FaultInjection {}", fault.fault, fault.injection));
    }
    if policy.limits.is_empty() && policy.guards().is_empty() && policy.faults().is_empty() {
        note(format_args!("no limit: everything passes as it is"));
    }
    if let Some(lock) = &policy.lock {
        let (namespace, name, per_shard) = (&lock.namespace, &lock.name, lock.per_shard());
        note(format_args!("lock {namespace}/{name} is {per_shard} on the server"));
    }
}

/// Logs a request's target before and after, where they differ: a request that only might hold the lock has a plan,
/// too.
pub fn rewritten(verb: &str, before: &str, after: &str) {
    if before != after && tracing::enabled!(target: TARGET, tracing::Level::INFO) {
        info!(target: TARGET, "{verb} {} became {}", readable(before), readable(after));
    }
}

/// Logs the lock's name in a client's body, before and after.
pub fn renamed(verb: &str, target: &str, before: &str, after: &str) {
    if tracing::enabled!(target: TARGET, tracing::Level::INFO) {
        info!(target: TARGET, "{verb} {}: {before} in its body became {after}", readable(target));
    }
}

/// Logs a request that the proxy refuses.
pub fn refused(verb: &str, target: &str, why: &dyn std::error::Error) {
    if tracing::enabled!(target: TARGET, tracing::Level::INFO) {
        info!(target: TARGET, "{verb} {} refused: {why}", readable(target));
    }
}
