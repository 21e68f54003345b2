//! Bounds the pages that splices read at once.
//!
//! A change of the policy wakes all watches at once, and each reads whole pages. Permits are given in the order of
//! requests. Waiting is harmless, because each watch stands at its version. A permit is released before its page is
//! handed to the client, so a client that does not read blocks nobody.

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::net::body::Relay;

/// Pages that the process reads at once.
const PAGES: usize = 16;

/// A longer page needs the permit for long pages, too.
const SHORT_BYTES: usize = 4 << 20;

/// Long pages that the process reads at once.
const LONG_PAGES: usize = 1;

/// A client whose page is longer gets 410, and lists itself.
pub(super) const MAX_PAGE_BYTES: usize = 64 << 20;

static SHORT: Semaphore = Semaphore::const_new(PAGES);
static LONG: Semaphore = Semaphore::const_new(LONG_PAGES);

/// The right to hold one page in memory.
#[derive(Debug, Default)]
pub(super) struct PagePermit {
    _short: Option<SemaphorePermit<'static>>,
    long: Option<SemaphorePermit<'static>>,
}

/// A page broke off, or is longer than [`MAX_PAGE_BYTES`].
#[derive(Debug)]
pub(super) struct PageError;

impl PagePermit {
    /// Waits for a permit. A future that waits for one or holds one must be polled on: other watches wait for it.
    pub(super) async fn acquire() -> Self {
        Self { _short: SHORT.acquire().await.ok(), long: None }
    }

    /// Without waiting, for a list that is limited to one object.
    pub(super) fn unlimited() -> Self {
        Self::default()
    }

    pub(super) async fn read(&mut self, mut body: Relay) -> Result<Bytes, PageError> {
        let mut page = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_broken| PageError)?.into_data() else { continue };
            let bytes = page.len() + data.len();
            if bytes > MAX_PAGE_BYTES {
                return Err(PageError);
            }
            if bytes > SHORT_BYTES && self.long.is_none() {
                // The holder of this permit waits for no other.
                self.long = LONG.acquire().await.ok();
            }
            page.extend_from_slice(&data);
        }
        Ok(page.freeze())
    }
}
