//! Checks that a webhook configuration has webhooks, and that the API server believes the managers.

use std::collections::BTreeSet;

use ctrlmesh_common::names::root_ca;
use ctrlmesh_manager::install::rbac;
use ctrlmesh_manager::labels::POLICY;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::WebhookClientConfig;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;

use super::super::super::finding::{Finding, Group};
use super::super::super::pages;
use super::super::super::snapshot::Installed;

/// Authorities by their DER encoding.
type Certificates = BTreeSet<Vec<u8>>;

/// A webhook configuration, whatever its kind.
pub(super) struct Configuration<'a> {
    pub(super) check: &'static str,
    pub(super) kind: &'static str,
    pub(super) name: &'static str,
    /// How each of its webhooks is reached. `None`: there is no such configuration.
    pub(super) clients: Option<Vec<&'a WebhookClientConfig>>,
}

impl Configuration<'_> {
    /// `published` are the authorities that every caBundle must have. `None`: they are not known.
    pub(super) fn finding(&self, published: Option<&Certificates>) -> Finding {
        let Self { check, kind, name, clients } = self;
        let group = Group::Webhooks;
        let Some(clients) = clients else { return self.missing() };
        if clients.is_empty() {
            let found = format!("{kind} {name} has no webhook, so the API server asks no manager");
            return group.failed(check, found, restore(name));
        }
        if clients.iter().any(|client| bundle(client).is_empty()) {
            let found = format!("{kind} {name} has no caBundle, so the API server believes no manager");
            return group.failed(check, found, "check again once a manager leads: it writes the caBundle within 30 s");
        }
        let is_other = |published: &Certificates| clients.iter().any(|one| certificates(bundle(one)) != *published);
        match published {
            Some(published) if is_other(published) => self.of_others(),
            Some(_) => group.ok(check, format!("{kind} {name} has the managers' authorities as its caBundle")),
            None => group.ok(check, format!("{kind} {name} has a caBundle")),
        }
    }

    fn missing(&self) -> Finding {
        let Self { check, kind, name, .. } = self;
        let found = format!("there is no {kind} {name}");
        // The leader writes it once there is a kind to label. Condition `Labelled` of a root says what lacks labels.
        if *name == POLICY {
            return Group::Webhooks.ok(check, format!("{found}: no kind is labelled at its admission yet"));
        }
        let advice = format!("install ctrlmesh, `kubectl apply -k deploy/`: {}", pages::INSTALL);
        Group::Webhooks.failed(check, found, advice)
    }

    fn of_others(&self) -> Finding {
        let Self { check, kind, name, .. } = self;
        let map = format!("ConfigMap {}/{}", rbac::NAMESPACE, root_ca::MESH);
        let found = format!("{kind} {name} has a caBundle that is not the managers' authorities in {map}");
        let advice = format!(
            "check again in 30 s, as the leader writes it; then see who else does, \
             `kubectl get {} {name} -o yaml --show-managed-fields`: {}",
            kind.to_lowercase(),
            pages::CERTIFICATES
        );
        Group::Webhooks.failed(check, found, advice)
    }
}

/// How a configuration without webhooks gets them back.
fn restore(name: &str) -> String {
    if name == POLICY {
        format!("delete it: the leader writes it anew: {}", pages::TROUBLESHOOTING)
    } else {
        format!("apply `deploy/webhooks.yaml` again: {}", pages::INSTALL)
    }
}

/// The authorities that vouch for managers, as these publish them. `None`: they are not known, of which the
/// certificates' own checks say more.
pub(super) fn published(installed: &Installed) -> Option<Certificates> {
    let data = installed.trust_bundle.as_ref().ok()?.as_ref()?.data.as_ref()?;
    let all = certificates(data.get(root_ca::MANAGER_KEY)?.as_bytes());
    (!all.is_empty()).then_some(all)
}

/// The certificates in a text, whatever their order. What is none is left out.
fn certificates(pem: &[u8]) -> Certificates {
    CertificateDer::pem_slice_iter(pem).filter_map(|one| Some(one.ok()?.to_vec())).collect()
}

fn bundle(client: &WebhookClientConfig) -> &[u8] {
    client.ca_bundle.as_ref().map_or(&[], |ByteString(bundle)| bundle)
}
