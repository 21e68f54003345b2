//! Chooses and opens the way by which the command's connections reach the proxy.

pub(crate) mod isolate;
pub(crate) mod leftovers;
pub(crate) mod service_account;

use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::ops::ControlFlow;
use std::sync::mpsc::Sender;
use std::time::Duration;
use std::{io, thread};

use nix::errno::Errno;
use nix::unistd;
use tracing::warn;

use crate::run::args::{Interception, RunArgs};
use crate::run::cluster::Cluster;
use crate::run::egress::EgressProxy;
use crate::run::error::RunError;
use crate::run::folder::Folder;
use crate::run::interception::isolate::{IsolateError, Isolation};
use crate::run::signals::{Event, Events};
use ctrlmesh_proxy::upstream::Address;

/// How often the API server's name is looked up again.
const LOOK_UP: Duration = Duration::from_secs(30);

/// The way to the proxy.
pub(crate) struct Route {
    pub(crate) interception: Interception,
    pub(crate) listener: TcpListener,
    pub(crate) isolation: Option<Isolation>,
}

/// Where the API server's name leads, for [`open`]; nothing where nobody has to know. The exit code, where a signal
/// ends this first: a resolver may take minutes to answer, or not to.
pub(crate) fn look_up(
    args: &RunArgs,
    cluster: &Cluster,
    through: Option<&EgressProxy>,
    events: &Events,
) -> Result<ControlFlow<i32, Vec<SocketAddr>>, RunError> {
    let ebpf = matches!(args.interception, None | Some(Interception::Ebpf));
    if !ebpf || through.is_some() || !unistd::geteuid().is_root() {
        return Ok(ControlFlow::Continue(Vec::new()));
    }
    let (host, port) = (cluster.server.host.clone(), cluster.server.port);
    let (name, to) = (host.clone(), events.sender.clone());
    // Of its own, since nobody can end it.
    let looking = move || drop(to.send(Event::Resolved(resolve(&name, port))));
    thread::Builder::new().name("look-up".to_owned()).spawn(looking).map_err(RunError::Start)?;
    loop {
        match events.next() {
            ControlFlow::Continue(Event::Resolved(found)) => {
                let failed = |source| RunError::Resolve { host, source };
                return found.map(ControlFlow::Continue).map_err(failed);
            }
            ControlFlow::Continue(_) => {}
            ControlFlow::Break(code) => return Ok(ControlFlow::Break(code)),
        }
    }
}

fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((host, port).to_socket_addrs()?.collect())
}

/// Opens the way that was asked for, or the best that there is; `targets` is what [`look_up`] found.
pub(crate) fn open(
    args: &RunArgs,
    through: Option<&EgressProxy>,
    folder: &Folder,
    targets: &[SocketAddr],
) -> Result<Route, RunError> {
    let root = unistd::geteuid().is_root();
    match (args.interception, through) {
        (Some(Interception::Ebpf), _) if !root => Err(RunError::NotRoot),
        (Some(Interception::Ebpf), Some(proxy)) => Err(RunError::Proxied { proxy: proxy.to_string() }),
        (Some(Interception::Ebpf), None) => ebpf(args, folder, targets),
        (None, None) if root => ebpf(args, folder, targets).or_else(|error| match error {
            RunError::Isolate(error) => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "no eBPF here, so only the kubeconfig leads to the proxy"
                );
                loopback(args, Interception::Kubeconfig)
            }
            other => Err(other),
        }),
        (None, _) => loopback(args, Interception::Kubeconfig),
        (Some(interception), _) => loopback(args, interception),
    }
}

/// Looks the API server's name up again and again, if it has one, for as long as somebody listens.
pub(crate) fn follow(cluster: &Cluster, to: Sender<Event>) -> io::Result<()> {
    if matches!(cluster.target.address, Address::Socket(_)) {
        return Ok(());
    }
    let (host, port) = (cluster.server.host.clone(), cluster.server.port);
    let looking = move || {
        loop {
            thread::sleep(LOOK_UP);
            if to.send(Event::Resolved(resolve(&host, port))).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("look-up".to_owned()).spawn(looking).map(drop)
}

fn ebpf(args: &RunArgs, folder: &Folder, targets: &[SocketAddr]) -> Result<Route, RunError> {
    let opened = Isolation::new(folder, &args.pin_dir, args.port.unwrap_or(0), targets);
    let (isolation, listener) = opened.map_err(|error| match (args.port, error) {
        (Some(port), IsolateError::Intercept(ctrlmesh_intercept::Error::Listen { source, .. }))
            if is_taken(&source) =>
        {
            RunError::PortTaken { port }
        }
        (_, error) => RunError::Isolate(error),
    })?;
    Ok(Route { interception: Interception::Ebpf, listener, isolation: Some(isolation) })
}

fn loopback(args: &RunArgs, interception: Interception) -> Result<Route, RunError> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port.unwrap_or(0)));
    let listener = TcpListener::bind(address).map_err(|source| {
        if is_taken(&source) {
            RunError::PortTaken { port: address.port() }
        } else {
            RunError::Listen { address, source }
        }
    })?;
    Ok(Route { interception, listener, isolation: None })
}

fn is_taken(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EADDRINUSE as i32)
}
