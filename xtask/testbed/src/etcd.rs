//! Has etcd compact its history.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

/// How long etcd may take for an answer.
const DEADLINE: Duration = Duration::from_secs(30);

/// Forgets all versions but the last.
pub(crate) fn compact(etcd: SocketAddr) -> Result<()> {
    // Of any key: what is asked for is in the head of the answer.
    let range = ask(etcd, "/v3/kv/range", &json!({"key": "AA=="}))?;
    let revision = &range["header"]["revision"];
    ask(etcd, "/v3/kv/compaction", &json!({"revision": revision, "physical": true}))?;
    Ok(())
}

fn ask(etcd: SocketAddr, path: &str, question: &Value) -> Result<Value> {
    let mut stream = TcpStream::connect(etcd)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    let body = question.to_string();
    let length = body.len();
    // Version 1.0: so the answer comes in one piece and ends with the connection.
    write!(stream, "POST {path} HTTP/1.0\r\ncontent-length: {length}\r\n\r\n{body}")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    ensure!(head.lines().next().is_some_and(|line| line.contains(" 200 ")), "{answer}");
    Ok(serde_json::from_str(body)?)
}
