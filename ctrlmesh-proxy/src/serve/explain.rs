//! What is done to requests, told to a person as it happens?
//!
//! Lines go to the log target `explain`, which nothing listens to unless `run --explain` does.

use ctrlmesh_common::policy::Policy;
use tracing::info;

/// The log target.
pub const TARGET: &str = "explain";

/// What is done once, at the beginning.
pub fn note(text: std::fmt::Arguments<'_>) {
    info!(target: TARGET, "{text}");
}

/// What a policy limits, and which lock it renames.
pub fn policy(policy: &Policy) {
    for limit in &policy.limits {
        let resources = limit.relate_resources.iter();
        let resources: Vec<String> = resources
            .map(|it| format!("{} of {:?}", it.resources.join(","), it.api_groups))
            .collect();
        let resources = if resources.is_empty() { "*".to_owned() } else { resources.join(", ") };
        note(format_args!("limit on {resources}: {}", limit.selector));
    }
    if policy.limits.is_empty() {
        note(format_args!("no limit: everything passes as it is"));
    }
    if let Some(lock) = &policy.lock {
        let (namespace, name, per_shard) = (&lock.namespace, &lock.name, lock.per_shard());
        note(format_args!("lock {namespace}/{name} is {per_shard} on the server"));
    }
}

/// A request's target before and after. Nothing is said where it stayed the same: a request that only might hold the lock
/// is planned for as well.
pub fn rewritten(verb: &str, before: &str, after: &str) {
    if before != after && tracing::enabled!(target: TARGET, tracing::Level::INFO) {
        info!(target: TARGET, "{verb} {} became {}", readable(before), readable(after));
    }
}

/// The lock's name in what a client sends, before and after.
pub fn renamed(verb: &str, target: &str, before: &str, after: &str) {
    if tracing::enabled!(target: TARGET, tracing::Level::INFO) {
        info!(target: TARGET, "{verb} {}: {before} in its body became {after}", readable(target));
    }
}

/// A request that is answered in the API server's place.
pub fn refused(verb: &str, target: &str, why: &dyn std::error::Error) {
    if tracing::enabled!(target: TARGET, tracing::Level::INFO) {
        info!(target: TARGET, "{verb} {} refused: {why}", readable(target));
    }
}

/// Escapes of printable ASCII, undone: for eyes, not for parsers.
fn readable(target: &str) -> String {
    let mut text = String::with_capacity(target.len());
    let mut rest = target;
    while let Some(at) = rest.find('%') {
        text.push_str(&rest[..at]);
        let escape = rest.get(at + 1..at + 3);
        let byte = escape.and_then(|pair| u8::from_str_radix(pair, 16).ok());
        let byte = byte.filter(|byte| byte.is_ascii_graphic() || *byte == b' ');
        text.push(byte.map_or('%', char::from));
        rest = &rest[at + if byte.is_some() { 3 } else { 1 }..];
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_undone_where_they_can_be_read() {
        assert_eq!(readable("/a?b=c%20in%20%28x%29%00%zz%"), "/a?b=c in (x)%00%zz%");
        assert_eq!(readable("/é%2"), "/é%2");
    }
}
