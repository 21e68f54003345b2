//! Processes that a test stops, continues and kills; they end with the thread that started them.
//!
//! One that ends is started again, as kubelet would.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use anyhow::{Context as _, Result};
use ctrlmesh_runtime::sync::lock;
use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use tokio::time;

use crate::bed::Bed;
use crate::clock::Clock;

/// How often we look whether one ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The first group; each process is of one of its own, by which its connections are known.
const FIRST_GROUP: u32 = 20_000;

/// A program with what it was told, that is started again when it ends, until the last of these is dropped.
#[derive(Clone)]
pub(crate) struct Process(Arc<Mutex<Run>>);

struct Run {
    group: u32,
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    log: PathBuf,
    clock: Clock,
    child: Option<Child>,
    /// Whether it is to run.
    is_wanted: bool,
}

impl Process {
    /// One that is not started yet; what it says goes to the log of this name.
    pub(crate) fn new(
        bed: &Bed,
        program: &Path,
        name: &str,
        arguments: impl IntoIterator<Item = String>,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let clock = bed.clocks.clock(bed.path(&format!("{name}.clock")))?;
        Ok(Self(Arc::new(Mutex::new(Run {
            group: FIRST_GROUP + MADE.fetch_add(1, Ordering::Relaxed),
            program: program.to_owned(),
            arguments: arguments.into_iter().collect(),
            environment: environment.into_iter().collect(),
            log: bed.path(&format!("{name}.log")),
            clock,
            child: None,
            is_wanted: false,
        }))))
    }

    /// Starts it, and again whenever it ended.
    pub(crate) fn start(&self) -> Result<()> {
        let mut run = lock(&self.0);
        run.is_wanted = true;
        run.start()?;
        drop(run);
        tokio::spawn(start_again(Arc::downgrade(&self.0)));
        Ok(())
    }

    /// The group that it is of, and no other.
    pub(crate) fn group(&self) -> u32 {
        lock(&self.0).group
    }

    /// Its wall clock.
    pub(crate) fn clock(&self) -> Clock {
        lock(&self.0).clock.clone()
    }

    /// Kills it; another program takes its place.
    pub(crate) fn replace(&self, program: &Path, arguments: &[String]) {
        let mut run = lock(&self.0);
        program.clone_into(&mut run.program);
        arguments.clone_into(&mut run.arguments);
        run.kill();
    }

    /// Sends a signal, where it runs.
    pub(crate) fn send(&self, signal: Signal) -> Result<()> {
        let run = lock(&self.0);
        if let Some(child) = &run.child {
            // It may have ended by itself; as long as nobody has waited for it, its number is nobody else's.
            signal::kill(Pid::from_raw(i32::try_from(child.id())?), signal)?;
        }
        drop(run);
        Ok(())
    }

    /// Whether it runs, or is stopped.
    pub(crate) fn runs(&self) -> bool {
        lock(&self.0).runs()
    }

    /// Kills it, also where it is stopped.
    pub(crate) fn kill(&self) {
        lock(&self.0).kill();
    }

    /// Asks it to end, which it does for good; it may work on.
    pub(crate) fn terminate(&self) -> Result<()> {
        lock(&self.0).is_wanted = false;
        self.send(Signal::SIGTERM)
    }

    /// Asks it to end for good, and kills it after so long.
    pub(crate) async fn end_within(&self, grace: Duration) -> Result<()> {
        self.terminate()?;
        let ended = async {
            while lock(&self.0).runs() {
                time::sleep(LOOK_EVERY).await;
            }
        };
        drop(time::timeout(grace, ended).await);
        self.kill();
        Ok(())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Run {
    fn start(&mut self) -> Result<()> {
        self.kill();
        let output = File::options().create(true).append(true).open(&self.log)?;
        // It becomes the program: what is stopped and killed is that, and nothing is left when this process is killed.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--clear-groups", "--regid", &self.group.to_string(), "--"]);
        command.arg(&self.program).args(&self.arguments);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command.envs(self.clock.environment());
        command.env("RUST_LOG", "info").stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let started = command.spawn().with_context(|| format!("start {}", self.program.display()))?;
        self.child = Some(started);
        Ok(())
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }

    fn runs(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }
}

async fn start_again(process: Weak<Mutex<Run>>) {
    loop {
        time::sleep(LOOK_EVERY).await;
        let Some(run) = process.upgrade() else { return };
        let mut run = lock(&run);
        if !run.is_wanted {
            return;
        }
        if !run.runs()
            && let Err(error) = run.start()
        {
            eprintln!("{error:#}");
        }
    }
}
