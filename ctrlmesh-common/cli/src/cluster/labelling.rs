//! Reads by which labels objects are shared out.

use ctrlmesh_common::api::ManagerState;
use ctrlmesh_common::names::MANAGER_STATE;
use ctrlmesh_manager::rules::label_scheme::{Scheme, SchemeError};
use ctrlmesh_manager::rules::shard::Labelling;
use kube::{Api, Client};

/// Why the labels are not known, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LabellingError {
    #[error("read by which labels objects are shared out (does `kubectl get managerstates` work?)")]
    ManagerState(#[source] kube::Error),
    #[error(
        "read the labels in ManagerState {MANAGER_STATE}: perhaps a newer manager wrote them; take `ctrlmesh` of its version"
    )]
    Labels(#[from] SchemeError),
}

/// Those in force: the default ones, where no manager has said.
///
/// # Errors
/// The API server does not say, or this version does not know what it says.
pub(crate) async fn labelling(client: &Client) -> Result<Labelling, LabellingError> {
    Ok(scheme(client).await?.in_force)
}

/// Those in force, and those on their way. The default ones are in force where no manager has said.
///
/// # Errors
/// As above.
pub(crate) async fn scheme(client: &Client) -> Result<Scheme, LabellingError> {
    let states: Api<ManagerState> = Api::all(client.clone());
    let state = states.get_opt(MANAGER_STATE).await.map_err(LabellingError::ManagerState)?;
    let labels = state.and_then(|state| state.status?.labels);
    Ok(labels.map(|labels| Scheme::read(&labels)).transpose()?.unwrap_or_default())
}
