//! The serving threads.
//!
//! Each has a runtime of its own, and serves its connections to their end.

use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::thread::JoinHandle;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time;
use tracing::warn;

use super::AppError;
use crate::config::CommonArgs;
use crate::metrics::Metrics;
use crate::net::accept::{AcceptedConnection, ServingThread};
use crate::net::tls::trust::Trust;
use crate::session::{Policies, Server, WebhookTls};
use crate::spans::Tracer;
use crate::trace::Listeners;
use crate::upstream::{Dialer, Http1Only, Target};
use ctrlmesh_runtime::drain::Drain;

/// Shorter than the deadline of any request, and long enough to cost nothing.
const TIMER_PERIOD: Duration = Duration::from_secs(4);

/// What all serving threads share.
#[derive(Clone)]
pub struct Parts {
    pub args: CommonArgs,
    pub tls: Arc<ServerConfig>,
    pub tls_http1: Arc<ServerConfig>,
    pub webhooks: Option<WebhookTls>,
    pub trust: Arc<Trust>,
    pub http1_only: Arc<Http1Only>,
    pub target: Option<Target>,
    pub policies: Policies,
    pub metrics: Arc<Metrics>,
    pub tracer: Option<Tracer>,
    pub listeners: Arc<Listeners>,
    pub drain: Drain,
}

impl Parts {
    pub fn start(&self) -> Result<(Vec<ServingThread>, Vec<JoinHandle<()>>), AppError> {
        let mut threads = Vec::new();
        let mut workers = Vec::new();
        for number in 0..self.args.serving_threads() {
            let (thread, connections) = ServingThread::new();
            let parts = self.clone();
            let worker = thread::Builder::new()
                .name(format!("serve-{number}"))
                .spawn(move || parts.serve(connections))
                .map_err(AppError::Runtime)?;
            threads.push(thread);
            workers.push(worker);
        }
        Ok((threads, workers))
    }

    /// One serving thread, until no more connections come.
    fn serve(self, mut connections: UnboundedReceiver<AcceptedConnection>) {
        let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => {
                return warn!(error = &error as &dyn std::error::Error, "a serving thread cannot start");
            }
        };
        let drain = self.drain.for_thread();
        runtime.block_on(async move {
            let server = self.server(drain.clone());
            drain.spawn_local(keep_a_timer_near(drain.clone()));
            while let Some(accepted) = connections.recv().await {
                drain.spawn_local(server.clone().serve(accepted));
            }
            // The export of spans goes on until the last connection has released its server.
            drop(server);
            drain.ended().await;
        });
        // A name lookup may still block, and cannot be cancelled.
        runtime.shutdown_background();
    }

    fn server(self, drain: Drain) -> Rc<Server> {
        let dialer = Dialer {
            trust: self.trust,
            deadline: self.args.connect_timeout,
            silence: self.args.silence_timeout,
            http1_only: self.http1_only,
            metrics: self.metrics.clone(),
            drain: drain.clone(),
        };
        Rc::new(Server {
            tls: self.tls,
            tls_http1: self.tls_http1,
            webhooks: self.webhooks,
            dialer: Rc::new(dialer),
            target: self.target,
            policies: self.policies,
            header_timeout: self.args.header_timeout,
            response_timeout: self.args.response_timeout,
            metrics: self.metrics,
            tracer: self.tracer,
            listeners: self.listeners,
            drain,
        })
    }
}

/// Spares each request a system call for its deadline: tokio wakes its driver only for a timer that is earlier than all
/// others, and this one is earlier.
async fn keep_a_timer_near(drain: Drain) {
    let ticks = async {
        loop {
            time::sleep(TIMER_PERIOD).await;
        }
    };
    tokio::select! {
        () = drain.started() => {}
        () = ticks => {}
    }
}
