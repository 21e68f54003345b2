//! The gRPC connection to the manager.
//!
//! The manager is verified by its own CA, and every call carries the pod's token. The CA is read for each connection
//! and the token for each call, because both change while a proxy runs.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use ctrlmesh_common::wire::{self, PodId, PolicyInForce, RenewRequest, Renewed, Report, SignRequest, Signed, Update};
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::grpc::{self, Authorities, CONNECT_TIMEOUT, GrpcError, Peer};
use rustls_pki_types::CertificateDer;
use tokio::net::TcpStream;
use tokio::time;
use tokio_rustls::client::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::{Request, Status, Streaming};

mod args;
pub mod certificate;

pub use args::{Address, AddressError, ManagerArgs, ServiceAddress};

/// For connecting to the Service's address, before its name is tried.
const SERVICE_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// For the beginning of an answer: the manager may have to ask the API server about the token.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// How to reach the manager, and the files that this takes.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub address: Address,
    /// The Service's address, which is tried before the name.
    pub service_ip: Option<IpAddr>,
    /// The CA of the manager's certificate, PEM.
    pub ca: PathBuf,
    /// The pod's token for the manager.
    pub token: PathBuf,
    /// The folder for policies and certificates from the manager.
    pub state: PathBuf,
}

/// A connection to the manager.
#[derive(Clone, Debug)]
pub struct Connection(grpc::Connection);

impl Endpoint {
    /// The connection's tasks run on `drain`.
    ///
    /// # Errors
    /// If a file is missing or wrong, or the manager does not answer in time.
    pub async fn connect(&self, drain: &Drain) -> Result<Connection, GrpcError> {
        let peer = self.peer()?;
        let stream = Box::pin(self.reach(&peer)).await.map_err(GrpcError::Connect)?;
        Connection::begin(&peer, stream, drain).await
    }

    /// Uses a TCP connection that the caller has opened, for example from another address.
    ///
    /// # Errors
    /// As [`Endpoint::connect`].
    pub async fn connect_over(&self, stream: TcpStream, drain: &Drain) -> Result<Connection, GrpcError> {
        let peer = self.peer()?;
        let stream = Box::pin(peer.secure(stream)).await.map_err(GrpcError::Connect)?;
        Connection::begin(&peer, stream, drain).await
    }

    fn peer(&self) -> Result<Peer, GrpcError> {
        Peer::new(&self.address.host, Authorities::File(&self.ca), &self.token)
    }

    /// Tries the Service's address first. Where that fails, the name may lead to a Service that was created anew.
    async fn reach(&self, peer: &Peer) -> io::Result<TlsStream<TcpStream>> {
        let Address { host, port } = &self.address;
        let by_name = || peer.reach((host.as_str(), *port), CONNECT_TIMEOUT);
        let Some(address) = self.service_ip else { return by_name().await };
        match peer.reach((address, *port), SERVICE_CONNECT_TIMEOUT).await {
            Ok(stream) => Ok(stream),
            Err(there) => by_name()
                .await
                .map_err(|error| io::Error::new(error.kind(), format!("at {address}: {there}; by its name: {error}"))),
        }
    }
}

impl Connection {
    async fn begin(peer: &Peer, stream: TlsStream<TcpStream>, drain: &Drain) -> Result<Self, GrpcError> {
        let connection = Box::pin(peer.begin(stream, drain)).await?;
        Ok(Self(connection.max_message_bytes(wire::MAX_UPDATE_BYTES)))
    }

    /// Begins the stream of policies. `reports` begins with a hello; `ticket` is the manager's last one, or empty.
    ///
    /// # Errors
    /// The manager's status.
    pub async fn follow(
        &mut self,
        reports: ReceiverStream<Report>,
        ticket: &[u8],
    ) -> Result<Streaming<Update>, Status> {
        in_time(self.0.streaming(wire::FOLLOW, with_ticket(reports, ticket))).await
    }

    /// Has policies in force confirmed; returns the pods whose policy is. The caller sets a deadline.
    ///
    /// # Errors
    /// The manager's status.
    pub async fn renew(&mut self, policies: Vec<PolicyInForce>, ticket: &[u8]) -> Result<Vec<PodId>, Status> {
        let request = with_ticket(RenewRequest { policies }, ticket);
        let renewed: Renewed = self.0.unary::<RenewRequest, _>(wire::RENEW, request).await?;
        Ok(renewed.confirmed)
    }

    /// Has a certificate signing request (DER) signed; returns the chain, leaf first.
    ///
    /// # Errors
    /// The manager's status.
    pub async fn sign(&mut self, request: &[u8]) -> Result<Vec<CertificateDer<'static>>, Status> {
        let request = SignRequest { request: Bytes::copy_from_slice(request) };
        let signed: Signed = in_time(self.0.unary(wire::SIGN, request)).await?;
        Ok(signed.chain.into_iter().map(|one| CertificateDer::from(one.to_vec())).collect())
    }
}

/// A request that shows the manager's last review ticket, unless that is empty.
fn with_ticket<T>(message: T, ticket: &[u8]) -> Request<T> {
    let mut request = Request::new(message);
    if (1..=wire::MAX_REVIEW_TICKET_BYTES).contains(&ticket.len()) {
        let mut value = MetadataValue::from_bytes(ticket);
        value.set_sensitive(true);
        request.metadata_mut().insert_bin(wire::REVIEW_TICKET, value);
    }
    request
}

async fn in_time<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = |_elapsed| Status::deadline_exceeded("the manager does not answer");
    time::timeout(ANSWER_TIMEOUT, call).await.map_err(late)?
}
