//! How does one reach an API server, given a kubeconfig?

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::pki::Pki;

/// How long one question about readiness may take: a server that accepts connections may still answer nothing.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Whether the API server says that it is ready.
pub(crate) async fn is_ready(kubeconfig: &Path) -> bool {
    let Ok(client) = client(kubeconfig).await else { return false };
    says_ok(client, "/readyz").await
}

/// Whether the program that serves HTTPS on this port of loopback says that it is well. Its certificate is its own.
pub(crate) async fn is_healthy(port: u16) -> bool {
    install_provider();
    let Ok(url) = format!("https://127.0.0.1:{port}").parse() else { return false };
    let mut config = Config::new(url);
    config.accept_invalid_certs = true;
    let Ok(client) = Client::try_from(config) else { return false };
    says_ok(client, "/healthz").await
}

async fn says_ok(client: Client, path: &str) -> bool {
    let Ok(request) = http::Request::get(path).body(Vec::new()) else { return false };
    let answer = tokio::time::timeout(ANSWER_WITHIN, client.request_text(request)).await;
    matches!(answer, Ok(Ok(text)) if text == "ok")
}

/// A kubeconfig, in YAML, for the administrator.
pub(crate) fn kubeconfig(url: &str, pki: &Pki) -> String {
    let (ca, certificate, key) =
        (pki.ca.display(), pki.admin.certificate.display(), pki.admin.key.display());
    format!(
        "apiVersion: v1\n\
         kind: Config\n\
         current-context: testbed\n\
         contexts: [{{name: testbed, context: {{cluster: testbed, user: admin}}}}]\n\
         clusters: [{{name: testbed, cluster: {{server: \"{url}\", certificate-authority: \"{ca}\"}}}}]\n\
         users: [{{name: admin, user: {{client-certificate: \"{certificate}\", client-key: \"{key}\"}}}}]\n"
    )
}

/// A client as the kubeconfig says.
pub(crate) async fn client(kubeconfig: &Path) -> Result<Client> {
    install_provider();
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn install_provider() {
    // Another test of the process may have installed it already.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
}
