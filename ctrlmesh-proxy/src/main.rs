//! `ctrlmesh-proxy`: between an operator and its API server.
#![forbid(unsafe_code)]

use std::io::{Write as _, stdin, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use ctrlmesh_proxy::config::{NodeArgs, SidecarArgs};
use ctrlmesh_proxy::run::{ChildArgs, RunArgs};
use ctrlmesh_proxy::{admin, app, classify, intercept, run, telemetry};

/// Sits between an operator and its API server, and gives each replica its own share of the objects.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serves one pod, from inside it, without any privilege.
    Sidecar(Box<SidecarArgs>),
    /// Serves the pods of a node, whose connections it has the kernel redirect.
    Node(Box<NodeArgs>),
    /// Runs any operator through a shard, with nothing installed in the cluster.
    Run(Box<RunArgs>),
    /// Becomes the command of `run`.
    #[command(hide = true, name = "run-command")]
    Become(ChildArgs),
    /// Redirects the connections of a cgroup to a proxy, with eBPF.
    Intercept(intercept::command::Arguments),
    /// Asks the proxy of the same container whether it is ready, or for another of its pages.
    Probe(ProbeArgs),
    /// Prints what the API server makes of each `METHOD TARGET` line on stdin, as one JSON object a line.
    Classify,
}

/// What `probe` is told.
#[derive(Debug, Args)]
struct ProbeArgs {
    /// The proxy's --probe-socket.
    #[arg(long, env = "CTRLMESH_PROXY_PROBE_SOCKET", value_name = "FILE")]
    socket: PathBuf,
    /// Which page.
    #[arg(default_value = "/readyz")]
    page: String,
}

fn main() -> anyhow::Result<ExitCode> {
    match Arguments::parse().command {
        Command::Sidecar(arguments) => {
            telemetry::init(arguments.common.log_format)?;
            return app::sidecar(*arguments).map(code).map_err(Into::into);
        }
        Command::Node(arguments) => {
            telemetry::init(arguments.common.log_format)?;
            return app::node(*arguments).map(code).map_err(Into::into);
        }
        Command::Run(arguments) => return Ok(run::run(&arguments)),
        Command::Become(arguments) => return Ok(run::become_command(arguments)),
        Command::Intercept(arguments) => intercept::command::run(arguments)?,
        Command::Probe(ProbeArgs { socket, page }) => {
            stdout().write_all(admin::probe(&socket, &page)?.as_bytes())?;
        }
        Command::Classify => classify::run(&mut stdin().lock(), &mut stdout().lock())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Failure where something had to be cut.
fn code(clean: bool) -> ExitCode {
    if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
