//! `cargo xtask torture`: handovers under load, while processes are paused, killed and cut off at random, and API
//! servers restart.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Args;

use crate::run::{cargo, is_root, run};
use crate::setup::{self, Purpose, Readiness};

/// How it is run.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Move shares by elasticity: pods come, go, fail and are killed
    #[arg(long)]
    elastic: bool,
    /// How often a share moves, or the pods of elastic shares change
    #[arg(long, value_name = "N", default_value_t = 1000)]
    handovers: u32,
    /// Choose the moves and the blows as the run did that printed this seed; without it, others each time
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
}

/// The tests that do it, which `cargo xtask test` runs with fewer handovers.
const TESTS: [&str; 4] = ["--package", "ctrlmesh-e2e", "--test", "control_plane_ownership"];
const BY_HAND: &str = "torture::tortured_handovers_leave_one_writer";
const BY_ELASTICITY: &str = "elastic_torture::tortured_elastic_shares_leave_one_writer";

/// Variables with which the test is told.
const HANDOVERS: &str = "CTRLMESH_TORTURE_HANDOVERS";
const SEED: &str = "CTRLMESH_TORTURE_SEED";

/// Runs the handovers, and ends with what the audit logs say of them.
///
/// # Errors
/// Where this is not root, something cannot be built, or the audit logs have a fault.
pub fn run_handovers(options: &Options) -> Result<ExitCode> {
    ensure!(is_root(), "torture has a network of its own, which needs root");
    let readiness = setup::run_setup(Purpose::Tests)?;
    if readiness == Readiness::NotReady {
        return Ok(readiness.into());
    }
    let mut command = cargo(&["test", "--quiet", "--locked"]);
    let name = if options.elastic { BY_ELASTICITY } else { BY_HAND };
    command.args(TESTS).args(["--", "--exact", name, "--nocapture"]);
    command.env(HANDOVERS, options.handovers.to_string());
    if let Some(seed) = options.seed {
        command.env(SEED, seed.to_string());
    }
    run(&mut command)?;
    Ok(ExitCode::SUCCESS)
}
