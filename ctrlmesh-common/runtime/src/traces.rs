//! Flags that say where traces go, and how many.

use std::fmt;
use std::str::FromStr;

use http::Uri;
use http::uri::Scheme;
use thiserror::Error;

/// The URL of an OpenTelemetry collector.
pub const ENDPOINT_VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// The share of traces to record.
pub const RATIO_VARIABLE: &str = "OTEL_TRACES_SAMPLER_ARG";

/// `http://HOST:PORT` or `https://HOST:PORT` of a collector that takes OTLP over gRPC.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct CollectorUrl(Uri);

/// A share of traces, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceRatio(f64);

#[derive(Debug, Error)]
#[error("`{seen}` is not of the form http://HOST:PORT or https://HOST:PORT")]
pub struct CollectorUrlError {
    seen: String,
}

#[derive(Debug, Error)]
#[error("`{seen}` is not a number from 0 to 1")]
pub struct TraceRatioError {
    seen: String,
}

impl CollectorUrl {
    pub fn uri(&self) -> &Uri {
        &self.0
    }

    /// Whether the collector is spoken to by TLS.
    pub fn is_secure(&self) -> bool {
        self.0.scheme() == Some(&Scheme::HTTPS)
    }
}

impl TraceRatio {
    pub fn get(self) -> f64 {
        self.0
    }
}

impl FromStr for CollectorUrl {
    type Err = CollectorUrlError;

    fn from_str(text: &str) -> Result<Self, CollectorUrlError> {
        let url: Option<Uri> = text.parse().ok();
        let fits = |url: &Uri| {
            let scheme = url.scheme().is_some_and(|scheme| [Scheme::HTTP, Scheme::HTTPS].contains(scheme));
            let authority = url.authority().is_some_and(|at| !at.host().is_empty() && !at.as_str().contains('@'));
            scheme && authority && url.path_and_query().is_none_or(|path| path == "/")
        };
        url.filter(fits).map(Self).ok_or_else(|| CollectorUrlError { seen: text.to_owned() })
    }
}

impl FromStr for TraceRatio {
    type Err = TraceRatioError;

    fn from_str(text: &str) -> Result<Self, TraceRatioError> {
        let ratio = text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
        ratio.map(Self).ok_or_else(|| TraceRatioError { seen: text.to_owned() })
    }
}

impl fmt::Display for CollectorUrl {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(to)
    }
}

impl fmt::Display for TraceRatio {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(to)
    }
}

impl Default for TraceRatio {
    fn default() -> Self {
        Self(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_a_url_without_a_path() {
        for good in ["http://10.0.0.1:4317", "https://collector.observability/", "http://[fd00::1]:4317", "http://c"] {
            assert!(good.parse::<CollectorUrl>().is_ok(), "{good}");
        }
        let wrong = ["", "c:4317", "10.0.0.1:4317", "ftp://c:4317", "http://", "http://c/v1/traces", "http://t@c:4317"];
        for wrong in wrong {
            let error = wrong.parse::<CollectorUrl>().unwrap_err().to_string();
            assert!(error.ends_with("is not of the form http://HOST:PORT or https://HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn a_ratio_is_a_number_from_0_to_1() {
        for (text, ratio) in [("0", 0.0), ("0.25", 0.25), ("1", 1.0)] {
            assert_eq!(text.parse::<TraceRatio>().unwrap(), TraceRatio(ratio));
        }
        for wrong in ["", "-0.1", "1.1", "NaN", "half", "10%"] {
            let error = wrong.parse::<TraceRatio>().unwrap_err();
            assert_eq!(error.to_string(), format!("`{wrong}` is not a number from 0 to 1"));
        }
    }
}
