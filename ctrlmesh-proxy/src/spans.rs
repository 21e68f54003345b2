//! Spans of connections and requests, in the terms of OpenTelemetry.
//!
//! Where no collector is configured there is no [`Tracer`], and each request pays for one comparison. The API of
//! OpenTelemetry is used as it is: its spans begin and end where the proxy's own code says so, whatever is logged.

mod context;
mod attributes;
mod collector;
mod export;
mod connection;
mod request;

use std::path::PathBuf;

use clap::Args;
use ctrlmesh_runtime::drain::Drain;
use ctrlmesh_runtime::traces::{CollectorUrl, ENDPOINT_VARIABLE, RATIO_VARIABLE, TraceRatio};
use opentelemetry::trace::{SpanContext, TraceContextExt as _, TracerProvider as _};
use opentelemetry::{Context, InstrumentationScope, KeyValue};
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use thiserror::Error;

use crate::metrics::SpanMetrics;
use crate::net::tls::TlsError;

pub use self::attributes::{Decision, RequestOrigin};
pub use self::connection::ConnectionSpan;
pub use self::request::{LoggedTrace, RequestSpan};

/// The name of the service in spans, unless `OTEL_SERVICE_NAME` or `OTEL_RESOURCE_ATTRIBUTES` names another one.
const SERVICE: &str = "ctrlmesh-proxy";

/// Where spans go, and how many.
#[derive(Clone, Debug, Default, Args)]
pub struct SpanArgs {
    /// URL of an OpenTelemetry collector that takes spans by OTLP over gRPC, as http://HOST:PORT or https://HOST:PORT.
    /// Without it, no spans are made.
    #[arg(long, env = ENDPOINT_VARIABLE, value_name = "URL")]
    pub otlp_endpoint: Option<CollectorUrl>,
    /// PEM file with the CA of the collector's certificate, where its URL begins with https. The default is Mozilla's
    /// CAs.
    #[arg(long, env = "OTEL_EXPORTER_OTLP_CERTIFICATE", value_name = "FILE")]
    pub otlp_ca: Option<PathBuf>,
    /// Share of the traces to record, from 0 to 1, among those that the proxy begins. In a trace that the operator
    /// began, the proxy follows the operator's decision.
    #[arg(long, env = RATIO_VARIABLE, default_value = "1", value_name = "RATIO")]
    pub trace_ratio: TraceRatio,
}

/// Why spans cannot be exported.
#[derive(Debug, Error)]
pub enum SpanError {
    #[error("read the CA of the collector")]
    Authority(#[from] TlsError),
    #[error("set up TLS to the collector")]
    Library(#[from] rustls::Error),
    #[error("set up the exporter of spans")]
    Exporter(#[from] ExporterBuildError),
}

/// Begins the spans of this process. Clones share the queue to the collector, which ends with the last of them.
#[derive(Clone, Debug)]
pub struct Tracer(SdkTracer);

impl Tracer {
    /// Starts the export of spans, on `drain`. `None` where no collector is configured.
    ///
    /// # Errors
    /// If the collector's CA cannot be read, or a variable of OpenTelemetry asks for what is not supported.
    pub fn start(args: &SpanArgs, metrics: &SpanMetrics, drain: &Drain) -> Result<Option<Self>, SpanError> {
        let Some(url) = &args.otlp_endpoint else { return Ok(None) };
        let exporter = collector::exporter(url, args.otlp_ca.as_deref(), &resource(), drain)?;
        let (queue, received) = export::queue(metrics.clone());
        drain.spawn(export::run(received, exporter, metrics.clone(), drain.clone()));
        Ok(Some(Self::new(args.trace_ratio, queue)))
    }

    fn new(ratio: TraceRatio, queue: export::Queue) -> Self {
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio.get())));
        let provider = SdkTracerProvider::builder().with_sampler(sampler).with_span_processor(queue).build();
        let scope = InstrumentationScope::builder(SERVICE).with_version(env!("CARGO_PKG_VERSION")).build();
        Self(provider.tracer_with_scope(scope))
    }
}

/// What is said of this process in each export.
fn resource() -> Resource {
    let own = Resource::builder_empty()
        .with_attribute(KeyValue::new("service.name", SERVICE))
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    // Later ones win: the user's.
    let service = std::env::var("OTEL_SERVICE_NAME").ok().filter(|name| !name.is_empty());
    let named = own.with_detector(Box::new(EnvResourceDetector::new()));
    match service {
        Some(name) => named.with_attribute(KeyValue::new("service.name", name)).build(),
        None => named.build(),
    }
}

/// The context of a span whose parent is `parent`.
fn child_of(parent: &SpanContext) -> Context {
    Context::new().with_remote_span_context(parent.clone())
}

#[cfg(test)]
mod tests;
