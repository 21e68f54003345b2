//! Builds the clients of the API server.
//!
//! Every request ends: if the API server hangs, or a connection is lost without a sign, the request fails and its
//! caller retries.

use std::net::SocketAddr;
use std::time::Duration;

use http::HeaderValue;
use http::header::USER_AGENT;
use http::uri::InvalidUri;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use thiserror::Error;
use tower::timeout::TimeoutLayer;

use crate::config::RunArgs;

/// User agent of requests that others wait for.
const AGENT: &str = concat!("ctrlmesh-manager/", env!("CARGO_PKG_VERSION"));

/// User agent of requests that can wait: those that label existing objects.
const BACKGROUND: &str = concat!("ctrlmesh-manager-background/", env!("CARGO_PKG_VERSION"));

/// A name that every API server's certificate has.
const NAME: &str = "kubernetes.default.svc";

/// Limit for the begin of an answer. The API server gives up by itself after a minute.
const ANSWER: Duration = Duration::from_secs(65);

/// Limit for the silence within an answer. A watch without events is silent, and ends by itself after 290 s.
const SILENCE: Duration = Duration::from_mins(6);

#[derive(Debug, Error)]
#[error("read how the API server is reached")]
pub struct ReachError(#[source] Box<dyn std::error::Error + Send + Sync>);

/// The configuration for requests that others wait for.
///
/// # Errors
/// If neither the kubeconfig nor the pod has one.
pub async fn config(args: &RunArgs) -> Result<Config, ReachError> {
    let config = match &args.kubeconfig {
        Some(file) => {
            let kubeconfig = Kubeconfig::read_from(file).map_err(|error| ReachError(error.into()))?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
                .await
                .map_err(|error| ReachError(error.into()))?
        }
        None => Config::infer().await.map_err(|error| ReachError(error.into()))?,
    };
    Ok(named(config, AGENT))
}

/// The configuration for requests that can wait. Its user agent is for people; its account is for flow schemas, which
/// do not see user agents.
pub fn background(config: Config, args: &RunArgs) -> Config {
    let mut config = named(config, BACKGROUND);
    if let Some(account) = &args.background_account {
        let account = format!("system:serviceaccount:{}:{account}", args.namespace);
        config.auth_info.impersonate = Some(account);
    }
    config
}

/// A client whose requests all end.
///
/// # Errors
/// If the configuration is unusable.
pub fn client(mut config: Config) -> Result<Client, ReachError> {
    config.read_timeout = Some(SILENCE);
    // The silence of an idle connection does not count for its next request.
    config.reset_reader_on_write = true;
    let builder = ClientBuilder::try_from(config).map_err(|error| ReachError(error.into()))?;
    Ok(builder.with_layer(&TimeoutLayer::new(ANSWER)).build())
}

/// A client of the one API server at `address`, however the configuration reaches them. Each of them has a certificate
/// for the name `NAME`.
///
/// # Errors
/// If the configuration is unusable.
pub fn at(config: &Config, address: SocketAddr) -> Result<Client, ReachError> {
    let scheme = config.cluster_url.scheme_str().unwrap_or("https");
    let url = format!("{scheme}://{address}").parse().map_err(|error: InvalidUri| ReachError(error.into()))?;
    let mut config = config.clone();
    config.cluster_url = url;
    (config.tls_server_name, config.proxy_url) = (Some(NAME.to_owned()), None);
    client(config)
}

/// The same configuration with this user agent.
fn named(mut config: Config, agent: &'static str) -> Config {
    config.headers.retain(|(name, _)| *name != USER_AGENT);
    config.headers.push((USER_AGENT, HeaderValue::from_static(agent)));
    config
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::Api;
    use kube::api::WatchParams;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::time;

    use super::*;

    const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";

    /// Longer than anything may be waited for.
    const EVER: Duration = Duration::from_hours(1);

    async fn server() -> (TcpListener, Api<ConfigMap>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let client = client(Config::new(address.parse().unwrap())).unwrap();
        (listener, Api::namespaced(client, "default"))
    }

    /// Answers one request with `head`, and after `silence` with `rest`, and then with nothing for ever.
    async fn answer(listener: &TcpListener, head: &str, silence: Duration, rest: &str) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 4096];
        assert!(stream.read(&mut request).await.unwrap() > 0);
        stream.write_all(head.as_bytes()).await.unwrap();
        time::sleep(silence).await;
        stream.write_all(rest.as_bytes()).await.unwrap();
        std::future::pending::<()>().await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_answered_or_not_to_its_end_is_given_up() {
        for head in ["", HEAD] {
            let (listener, maps) = server().await;
            let ended = tokio::select! {
                ended = time::timeout(EVER, maps.get("a")) => ended,
                () = answer(&listener, head, Duration::ZERO, "") => unreachable!(),
            };
            let ended = ended.unwrap_or_else(|_| panic!("waits for ever after {head:?}"));
            assert!(ended.is_err(), "{ended:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_on_which_nothing_happens_goes_on() {
        let (listener, maps) = server().await;
        let event =
            r#"{"type": "ADDED", "object": {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}}"#;
        let event = format!("{:x}\r\n{event}\n\r\n", event.len() + 1);
        let seen = async {
            let params = WatchParams::default();
            let mut events = maps.watch(&params, "1").await.unwrap().boxed();
            events.next().await.unwrap()
        };
        let seen = tokio::select! {
            seen = seen => seen,
            () = answer(&listener, HEAD, Duration::from_secs(289), &event) => unreachable!(),
        };
        assert!(seen.is_ok(), "{seen:?}");
    }
}
