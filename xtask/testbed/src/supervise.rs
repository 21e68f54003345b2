//! Ends every program and removes every folder of a test process, however it ends.
//!
//! It starts shells in process groups of their own, so that Ctrl-C does not reach them. Each reads its standard input,
//! a pipe that only this process holds. However this process ends (return, panic, SIGKILL), the kernel closes the pipe.
//! Each shell then kills its program, or removes its folder.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// How many bytes of a program's log an error shows.
const LOG_TAIL_BYTES: usize = 3000;

/// How Go programs look for garbage: a quarter as often as by themselves, until they have a GiB. On two cores that is a
/// part of what a control plane's start takes, and the memory is there.
pub(crate) const GARBAGE: [(&str, &str); 2] = [("GOGC", "400"), ("GOMEMLIMIT", "1GiB")];

/// `$@` is the command. The reader is a loop of the shell and not `cat`, so that nothing is left when it is killed
/// because the program ended first.
const RUN: &str = r#"
exec 3<&0
"$@" </dev/null 3<&- &
program=$!
( while read -r _; do :; done <&3; kill -KILL "$program" 2>/dev/null ) &
reader=$!
exec 3<&- </dev/null
wait "$program" 2>/dev/null
status=$?
kill -KILL "$reader" 2>/dev/null
wait "$reader" 2>/dev/null
exit "$status"
"#;

/// `$0` is the folder: made here, so that there is no moment in which it is there and nobody would remove it. Removing
/// is tried for 5 s: a program that is being killed may still be writing. Where we are killed before we hear that it is
/// made, the shell must not end by that, either.
const KEEP: &str = r#"
trap : PIPE
mkdir -m 700 "$0" || exit
echo made
while read -r _; do :; done
tries=50
while [ -e "$0" ] && [ "$tries" -gt 0 ]; do
    rm -rf "$0" 2>/dev/null || sleep 0.1
    tries=$((tries - 1))
done
"#;

/// What the names of all these folders begin with; the rest is the process that made it, when that was started, and a
/// number.
const PREFIX: &str = "ctrlmesh-testbed-";

/// A program that ends, at the latest, with this process.
#[derive(Debug)]
pub(crate) struct Supervised {
    shell: Child,
}

/// A folder that is removed, at the latest, with this process.
#[derive(Debug)]
pub(crate) struct Folder {
    shell: Child,
    path: PathBuf,
}

impl Supervised {
    /// Starts `command`, its output going to `log`.
    ///
    /// # Errors
    /// Where the log cannot be opened or the shell not be started.
    pub(crate) fn start(command: &Command, log: &Path) -> io::Result<Self> {
        let output = File::create(log)?;
        let shell = Command::new("sh")
            .args(["-c", RUN, "sh"])
            .arg(command.get_program())
            .args(command.get_args())
            .envs(GARBAGE)
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
}

impl Drop for Supervised {
    fn drop(&mut self) {
        end(&mut self.shell);
    }
}

impl Folder {
    /// Makes a folder in the one for temporary files. What processes left there that were killed together with the
    /// shell that would have removed it is removed first.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub(crate) fn make() -> io::Result<Self> {
        Self::make_in(&std::env::temp_dir())
    }

    fn make_in(all: &Path) -> io::Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        sweep(all);
        let (number, process) = (MADE.fetch_add(1, Ordering::Relaxed), std::process::id());
        let start = started(process).unwrap_or_default();
        let path = all.join(format!("{}{start}-{number}", folder_prefix(process)));
        let mut shell = Command::new("sh")
            .args(["-c", KEEP])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let mut said = String::new();
        if let Some(output) = shell.stdout.take() {
            BufReader::new(output).read_line(&mut said)?;
        }
        match said.as_str() {
            "made\n" => Ok(Self { shell, path }),
            _ => Err(io::Error::other(format!("make {}", path.display()))),
        }
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The end of the log of a program that logs to it.
    pub(crate) fn log(&self, program: &str) -> String {
        log_tail(&self.path, program)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        end(&mut self.shell);
    }
}

/// What the names of the folders begin with that a process keeps.
pub fn folder_prefix(process: u32) -> String {
    format!("{PREFIX}{}-{process}-", namespace())
}

/// When a process was started, in ticks since boot; nothing where it has ended and only waits to be buried.
pub fn started(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program, in parentheses, may have spaces; after it come the state and 18 fields, and the time.
    let (_, fields) = text.rsplit_once(") ")?;
    if fields.starts_with(['Z', 'X']) {
        return None;
    }
    fields.split(' ').nth(19)?.parse().ok()
}

/// The PID namespace that numbers processes as we see them: of those of another container, who may share the folder for
/// temporary files, nothing is known.
fn namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map(|namespace| namespace.ino()).unwrap_or_default()
}

/// Removes the folders of processes that are no more.
fn sweep(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let made_by = name.to_str().and_then(maker);
        if made_by.is_some_and(|(process, start)| started(process) != Some(start)) {
            // Where it cannot be removed, its own shell is about it, or it is in nobody's way.
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}

/// The process that made the folder of this name, and when that was started; nothing where it is of another PID
/// namespace.
fn maker(name: &str) -> Option<(u32, u64)> {
    let (numbered_by, rest) = name.strip_prefix(PREFIX)?.split_once('-')?;
    if numbered_by.parse() != Ok(namespace()) {
        return None;
    }
    let (process, rest) = rest.split_once('-')?;
    let (start, number) = rest.split_once('-')?;
    number.parse::<u32>().ok()?;
    Some((process.parse().ok()?, start.parse().ok()?))
}

/// The end of the log that a program has in `folder`.
pub(crate) fn log_tail(folder: &Path, program: &str) -> String {
    let log = fs::read(folder.join(format!("{program}.log"))).unwrap_or_default();
    String::from_utf8_lossy(&log[log.len().saturating_sub(LOG_TAIL_BYTES)..]).into_owned()
}

/// Closes the pipe, and returns when the shell has done its work.
pub(crate) fn end(shell: &mut Child) {
    drop(shell.stdin.take());
    if let Err(error) = shell.wait() {
        debug_assert!(false, "wait for a supervisor: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_process_left_is_swept_and_nothing_else() {
        let all = tempfile::tempdir().unwrap();
        let (here, start) = (std::process::id(), started(std::process::id()).unwrap());
        let (ours, theirs) = (namespace(), namespace() + 1);
        let mut dead = Command::new("true").spawn().unwrap();
        dead.wait().unwrap();
        let left = [
            format!("{PREFIX}{ours}-{}-{start}-0", dead.id()),
            // Another process of the same number.
            format!("{PREFIX}{ours}-{here}-{}-3", start - 1),
        ];
        let others = [
            format!("{PREFIX}{ours}-{here}-{start}-4096"),
            // A process of another container may still live.
            format!("{PREFIX}{theirs}-{}-{start}-0", dead.id()),
            format!("{PREFIX}{ours}-{here}-0"),
            format!("{PREFIX}{ours}-{}", dead.id()),
            format!("another-{}-{start}-0", dead.id()),
        ];
        for name in left.iter().chain(&others) {
            fs::create_dir_all(all.path().join(name).join("etcd")).unwrap();
        }
        let folder = Folder::make_in(all.path()).unwrap();
        assert!(folder.path().is_dir());
        for name in &left {
            assert!(!all.path().join(name).exists(), "{name} is left");
        }
        for name in &others {
            assert!(all.path().join(name).exists(), "{name} was somebody's");
        }
    }

    #[test]
    fn a_folder_goes_though_nobody_heard_that_it_was_made() {
        let path = std::env::temp_dir().join(format!("ctrlmesh-keep-{}", std::process::id()));
        let (nobody, output) = io::pipe().unwrap();
        drop(nobody);
        let status = Command::new("sh").args(["-c", KEEP]).arg(&path).stdin(Stdio::null()).stdout(output).status();
        assert!(status.is_ok() && !path.exists(), "{} is left", path.display());
    }
}
