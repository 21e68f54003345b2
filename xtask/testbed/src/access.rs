//! How does one reach an API server, given a kubeconfig?

use std::path::Path;
use std::time::Duration;
use std::{io, thread};

use anyhow::Result;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::pki::Pair;

/// How long one answer may take: a server that accepts connections may still say nothing.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Whether the API server says that it is ready.
pub(crate) async fn is_ready(kubeconfig: &Path) -> bool {
    get(kubeconfig, "/readyz").await.is_some_and(|answer| answer == "ok")
}

/// Whether a controller manager is at work: only it makes the default service account.
pub(crate) async fn has_controllers(kubeconfig: &Path) -> bool {
    get(kubeconfig, "/api/v1/namespaces/default/serviceaccounts/default").await.is_some()
}

/// What the API server answers, where it does, in time and well.
async fn get(kubeconfig: &Path, path: &str) -> Option<String> {
    let client = client(kubeconfig).await.ok()?;
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

/// Waits for what `ask` gives, on a thread of its own: the caller may itself run inside an async runtime, where no other
/// may start.
///
/// # Errors
/// Where the thread cannot be started, or panics.
pub(crate) fn wait_for<T: Send>(ask: impl AsyncFnOnce() -> T + Send) -> io::Result<T> {
    let ask = || -> io::Result<T> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(runtime.block_on(ask()))
    };
    let panicked = |_| io::Error::other("a question to the API server panicked");
    thread::scope(|scope| scope.spawn(ask).join().map_err(panicked)?)
}
