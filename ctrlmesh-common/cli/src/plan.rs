//! `ctrlmesh plan`: shows what applying roots would move, without applying anything.
//!
//! It asks the API server only, with the rights of whoever calls it.

mod args;
mod change;
mod objects;
mod render;

use std::collections::BTreeSet;
use std::io;
use std::io::{Write as _, stdout};
use std::process::ExitCode;

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_manager::rules::shard::DivideError;
use ctrlmesh_manager::rules::validate;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::core::GroupVersionKind;
use kube::{Api, ResourceExt as _};
use serde::Serialize;

pub(crate) use self::args::Arguments;
use self::change::{Change, Counted, RootPlan, Selected, is_same};
use crate::cluster::labelling::{LabellingError, labelling};
use crate::cluster::{self, ClusterError, Connection};
use crate::files::manifests;
use crate::text::{self, Document, DocumentError};

/// Kind of the document about a plan.
const KIND: &str = "Plan";

/// Exit status with `--exit-code`, where something would move.
const MOVES: u8 = 2;

/// Why there is no plan, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("{0:#}")]
    Files(anyhow::Error),
    #[error("there is no root in these files: a ShardingConfig with `spec.root`")]
    NoRoot,
    #[error("ShardingConfig {name} would be refused: {problems}")]
    Refused { name: String, problems: String },
    #[error("divide ShardingConfig {name}")]
    Divide { name: String, source: DivideError },
    #[error("read the {kind} of all namespaces (does `kubectl get {kind} -A` work?)")]
    Read { kind: &'static str, source: kube::Error },
    #[error("ask the API server which resources it has (does `kubectl api-resources` work?)")]
    Discovery(#[source] kube::Error),
    #[error(transparent)]
    Labelling(#[from] LabellingError),
    #[error(transparent)]
    Document(#[from] DocumentError),
    #[error("print")]
    Print(#[from] io::Error),
}

/// What applying roots would do.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Plan {
    roots: Vec<RootPlan>,
    /// Resources whose objects cannot be listed, with the reason.
    not_counted: Vec<String>,
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, PlanError> {
    let plan = cluster::block_on(make(arguments))?;
    let printed = match arguments.output {
        Some(format) => text::document(format, &Document::new(KIND, &plan))?,
        None => render::screen(&plan),
    };
    write!(stdout().lock(), "{printed}")?;
    let moves = plan.roots.iter().any(RootPlan::moves_anything);
    Ok(if moves && arguments.exit_code { ExitCode::from(MOVES) } else { ExitCode::SUCCESS })
}

async fn make(arguments: &Arguments) -> Result<Plan, PlanError> {
    let wanted = manifests(&arguments.filename).map_err(PlanError::Files)?.configs;
    let connection = Connection::of(&arguments.cluster).await?;
    let client = &connection.client;
    let all = ListParams::default();
    let failed = |kind| move |source| PlanError::Read { kind, source };
    let configs: Api<ShardingConfig> = Api::all(client.clone());
    let live = configs.list(&all).await.map_err(failed("shardingconfigs"))?.items;
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Namespace"));
    let namespaces: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
    let namespaces = namespaces.list_metadata(&all).await.map_err(failed("namespaces"))?.items;
    let namespaces: BTreeSet<String> = namespaces.iter().map(kube::ResourceExt::name_any).collect();
    let labelling = labelling(client).await?;
    // Of what is being deleted, admission takes no notice.
    let live: Vec<_> = live.into_iter().filter(|one| one.metadata.deletion_timestamp.is_none()).collect();
    let (mut changes, mut admitted) = (Vec::new(), live.clone());
    for mut root in wanted.into_iter().filter(|config| config.spec.root.is_some()) {
        root.metadata.namespace.get_or_insert_with(|| connection.namespace.clone());
        check(&root, live.iter().find(|one| is_same(&root, one)), &admitted)?;
        let change = Change::of(&root, &live, &namespaces, &labelling);
        changes.push(change.map_err(|source| PlanError::Divide { name: root.name_any(), source })?);
        admitted.retain(|one| !is_same(&root, one));
        admitted.push(root);
    }
    if changes.is_empty() {
        return Err(PlanError::NoRoot);
    }
    let not_counted = count(&connection, &mut changes).await?;
    Ok(Plan { roots: changes.into_iter().map(Change::plan).collect(), not_counted })
}

/// As admission does it, beside what was admitted before.
fn check(root: &ShardingConfig, live: Option<&ShardingConfig>, admitted: &[ShardingConfig]) -> Result<(), PlanError> {
    let mut problems = validate::sharding_config(root, admitted, None).errors;
    problems.extend(live.into_iter().flat_map(|live| validate::change(live, root).errors));
    if problems.is_empty() {
        return Ok(());
    }
    let problems = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    Err(PlanError::Refused { name: root.name_any(), problems })
}

/// Counts the objects that the roots divide. Returns what cannot be counted.
async fn count(connection: &Connection, changes: &mut [Change]) -> Result<Vec<String>, PlanError> {
    let groups = cluster::groups(&connection.client).await.map_err(PlanError::Discovery)?;
    let mut not_counted = Vec::new();
    for resource in objects::labelled(&groups) {
        let (group, plural) = (resource.group.as_str(), resource.plural.as_str());
        let mut selecting: Vec<(&mut Change, Selected)> = Vec::new();
        for change in &mut *changes {
            let selected = change.select(group, plural);
            selecting.extend(selected.map(|selected| (change, selected)));
        }
        if selecting.is_empty() {
            continue;
        }
        let listed = objects::list(&connection.client, &resource, |namespace, name, labels| {
            for (change, selected) in &mut selecting {
                change.count(selected, Counted { namespace, name, labels });
            }
        });
        match listed.await {
            Ok(()) => selecting.into_iter().for_each(|(change, selected)| change.add(selected)),
            Err(error) => not_counted.push(format!("{}: {error}", cluster::resource_name(group, plural))),
        }
    }
    Ok(not_counted)
}
