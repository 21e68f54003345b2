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
    /// Folder of the pins, on a BPF file system
    #[arg(long, global = true, env = "CTRLMESH_PROXY_PIN_DIR", default_value_os_t = default_pins())]
    pin_dir: PathBuf,
    /// Whose attachments these are; one owner does not touch another's
    #[arg(long, global = true, default_value = "cli")]
    owner: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Redirect a cgroup's connections to targets; stays after this command ends
    Attach(AttachArguments),
    /// Show attachments and counters
    Status(StatusArguments),
    /// Replace the programs of all of this owner's attachments by this version's, without a gap
    Upgrade,
    /// Stop redirecting
    Detach(DetachArguments),
    /// Stop redirecting, and leave nothing in the kernel: no program, no table, no counter
    Uninstall(UninstallArguments),
    /// Relay redirected connections to where they wanted to go, until stopped
    Run(RunArguments),
    /// Tell a proxy of somebody else's where its connections wanted to go, by `SO_ORIGINAL_DST`, until stopped
    Answer(AnswerArguments),
}

#[derive(Debug, Args)]
struct AttachArguments {
    /// Folder of the cgroup, or its name below the cgroup2 file system
    #[arg(long)]
    cgroup: PathBuf,
    /// What to redirect: ADDRESS:PORT or PREFIX/LENGTH:PORT, IPv6 in brackets; may be repeated
    #[arg(long = "target", value_name = "TARGET", required = true)]
    targets: Vec<Target>,
    /// Port of the proxy, in the network namespace of the cgroup's processes
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    to: u16,
    /// Let connections pass when the proxy does not listen, instead of refusing them
    #[arg(long)]
    fail_open: bool,
    /// Cgroup below, whose connections pass: the proxy's own; may be repeated
    #[arg(long, value_name = "CGROUP")]
    except: Vec<PathBuf>,
    /// Count a proxy as dead that has not beaten for so many milliseconds, 500 at least (`intercept run` beats every
    /// 250)
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(500..))]
    heartbeat: Option<u64>,
    /// Report connections as events; `intercept run` shows them with `RUST_LOG=debug`
    #[arg(long)]
    report: bool,
}

#[derive(Debug, Args)]
struct StatusArguments {
    /// Form of the answer
    #[arg(short, long, default_value = "text")]
    output: Output,
}

#[derive(Debug, Args)]
struct DetachArguments {
    /// Folder of the cgroup; all of this owner's, and what belongs to dead cgroups, if none is given
    #[arg(long)]
    cgroup: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct UninstallArguments {
    /// Remove other owners' attachments too
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Port to listen on, as given to `attach --to`
    #[arg(long, value_name = "PORT", default_value_t = ctrlmesh_common::names::port::PROXY_REDIRECTED)]
    to: u16,
    /// Take webhook calls to this address of the pod, too, and relay them to the server there; may be repeated
    #[arg(long = "webhook", value_name = "ADDRESS:PORT", requires = "cgroup")]
    webhooks: Vec<SocketAddr>,
    /// Cgroup of that pod, attached before; the relay runs in its network namespace. Calls that were taken before and
    /// are not named any more go to the server again
    #[arg(long)]
    cgroup: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct AnswerArguments {
    /// Cgroup of the proxy
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
