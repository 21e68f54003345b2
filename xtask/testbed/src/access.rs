//! The address and credentials of an API server, from a kubeconfig.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::pki::Pair;

/// How long one answer may take: a server that accepts connections may still say nothing.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// How long is waited from one look to the next: whoever is looked at needs the processor.
const LOOK_EVERY: Duration = Duration::from_millis(150);

/// Whether the API server says that it is ready.
pub(crate) async fn is_ready(client: &Client) -> bool {
    get(client, "/readyz").await.is_some_and(|answer| answer == "ok")
}

/// Whether a controller manager is at work: only it makes the default service account.
pub(crate) async fn has_controllers(client: &Client) -> bool {
    get(client, "/api/v1/namespaces/default/serviceaccounts/default").await.is_some()
}

/// What the API server answers, where it does, in time and well.
async fn get(client: &Client, path: &str) -> Option<String> {
    let request = http::Request::get(path).body(Vec::new()).ok()?;
    tokio::time::timeout(ANSWER_WITHIN, client.request_text(request)).await.ok()?.ok()
}

/// A kubeconfig, in YAML, for whom `user` is the certificate of.
pub(crate) fn kubeconfig(url: &str, ca: &Path, user: &Pair) -> String {
    let (ca, certificate, key) = (ca.display(), user.certificate.display(), user.key.display());
    format!(
        "apiVersion: v1\n\
         kind: Config\n\
         current-context: testbed\n\
         contexts: [{{name: testbed, context: {{cluster: testbed, user: testbed}}}}]\n\
         clusters: [{{name: testbed, cluster: {{server: \"{url}\", certificate-authority: \"{ca}\"}}}}]\n\
         users: [{{name: testbed, user: {{client-certificate: \"{certificate}\", client-key: \"{key}\"}}}}]\n"
    )
}

/// A client as the kubeconfig says.
pub(crate) async fn client(kubeconfig: &Path) -> Result<Client> {
    // Another test of the process may have installed it already.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Looks with one client, again and again, until there is something: a client for each look costs more than the look.
/// On a thread of its own: the caller may itself run inside an async runtime, where no other may start.
///
/// # Errors
/// Those of `look`, and where the kubeconfig cannot be read or the thread cannot be started, or panics.
pub(crate) fn until<T: Send>(
    kubeconfig: &Path,
    mut look: impl AsyncFnMut(&Client) -> Result<Option<T>> + Send,
) -> Result<T> {
    let ask = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let client = client(kubeconfig).await?;
            loop {
                if let Some(found) = look(&client).await? {
                    return Ok(found);
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        })
    };
    let panicked = |_| anyhow!("a question to the API server panicked");
    thread::scope(|scope| scope.spawn(ask).join().map_err(panicked)?)
}
