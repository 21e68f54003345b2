//! Starts, lists and ends nodes for people; `cargo xtask node` calls this.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _, stderr, stdout};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::{env, fs};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Parser, Subcommand};
use ctrlmesh_testbed::{Cluster, ExistingNode, Node, Options, State};
use xtask::tools;

/// Why a question for nodes has no answer.
const NONE: &str = "no node is up: run `cargo xtask node up`";

/// A real Kubernetes node on this machine, in namespaces of its own.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: NodeCommand,
}

#[derive(Subcommand)]
enum NodeCommand {
    /// Start a node, which stays until `down`
    Up {
        /// Load these images, from archives
        #[arg(value_name = "ARCHIVE")]
        images: Vec<PathBuf>,
    },
    /// End all nodes that `up` started
    Down,
    /// List the nodes on this machine
    Status,
    /// Print where the kubeconfig of the newest node that `up` started is
    Kubeconfig,
    /// Hold a node until it is ended
    #[command(hide = true)]
    Hold { images: Vec<PathBuf> },
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        NodeCommand::Up { images } => up(&images)?,
        NodeCommand::Down => down()?,
        NodeCommand::Status => status()?,
        NodeCommand::Kubeconfig => kubeconfig()?,
        NodeCommand::Hold { images } => hold(&images)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Starts a process of its own session that holds the node, and waits until that says where the kubeconfig is.
fn up(images: &[PathBuf]) -> Result<()> {
    for other in ExistingNode::all()?.iter().filter(|node| node.is_held()) {
        writeln!(stderr(), "{} is up already; `down` ends all", other.kubeconfig().display())?;
    }
    let log = env::temp_dir().join(format!("ctrlmesh-node-up-{}.log", std::process::id()));
    let mut holder = Command::new("setsid")
        .arg(env::current_exe()?)
        .arg("hold")
        .args(images)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(&log)?)
        .process_group(0)
        .spawn()
        .context("start setsid")?;
    let mut said = String::new();
    let output = holder.stdout.take().context("standard output")?;
    let read = BufReader::new(output).read_line(&mut said);
    let errors = fs::read_to_string(&log);
    fs::remove_file(&log)?;
    ensure!(read? > 0, "the node did not start:\n{}", errors?);
    writeln!(stderr(), "the node is ready; try: export KUBECONFIG=$(cargo xtask node kubeconfig)")?;
    if !tools::on_path("kubectl") {
        let kubectl = tools::control_plane("kubectl");
        writeln!(stderr(), "kubectl is not on your PATH; one is at {}", kubectl.display())?;
    }
    write!(stdout(), "{said}").context("print the kubeconfig")
}

fn hold(images: &[PathBuf]) -> Result<()> {
    let mut cluster = Cluster::of(Node::start(&Options { audit: true, ..Options::default() })?);
    cluster.serve_names()?;
    let node = cluster.node_mut().context("a node")?;
    for archive in images {
        node.load(archive)?;
    }
    ExistingNode::hold(node.folder())?;
    writeln!(stdout(), "{}", node.folder().join("kubeconfig").display())?;
    node.wait_for_end()?;
    Ok(())
}

fn down() -> Result<()> {
    let held: Vec<ExistingNode> = ExistingNode::all()?.into_iter().filter(ExistingNode::is_held).collect();
    for node in &held {
        node.end()?;
        writeln!(stderr(), "ended {}", node.folder().display())?;
    }
    if held.is_empty() {
        writeln!(stderr(), "there is no node that `cargo xtask node up` started")?;
    }
    Ok(())
}

fn status() -> Result<()> {
    let all = ExistingNode::all()?;
    ensure!(!all.is_empty(), NONE);
    let mut out = stdout().lock();
    writeln!(out, "{:<10} {:<9} kubeconfig", "state", "of")?;
    for node in all {
        let state = match node.state() {
            State::Ready => "ready",
            State::NotReady => "not ready",
            State::Left => "left",
        };
        let owner = if node.is_held() { "up" } else { "a test" };
        writeln!(out, "{state:<10} {owner:<9} {}", node.kubeconfig().display())?;
    }
    Ok(())
}

fn kubeconfig() -> Result<()> {
    let held = ExistingNode::all()?.into_iter().filter(ExistingNode::is_held);
    let newest = held.max_by_key(|node| fs::metadata(node.kubeconfig()).and_then(|is| is.modified()).ok());
    let Some(node) = newest else { bail!(NONE) };
    writeln!(stdout(), "{}", node.kubeconfig().display()).context("print the kubeconfig")
}
