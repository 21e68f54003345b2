//! How does one reach an API server, given a kubeconfig?

use std::path::Path;
use std::{io, thread};

use anyhow::Result;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::pki::Pair;

/// Whether the API server says that it is ready.
pub(crate) async fn is_ready(kubeconfig: &Path) -> bool {
    let Ok(client) = client(kubeconfig).await else {
        return false;
    };
    let Ok(request) = http::Request::get("/readyz").body(Vec::new()) else {
        return false;
    };
    client.request_text(request).await.is_ok_and(|answer| answer == "ok")
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
