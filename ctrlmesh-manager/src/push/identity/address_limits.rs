//! Limits token reviews per client address.
//!
//! An address that sends one bad token after the other waits, and no address occupies all reviews.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ctrlmesh_runtime::sync::lock;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::IdentityError;

/// Bad tokens of one address within [`PERIOD`], before its unknown tokens are not reviewed any more.
const BAD: u32 = 30;

const PERIOD: Duration = Duration::from_mins(1);

/// How often quiet addresses are dropped.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// Concurrent reviews of one address.
const OF_ONE: usize = 16;

#[derive(Debug, Default)]
pub(super) struct AddressLimits(Mutex<ByAddress>);

#[derive(Debug, Default)]
struct ByAddress {
    all: HashMap<IpAddr, AddressState>,
    /// Not swept on each call: there may be very many addresses.
    swept: Option<Instant>,
}

#[derive(Debug)]
struct AddressState {
    began: Instant,
    bad: u32,
    under_way: Arc<Semaphore>,
}

impl AddressLimits {
    /// The semaphore for the reviews of `address`.
    pub(super) fn reviews_of(&self, address: IpAddr, now: Instant) -> Result<Arc<Semaphore>, IdentityError> {
        let mut by_address = lock(&self.0);
        by_address.sweep(now);
        let fresh = || AddressState { began: now, bad: 0, under_way: Arc::new(Semaphore::new(OF_ONE)) };
        let one = by_address.all.entry(address).or_insert_with(fresh);
        if now.duration_since(one.began) >= PERIOD {
            (one.began, one.bad) = (now, 0);
        }
        let (bad, under_way) = (one.bad, one.under_way.clone());
        drop(by_address);
        if bad < BAD { Ok(under_way) } else { Err(IdentityError::TooMany) }
    }

    /// Counts a bad token.
    pub(super) fn was_bad(&self, address: IpAddr) {
        let mut by_address = lock(&self.0);
        if let Some(one) = by_address.all.get_mut(&address) {
            one.bad = one.bad.saturating_add(1);
        }
    }
}

impl ByAddress {
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|swept| now.duration_since(swept) < SWEEP_EVERY) {
            return;
        }
        self.swept = Some(now);
        self.all.retain(|_, one| now.duration_since(one.began) < PERIOD || Arc::strong_count(&one.under_way) > 1);
    }
}
