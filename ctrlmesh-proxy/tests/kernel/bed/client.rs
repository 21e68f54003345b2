//! Processes of a test, and the reports of clients.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::Child;

use serde::de::DeserializeOwned;

/// A process of the test's, killed with the test.
pub(crate) struct Process(pub(crate) Child);

/// What a client saw of one connection.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(default)]
pub(crate) struct ClientReport {
    pub(crate) peer: String,
    pub(crate) local: String,
    pub(crate) answer: String,
    pub(crate) error: String,
    pub(crate) ms: f64,
}

/// What a hammering client saw.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct ConnectCounts {
    pub(crate) proxied: u64,
    pub(crate) direct: u64,
    pub(crate) refused: u64,
    pub(crate) broken: u64,
    pub(crate) errors: std::collections::BTreeMap<String, u64>,
}

impl Process {
    /// Reads one line.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Ends stdin and reads the answer, the last line.
    pub(crate) fn finish<T: DeserializeOwned>(mut self) -> T {
        drop(self.0.stdin.take());
        let mut text = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(self.0.wait().unwrap().success());
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    /// SIGKILL, and wait.
    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Gone already, or goes now; both are well.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
