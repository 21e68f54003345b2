//! Tells Leases that are held from Leases that have expired.
//!
//! A Lease expires as for client-go's candidates (`tools/leaderelection/leaderelection.go`, `isLeaseValid`): by the
//! time that has passed here since its last renewal was first seen. So no two clocks have to agree.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Leases of one namespace, by name: who renewed it when, as is written there, and when that was first seen.
#[derive(Debug, Default)]
pub struct Leases(BTreeMap<String, (String, Instant)>);

impl Leases {
    /// Takes the list that there is `now`; gives it without those that nobody has renewed for as long as they last. One
    /// that does not say how long it lasts stays.
    pub fn living(&mut self, mut list: Value, now: Instant) -> Value {
        if let Some(leases) = list.get_mut("items").and_then(Value::as_array_mut) {
            leases.retain(|lease| self.lives(lease, now));
        }
        list
    }

    fn lives(&mut self, lease: &Value, now: Instant) -> bool {
        let (name, spec) = (lease["metadata"]["name"].as_str().unwrap_or_default(), &lease["spec"]);
        let renewed = format!("{} {}", spec["holderIdentity"], spec["renewTime"]);
        let seen = self.0.entry(name.to_owned()).or_insert_with(|| (renewed.clone(), now));
        if seen.0 != renewed {
            *seen = (renewed, now);
        }
        let lasts = spec["leaseDurationSeconds"].as_u64().map(Duration::from_secs);
        lasts.is_none_or(|lasts| now.duration_since(seen.1) < lasts)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_lease_that_is_not_renewed_expires_after_its_duration() {
        let list = |renewed: &str| {
            let lease = |name: &str, spec: Value| json!({"metadata": {"name": name}, "spec": spec});
            json!({"items": [
                lease("lock", json!({"holderIdentity": "a_1", "renewTime": renewed, "leaseDurationSeconds": 15})),
                lease("endless", json!({"holderIdentity": "a_1", "renewTime": "once"})),
            ]})
        };
        let (mut leases, start) = (Leases::default(), Instant::now());
        let mut held = |second, renewed| {
            let now = start + Duration::from_secs(second);
            let living = leases.living(list(renewed), now);
            living["items"].as_array().unwrap().len() == 2
        };
        assert!(held(0, "at 0") && held(14, "at 0"));
        assert!(!held(15, "at 0"));
        assert!(held(20, "at 20") && held(34, "at 20"), "its holder came back");
        assert!(!held(35, "at 20"));
        assert_eq!(leases.living(Value::Null, start), Value::Null);
    }
}
