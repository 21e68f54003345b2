//! The demo on a cluster of the user's: its error messages, and the removal of what it made.

use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::{env, thread};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_demo::steps::DEMO;
use ctrlmesh_testbed::{Cluster, Node, Options};
use xtask::images::{self, Image};
use xtask::{tools, user_cluster};

/// A demo that ends with the test.
struct Demo(Child);

impl Drop for Demo {
    fn drop(&mut self) {
        // It has ended already where the test went well.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The demo, of a user who may do nothing on this machine: in a namespace of users in which nobody is root.
fn demo(kubeconfig: &Path, log: &Path) -> Command {
    let mut demo = Command::new("unshare");
    demo.args(["--user", "--", env!("CARGO_BIN_EXE_ctrlmesh-demo"), "--once"]);
    demo.arg("--kubeconfig").arg(kubeconfig).arg("--audit-log").arg(log);
    demo
}

/// What it says where it cannot begin.
fn refused(kubeconfig: &Path, log: &Path) -> Result<String> {
    said(&mut demo(kubeconfig, log))
}

fn said(demo: &mut Command) -> Result<String> {
    let output = demo.output()?;
    ensure!(!output.status.success(), "it was not refused");
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// What it says of a cluster whose kubectl says that it is older than what ctrlmesh needs.
fn of_an_older_cluster(kubeconfig: &Path, log: &Path) -> Result<String> {
    let folder = tempfile::tempdir()?;
    let kubectl = folder.path().join("kubectl");
    let version = r#"{"serverVersion": {"major": "1", "minor": "29+", "gitVersion": "v1.29.9"}}"#;
    fs::write(&kubectl, format!("#!/bin/sh\necho '{version}'\n"))?;
    fs::set_permissions(&kubectl, Permissions::from_mode(0o755))?;
    let path = env::var("PATH")?;
    let mut demo = demo(kubeconfig, log);
    // Where none is built, that on the path is asked.
    demo.env_remove(tools::ASSETS).env(tools::CACHE, folder.path().join("none"));
    said(demo.env("PATH", format!("{}:{path}", folder.path().display())))
}

/// Reads until a line begins so.
fn until(output: &mut BufReader<ChildStdout>, wanted: &str) -> Result<()> {
    let mut seen = String::new();
    let mut line = String::new();
    while output.read_line(&mut line)? > 0 {
        if line.starts_with(wanted) {
            return Ok(());
        }
        seen.push_str(&line);
        line.clear();
    }
    anyhow::bail!("it ended before {wanted:?}:\n{seen}")
}

#[test]
fn the_demo_on_a_users_cluster_needs_no_root_and_cleans_up() -> Result<()> {
    let node = Node::start(&Options { audit: true, ..Options::default() })?;
    let archives = images::build(&[Image::Proxy, Image::Manager, Image::ExampleOperator], true)?;
    archives.iter().try_for_each(|archive| node.load(archive))?;
    let log = node.control_plane().audit_log();
    let cluster = Cluster::of(node);
    let file = cluster.kubeconfig().to_owned();
    let said = refused(Path::new("/no/such/kubeconfig"), &log)?;
    ensure!(said.contains("there is no kubeconfig /no/such/kubeconfig"), "{said}");
    let said = refused(&file, Path::new("/no/such/log"))?;
    ensure!(said.contains("--audit-log-path"), "{said}");
    // Nobody listens there.
    let away = tempfile::NamedTempFile::new()?;
    let (text, url) = (fs::read_to_string(&file)?, cluster.node().context("a node")?.control_plane().url());
    ensure!(text.contains(url), "{text}");
    fs::write(&away, text.replace(url, "https://127.0.0.1:1"))?;
    let said = refused(away.path(), &log)?;
    ensure!(said.contains("does not answer") && said.contains("127.0.0.1:1"), "{said}");
    let said = of_an_older_cluster(&file, &log)?;
    ensure!(said.contains("too old: it is Kubernetes v1.29.9"), "{said}");
    let before = cluster.ask(&["get", "namespaces,crds", "--output=name"], "")?;
    let mut started = demo(&file, &log);
    started.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut running = Demo(started.spawn()?);
    let mut output = BufReader::new(running.0.stdout.take().context("standard output")?);
    until(&mut output, &format!("[1/{}]", DEMO.len()))?;
    // Whoever comes now would take away what is another's.
    let said = refused(&file, &log)?;
    ensure!(said.contains("already, which would be taken away"), "{said}");
    let rest = thread::spawn(move || output.read_to_end(&mut Vec::new()));
    let group = format!("-{}", running.0.id());
    let status = Command::new("kill").args(["-INT", "--", &group]).status()?;
    ensure!(status.success(), "kill");
    let status = running.0.wait()?;
    let mut error = String::new();
    running.0.stderr.take().context("standard error")?.read_to_string(&mut error)?;
    ensure!(status.code() == Some(130), "{status}: {error}");
    drop(rest.join());
    user_cluster::ensure_unused(&file, &[])?;
    let after = cluster.ask(&["get", "namespaces,crds", "--output=name"], "")?;
    ensure!(before == after, "{before} -> {after}");
    if ctrlmesh_testbed::is_full() {
        let output = demo(&file, &log).output()?;
        let said = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said));
        // It fails where a step did not hold.
        ensure!(output.status.success() && said[0].contains(" steps held, in "), "{said:?}");
        user_cluster::ensure_unused(&file, &[])?;
    }
    Ok(())
}
