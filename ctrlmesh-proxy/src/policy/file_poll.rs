//! Finds out whether a file has changed, by polling.
//!
//! The file's metadata are read four times a second, through all symbolic links. So a file that is written in place,
//! one that is renamed over it, and the swapped folder of a mounted ConfigMap are all seen. That costs less than a
//! request.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Between two looks at a file.
pub const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// A file, and its state when last polled.
#[derive(Debug)]
pub struct FilePoll {
    file: PathBuf,
    /// `None` at first, so that a change between the first read and the first poll is not missed.
    last: Option<Stamp>,
}

/// The metadata that differ between two states of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

impl FilePoll {
    pub fn new(file: PathBuf) -> Self {
        Self { file, last: None }
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Whether the file has changed since the last call. True at the first call.
    pub fn changed(&mut self) -> bool {
        let now = Stamp::of(&self.file);
        let differs = now != self.last;
        self.last = now;
        differs
    }
}

impl Stamp {
    fn of(file: &Path) -> Option<Self> {
        let metadata = fs::metadata(file).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}
