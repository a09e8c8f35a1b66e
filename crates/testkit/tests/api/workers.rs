//! GET /v1/workers, and POST /v1/workers/reset.

use serde_json::{Value, json};
use testkit::{frame, require, wait};

use super::document::Document;

#[test]
fn workers_are_told_and_begin_anew_while_counters_and_metrics_go_on() {
    require!(Root);
    let document = Document::read();
    let dir = super::open_dir();
    let (mut rig, api) = super::rig(&dir);
    for seed in 0..10 {
        rig.assert_to_guest(&frame::plain(200, seed));
    }
    let frames = |of: &str| {
        let workers = api.get("/v1/workers")["workers"].clone();
        let each = workers.as_array().expect("a list").iter();
        each.map(|worker| worker["frames"][of].as_u64().expect("a number"))
            .sum::<u64>()
    };
    let told = wait::until(wait::SOON, || frames("in") >= 10 && frames("out") >= 10);
    assert!(told, "{:#}", api.get("/v1/workers"));
    let metric = || {
        let text = api.ask("/metrics", &[]).body;
        let line = "vhost_af_xdp_worker_frames_total{worker=\"0\",direction=\"in\"} ";
        let value = text.lines().find_map(|text| text.strip_prefix(line));
        value.expect("a sample").parse::<u64>().expect("a number")
    };
    let before = metric();
    assert!(before >= 10);
    let answer = api.change("POST", "/v1/workers/reset", &Value::Null);
    assert_eq!(answer.status, 200, "{answer:?}");
    document.check_of("POST", "/v1/workers/reset", &answer);
    assert_eq!(answer.json()["what"], json!("reset"));
    assert!(frames("in") < 10 && metric() >= before);
    let pairs = api.get("/v1/workers")["workers"][0]["lanes"].clone();
    let pair = &pairs.as_array().expect("a list")[0];
    assert_eq!(
        (&pair["kind"], &pair["queue"]),
        (&json!("pair"), &json!(0)),
        "{pairs}"
    );
}
