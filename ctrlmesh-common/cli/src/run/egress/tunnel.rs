//! Reaches the API server through an HTTP or SOCKS proxy.
//!
//! A listener on loopback leads every connection through that proxy to the API server. TLS passes through it, so it
//! carries no credentials but those of that proxy.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time;
use tracing::warn;

use crate::run::egress::{EgressProxy, Kind};
use ctrlmesh_proxy::config::Upstream;
use ctrlmesh_proxy::net::tunnel;
use ctrlmesh_runtime::drain::Drain;

/// How long the proxy may take to connect.
const DEADLINE: Duration = Duration::from_secs(10);

/// The most that it may answer before the connection is through.
const MAX_HEAD_BYTES: usize = 8 << 10;

/// Listens, and leads each connection through `proxy` to `server` until shutdown; returns where.
pub(crate) async fn start(proxy: EgressProxy, server: Upstream, drain: &Drain) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let tasks = drain.clone();
    drain.spawn(async move {
        loop {
            let client = tokio::select! {
                // The run is over.
                () = tasks.started() => return,
                accepted = listener.accept() => match accepted {
                    Ok((client, _)) => client,
                    Err(_) => continue,
                },
            };
            let (proxy, server) = (proxy.clone(), server.clone());
            tasks.spawn(async move {
                match time::timeout(DEADLINE, connect(&proxy, &server)).await {
                    Ok(Ok(upstream)) => drop(tunnel::opaque(client, upstream).await),
                    Ok(Err(error)) => warn!(
                        proxy = %proxy, error = &error as &dyn std::error::Error,
                        "no way through the proxy"
                    ),
                    Err(_elapsed) => warn!(proxy = %proxy, "the proxy does not answer"),
                }
            });
        }
    });
    Ok(address)
}

/// A connection to the API server, through the proxy.
async fn connect(proxy: &EgressProxy, server: &Upstream) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect((proxy.host.as_str(), proxy.port)).await?;
    match proxy.kind {
        Kind::Http => http(&mut stream, proxy, server).await?,
        Kind::Socks5 => socks5(&mut stream, proxy, server).await?,
    }
    Ok(stream)
}

async fn http(stream: &mut TcpStream, proxy: &EgressProxy, server: &Upstream) -> io::Result<()> {
    let host = if server.host.contains(':') { format!("[{}]", server.host) } else { server.host.clone() };
    let target = format!("{host}:{}", server.port);
    let login = proxy.credentials.as_ref().map(|(name, password)| {
        let basic = STANDARD.encode(format!("{name}:{password}"));
        format!("proxy-authorization: Basic {basic}\r\n")
    });
    let login = login.unwrap_or_default();
    let request = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n{login}\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut head = Vec::new();
    // The API server says nothing before its client does, so nothing behind the head can be lost.
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= MAX_HEAD_BYTES {
            return Err(refused("the proxy's answer is too long"));
        }
        head.push(stream.read_u8().await?);
    }
    let line = String::from_utf8_lossy(&head);
    let line = line.lines().next().unwrap_or_default();
    if line.split(' ').nth(1) == Some("200") {
        return Ok(());
    }
    Err(refused(&format!("the proxy answered `{line}`")))
}

async fn socks5(stream: &mut TcpStream, proxy: &EgressProxy, server: &Upstream) -> io::Result<()> {
    let method = u8::from(proxy.credentials.is_some()) * 2;
    stream.write_all(&[5, 1, method]).await?;
    if [stream.read_u8().await?, stream.read_u8().await?] != [5, method] {
        return Err(refused("the SOCKS proxy takes no such login"));
    }
    if let Some((name, password)) = &proxy.credentials {
        let mut login = vec![1];
        for text in [name, password] {
            login.extend(counted(text)?);
        }
        stream.write_all(&login).await?;
        if [stream.read_u8().await?, stream.read_u8().await?][1] != 0 {
            return Err(refused("the SOCKS proxy refuses the login"));
        }
    }
    let mut request = vec![5, 1, 0, 3];
    request.extend(counted(&server.host)?);
    request.extend(server.port.to_be_bytes());
    stream.write_all(&request).await?;
    let mut head = [0; 4];
    stream.read_exact(&mut head).await?;
    if head[1] != 0 {
        return Err(refused(&format!("the SOCKS proxy answered with error {}", head[1])));
    }
    let address = match head[3] {
        1 => 4,
        4 => 16,
        3 => usize::from(stream.read_u8().await?),
        _ => return Err(refused("the SOCKS proxy's answer is none")),
    };
    stream.read_exact(&mut vec![0; address + 2]).await.map(drop)
}

fn counted(text: &str) -> io::Result<Vec<u8>> {
    let length = u8::try_from(text.len()).map_err(|_long| refused("a name is longer than 255"))?;
    Ok([&[length], text.as_bytes()].concat())
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionRefused, why)
}
