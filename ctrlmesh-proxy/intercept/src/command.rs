//! The command `intercept`: redirection by hand, without the rest of the mesh.

mod heartbeat;
mod relay;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use tokio::runtime;

use crate::Error;
use crate::command::relay::Relay;
use crate::default_pins;
use crate::host::cgroup::Hierarchy;
use crate::interceptor::Interceptor;
use crate::interceptor::attach::{Attach, Heartbeat, ListenerCheck, Options};
use crate::interceptor::status::Status;
use crate::interceptor::uninstall::uninstall;
use crate::pins::Pins;
use crate::target::{Target, Targets};

/// The arguments of `intercept`
#[derive(Debug, Args)]
pub struct Arguments {
    /// Folder on a BPF file system for programs and maps, which outlive this command
    #[arg(long, global = true, env = "CTRLMESH_PROXY_PIN_DIR", value_name = "DIR", default_value_os_t = default_pins())]
    pin_dir: PathBuf,
    /// Name under which attachments are made and found. Attachments of other owners stay as they are
    #[arg(long, global = true, value_name = "NAME", default_value = "cli")]
    owner: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Redirect a cgroup's connections to targets to a proxy, until `detach`
    Attach(AttachArguments),
    /// Show attachments and counters
    Status(StatusArguments),
    /// Replace the kernel programs of all attachments of this owner by those of this version, without a gap
    Upgrade,
    /// Stop redirecting one cgroup, or all of this owner
    Detach(DetachArguments),
    /// Stop redirecting, and remove programs, maps and counters from the kernel
    Uninstall(UninstallArguments),
    /// Relay redirected connections to their original destination, until stopped
    Run(RunArguments),
    /// Answer `SO_ORIGINAL_DST` for a third-party proxy that gets redirected connections, until stopped
    Answer(AnswerArguments),
}

#[derive(Debug, Args)]
struct AttachArguments {
    /// Folder of the cgroup, as an absolute path or below the cgroup2 file system
    #[arg(long)]
    cgroup: PathBuf,
    /// Address to redirect: ADDRESS:PORT or PREFIX/LENGTH:PORT, with IPv6 in brackets. May be repeated
    #[arg(long = "target", value_name = "TARGET", required = true)]
    targets: Vec<Target>,
    /// Port on which the proxy listens, in the network namespace of the cgroup's processes
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    to: u16,
    /// Let connections through to the target while no proxy listens. Without it, they are refused
    #[arg(long)]
    fail_open: bool,
    /// Cgroup below --cgroup whose connections are not redirected, such as the proxy's own. May be repeated
    #[arg(long, value_name = "CGROUP")]
    except: Vec<PathBuf>,
    /// Milliseconds without a heartbeat after which the proxy counts as dead; at least 500. `intercept run` sends one
    /// every 250 ms. Without it, there is no such check
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(500..))]
    heartbeat: Option<u64>,
    /// Report each connection as an event. `intercept run` logs them with `RUST_LOG=debug`
    #[arg(long)]
    report: bool,
}

#[derive(Debug, Args)]
struct StatusArguments {
    /// Format of the output
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    output: Output,
}

#[derive(Debug, Args)]
struct DetachArguments {
    /// Folder of the cgroup. Without it, all cgroups of this owner, and whatever is left of removed cgroups
    #[arg(long)]
    cgroup: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct UninstallArguments {
    /// Remove the attachments of other owners, too. Without it, the command fails where there are any
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Port to listen on, as given to `attach --to`
    #[arg(long, value_name = "PORT", default_value_t = ctrlmesh_common::names::port::PROXY_REDIRECTED)]
    to: u16,
    /// Address of a webhook server in the pod of --cgroup, whose calls are relayed, too. May be repeated
    #[arg(long = "webhook", value_name = "ADDRESS:PORT", requires = "cgroup")]
    webhooks: Vec<SocketAddr>,
    /// Folder of the pod's cgroup, attached before. The relay listens in its network namespace, and gives up webhook
    /// addresses that --webhook no longer names
    #[arg(long)]
    cgroup: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct AnswerArguments {
    /// Folder of the proxy's cgroup
    #[arg(long)]
    cgroup: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    Text,
    Json,
}

/// Runs the command.
///
/// # Errors
/// If the kernel does not let us, in words that say what to do.
pub fn run(arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { pin_dir: pins, owner, command } = arguments;
    let options = Options { pins, ..Options::new(&owner) };
    match command {
        Command::Attach(arguments) => attach(options, arguments),
        Command::Status(arguments) => show(&Status::read(&options.pins)?, arguments.output),
        Command::Upgrade => upgrade(options),
        Command::Detach(arguments) => detach(options, arguments),
        Command::Uninstall(arguments) => {
            uninstall(&options, arguments.force)?;
            print(format_args!("nothing is left below {}", options.pins.display()))
        }
        Command::Run(RunArguments { to: port, webhooks, cgroup: pod }) => {
            until_stopped(Relay { options, port, pod, webhooks }.run())
        }
        Command::Answer(arguments) => answer(options, &arguments),
    }
}

fn attach(options: Options, arguments: AttachArguments) -> anyhow::Result<()> {
    let AttachArguments { cgroup, targets, to, fail_open, except, heartbeat, report } = arguments;
    // Before anything is made.
    let cgroup = Hierarchy::find()?.cgroup(&cgroup)?.path;
    let mut interceptor = Interceptor::open(options)?;
    interceptor.sweep()?;
    let slot = interceptor.attach(&Attach {
        cgroup: cgroup.clone(),
        except,
        targets: alike(targets),
        port: to,
        fail_open,
        listener: ListenerCheck::Port,
        heartbeat: heartbeat.map(|ms| Heartbeat { number: None, max_age: Duration::from_millis(ms) }),
        report,
    })?;
    print(format_args!("attached {} in slot {slot}", cgroup.display()))
}

/// Targets that have a table with all that are the same: there are not as many tables as pods.
fn alike(list: Vec<Target>) -> Targets {
    let sorted: BTreeSet<Target> = list.into_iter().collect();
    let list: Vec<Target> = sorted.into_iter().collect();
    let names: Vec<String> = list.iter().map(ToString::to_string).collect();
    Targets { name: format!("cli {}", names.join(" ")), list }
}

fn upgrade(options: Options) -> anyhow::Result<()> {
    let Some(mut interceptor) = adopted(options)? else { return Ok(()) };
    let upgraded = interceptor.upgrade();
    // Where one could not be, the others are.
    for cgroup in interceptor.whole()? {
        print(format_args!("upgraded {}", cgroup.display()))?;
    }
    Ok(upgraded?)
}

fn detach(options: Options, arguments: DetachArguments) -> anyhow::Result<()> {
    let Some(mut interceptor) = adopted(options)? else {
        return arguments.cgroup.map_or(Ok(()), |cgroup| Err(Error::NotAttached(cgroup).into()));
    };
    let cgroups = if let Some(cgroup) = arguments.cgroup {
        BTreeSet::from([cgroup])
    } else {
        interceptor.sweep()?;
        interceptor.own()?
    };
    let mut failed = None;
    for cgroup in cgroups {
        match interceptor.detach(&cgroup) {
            Ok(()) => print(format_args!("detached {}", cgroup.display()))?,
            // The others are not to stay for that.
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    failed.map_or(Ok(()), |error| Err(error.into()))
}

fn answer(options: Options, arguments: &AnswerArguments) -> anyhow::Result<()> {
    let cgroup = Hierarchy::find()?.cgroup(&arguments.cgroup)?.path;
    let mut interceptor = Interceptor::open(options)?;
    interceptor.answer_original_destination(&cgroup)?;
    print(format_args!("SO_ORIGINAL_DST is answered in {}", cgroup.display()))?;
    until_stopped(async {
        relay::stopped().await;
        Ok(())
    })
}

/// What was pinned before; nothing is made where nothing was.
fn adopted(options: Options) -> Result<Option<Interceptor>, Error> {
    let exist = Pins::at(&options.pins).exist()?;
    exist.then(|| Interceptor::open(options)).transpose()
}

fn until_stopped(task: impl Future<Output = Result<(), Error>>) -> anyhow::Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(task).map_err(Error::into)
}

fn show(status: &Status, output: Output) -> anyhow::Result<()> {
    match output {
        Output::Text => print(status.to_string().trim_end()),
        Output::Json => print(serde_json::to_string_pretty(status)?),
    }
}

/// Prints lines, unless whoever reads has read enough.
fn print(lines: impl Display) -> anyhow::Result<()> {
    match writeln!(io::stdout(), "{lines}") {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => Ok(printed?),
    }
}
