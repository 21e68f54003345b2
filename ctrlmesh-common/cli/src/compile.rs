//! `compile`: prints the policy of every pod in files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use ctrlmesh_manager::config::LabelArgs;
use ctrlmesh_manager::rules::compile::{Compiled, World, compile};
use ctrlmesh_manager::rules::pod::Member;
use ctrlmesh_manager::rules::shared::Shared;

use crate::files::{exit_code, manifests};

/// What is asked for.
#[derive(Args, Debug)]
pub(crate) struct Compile {
    /// A YAML or JSON file, or a folder with such files: ShardingConfigs, and the pods, workloads and namespaces that
    /// they name. May be repeated
    #[arg(short, long = "filename", value_name = "FILE", required = true)]
    filename: Vec<PathBuf>,
    /// File with an earlier output of this command. A policy that did not change since keeps its epoch
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    #[command(flatten)]
    labels: LabelArgs,
}

impl Compile {
    pub(crate) fn run(self) -> Result<ExitCode> {
        let manifests = manifests(&self.filename)?;
        let before = match &self.before {
            Some(file) => {
                let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
                serde_saphyr::from_str(&text).with_context(|| format!("parse {}", file.display()))?
            }
            None => Compiled::default(),
        };
        let members: Vec<_> = manifests.pods.iter().map(|pod| Shared::from(Member::from(pod))).collect();
        let world = World {
            configs: &manifests.configs,
            breakers: &manifests.breakers,
            injections: &manifests.injections,
            members: &members,
            namespaces: &manifests.namespaces,
            first_ordinals: &manifests.first_ordinals,
            unenrolled: &manifests.unenrolled(),
            evidence: &BTreeMap::new(),
            leads: true,
            held_back: &BTreeSet::new(),
            waiting: &BTreeSet::new(),
            loads: &BTreeMap::new(),
            labelling: &self.labels.labelling()?,
        };
        let compiled = compile(world, &before.policies);
        write!(stdout(), "{}", serde_saphyr::to_string(&compiled)?)?;
        Ok(exit_code(!compiled.troubles.is_empty()))
    }
}
