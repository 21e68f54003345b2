//! One kube-apiserver: how it is started, and where its logs are.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::{fs, io};

use anyhow::{Context as _, Result};

use crate::control_plane::{Location, Options};
use crate::handshakes;
use crate::pki::Pki;
use crate::supervise::Supervised;

/// What an API server is told that has no nodes, and that only this machine may reach.
const OF_A_LONE_SERVER: [&str; 3] =
    ["--bind-address=127.0.0.1", "--endpoint-reconciler-type=none", "--authorization-mode=RBAC"];

/// An API server of a control plane. It ends when this is dropped, and at the latest with this process.
#[derive(Debug)]
pub(crate) struct ApiServer {
    program: PathBuf,
    arguments: Vec<String>,
    url: String,
    log: PathBuf,
    audit_log: PathBuf,
    /// None while it is stopped.
    running: Option<Supervised>,
}

/// Where one of a control plane's API servers is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Which of them, from 0.
    pub(crate) number: usize,
    pub(crate) address: Ipv4Addr,
    pub(crate) port: u16,
    pub(crate) etcd: SocketAddr,
}

impl ApiServer {
    /// One that is not started yet; its files are in `folder`.
    ///
    /// # Errors
    /// Where the audit policy cannot be written.
    pub(crate) fn new(
        program: &Path,
        folder: &Path,
        pki: &Pki,
        options: &Options,
        location: &Location,
        at: Place,
    ) -> Result<Self> {
        let audit_log = folder.join(numbered("audit", at.number, ".log"));
        let mut arguments = arguments(folder, pki, at);
        arguments.extend(match location.network {
            Some(_) => of_a_cluster(pki),
            None if options.addresses.is_empty() => OF_A_LONE_SERVER.map(str::to_owned).to_vec(),
            None => vec![format!("--bind-address={}", at.address), "--authorization-mode=RBAC".to_owned()],
        });
        if !options.feature_gates.is_empty() {
            arguments.push(format!("--feature-gates={}", options.feature_gates.join(",")));
        }
        if !options.runtime_config.is_empty() {
            arguments.push(format!("--runtime-config={}", options.runtime_config.join(",")));
        }
        if options.audit {
            let policy = folder.join("audit-policy.yaml");
            fs::write(&policy, audit_policy(&options.audit_bodies)).context("write the audit policy")?;
            arguments.push(format!("--audit-policy-file={}", policy.display()));
            arguments.push(format!("--audit-log-path={}", audit_log.display()));
            // In MB: it stays one file, in which everything is.
            arguments.push("--audit-log-maxsize=4000".to_owned());
            arguments.push(handshakes::LOGGED.to_owned());
        }
        let url = format!("https://{}:{}", at.address, at.port);
        let log = folder.join(numbered("kube-apiserver", at.number, ".log"));
        Ok(Self { program: program.to_owned(), arguments, url, log, audit_log, running: None })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// What it says itself.
    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    pub(crate) fn audit_log(&self) -> &Path {
        &self.audit_log
    }

    /// Starts it; it is not ready then.
    ///
    /// # Errors
    /// Where its log cannot be opened or it cannot be started.
    pub(crate) fn start(&mut self, location: &Location) -> io::Result<()> {
        let command = location.command(&self.program, &self.arguments);
        self.running = Some(Supervised::start(&command, &self.log)?);
        Ok(())
    }

    /// Kills it.
    pub(crate) fn kill(&mut self) {
        self.running = None;
    }

    /// Whether it still runs.
    pub(crate) fn runs(&mut self) -> bool {
        self.running.as_mut().is_some_and(Supervised::runs)
    }
}

/// The name of a file of the server of this number: that of the first has none.
pub(crate) fn numbered(name: &str, number: usize, extension: &str) -> String {
    match number {
        0 => format!("{name}{extension}"),
        _ => format!("{name}-{}{extension}", number + 1),
    }
}

fn arguments(folder: &Path, pki: &Pki, at: Place) -> Vec<String> {
    vec![
        format!("--etcd-servers=http://{}", at.etcd),
        format!("--secure-port={}", at.port),
        format!("--cert-dir={}", folder.join(numbered("apiserver", at.number, "")).display()),
        format!("--tls-cert-file={}", pki.server.certificate.display()),
        format!("--tls-private-key-file={}", pki.server.key.display()),
        format!("--client-ca-file={}", pki.ca.display()),
        format!("--service-account-key-file={}", pki.service_account_public_key.display()),
        format!("--service-account-signing-key-file={}", pki.service_account_key.display()),
        format!("--advertise-address={}", at.address),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
        "--allow-privileged".to_owned(),
    ]
}

/// What an API server needs that has nodes.
fn of_a_cluster(pki: &Pki) -> Vec<String> {
    vec![
        "--bind-address=0.0.0.0".to_owned(),
        "--authorization-mode=Node,RBAC".to_owned(),
        "--enable-admission-plugins=NodeRestriction".to_owned(),
        format!("--kubelet-client-certificate={}", pki.admin.certificate.display()),
        format!("--kubelet-client-key={}", pki.admin.key.display()),
        format!("--kubelet-certificate-authority={}", pki.ca.display()),
        "--kubelet-preferred-address-types=InternalIP".to_owned(),
    ]
}

/// Every request, with who made it and what came of it; of writes to these resources also what they made.
fn audit_policy(bodies: &[String]) -> String {
    let resources = bodies.iter().map(|one| {
        let (plural, group) = one.split_once('.').unwrap_or((one, ""));
        format!("{{group: \"{group}\", resources: [\"{plural}\", \"{plural}/*\"]}}")
    });
    let resources = resources.collect::<Vec<_>>().join(", ");
    let writes = "verbs: [create, update, patch, delete, deletecollection]";
    let with_bodies = if bodies.is_empty() {
        String::new()
    } else {
        format!("- {{level: RequestResponse, omitManagedFields: true, {writes}, resources: [{resources}]}}\n")
    };
    format!(
        "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\n\
         rules:\n{with_bodies}- {{level: Metadata}}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_logged_of_the_resources_that_are_named_only() {
        assert!(!audit_policy(&[]).contains("RequestResponse"));
        let policy = audit_policy(&["configmaps".to_owned(), "websites.web.example.com".to_owned()]);
        assert!(policy.contains(r#"{group: "", resources: ["configmaps", "configmaps/*"]}"#), "{policy}");
        assert!(policy.contains(r#"{group: "web.example.com", resources: ["websites", "websites/*"]}"#), "{policy}");
        assert!(policy.ends_with("- {level: Metadata}\n"), "{policy}");
    }

    #[test]
    fn the_files_of_the_first_server_have_no_number() {
        assert_eq!(numbered("audit", 0, ".log"), "audit.log");
        assert_eq!(numbered("audit", 1, ".log"), "audit-2.log");
    }
}
