//! Finds out whether somebody renews a Lease.
//!
//! Pure. No clock of another machine counts: a Lease is held while its `renewTime` changes, and is not held any more
//! when it has stayed the same for as long as the Lease lasts.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use tokio::time::Instant;

/// Where the Lease does not say how long it lasts.
const LASTS: Duration = Duration::from_secs(15);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leadership {
    /// It was not watched for long enough.
    Unknown,
    Held,
    Vacant,
}

/// Who holds it, and when they renewed it last, by their own clock.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Renewal {
    holder: String,
    time: Option<MicroTime>,
}

/// What was seen of one Lease.
#[derive(Debug, Default)]
pub(super) struct LeaseWatch {
    /// The last renewal, and when it was first seen, by this machine's steady clock.
    seen: Option<(Renewal, Instant)>,
    is_renewed: bool,
    /// A renewal after which none came.
    last: Option<Renewal>,
}

impl LeaseWatch {
    /// Begins anew, and knows of the renewal after which none came for long enough.
    pub(super) fn after(last: Option<Renewal>) -> Self {
        Self { last, ..Self::default() }
    }

    /// What follows from the Lease as it is now.
    pub(super) fn look(&mut self, lease: Option<&LeaseSpec>, now: Instant) -> Leadership {
        let holder = lease.and_then(|lease| lease.holder_identity.clone()).filter(|holder| !holder.is_empty());
        let (Some(lease), Some(holder)) = (lease, holder) else {
            self.seen = None;
            return Leadership::Vacant;
        };
        let renewal = Renewal { holder, time: lease.renew_time.clone() };
        if self.last.as_ref() == Some(&renewal) {
            return Leadership::Vacant;
        }
        let lasts = lease.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
        let lasts = lasts.filter(|seconds| *seconds > 0).map_or(LASTS, Duration::from_secs);
        match &self.seen {
            Some((seen, since)) if *seen == renewal => {
                if now.duration_since(*since) >= lasts {
                    self.last = Some(renewal);
                    return Leadership::Vacant;
                }
            }
            Some(_) => {
                self.is_renewed = true;
                self.seen = Some((renewal, now));
            }
            None => {
                self.is_renewed = false;
                self.seen = Some((renewal, now));
            }
        }
        if self.is_renewed { Leadership::Held } else { Leadership::Unknown }
    }

    /// The renewal after which none came.
    pub(super) fn into_last(self) -> Option<Renewal> {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Renewed in this year, which is not this machine's.
    fn lease(holder: &str, year: u32) -> LeaseSpec {
        serde_json::from_value(json!({"holderIdentity": holder, "leaseDurationSeconds": 8,
            "renewTime": format!("{year}-01-01T00:00:00.000000Z")}))
        .unwrap()
    }

    fn second(second: u64) -> Instant {
        // Of one run of the tests.
        static BEGIN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        *BEGIN.get_or_init(Instant::now) + Duration::from_secs(second)
    }

    #[test]
    fn a_lease_is_held_while_it_is_renewed() {
        for year in [1999, 2199] {
            let mut watch = LeaseWatch::default();
            assert_eq!(watch.look(Some(&lease("a", year)), second(0)), Leadership::Unknown);
            assert_eq!(watch.look(Some(&lease("a", year)), second(7)), Leadership::Unknown);
            assert_eq!(watch.look(Some(&lease("a", year + 1)), second(7)), Leadership::Held, "by no clock of ours");
            assert_eq!(watch.look(Some(&lease("a", year + 1)), second(14)), Leadership::Held);
        }
    }

    #[test]
    fn a_lease_that_is_not_renewed_lapses() {
        // Its holder's clock is far ahead.
        let (mut watch, held) = (LeaseWatch::default(), lease("a", 2199));
        assert_eq!(watch.look(Some(&held), second(0)), Leadership::Unknown);
        assert_eq!(watch.look(Some(&held), second(8)), Leadership::Vacant);
        // What is known is not waited for again.
        let mut next = LeaseWatch::after(watch.into_last());
        assert_eq!(next.look(Some(&held), second(9)), Leadership::Vacant);
        assert_eq!(next.look(Some(&lease("b", 2199)), second(10)), Leadership::Unknown, "another holder");
    }

    #[test]
    fn a_lease_that_nobody_holds_is_vacant() {
        let mut watch = LeaseWatch::default();
        assert_eq!(watch.look(None, second(0)), Leadership::Vacant);
        assert_eq!(watch.look(Some(&lease("", 2026)), second(0)), Leadership::Vacant);
        let endless = LeaseSpec { lease_duration_seconds: None, ..lease("a", 2026) };
        assert_eq!(watch.look(Some(&endless), second(0)), Leadership::Unknown);
        assert_eq!(watch.look(Some(&endless), second(15)), Leadership::Vacant);
    }
}
