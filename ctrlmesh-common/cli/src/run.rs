//! `ctrlmesh run`: runs a command from a terminal through a shard, with nothing installed in the cluster.
//!
//! It gets a proxy of its own, a kubeconfig in which that proxy stands for the API server, and, with root, a cgroup
//! whose connections the kernel leads there. Signals, exit code, terminal and output are the command's own. Everything
//! that is made is gone afterwards; what a killed run leaves, the next one sweeps.

mod args;
mod kubeconfig;
mod cluster;
mod egress;
mod identity;
mod folder;
mod error;
mod signals;
mod interception;
mod command;
mod proxy;
mod report;
mod session;

use std::ops::ControlFlow;
use std::process::ExitCode;

use tracing::warn;

use self::command::RunningCommand;
use self::error::RunError;
use self::proxy::Proxy;
use self::session::{Inputs, Session};
use self::signals::{Event, Events};
pub(crate) use args::RunArgs;
pub(crate) use command::child::ChildArgs;

/// The hidden command by which this program becomes the command that it is to run.
pub(crate) const CHILD: &str = "run-command";

/// The exit code where it is we who failed, and not the command.
const OWN_FAILURE: u8 = 125;

/// The exit code for a command that cannot be executed.
const NOT_EXECUTABLE: u8 = 126;

/// The exit code for a command that does not exist.
const NOT_FOUND: u8 = 127;

/// The exit code of whoever a signal ends, less the signal.
const SIGNALLED: i32 = 128;

/// Runs the command; its exit code is ours.
pub(crate) fn run(args: &RunArgs) -> ExitCode {
    report::init(args.explain);
    let code = attempt(args).unwrap_or_else(|error| {
        report::failure(&error);
        i32::from(error.exit_code())
    });
    ExitCode::from(u8::try_from(code).unwrap_or(OWN_FAILURE))
}

/// Becomes the command; returns only where that fails.
pub(crate) fn become_command(args: ChildArgs) -> ExitCode {
    match command::child::become_command(args) {
        Err(error) => {
            report::failure(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn attempt(args: &RunArgs) -> Result<i32, RunError> {
    command::program::find(&args.command[0])?;
    let events = signals::events().map_err(RunError::Signals)?;
    let wanted = Inputs::find(args)?;
    let targets = match interception::look_up(args, &wanted.cluster, wanted.through.as_ref(), &events)? {
        ControlFlow::Continue(targets) => targets,
        ControlFlow::Break(code) => return Ok(code),
    };
    let (mut made, setup) = Session::make(args, &wanted, &targets)?;
    let proxy = Proxy::start(setup, events.sender.clone())?;
    if let ControlFlow::Break(code) = ready(&events)? {
        return Ok(code);
    }
    if made.isolation.is_some() {
        interception::follow(&wanted.cluster, events.sender.clone()).map_err(RunError::Start)?;
    }
    let mut running = RunningCommand::start(made.plan(args, &wanted), &events).map_err(RunError::Start)?;
    let code = loop {
        match events.receiver.recv() {
            Ok(Event::Resolved(found)) => {
                // Where it cannot be looked up now, it leads where it led.
                let found = found.unwrap_or_default();
                made.isolation.iter_mut().for_each(|isolation| isolation.add(&found));
            }
            Ok(Event::Proxy(Err(error))) => {
                warn!(error = &error as &dyn std::error::Error, "the proxy ended");
            }
            Ok(event) => {
                if let Some(code) = running.handle(&event) {
                    break code;
                }
            }
            // We hold a sender ourselves.
            Err(_) => break i32::from(OWN_FAILURE),
        }
    };
    // What the command left in its cgroup ends while the proxy still serves.
    drop(made.isolation.take());
    report::summary(proxy.finish());
    Ok(code)
}

/// Waits until the proxy serves; the exit code, if a signal ends that.
fn ready(events: &Events) -> Result<ControlFlow<i32>, RunError> {
    loop {
        match events.next() {
            ControlFlow::Continue(Event::Proxy(outcome)) => {
                return outcome.map(ControlFlow::Continue).map_err(|error| *error);
            }
            ControlFlow::Continue(_) => {}
            ControlFlow::Break(code) => return Ok(ControlFlow::Break(code)),
        }
    }
}
