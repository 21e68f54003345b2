//! Who may read a page of what joins or leaves now?
//!
//! A change of the policy wakes all watches at once, and each is to read whole pages. They take turns, in the order in
//! which they ask: waiting is harmless, each stands at its version. A turn ends before its page is handed over, so whose
//! client does not read keeps nobody waiting.

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::net::body::Relay;

/// How many pages the process reads at once.
const PAGES: usize = 16;

/// How long a page may be of which so many are read at once, in bytes.
const SHORT_BYTES: usize = 4 << 20;

/// How many longer ones it reads at once.
const LONG_PAGES: usize = 1;

/// How long a page may be, in bytes: beyond it the client reads it itself, after 410.
pub(super) const MAX_PAGE_BYTES: usize = 64 << 20;

static SHORT: Semaphore = Semaphore::const_new(PAGES);
static LONG: Semaphore = Semaphore::const_new(LONG_PAGES);

/// The right to hold a page, until it is dropped.
#[derive(Debug, Default)]
pub(super) struct Turn {
    _short: Option<SemaphorePermit<'static>>,
    long: Option<SemaphorePermit<'static>>,
}

/// A page that broke off, or is longer than any.
#[derive(Debug)]
pub(super) struct NoPage;

// === impl Turn ===

impl Turn {
    /// A turn, once it has come. Who waits for it, or has it, must go on being asked: others wait for it.
    pub(super) async fn come() -> Self {
        Self { _short: SHORT.acquire().await.ok(), long: None }
    }

    /// For what is said to be of one object only, and need not wait.
    pub(super) fn of_one() -> Self {
        Self::default()
    }

    /// A whole body.
    pub(super) async fn read(&mut self, mut body: Relay) -> Result<Bytes, NoPage> {
        let mut page = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_broken| NoPage)?.into_data() else { continue };
            let bytes = page.len() + data.len();
            if bytes > MAX_PAGE_BYTES {
                return Err(NoPage);
            }
            if bytes > SHORT_BYTES && self.long.is_none() {
                // Who has this one waits for nobody.
                self.long = LONG.acquire().await.ok();
            }
            page.extend_from_slice(&data);
        }
        Ok(page.freeze())
    }
}
