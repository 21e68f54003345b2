//! Runs the benchmarks.

use anyhow::{Result, ensure};
use clap::Args;

use crate::run::{cargo, run};
use crate::{build_ebpf, setup};

/// Benchmarks, and the crate and target that each is in.
const BENCHES: [(&str, &str, &str); 15] = [
    ("connect", "ctrlmesh-proxy", "connect"),
    ("decide", "ctrlmesh-proxy", "decide"),
    ("guard", "ctrlmesh-proxy", "decide"),
    ("request", "ctrlmesh-proxy", "proxy"),
    ("list", "ctrlmesh-proxy", "proxy"),
    ("watch", "ctrlmesh-proxy", "proxy"),
    ("rule", "ctrlmesh-proxy", "proxy"),
    ("idle", "ctrlmesh-proxy", "proxy"),
    ("profile", "ctrlmesh-proxy", "proxy"),
    ("relay", "ctrlmesh-proxy", "relay"),
    ("spans", "ctrlmesh-proxy", "spans"),
    ("webhook", "ctrlmesh-proxy", "webhook"),
    ("manager", "ctrlmesh-e2e", "manager"),
    ("fence", "ctrlmesh-e2e", "fence"),
    ("scale", "ctrlmesh-e2e", "scale"),
];

/// What to measure.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Which benchmark (connect, decide, guard, request, list, watch, rule, idle, profile, relay, spans,
    /// webhook, manager, fence or scale); without it, all of them
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Take a few samples only: minutes become seconds
    #[arg(long)]
    quick: bool,
}

/// Runs benchmarks.
///
/// # Errors
/// Where one does not exist, cannot be built, or fails.
pub fn run_benches(options: &Options) -> Result<()> {
    let chosen: Vec<_> =
        BENCHES.iter().filter(|(name, ..)| options.name.as_deref().is_none_or(|wanted| wanted == *name)).collect();
    let names = BENCHES.map(|(name, ..)| name).join(", ");
    ensure!(!chosen.is_empty(), "there is no such benchmark; there are {names}");
    setup::for_benches()?;
    if chosen.iter().any(|(name, ..)| *name == "scale") {
        setup::for_simulated_pods()?;
    }
    build_ebpf::build()?;
    for (name, package, target) in chosen {
        let mut command = cargo(&["bench", "--package", package, "--locked"]);
        command.args(["--bench", target, "--"]);
        if name != target {
            command.arg(name);
        }
        if options.quick {
            command.arg("--quick");
        }
        run(&mut command)?;
    }
    Ok(())
}
