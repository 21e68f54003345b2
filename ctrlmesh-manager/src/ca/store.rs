//! Keeps the certificate authorities in one Secret of the manager's namespace, which all replicas read.
//!
//! The first replica creates the Secret; of several, the API server lets one win. Where pods trust an authority whose
//! Secret is gone, the replica first waits for the leader to restore it. Later changes are written by the leader, on
//! the version that it read. A leader that cannot write gives its Lease up and says so.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ctrlmesh_common::names::{self, root_ca};
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use kube::{Api, Client};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::watch;
use tokio::time::{self, Instant, MissedTickBehavior};
use tracing::{info, warn};

use crate::ca::api_server::{self, ApiServer};
use crate::ca::authority::{AuthorityError, Names};
use crate::ca::recovery::{LeaseWatch, TrustedAuthorities};
use crate::ca::rotation::{AuthorityKind, Data, Rotation, RotationError};
use crate::ca::write_attempts::WriteAttempts;
use crate::leader::lease::Leadership;
use crate::telemetry;

mod lookup;
mod events;

use events::{CaEvent, Reminder, Reporter};
use lookup::{Lookup, look_up};

/// A change is announced long before it takes effect, so this need not be short.
const PERIOD: Duration = Duration::from_secs(10);

#[derive(Clone, Debug)]
pub struct Authorities {
    /// Signs for the API server's names.
    pub mesh: Rotation,
    /// Signs for the manager's names.
    pub manager: Rotation,
}

#[derive(Clone, Debug)]
pub struct AuthoritySettings {
    /// Names of the API server besides the usual ones.
    pub api_server: Vec<String>,
    pub manager: Names,
    pub validity: Duration,
}

struct NextAuthorities {
    authorities: Authorities,
    /// To be published as Kubernetes events.
    events: Vec<CaEvent>,
}

pub struct CaStore {
    client: Client,
    reporter: Reporter,
    secrets: Api<Secret>,
    wanted: AuthoritySettings,
    /// Names and addresses of the API server, as last read.
    servers: watch::Sender<ApiServer>,
    current: watch::Sender<Arc<Authorities>>,
}

#[derive(Debug, thiserror::Error)]
pub enum CaStoreError {
    #[error("read or write the Secret `{}`", names::CA_SECRET)]
    Secret(#[source] kube::Error),
    /// Only for the leader.
    #[error("write the Secret `{}`", names::CA_SECRET)]
    Write(#[source] kube::Error),
    /// The Secret has other content. It is not overwritten, because its author may need it.
    #[error("read the Secret `{}`; remove it to have it made anew", names::CA_SECRET)]
    Content(#[from] RotationError),
    #[error("make a certificate authority")]
    Make(#[from] AuthorityError),
    #[error("read the ConfigMap `{}`", root_ca::MESH)]
    TrustedAuthorities(#[source] kube::Error),
    #[error("read the Lease {lease:?}")]
    Lease { lease: String, source: kube::Error },
    #[error("read what the API server is called")]
    Names(#[source] kube::Error),
}

impl CaStoreError {
    /// Whether a retry may succeed.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Secret(_) | Self::Write(_) | Self::TrustedAuthorities(_) | Self::Lease { .. } | Self::Names(_) => {
                true
            }
            Self::Content(_) | Self::Make(_) => false,
        }
    }
}

impl Authorities {
    fn read(secret: &Secret) -> Result<Self, RotationError> {
        let empty = Data::new();
        let data = secret.data.as_ref().unwrap_or(&empty);
        Ok(Self {
            mesh: Rotation::read(AuthorityKind::Mesh, data)?,
            manager: Rotation::read(AuthorityKind::Manager, data)?,
        })
    }

    fn write(&self, data: &mut Data) {
        self.mesh.write(AuthorityKind::Mesh, data);
        self.manager.write(AuthorityKind::Manager, data);
    }

    /// Those of the mesh and of the manager, in PEM.
    pub(super) fn bundles(&self) -> [String; 2] {
        [self.mesh.bundle(), self.manager.bundle()]
    }
}

impl CaStore {
    /// Reads the authorities, or creates the first ones.
    ///
    /// Where `namespace` has a published trust bundle but no Secret, a living leader restores the Secret. This waits
    /// until its Lease has not been renewed for 30 s. `lease` keeps what was observed, for the next call.
    ///
    /// # Errors
    /// Where the authorities can be neither read nor created.
    pub async fn open(
        client: Client,
        namespace: &str,
        wanted: AuthoritySettings,
        lease_watch: &mut LeaseWatch,
    ) -> Result<Self, CaStoreError> {
        let secrets = Api::namespaced(client.clone(), namespace);
        let servers = api_server::find(&client, &wanted.api_server).await;
        let servers = servers.map_err(CaStoreError::Names)?;
        let found = Box::pin(look_up(&client, namespace, lease_watch)).await?;
        let authorities = match found {
            Lookup::Secret(authorities) => *authorities,
            Lookup::Trusted(trusted) => make(&secrets, &servers.names, &wanted, trusted).await?,
        };
        let servers = servers.among(authorities.mesh.current_names());
        let current = watch::Sender::new(Arc::new(authorities));
        let reporter = Reporter::new(client.clone(), namespace);
        let servers = watch::Sender::new(servers);
        Ok(Self { client, reporter, secrets, wanted, servers, current })
    }

    pub fn current(&self) -> Arc<Authorities> {
        self.current.borrow().clone()
    }

    pub fn changes(&self) -> watch::Receiver<Arc<Authorities>> {
        self.current.subscribe()
    }

    pub fn servers(&self) -> watch::Receiver<ApiServer> {
        self.servers.subscribe()
    }

    /// Follows the Secret for ever. The leader also rotates what is due.
    ///
    /// Failed writes are counted in `failures`. After some of them the leader gives its Lease up.
    pub async fn follow(self: Arc<Self>, leadership: Leadership, failures: Counter) {
        let mut ticks = time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut attempts, mut reminder) = (WriteAttempts::default(), Reminder::default());
        loop {
            ticks.tick().await;
            let Err(error) = Box::pin(self.look(&leadership)).await else {
                if leadership.is_held() {
                    attempts = WriteAttempts::default();
                    Box::pin(self.remind(&mut reminder)).await;
                }
                continue;
            };
            warn!(error = telemetry::chain(&error), "certificate authorities kept as they are");
            if matches!(error, CaStoreError::Write(_)) {
                failures.inc();
                if attempts.failed() {
                    self.give_up(&leadership, &error).await;
                }
            }
        }
    }

    /// Publishes events about states that last, unless they were published lately.
    async fn remind(&self, reminder: &mut Reminder) {
        let authorities = self.current();
        let servers = self.servers.borrow().names.clone();
        let now = SystemTime::now();
        // Only of the mesh: proxies and the API server follow the manager's authority at once.
        let follows = CaEvent::follows(&authorities.mesh);
        let kinds = [
            (AuthorityKind::Mesh, &authorities.mesh, &servers),
            (AuthorityKind::Manager, &authorities.manager, &self.wanted.manager),
        ];
        let waits = kinds.into_iter().filter_map(|(kind, rotation, names)| CaEvent::wait(kind, rotation, names, now));
        for event in follows.into_iter().chain(waits) {
            if reminder.is_due(&event, Instant::now()) && self.reporter.publish(&event).await {
                reminder.announced(event, Instant::now());
            }
        }
    }

    /// Lets another replica try.
    async fn give_up(&self, leadership: &Leadership, error: &CaStoreError) {
        leadership.step_down();
        self.reporter.publish(&CaEvent::NotWritten { why: telemetry::chain(error) }).await;
    }

    /// The Secret comes first: nothing else may delay its restoration.
    async fn look(&self, leadership: &Leadership) -> Result<(), CaStoreError> {
        let Some(secret) = self.secrets.get_opt(names::CA_SECRET).await.map_err(CaStoreError::Secret)? else {
            return self.restore(leadership).await;
        };
        let authorities = Authorities::read(&secret)?;
        self.take(authorities.clone());
        match api_server::find(&self.client, &self.wanted.api_server).await {
            Ok(found) => drop(self.servers.send_if_modified(|servers| {
                let found = found.among(authorities.mesh.current_names());
                let differs = *servers != found;
                *servers = found;
                differs
            })),
            Err(error) => {
                warn!(error = telemetry::chain(&error), "names of the API server kept as they are");
            }
        }
        let now = SystemTime::now();
        match self.next_authorities(authorities, now)? {
            Some(next) if leadership.is_held() => {
                if self.replace(secret, next.authorities).await? {
                    for event in &next.events {
                        self.reporter.publish(event).await;
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The next state of the authorities; none where they stay.
    fn next_authorities(
        &self,
        mut authorities: Authorities,
        now: SystemTime,
    ) -> Result<Option<NextAuthorities>, AuthorityError> {
        let mesh = self.servers.borrow().names.clone();
        let (mut changed, mut events) = (false, Vec::new());
        for (kind, rotation, names) in [
            (AuthorityKind::Mesh, &mut authorities.mesh, &mesh),
            (AuthorityKind::Manager, &mut authorities.manager, &self.wanted.manager),
        ] {
            if let Some(step) = rotation.due_step(names, now) {
                let added = (!rotation.covers(names)).then(|| names.missing_from(rotation.current.names()));
                let next = rotation.clone().apply(step, kind, names, self.wanted.validity, now)?;
                let count = rotation.dropped_by(&next, now);
                *rotation = next;
                events.extend(added.map(|names| CaEvent::NamesAdded { kind, names }));
                events.extend((count > 0).then_some(CaEvent::Dropped { kind, count }));
                info!(authority = kind.common_name(), step = ?step, "certificate authority changed");
                changed = true;
            }
        }
        Ok(changed.then_some(NextAuthorities { authorities, events }))
    }

    /// Writes on the version that was read. False where somebody else wrote meanwhile: the next round reads that.
    async fn replace(&self, mut secret: Secret, changed: Authorities) -> Result<bool, CaStoreError> {
        changed.write(secret.data.get_or_insert_default());
        secret.metadata.managed_fields = None;
        let written = self.secrets.replace(names::CA_SECRET, &PostParams::default(), &secret).await;
        match written {
            Ok(_) => self.take(changed),
            Err(kube::Error::Api(status)) if status.code == 409 => return Ok(false),
            Err(error) => return Err(CaStoreError::Write(error)),
        }
        Ok(true)
    }

    /// Writes the Secret again after somebody removed it.
    async fn restore(&self, leadership: &Leadership) -> Result<(), CaStoreError> {
        if leadership.is_held() {
            warn!(secret = names::CA_SECRET, "the certificate authorities were removed");
            let secret = secret_of(&self.current());
            let made = create(&self.secrets, &secret).await;
            let made = made.map_err(|error| match error {
                CaStoreError::Secret(source) => CaStoreError::Write(source),
                other => other,
            })?;
            info!(secret = names::CA_SECRET, made, "certificate authorities written again");
        }
        Ok(())
    }

    fn take(&self, authorities: Authorities) {
        self.current.send_if_modified(|current| {
            let differs = current.bundles() != authorities.bundles()
                || current.mesh.seeds() != authorities.mesh.seeds()
                || current.mesh.current.pem() != authorities.mesh.current.pem();
            if differs {
                *current = Arc::new(authorities);
            }
            differs
        });
    }
}

/// Creates the first authorities, unless another replica was faster. Authorities that pods trust already stay trusted.
async fn make(
    secrets: &Api<Secret>,
    api_server: &Names,
    wanted: &AuthoritySettings,
    trusted: TrustedAuthorities,
) -> Result<Authorities, CaStoreError> {
    let (now, validity) = (SystemTime::now(), wanted.validity);
    let TrustedAuthorities { mesh, manager } = trusted;
    let authorities = Authorities {
        mesh: Rotation::begin(AuthorityKind::Mesh, api_server, validity, now, mesh)?,
        manager: Rotation::begin(AuthorityKind::Manager, &wanted.manager, validity, now, manager)?,
    };
    if create(secrets, &secret_of(&authorities)).await? {
        info!(secret = names::CA_SECRET, "certificate authorities made");
        return Ok(authorities);
    }
    let theirs = secrets.get(names::CA_SECRET).await.map_err(CaStoreError::Secret)?;
    Ok(Authorities::read(&theirs)?)
}

/// False where the Secret exists already.
async fn create(secrets: &Api<Secret>, secret: &Secret) -> Result<bool, CaStoreError> {
    match secrets.create(&PostParams::default(), secret).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(CaStoreError::Secret(error)),
    }
}

fn secret_of(authorities: &Authorities) -> Secret {
    let mut data = Data::new();
    authorities.write(&mut data);
    let mut secret = Secret { data: Some(data), ..Secret::default() };
    secret.metadata.name = Some(names::CA_SECRET.to_owned());
    secret.type_ = Some("Opaque".to_owned());
    secret
}

#[cfg(test)]
mod tests;
