//! A backlog that more replicas work off: each website takes its time, and each replica works on one at a time.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use ctrlmesh_common::slots::{NamespaceHash, Slot, SlotSet};
use ctrlmesh_testbed::audit_log::AuditEvent;
use ctrlmesh_testbed::shares::are_even;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use serde_json::json;

use crate::bed::{ACCOUNT, Bed, object, sites};
use crate::moves::UNOWNED;
use crate::pods;

/// How many of the changes that make a backlog are under way at once.
const AT_ONCE: usize = 16;

/// What is worked off, and by how many replicas in turn.
struct Backlog {
    /// Namespaces that have the same slot.
    namespaces: usize,
    /// Websites of a namespace.
    websites: usize,
    cost_ms: u64,
    replicas: &'static [u16],
}

const FEW: Backlog = Backlog { namespaces: 1, websites: 2, cost_ms: 20, replicas: &[1, 3] };

/// `CTRLMESH_TEST_FULL=1` asks for these.
const FULL: Backlog = Backlog { namespaces: 2, websites: 4, cost_ms: 400, replicas: &[1, 2, 3, 5] };

/// The first write of a reconcile's outcome, and the last, and how many there were.
#[derive(Clone, Copy, Debug)]
struct Work {
    first: Timestamp,
    last: Timestamp,
    count: u32,
}

impl Work {
    /// The first one ends when the time begins.
    fn a_second(self) -> f64 {
        f64::from(self.count.saturating_sub(1)) / self.last.duration_since(self.first).as_secs_f64()
    }
}

impl Backlog {
    /// So many namespaces of each slot.
    fn depots(&self) -> Vec<String> {
        let mut rooms: BTreeMap<Slot, usize> = SlotSet::ALL.iter().map(|slot| (slot, self.namespaces)).collect();
        let names = (0..).map(|number| format!("depot-{number}"));
        let has_room = |name: &String| {
            let room = rooms.get_mut(&NamespaceHash::default().slot(name));
            room.is_some_and(|room| room.checked_sub(1).map(|left| *room = left).is_some())
        };
        names.filter(has_room).take(self.namespaces * SlotSet::ALL.len()).collect()
    }

    /// So many websites of each namespace.
    fn sites(&self, websites: usize) -> Vec<(String, String)> {
        let sites = |depot: String| (0..websites).map(move |number| (depot.clone(), format!("site-{number}")));
        self.depots().into_iter().flat_map(sites).collect()
    }

    async fn make(&self, bed: &Bed) -> Result<()> {
        for depot in self.depots() {
            bed.apply("/api/v1/namespaces", &object("v1", "Namespace", &depot)).await?;
        }
        self.change(bed, self.websites, "Hello").await
    }

    /// Gives so many websites of each namespace another title.
    async fn change(&self, bed: &Bed, websites: usize, title: &str) -> Result<()> {
        let change = async |(depot, name): (String, String)| {
            let mut site = object("web.example.com/v1alpha1", "Website", &name);
            site["spec"] = json!({"title": title, "pages": 1});
            bed.apply(sites(&depot), &site).await.map(drop)
        };
        stream::iter(self.sites(websites)).map(change).buffer_unordered(AT_ONCE).try_collect().await
    }
}

impl Bed {
    /// What each pod has written of the status of websites from `since` on, with the namespaces.
    fn work_since(&self, since: Timestamp) -> Result<BTreeMap<String, (Work, BTreeSet<String>)>> {
        let mut by_pod: BTreeMap<String, (Work, BTreeSet<String>)> = BTreeMap::new();
        let account = format!("system:serviceaccount:ops:{ACCOUNT}");
        for log in self.plane.audit_logs() {
            for event in AuditEvent::read(log, "websites")? {
                let is_taken = (200..300).contains(&event.response_status.code);
                let is_outcome = is_taken && event.user.username == account && event.object.subresource == "status";
                if !is_outcome || event.stage != "ResponseComplete" || event.at < since {
                    continue;
                }
                let pod = event.user.pod_name().context("a token of no pod")?.to_owned();
                let begun = Work { first: event.at, last: event.at, count: 0 };
                let (work, namespaces) = by_pod.entry(pod).or_insert_with(|| (begun, BTreeSet::new()));
                (work.first, work.last) = (work.first.min(event.at), work.last.max(event.at));
                work.count += 1;
                namespaces.insert(event.object.namespace);
            }
        }
        Ok(by_pod)
    }
}

/// How fast a backlog was worked off, and how fast while each replica had some of it left. Beside it what that is of
/// the pace of one replica, times their number.
fn say(work: &[Work], alone: &mut Option<(f64, f64)>) -> Result<()> {
    let first = work.iter().map(|one| one.first).min().context("no work")?;
    let last = work.iter().map(|one| one.last).max().context("no work")?;
    let all = Work { first, last, count: work.iter().map(|one| one.count).sum() };
    let (pace, busy) = (all.a_second(), work.iter().map(|one| one.a_second()).sum::<f64>());
    let (pace_alone, busy_alone) = *alone.get_or_insert((pace, busy));
    let replicas = f64::from(u32::try_from(work.len())?);
    let took = last.duration_since(first).as_secs_f64();
    eprintln!(
        "{replicas} replicas: {} reconciles in {took:.1} s: {pace:.1} a second ({:.1} %); while all had work, {busy:.1} \
         ({:.1} %)",
        all.count,
        100.0 * pace / pace_alone / replicas,
        100.0 * busy / busy_alone / replicas,
    );
    Ok(())
}

#[tokio::test]
async fn each_replica_works_off_its_part_of_a_backlog() -> Result<()> {
    let Some(mut bed) = Bed::start("each_replica_works_off_its_part_of_a_backlog").await? else { return Ok(()) };
    let backlog = if ctrlmesh_testbed::is_full() { FULL } else { FEW };
    pods::workload(&bed, 1, true).await?;
    bed.root(&json!({"fence": "Server", "auto": {"shardingSize": 8}})).await?;
    backlog.make(&bed).await?;
    let (mut running, mut alone) = (0, None);
    for replicas in backlog.replicas.iter().copied() {
        pods::workload(&bed, usize::from(replicas), true).await?;
        for number in running..replicas {
            bed.start_pod(number, true, &[]).await?;
            let operator = &bed.pods[&format!("op-{number}")].operator;
            operator.replace(
                env!("CARGO_BIN_EXE_e2e-kube-rs-operator").as_ref(),
                &[format!("--cost-ms={}", backlog.cost_ms)],
            );
        }
        running = replicas;
        let table = bed.settled(|table| are_even(table, usize::from(replicas))).await?;
        // Once each replica has worked on something, all of them are there.
        backlog.change(&bed, 1, &format!("For {replicas}")).await?;
        bed.until_none_missed().await?;
        let since = Timestamp::now();
        backlog.change(&bed, backlog.websites, &format!("By {replicas}")).await?;
        bed.until_none_missed().await?;
        let work = bed.work_since(since)?;
        say(&work.values().map(|(work, _)| *work).collect::<Vec<_>>(), &mut alone)?;
        for (pod, (_, namespaces)) in &work {
            let shard = table.shard_of(pod).with_context(|| format!("{pod} has no shard"))?;
            let own = |depot: &String| table.owner(NamespaceHash::default().slot(depot), Some(depot)) == Some(shard);
            let own: BTreeSet<String> = backlog.depots().into_iter().filter(own).collect();
            ensure!(*namespaces == own, "{pod} worked on {namespaces:?}, and has {own:?}");
        }
        ensure!(work.len() == usize::from(replicas), "each has its part: {:?}", work.keys());
    }
    let verdict = bed.check_writes()?;
    verdict.ensure_clean(UNOWNED)?;
    bed.has_passed = true;
    Ok(())
}
