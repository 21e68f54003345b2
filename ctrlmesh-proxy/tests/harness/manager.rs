//! A manager whose updates a test writes, and whose reports it reads.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use ctrlmesh_common::wire::{
    self, Content, Hello, PodEntry, PodId, RenewRequest, Renewed, Report, TrafficReport, Update, Verdict,
};
use http::{HeaderName, HeaderValue, Request, Response};
use http_body_util::BodyExt as _;
use http_body_util::channel::{Channel, Sender};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::harness::pki::Pki;
use crate::harness::soon;

/// Of a gRPC message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// Listens on loopback until dropped.
pub(crate) struct Manager {
    pub(crate) address: SocketAddr,
    /// Whether policies that lapse are confirmed; at first they are not.
    pub(crate) confirms: Arc<AtomicBool>,
    streams: mpsc::UnboundedReceiver<Stream>,
    #[expect(dead_code, reason = "held: its tasks end with it")]
    tasks: JoinSet<()>,
}

/// A stream on which a proxy follows its policies.
pub(crate) struct Stream {
    /// `None` once it is over.
    updates: Option<Sender<Bytes, io::Error>>,
    reports: mpsc::UnboundedReceiver<Report>,
}

impl Manager {
    pub(crate) async fn start(pki: &Pki) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (begun, streams) = mpsc::unbounded_channel();
        let tls = TlsAcceptor::from(pki.server(&["h2"]));
        std::fs::write(pki.path("token"), "t").unwrap();
        let confirms = Arc::<AtomicBool>::default();
        let may_confirm = confirms.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut running = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (tls, begun, may_confirm) = (tls.clone(), begun.clone(), may_confirm.clone());
                running.spawn(async move {
                    let Ok(stream) = tls.accept(stream).await else { return };
                    let service = service_fn(move |request| {
                        let (begun, may_confirm) = (begun.clone(), may_confirm.clone());
                        async move {
                            Ok::<_, Infallible>(match request.uri().path() {
                                wire::RENEW => renew(request, &may_confirm).await,
                                _ => follow(request, &begun),
                            })
                        }
                    });
                    let server = http2::Builder::new(TokioExecutor::new());
                    let _broken = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, confirms, streams, tasks }
    }

    /// The flags of a proxy of the pod `ns/op-0` that follows this manager.
    pub(crate) fn flags(&self, pki: &Pki) -> Vec<String> {
        let path = |name: &str| pki.path(name).to_str().unwrap().to_owned();
        let flags = [
            ("--manager", self.address.to_string()),
            ("--manager-ca", path("real.crt")),
            ("--token", path("token")),
            ("--state-dir", path("state")),
            ("--pod", "ns/op-0".to_owned()),
        ];
        flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect()
    }

    /// The next stream, and what the proxy says first.
    pub(crate) async fn stream(&mut self) -> (Stream, Hello) {
        let mut stream = soon("a stream", self.streams.recv()).await.unwrap();
        match stream.report().await.content {
            Some(Content::Hello(hello)) => (stream, hello),
            other => panic!("{other:?} before a hello"),
        }
    }
}

impl Stream {
    /// Says that it takes reports on the states of pods. Counts only if nothing was sent before.
    pub(crate) async fn take_states(&mut self) {
        let update = Update { guard_reports: true, ..Update::default() };
        self.updates.as_mut().unwrap().send_data(framed(&update)).await.unwrap();
    }

    /// Sends the pod's policy.
    pub(crate) async fn send(&mut self, policy: &Value) {
        let policy = Bytes::from(policy.to_string());
        let pod = PodId { namespace: "ns".to_owned(), name: "op-0".to_owned(), uid: "u".to_owned() };
        let (digest, operator) = (wire::digest(&policy), "ns/op".to_owned());
        let entry = PodEntry { pod: Some(pod), digest, policy, operator, version: 1 };
        let update = Update { policies: vec![entry], ..Update::default() };
        self.updates.as_mut().unwrap().send_data(framed(&update)).await.unwrap();
    }

    /// The next verdict.
    pub(crate) async fn verdict(&mut self) -> Verdict {
        match self.report().await.content {
            Some(Content::Verdict(verdict)) => verdict,
            other => panic!("{other:?} is no verdict"),
        }
    }

    /// The next report on traffic. Verdicts before it are passed over.
    pub(crate) async fn traffic(&mut self) -> TrafficReport {
        loop {
            match self.report().await.content {
                Some(Content::Traffic(traffic)) => return traffic,
                Some(Content::Verdict(verdict)) => assert_eq!(verdict.refused, ""),
                other => panic!("{other:?} is no traffic"),
            }
        }
    }

    /// Ends the stream from the manager's side.
    pub(crate) fn end(&mut self) {
        self.updates = None;
    }

    /// Whether the proxy has said nothing more.
    pub(crate) fn is_silent(&mut self) -> bool {
        while let Ok(report) = self.reports.try_recv() {
            if !comes_any_time(&report) {
                return false;
            }
        }
        true
    }

    /// The next report. Those on watches and on the lock come at any time, and are passed over.
    async fn report(&mut self) -> Report {
        loop {
            let report = soon("a report", self.reports.recv()).await.unwrap();
            if !comes_any_time(&report) {
                return report;
            }
        }
    }
}

fn comes_any_time(report: &Report) -> bool {
    matches!(report.content, Some(Content::Watches(_) | Content::Lock(_)))
}

fn follow(request: Request<Incoming>, begun: &mpsc::UnboundedSender<Stream>) -> Response<Channel<Bytes, io::Error>> {
    assert_eq!(request.uri().path(), wire::FOLLOW);
    let (updates, body) = Channel::new(8);
    let (said, reports) = mpsc::unbounded_channel();
    begun.send(Stream { updates: Some(updates), reports }).unwrap();
    tokio::spawn(read(request.into_body(), said));
    let mut response = Response::new(body);
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// Confirms all that is asked for, or nothing.
async fn renew(request: Request<Incoming>, confirms: &AtomicBool) -> Response<Channel<Bytes, io::Error>> {
    let mut message = request.into_body().collect().await.unwrap().to_bytes();
    message.advance(PREFIX_BYTES);
    let asked = RenewRequest::decode(message).unwrap();
    let pods = asked.policies.into_iter().filter_map(|one| one.pod);
    let confirmed = pods.filter(|_| confirms.load(Ordering::Relaxed)).collect();
    let (mut answer, body) = Channel::new(8);
    answer.send_data(framed(&Renewed { confirmed })).await.unwrap();
    let status = [(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))];
    answer.send_trailers(status.into_iter().collect()).await.unwrap();
    let mut response = Response::new(body);
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

/// A message with its prefix.
fn framed(message: &impl Message) -> Bytes {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.encoded_len()).unwrap());
    message.encode(&mut framed).unwrap();
    framed.freeze()
}

/// Reads messages until the stream ends.
async fn read(mut body: Incoming, said: mpsc::UnboundedSender<Report>) {
    let mut read = BytesMut::new();
    while let Some(Ok(frame)) = body.frame().await {
        read.extend(frame.into_data().unwrap_or_default());
        while let Some(length) = read.get(1..PREFIX_BYTES).map(|bytes| u32::from_be_bytes(bytes.try_into().unwrap())) {
            let whole = PREFIX_BYTES + usize::try_from(length).unwrap();
            if read.len() < whole {
                break;
            }
            let mut message = read.split_to(whole);
            message.advance(PREFIX_BYTES);
            let _over = said.send(Report::decode(message).unwrap());
        }
    }
}
