//! Changes objects all the time, so that an operator has work.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, ensure};
use ctrlmesh_runtime::sync::lock;

use crate::api::Api;
use crate::work::Work;

/// Changes one object of work after the other, so that there is something to do; until it is dropped.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Changing>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Changing {
    over: AtomicBool,
    changed: AtomicU64,
    failed: Mutex<Option<String>>,
}

impl Load {
    /// Begins to change what is at `paths`, one every `pause`, each in another way than before.
    pub(super) fn begin(api: Arc<Api>, work: Work, paths: Vec<String>, pause: Duration) -> Self {
        let shared = Arc::new(Changing::default());
        let thread = thread::spawn({
            let shared = shared.clone();
            move || {
                for (number, path) in (1..).zip(paths.iter().cycle()) {
                    if shared.over.load(Ordering::Relaxed) {
                        break;
                    }
                    match api.merge(path, &work.change(number)) {
                        Ok(_) => drop(shared.changed.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => shared.refused(path, &error),
                    }
                    thread::sleep(pause);
                }
            }
        });
        Self { shared, thread: Some(thread) }
    }

    /// Ends it; gives how many changes it has made.
    ///
    /// # Errors
    /// Where it made none, or one failed: then what it was for has not been tried.
    pub fn finish(self) -> Result<u64> {
        let shared = self.shared.clone();
        drop(self);
        let failed = lock(&shared.failed).take();
        ensure!(failed.is_none(), "the load failed: {}", failed.unwrap_or_default());
        let changed = shared.changed.load(Ordering::Relaxed);
        ensure!(changed > 0, "the load changed nothing");
        Ok(changed)
    }
}

impl Changing {
    /// Remembers the first failure.
    fn refused(&self, path: &str, error: &anyhow::Error) {
        let mut failed = lock(&self.failed);
        failed.get_or_insert_with(|| format!("{path}: {error:#}"));
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It panicked where there is an error, and has said so.
            drop(thread.join());
        }
    }
}
