//! Writes errors, explanations and a summary to standard error.
//!
//! Standard error is the command's, too, so there is little, and each line begins with our name.

use std::env;
use std::error::Error;
use std::fmt;
use std::io::{self, Write as _};

use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::run::proxy::Counts;
use ctrlmesh_proxy::serve::explain;

/// What stands before each line.
const NAME: &str = "ctrlmesh";

/// What is logged besides, as `RUST_LOG` would say it, which is the command's.
const LOG: &str = "CTRLMESH_PROXY_RUN_LOG";

/// Writes only what a person wants to know.
struct Plain;

/// Sends log lines to standard error: what is wrong, and with `explained` what is done.
pub(crate) fn init(explained: bool) {
    use tracing_subscriber::util::SubscriberInitExt as _;

    let rest = env::var(LOG).unwrap_or_else(|_| "warn".to_owned());
    let level = if explained { "info" } else { "off" };
    let filter = EnvFilter::new(format!("{rest},{}={level}", explain::TARGET));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    // Whoever called us in a test has set it already.
    let _set = lines.with_ansi(false).event_format(Plain).finish().try_init();
}

/// The line at the end.
pub(crate) fn summary(counts: Counts) {
    say(&summed(counts));
}

/// An error and its causes.
pub(crate) fn failure(error: &dyn Error) {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    say(&text);
}

fn say(text: &str) {
    // Nobody reads it: there is nobody to tell.
    let _closed = writeln!(io::stderr(), "{NAME}: {text}");
}

fn summed(counts: Counts) -> String {
    let Counts { accepted, tls_failed, requests, injected, refused } = counts;
    let line = format!("{requests} requests, {injected} injected, {refused} refused");
    match (accepted, tls_failed, requests) {
        (0, ..) => format!("{line}; the command never connected: it may read another kubeconfig than KUBECONFIG names"),
        (_, 1.., 0) => format!(
            "{line}; {tls_failed} connections failed in TLS: the command takes CA or client certificate from elsewhere than the kubeconfig"
        ),
        _ => line,
    }
}

impl<S, N> FormatEvent<S, N> for Plain
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        write!(writer, "{NAME}: ")?;
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_never_came_or_never_trusted_is_told_why() {
        let counts = Counts { accepted: 1, requests: 3, injected: 2, ..Counts::default() };
        assert_eq!(summed(counts), "3 requests, 2 injected, 0 refused");
        assert!(summed(Counts::default()).contains("never connected"));
        let distrusted = Counts { accepted: 2, tls_failed: 2, ..Counts::default() };
        assert!(summed(distrusted).contains("2 connections failed in TLS"));
    }
}
