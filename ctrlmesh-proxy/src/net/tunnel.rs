//! How do bytes pass that the proxy does not look at?
//!
//! Both directions at once; when one side has said all, the other is told so and may go on talking. No deadline:
//! an exec session may be silent for hours, and TCP's keepalive notices a peer that is gone.

use std::io;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};

/// A buffer for each direction: one TLS record.
const BUFFER_BYTES: usize = 16 << 10;

/// Why a tunnel ended before both sides had said all.
#[derive(Debug, Error)]
pub enum TunnelError {
    /// One of the connections never became a tunnel.
    #[error("take over an upgraded connection")]
    Upgrade(#[source] hyper::Error),
    /// One of the connections broke.
    #[error("pass bytes through a tunnel")]
    Broken(#[source] io::Error),
}

/// Passes bytes between two connections until both have ended.
///
/// # Errors
///
/// Fails when one of them breaks.
pub async fn opaque<A, B>(mut client: A, mut upstream: B) -> Result<(), TunnelError>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (one, other) = (&mut client, &mut upstream);
    let copied =
        tokio::io::copy_bidirectional_with_sizes(one, other, BUFFER_BYTES, BUFFER_BYTES).await;
    if copied.is_err() {
        // Who is still there gets what was said before the other broke: a connection gathers what it writes.
        let _unheard = tokio::join!(client.shutdown(), upstream.shutdown());
    }
    copied.map(|_| ()).map_err(TunnelError::Broken)
}

/// Passes bytes between two HTTP/1.1 connections that were upgraded to something else.
///
/// # Errors
///
/// Fails when one of them cannot be taken over, or breaks.
pub async fn upgraded(client: OnUpgrade, upstream: OnUpgrade) -> Result<(), TunnelError> {
    let (client, upstream) = tokio::try_join!(client, upstream).map_err(TunnelError::Upgrade)?;
    opaque(TokioIo::new(client), TokioIo::new(upstream)).await
}
