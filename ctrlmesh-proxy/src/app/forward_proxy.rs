//! Listens for clients of the forward proxy, in a sidecar. In the node's proxy, the kernel sends them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::listen::listen;
use ctrlmesh_runtime::telemetry;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time;
use tracing::{info, warn};

use crate::net::accept::{Acceptor, FORWARD_ADDRESSES, Origin, Purpose};
use crate::policy::Current;

/// Between two attempts to listen at an address that somebody else has.
const RETRY: Duration = Duration::from_secs(5);

/// Listens whenever the policy says so, until shutdown; not before the manager has told the API server's `addresses`:
/// they are no other server's.
pub(super) async fn serve(
    mut policy: Current,
    addresses: Option<watch::Receiver<Arc<[SocketAddr]>>>,
    acceptor: Acceptor,
    drain: Drain,
) {
    let follow = async {
        if let Some(mut addresses) = addresses {
            // An error means that nobody will tell any.
            let _told = addresses.wait_for(|addresses| !addresses.is_empty()).await;
        }
        while policy.wait_for(|policy| policy.forward_proxy).await.is_ok() {
            let mut ended = policy.clone();
            let over = ended.wait_for(|policy| !policy.forward_proxy);
            let [v4, v6] = FORWARD_ADDRESSES.map(|address| accept(address, acceptor.clone(), drain.clone()));
            tokio::select! {
                _over = over => {}
                _never = async { tokio::join!(v4, v6) } => {}
            }
        }
    };
    tokio::select! {
        () = drain.started() => {}
        () = follow => {}
    }
}

async fn accept(address: SocketAddr, acceptor: Acceptor, drain: Drain) {
    let listener = wait_for(address).await;
    let origin = |_: &_, _, _| Some(Origin { purpose: Purpose::ForwardProxy, ..Origin::default() });
    acceptor.run(listener, origin, drain).await;
}

/// The address may be another process's, or of a family that the pod has not.
async fn wait_for(address: SocketAddr) -> TcpListener {
    let mut is_logged = false;
    loop {
        match listen("the forward proxy", address) {
            Ok(listener) => return listener,
            Err(error) if !is_logged => {
                is_logged = true;
                let error = telemetry::chain(&error);
                if address.is_ipv4() {
                    warn!(error, "no forward proxy yet");
                } else {
                    info!(error, "no forward proxy over IPv6");
                }
            }
            Err(_known) => {}
        }
        time::sleep(RETRY).await;
    }
}
