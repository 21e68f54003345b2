//! Where are the authorities kept?
//!
//! In one Secret of the manager's namespace, which all replicas read. The first replica makes it, and of several firsts
//! the API server lets one win; where somebody is believed already, it waits first for the leader to write it again, for
//! as long as one lives. What changes later is written by the leader, on the version that it read; a leader that cannot
//! write lets another replica try, and says so.

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

use crate::ca::authority::{AuthorityError, Names};
use crate::ca::published::{Published, Restorer};
use crate::ca::rotation::{Data, Kind, Line, LineError};
use crate::ca::servers::{self, Servers};
use crate::ca::tries::Tries;
use crate::leader::lease::Leadership;
use crate::telemetry;

mod found;
mod news;

use found::{Found, find};
use news::{News, Reminder, Reporter};

/// How often the Secret is read: a change in it is told long before it matters.
const PERIOD: Duration = Duration::from_secs(10);

/// The authorities.
#[derive(Clone, Debug)]
pub struct Authorities {
    /// Speaks for the API server.
    pub mesh: Line,
    /// Speaks for the manager.
    pub manager: Line,
}

/// What the authorities are to be like.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// By what else than the usual names operators know the API server.
    pub api_server: Vec<String>,
    /// The manager's own names.
    pub manager: Names,
    /// How long an authority lives.
    pub validity: Duration,
}

/// What the authorities are to become.
struct Tended {
    authorities: Authorities,
    /// What people are to hear of.
    news: Vec<News>,
}

/// The authorities, as the Secret has them.
pub struct Vault {
    client: Client,
    reporter: Reporter,
    secrets: Api<Secret>,
    wanted: Wanted,
    /// What the API server was last known to be called, and where.
    servers: watch::Sender<Servers>,
    current: watch::Sender<Arc<Authorities>>,
}

/// Why there are no authorities.
#[derive(Debug, thiserror::Error)]
pub enum VaultError {
    /// The API server does not give or take the Secret.
    #[error("read or write the Secret `{}`", names::CA_SECRET)]
    Secret(#[source] kube::Error),
    /// The API server does not take the Secret from the leader.
    #[error("write the Secret `{}`", names::CA_SECRET)]
    Write(#[source] kube::Error),
    /// The Secret holds something else. It is not overwritten: whoever wrote it may miss it.
    #[error("read the Secret `{}`; remove it to have it made anew", names::CA_SECRET)]
    Content(#[from] LineError),
    /// They cannot be made.
    #[error("make a certificate authority")]
    Make(#[from] AuthorityError),
    /// Whom everybody believes is not known.
    #[error("read the ConfigMap `{}`", root_ca::MESH)]
    Published(#[source] kube::Error),
    /// Whether somebody leads is not known.
    #[error("read the Lease {lease:?}")]
    Lease {
        /// Its name.
        lease: String,
        /// Why.
        #[source]
        source: kube::Error,
    },
    /// What the API server is called is not known.
    #[error("read what the API server is called")]
    Names(#[source] kube::Error),
}

// === impl VaultError ===

impl VaultError {
    /// Whether the API server may say something else when it is asked again.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Secret(_)
            | Self::Write(_)
            | Self::Published(_)
            | Self::Lease { .. }
            | Self::Names(_) => true,
            Self::Content(_) | Self::Make(_) => false,
        }
    }
}

// === impl Authorities ===

impl Authorities {
    fn read(secret: &Secret) -> Result<Self, LineError> {
        let empty = Data::new();
        let data = secret.data.as_ref().unwrap_or(&empty);
        Ok(Self { mesh: Line::read(Kind::Mesh, data)?, manager: Line::read(Kind::Manager, data)? })
    }

    fn write(&self, data: &mut Data) {
        self.mesh.write(Kind::Mesh, data);
        self.manager.write(Kind::Manager, data);
    }

    fn bundles(&self) -> [String; 2] {
        [self.mesh.bundle(), self.manager.bundle()]
    }
}

// === impl Vault ===

impl Vault {
    /// Reads the authorities, and makes them where there are none. Where some are published in `namespace` whose Secret is
    /// gone, the leader may write it again: it is waited for that until its Lease has not been renewed for 30 s. What is
    /// known of that stays in `restorer`, for the next time.
    ///
    /// # Errors
    /// Where they can be neither read nor made.
    pub async fn open(
        client: Client,
        namespace: &str,
        wanted: Wanted,
        restorer: &mut Restorer,
    ) -> Result<Self, VaultError> {
        let secrets = Api::namespaced(client.clone(), namespace);
        let servers = servers::find(&client, &wanted.api_server).await;
        let servers = servers.map_err(VaultError::Names)?;
        let believed = Box::pin(find(&client, namespace, restorer)).await?;
        let authorities = match believed {
            Found::Secret(authorities) => *authorities,
            Found::Believed(believed) => make(&secrets, &servers.names, &wanted, believed).await?,
        };
        let servers = servers.among(authorities.mesh.spoken_for());
        let current = watch::Sender::new(Arc::new(authorities));
        let reporter = Reporter::new(client.clone(), namespace);
        let servers = watch::Sender::new(servers);
        Ok(Self { client, reporter, secrets, wanted, servers, current })
    }

    /// The authorities.
    pub fn current(&self) -> Arc<Authorities> {
        self.current.borrow().clone()
    }

    /// The authorities, and a way to learn of a change.
    pub fn changes(&self) -> watch::Receiver<Arc<Authorities>> {
        self.current.subscribe()
    }

    /// Where the API server is, and a way to learn of a change.
    pub fn servers(&self) -> watch::Receiver<Servers> {
        self.servers.subscribe()
    }

    /// Follows the Secret for ever; the leader also does what is due. What it could not write is counted in `failures`, and
    /// after some tries it is another replica's turn.
    pub async fn follow(self: Arc<Self>, leadership: Leadership, failures: Counter) {
        let mut ticks = time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut tries, mut reminder) = (Tries::default(), Reminder::default());
        loop {
            ticks.tick().await;
            let Err(error) = Box::pin(self.look(&leadership)).await else {
                if leadership.is_held() {
                    tries = Tries::default();
                    // Of the manager's, proxies and the API server are told as it changes.
                    if let Some(news) = reminder.due(&self.current().mesh, Instant::now())
                        && self.reporter.tell(&news).await
                    {
                        reminder.told(news, Instant::now());
                    }
                }
                continue;
            };
            warn!(error = telemetry::chain(&error), "certificate authorities kept as they are");
            if matches!(error, VaultError::Write(_)) {
                failures.inc();
                if tries.failed() {
                    self.give_up(&leadership, &error).await;
                }
            }
        }
    }

    /// Lets another replica try what this one cannot, and says why.
    async fn give_up(&self, leadership: &Leadership, error: &VaultError) {
        leadership.step_down();
        self.reporter.tell(&News::NotWritten { why: telemetry::chain(error) }).await;
    }

    /// The Secret first: who waits for it to be restored is not to wait for anything else.
    async fn look(&self, leadership: &Leadership) -> Result<(), VaultError> {
        let Some(secret) =
            self.secrets.get_opt(names::CA_SECRET).await.map_err(VaultError::Secret)?
        else {
            return self.restore(leadership).await;
        };
        let authorities = Authorities::read(&secret)?;
        self.take(authorities.clone());
        match servers::find(&self.client, &self.wanted.api_server).await {
            Ok(found) => drop(self.servers.send_if_modified(|servers| {
                let found = found.among(authorities.mesh.spoken_for());
                let differs = *servers != found;
                *servers = found;
                differs
            })),
            Err(error) => {
                warn!(error = telemetry::chain(&error), "names of the API server kept as they are");
            }
        }
        let now = SystemTime::now();
        match self.tended(authorities, now)? {
            Some(tended) if leadership.is_held() => {
                if self.replace(secret, tended.authorities).await? {
                    for news in &tended.news {
                        self.reporter.tell(news).await;
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// What the authorities are to become; nothing where they may stay.
    fn tended(
        &self,
        mut authorities: Authorities,
        now: SystemTime,
    ) -> Result<Option<Tended>, AuthorityError> {
        let mesh = self.servers.borrow().names.clone();
        let (mut changed, mut news) = (false, Vec::new());
        for (kind, line, names) in [
            (Kind::Mesh, &mut authorities.mesh, &mesh),
            (Kind::Manager, &mut authorities.manager, &self.wanted.manager),
        ] {
            if let Some(due) = line.due(names, now) {
                let added = (!line.covers(names)).then(|| names.beyond(line.current.names()));
                *line = line.clone().step(due, kind, names, self.wanted.validity, now)?;
                news.extend(added.map(|names| News::NamesAdded { kind, names }));
                info!(authority = kind.called(), step = ?due, "certificate authority changed");
                changed = true;
            }
        }
        Ok(changed.then_some(Tended { authorities, news }))
    }

    /// Writes on the version that was read; false where somebody was faster: the next look sees what they wrote.
    async fn replace(&self, mut secret: Secret, changed: Authorities) -> Result<bool, VaultError> {
        changed.write(secret.data.get_or_insert_default());
        secret.metadata.managed_fields = None;
        let written = self.secrets.replace(names::CA_SECRET, &PostParams::default(), &secret).await;
        match written {
            Ok(_) => self.take(changed),
            Err(kube::Error::Api(status)) if status.code == 409 => return Ok(false),
            Err(error) => return Err(VaultError::Write(error)),
        }
        Ok(true)
    }

    /// Somebody removed the Secret: what everybody believes is written again.
    async fn restore(&self, leadership: &Leadership) -> Result<(), VaultError> {
        if leadership.is_held() {
            warn!(secret = names::CA_SECRET, "the certificate authorities were removed");
            let secret = secret_of(&self.current());
            let made = create(&self.secrets, &secret).await;
            let made = made.map_err(|error| match error {
                VaultError::Secret(source) => VaultError::Write(source),
                other => other,
            })?;
            info!(secret = names::CA_SECRET, made, "certificate authorities written again");
        }
        Ok(())
    }

    fn take(&self, authorities: Authorities) {
        self.current.send_if_modified(|current| {
            let differs = current.bundles() != authorities.bundles()
                || current.mesh.current.pem() != authorities.mesh.current.pem();
            if differs {
                *current = Arc::new(authorities);
            }
            differs
        });
    }
}

/// Makes the first authorities, unless another replica was faster; who is believed already still is.
async fn make(
    secrets: &Api<Secret>,
    api_server: &Names,
    wanted: &Wanted,
    believed: Published,
) -> Result<Authorities, VaultError> {
    let (now, validity) = (SystemTime::now(), wanted.validity);
    let Published { mesh, manager } = believed;
    let authorities = Authorities {
        mesh: Line::begin(Kind::Mesh, api_server, validity, now, mesh)?,
        manager: Line::begin(Kind::Manager, &wanted.manager, validity, now, manager)?,
    };
    if create(secrets, &secret_of(&authorities)).await? {
        info!(secret = names::CA_SECRET, "certificate authorities made");
        return Ok(authorities);
    }
    let theirs = secrets.get(names::CA_SECRET).await.map_err(VaultError::Secret)?;
    Ok(Authorities::read(&theirs)?)
}

/// Whether it was ours that was created.
async fn create(secrets: &Api<Secret>, secret: &Secret) -> Result<bool, VaultError> {
    match secrets.create(&PostParams::default(), secret).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(error) => Err(VaultError::Secret(error)),
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
