//! Where do log lines go, and in which form?

use std::io;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::TryInitError;

/// What is logged unless `RUST_LOG` says otherwise. Target `access` is one line per request.
const DEFAULT_FILTER: &str = "info,access=off,explain=off";

/// The form of a log line.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line, for machines.
    Json,
}

/// Sends log lines to standard error from here on, filtered by `RUST_LOG`.
///
/// # Errors
///
/// Fails when it was called before.
pub fn init(format: LogFormat) -> Result<(), TryInitError> {
    use tracing_subscriber::util::SubscriberInitExt as _;

    let filter =
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match format {
        LogFormat::Text => lines.with_ansi(false).finish().try_init(),
        LogFormat::Json => lines.json().flatten_event(true).finish().try_init(),
    }
}
