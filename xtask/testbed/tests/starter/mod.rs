//! A harness that can be killed: this very binary as a child, which starts something and says in which folder.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail};

/// The child; where a test fails, it ends with the test.
pub(crate) struct Starter(pub(crate) Child);

impl Starter {
    /// Starts the child, which runs `test` alone and finds `role`, a variable and its value, in its environment.
    pub(crate) fn start(test: &str, role: (&str, &str)) -> Result<Self> {
        let child = Command::new(env::current_exe()?)
            .args(["--exact", test, "--nocapture"])
            .env(role.0, role.1)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self(child))
    }

    /// The folder that it says it uses.
    pub(crate) fn folder(&mut self) -> Result<PathBuf> {
        let output = self.0.stdout.take().context("output")?;
        for line in BufReader::new(output).lines() {
            if let Some((_, folder)) = line?.split_once("folder=") {
                return Ok(folder.into());
            }
        }
        bail!("the child ended without naming its folder")
    }
}

impl Drop for Starter {
    fn drop(&mut self) {
        // It has ended already where the test went well.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
