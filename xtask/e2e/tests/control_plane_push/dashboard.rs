//! `ctrlmesh dashboard` in a real browser, before a real manager and real proxies.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ctrlmesh_common::api::ShardingConfig;
use ctrlmesh_testbed::ControlPlane;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::bed::{eventually, patiently};
use crate::browser::Browser;
use crate::commands::{printed, printed_in};
use crate::full::{OPERATOR, ROOT, TEAMS, parted, proxies};
use crate::owned::{Bed, bed, watch};

mod parts;

/// Roots on one page.
const MANY: usize = 50;

/// Roles whose elements people use.
const INTERACTIVE: [&str; 8] = ["button", "checkbox", "combobox", "gridcell", "link", "option", "searchbox", "textbox"];

/// Where the docs have the pictures, which are taken anew with `CTRLMESH_GOLDEN=write`.
const IMAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/images");

/// The command, until it is dropped.
struct Dashboard {
    process: Child,
    url: String,
    address: SocketAddr,
    token: String,
}

impl Dashboard {
    fn start(cluster: &ControlPlane) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_e2e-ctrlmesh"));
        command.args(["dashboard", "--no-browser", "--all-namespaces", "--kubeconfig"]).arg(cluster.kubeconfig());
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("dashboard: ").unwrap().to_owned();
        let (place, token) = url.split_once("/#token=").unwrap();
        let address = place.strip_prefix("http://").unwrap().parse().unwrap();
        let token = token.to_owned();
        Self { process, url, address, token }
    }

    /// Status line of the answer to a request.
    async fn status(&self, head: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned()
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

/// Requires that only the page itself, with the token, reads anything.
async fn nobody_else_reads(dashboard: &Dashboard) {
    let Dashboard { address, token, .. } = dashboard;
    let own = format!("host: {address}\r\n");
    let bearer = format!("authorization: Bearer {token}\r\n");
    for (head, expected) in [
        (format!("GET /api/status HTTP/1.1\r\n{own}{bearer}"), "200"),
        (format!("GET /api/status HTTP/1.1\r\n{own}"), "401"),
        (format!("GET /api/status HTTP/1.1\r\n{own}authorization: Bearer {token}0\r\n"), "401"),
        (format!("GET /api/status HTTP/1.1\r\nhost: example.com\r\n{bearer}"), "403"),
        (format!("GET / HTTP/1.1\r\nhost: example.com:{}\r\n", address.port()), "403"),
        (format!("POST /api/status HTTP/1.1\r\n{own}{bearer}content-length: 0\r\n"), "405"),
    ] {
        let status = dashboard.status(&head).await;
        assert!(status.contains(expected), "{head}: {status}");
    }
}

/// The owner of each slot, as the page has it.
fn shown(browser: &mut Browser, root: &str) -> BTreeMap<String, String> {
    let cells = format!("[...document.querySelectorAll('[data-root=\"{root}\"] [data-slot]')]");
    let cells = browser.evaluate(&format!("{cells}.map(cell => [cell.dataset.slot, cell.dataset.owner])"));
    serde_json::from_value::<Vec<(String, String)>>(cells).unwrap().into_iter().collect()
}

/// The same, as the root has it.
async fn owners(client: &Client) -> BTreeMap<String, String> {
    let root: ShardingConfig = Api::namespaced(client.clone(), OPERATOR).get(ROOT).await.unwrap();
    let table = root.status.unwrap().ownership.unwrap();
    table.slots.into_iter().map(|(slot, owner)| (slot.to_string(), owner)).collect()
}

/// Waits until the page shows what the root has.
async fn until_shown(browser: &mut Browser, client: &Client) {
    let root = format!("{OPERATOR}/{ROOT}");
    eventually("the page to show who owns what", async || {
        let owners = owners(client).await;
        (owners.len() == 32 && shown(browser, &root) == owners).then_some(())
    })
    .await;
}

async fn until_true(browser: &mut Browser, expression: &str) {
    if patiently(async || (browser.evaluate(expression) == true).then_some(())).await.is_none() {
        let page = browser.evaluate("document.body.innerText");
        panic!("waited in vain for {expression}; the page says: {page}");
    }
}

/// What has the focus: its tag, and a name of it.
fn focused(browser: &mut Browser) -> String {
    let expression = "(() => { const one = document.activeElement; \
        return one.tagName + ':' + (one.name || one.getAttribute('aria-label') || one.textContent.trim()); })()";
    browser.evaluate(expression).as_str().unwrap().to_owned()
}

/// Searches an object with the keyboard alone, and requires that its owner is explained.
async fn an_object_is_explained(browser: &mut Browser, cluster: &ControlPlane) {
    let mut reached = BTreeSet::new();
    while reached.insert(focused(browser)) && !reached.iter().any(|one| one.ends_with(":resource")) {
        browser.press("Tab");
    }
    for (field, text) in [("resource", "configmaps"), ("namespace", TEAMS[0]), ("name", "object")] {
        assert!(focused(browser).ends_with(&format!(":{field}")), "{field}: {reached:?}");
        browser.type_text(text);
        browser.press(if field == "name" { "Enter" } else { "Tab" });
    }
    until_true(browser, "document.querySelectorAll('#explanation li').length > 0").await;
    let explanation = browser.evaluate("document.querySelector('#explanation').textContent");
    let explanation = explanation.as_str().unwrap();
    let owner = printed_in(cluster, TEAMS[0], &["owner", "cm", "object", "--output", "json"]);
    let owner: Value = serde_json::from_str(&owner).unwrap();
    let shard = owner["roots"][0]["shard"].as_str().unwrap();
    assert!(explanation.contains(shard) && explanation.contains(TEAMS[0]), "{shard}: {explanation}");
}

/// Requires that the ring is walked with arrow keys, and that each element that people use has a name.
async fn usable_without_a_mouse(browser: &mut Browser) {
    browser.evaluate(&format!("location.hash = '#/root/{OPERATOR}/{ROOT}'"));
    until_true(browser, "document.querySelectorAll('#shards tbody tr').length >= 2").await;
    browser.evaluate("document.querySelector('[data-slot][tabindex=\"0\"]').focus()");
    let first = browser.evaluate("document.activeElement.dataset.slot");
    browser.press("ArrowRight");
    let second = browser.evaluate("document.activeElement.dataset.slot");
    assert!(second.is_string() && first != second, "{first} {second}");
    let elements = browser.accessible();
    let used: Vec<_> = elements.iter().filter(|(role, _)| INTERACTIVE.contains(&role.as_str())).collect();
    assert!(used.len() > 5, "{elements:?}");
    let nameless: Vec<_> = used.iter().filter(|(_, name)| name.trim().is_empty()).collect();
    assert!(nameless.is_empty(), "{nameless:?}");
    assert!(elements.iter().any(|(role, _)| role == "table"), "{elements:?}");
}

/// Takes the pictures of the docs. They differ from run to run by their times, so they are not compared.
fn pictures(browser: &mut Browser) {
    browser.evaluate("document.querySelector('#explanation button').click(); scrollTo(0, 0)");
    for (name, dark) in [("light", false), ("dark", true)] {
        browser.set_dark(dark);
        let background = browser.evaluate("getComputedStyle(document.body).backgroundColor");
        let picture = browser.screenshot();
        assert!(picture.len() > 10_000, "{name}: {} bytes", picture.len());
        let channels: Vec<u32> = background
            .as_str()
            .unwrap()
            .split(|one: char| !one.is_ascii_digit())
            .filter_map(|one| one.parse().ok())
            .collect();
        assert_eq!(channels.iter().take(3).sum::<u32>() < 3 * 128, dark, "{name}: {background}");
        if std::env::var_os("CTRLMESH_GOLDEN").is_some_and(|value| value == "write") {
            fs::create_dir_all(IMAGES).unwrap();
            fs::write(Path::new(IMAGES).join(format!("dashboard-{name}.png")), picture).unwrap();
        }
    }
    browser.set_dark(false);
}

/// Fills the page with roots, and returns how long its frames take while all of them are shown.
async fn many_roots(browser: &mut Browser, client: &Client) -> String {
    let roots: Api<ShardingConfig> = Api::namespaced(client.clone(), OPERATOR);
    for number in 1..MANY {
        let root = json!({
            "apiVersion": "ctrlmesh.kusionstack.io/v1alpha1",
            "kind": "ShardingConfig",
            "metadata": {"name": format!("root-{number}")},
            "spec": {"root": {
                "prefix": format!("root-{number}"),
                "targetStatefulSet": format!("root-{number}"),
                "auto": {"shardingSize": 4, "everyShardReplicas": 1},
                "resourceSelector": [{"relateResources": [{"apiGroups": ["example.com"], "resources": [format!("kind{number}")]}]}],
            }},
        });
        roots.create(&PostParams::default(), &serde_json::from_value(root).unwrap()).await.unwrap();
    }
    browser.evaluate("location.hash = '#/'");
    until_true(browser, &format!("document.querySelectorAll('[data-root]').length === {MANY}")).await;
    until_true(browser, &format!("document.querySelectorAll('[data-slot]').length === {}", MANY * 32)).await;
    let frames = browser.evaluate(
        "new Promise(done => { const times = []; const next = now => { times.push(now); \
            times.length < 120 ? requestAnimationFrame(next) : done(times); }; requestAnimationFrame(next); })",
    );
    let times: Vec<f64> = serde_json::from_value(frames).unwrap();
    let longest = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    let mean = (times[times.len() - 1] - times[0]) / f64::from(119_u8);
    format!("{MANY} roots: 120 frames, {mean:.1} ms each, {longest:.1} ms the longest")
}

#[tokio::test]
async fn the_page_shows_who_owns_what() {
    let Bed { client, cluster, settings, pods, .. } = &bed("Proxy", 2, None).await;
    let (_sidecars, clients) = proxies(client, settings, pods).await;
    parted(&clients, |_, _| true).await;

    let dashboard = Dashboard::start(cluster);
    nobody_else_reads(&dashboard).await;
    let mut browser = Browser::start();
    browser.open(&dashboard.url);
    until_true(&mut browser, "document.querySelector('#live')?.dataset.state === 'live'").await;
    until_shown(&mut browser, client).await;
    printed(cluster, &["move", "0-3", "--to", "op-2-normal", "--wait"]);
    printed(cluster, &["move", "31", "--to", "op-1-normal", "--wait"]);
    let _watches = clients.each_ref().map(watch::<ConfigMap>);
    until_shown(&mut browser, client).await;
    an_object_is_explained(&mut browser, cluster).await;
    usable_without_a_mouse(&mut browser).await;
    until_true(&mut browser, "document.querySelector('.root .verdict')?.dataset.bad === 'false'").await;
    pictures(&mut browser);
    eprintln!("{}", many_roots(&mut browser, client).await);
    drop(dashboard);
    until_true(&mut browser, "document.querySelector('#live').dataset.state === 'stale'").await;
}
