//! What came from which address lately?
//!
//! Who shows one bad token after the other waits for a while, whatever it shows, and no address has all reviews.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::IdentityError;

/// How many bad tokens one address may show within [`PERIOD`] before none that is not known is reviewed for it.
const BAD: u32 = 30;

/// Over which time they are counted.
const PERIOD: Duration = Duration::from_mins(1);

/// How often those that were quiet for that long are forgotten.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// How many reviews at once may be for one address.
const OF_ONE: usize = 16;

/// What came from whom.
#[derive(Debug, Default)]
pub(super) struct Addresses(Mutex<ByAddress>);

#[derive(Debug, Default)]
struct ByAddress {
    all: HashMap<IpAddr, OfOne>,
    /// When those that were quiet for long were forgotten last; not each time, for there may be very many.
    swept: Option<Instant>,
}

/// What came from one address lately.
#[derive(Debug)]
struct OfOne {
    began: Instant,
    bad: u32,
    under_way: Arc<Semaphore>,
}

// === impl Addresses ===

impl Addresses {
    /// Where the reviews for `address` wait for each other.
    pub(super) fn reviews_of(
        &self,
        address: IpAddr,
        now: Instant,
    ) -> Result<Arc<Semaphore>, IdentityError> {
        let mut by_address = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        by_address.sweep(now);
        let fresh = || OfOne { began: now, bad: 0, under_way: Arc::new(Semaphore::new(OF_ONE)) };
        let one = by_address.all.entry(address).or_insert_with(fresh);
        if now.duration_since(one.began) >= PERIOD {
            (one.began, one.bad) = (now, 0);
        }
        let (bad, under_way) = (one.bad, one.under_way.clone());
        drop(by_address);
        if bad < BAD { Ok(under_way) } else { Err(IdentityError::TooMany) }
    }

    /// Counts a token of it that proved nothing.
    pub(super) fn was_bad(&self, address: IpAddr) {
        let mut by_address = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(one) = by_address.all.get_mut(&address) {
            one.bad = one.bad.saturating_add(1);
        }
    }
}

// === impl ByAddress ===

impl ByAddress {
    /// Forgets who was quiet for long.
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|swept| now.duration_since(swept) < SWEEP_EVERY) {
            return;
        }
        self.swept = Some(now);
        self.all.retain(|_, one| {
            now.duration_since(one.began) < PERIOD || Arc::strong_count(&one.under_way) > 1
        });
    }
}
