//! Has a file changed since it was last looked at?
//!
//! It is looked at four times a second, through whatever symbolic links lead to it: that sees a file written in place,
//! one renamed over it, and the swapped folder of a mounted ConfigMap alike, and costs less than a request.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often a file is looked at.
pub const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// A file, and how it was when it was last looked at.
#[derive(Debug)]
pub struct FilePoll {
    file: PathBuf,
    /// Unknown at first: a change between reading it and looking at it is not missed.
    seen: Option<Stamp>,
}

/// What tells one state of a file from another without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    changed: (i64, i64),
}

impl FilePoll {
    /// A file that was not looked at yet.
    pub fn new(file: PathBuf) -> Self {
        Self { file, seen: None }
    }

    /// Which file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Whether it is another than when this was last asked; the first time it is.
    pub fn changed(&mut self) -> bool {
        let now = Stamp::of(&self.file);
        let differs = now != self.seen;
        self.seen = now;
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
