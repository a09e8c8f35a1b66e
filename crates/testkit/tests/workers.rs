//! `vhost-af-xdp workers`: what it says of workers that moved a known number of frames. What is worked out of that is tested
//! in crate `model` (`state/workers.rs`).

use std::process::Command;

use rstest::rstest;
use serde_json::Value;
use testkit::{Daemon, Driver, DriverConfig, Layout, NetNs, Running, Serve, daemon, frame, wait};

const FRAMES: u64 = 1000;

fn command(daemon: &Daemon, args: &[&str]) -> Command {
    let mut command = Command::new(daemon::binary());
    command
        .arg("workers")
        .args(args)
        .arg("--control")
        .arg(daemon.path("control"));
    command
}

fn said(daemon: &Daemon, args: &[&str]) -> String {
    let output = command(daemon, args).output().expect("it runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && error.is_empty(), "{error}");
    String::from_utf8(output.stdout).expect("text")
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value}: a number"))
}

/// The workers of a daemon, once these move no frames any more: what they did is told then.
fn workers(daemon: &Daemon) -> Vec<Value> {
    let read = || {
        let all: Value = serde_json::from_str(&said(daemon, &["--json"])).expect("JSON");
        all[0]["workers"].as_array().expect("a list").clone()
    };
    wait::until_some(wait::SOON, || {
        let before = read();
        wait::a_moment();
        Some(read()).filter(|now| frames(now) == frames(&before))
    })
    .expect("they rest")
}

/// Sums of all workers.
fn frames(workers: &[Value]) -> [u64; 2] {
    ["in", "out"].map(|of| workers.iter().map(|worker| number(&worker["frames"][of])).sum())
}

fn send(guest: &mut Driver, frame: &[u8]) {
    for _ in 0..FRAMES {
        guest.pairs[0].send(frame, Layout::Whole);
        guest.pairs[0].await_sent();
    }
}

#[rstest]
fn frames_to_a_null_nic_are_counted_in_and_out_and_a_reset_begins_anew() {
    let netns = NetNs::new("workers");
    let daemon = Daemon::start(&netns, &Serve::null().with("--frame-size", "0"));
    let mut guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    send(&mut guest, &frame::plain(100, 1));
    let now = workers(&daemon);
    assert_eq!(frames(&now), [FRAMES; 2], "{now:#?}");
    let worker = &now[0];
    assert!(number(&worker["iterations"]["busy"]) > 0 && worker["frames"]["ns_each"].is_number());
    let lane = &worker["lanes"][0];
    assert_eq!((&lane["kind"], number(&lane["frames"])), (&"pair".into(), FRAMES));
    let calls = number(&worker["kernel"][3]["count"]);
    assert_eq!(calls, daemon.counter("calls"), "{worker:#}");
    let text = said(&daemon, &[]);
    for words in [
        "worker 0:",
        "  iterations: busy ",
        "  frames: in 1000, out 1000, ns_each ",
        "  batches:",
        "frames_percent",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(said(&daemon, &["--reset"]), "statistics of workers were reset\n");
    let now = workers(&daemon);
    assert_eq!(frames(&now), [0; 2]);
    assert_eq!(number(&now[0]["lanes"][0]["frames"]), 0);
    assert_eq!(number(&now[0]["kernel"][3]["count"]), 0);
    // What is counted since the start goes on.
    assert_eq!(daemon.counter("from_guest_frames"), FRAMES);
    assert!(number(&daemon.status()["workers"][0]["busy_rounds"]) > 0);
    send(&mut guest, &frame::plain(100, 1));
    assert_eq!(frames(&workers(&daemon)), [FRAMES; 2]);
}

#[test]
fn watcher_sees_table_after_table_of_what_was_done_between() {
    let netns = NetNs::new("workers");
    let mut daemon = Daemon::start(&netns, &Serve::null().with("--frame-size", "0"));
    let mut guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    send(&mut guest, &frame::plain(100, 1));
    workers(&daemon);
    let mut watcher = Running::start(command(&daemon, &["--watch"]));
    let head = format!("pid: {}\n", daemon.process().pid());
    let tables = wait::until_some(wait::SOON, || {
        let said = watcher.said();
        Some(said.clone()).filter(|said| said.matches(&head).count() >= 3)
    });
    let tables = tables.unwrap_or_else(|| panic!("{}", watcher.said()));
    // Nothing was sent since it looked first.
    assert!(
        tables.contains("frames: in 0, ") && !tables.contains("sizes:"),
        "{tables}"
    );
    watcher.check();
}

#[test]
fn what_contradicts_is_refused_in_a_line() {
    for args in [["--reset", "--json"], ["--watch", "--json"]] {
        let output = Command::new(daemon::binary())
            .arg("workers")
            .args(args)
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(2) && said.lines().count() == 1,
            "{said}"
        );
    }
}

#[test]
fn socket_that_is_named_and_where_nobody_answers_is_said_with_the_remedy() {
    for command in [
        &["workers"][..],
        &["workers", "--reset"],
        &["status"],
        &["reload"],
        &["queues"],
    ] {
        let output = Command::new(daemon::binary())
            .args(command)
            .args(["--control", "/nonexistent"])
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command:?}: {said}");
        assert!(
            said.contains("no daemon answers at /nonexistent")
                && said.contains("without --control all that are found are asked"),
            "{command:?}: {said}"
        );
    }
}
