//! Decides when a leader that cannot write the Secret gives its Lease up.
//!
//! Pure. A replica without the right to write can still renew its Lease for ever, and others would wait as long.
//! Another replica, of another version or account, may be allowed to write. Where none is, the Lease goes round. Each
//! time a replica attempts twice as often before it gives up, so that the leader's other work is not restarted all the
//! time.

/// Attempts before the Lease is given up, at first and at most.
const ATTEMPTS: (u32, u32) = (3, 192);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WriteAttempts {
    failed: u32,
    allowed: u32,
}

impl Default for WriteAttempts {
    fn default() -> Self {
        Self { failed: 0, allowed: ATTEMPTS.0 }
    }
}

impl WriteAttempts {
    /// Returns whether another replica is to try now.
    pub(super) fn failed(&mut self) -> bool {
        self.failed += 1;
        if self.failed < self.allowed {
            return false;
        }
        *self = Self { failed: 0, allowed: self.allowed.saturating_mul(2).min(ATTEMPTS.1) };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_double_each_time_the_lease_is_given_up() {
        let mut attempts = WriteAttempts::default();
        let mut round = || (1..=ATTEMPTS.1).find(|_| attempts.failed()).unwrap_or_default();
        let rounds: Vec<u32> = (0..8).map(|_| round()).collect();
        assert_eq!(rounds, [3, 6, 12, 24, 48, 96, 192, 192]);
    }
}
