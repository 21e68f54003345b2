//! Limits how long a write to the API server may take, and says why it was not done.

use std::future::Future;
use std::time::Duration;

use tokio::time;

#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("the API server refused it")]
    Refused(#[from] kube::Error),
    #[error("the API server did not answer within {deadline:?}")]
    Slow { deadline: Duration },
    #[error("this replica may not write any more")]
    Lost,
}

impl WriteError {
    /// Whether the object is gone, or is there in another version than the one that was observed.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Refused(kube::Error::Api(status)) if matches!(status.code, 404 | 409))
    }
}

/// Gives the write up after `deadline`.
pub async fn within<T>(deadline: Duration, write: impl Future<Output = kube::Result<T>>) -> Result<T, WriteError> {
    let written = time::timeout(deadline, write).await.map_err(|_elapsed| WriteError::Slow { deadline })?;
    Ok(written?)
}
