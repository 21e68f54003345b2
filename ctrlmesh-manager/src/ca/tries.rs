//! How often may a leader fail to write before it lets another one try?
//!
//! Pure. A replica that may not write what all wait for (its rights were taken away, an admission refuses it) can renew its
//! Lease for ever, and would be waited for as long. So it gives the Lease up; another one, of another version or with
//! another account, may be allowed. Where none is, the Lease goes round: each time a replica tries twice as often before it
//! gives it up again, so that what else a leader does is not always begun anew.

/// How many times it is tried before the Lease is given up for the first time, and at most.
const TRIES: (u32, u32) = (3, 192);

/// How often it has been tried in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tries {
    failed: u32,
    allowed: u32,
}

// === impl Tries ===

impl Default for Tries {
    fn default() -> Self {
        Self { failed: 0, allowed: TRIES.0 }
    }
}

impl Tries {
    /// It failed once more; returns whether another is to try now.
    pub(super) fn failed(&mut self) -> bool {
        self.failed += 1;
        if self.failed < self.allowed {
            return false;
        }
        *self = Self { failed: 0, allowed: self.allowed.saturating_mul(2).min(TRIES.1) };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_may_try_after_some_tries_and_each_time_after_twice_as_many() {
        let mut tries = Tries::default();
        let mut round = || (1..=TRIES.1).find(|_| tries.failed()).unwrap_or_default();
        let rounds: Vec<u32> = (0..8).map(|_| round()).collect();
        assert_eq!(rounds, [3, 6, 12, 24, 48, 96, 192, 192]);
    }
}
