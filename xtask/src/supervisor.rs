//! A shell around a test run, or around the demo's set-up, that receives signals and ends all processes of the run.
//!
//! The run is a process group of its own, so that Ctrl-C reaches the shell alone, and the shell reaches everybody in
//! it. Where the shell itself is killed, the run ends its own group.

use std::ffi::OsStr;
use std::os::unix::process::{CommandExt as _, parent_id};
use std::path::Path;
use std::process::{self, Command};
use std::time::Duration;
use std::{env, io, thread};

/// Variable that tells a run which shell guards it.
const GUARD: &str = "CTRLMESH_TEST_GUARD";

/// Variable that holds the number of a process which a shell became when what it guarded had ended well.
const DONE: &str = "CTRLMESH_TEST_GUARDED";

/// How often the run looks whether its supervisor is there.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// `$0` is this program, `$1` the kubeconfig of the cluster that things are taken out of at the end (empty: none), `$2`
/// what is not empty where the shell is to become this program again at a good end, and the rest what the run is told.
/// A shell has what it starts in the background ignore SIGINT and SIGQUIT, which everything below it would inherit.
/// What is told before there is a run reaches it once there is one, and again until it hears: a process that was just
/// forked may lose a signal. However the run ends, what it leaves ends with it: by SIGINT, which has Go take away what
/// it has in the folder of temporary files, after 1 s by SIGTERM, or after 10 s by SIGKILL. What was being built then
/// is taken away, too.
const SHELL: &str = r#"
cluster=$1
again=$2
shift 2
signal=0
run=
finish() {
    tries=200
    while { kill -0 "-$run" || kill -0 "$run"; } 2>/dev/null && [ "$tries" -gt 0 ]; do
        end=TERM
        [ "$tries" -le 190 ] || end=INT
        [ "$tries" -gt 100 ] || end=KILL
        kill "-$end" "-$run" "$run" 2>/dev/null
        sleep 0.1
        tries=$((tries - 1))
    done
}
told() {
    [ "$signal" -eq 0 ] || return
    signal=$1
    [ -z "$run" ] || { finish & }
}
trap 'told 1' HUP
trap 'told 2' INT
trap 'told 3' QUIT
trap 'told 15' TERM
CTRLMESH_TEST_GUARD=$$ setsid env --default-signal=INT,QUIT "$0" "$@" </dev/null &
run=$!
[ "$signal" -eq 0 ] || { finish & }
wait "$run"
status=$?
[ "$signal" -eq 0 ] || status=$((128 + signal))
finish
if [ -n "$again" ]; then
    # Whoever says something from here on ends the shell, which has nothing to take away any more.
    trap - HUP INT QUIT TERM
    [ "$signal" -ne 0 ] || [ "$status" -ne 0 ] || CTRLMESH_TEST_GUARDED=$$ exec "$0" "$@"
fi
trap '' HUP INT QUIT TERM
[ "$signal" -eq 0 ] || "$0" sweep
if [ -n "$cluster" ]; then
    echo 'taking out of the cluster what the tests put there (a minute or two)' >&2
    "$0" remove --kubeconfig "$cluster" || { [ "$status" -ne 0 ] || status=1; }
fi
exit "$status"
"#;

/// Whether this process is the run, and not what begins it. From then on it ends, and all of its group, when its
/// supervisor does.
pub(crate) fn follow() -> bool {
    let named = env::var(GUARD).ok().and_then(|text| text.parse::<u32>().ok());
    let Some(supervisor) = named.filter(|supervisor| *supervisor == parent_id()) else {
        return false;
    };
    thread::spawn(move || {
        while parent_id() == supervisor {
            thread::sleep(LOOK_EVERY);
        }
        let group = format!("-{}", process::id());
        drop(Command::new("kill").args(["-KILL", "--", &group]).status());
    });
    true
}

/// Whether this process is what a shell became when what it guarded had ended well.
pub(crate) fn is_over() -> bool {
    env::var(DONE).is_ok_and(|text| text == process::id().to_string())
}

/// What a supervisor does when the run has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OnExit<'a> {
    /// It takes everything out of the cluster of this kubeconfig, where there is one.
    Clearing(Option<&'a Path>),
    /// Where all went well, it becomes this program, once more; see [`is_over`].
    Again,
}

/// The shell that starts this program again, as it was started, and waits.
///
/// # Errors
/// Where it is not known which program this is.
pub(crate) fn shell(after: OnExit<'_>) -> io::Result<Command> {
    let mut shell = supervisor(&env::current_exe()?, after);
    shell.args(env::args_os().skip(1));
    Ok(shell)
}

/// Becomes that shell; returns only where that fails.
pub(crate) fn enter(after: OnExit<'_>) -> io::Error {
    match shell(after) {
        Ok(mut shell) => shell.exec(),
        Err(error) => error,
    }
}

fn supervisor(program: &Path, after: OnExit<'_>) -> Command {
    let (cluster, again) = match after {
        OnExit::Clearing(cluster) => (cluster.map_or(OsStr::new(""), Path::as_os_str), ""),
        OnExit::Again => (OsStr::new(""), "again"),
    };
    let mut shell = Command::new("sh");
    shell.args(["-c", SHELL]).arg(program).arg(cluster).arg(again);
    shell
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::PathBuf;
    use std::process::Child;
    use std::time::Instant;

    use super::*;

    /// In the place of this program: starts one that hears no SIGHUP, says which, and waits; or says what it was to
    /// remove.
    const PROGRAM: &str = r#"#!/bin/sh
cd "$(dirname "$0")" || exit
case $1 in
remove) echo "$3" >removed ;;
sweep) echo yes >swept ;;
fail) exit 3 ;;
pass) [ "${CTRLMESH_TEST_GUARDED-}" != $$ ] || echo yes >again ;;
die)
    sleep 600 &
    echo "$!" >new
    mv new started
    kill -KILL $$
    ;;
*)
    sh -c 'trap "" HUP; sleep 600 & wait' &
    echo "$! $$" >new
    mv new started
    wait
    ;;
esac
"#;

    /// Names the folder of a scene to a child of this very binary; see [`a_guarded_run_for_its_parent`].
    const FOLDER: &str = "CTRLMESH_TEST_GUARD_FOLDER";

    struct Scene {
        folder: PathBuf,
    }

    impl Scene {
        fn of(name: &str) -> Self {
            let folder = env::temp_dir().join(format!("ctrlmesh-supervisor-{name}-{}", process::id()));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("program"), PROGRAM).unwrap();
            fs::set_permissions(folder.join("program"), fs::Permissions::from_mode(0o755)).unwrap();
            Self { folder }
        }

        fn start(&self, word: &str) -> Child {
            self.start_with(OnExit::Clearing(Some(Path::new("kubeconfig"))), word)
        }

        fn start_with(&self, after: OnExit<'_>, word: &str) -> Child {
            supervisor(&self.folder.join("program"), after).arg(word).spawn().unwrap()
        }

        /// The processes that the program says it started, once it says so.
        fn started(&self) -> Vec<String> {
            let deadline = Instant::now() + Duration::from_secs(20);
            loop {
                if let Ok(text) = fs::read_to_string(self.folder.join("started")) {
                    return text.split_whitespace().map(str::to_owned).collect();
                }
                assert!(Instant::now() < deadline, "it did not start");
                thread::sleep(Duration::from_millis(5));
            }
        }

        fn has(&self, name: &str) -> bool {
            self.folder.join(name).exists()
        }

        fn removed(&self) -> String {
            fs::read_to_string(self.folder.join("removed")).unwrap_or_default()
        }
    }

    impl Drop for Scene {
        fn drop(&mut self) {
            // Where a test fails, what it started ends with it.
            let started = fs::read_to_string(self.folder.join("started")).unwrap_or_default();
            for process in started.split_whitespace().filter(|process| lives(process)) {
                drop(Command::new("kill").args(["-KILL", process]).status());
            }
            drop(fs::remove_dir_all(&self.folder));
        }
    }

    /// Processes below a supervisor that live.
    fn guarded_by(supervisor: &str) -> Vec<String> {
        let ours = format!("{GUARD}={supervisor}");
        let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
        let processes = fs::read_dir("/proc").unwrap().map(|entry| name(entry.unwrap()));
        let below = |process: &String| {
            let environ = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
            environ.split(|byte| *byte == 0).any(|one| one == ours.as_bytes())
        };
        processes.filter(below).filter(|process| lives(process)).collect()
    }

    /// Whether it is there, and not only waits to be buried.
    fn lives(process: &str) -> bool {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    }

    fn tell(supervisor: &Child, signal: &str) {
        let kill = Command::new("kill").args(["-s", signal, &supervisor.id().to_string()]).status();
        assert!(kill.unwrap().success());
    }

    /// Whether whoever started us has made this signal do nothing, as nohup does: no shell can have it do something
    /// again.
    fn is_ignored(number: i32) -> bool {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let mut lines = status.lines();
        let ignored = lines.find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
        u64::from_str_radix(ignored, 16).unwrap() >> (number - 1) & 1 == 1
    }

    #[test]
    fn any_signal_ends_the_whole_run_and_clears_the_cluster() {
        let signals = [("HUP", 1), ("INT", 2), ("QUIT", 3), ("TERM", 15)];
        for (signal, number) in signals.into_iter().filter(|(_, number)| !is_ignored(*number)) {
            let scene = Scene::of(signal);
            let mut supervisor = scene.start("run");
            let started = scene.started();
            assert!(started.iter().all(|process| lives(process)), "{started:?}");
            tell(&supervisor, signal);
            assert_eq!(supervisor.wait().unwrap().code(), Some(128 + number), "{signal}");
            let left: Vec<_> = started.iter().filter(|process| lives(process)).collect();
            assert!(left.is_empty(), "{signal} leaves {left:?}");
            assert_eq!(scene.removed(), "kubeconfig\n");
            assert!(scene.has("swept"), "{signal} leaves what was being built");
        }
    }

    #[test]
    fn success_continues_in_the_same_process_and_failure_is_swept() {
        let scene = Scene::of("again");
        assert_eq!(scene.start_with(OnExit::Again, "pass").wait().unwrap().code(), Some(0));
        assert!(scene.has("again") && !scene.has("swept"));
        let scene = Scene::of("fails-before");
        assert_eq!(scene.start_with(OnExit::Again, "fail").wait().unwrap().code(), Some(3));
        let scene = Scene::of("ends-before");
        let mut supervisor = scene.start_with(OnExit::Again, "run");
        scene.started();
        tell(&supervisor, "TERM");
        assert_eq!(supervisor.wait().unwrap().code(), Some(128 + 15));
        assert!(scene.has("swept") && !scene.has("again"));
    }

    #[test]
    fn what_is_told_before_the_run_has_begun_is_not_lost() {
        for at in 0..12 {
            let scene = Scene::of(&format!("early-{at}"));
            let mut supervisor = scene.start("run");
            thread::sleep(Duration::from_micros(at * 500));
            tell(&supervisor, "TERM");
            let deadline = Instant::now() + Duration::from_mins(1);
            while supervisor.try_wait().unwrap().is_none() {
                assert!(Instant::now() < deadline, "it goes on {at}");
                thread::sleep(Duration::from_millis(5));
            }
            let left = guarded_by(&supervisor.id().to_string());
            assert!(left.is_empty(), "{at}: {left:?} go on, supervisor {:?}", supervisor.wait());
        }
    }

    #[test]
    fn leftovers_of_a_dead_run_end_before_the_cluster_is_cleared() {
        let scene = Scene::of("dies");
        assert_eq!(scene.start("die").wait().unwrap().code(), Some(128 + 9));
        let left: Vec<_> = scene.started().into_iter().filter(|process| lives(process)).collect();
        assert!(left.is_empty(), "{left:?} go on");
        assert_eq!(scene.removed(), "kubeconfig\n");
    }

    #[test]
    fn a_run_whose_supervisor_is_killed_ends_itself() {
        let scene = Scene::of("killed");
        let mut supervisor = supervisor(&env::current_exe().unwrap(), OnExit::Clearing(None))
            .args(["--exact", "supervisor::tests::a_guarded_run_for_its_parent"])
            .env(FOLDER, &scene.folder)
            .spawn()
            .unwrap();
        let started = scene.started();
        assert!(started.iter().all(|process| lives(process)), "{started:?}");
        supervisor.kill().unwrap();
        supervisor.wait().unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while started.iter().any(|process| lives(process)) {
            assert!(Instant::now() < deadline, "{started:?} go on");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The part of the run in the test above; by itself it does nothing.
    #[test]
    fn a_guarded_run_for_its_parent() {
        let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else { return };
        assert!(follow());
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        fs::write(folder.join("new"), format!("{} {}", child.id(), process::id())).unwrap();
        fs::rename(folder.join("new"), folder.join("started")).unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_failed_run_fails_and_the_cluster_is_cleared() {
        let scene = Scene::of("fails");
        assert_eq!(scene.start("fail").wait().unwrap().code(), Some(3));
        assert_eq!(scene.removed(), "kubeconfig\n");
    }
}
