//! Who ends what was started?
//!
//! A shell, in a process group of its own so that Ctrl-C does not reach it, starts a program and then reads its
//! standard input, which is a pipe that only this process holds. However this process ends (return, panic, SIGKILL),
//! the kernel closes the pipe; the shell then kills the program, and removes the folder that it was given.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// `$0` is the folder to remove (or empty), the rest is the command. The reader is a loop of the shell and not `cat`, so
/// that nothing is left when it is killed because the program ended first. Removing is tried for 5 s: another program
/// of the same folder may still be writing.
const SCRIPT: &str = r#"
exec 3<&0
"$@" </dev/null 3<&- &
program=$!
( while read -r _; do :; done <&3; kill -KILL "$program" 2>/dev/null ) &
reader=$!
exec 3<&- </dev/null
wait "$program" 2>/dev/null
status=$?
kill -KILL "$reader" 2>/dev/null
tries=50
while [ -n "$0" ] && [ -e "$0" ] && [ "$tries" -gt 0 ]; do
    rm -rf "$0" 2>/dev/null || sleep 0.1
    tries=$((tries - 1))
done
exit "$status"
"#;

/// A program that ends, at the latest, with this process.
#[derive(Debug)]
pub(crate) struct Supervised {
    shell: Child,
}

// === impl Supervised ===

impl Supervised {
    /// Starts `command`, its output going to `log`; `remove` is removed once it has ended.
    ///
    /// # Errors
    /// Where the log cannot be opened or the shell not be started.
    pub(crate) fn start(command: &Command, log: &Path, remove: Option<&Path>) -> io::Result<Self> {
        let output = File::create(log)?;
        let shell = Command::new("sh")
            .args(["-c", SCRIPT])
            .arg(remove.unwrap_or(Path::new("")))
            .arg(command.get_program())
            .args(command.get_args())
            .stdin(Stdio::piped())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()?;
        Ok(Self { shell })
    }

    /// Whether the program still runs.
    pub(crate) fn runs(&mut self) -> bool {
        matches!(self.shell.try_wait(), Ok(None))
    }

    /// Ends the program, and returns when it has ended.
    pub(crate) fn end(&mut self) {
        drop(self.shell.stdin.take());
        if let Err(error) = self.shell.wait() {
            debug_assert!(false, "wait for a supervisor: {error}");
        }
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.end();
    }
}
