//! Copies bytes both ways between two connections that the proxy does not look into.
//!
//! When one side has ended, the other is told and may go on sending. There is no deadline: an exec session may be
//! silent for hours, and TCP's keepalive notices a peer that is gone.

use std::io;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

/// For each direction: one TLS record.
const BUFFER_BYTES: usize = 16 << 10;

#[derive(Debug, Error)]
pub enum TunnelError {
    #[error("take over an upgraded connection")]
    Upgrade(#[source] hyper::Error),
    #[error("pass bytes through a tunnel")]
    Broken(#[source] io::Error),
}

/// Passes bytes between two connections until both have ended.
pub async fn opaque<A, B>(mut client: A, mut upstream: B) -> Result<(), TunnelError>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (one, other) = (&mut client, &mut upstream);
    let copied = tokio::io::copy_bidirectional_with_sizes(one, other, BUFFER_BYTES, BUFFER_BYTES).await;
    if copied.is_err() {
        // The peer that is still there gets what was written before the other broke: connections buffer their writes.
        let _flushed = tokio::join!(client.shutdown(), upstream.shutdown());
    }
    copied.map(|_| ()).map_err(TunnelError::Broken)
}

/// Does the same for two HTTP/1.1 connections that were upgraded to another protocol.
pub async fn upgraded(client: OnUpgrade, upstream: OnUpgrade) -> Result<(), TunnelError> {
    let (client, upstream) = tokio::try_join!(client, upstream).map_err(TunnelError::Upgrade)?;
    opaque(TokioIo::new(client), TokioIo::new(upstream)).await
}
