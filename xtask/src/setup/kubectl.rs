//! Finds or builds kubectl for people who bring a cluster. Nobody has to be root for it.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{CONTROL_PLANE, Readiness, build_go, missing_go};
use crate::progress::{say, step};
use crate::tools;

/// The program.
const NAME: &str = "kubectl";

/// Sees to it that kubectl is there; builds nothing else, and installs nothing.
///
/// # Errors
/// Where it cannot be built.
pub fn prepare() -> Result<Readiness> {
    if tools::control_plane(NAME).is_file() || tools::on_path(NAME) {
        return Ok(Readiness::Ready);
    }
    if let Some(problem) = missing_go() {
        say(&what_to_do(&problem));
        return Ok(Readiness::NotReady);
    }
    let known = CONTROL_PLANE.iter().find(|(program, ..)| *program == NAME);
    let (program, package, seconds) = known.context("kubectl is none of the programs")?;
    let what = "build kubectl, once per machine";
    step(what, Duration::from_secs(*seconds), || build_go(program, package))?;
    Ok(Readiness::Ready)
}

fn what_to_do(problem: &str) -> String {
    format!("kubectl is not on your PATH. Install it (kubernetes.io/docs/tasks/tools), or {problem}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::go_problem;

    #[test]
    fn whoever_has_neither_is_told_both_ways() {
        let text = what_to_do(&go_problem(None).unwrap());
        assert!(text.contains("kubernetes.io/docs/tasks/tools") && text.contains("or install Go 1.26"), "{text}");
    }

    #[test]
    fn it_is_one_of_the_programs_that_can_be_built() {
        assert!(CONTROL_PLANE.iter().any(|(program, ..)| *program == NAME));
    }
}
