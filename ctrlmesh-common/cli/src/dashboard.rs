//! `ctrlmesh dashboard`: serves a page that shows who owns what, on this machine only.
//!
//! Whatever the page shows is read with the rights of whoever runs the command.

mod args;
mod access;
mod browser;
mod bundle;
mod document;
mod live;
mod server;

use std::io;
use std::io::{Write as _, stdout};
use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::TcpListener;

use self::access::{Access, RandomError};
pub(crate) use self::args::Arguments;
use self::server::Server;
use crate::cluster::{self, ClusterError, Connection};

/// Why the page cannot be served, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DashboardError {
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("listen at {address}: give another --port, or none")]
    Listen { address: SocketAddr, source: io::Error },
    #[error(transparent)]
    Random(#[from] RandomError),
    #[error("the server ended by an error of its own; its message is above")]
    Ended,
    #[error("print")]
    Print(#[from] io::Error),
}

/// Carries out the command, until it is ended.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), DashboardError> {
    cluster::block_on(serve(arguments))
}

async fn serve(arguments: &Arguments) -> Result<(), DashboardError> {
    let connection = Connection::of(&arguments.cluster).await?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, arguments.port));
    let failed = |source| DashboardError::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let access = Access::new(address)?;
    let url = format!("http://{address}/#token={}", access.token());
    writeln!(stdout().lock(), "dashboard: {url}")?;
    stdout().flush()?;
    let namespace = (!arguments.all_namespaces).then(|| connection.namespace.clone());
    let open = async {
        if !arguments.no_browser {
            browser::open(&url).await;
        }
    };
    tokio::join!(Server::new(access, connection, namespace).run(listener), open);
    Err(DashboardError::Ended)
}
