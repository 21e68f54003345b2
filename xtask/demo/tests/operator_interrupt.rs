//! The demo leaves nothing behind when a signal ends it at any moment.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _, stderr};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, fs, io, iter, thread};

use anyhow::{Context as _, Result, bail, ensure};
use ctrlmesh_demo::steps::DEMO;
use ctrlmesh_testbed::{folder_prefix, started};
use xtask::images::{self, Image};

/// The variable that the demo gives all that it starts.
const MARK: &str = "CTRLMESH_DEMO";

/// Sets the moments: those of a run that failed can be tried again.
const SEED: &str = "CTRLMESH_SEED";

/// How long after a part of the demo has begun the moment is, at most; of a short one it is in the next.
const DELAY: Duration = Duration::from_secs(15);

/// How long a part may take until the next begins. The steps have deadlines of their own.
const PART_WITHIN: Duration = Duration::from_mins(10);

/// How much of what it says of a step that did not hold is kept, and how long a line of that may take.
const SAID_LINES: usize = 200;
const SAID_WITHIN: Duration = Duration::from_secs(1);

/// The namespaces that the demo's processes may have of their own.
const SPACES: [&str; 6] = ["cgroup", "ipc", "mnt", "net", "pid", "uts"];

/// A demo, in a process group of its own as a shell gives it one. Where a test fails, it ends with the test.
struct Demo {
    child: Child,
    /// What it says, line by line.
    lines: Receiver<String>,
}

/// A moment: the part of the demo, and how long after that has begun.
type Moment = (usize, Duration);

/// What was seen of a demo while it ran.
struct Traces {
    /// The processes that carry its mark: what it makes is named after one of them.
    marked: BTreeSet<u32>,
    /// These, what runs in its cgroups, and whatever shares a namespace with one of them that is not ours; each with
    /// the time of its start, since numbers of processes come again, and those of namespaces, too. With their processes
    /// go namespaces, and with those what is mounted, linked and pinned there.
    members: BTreeSet<(u32, u64)>,
    /// How many namespaces there were.
    spaces: usize,
}

impl Demo {
    fn start(arguments: &[PathBuf]) -> Result<Self> {
        let (output, input) = io::pipe()?;
        let child = Command::new(env!("CARGO_BIN_EXE_ctrlmesh-demo"))
            .args(arguments)
            .stdout(input)
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        let (said, lines) = mpsc::channel();
        thread::spawn(move || {
            // Read to its end, also where nobody listens any more: a full pipe would hold the demo up.
            let output = BufReader::new(output).lines();
            output.map_while(Result::ok).for_each(|line| drop(said.send(line)));
        });
        Ok(Self { child, lines })
    }

    /// The next line.
    fn line(&self) -> Result<String, RecvTimeoutError> {
        self.lines.recv_timeout(PART_WITHIN)
    }

    /// Waits until a line begins so.
    fn said(&self, wanted: &str) -> Result<()> {
        let mut last = String::new();
        while !wanted.is_empty() {
            let line = self.line();
            let line = line.with_context(|| format!("no {wanted:?} after {last:?}"))?;
            if line.contains("DID NOT HOLD") {
                // What it says of it may be a table of many lines; the demo ends soon after.
                let rest = iter::from_fn(|| self.lines.recv_timeout(SAID_WITHIN).ok());
                let rest: Vec<String> = rest.take(SAID_LINES).collect();
                bail!("before {wanted:?}: {line}\n{}", rest.join("\n"));
            }
            if line.starts_with(wanted) {
                break;
            }
            last = line;
        }
        Ok(())
    }

    /// Does what it says that one can try while it stays up, word for word.
    fn tried(&self) -> Result<()> {
        let mut script = "set -e\n".to_owned();
        loop {
            let line = self.line().context("the commands to try")?;
            if line.trim().is_empty() {
                break;
            }
            script.push_str(&line);
            script.push('\n');
        }
        let commands = script.lines().filter(|line| line.trim().starts_with("kubectl ")).count();
        ensure!(commands == 3, "{commands} commands to try: {script}");
        let tried = Command::new("sh").args(["-c", &script]).output()?;
        let said = String::from_utf8_lossy(&tried.stdout);
        ensure!(tried.status.success(), "{script}: {}", String::from_utf8_lossy(&tried.stderr));
        for wanted in ["share-0-canary", "io/example-operator patched", "website.web.example.com/site-0 patched"] {
            ensure!(said.contains(wanted), "no {wanted:?} in {said}");
        }
        Ok(())
    }

    /// As a terminal does where somebody presses Ctrl-C: to all of its process group.
    fn interrupt(&self) -> Result<()> {
        let group = format!("-{}", self.child.id());
        let status = Command::new("kill").args(["-INT", "--", &group]).status()?;
        ensure!(status.success(), "kill");
        Ok(())
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // It has ended already where the test went well.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Traces {
    /// What there is now of the demo whose guard is `guard`.
    fn of(guard: u32) -> Self {
        let spaces_of = |process: u32| SPACES.iter().filter_map(move |kind| space(process, kind));
        let own: BTreeSet<_> = spaces_of(std::process::id()).collect();
        let marked = marked(guard);
        // Pods do not carry the mark.
        let seeds: BTreeSet<u32> = marked.union(&in_cgroups(&prefixes(&marked))).copied().collect();
        let spaces = seeds.iter().flat_map(|process| spaces_of(*process));
        let spaces: BTreeSet<_> = spaces.filter(|space| !own.contains(space)).collect();
        let within =
            |process: &u32| seeds.contains(process) || spaces_of(*process).any(|space| spaces.contains(&space));
        let members = processes().filter(within);
        let members = members.filter_map(|process| Some((process, started(process)?))).collect();
        Self { marked, members, spaces: spaces.len() }
    }

    /// What is left of it: files, cgroups, mounts, network devices, processes.
    fn left(&self) -> Vec<String> {
        let mut found = named_after(&prefixes(&self.marked));
        let devices = self.marked.iter().map(|one| format!("/sys/class/net/ctrlm{one}"));
        found.extend(devices.filter(|device| Path::new(device).exists()));
        let alive = |one: &&(u32, u64)| started(one.0) == Some(one.1);
        found.extend(self.members.iter().filter(alive).map(|(one, _)| format!("process {one}")));
        found
    }
}

/// The processes that carry the mark of the demo whose guard is `guard`.
fn marked(guard: u32) -> BTreeSet<u32> {
    let wanted = format!("{MARK}={guard}");
    let carries = |process: &u32| {
        let variables = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
        variables.split(|byte| *byte == 0).any(|one| one == wanted.as_bytes())
    };
    processes().filter(carries).collect()
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The namespace of a kind that a process is in; nothing where it is gone.
fn space(process: u32, kind: &&'static str) -> Option<(&'static str, u64)> {
    let file = fs::metadata(format!("/proc/{process}/ns/{kind}")).ok()?;
    Some((*kind, file.ino()))
}

/// What the names begin with of all that one of these processes may keep.
fn prefixes(keepers: &BTreeSet<u32>) -> Vec<String> {
    let both = |one: &u32| [format!("ctrlmesh-node-{one}-"), folder_prefix(*one)];
    keepers.iter().flat_map(both).collect()
}

/// Processes in cgroups with such names.
fn in_cgroups(prefixes: &[String]) -> BTreeSet<u32> {
    let is_there = |process: &u32| {
        let text = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        prefixes.iter().any(|prefix| text.contains(prefix))
    };
    processes().filter(is_there).collect()
}

/// What has such a name: folders, cgroups, pins, mounts, processes in those cgroups.
fn named_after(prefixes: &[String]) -> Vec<String> {
    let ours = |text: &str| prefixes.iter().any(|prefix| text.contains(prefix));
    let listed = |folder: &Path| -> Vec<PathBuf> {
        fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
    };
    let top = listed(Path::new("/sys/fs/cgroup"));
    let below = top.iter().filter(|path| path.is_dir()).flat_map(|path| listed(path));
    let pins = listed(Path::new("/sys/fs/bpf"));
    let paths = listed(&env::temp_dir()).into_iter().chain(top.clone()).chain(below).chain(pins);
    let mut found: Vec<String> = paths.map(|path| path.display().to_string()).collect();
    found.retain(|path| ours(path));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    found.extend(mounts.lines().filter(|line| ours(line)).map(str::to_owned));
    found.extend(in_cgroups(prefixes).into_iter().map(|process| format!("process {process}")));
    found
}

/// What the demo says when each of its parts begins, from the start (of which nothing is said) until it stays up.
fn parts() -> Vec<String> {
    let before = ["", "==> start a", "==> load", "==> install ctrlmesh", "==> install an ordinary"];
    let steps = (1..=DEMO.len()).map(|number| format!("[{number}/{}]", DEMO.len()));
    let last = "It stays up until Ctrl-C".to_owned();
    before.into_iter().map(str::to_owned).chain(steps).chain([last]).collect()
}

/// So many moments: from the first to the last part, and where there are enough in each of them.
fn moments(count: usize, parts: usize, seed: u64) -> Vec<Moment> {
    let mut state = seed;
    let mut next = || {
        // Knuth's; good enough to be no pattern.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(state >> 40).unwrap_or_default() % 1000
    };
    let part = |number: usize| number * (parts - 1) / (count - 1).max(1);
    (0..count).map(|number| (part(number), DELAY * next() / 1000)).collect()
}

fn seed() -> Result<u64> {
    match env::var(SEED) {
        Ok(text) => text.parse().with_context(|| format!("{SEED}={text}")),
        Err(_) => Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs()),
    }
}

#[test]
fn the_moments_reach_from_the_first_part_to_the_last() {
    let parts = parts().len();
    let reached = |count| -> Vec<usize> {
        let mut reached: Vec<_> = moments(count, parts, 7).into_iter().map(|one| one.0).collect();
        reached.dedup();
        reached
    };
    assert_eq!(reached(20), (0..parts).collect::<Vec<_>>());
    assert_eq!(reached(2), [0, parts - 1]);
    assert!(moments(20, parts, 7).iter().all(|(_, delay)| *delay < DELAY));
}

#[test]
fn the_demo_interrupted_at_any_moment_leaves_nothing() -> Result<()> {
    let archives = images::build(&[Image::Proxy, Image::Manager, Image::ExampleOperator], true)?;
    let full = ctrlmesh_testbed::is_full();
    // Of two, one is early, and one is when all steps have been taken.
    let (count, parts, seed) = (if full { 20 } else { 2 }, parts(), seed()?);
    let mut deepest = 0;
    for (part, delay) in moments(count, parts.len(), seed) {
        let at = format!("{} ms after {:?}, {SEED}={seed}", delay.as_millis(), parts[part]);
        let last = part == parts.len() - 1;
        let mut demo = Demo::start(&archives)?;
        demo.said(&parts[part]).with_context(|| at.clone())?;
        if last {
            demo.tried().with_context(|| at.clone())?;
        }
        thread::sleep(delay);
        ensure!(demo.child.try_wait()?.is_none(), "it has ended by itself, {at}");
        let guard = demo.child.id();
        let traces = Traces::of(guard);
        deepest = deepest.max(traces.spaces);
        demo.interrupt()?;
        let status = demo.child.wait()?;
        // In its very first moment it has not yet said that it wants to hear of it.
        ensure!(status.code() == Some(130) || status.signal() == Some(2), "{status}, {at}");
        let left = marked(guard);
        ensure!(left.is_empty(), "processes {left:?} are left, {at}");
        let left = traces.left();
        ensure!(left.is_empty(), "left, {at}: {left:#?}");
        drop(writeln!(
            stderr(),
            "{at}: there were {} processes and {} namespaces",
            traces.members.len(),
            traces.spaces
        ));
    }
    ensure!(deepest > 4, "only {deepest} namespaces were ever there: the test looks at the wrong ones");
    Ok(())
}

#[test]
fn the_demo_ends_with_its_guard() -> Result<()> {
    let mut demo = Demo::start(&[])?;
    let mark = demo.child.id();
    while marked(mark).is_empty() {
        ensure!(demo.child.try_wait()?.is_none(), "it has ended by itself");
    }
    demo.child.kill().context("kill the guard")?;
    demo.child.wait()?;
    let deadline = Instant::now() + Duration::from_mins(1);
    while !marked(mark).is_empty() {
        ensure!(Instant::now() < deadline, "{:?} go on", marked(mark));
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}
