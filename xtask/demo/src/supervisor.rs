//! Removes everything that the demo made, however the demo ends: a parent process that starts the demo and waits.
//!
//! The demo needs no handler for any of this. What it starts ends with it (the test bed holds it so), and each of those
//! processes carries a variable of ours, so that we know when the last of them is gone.

use std::ffi::OsString;
use std::fs;
use std::io::Read as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, io, process, thread};

use anyhow::{Context as _, Result};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

/// The variable that the demo, and all that it starts, carry.
const MARK: &str = "CTRLMESH_DEMO";

/// How often we look, and how long the end may take: a node's takes less than a second.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const GONE_WITHIN: Duration = Duration::from_mins(1);

/// How the demo ended.
#[derive(Clone, Copy, Debug)]
pub enum End {
    /// By itself.
    Itself(ExitCode),
    /// Somebody ended it, with this signal.
    Signal(u8),
}

/// Whether this process is the demo, and not its supervisor.
pub fn is_guarded() -> bool {
    env::var_os(MARK).is_some()
}

/// Ends this process when its supervisor does: that holds the other end of standard input.
pub fn follow() {
    thread::spawn(|| {
        // Nothing is ever written to it.
        drop(io::stdin().read_to_end(&mut Vec::new()));
        process::exit(1);
    });
}

/// Starts this program again, as the demo, and waits until that and all that it started have ended.
///
/// # Errors
/// Where it cannot be started, or something of it stays.
pub fn watch(arguments: impl IntoIterator<Item = OsString>) -> Result<End> {
    let mark = process::id().to_string();
    let mut demo = Command::new(env::current_exe()?)
        .args(arguments)
        .env(MARK, &mark)
        .stdin(Stdio::piped())
        .spawn()
        .context("start the demo")?;
    let end = Builder::new_current_thread().enable_all().build()?.block_on(ended(&mut demo))?;
    wait_until_gone(&mark)?;
    Ok(end)
}

/// Waits until the demo ends or is to be ended.
async fn ended(demo: &mut Child) -> Result<End> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    loop {
        let number = tokio::select! {
            // A signal comes first; whether the demo has ended is asked after it.
            biased;
            // Ctrl-C; the demo gets it, too.
            _ = interrupt.recv() => 2,
            _ = terminate.recv() => 15,
            _ = hang_up.recv() => 1,
            // It is looked at again and again, since a child cannot be waited for without a reaper of its own.
            () = sleep(LOOK_EVERY) => match demo.try_wait()? {
                Some(status) => {
                    // The demo gets the signals above, too. Any other signal is a failure.
                    if let Some(number @ (1 | 2 | 15)) = status.signal() {
                        return Ok(End::Signal(u8::try_from(number)?));
                    }
                    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
                    return Ok(End::Itself(code.into()));
                }
                None => continue,
            },
        };
        // It may have ended by itself meanwhile.
        drop(demo.kill());
        demo.wait()?;
        return Ok(End::Signal(number));
    }
}

fn wait_until_gone(mark: &str) -> Result<()> {
    let deadline = Instant::now() + GONE_WITHIN;
    loop {
        let left = marked(mark)?;
        if left.is_empty() {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "processes {left:?} do not end");
        thread::sleep(LOOK_EVERY);
    }
}

/// The processes that carry our variable with this value.
fn marked(mark: &str) -> io::Result<Vec<u32>> {
    let wanted = format!("{MARK}={mark}");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(process) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // It may be gone already, or somebody else's.
        let Ok(variables) = fs::read(format!("/proc/{process}/environ")) else { continue };
        if variables.split(|byte| *byte == 0).any(|one| one == wanted.as_bytes()) {
            found.push(process);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_its_mark_and_gone_when_it_has_ended() {
        let mark = format!("test-{}", process::id());
        let mut child = Command::new("sleep").arg("60").env(MARK, &mark).spawn().unwrap();
        while marked(&mark).unwrap() != [child.id()] {}
        assert!(marked("another").unwrap().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        wait_until_gone(&mark).unwrap();
    }
}
