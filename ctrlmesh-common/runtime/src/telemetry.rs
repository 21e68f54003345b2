//! Sends log lines to standard error.

use std::error::Error;
use std::io;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::TryInitError;

/// What is logged unless `RUST_LOG` says otherwise. The proxy logs one line per request to `access` and to `explain`.
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

/// Starts logging, filtered by `RUST_LOG`.
///
/// # Errors
/// If the process logs already.
pub fn init(format: LogFormat) -> Result<(), TryInitError> {
    use tracing_subscriber::util::SubscriberInitExt as _;

    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match format {
        LogFormat::Text => lines.with_ansi(false).finish().try_init(),
        LogFormat::Json => lines.json().flatten_event(true).finish().try_init(),
    }
}

/// An error and its sources, on one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
