//! The node bed itself: its programs are real, and nothing of it stays.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use ctrlmesh_testbed::{Cluster, Node, Options, Program, Space, until};
use xtask::images::Image;

#[path = "../starter/mod.rs"]
mod starter;
mod ends;
mod commands;

/// A pod that runs our probe.
fn pod(name: &str, arguments: &str) -> String {
    let image = Image::Probe.name();
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{app: {name}}}}}\nspec:\n  \
         terminationGracePeriodSeconds: 5\n  \
         containers: [{{name: probe, image: \"{image}\", args: [{arguments}]}}]\n"
    )
}

#[test]
fn the_node_is_ready_and_of_the_pinned_version() -> Result<()> {
    let cluster = Cluster::shared();
    cluster.case("ready", |space| {
        let nodes = space.kubectl(&[
            "get",
            "nodes",
            "-o",
            "jsonpath={range .items[*]}{.status.nodeInfo.kubeletVersion} \
             {.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}",
        ])?;
        ensure!(nodes.lines().count() > 0, "there is no node");
        ensure!(nodes.lines().all(|node| node.ends_with(" True")), "{nodes}");
        // Another's may have several, of another version.
        let ours = format!("{} True\n", xtask::tools::KUBERNETES);
        ensure!(cluster.node().is_none() || nodes == ours, "{nodes}");
        Ok(())
    })
}

#[test]
fn a_pod_runs_with_logs_exec_and_port_forward() -> Result<()> {
    Cluster::shared().case("pod", |space| {
        space.apply(&pod("web", "serve"))?;
        space.wait("pod/web", "condition=Ready")?;
        let said = space.kubectl(&["exec", "web", "--", "/probe", "get", "http://127.0.0.1:8080/x"])?;
        ensure!(said == "web\n", "{said}");
        let logs = space.kubectl(&["logs", "web"])?;
        ensure!(logs.contains("web serves :8080") && logs.contains("GET /x from 127.0.0.1"), "{logs}");
        let failed = space.kubectl(&["exec", "web", "--", "/probe", "cat", "/none"]).unwrap_err();
        ensure!(failed.to_string().contains("/none"), "{failed}");
        forwarded(space, "web")
    })
}

/// Reaches the pod's port through `kubectl port-forward`.
fn forwarded(space: Space<'_>, pod: &str) -> Result<()> {
    let mut forward =
        space.command(&["port-forward", pod, ":8080"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    // Open to the end: it prints a line per connection, and ends where nobody reads.
    let mut output = BufReader::new(forward.stdout.take().context("output")?);
    let mut line = String::new();
    let read = output.read_line(&mut line);
    let answer = ask(&line);
    forward.kill()?;
    forward.wait()?;
    read?;
    let answer = answer.with_context(|| format!("{line:?}"))?;
    ensure!(answer.ends_with(&format!("{pod}\n")), "{answer}");
    Ok(())
}

/// Asks the port in `Forwarding from 127.0.0.1:41234 -> 8080`.
fn ask(line: &str) -> Result<String> {
    let address = line.strip_prefix("Forwarding from ").context("no address")?;
    let address = address.split(' ').next().context("no address")?;
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn services_lead_to_their_pods_and_to_the_api_server() -> Result<()> {
    let cluster = Cluster::shared();
    cluster.case("service", |space| {
        space.apply(&pod("web", "serve"))?;
        space.apply(&pod("client", "serve"))?;
        space.apply(
            "apiVersion: v1\nkind: Service\nmetadata: {name: web}\n\
             spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}\n",
        )?;
        space.wait("pod/web", "condition=Ready")?;
        space.wait("pod/client", "condition=Ready")?;
        let address = space.kubectl(&["get", "service", "web", "-o", "jsonpath={.spec.clusterIP}"])?;
        // From another pod, and from the very pod that serves.
        for pod in ["client", "web"] {
            let url = format!("http://{address}/");
            let get = ["exec", pod, "--", "/probe", "get", &url];
            let said = until("the service to answer", || Ok(space.kubectl(&get).ok()))?;
            ensure!(said == "web\n", "{pod}: {said}");
        }
        // Its certificate is verified against what every pod is given.
        let secrets = "/var/run/secrets/kubernetes.io/serviceaccount";
        let (ca, token) = (format!("{secrets}/ca.crt"), format!("{secrets}/token"));
        let address = ["--output=jsonpath={.spec.clusterIP} {.spec.ports[0].port}"];
        let asked = [&["get", "service", "kubernetes", "--namespace=default"], &address[..]];
        let said = cluster.ask(&asked.concat(), "")?;
        let (address, port) = said.split_once(' ').context("an address and a port")?;
        let url = format!("https://{}/version", SocketAddr::new(address.parse()?, port.parse()?));
        let said = space.kubectl(&["exec", "client", "--", "/probe", "get", &url, &ca, &token])?;
        let wanted = cluster.ask(&["get", "--raw", "/version"], "")?;
        ensure!(said.trim() == wanted.trim(), "{said}: not {wanted}");
        Ok(())
    })
}

#[test]
fn a_privileged_daemon_set_sees_cgroups_and_bpf_programs() -> Result<()> {
    Cluster::shared().case("daemon-set", |space| {
        let image = Image::Probe.name();
        space.apply(&format!(
            "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {{name: agent}}\nspec:\n  \
             selector: {{matchLabels: {{app: agent}}}}\n  template:\n    \
             metadata: {{labels: {{app: agent}}}}\n    spec:\n      \
             hostNetwork: true\n      hostPID: true\n      containers:\n      \
             - name: agent\n        image: \"{image}\"\n        args: [serve, \"127.0.0.1:7654\"]\n        \
             securityContext: {{privileged: true, runAsUser: 0}}\n        volumeMounts:\n        \
             - {{name: cgroup, mountPath: /sys/fs/cgroup}}\n        \
             - {{name: bpf, mountPath: /sys/fs/bpf, mountPropagation: Bidirectional}}\n      volumes:\n      \
             - {{name: cgroup, hostPath: {{path: /sys/fs/cgroup}}}}\n      \
             - {{name: bpf, hostPath: {{path: /sys/fs/bpf}}}}\n"
        ))?;
        space.kubectl(&["rollout", "status", "daemonset/agent", "--timeout=300s"])?;
        let read = |file: &str| space.kubectl(&["exec", "daemonset/agent", "--", "/probe", "cat", file]);
        let status = read("/proc/self/status")?;
        let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:\t"));
        let bounded = status.lines().find_map(|line| line.strip_prefix("CapBnd:\t"));
        ensure!(capabilities == bounded && capabilities > Some("000001"), "{status}");
        let mounts = read("/proc/self/mounts")?;
        ensure!(mounts.contains(" /sys/fs/bpf bpf rw"), "{mounts}");
        if space.cluster().node().is_some() {
            // With the processes of the node it sees its first one, and none of this machine.
            ensure!(read("/proc/1/cmdline")?.contains("init.sh"));
            ensure!(read("/proc/1/cgroup")?.lines().all(|line| line.ends_with(":/")));
        }
        Ok(())
    })
}

#[test]
fn a_native_sidecar_starts_before_and_ends_after_containers() -> Result<()> {
    Cluster::shared().case("sidecar", |space| {
        let image = Image::Probe.name();
        space.apply(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: job}}\nspec:\n  restartPolicy: Never\n  \
             initContainers:\n  - name: sidecar\n    image: \"{image}\"\n    restartPolicy: Always\n    \
             args: [serve, \":8081\"]\n    startupProbe: {{httpGet: {{port: 8081}}, periodSeconds: 1}}\n  \
             containers:\n  - name: main\n    image: \"{image}\"\n    \
             args: [get, \"http://127.0.0.1:8081/from-main\"]\n"
        ))?;
        space.wait("pod/job", "jsonpath={.status.phase}=Succeeded")?;
        let sidecar = space.kubectl(&["logs", "job", "-c", "sidecar"])?;
        let (asked, ended) = (sidecar.find("GET /from-main"), sidecar.find("told to end"));
        ensure!(asked.is_some() && asked < ended, "{sidecar}");
        Ok(())
    })
}

#[test]
fn pods_survive_kills_of_kubelet_and_containerd() -> Result<()> {
    // Of its own: pods of other tests would notice.
    let cluster = Cluster::of(Node::start(&Options::default())?);
    let node = cluster.node().context("a node")?;
    cluster.case("killed", |space| {
        space.apply(&pod("web", "serve"))?;
        space.wait("pod/web", "condition=Ready")?;
        for program in [Program::Kubelet, Program::Containerd, Program::KubeProxy] {
            let runs = || -> Result<Option<String>> {
                let command = node.command("cat")?.arg(node.folder().join(pid_file(program))).output()?;
                let pid = String::from_utf8_lossy(&command.stdout).trim().to_owned();
                let alive = node.command("test")?.args(["-d", &format!("/proc/{pid}")]).status()?;
                Ok(alive.success().then_some(pid))
            };
            let before = until("the program", runs)?;
            node.kill(program)?;
            until("another process", || Ok(runs()?.filter(|now| *now != before)))?;
        }
        let exec = ["exec", "web", "--", "/probe", "get", "http://127.0.0.1:8080/"];
        until("kubelet to answer again", || Ok(space.kubectl(&exec).ok()))?;
        let restarts = "jsonpath={.status.containerStatuses[0].restartCount}";
        let restarts = space.kubectl(&["get", "pod", "web", "-o", restarts])?;
        ensure!(restarts == "0", "{restarts} restarts");
        // And it does new work.
        space.apply(&pod("later", "serve"))?;
        space.wait("pod/later", "condition=Ready")
    })
}

#[test]
fn after_a_power_cut_pods_return_and_memory_is_gone() -> Result<()> {
    let mut node = Node::start(&Options::default())?;
    let touch = |node: &Node, file: &str| -> Result<()> {
        ensure!(node.command("touch")?.arg(file).status()?.success(), "touch {file}");
        Ok(())
    };
    touch(&node, "/run/in-memory")?;
    touch(&node, "/var/lib/on-disk")?;
    let kubectl = |node: &Node, arguments: &[&str]| -> Result<String> {
        let mut command = Command::new(xtask::tools::control_plane("kubectl"));
        command.arg("--kubeconfig").arg(node.control_plane().kubeconfig()).args(arguments);
        let output = command.stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "{arguments:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    let image = format!("--image={}", Image::Probe.name());
    kubectl(&node, &["create", "deployment", "web", &image, "--", "/probe", "serve"])?;
    kubectl(&node, &["rollout", "status", "deployment/web", "--timeout=300s"])?;
    node.reboot()?;
    let restarts = "jsonpath={.items[0].status.containerStatuses[0].restartCount}";
    until("the pod to run again", || {
        let count = kubectl(&node, &["get", "pods", "-l", "app=web", "-o", restarts])?;
        Ok((count == "1").then_some(()))
    })?;
    kubectl(&node, &["rollout", "status", "deployment/web", "--timeout=300s"])?;
    let get = ["exec", "deployment/web", "--", "/probe", "get", "http://127.0.0.1:8080/"];
    ensure!(kubectl(&node, &get)?.starts_with("web-"));
    let there = |file: &str| -> Result<bool> { Ok(node.command("test")?.args(["-e", file]).status()?.success()) };
    ensure!(there("/var/lib/on-disk")? && !there("/run/in-memory")?);
    Ok(())
}

/// The file in the node's folder that names the program's process.
fn pid_file(program: Program) -> &'static str {
    match program {
        Program::Containerd => "containerd.pid",
        Program::Kubelet => "kubelet.pid",
        Program::KubeProxy => "kube-proxy.pid",
    }
}

#[test]
fn a_failed_case_leaves_a_report_that_shows_why() -> Result<()> {
    let failed = Cluster::shared().case("as-asked", |space| {
        space.apply(&pod("web", "serve"))?;
        space.wait("pod/web", "condition=Ready")?;
        bail!("as asked")
    });
    let error = format!("{:#}", failed.unwrap_err());
    let (_, folder) = error.split_once("is in ").context("no folder")?;
    let folder = PathBuf::from(folder.split(": as asked").next().context("no folder")?);
    let described = fs::read_to_string(folder.join("pods"))?;
    ensure!(described.contains("Name:             web"), "{described}");
    ensure!(fs::read_to_string(folder.join("events"))?.contains("Started"));
    if Cluster::shared().node().is_some() {
        ensure!(!fs::read_to_string(folder.join("kubelet.log"))?.is_empty());
        let logs = Command::new("grep").args(["-rl", "web serves"]).arg(&folder).output()?;
        ensure!(!logs.stdout.is_empty(), "no container's log in {}", folder.display());
    }
    Ok(fs::remove_dir_all(folder)?)
}
