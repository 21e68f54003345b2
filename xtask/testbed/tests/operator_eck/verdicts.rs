//! What the operator's webhooks say of requests. All are dry runs: nothing changes.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_testbed::Space;

use crate::install::UNREACHED;
use crate::samples::{ELASTICSEARCH, Named, Request};

/// Each request by its name: whether it is admitted, and everything that is said.
pub(crate) struct Verdicts(BTreeMap<String, (bool, String)>);

impl Verdicts {
    pub(crate) fn of(space: Space<'_>, requests: &[Named]) -> Result<Self> {
        let verdict = |(name, request): &Named| Ok((name.clone(), ask(space, request)?));
        Ok(Self(requests.iter().map(verdict).collect::<Result<_>>()?))
    }

    /// Refuses a reference in which something else is admitted than `right`, or not even asked about.
    pub(crate) fn ensure_admitted(&self, right: impl Fn(&str) -> bool) -> Result<()> {
        for (name, (admitted, words)) in &self.0 {
            ensure!(!words.contains(UNREACHED), "{name}: {words}");
            ensure!(*admitted == right(name), "{name}: {words}");
        }
        Ok(())
    }

    /// Refuses requests that the API server itself does not take.
    pub(crate) fn ensure_all_admitted(&self) -> Result<()> {
        self.ensure_admitted(|_| true)
    }

    /// Refuses verdicts that are not those of one replica alone.
    pub(crate) fn ensure_as(&self, alone: &Self, where_: &str) -> Result<()> {
        ensure!(self.0.len() == alone.0.len(), "{:?}", self.0.keys());
        for (name, verdict) in &self.0 {
            let alone = alone.0.get(name).context("the same request")?;
            ensure!(verdict == alone, "{name} in {where_}: {verdict:?}\none replica alone: {alone:?}");
        }
        Ok(())
    }
}

fn ask(space: Space<'_>, request: &Request) -> Result<(bool, String)> {
    let dry_run = "--dry-run=server";
    let (mut command, input) = match request {
        Request::Create(object) => (space.command(&["create", dry_run, "--filename", "-"]), object.to_string()),
        Request::Change(patch) => {
            let patch = patch.to_string();
            let change = ["patch", "elasticsearch", ELASTICSEARCH, dry_run, "--type=json", "--patch", &patch];
            (space.command(&change), String::new())
        }
    };
    let pipe = Stdio::piped;
    let mut child = command.stdin(pipe()).stdout(pipe()).stderr(pipe()).spawn().context("start kubectl")?;
    child.stdin.take().context("standard input")?.write_all(input.as_bytes())?;
    let output = child.wait_with_output()?;
    // Warnings, and why it was refused.
    let said = String::from_utf8(output.stderr)?;
    Ok((output.status.success(), said))
}
