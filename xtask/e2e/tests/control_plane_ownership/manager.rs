//! The replicas of the manager.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{self, Instant};

use crate::bed::{Bed, LOOK_EVERY, PATIENCE, SYSTEM};
use crate::pods;
use crate::process::Process;

/// A replica of the manager.
pub(crate) struct Manager {
    pub(crate) process: Process,
    pub(crate) grpc: SocketAddr,
    probes: SocketAddr,
}

impl Bed {
    /// Starts the manager of this number, which asks the API server of the same number, and waits until it is ready.
    pub(crate) async fn start_manager(&mut self, number: u16) -> Result<()> {
        let name = format!("ctrlmesh-manager-{number}");
        let pod = pods::make(self, SYSTEM, &name, "ctrlmesh-manager", false).await?;
        let token = self.path(&name);
        fs::write(&token, pod.token(self, "ctrlmesh").await?)?;
        let listen = |purpose: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, 10_000 + 10 * number + purpose));
        let kubeconfig = self.plane.kubeconfig_of(usize::from(number));
        let mut arguments = ["run", "--log-format", "json", "--namespace", SYSTEM, "--serving-name", "127.0.0.1"]
            .map(str::to_owned)
            .to_vec();
        arguments.push(format!("--kubeconfig={}", kubeconfig.display()));
        // Roots that are divided by load are looked at more often than people would.
        arguments.push("--balance-interval=2s".to_owned());
        arguments.push(format!("--token={}", token.display()));
        let listens = (0..).zip(["grpc", "webhook", "probes", "metrics"]);
        arguments.extend(listens.map(|(purpose, name)| format!("--listen-{name}={}", listen(purpose))));
        let program = Path::new(env!("CARGO_BIN_EXE_e2e-manager"));
        let process = Process::new(self, program, &name, arguments, [])?;
        let manager = Manager { process, grpc: listen(0), probes: listen(2) };
        manager.process.start()?;
        manager.until_ready().await?;
        self.managers.push(manager);
        Ok(())
    }
}

impl Manager {
    /// Waits until it says that it is ready.
    pub(crate) async fn until_ready(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !is_ready(self.probes).await {
            ensure!(Instant::now() < deadline, "a manager is not ready");
            time::sleep(LOOK_EVERY).await;
        }
        Ok(())
    }
}

async fn is_ready(address: SocketAddr) -> bool {
    let ask = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    time::timeout(Duration::from_secs(5), ask).await.is_ok_and(|said| said.is_ok_and(|page| page.contains(" 200 ")))
}
