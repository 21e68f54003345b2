//! What the rules on other servers have refused in one pod.

use std::collections::BTreeMap;
use std::time::SystemTime;

use ctrlmesh_common::wire::GuardState;
use ctrlmesh_request::egress::Visible;
use ctrlmesh_runtime::unix_time;

/// Rules of which notes are taken. Those of one pod have room for a few hundred.
const MAX_RULES: usize = 256;

/// By `NAMESPACE/BREAKER` and the rule's name.
#[derive(Debug, Default)]
pub(super) struct Refusals(BTreeMap<(String, String), Refusal>);

#[derive(Debug)]
struct Refusal {
    count: u64,
    last: String,
    at: SystemTime,
}

impl Refusals {
    /// Counts one. Returns whether it is the first of its rule.
    pub(super) fn note(&mut self, breaker: &str, rule: &str, visible: &Visible<'_>, at: SystemTime) -> bool {
        let (key, last) = ((breaker.to_owned(), rule.to_owned()), authority(visible));
        if let Some(refusal) = self.0.get_mut(&key) {
            *refusal = Refusal { count: refusal.count + 1, last, at };
            return false;
        }
        let has_room = self.0.len() < MAX_RULES;
        if has_room {
            self.0.insert(key, Refusal { count: 1, last, at });
        }
        has_room
    }

    /// As they are reported.
    pub(super) fn states(&self) -> impl Iterator<Item = GuardState> {
        self.0.iter().map(|((breaker, rule), refusal)| GuardState {
            breaker: breaker.clone(),
            rule: rule.clone(),
            open: false,
            changed_at: unix_time::millis(refusal.at),
            allowed: 0,
            refused: refusal.count,
            last_refused: refusal.last.clone(),
        })
    }
}

/// A name has 253 characters, so a longer one is shortened.
fn authority(visible: &Visible<'_>) -> String {
    let host: String = visible.host.chars().take(253).collect();
    if host.contains(':') { format!("[{host}]:{}", visible.port) } else { format!("{host}:{}", visible.port) }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn refusals_are_counted_by_rule_and_the_last_one_is_kept() {
        let mut refusals = Refusals::default();
        let mut note = |rule: &str, host: &str, seconds| {
            let visible = Visible { scheme: None, host, port: 443, request: None };
            refusals.note("ops/out", rule, &visible, UNIX_EPOCH + Duration::from_secs(seconds))
        };
        assert!(note("one", "a.example.com", 1));
        assert!(note("two", "fd00::1", 2));
        assert!(!note("one", "b.example.com", 3));
        let told: Vec<_> =
            refusals.states().map(|state| (state.refused, state.changed_at, state.last_refused)).collect();
        let expected = [(2, 3_000, "b.example.com:443"), (1, 2_000, "[fd00::1]:443")];
        assert_eq!(told, expected.map(|(count, at, last)| (count, at, last.to_owned())));
    }

    #[test]
    fn there_is_an_end_to_it() {
        let mut refusals = Refusals::default();
        let host = "a".repeat(1000);
        for rule in 0..300 {
            let visible = Visible { scheme: None, host: &host, port: 443, request: None };
            refusals.note("ops/out", &rule.to_string(), &visible, UNIX_EPOCH);
        }
        assert_eq!(refusals.states().count(), MAX_RULES);
        assert!(refusals.states().all(|state| state.last_refused.len() == 257));
    }
}
