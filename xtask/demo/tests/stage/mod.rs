//! A node with ctrlmesh and an operator on it, and the steps that are taken there.

use std::io::{Write as _, stderr};

use anyhow::{Context as _, Result};
use ctrlmesh_demo::api::Api;
use ctrlmesh_demo::environment::Environment;
use ctrlmesh_demo::install;
use ctrlmesh_demo::paint;
use ctrlmesh_demo::steps::Step;
use ctrlmesh_demo::work::Work;
use ctrlmesh_testbed::{Cluster, Node, Options};
use xtask::images::{self, Image};

/// Takes `steps`, one after the other, with the operator of `work` and work in so many namespaces; the first that does
/// not hold ends it, and what the cluster says then goes to a folder that the error names.
#[allow(dead_code, reason = "each test binary uses its own part of it")]
pub(crate) fn play(work: Work, namespaces: usize, steps: &[Step]) -> Result<()> {
    let operator = match work {
        Work::Websites => Image::ExampleOperator,
        Work::Prometheuses => Image::PrometheusOperator,
    };
    play_on(&stage(work, namespaces, &[operator], &[])?, steps)
}

/// The same on a stage that is there.
pub(crate) fn play_on(environment: &Environment, steps: &[Step]) -> Result<()> {
    for step in steps {
        say(&format!("{}\n  to hold: {}", step.title, step.promise));
        let seen = (step.run)(environment).or_else(|error| {
            let folder = install::checkout("target/reports/operator");
            environment.cluster.report(&folder)?;
            Err(error).with_context(|| format!("{}; what the cluster said is in {}", step.title, folder.display()))
        })?;
        for one in &seen {
            say(&format!("  {one}"));
        }
        say(&paint::table(&environment.observer.table()));
    }
    Ok(())
}

/// A node with these images beside our own, whose audit log has the bodies of these resources, as `plural.group`.
pub(crate) fn stage(work: Work, namespaces: usize, more: &[Image], bodies: &[String]) -> Result<Environment> {
    let node = Node::start(&Options { audit: true, audit_bodies: bodies.to_vec(), ..Options::default() })?;
    let archives = images::build(&[&[Image::Proxy, Image::Manager], more].concat(), true)?;
    archives.iter().try_for_each(|archive| node.load(archive))?;
    let log = node.control_plane().audit_log();
    let cluster = Cluster::of(node);
    install::ctrlmesh(&cluster)?;
    install::operator(&cluster, work)?;
    install::label_kinds(&Api::of(&cluster)?, work)?;
    Environment::of(cluster, log, work, namespaces)
}

/// What is seen is worth reading where the test passes, too.
fn say(text: &str) {
    drop(writeln!(stderr(), "{text}"));
}
