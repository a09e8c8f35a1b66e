//! Metrics: promtool, a Prometheus that scrapes them and answers queries, and those of the dashboard.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::process::Command;

use serde_json::Value;
use testkit::{NetNs, Rig, Running, Serve, frame, require, wait};

const DASHBOARD: &str = include_str!("../../../../docs/deploy/grafana-dashboard.json");
const METRICS: &str = "127.0.0.1:9419";
const PROMETHEUS: &str = "127.0.0.1:9090";

/// A daemon with a guest and a network whose metrics are had by TCP.
fn rig() -> Rig {
    super::rig_with_network(&Serve::file().by_root().with("--metrics", METRICS))
}

/// What curl gets there.
fn get(netns: &NetNs, url: &str, options: &[&str]) -> Option<String> {
    let output = netns
        .command("curl")
        .args(["--silent", "--max-time", "20"])
        .args(options)
        .arg(url)
        .output()
        .expect("curl runs");
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn metrics(rig: &Rig) -> String {
    let url = format!("http://{METRICS}/metrics");
    get(&rig.veth.near, &url, &["--fail"]).expect("metrics")
}

/// A Prometheus that scrapes the daemon each second.
struct Prometheus {
    _running: Running,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    fn start(netns: &NetNs) -> Self {
        let dir = testkit::daemon::private_dir();
        let config = dir.path().join("prometheus.yml");
        let text = format!(
            "global: {{ scrape_interval: 1s }}\nscrape_configs:\n  - job_name: vhost-af-xdp\n    static_configs:\n      \
             - targets: ['{METRICS}']\n"
        );
        fs::write(&config, text).expect("ours");
        let mut command = netns.command("prometheus");
        command
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.path().join("data").display()
            ))
            .arg(format!("--web.listen-address={PROMETHEUS}"));
        Self {
            _running: Running::start(command),
            _dir: dir,
        }
    }

    /// What it answers to a query, once it is something.
    fn query(netns: &NetNs, query: &str) -> Vec<Value> {
        let url = format!("http://{PROMETHEUS}/api/v1/query");
        let mut last = String::new();
        let found = wait::until_some(wait::SOON, || {
            let options = ["--get", "--data-urlencode", &format!("query={query}")];
            last = get(netns, &url, &options)?;
            let answer: Value = serde_json::from_str(&last).ok()?;
            assert_eq!(answer["status"], "success", "{query}: {answer}");
            Some(answer["data"]["result"].as_array()?.clone()).filter(|result| !result.is_empty())
        });
        found.unwrap_or_else(|| panic!("nothing for {query}: {last}"))
    }
}

#[test]
fn promtool_finds_nothing_wrong() {
    require!(Root, Prometheus);
    let mut rig = rig();
    rig.assert_passes_both_ways();
    let dir = testkit::daemon::private_dir();
    let path = dir.path().join("metrics");
    fs::write(&path, metrics(&rig)).expect("ours");
    let output = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(File::open(&path).expect("ours"))
        .output()
        .expect("promtool runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.is_empty(),
        "{}: {said}",
        output.status
    );
}

#[test]
fn only_metrics_are_had_by_tcp() {
    require!(Root);
    let rig = rig();
    assert!(metrics(&rig).contains("vhost_af_xdp_build_info"));
    for path in ["/v1/status", "/v1/ports", "/v1/events", "/"] {
        let status = ["--output", "/dev/null", "--write-out", "%{http_code}"];
        let status = get(&rig.veth.near, &format!("http://{METRICS}{path}"), &status);
        assert_eq!(status.as_deref(), Some("404"), "{path}");
    }
}

#[test]
fn prometheus_scrapes_and_answers_every_query_of_the_dashboard() {
    require!(Root, Prometheus);
    let mut rig = rig();
    let _prometheus = Prometheus::start(&rig.veth.near);
    for seed in 0..20 {
        rig.assert_to_guest(&frame::plain(100, seed));
    }
    rig.assert_passes_both_ways();
    let near = &rig.veth.near;
    let counted = Prometheus::query(near, "vhost_af_xdp_frames_total{direction=\"to_guest\"} >= 20");
    assert_eq!(counted.len(), 1, "{counted:?}");
    let up = Prometheus::query(near, "up == 1");
    assert_eq!(up[0]["metric"]["job"], "vhost-af-xdp");
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels
        .iter()
        .flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let queries: Vec<&str> = targets
        .map(|target| target["expr"].as_str().expect("text"))
        .collect();
    assert!(queries.len() > 10);
    let mut asked = BTreeSet::new();
    for query in queries {
        // As Grafana does.
        let said = query
            .replace("$__rate_interval", "1m")
            .replace("$port", ".*")
            .replace("$network", ".*");
        Prometheus::query(near, &said);
        let words = query.split(|c: char| !c.is_alphanumeric() && c != '_');
        asked.extend(
            words
                .filter(|word| word.starts_with("vhost_af_xdp_"))
                .map(str::to_owned),
        );
    }
    // What has no place on the dashboard: the version, rounds and sleeps, and what is no loss.
    let there: BTreeSet<String> = metrics(&rig)
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next().map(str::to_owned))
        .collect();
    let without: Vec<_> = there.difference(&asked).map(String::as_str).collect();
    let known = [
        "vhost_af_xdp_build_info",
        "vhost_af_xdp_learned_evicted_total",
        "vhost_af_xdp_operations_total",
        "vhost_af_xdp_worker_rounds_total",
        "vhost_af_xdp_worker_sleeps_total",
    ];
    assert_eq!(without, known);
}
