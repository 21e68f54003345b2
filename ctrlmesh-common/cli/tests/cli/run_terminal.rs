//! `ctrlmesh run` at a terminal.

use std::fs;
use std::process::Command;

use crate::harness::run::{Bed, stderr, stdout, unignored};
use serde_json::{Value, json};
use tokio::task;

/// Types into a terminal and waits for what is to appear.
async fn at_a_terminal(run: Command, steps: Value) -> String {
    let words: Vec<String> = [run.get_program()]
        .into_iter()
        .chain(run.get_args())
        .map(|word| format!("'{}'", word.to_str().unwrap().replace('\'', r"'\''")))
        .collect();
    let mut steps = steps;
    for step in steps.as_array_mut().unwrap() {
        if let Some(typed) = step.get("type").and_then(Value::as_str) {
            step["type"] = typed.replace("RUN", &words.join(" ")).into();
        }
    }
    let mut terminal = Command::new("python3");
    terminal.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run_command/terminal.py")).arg(steps.to_string());
    let mut terminal = unignored(terminal);
    for (name, value) in run.get_envs().filter_map(|(name, value)| Some((name, value?))) {
        terminal.env(name, value);
    }
    // It has patience of its own.
    let output = task::spawn_blocking(move || terminal.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

/// Prints how many SIGINTs came, some time after the first.
const COUNTING: &str = "
import signal, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
print('wait' + 'ing', flush=True)
while not seen: time.sleep(0.01)
time.sleep(0.2)
print('interrupts', len(seen), flush=True)
raise SystemExit(5)
";

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_reaches_the_command_once() {
    let bed = Bed::new().await;
    for line in ["RUN\n", "RUN | (trap '' INT; cat); (exit ${PIPESTATUS[0]})\n"] {
        let steps = json!([
            {"see": "> "}, {"type": line}, {"see": "waiting"}, {"type": "\u{3}"},
            {"see": "interrupts 1"}, {"see": "ctrlmesh: 0 requests"},
            {"see": "> "}, {"type": "echo code=$?\n"}, {"see": "code=5"},
        ]);
        at_a_terminal(bed.run(&[], &["python3", "-c", COUNTING]), steps).await;
        bed.nothing_is_left();
    }
}

/// A ShardingConfig whose explanation is longer than a terminal keeps for its reader.
fn long_config() -> String {
    let values: Vec<String> = (0..700).map(|number| format!("{number:050}")).collect();
    let limits = ["pods", "nodes", "services", "secrets", "configmaps"].map(|resource| {
        json!({
            "relateResources": [{"apiGroups": [""], "resources": [resource]}],
            "selector": {"matchExpressions": [{"key": "slot", "operator": "In", "values": values}]},
        })
    });
    let spec = json!({"selector": {"matchLabels": {"app": "x"}}, "limits": limits});
    json!({
        "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1", "kind": "ShardingConfig",
        "metadata": {"name": "one"}, "spec": spec,
    })
    .to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_between_proxy_and_command_ends_the_command() {
    let bed = Bed::new().await;
    let file = bed.pki.path("long.yaml");
    fs::write(&file, long_config()).unwrap();
    // Nobody reads the terminal after the first line. So `run` cannot go on to start the command before Ctrl-C.
    let steps = json!([
        {"see": "> "}, {"type": "RUN\n"}, {"see": "KUBECONFIG is"}, {"type": "\u{3}"},
        {"see": "> "}, {"type": "echo code=$?\n"}, {"see": "code=130"},
    ]);
    let flags = ["--explain", "--sharding-config", file.to_str().unwrap()];
    at_a_terminal(bed.run(&flags, &["sleep", "60"]), steps).await;
    bed.nothing_is_left();
}

/// Reads a line and prints it in capitals.
const SHOUTING: &str = "print('rea' + 'dy', flush=True); print(input().upper()); print(input().upper())";

#[tokio::test(flavor = "multi_thread")]
async fn a_command_can_be_paused_and_taken_up_again() {
    let bed = Bed::new().await;
    // The shell waits for `ctrlmesh` only. The command, its child, may stop a moment later, and reads until then.
    let steps = json!([
        {"see": "> "}, {"type": "RUN\n"}, {"see": "ready"}, {"type": "one\n"}, {"see": "ONE"},
        {"type": "\u{1a}"}, {"see": "Stopped"}, {"see": "> "}, {"stopped": true},
        {"type": "echo sh$((1+1))ell\n"}, {"see": "sh2ell"},
        {"see": "> "}, {"type": "fg\n"}, {"see": "shards"}, {"type": "two\n"}, {"see": "TWO"}, {"see": "> "},
        {"type": "echo code=$?\n"}, {"see": "code=0"},
    ]);
    // A word of the command line shows that `fg` has begun.
    let run = bed.run(&["--shard", "shards"], &["python3", "-c", SHOUTING]);
    at_a_terminal(run, steps).await;
    bed.nothing_is_left();
}
