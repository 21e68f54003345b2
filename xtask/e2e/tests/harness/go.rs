//! Builds the Go programs of `xtask/control-plane`, and speaks with them in lines.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

/// Held while Go builds: tests of one binary share the programs.
static BUILDING: Mutex<()> = Mutex::new(());

/// The programs that this process has built. Who asks for one of them does not wait while another is built.
static BUILT: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// A program by the name of its folder. Go builds it again only where its source has changed.
pub(crate) fn program(name: &str) -> PathBuf {
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("../control-plane");
    // Of this test binary: another one may run the program while Go replaces it.
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", env!("CARGO_CRATE_NAME")));
    let built = || BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if built().contains(&program) {
        return program;
    }
    let _one = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut go = Command::new("go");
    go.args(["build", "-o"]).arg(&program).arg(format!("./{name}"));
    assert!(go.current_dir(module).status().expect("Go is needed").success());
    built().insert(program.clone());
    program
}

/// A process that writes lines; killed when dropped.
pub(crate) struct Running {
    pub(crate) child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line
    }

    /// A line that is JSON.
    pub(crate) fn json(&mut self) -> Value {
        serde_json::from_str(&self.line()).unwrap()
    }

    /// What the informer has seen so far.
    pub(crate) fn state(&mut self) -> Value {
        self.child.stdin.as_mut().unwrap().write_all(b"state\n").unwrap();
        self.json()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}
