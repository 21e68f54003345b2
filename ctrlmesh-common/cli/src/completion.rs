//! `ctrlmesh completion`: prints scripts by which shells complete commands and flags.
//!
//! kubectl asks a program called `kubectl_complete-ctrlmesh` for the words that may follow `kubectl ctrlmesh …`. That
//! program is a script that passes the question on to the hidden command [`COMPLETE`].

use std::io;
use std::io::{Write as _, stdout};

use clap::{Arg, Args, Command, ValueEnum};
use clap_complete::Shell;

/// The command that answers kubectl, as programs made with cobra call theirs.
pub(crate) const COMPLETE: &str = "__complete";

/// Ends an answer: the shell may add names of files. These are the numbers of cobra's `ShellCompDirective`.
const WITH_FILES: &str = ":0";

/// Ends an answer: the shell adds nothing.
const WITHOUT_FILES: &str = ":4";

/// What kubectl runs.
const KUBECTL_SCRIPT: &str = "\
#!/bin/sh
# kubectl runs this to complete `kubectl ctrlmesh`. It has to be called kubectl_complete-ctrlmesh, and be on the PATH.
exec kubectl-ctrlmesh __complete -- \"$@\"
";

/// What `completion` is told.
#[derive(Args, Debug)]
pub(crate) struct CompletionArgs {
    /// The shell. With kubectl: a program for the PATH, to be called kubectl_complete-ctrlmesh
    #[arg(value_name = "SHELL")]
    shell: Target,
}

/// What [`COMPLETE`] is told.
#[derive(Args, Debug)]
pub(crate) struct CompleteArgs {
    /// The words after `kubectl ctrlmesh`. The last one is to be completed, and may be empty
    #[arg(value_name = "WORD", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// For whom the script is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Target {
    Bash,
    Elvish,
    Fish,
    Kubectl,
    #[value(name = "powershell")]
    PowerShell,
    Zsh,
}

/// Prints a script. `commands` are those that it completes.
///
/// # Errors
/// It cannot be printed.
pub(crate) fn run(arguments: &CompletionArgs, commands: Command) -> io::Result<()> {
    stdout().lock().write_all(&script(arguments.shell, commands))
}

/// Answers kubectl.
///
/// # Errors
/// The answer cannot be printed.
pub(crate) fn complete(arguments: &CompleteArgs, commands: Command) -> io::Result<()> {
    stdout().lock().write_all(answer(commands, &arguments.words).as_bytes())
}

/// Into memory: with a pipe that ends early, `clap_complete` would panic.
fn script(target: Target, mut commands: Command) -> Vec<u8> {
    let shell = match target {
        Target::Kubectl => return KUBECTL_SCRIPT.as_bytes().to_vec(),
        Target::Bash => Shell::Bash,
        Target::Elvish => Shell::Elvish,
        Target::Fish => Shell::Fish,
        Target::PowerShell => Shell::PowerShell,
        Target::Zsh => Shell::Zsh,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut commands, "ctrlmesh", &mut script);
    script
}

/// A line for each word that may stand in the place of the last one, with its meaning after a tab, and what the shell
/// may add.
fn answer(mut commands: Command, words: &[String]) -> String {
    commands.build();
    let (last, before) = words.split_last().map_or(("", &[][..]), |(last, before)| (last.as_str(), before));
    // What follows is another program's.
    if before.iter().any(|word| word == "--") {
        return format!("{WITH_FILES}\n");
    }
    let (command, flag) = position(&commands, before);
    let (candidates, directive) = match flag {
        Some(flag) => values(flag),
        None if last.starts_with('-') => (flags(command), WITHOUT_FILES),
        None => arguments(command),
    };
    let lines = candidates.into_iter().filter(|(word, _)| word.starts_with(last)).map(|(word, meaning)| {
        let meaning = meaning.lines().next().unwrap_or_default();
        if meaning.is_empty() { format!("{word}\n") } else { format!("{word}\t{meaning}\n") }
    });
    lines.chain([format!("{directive}\n")]).collect()
}

/// The command that the words name, and the flag whose value follows.
fn position<'a>(commands: &'a Command, words: &[String]) -> (&'a Command, Option<&'a Arg>) {
    let (mut command, mut flag) = (commands, None);
    for word in words {
        if flag.take().is_some() {
            continue;
        }
        if word.starts_with('-') {
            flag = command.get_arguments().find(|arg| is_called(arg, word) && takes_value(arg));
        } else if let Some(next) = command.find_subcommand(word) {
            command = next;
        }
    }
    (command, flag)
}

fn is_called(flag: &Arg, word: &str) -> bool {
    let long = word.strip_prefix("--");
    let is_short = |short: char| word.strip_prefix('-').is_some_and(|word| word.chars().eq([short]));
    long.is_some() && long == flag.get_long() || flag.get_short().is_some_and(is_short)
}

fn takes_value(flag: &Arg) -> bool {
    flag.get_num_args().is_some_and(|number| number.takes_values())
}

/// Words with their meanings, and what the shell may add.
type Candidates = (Vec<(String, String)>, &'static str);

/// What a flag or an argument may be. The shell adds files where nothing is known.
fn values(arg: &Arg) -> Candidates {
    let known: Vec<_> =
        arg.get_possible_values().iter().map(|one| (one.get_name().to_owned(), meaning(one.get_help()))).collect();
    let directive = if known.is_empty() { WITH_FILES } else { WITHOUT_FILES };
    (known, directive)
}

fn flags(command: &Command) -> Vec<(String, String)> {
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let named = |arg: &Arg| Some((format!("--{}", arg.get_long()?), meaning(arg.get_help())));
    shown.filter_map(named).collect()
}

/// The commands below `command`, or else what its first argument may be.
fn arguments(command: &Command) -> Candidates {
    let below = command.get_subcommands().filter(|one| !one.is_hide_set());
    let below: Vec<_> = below.map(|one| (one.get_name().to_owned(), meaning(one.get_about()))).collect();
    let first = command.get_positionals().next().map(values).filter(|(known, _)| !known.is_empty());
    first.unwrap_or((below, WITHOUT_FILES))
}

fn meaning(text: Option<&clap::builder::StyledStr>) -> String {
    text.map(ToString::to_string).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::visible;

    fn answered(words: &[&str]) -> String {
        answer(visible(), &words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn every_shell_gets_a_script_with_all_commands() {
        for target in Target::value_variants().iter().filter(|target| **target != Target::Kubectl) {
            let script = String::from_utf8(script(*target, visible())).unwrap();
            for word in ["rollout", "status", "owner", "all-namespaces", "kubectl"] {
                assert!(script.contains(word), "{target:?}: {word}");
            }
            assert!(!script.contains(crate::run::CHILD) && !script.contains(COMPLETE), "{target:?}");
        }
    }

    #[test]
    fn kubectl_gets_a_script_that_asks_the_plugin() {
        let script = String::from_utf8(script(Target::Kubectl, visible())).unwrap();
        assert!(script.starts_with("#!/bin/sh\n"), "{script}");
        assert!(script.ends_with(&format!("\nexec kubectl-ctrlmesh {COMPLETE} -- \"$@\"\n")), "{script}");
    }

    #[test]
    fn commands_flags_and_values_are_completed() {
        let status = answered(&["sta"]);
        assert!(status.starts_with("status\tShow ") && status.ends_with("\n:4\n"), "{status}");
        assert_eq!(status.lines().count(), 2, "{status}");
        let flags = answered(&["status", "web", "--a"]);
        assert!(flags.starts_with("--all-namespaces\tList") && flags.lines().count() == 2, "{flags}");
        for words in [["status", "-o", ""], ["status", "--output", ""]] {
            assert_eq!(answered(&words), "wide\njson\nyaml\n:4\n");
        }
        assert!(answered(&["status", "-n", "status", "--wat"]).starts_with("--watch\t"), "a value is no command");
        assert!(answered(&["rollout", ""]).contains("promote\t"));
        assert!(answered(&["completion", "k"]).starts_with("kubectl"));
        assert!(!answered(&[""]).contains(COMPLETE) && !answered(&[]).contains(crate::run::CHILD));
    }

    #[test]
    fn the_shell_completes_files_where_nothing_is_known() {
        assert_eq!(answered(&["validate", "-f", "sha"]), ":0\n");
        assert_eq!(answered(&["run", "--", "go", "run"]), ":0\n");
        assert_eq!(answered(&["status", "web"]), ":4\n");
    }
}
