//! Prints for people what is to be written, and what became of it.
//!
//! Pure.

use ctrlmesh_common::api::ShardingConfig;

use super::proposal::title;
use super::{Report, Step};
use crate::plan::render;

/// What moves, and what is to be written for it.
pub(super) fn proposals(steps: &[Step], report: &Report) -> String {
    let mut parts: Vec<String> = steps.iter().map(proposal).collect();
    if !report.standbys.is_empty() {
        let lines = report.standbys.iter().map(|one| {
            format!("Pod {}: nothing moves. {} of shard {} takes over.\n", one.pod, one.others.join(" or "), one.shard)
        });
        parts.push(lines.collect());
    }
    parts.extend(render::not_counted(&report.not_counted));
    parts.join("\n") + "\n"
}

fn proposal(step: &Step) -> String {
    let Step { root, proposal } = step;
    let plan = render::root(&proposal.plan);
    if proposal.patch.is_none() {
        return plan + "\nNothing is to be written.\n";
    }
    let others = match proposal.other_writers.as_slice() {
        [] => String::new(),
        others => {
            let writers = others.join(", ");
            format!(
                "Write it into the manifest, too, or its next apply is refused or undoes it: {writers} wrote these fields.\n"
            )
        }
    };
    format!("{plan}\nTo be written into {}:\n{}{others}", title(root), proposal.yaml("  "))
}

pub(super) fn written(root: &ShardingConfig, dry_run: bool) -> String {
    if dry_run {
        return format!("{} would be accepted. Nothing was written.\n", title(root));
    }
    format!("{} is written.\n", title(root))
}

pub(super) fn settled(root: &ShardingConfig) -> String {
    format!("{} has settled: all is with its owner, and each proxy has its policy.\n", title(root))
}
