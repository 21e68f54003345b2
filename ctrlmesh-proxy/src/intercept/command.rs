//! `ctrlmesh-proxy intercept …`: redirection for anyone, without the rest of the mesh.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand, ValueEnum};
use tokio::runtime;

use super::attach::{Attach, Heartbeat, ListenerCheck, Options};
use super::cgroup::Hierarchy;
use super::interceptor::Interceptor;
use super::record::State;
use super::relay::Relay;
use super::status::Status;
use super::target::{Target, Targets};
use super::uninstall::uninstall;
use super::{Error, default_pins};
use crate::telemetry::{self, LogFormat};

/// `ctrlmesh-proxy intercept`
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
    /// Stop redirecting
    Detach(DetachArguments),
    /// Stop redirecting, and leave nothing in the kernel: no program, no table, no counter
    Uninstall(UninstallArguments),
    /// Relay redirected connections to where they wanted to go, until stopped
    Run(RunArguments),
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
    /// Count a proxy as dead that has not beaten for so many milliseconds (`intercept run` beats)
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
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
        Command::Detach(arguments) => detach(options, arguments),
        Command::Uninstall(arguments) => {
            uninstall(&options, arguments.force)?;
            writeln!(io::stdout(), "nothing is left below {}", options.pins.display())?;
            Ok(())
        }
        Command::Run(arguments) => relay(options, arguments.to),
    }
}

fn attach(options: Options, arguments: AttachArguments) -> anyhow::Result<()> {
    let AttachArguments { cgroup, targets, to, fail_open, except, heartbeat, report } = arguments;
    let mut interceptor = Interceptor::open(options)?;
    interceptor.sweep()?;
    // However the cgroup was written: attaching it again must find its table again.
    let cgroup = Hierarchy::find()?.cgroup(&cgroup)?.path;
    let name = format!("cli {}", cgroup.display());
    let slot = interceptor.attach(&Attach {
        cgroup: cgroup.clone(),
        except,
        targets: Targets { name, list: targets },
        port: to,
        fail_open,
        listener: ListenerCheck::Port,
        heartbeat: heartbeat
            .map(|ms| Heartbeat { number: None, max_age: Duration::from_millis(ms) }),
        report,
    })?;
    writeln!(io::stdout(), "attached {} in slot {slot}", cgroup.display())?;
    Ok(())
}

fn detach(options: Options, arguments: DetachArguments) -> anyhow::Result<()> {
    let owner = options.owner.clone();
    let mut interceptor = Interceptor::open(options)?;
    let cgroups = if let Some(cgroup) = arguments.cgroup {
        vec![cgroup]
    } else {
        interceptor.sweep()?;
        let attachments = interceptor.status()?.attachments.into_iter();
        let own = attachments.filter(|attachment| attachment.owner == owner);
        own.map(|attachment| attachment.cgroup).collect()
    };
    for cgroup in cgroups {
        interceptor.detach(&cgroup)?;
        writeln!(io::stdout(), "detached {}", cgroup.display())?;
    }
    Ok(())
}

fn relay(options: Options, port: u16) -> anyhow::Result<()> {
    telemetry::init(LogFormat::Text)?;
    let runtime =
        runtime::Builder::new_current_thread().enable_all().build().context("start the runtime")?;
    runtime.block_on(Relay { pins: options.pins, port }.run()).map_err(Error::into)
}

fn show(status: &Status, output: Output) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    if let Output::Json = output {
        serde_json::to_writer_pretty(&mut out, status)?;
        writeln!(out)?;
        return Ok(());
    }
    if status.attachments.is_empty() {
        writeln!(out, "nothing is attached")?;
    }
    for attachment in &status.attachments {
        let dead = if attachment.alive { "" } else { " (gone; `detach` sweeps it)" };
        writeln!(out, "slot {}  {}{dead}", attachment.slot, attachment.cgroup.display())?;
        writeln!(out, "  owner      {}", attachment.owner)?;
        if attachment.state == State::Closed.name() {
            writeln!(
                out,
                "  closed     a table was full: every connection is refused; attach it again"
            )?;
            continue;
        }
        writeln!(out, "  targets    {}", attachment.targets.join(" "))?;
        let ipv6 = if attachment.ipv6 { ", IPv6 natively" } else { "" };
        writeln!(
            out,
            "  to         port {}, fails {}, checks {}{ipv6}",
            attachment.to, attachment.fail, attachment.check
        )?;
        if let Some(age) = attachment.heartbeat_age {
            writeln!(out, "  heartbeat  {age:.1} s ago")?;
        }
        for except in &attachment.except {
            writeln!(out, "  except     {}", except.display())?;
        }
    }
    for (name, count) in status.counters.iter().filter(|(_, count)| **count > 0) {
        writeln!(out, "{name:22} {count}")?;
    }
    Ok(())
}
