//! `ctrlmesh-proxy trace`: prints what the proxy in the same container says of its requests.

use std::io::{self, Read as _, Write as _, copy, sink, stdin, stdout};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;

use clap::Args;
use ctrlmesh_common::names::TRACE_SOCKET_VARIABLE;
use thiserror::Error;

use super::filter::{TraceFilter, TraceQuery};
use crate::policy::PodName;

/// What `trace` is told.
#[derive(Clone, Debug, Args)]
pub struct TraceArgs {
    /// Unix socket of the proxy, as given to it by --trace-socket
    #[arg(long, env = TRACE_SOCKET_VARIABLE, value_name = "FILE")]
    pub socket: PathBuf,
    /// Show requests of this pod only. The default is every pod that the proxy serves
    #[arg(long, value_name = "NAMESPACE/NAME")]
    pub pod: Option<PodName>,
    /// Which requests are shown.
    #[command(flatten)]
    pub filter: TraceFilter,
}

/// Why there is no trace.
#[derive(Debug, Error)]
pub enum TraceError {
    #[error("reach the proxy at its socket {socket}")]
    Connect { socket: PathBuf, source: io::Error },
    #[error("ask the proxy")]
    Ask(#[source] io::Error),
    #[error("print")]
    Print(#[source] io::Error),
}

/// Prints lines as they come, until standard input ends: a program that runs in a container by `exec` is not ended
/// when its caller goes away, but its input is.
///
/// # Errors
/// If the proxy cannot be asked, or nobody reads what is printed.
pub fn run(args: TraceArgs) -> Result<(), TraceError> {
    let TraceArgs { socket, pod, filter } = args;
    let mut stream = UnixStream::connect(&socket).map_err(|source| TraceError::Connect { socket, source })?;
    let query = TraceQuery { pod: pod.map(|pod| pod.to_string()), filter };
    let query = serde_json::to_string(&query).map_err(|error| TraceError::Ask(error.into()))?;
    writeln!(stream, "{query}").map_err(TraceError::Ask)?;
    let ours = stream.try_clone().map_err(TraceError::Ask)?;
    thread::spawn(move || {
        let _ended = copy(&mut stdin().lock(), &mut sink());
        // Ends what is printed below.
        let _closed = ours.shutdown(Shutdown::Both);
    });
    print(&mut stream)
}

/// Not by `io::copy`: that splices, and a splice does not notice that the socket is shut down.
fn print(stream: &mut UnixStream) -> Result<(), TraceError> {
    let (mut bytes, mut out) = ([0; 8192], stdout().lock());
    loop {
        match stream.read(&mut bytes).map_err(TraceError::Ask)? {
            0 => return Ok(()),
            read => out.write_all(&bytes[..read]).and_then(|()| out.flush()).map_err(TraceError::Print)?,
        }
    }
}
