//! A collector that takes OTLP over gRPC, and whose spans a test reads.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::{Buf as _, Bytes};
use http::{HeaderName, HeaderValue, Request, Response};
use http_body_util::BodyExt as _;
use http_body_util::channel::Channel;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use crate::harness::until;

/// Of a gRPC message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

/// `/opentelemetry.proto.collector.trace.v1.TraceService/Export`, as OTLP names it.
const EXPORT: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// Listens on loopback until dropped.
pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    received: Arc<Mutex<Received>>,
    #[expect(dead_code, reason = "held: its tasks end with it")]
    tasks: JoinSet<()>,
}

#[derive(Default)]
struct Received {
    spans: Vec<Span>,
    resources: Vec<Vec<KeyValue>>,
}

impl Receiver {
    /// In the clear where there is no `tls`.
    pub(crate) async fn start(tls: Option<Arc<ServerConfig>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::<Mutex<Received>>::default();
        let record = received.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut running = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (record, tls) = (record.clone(), tls.clone().map(TlsAcceptor::from));
                running.spawn(async move {
                    match tls {
                        None => serve(stream, record).await,
                        Some(tls) => serve(tls.accept(stream).await.unwrap(), record).await,
                    }
                });
            }
        });
        Self { address, received, tasks }
    }

    /// All spans so far.
    pub(crate) fn spans(&self) -> Vec<Span> {
        self.received.lock().unwrap().spans.clone()
    }

    /// What the proxy says of itself.
    pub(crate) fn service(&self) -> String {
        let received = self.received.lock().unwrap();
        text(received.resources.first().unwrap(), "service.name").unwrap()
    }

    /// Waits for the spans of a request with this path: of the proxy, and of the API server where that was asked.
    pub(crate) async fn request(&self, path: &str) -> (Span, Option<Span>) {
        let server = self.span(|span| value(span, "url.path").as_deref() == Some(path)).await;
        let client = self.spans().into_iter().find(|span| span.parent_span_id == server.span_id);
        (server, client)
    }

    /// Waits for a span.
    pub(crate) async fn span(&self, wanted: impl Fn(&Span) -> bool) -> Span {
        until("a span", || async { self.spans().iter().any(&wanted) }).await;
        self.spans().into_iter().find(wanted).unwrap()
    }
}

/// An attribute of a span.
pub(crate) fn value(span: &Span, name: &str) -> Option<String> {
    text(&span.attributes, name)
}

pub(crate) fn hex(id: &[u8]) -> String {
    let digits = id.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(|digit| char::from_digit(digit.into(), 16).unwrap()).collect()
}

fn text(attributes: &[KeyValue], name: &str) -> Option<String> {
    let value = attributes.iter().find(|pair| pair.key == name)?.value.clone();
    match value.unwrap() {
        AnyValue { value: Some(Value::StringValue(text)) } => Some(text),
        AnyValue { value: Some(Value::IntValue(number)) } => Some(number.to_string()),
        other => panic!("{name} is {other:?}"),
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, record: Arc<Mutex<Received>>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let record = record.clone();
        async move { Ok::<_, Infallible>(take(request, &record).await) }
    });
    let server = http2::Builder::new(TokioExecutor::new());
    let _broken = server.serve_connection(TokioIo::new(stream), service).await;
}

async fn take(request: Request<Incoming>, record: &Mutex<Received>) -> Response<Channel<Bytes, io::Error>> {
    assert_eq!(request.uri().path(), EXPORT);
    let mut message = request.into_body().collect().await.unwrap().to_bytes();
    message.advance(PREFIX_BYTES);
    let sent = ExportTraceServiceRequest::decode(message).unwrap();
    {
        let mut received = record.lock().unwrap();
        for of_resource in sent.resource_spans {
            received.resources.push(of_resource.resource.unwrap_or_default().attributes);
            let spans = of_resource.scope_spans.into_iter().flat_map(|of_scope| of_scope.spans);
            received.spans.extend(spans);
        }
    }
    let (mut answer, body) = Channel::new(2);
    // An empty message.
    answer.send_data(Bytes::from_static(&[0; PREFIX_BYTES])).await.unwrap();
    let status = [(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))];
    answer.send_trailers(status.into_iter().collect()).await.unwrap();
    let mut response = Response::new(body);
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}
