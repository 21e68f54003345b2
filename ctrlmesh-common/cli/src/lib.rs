//! The commands of `ctrlmesh`, the program that people run.
//!
//! The modules are listed in reading order: each names only those above it.
#![forbid(unsafe_code)]

mod files;
mod text;
mod failure;
mod cluster;
mod validate;
mod compile;
mod run;
mod rollout;
mod status;
mod owner;
mod top;
mod load;
mod plan;
mod steer;
mod migrate;
mod version;
mod trace;
mod check;
mod events;
mod explain;
mod dashboard;
mod completion;

use std::ffi::{OsStr, OsString};
use std::io::{Write as _, stderr, stdin, stdout};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use ctrlmesh_common::member_path::PathTemplate;
use ctrlmesh_common::policy::Members;
use ctrlmesh_request::classify;
use ctrlmesh_runtime::telemetry::{self, LogFormat};

/// The file name under which `kubectl` finds the program as its plugin.
const PLUGIN: &str = "kubectl-ctrlmesh";

/// Runs any operator through a shard, checks clusters and ShardingConfigs, and follows canary upgrades
#[derive(Debug, Parser)]
#[command(name = "ctrlmesh", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run any operator through a shard, with nothing installed in the cluster
    Run(Box<run::RunArgs>),
    /// Become the command of `run`
    #[command(hide = true, name = run::CHILD)]
    Child(run::ChildArgs),
    /// Check ctrlmesh resources in files, without a cluster. Exits with 1 if one would be refused, or there is none
    Validate(validate::Validate),
    /// Print the policy of every pod in files, without a cluster. Exits with 1 if something is wrong
    Compile(compile::Compile),
    /// Show roots, and shards by hand, with pods, slots, open breakers and trials, and what is wrong with them
    Status(status::Arguments),
    /// Show which shard an object belongs to, of each root and by hand, by which rule, and the pods of that shard
    Owner(owner::Arguments),
    /// Explain step by step to whom an object belongs, who may write it, and what becomes of a pod's request for it
    Explain(Box<explain::Arguments>),
    /// Show events about ctrlmesh resources, and those by which its programs report on other objects
    Events(events::Arguments),
    /// Show what applying roots would move: slots, objects by live count, and pods. Applies nothing
    Plan(plan::Arguments),
    /// Show how many requests, writes and events pods have in a second, and how fast answers are: by shard, pod or
    /// namespace
    Top(top::Arguments),
    /// Show the requests of a pod as they come, and what its proxy makes of them
    Trace(trace::Arguments),
    /// Give slots, or a namespace, to another shard
    Move(steer::MoveArgs),
    /// Take from the shards of a pod, or of the pods on a node, what they own, so that these can be stopped
    Drain(steer::DrainArgs),
    /// Even out what the shards of a root own, with few moves
    Rebalance(steer::RebalanceArgs),
    /// Check a cluster before and after installation. Exits with 2 if a check failed, with 1 if none could be made
    Check(check::Arguments),
    /// Serve a page that shows who owns what, on this machine only, and open it in a browser
    Dashboard(dashboard::Arguments),
    /// Take a cluster over from KusionStack Controller Mesh or Kridge, step by step, and back
    Migrate(migrate::Arguments),
    /// Show the versions of this program, and of the managers and proxies of a cluster
    Version(version::Arguments),
    /// Show canary upgrades of operators, and go on with one or end one
    Rollout(rollout::Arguments),
    /// Print how the API server classifies each `METHOD TARGET` line on standard input, as one JSON object a line
    Classify(ClassifyArgs),
    /// Print a script by which a shell, or kubectl, completes commands and flags
    Completion(completion::CompletionArgs),
    /// Answer kubectl, which asks what may follow these words
    #[command(hide = true, name = completion::COMPLETE)]
    Complete(completion::CompleteArgs),
    /// Redirect the connections of a cgroup to a proxy by hand, with eBPF
    Intercept(ctrlmesh_intercept::command::Arguments),
}

/// What `classify` is told.
#[derive(clap::Args, Debug)]
struct ClassifyArgs {
    /// Read what is behind a path like this one as the member cluster reads it to which the path leads. As in
    /// `root.clusters`; may be repeated
    #[arg(long = "member-path", value_name = "TEMPLATE")]
    member_paths: Vec<PathTemplate>,
}

impl ClassifyArgs {
    fn run(self) -> anyhow::Result<()> {
        let members = Members { paths: self.member_paths, ..Members::default() };
        if !members.paths.is_empty() {
            members.check().context("--member-path")?;
        }
        Ok(classify::run(&members.paths, &mut stdin().lock(), &mut stdout().lock())?)
    }
}

/// The command line, for pages that are generated from it.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the program with these arguments, the first of which is the name that it was started by.
///
/// # Errors
/// Why a command other than `run` failed; `run` writes its errors itself.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> anyhow::Result<ExitCode> {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    let matches = named(arguments.first().map(OsString::as_os_str)).get_matches_from(arguments);
    match Arguments::from_arg_matches(&matches)?.command {
        Command::Run(arguments) => return Ok(run::run(&arguments)),
        Command::Child(arguments) => return Ok(run::become_command(arguments)),
        Command::Validate(validate) => return validate.run(),
        Command::Compile(compile) => return compile.run(),
        Command::Status(arguments) => status::run(&arguments)?,
        Command::Owner(arguments) => owner::run(&arguments)?,
        Command::Explain(arguments) => explain::run(&arguments)?,
        Command::Events(arguments) => events::run(&arguments)?,
        Command::Plan(arguments) => return Ok(plan::run(&arguments)?),
        Command::Top(arguments) => top::run(&arguments)?,
        Command::Trace(arguments) => trace::run(&arguments)?,
        Command::Move(arguments) => steer::give(&arguments)?,
        Command::Drain(arguments) => steer::drain(&arguments)?,
        Command::Rebalance(arguments) => steer::rebalance(&arguments)?,
        Command::Migrate(arguments) => migrate::run(&arguments)?,
        Command::Dashboard(arguments) => dashboard::run(&arguments)?,
        Command::Check(arguments) => return Ok(check::run(&arguments)?),
        Command::Version(arguments) => version::run(&arguments)?,
        Command::Rollout(arguments) => rollout::run(arguments)?,
        Command::Classify(arguments) => arguments.run()?,
        Command::Completion(arguments) => completion::run(&arguments, visible())?,
        Command::Complete(arguments) => completion::complete(&arguments, visible())?,
        Command::Intercept(arguments) => {
            telemetry::init(LogFormat::Text)?;
            ctrlmesh_intercept::command::run(arguments)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes why a command failed, and returns its exit status. `RUST_BACKTRACE` changes nothing: errors are for users.
pub fn report(error: &anyhow::Error) -> ExitCode {
    // Where standard error is closed, the exit status is all that is left to say.
    drop(writeln!(stderr(), "Error: {}", failure::causes(&**error)));
    ExitCode::FAILURE
}

/// The command line without what is hidden, which shells would complete.
fn visible() -> clap::Command {
    let all = command();
    let visible = all.get_subcommands().filter(|one| !one.is_hide_set()).cloned();
    clap::Command::new("ctrlmesh").version(env!("CARGO_PKG_VERSION")).subcommands(visible)
}

/// The command line, which calls itself as the user calls it.
fn named(program: Option<&OsStr>) -> clap::Command {
    let file = program.and_then(|program| Path::new(program).file_name());
    if file == Some(OsStr::new(PLUGIN)) { command().bin_name("kubectl ctrlmesh") } else { command() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn help_names_the_program_as_it_was_called() {
        for (program, usage) in [
            ("/usr/bin/ctrlmesh", "Usage: ctrlmesh "),
            ("ctrlmesh", "Usage: ctrlmesh "),
            ("/opt/bin/kubectl-ctrlmesh", "Usage: kubectl ctrlmesh "),
        ] {
            let help = named(Some(program.as_ref())).try_get_matches_from([program, "--help"]);
            let help = help.unwrap_err().to_string();
            assert!(help.contains(usage), "{program}: {help}");
            let help = named(Some(program.as_ref())).try_get_matches_from([program, "run", "--help"]);
            let help = help.unwrap_err().to_string();
            assert!(help.contains(&format!("{usage}run ")), "{program}: {help}");
        }
    }
}
