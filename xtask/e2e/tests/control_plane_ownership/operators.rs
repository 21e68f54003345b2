//! The operators of the torture: all publish websites, each in the way of its library.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use crate::bed::Bed;
use crate::moves::UNCACHED;
use crate::pods::OWN_FLAGS;

/// Where the operator with fabric8's client is.
const FABRIC8: &str = "operators/fabric8";

/// The example operator.
pub(crate) const EXAMPLE: &str = "../../deploy/example-operator";

/// Where what is built of fabric8's operator is.
const TARGET: &str = "../../target/fabric8-operator";

/// In full: a short name has Maven look up all plugins that it knows.
const COPY: &str = "org.apache.maven.plugins:maven-dependency-plugin:3.11.0:copy-dependencies";

const ATTEMPTS: usize = 3;

/// What there is to it.
pub(crate) struct Operator {
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) arguments: Vec<String>,
    /// Whether its wall clock can be stepped.
    pub(crate) has_clock: bool,
}

/// All of them, built.
pub(crate) fn all(bed: &Bed) -> Result<Vec<Operator>> {
    let go = |name, flags: &[&str]| Operator {
        name,
        program: bed.path("operator"),
        arguments: OWN_FLAGS.iter().chain(flags).map(ToString::to_string).collect(),
        has_clock: false,
    };
    let kube_rs = Operator {
        name: "kube-rs",
        program: env!("CARGO_BIN_EXE_e2e-kube-rs-operator").into(),
        arguments: Vec::new(),
        has_clock: true,
    };
    Ok(vec![go("controller-runtime", &[]), go("controller-runtime, uncached", &UNCACHED), kube_rs, fabric8()?])
}

/// It watches by `WebSocket`. It is compiled into the target folder, with the libraries of [`fetch_libraries`].
fn fabric8() -> Result<Operator> {
    let source = here().join(FABRIC8);
    let (libraries, classes) = (libraries(), here().join(TARGET).join("classes"));
    let path = format!("{}:{}/*", classes.display(), libraries.display());
    let mut javac = Command::new("javac");
    javac.args(["--release", "17", "-Xlint:all,-classfile,-path", "-Werror", "-cp", &path, "-d"]).arg(&classes);
    ensure!(javac.arg(source.join("Operator.java")).status().context("start javac")?.success(), "javac");
    let arguments = ["-Xmx128m", "-XX:+UseSerialGC", "-cp", &path, "dev.ctrlmesh.Operator"];
    Ok(Operator {
        name: "fabric8",
        program: on_path("java")?,
        arguments: arguments.map(str::to_owned).to_vec(),
        has_clock: true,
    })
}

/// Fetches the modules of the example operator. In a network of its own, a bed reaches no registry.
pub(crate) fn fetch_modules() -> Result<()> {
    let mut go = Command::new("go");
    go.args(["list", "-deps", "./cmd"]).current_dir(here().join(EXAMPLE)).stdout(Stdio::null());
    ensure!(go.status().context("start go")?.success(), "go list");
    Ok(())
}

/// Fetches fabric8's client. A registry may fail for a moment, and Maven remembers that.
pub(crate) fn fetch_libraries() -> Result<()> {
    let mut said = String::new();
    for _ in 0..ATTEMPTS {
        let mut maven = Command::new("mvn");
        maven
            .args(["--batch-mode", "--quiet", "--update-snapshots", "--file"])
            .arg(here().join(FABRIC8).join("pom.xml"));
        maven.arg(COPY).arg(format!("-DoutputDirectory={}", libraries().display()));
        // It says on its standard output what it lacks.
        let output = maven.output().context("start mvn")?;
        if output.status.success() {
            return Ok(());
        }
        said = String::from_utf8_lossy(&output.stdout).into_owned();
    }
    bail!("mvn: {said}")
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn libraries() -> PathBuf {
    here().join(TARGET).join("lib")
}

fn on_path(program: &str) -> Result<PathBuf> {
    let path = env::var_os("PATH").context("no PATH")?;
    let mut found = env::split_paths(&path).map(|folder| folder.join(program));
    found.find(|file| file.is_file()).with_context(|| format!("no {program}"))
}
