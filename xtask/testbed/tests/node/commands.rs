//! `cargo xtask node`, as people use it, in a folder for temporary files of its own: other people's nodes are not seen
//! there.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::{env, fs};

use anyhow::{Context as _, Result, bail, ensure};
use ctrlmesh_testbed::KUBECONFIG;
use tempfile::TempDir;
use xtask::kubectl;

use crate::ends::Traces;
use crate::until;

/// The variable that names the folder for temporary files. All that is started inherits it.
const TEMPORARY: &str = "TMPDIR";

/// Ends the nodes that are there when standard input does. `$0` is the program, `$1` the folder.
const GUARD: &str = r#"while read -r _; do :; done; "$0" down; rm -rf "$1""#;

/// A person's machine, as far as nodes go.
struct Machine {
    temporary: TempDir,
    /// Ends what is there, also where this process is killed.
    guard: Child,
}

impl Machine {
    fn new() -> Result<Self> {
        let temporary = tempfile::tempdir()?;
        // Whoever kills a run of tests kills its process group.
        let guard = Command::new("sh")
            .args(["-c", GUARD, env!("CARGO_BIN_EXE_ctrlmesh-testbed")])
            .arg(temporary.path())
            .env(TEMPORARY, temporary.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self { temporary, guard })
    }

    fn node(&self, arguments: &[&str]) -> Result<Output> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut cargo = Command::new("cargo");
        cargo.args(["xtask", "node"]).args(arguments).current_dir(root);
        // This test has it from the run of tests; cargo would build everything anew.
        cargo.env_remove("RUSTC_BOOTSTRAP");
        Ok(cargo.env(TEMPORARY, self.temporary.path()).output()?)
    }

    /// What a command prints, and what it says beside.
    fn said(&self, arguments: &[&str]) -> Result<(String, String)> {
        let output = self.node(arguments)?;
        let (printed, said) = (String::from_utf8(output.stdout)?, String::from_utf8(output.stderr)?);
        ensure!(output.status.success(), "{arguments:?}: {}: {said}", output.status);
        Ok((printed, said))
    }

    /// What a command says that fails, and prints nothing that somebody could take for an answer.
    fn refused(&self, arguments: &[&str]) -> Result<String> {
        let output = self.node(arguments)?;
        ensure!(output.status.code() == Some(1), "{arguments:?}: {output:?}");
        ensure!(output.stdout.is_empty(), "{arguments:?}: {output:?}");
        Ok(String::from_utf8(output.stderr)?)
    }

    /// Starts a node; gives its kubeconfig, and what was said.
    fn up(&self) -> Result<(PathBuf, String)> {
        let (printed, said) = self.said(&["up"])?;
        let [kubeconfig] = &printed.lines().collect::<Vec<_>>()[..] else { bail!("not one line: {printed:?}") };
        ensure!(kubeconfig.starts_with(&*self.temporary.path().to_string_lossy()), "{printed}");
        Ok((kubeconfig.into(), said))
    }

    /// The kubeconfigs that `status` lists as ready, and as held by `up`.
    fn ready(&self) -> Result<Vec<PathBuf>> {
        let (printed, _) = self.said(&["status"])?;
        let rows = printed.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>());
        let ready = |row: Vec<&str>| match row[..] {
            ["ready", "up", kubeconfig] => Ok(kubeconfig.into()),
            _ => bail!("{printed}"),
        };
        rows.map(ready).collect()
    }

    /// Everything that is there: files, and processes that were started here.
    fn left(&self) -> Result<Vec<String>> {
        let mut left = Vec::new();
        for entry in fs::read_dir(self.temporary.path())? {
            left.push(entry?.path().display().to_string());
        }
        let mark = format!("{TEMPORARY}={}", self.temporary.path().display());
        for entry in fs::read_dir("/proc")? {
            let process = entry?.path();
            let Ok(variables) = fs::read(process.join("environ")) else { continue };
            let guard = process.ends_with(self.guard.id().to_string());
            if !guard && variables.split(|byte| *byte == 0).any(|one| one == mark.as_bytes()) {
                let command = fs::read_to_string(process.join("cmdline")).unwrap_or_default();
                left.push(format!("{}: {}", process.display(), command.replace('\0', " ")));
            }
        }
        Ok(left)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        drop(self.guard.wait());
    }
}

#[test]
fn nodes_are_started_listed_used_and_ended_by_commands() -> Result<()> {
    let machine = Machine::new()?;
    nothing_is_up(&machine)?;
    let (first, said) = machine.up()?;
    ensure!(said.contains("export KUBECONFIG=$(cargo xtask node kubeconfig)"), "{said}");
    ensure!(!said.contains("is up already"), "{said}");
    ensure!(machine.ready()? == [first.clone()], "{:?}", machine.ready()?);
    answers(&machine, &first)?;
    tests_can_have_it(&first)?;

    let (second, said) = machine.up()?;
    ensure!(said.contains(&format!("{} is up already", first.display())), "{said}");
    let mut both = vec![first.clone(), second.clone()];
    both.sort();
    ensure!(machine.ready()? == both, "{:?}", machine.ready()?);
    // The newest.
    answers(&machine, &second)?;

    let traces = both.iter().map(|kubeconfig| kubeconfig.parent().map(Traces::of));
    let traces = traces.collect::<Option<Vec<_>>>().context("a folder")?;
    for traces in &traces {
        ensure!(traces.found()?.len() > 1, "what is left would not be seen");
    }
    ensure!(!machine.left()?.is_empty(), "what is left would not be seen");
    let (_, said) = machine.said(&["down"])?;
    for kubeconfig in &both {
        let folder = kubeconfig.parent().context("a folder")?;
        ensure!(said.contains(&format!("ended {}", folder.display())), "{said}");
    }
    for traces in &traces {
        let found = traces.found()?;
        ensure!(found.is_empty(), "left: {found:?}");
    }
    until("all to be gone", || Ok(machine.left()?.is_empty().then_some(())))
        .with_context(|| format!("left: {:?}", machine.left()))?;
    nothing_is_up(&machine)
}

/// Each command says so where no node is up; to end all of none is no failure.
fn nothing_is_up(machine: &Machine) -> Result<()> {
    for command in ["status", "kubeconfig"] {
        let said = machine.refused(&[command])?;
        ensure!(said.contains("no node is up: run `cargo xtask node up`"), "{said}");
    }
    let (printed, said) = machine.said(&["down"])?;
    ensure!(printed.is_empty() && said.contains("there is no node"), "{printed}{said}");
    Ok(())
}

/// `kubeconfig` prints that of this node, and nothing else, and with it the node answers.
fn answers(machine: &Machine, node: &Path) -> Result<()> {
    let (printed, _) = machine.said(&["kubeconfig"])?;
    ensure!(printed == format!("{}\n", node.display()), "{printed}");
    let ready = "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}";
    let mut get = kubectl::command(Path::new(printed.trim_end()));
    let said = kubectl::answer(get.args(["get", "nodes", "--output", ready]), "")?;
    ensure!(said == "True", "{said}");
    Ok(())
}

/// A test of this very binary uses that cluster and no node of its own, as for `cargo xtask test --kubeconfig FILE`.
fn tests_can_have_it(kubeconfig: &Path) -> Result<()> {
    let test = |kubeconfig: &Path| {
        let mut test = Command::new(env::current_exe()?);
        let name = "a_native_sidecar_starts_before_and_ends_after_containers";
        test.args(["--exact", name]).env(KUBECONFIG, kubeconfig).output()
    };
    let output = test(kubeconfig)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let nowhere = test(&kubeconfig.with_extension("none"))?;
    ensure!(!nowhere.status.success(), "it has a cluster from elsewhere");
    Ok(())
}
