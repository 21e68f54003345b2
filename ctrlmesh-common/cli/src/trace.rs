//! `ctrlmesh trace`: shows the requests of a pod as they come, as its proxy sees them.
//!
//! It runs `ctrlmesh-proxy trace` in the proxy's container. So whoever calls it needs the right to `create`
//! `pods/exec` there, and nothing new listens on the network.

mod args;
mod error;
mod proxy_of_pod;
mod program;
mod render;

use std::io::{Write as _, stderr, stdout};
use std::time::Duration;

use ctrlmesh_manager::install::rbac;
use ctrlmesh_proxy::trace::TraceLine;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use tokio::time;

pub(crate) use self::args::Arguments;
use self::error::TraceError;
use self::program::Program;
use self::proxy_of_pod::ProxyContainer;
use crate::cluster::answer;
use crate::cluster::{self, Connection};
use crate::failure;
use crate::version::part::{NODE_PROXIES, has_ended};

/// Between attempts to reach a proxy that has ended or was replaced.
const AGAIN: Duration = Duration::from_secs(2);

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), TraceError> {
    cluster::block_on(async {
        let mut count = 0;
        let shown = Box::pin(show(arguments, &mut count));
        match arguments.duration {
            None => return shown.await,
            Some(duration) => time::timeout(duration, shown).await.unwrap_or(Ok(()))?,
        }
        let too_few = arguments.count.filter(|wanted| count < *wanted);
        too_few.map_or(Ok(()), |wanted| Err(TraceError::TooFew { shown: count, wanted }))
    })
}

/// Shows requests until there were enough, or the pod is gone. Counts them.
async fn show(arguments: &Arguments, count: &mut u64) -> Result<(), TraceError> {
    let Connection { client, namespace, .. } = Connection::of(&arguments.cluster).await?;
    let mut is_first = true;
    loop {
        match Box::pin(follow(&client, &namespace, arguments, is_first, count)).await {
            Ok(()) if arguments.count.is_some_and(|wanted| *count >= wanted) => return Ok(()),
            Err(TraceError::NoPod { .. } | TraceError::Ended { .. }) if !is_first => {
                writeln!(stderr(), "the pod has ended")?;
                return Ok(());
            }
            Err(error) if is_first || error.is_final() => return Err(error),
            Err(error) => writeln!(stderr(), "{}", failure::causes(&error))?,
            Ok(()) => writeln!(stderr(), "the proxy has ended; the next one is asked")?,
        }
        is_first = false;
        time::sleep(AGAIN).await;
    }
}

/// Shows requests until there were enough, or the proxy ends. Counts them.
async fn follow(
    client: &Client,
    namespace: &str,
    arguments: &Arguments,
    with_head: bool,
    count: &mut u64,
) -> Result<(), TraceError> {
    let proxy = Box::pin(proxy_of(client, namespace, &arguments.pod)).await?;
    let pod = (!proxy.is_sidecar).then(|| format!("{namespace}/{}", arguments.pod));
    let mut program = Program::start(client, &proxy, pod.as_deref(), &arguments.filter).await?;
    if with_head && arguments.output.is_none() {
        write!(stdout().lock(), "{}", render::head())?;
    }
    while let Some(line) = program.next().await? {
        let text = match (&line, arguments.output) {
            (TraceLine::Error(error), _) => return Err(TraceError::Refused { reason: error.clone() }),
            (line, Some(_)) => serde_json::to_string(line)? + "\n",
            (line, None) => render::line(line),
        };
        let mut out = stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()?;
        if matches!(line, TraceLine::Request(_)) {
            *count += 1;
            if arguments.count.is_some_and(|wanted| *count >= wanted) {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Where the proxy runs that serves the pod.
async fn proxy_of(client: &Client, namespace: &str, name: &str) -> Result<ProxyContainer, TraceError> {
    let here = || (name.to_owned(), namespace.to_owned());
    let Some(pod) = answer::get::<Pod>(client, namespace, name).await? else {
        let (name, namespace) = here();
        return Err(TraceError::NoPod { name, namespace });
    };
    if has_ended(&pod) {
        let (name, namespace) = here();
        return Err(TraceError::Ended { name, namespace });
    }
    if let Some(sidecar) = proxy_of_pod::sidecar(&pod) {
        return Ok(sidecar);
    }
    if !proxy_of_pod::is_enrolled(&pod) {
        let (name, namespace) = here();
        return Err(TraceError::NotEnrolled { name, namespace });
    }
    let proxies = answer::list::<Pod>(client, rbac::NAMESPACE, NODE_PROXIES).await?;
    proxy_of_pod::on_node(&pod, &proxies).ok_or_else(|| TraceError::NoProxy {
        node: pod.spec.and_then(|spec| spec.node_name).unwrap_or_else(|| "none yet".to_owned()),
    })
}
