//! Listens at a Unix socket for those who want to follow requests.

use std::fs::{Permissions, set_permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::admin;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time;
use tracing::{debug, info};

use super::filter::TraceQuery;
use super::line::TraceLine;
use super::listeners::Listeners;

/// Connections at once, those included that are only about to ask.
const MAX_CONNECTIONS: usize = 16;

/// Limit for the line that says what to follow.
const QUERY_BYTES: u64 = 64 << 10;

/// Limit for the time until that line is there.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a reader is told that the proxy is still there.
const ALIVE: Duration = Duration::from_secs(10);

/// The pause when the process has no file descriptor left for a connection.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(100);

/// Listens at a socket file that only the proxy's own user may open. Replaces the file of an earlier process.
///
/// # Errors
/// If the file cannot be removed or created.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = admin::bind(path)?;
    set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves until the future is dropped.
pub async fn serve(listener: UnixListener, listeners: Arc<Listeners>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => drop(connections.spawn(follow(stream, listeners.clone()))),
                Err(_) => time::sleep(EXHAUSTED_PAUSE).await,
            },
            // One ended.
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn follow(stream: UnixStream, listeners: Arc<Listeners>) {
    if let Err(error) = show(stream, &listeners).await {
        debug!(%error, "a trace ended");
    }
}

async fn show(stream: UnixStream, listeners: &Listeners) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let asked = time::timeout(QUERY_TIMEOUT, query(&mut read)).await?;
    let begun = match asked {
        Ok(query) => listeners.add(query).ok_or_else(|| "enough requests are followed already".to_owned()),
        Err(error) => Err(format!("the proxy does not understand what to show: {error}")),
    };
    let (listener, mut lines) = match begun {
        Ok(begun) => begun,
        Err(error) => return write.write_all(TraceLine::Error(error).text().as_bytes()).await,
    };
    info!("requests are followed by somebody");
    let shown = async {
        // Says that it has begun.
        write.write_all(b"\n").await?;
        loop {
            let line = time::timeout(ALIVE, lines.recv()).await;
            let line = line.ok().flatten().unwrap_or_else(|| "\n".to_owned());
            write.write_all(line.as_bytes()).await?;
            match listener.omitted() {
                0 => {}
                omitted => write.write_all(TraceLine::Omitted(omitted).text().as_bytes()).await?,
            }
        }
    };
    let mut rest = [0; 64];
    let ended = tokio::select! {
        ended = shown => ended,
        // The reader has gone.
        _ = read.read(&mut rest) => Ok(()),
    };
    listeners.remove(&listener);
    info!("requests are followed no more");
    ended
}

async fn query(read: &mut BufReader<impl AsyncRead + Unpin>) -> io::Result<TraceQuery> {
    let mut line = String::new();
    read.take(QUERY_BYTES).read_line(&mut line).await?;
    Ok(serde_json::from_str(&line)?)
}
