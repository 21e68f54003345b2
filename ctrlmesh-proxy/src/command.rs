//! The command line of `ctrlmesh-proxy`.

use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use ctrlmesh_runtime::admin;
use ctrlmesh_runtime::telemetry::{self, LogFormat};

use crate::app;
use crate::config::{NodeArgs, SidecarArgs};
use crate::trace;
use crate::trace::TraceArgs;

/// Sits between an operator and its API server, and gives each replica its own share of the objects
#[derive(Debug, Parser)]
#[command(name = "ctrlmesh-proxy", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve one pod, from inside it, without any privilege
    Sidecar(Box<SidecarArgs>),
    /// Serve the pods of a node, whose connections the kernel redirects
    Node(Box<NodeArgs>),
    /// Redirect the connections of a cgroup to a proxy by hand, with eBPF
    Intercept(ctrlmesh_intercept::command::Arguments),
    /// Print the requests that the proxy in the same container serves, as they come, until standard input ends
    Trace(TraceArgs),
    /// Fetch a page of the proxy in the same container; fails unless the answer is 200
    Probe(ProbeArgs),
}

#[derive(Debug, Args)]
struct ProbeArgs {
    /// Unix socket of the proxy, as given to it by --probe-socket
    #[arg(long, env = "CTRLMESH_PROXY_PROBE_SOCKET", value_name = "FILE")]
    socket: PathBuf,
    /// Path of the page: /readyz, /healthz or /metrics
    #[arg(default_value = "/readyz")]
    page: String,
}

/// The command line, for pages that are generated from it.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the program with the arguments of this process. It fails where something had to be cut at the end.
///
/// # Errors
/// Why the command could not start, or failed.
pub fn main() -> anyhow::Result<ExitCode> {
    let clean = match Arguments::parse().command {
        Command::Sidecar(arguments) => {
            telemetry::init(arguments.common.log_format)?;
            app::sidecar(*arguments)?
        }
        Command::Node(arguments) => {
            telemetry::init(arguments.common.log_format)?;
            app::node(*arguments)?
        }
        Command::Intercept(arguments) => {
            telemetry::init(LogFormat::Text)?;
            ctrlmesh_intercept::command::run(arguments)?;
            true
        }
        Command::Trace(arguments) => {
            trace::run(arguments)?;
            true
        }
        Command::Probe(ProbeArgs { socket, page }) => {
            stdout().write_all(admin::probe(&socket, &page)?.as_bytes())?;
            true
        }
    };
    Ok(if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
