//! How are connections served on several threads?
//!
//! Each thread has a runtime of its own, and keeps what it was handed to its end.

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
use crate::net::accept::{Accepted, ServingThread};
use crate::net::tls::trust::Trust;
use crate::session::{Policies, Server};
use crate::upstream::{Dialer, Http1Only, Target};
use ctrlmesh_runtime::drain::Drain;

/// Nearer than the deadline of any request, and far enough not to be felt.
const NEAR: Duration = Duration::from_secs(4);

/// What all serving threads are made from.
#[derive(Clone)]
pub struct Parts {
    pub args: CommonArgs,
    pub tls: Arc<ServerConfig>,
    pub tls_http1: Arc<ServerConfig>,
    pub trust: Arc<Trust>,
    pub http1_only: Arc<Http1Only>,
    pub target: Option<Target>,
    pub policies: Policies,
    pub metrics: Arc<Metrics>,
    pub drain: Drain,
}

// === impl Parts ===

impl Parts {
    /// Starts the serving threads.
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
    fn serve(self, mut connections: UnboundedReceiver<Accepted>) {
        let runtime =
            Builder::new_current_thread().enable_all().build_local(LocalOptions::default());
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => {
                return warn!(
                    error = &error as &dyn std::error::Error,
                    "a serving thread cannot start"
                );
            }
        };
        let drain = self.drain.for_thread();
        runtime.block_on(async move {
            let server = self.server(drain.clone());
            drain.spawn_local(keep_a_timer_near(drain.clone()));
            while let Some(accepted) = connections.recv().await {
                drain.spawn_local(server.clone().serve(accepted));
            }
            drain.ended().await;
        });
        // A name may still be looked up, which nobody can end.
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
            dialer: Rc::new(dialer),
            target: self.target,
            policies: self.policies,
            header_timeout: self.args.header_timeout,
            response_timeout: self.args.response_timeout,
            metrics: self.metrics,
            drain,
        })
    }
}

/// Lets each request have its deadline without a system call: a runtime must be woken only for a timer that is nearer
/// than all others, and this one is.
async fn keep_a_timer_near(drain: Drain) {
    let ticks = async {
        loop {
            time::sleep(NEAR).await;
        }
    };
    tokio::select! {
        () = drain.started() => {}
        () = ticks => {}
    }
}
