//! The page shows what is only there at times, for as long as it is there: slots of nobody, a trial, an open breaker.

use ctrlmesh_common::api::TrialPhase;
use ctrlmesh_testbed::{ControlPlane, Options};
use serde_json::json;
use tempfile::TempDir;

use super::{Dashboard, until_true};
use crate::alerts_fire::{BREAKER, close_breaker, open_breaker};
use crate::browser::Browser;
use crate::commands::printed;
use crate::full::{OPERATOR, ROOT, SYSTEM, divide, divide_with, enrolled, parted, proxies, world};
use crate::owned::{Bed, bed};
use crate::process::Replica;
use crate::rollout_commands::{NEW, OLD, begin_trial, is_in, replace_second, until};

const UNOWNED: &str = "document.querySelectorAll('.root .slot.unowned').length";

const VERDICT: &str = "document.querySelector('.root .verdict').textContent";

/// Opens the page of the root.
async fn opened(dashboard: &Dashboard) -> Browser {
    let mut browser = Browser::start();
    browser.open(&dashboard.url);
    until_true(&mut browser, "document.querySelector('#live')?.dataset.state === 'live'").await;
    browser.evaluate(&format!("location.hash = '#/root/{OPERATOR}/{ROOT}'"));
    until_true(&mut browser, "document.querySelector('article.root') !== null").await;
    browser
}

/// Waits until a table is seen, and one of its rows begins with these cells.
async fn until_row(browser: &mut Browser, table: &str, cells: &[&str]) {
    let rows = format!("[...document.querySelectorAll('#{table} tbody tr')]");
    let texts = format!(
        "{rows}.filter(row => row.checkVisibility()).map(row => [...row.children].map(one => one.textContent))"
    );
    let expected = json!(cells);
    until_true(browser, &format!("{texts}.some(row => {expected}.every((cell, at) => row[at] === cell))")).await;
}

/// Waits until a table is not seen.
async fn until_hidden(browser: &mut Browser, table: &str) {
    until_true(browser, &format!("!document.querySelector('#{table}').checkVisibility()")).await;
}

/// Where no manager decides, no shard owns anything.
async fn nobody_owns_anything(browser: &mut Browser) {
    until_true(browser, &format!("{UNOWNED} === 32")).await;
    until_true(browser, &format!("{VERDICT}.includes('slots 0-31 belong to nobody')")).await;
    // In the colour of what is wrong.
    let colours = "['.root .slot.unowned', '.root .verdict'].map(one => getComputedStyle(document.querySelector(one)))";
    until_true(browser, &format!("(([slot, verdict]) => slot.fill === verdict.color)({colours})")).await;
    until_true(browser, "document.querySelector('[data-slot=\"7\"]').getAttribute('aria-label') === 'Slot 7: nobody'")
        .await;
}

#[tokio::test]
async fn slots_that_nobody_owns_are_shown_until_they_are_owned() {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    let folder = TempDir::new().unwrap();
    world(&client).await;
    // It brings the kinds. A manager that runs gives shards their slots, though they have no pods yet.
    let mut first = Replica::start(&cluster, SYSTEM, &[]).await;
    first.until_ready().await;
    first.program().kill();
    divide(&client, 2, None).await;
    let dashboard = Dashboard::start(&cluster);
    let mut browser = opened(&dashboard).await;
    nobody_owns_anything(&mut browser).await;
    let replica = Replica::start(&cluster, SYSTEM, &[]).await;
    replica.until_ready().await;
    let (settings, pods) = enrolled(&cluster, &client, &replica, &folder).await;
    let (_sidecars, clients) = proxies(&client, &settings, &pods).await;
    parted(&clients, |_, _| true).await;
    until_true(&mut browser, &format!("{UNOWNED} === 0 && !{VERDICT}.includes('nobody')")).await;
}

#[tokio::test]
async fn a_trial_and_its_checks_are_shown_until_it_ends() {
    let cluster = ControlPlane::start(&Options::default()).unwrap();
    let client = cluster.client().await.unwrap();
    world(&client).await;
    let replica = Replica::start(&cluster, SYSTEM, &[]).await;
    replica.until_ready().await;
    let steps = json!([{"slots": 1, "pause": "Manual", "shadow": true}, {"percent": 100}]);
    let rule = json!({"steps": steps, "analysis": {"interval": "10s"}, "onFailure": "Hold"});
    divide_with(&client, "Proxy", 2, Some(("rollout", rule))).await;
    let dashboard = Dashboard::start(&cluster);
    let mut browser = opened(&dashboard).await;
    begin_trial(&client).await;
    let says = |phase: &str| {
        let text = format!("Revision {NEW} is tried: {phase}, step 1 of 2");
        format!("[...document.querySelectorAll('.root .note')].some(one => one.textContent.startsWith('{text}'))")
    };
    until_true(&mut browser, &says("Analysing")).await;
    // Nobody asks for anything, so nothing can be compared.
    until_row(&mut browser, "checks", &[NEW, "1", "Inconclusive"]).await;
    printed(&cluster, &["rollout", "abort", ROOT]);
    until_true(&mut browser, &says("Held")).await;
    until(&client, "the trial to be held", |status| is_in(status, TrialPhase::Held)).await;
    replace_second(&client, OLD).await;
    until(&client, "the trial to end", |status| status.trial.is_none()).await;
    until_true(&mut browser, "!document.querySelector('.root').textContent.includes(' is tried: ')").await;
}

#[tokio::test]
async fn an_open_breaker_and_missing_rates_are_shown() {
    let Bed { client, cluster, settings, pods, .. } = &bed("Proxy", 2, None).await;
    let (_sidecars, clients) = proxies(client, settings, pods).await;
    parted(&clients, |_, _| true).await;
    let dashboard = Dashboard::start(cluster);
    let mut browser = opened(&dashboard).await;
    until_hidden(&mut browser, "breakers").await;
    // The API server reaches no proxy here: these are processes beside it, and not at the addresses of their pods.
    let notes = "[...document.querySelectorAll('.root .note')].map(one => one.textContent)";
    until_true(&mut browser, &format!("{notes}.some(note => note.startsWith('Rates are missing: '))")).await;
    let heads = browser.evaluate("document.querySelector('#shards thead').textContent");
    assert!(!heads.as_str().unwrap().contains("Requests/s"), "{heads}");
    open_breaker(client).await;
    for pod in ["op-0", "op-1"] {
        until_row(&mut browser, "breakers", &[BREAKER, "deletes", pod]).await;
    }
    until_true(&mut browser, &format!("{VERDICT}.includes('2 breakers open')")).await;
    close_breaker(client).await;
    until_hidden(&mut browser, "breakers").await;
    until_true(&mut browser, &format!("!{VERDICT}.includes('breakers')")).await;
}
