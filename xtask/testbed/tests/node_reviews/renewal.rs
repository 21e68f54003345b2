//! The certificate of an operator's webhook is renewed, as cert-manager does, while reviews go on.

use std::io::{Write as _, stderr};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_runtime::sync::read;
use ctrlmesh_testbed::{Space, is_full};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::admission::{self, Authority, Clients, PORT, expected};
use crate::mesh::operator::{self, EVERYBODYS};
use crate::mesh::{self, until};

/// How often the certificate is renewed.
fn renewals() -> usize {
    if is_full() { 5 } else { 2 }
}

#[test]
fn no_review_fails_while_the_certificate_is_renewed() -> Result<()> {
    let _others = read(&EVERYBODYS);
    let cluster = mesh::shared();
    if cluster.node().is_none() {
        ctrlmesh_testbed::skipped("no_review_fails_while_the_certificate_is_renewed", "needs a node of ours")?;
        return Ok(());
    }
    cluster.case("renewal", |space| {
        let (runtime, authority) = (Runtime::new()?, Authority::new(space)?);
        admission::deploy(space, &authority, &runtime)?;
        let clients = runtime.block_on(Clients::start(space))?;
        for _ in 0..renewals() {
            renew(space, &authority)?;
            let made = clients.made();
            until("reviews under the new certificate", || Ok((clients.made() > made + 24).then_some(())))?;
        }
        let all = runtime.block_on(clients.end())?;
        writeln!(stderr(), "{} reviews while the certificate was renewed {} times", all.len(), renewals())?;
        for made in &all {
            ensure!(made.verdict == expected(&made.namespace)?, "{made}");
        }
        admission::remove(space)
    })
}

/// Replaces the pair, and waits until each replica's port presents the new certificate.
fn renew(space: Space<'_>, authority: &Authority) -> Result<()> {
    let (secret, certificate) = authority.secret()?;
    let pods = operator::pods(space)?;
    for pod in &pods {
        let before = presented(space, authority, pod)?;
        ensure!(!before.contains(certificate.trim()), "it is not renewed yet");
    }
    space.apply(&secret.to_string())?;
    for (number, pod) in pods.iter().enumerate() {
        // Has kubelet look at the pod now; it looks once a minute otherwise.
        let name = pod["metadata"]["name"].as_str().context("a name")?;
        let mark = format!("test.example.com/renewal={:.8}-{number}", certificate_mark(&certificate));
        space.kubectl(&["annotate", "--overwrite", "pod", name, &mark])?;
    }
    for pod in &pods {
        until("the new certificate", || {
            Ok(presented(space, authority, pod)?.contains(certificate.trim()).then_some(()))
        })?;
    }
    Ok(())
}

/// Differs from one certificate to the next.
fn certificate_mark(certificate: &str) -> String {
    certificate.chars().filter(char::is_ascii_alphanumeric).rev().skip(20).take(8).collect()
}

/// The chain that a client of a replica's port sees, in PEM. The client trusts the authority, and its hello has the
/// Service's name.
fn presented(space: Space<'_>, authority: &Authority, pod: &Value) -> Result<String> {
    let node = space.cluster().node().context("a node of ours")?;
    let ip = pod["status"]["podIP"].as_str().context("an address")?;
    let ca = tempfile::NamedTempFile::new()?;
    std::fs::write(ca.path(), authority.pem())?;
    let (name, mut curl) = (authority.server_name(), node.command("curl")?);
    curl.args(["--silent", "--show-error", "--noproxy", "*", "--output", "/dev/null", "--write-out", "%{certs}"]);
    curl.arg("--cacert").arg(ca.path()).args(["--resolve", &format!("{name}:{PORT}:{ip}")]);
    let output = curl.arg(format!("https://{name}:{PORT}/")).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    Ok(String::from_utf8(output.stdout)?)
}
