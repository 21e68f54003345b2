//! `ctrlmesh-proxy`: between an operator and its API server.
#![forbid(unsafe_code)]

use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use ctrlmesh_proxy::config::{NodeArgs, SidecarArgs};
use ctrlmesh_proxy::telemetry::LogFormat;
use ctrlmesh_proxy::{app, telemetry};
use ctrlmesh_runtime::admin;

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
    /// Redirects the connections of a cgroup to a proxy, with eBPF.
    Intercept(ctrlmesh_intercept::command::Arguments),
    /// Asks the proxy of the same container whether it is ready, or for another of its pages.
    Probe(ProbeArgs),
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
        Command::Intercept(arguments) => {
            telemetry::init(LogFormat::Text)?;
            ctrlmesh_intercept::command::run(arguments)?;
        }
        Command::Probe(ProbeArgs { socket, page }) => {
            stdout().write_all(admin::probe(&socket, &page)?.as_bytes())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Failure where something had to be cut.
fn code(clean: bool) -> ExitCode {
    if clean { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::{Arg, ArgAction, CommandFactory as _};

    use super::*;

    const DOCS: &str = include_str!("../../docs/reference/commands.md");

    /// The sections of the docs on a command, by what their headings begin with.
    fn sections(command: &str) -> Vec<&'static str> {
        let wanted = match command {
            "intercept" => "ctrlmesh intercept",
            _ => "ctrlmesh-proxy ",
        };
        DOCS.split("\n## ").filter(|part| part.starts_with(wanted)).collect()
    }

    /// The words in backquotes, or of a table's cell; what stands around them is no part of them.
    fn words(text: &str) -> impl Iterator<Item = &str> {
        let words = text.split(|letter: char| letter.is_whitespace() || "`|".contains(letter));
        words.map(|word| word.trim_matches(['(', ')', ',', ';', '.']).trim_end_matches(':'))
    }

    /// Flags that stand in backquotes; examples are fenced, and do not count.
    fn flags(section: &str) -> BTreeSet<&str> {
        let prose = section.split("```").step_by(2);
        let quoted = prose.flat_map(|prose| prose.split('`').skip(1).step_by(2));
        let flags = quoted.flat_map(words).map(|word| word.trim_matches(['[', ']']));
        flags.filter(|word| word.starts_with("--")).collect()
    }

    /// What clap takes where a flag is not given, if it is worth saying. That a machine has no IPv6 is none of it.
    fn defaults(flag: &Arg) -> Vec<String> {
        if matches!(flag.get_action(), ArgAction::SetTrue) {
            return Vec::new();
        }
        let defaults = flag.get_default_values().iter();
        defaults.map(|value| value.to_string_lossy().replace("0.0.0.0:", "[::]:")).collect()
    }

    /// The long flags of a command and of those below it.
    fn each_flag(command: &clap::Command, look: &mut impl FnMut(&str, &Arg)) {
        for flag in command.get_arguments().filter(|flag| !flag.is_hide_set()) {
            if let Some(long) = flag.get_long().filter(|long| !["help", "version"].contains(long)) {
                look(&format!("--{long}"), flag);
            }
        }
        for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
            each_flag(below, look);
        }
    }

    #[test]
    fn the_docs_have_every_flag_in_its_commands_section() {
        let mut seen = 0;
        for command in Arguments::command().get_subcommands().filter(|it| !it.is_hide_set()) {
            let sections = sections(command.get_name());
            let told: BTreeSet<&str> = sections.iter().flat_map(|part| flags(part)).collect();
            each_flag(command, &mut |flag, _| {
                assert!(told.contains(flag), "{} {flag} is not in commands.md", command.get_name());
                seen += 1;
            });
        }
        assert!(seen > 45, "{seen}");
    }

    #[test]
    fn the_docs_have_the_default_of_each_flag() {
        let mut seen = 0;
        for command in Arguments::command().get_subcommands().filter(|it| !it.is_hide_set()) {
            let sections = sections(command.get_name());
            let rows = sections.iter().flat_map(|part| part.lines());
            let rows: Vec<(&str, &str)> =
                rows.filter_map(|row| row.strip_prefix("| ")?.split_once(" | ")).collect();
            each_flag(command, &mut |flag, it| {
                let its_own = rows.iter().filter(|(first, _)| flags(first).contains(flag));
                let its_own: Vec<&str> = its_own.map(|(_, rest)| *rest).collect();
                for default in defaults(it).iter().filter(|_| !its_own.is_empty()) {
                    let said = its_own.iter().any(|row| words(row).any(|word| word == default));
                    assert!(said, "no default {default} of {flag} in commands.md: {its_own:#?}");
                    seen += 1;
                }
            });
        }
        assert!(seen > 20, "{seen}");
    }
}
