//! `ctrlmesh trace`: shows the requests of a pod as they come, as its proxy sees them.
//!
//! It runs `ctrlmesh-proxy trace` in the proxy's container. So whoever calls it needs the rights to `get` and `create`
//! `pods/exec` there, and nothing new listens on the network.

mod args;
mod error;
mod proxy_of_pod;
mod program;
mod render;

use std::io::{Write as _, stderr, stdout};
use std::mem;
use std::time::Duration;

use ctrlmesh_manager::install::rbac;
use ctrlmesh_proxy::trace::TraceLine;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use tokio::time;
use tokio::time::Instant;

pub(crate) use self::args::Arguments;
use self::args::Lines;
use self::error::TraceError;
use self::program::Program;
use self::proxy_of_pod::ProxyContainer;
use crate::cluster::answer;
use crate::cluster::{self, Connection};
use crate::failure;
use crate::version::part::{NODE_PROXIES, has_ended};

/// Between attempts to reach a proxy that has ended or was replaced.
const AGAIN: Duration = Duration::from_secs(2);

/// How a proxy was followed.
enum Followed {
    /// Until there were enough requests, or no time was left.
    Enough,
    /// Until it ended, or the connection to it.
    Ended,
}

/// What was shown so far.
#[derive(Default)]
struct Shown {
    requests: u64,
    /// Whether a proxy has answered. Until then, each error ends the command.
    has_begun: bool,
    /// Set once the first proxy is reached. `None` also where time has no limit.
    until: Option<Instant>,
}

/// Carries out the command.
///
/// # Errors
/// Why not, and what to do about it.
pub(crate) fn run(arguments: &Arguments) -> Result<(), TraceError> {
    cluster::block_on(show(arguments))
}

/// Shows requests until there were enough, or no time is left, or the pod is gone.
async fn show(arguments: &Arguments) -> Result<(), TraceError> {
    let Connection { client, namespace, .. } = Connection::of(&arguments.cluster).await?;
    let mut shown = Shown::default();
    loop {
        match Box::pin(follow(&client, &namespace, arguments, &mut shown)).await {
            Ok(Followed::Enough) => break,
            Ok(Followed::Ended) => {
                writeln!(stderr(), "the proxy has ended, or the connection to it; it is asked again")?;
            }
            Err(TraceError::NoPod { .. } | TraceError::Ended { .. }) if shown.has_begun => {
                writeln!(stderr(), "the pod has ended")?;
                break;
            }
            Err(error) if !shown.has_begun || error.is_final() => return Err(error),
            Err(error) => writeln!(stderr(), "{}", failure::causes(&error))?,
        }
        if shown.until.is_some_and(|until| Instant::now() + AGAIN > until) {
            break;
        }
        time::sleep(AGAIN).await;
    }
    let too_few = arguments.count.filter(|wanted| shown.requests < *wanted);
    too_few.map_or(Ok(()), |wanted| Err(TraceError::TooFew { shown: shown.requests, wanted }))
}

async fn follow(
    client: &Client,
    namespace: &str,
    arguments: &Arguments,
    shown: &mut Shown,
) -> Result<Followed, TraceError> {
    let proxy = Box::pin(proxy_of(client, namespace, &arguments.pod)).await?;
    let pod = (!proxy.is_sidecar).then(|| format!("{namespace}/{}", arguments.pod));
    let mut program = Program::start(client, &proxy, pod.as_deref(), &arguments.filter).await?;
    if shown.until.is_none() {
        shown.until = arguments.duration.map(|duration| Instant::now() + duration);
    }
    let followed = lines(&mut program, arguments, shown).await;
    shown.has_begun |= program.has_answered();
    followed
}

async fn lines(program: &mut Program, arguments: &Arguments, shown: &mut Shown) -> Result<Followed, TraceError> {
    let mut is_head_due = !shown.has_begun && arguments.output.is_none();
    loop {
        let line = match shown.until {
            None => program.next().await?,
            Some(until) => match time::timeout_at(until, program.next()).await {
                Ok(line) => line?,
                Err(_elapsed) => return Ok(Followed::Enough),
            },
        };
        if mem::take(&mut is_head_due) && program.has_answered() {
            write!(stdout().lock(), "{}", render::head())?;
        }
        let Some(line) = line else { return Ok(Followed::Ended) };
        print(&line, arguments.output, &mut shown.requests)?;
        if arguments.count.is_some_and(|wanted| shown.requests >= wanted) {
            return Ok(Followed::Enough);
        }
    }
}

fn print(line: &TraceLine, format: Option<Lines>, requests: &mut u64) -> Result<(), TraceError> {
    let text = match (line, format) {
        (TraceLine::Error(reason), _) => return Err(TraceError::Refused { reason: reason.clone() }),
        (line, Some(Lines::Json)) => serde_json::to_string(line)? + "\n",
        (line, None) => render::line(line),
    };
    let mut out = stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    *requests += u64::from(matches!(line, TraceLine::Request(_)));
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
