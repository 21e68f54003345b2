//! How does one reach an API server, given a kubeconfig?

use std::path::Path;

use anyhow::Result;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::pki::Pki;

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
    // Another test of the process may have installed it already.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let kubeconfig = Kubeconfig::read_from(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}
