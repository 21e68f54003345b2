//! Lists the nodes on this machine, of whichever process.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, process, thread};

use super::supervisor;
use crate::supervise;

/// How long the end of a node may take. It takes half a second.
const GONE_WITHIN: Duration = Duration::from_secs(40);

/// A node that somebody started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExistingNode {
    folder: PathBuf,
}

/// How a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Pods can run on it.
    Ready,
    /// It starts, or ends.
    NotReady,
    /// Whoever kept it was killed; the next node that starts removes it.
    Left,
}

impl ExistingNode {
    /// All nodes.
    ///
    /// # Errors
    /// Where the folder for temporary files cannot be read.
    pub fn all() -> io::Result<Vec<Self>> {
        Ok(supervisor::folders()?.into_iter().map(|folder| Self { folder }).collect())
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The kubeconfig of its administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    /// How it is.
    pub fn state(&self) -> State {
        match (supervisor::is_kept(&self.folder), self.kubeconfig().is_file()) {
            (false, _) => State::Left,
            (true, true) => State::Ready,
            (true, false) => State::NotReady,
        }
    }

    /// Says that this process holds the node for a person, who ends it by [`Self::end`].
    ///
    /// # Errors
    /// Where that cannot be written.
    pub fn hold(folder: &Path) -> io::Result<()> {
        let mut file = fs::File::create(folder.join("holder"))?;
        let start = supervise::started(process::id()).unwrap_or_default();
        writeln!(file, "{} {start}", process::id())
    }

    /// Whether a process holds it for a person; other nodes are a test's.
    pub fn is_held(&self) -> bool {
        supervisor::live_process(&self.folder.join("holder")).is_some()
    }

    /// Ends it, and returns when nothing of it is left.
    ///
    /// # Errors
    /// Where something of it stays.
    pub fn end(&self) -> io::Result<()> {
        let holder = fs::read_to_string(self.folder.join("holder")).unwrap_or_default();
        supervisor::end(&self.folder)?;
        let deadline = Instant::now() + GONE_WITHIN;
        while self.folder.exists() || supervisor::is_live(&holder) {
            if !supervisor::is_kept(&self.folder) {
                supervisor::sweep()?;
            }
            if Instant::now() > deadline {
                let folder = self.folder.display();
                return Err(io::Error::other(format!("{folder} is not gone after {GONE_WITHIN:?}")));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}
