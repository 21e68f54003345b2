//! A real OpenTelemetry collector, and the spans that it wrote.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::json;
use tempfile::TempDir;
use xtask::tools;

use crate::harness::until;

/// Runs until dropped.
pub(crate) struct Collector {
    process: Child,
    pub(crate) address: SocketAddr,
    written: Arc<Mutex<String>>,
    _folder: TempDir,
}

/// A span, as the collector's exporter `debug` writes it.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenSpan {
    /// `Trace ID`, `Parent ID`, `ID`, `Name`, `Kind` and more.
    pub(crate) fields: BTreeMap<String, String>,
    pub(crate) attributes: BTreeMap<String, String>,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let folder = TempDir::new().unwrap();
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
        let settings = json!({
            "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": address.to_string()}}}},
            "exporters": {"debug": {"verbosity": "detailed", "use_internal_logger": false}},
            "service": {
                "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "error"}},
                "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["debug"]}},
            },
        });
        let config = folder.path().join("collector.yaml");
        fs::write(&config, settings.to_string()).unwrap();
        let mut command = Command::new(tools::otel_collector());
        command.arg(format!("--config=file:{}", config.display())).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let written = Arc::<Mutex<String>>::default();
        let (record, lines) = (written.clone(), BufReader::new(process.stdout.take().unwrap()));
        thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                let mut record = record.lock().unwrap();
                record.push_str(&line);
                record.push('\n');
            }
        });
        until("the collector to listen", || async { TcpStream::connect(address).is_ok() }).await;
        Self { process, address, written, _folder: folder }
    }

    /// Waits for a span that it wrote.
    pub(crate) async fn span(&self, wanted: impl Fn(&WrittenSpan) -> bool) -> WrittenSpan {
        until("a span", || async { self.spans().iter().any(&wanted) }).await;
        self.spans().into_iter().find(wanted).unwrap()
    }

    /// All spans so far. The last one may lack attributes.
    pub(crate) fn spans(&self) -> Vec<WrittenSpan> {
        spans(&self.written.lock().unwrap())
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Between two spans there may be what is said of the next resource.
fn spans(written: &str) -> Vec<WrittenSpan> {
    let blocks = written.split("\nSpan #").skip(1);
    blocks.map(|block| span(block.split("\nResourceSpans #").next().unwrap_or_default())).collect()
}

fn span(block: &str) -> WrittenSpan {
    let mut span = WrittenSpan::default();
    for line in block.lines() {
        if let Some((name, value)) = line.strip_prefix("     -> ").and_then(|pair| pair.split_once(": ")) {
            // `Str(VALUE)` or `Int(VALUE)`.
            let value = value.split_once('(').map_or("", |(_, value)| value.trim_end_matches(')'));
            span.attributes.insert(name.to_owned(), value.to_owned());
        } else if let Some((name, value)) = line.trim_start().split_once(':') {
            span.fields.entry(name.trim().to_owned()).or_insert_with(|| value.trim().to_owned());
        }
    }
    span
}
