//! `vhost-af-xdp-bench`: the raw socket benchmarks move the frames that they count, and leave nothing behind.

use std::time::Duration;

use rstest::rstest;
use rustix::process::Signal;
use testkit::bench::start_bench;
use testkit::daemon::{Mode, binary};
use testkit::foreign::Foreign;
use testkit::program::{self, bench, json_of, row};
use testkit::{PacketPort, Running, VethPair, assert_has, frame, packet, require, wait};

/// After so many looks, each of 20 ms at most, a benchmark has taken what was there: a packet socket shows a block that
/// is not full some milliseconds later.
const LOOKS: u64 = 8;

/// It fails with one line that has this word, and leaves nothing.
#[track_caller]
fn assert_refused(pair: &VethPair, args: &[&str], word: &str) {
    start_bench(&pair.near, VethPair::NIC, args).assert_complains(&[word]);
    assert_nothing_attached(pair);
}

/// Starts one that receives, and waits until it does: it shows progress after a second.
fn start_receiving(pair: &VethPair, args: &[&str]) -> Running {
    let mut running = start_bench(&pair.near, VethPair::NIC, args);
    running.await_text(": 1 s");
    running
}

/// Waits until the interface has received 200 further frames, and the benchmark has looked for frames since.
fn await_received(pair: &VethPair, before: u64, running: &mut Running) {
    packet::await_delivered(pair, before + 200);
    running.await_sleeps(LOOKS);
}

fn assert_nothing_attached(pair: &VethPair) {
    let link = pair.near.output_of("ip", &["link", "show", "dev", VethPair::NIC]);
    assert!(!link.contains("xdp"), "{link}");
}

#[rstest]
fn rxdrop_counts_frames_and_tells_which_hints_they_have(
    #[values("auto", "hash,vlan", "none")] hints: &str,
    #[values(false, true)] unaligned: bool,
) {
    require!(Root);
    let pair = VethPair::new();
    let wire = PacketPort::open(&pair.far, VethPair::WIRE);
    let mut args = vec!["rxdrop", "--duration", "0", "--hints", hints];
    args.extend(unaligned.then_some("--unaligned"));
    let mut running = start_receiving(&pair, &args);
    let before = pair.received_by_nic();
    for flow in 0..200 {
        wire.send(&frame::udp(flow, 64));
    }
    await_received(&pair, before, &mut running);
    running.signal(Signal::TERM);
    assert!(running.wait(wait::SOON).success());
    let said = running.said();
    assert_eq!(
        (row(&said, "frames"), row(&said, "ended")),
        ("200".into(), "signal".into())
    );
    let (hash, nothing) = if hints == "none" { (0, 1) } else { (1, 0) };
    // veth has no clock, and the frames no tag.
    for (name, share) in [
        ("with hash", hash),
        ("with vlan", 0),
        ("with timestamp", 0),
        ("with mark", 0),
        ("with nothing", nothing),
        ("of unknown layout", 0),
    ] {
        let found = row(&said, &format!("hints {name}"));
        assert_eq!(found, format!("{share}.000"), "{name}: {said}");
    }
    let asked = row(&said, "hints asked");
    assert_eq!(asked.contains("timestamp"), hints == "auto", "{said}");
    let has_no_clock = row(&said, "hints no latency").contains("veth never has");
    assert_eq!(has_no_clock, hints == "auto", "{said}");
    assert_nothing_attached(&pair);
}

#[rstest]
#[case::too_short(&["txonly", "--size", "59"], "--size 59")]
#[case::longer_than_the_mtu(&["txonly", "--size", "1519"], "1518")]
#[case::queue_beyond(&["rxdrop", "--queue", "1"], "--queue 1")]
#[case::no_batch(&["rxdrop", "--batch", "0"], "'0' for '--batch <N>'")]
#[case::budget_too_small(&["txonly", "--tx-budget", "16"], "16 is not in 32 to 2048")]
#[case::budget_over_the_ring(&["txonly", "--tx-budget", "4096"], "'4096' for '--tx-budget <N>'")]
#[case::no_such_cpu(&["rxdrop", "--cpu", "4000"], "--cpu 4000")]
#[case::bad_address(&["txonly", "--dst-mac", "02:00"], "'02:00' for '--dst-mac <MAC>': choose an address")]
#[case::no_destination(&["txonly", "--dst-macs", "0"], "0 is not in 1 to 1024")]
#[case::destinations_of_none(&["rxdrop", "--dst-macs", "2"], "--dst-macs is for txonly")]
#[case::address_where_none_is_made(&["l2fwd", "--src-mac", "02:00:00:00:00:01"], "--src-mac")]
#[case::negative_duration(&["rxdrop", "--duration", "-1"], "'-1' for '--duration <SECS>': choose seconds")]
#[case::option_of_another(&["rxdrop", "--reps", "2"], "--reps")]
#[case::hints_of_none(&["l2fwd", "--hints", "auto"], "--hints")]
#[case::hints_in_skb_mode(&["rxdrop", "--hints", "hash", "--mode", "skb"], "hints take native mode")]
fn bad_value_is_one_line_that_names_it(#[case] args: &[&str], #[case] named: &str) {
    require!(Root);
    let pair = VethPair::new();
    assert_refused(&pair, args, named);
}

/// A veth has none; what is known of its driver is said in any case.
#[test]
fn forced_zero_copy_is_had_or_refused() {
    require!(Root);
    let pair = VethPair::new();
    start_bench(&pair.near, VethPair::NIC, &["rxdrop", "--force-zero-copy"])
        .assert_complains(&["zero-copy", "queue 0"]);
    assert_nothing_attached(&pair);
    let mut running = start_receiving(&pair, &["rxdrop", "--duration", "0"]);
    running.signal(Signal::TERM);
    assert!(running.wait(wait::SOON).success());
    let said = running.said();
    assert!(row(&said, "driver").starts_with("veth: zero-copy none"), "{said}");
    assert_has(&row(&said, "fallbacks"), &["the driver has no zero-copy"]);
}

#[test]
fn interface_that_goes_down_ends_it_with_the_result_so_far() {
    require!(Root);
    for benchmark in ["rxdrop", "txonly", "l2fwd"] {
        let pair = VethPair::new();
        let mut running = start_receiving(&pair, &[benchmark, "--duration", "0"]);
        pair.near.ip(&["link", "set", VethPair::NIC, "down"]);
        assert!(!running.wait(wait::SOON).success(), "{benchmark}");
        let said = running.said();
        assert_eq!(row(&said, "ended"), "error");
        assert_has(&said, &[&format!("{benchmark} on nic0: the interface is down")]);
    }
}

/// Paths of `bench matrix` over which a veth can do everything.
const PATHS: [&str; 4] = ["native-copy", "skb-copy", "packet-v3", "packet-v2"];

/// The figure of a benchmark by a path.
fn figure(matrix: &serde_json::Value, benchmark: &str, path: &str) -> serde_json::Value {
    let figures = matrix["figures"].as_array().expect("an array");
    let is_it = |it: &&serde_json::Value| it["benchmark"] == benchmark && it["path"] == path;
    let found = figures.iter().find(is_it);
    found
        .unwrap_or_else(|| panic!("no {benchmark} by {path} in {matrix}"))
        .clone()
}

#[rstest]
fn matrix_sends_back_and_counts_each_frame(
    #[values("native-copy", "skb-copy", "packet-v3", "packet-v2", "xdp")] path: &str,
) {
    require!(Root);
    let pair = VethPair::new();
    // A veth takes frames of XDP_TX only where it polls (veth_xdp_xmit, drivers/net/veth.c).
    let _polls = Foreign::attach(&pair.far, VethPair::WIRE, Mode::Native, 0);
    let wire = PacketPort::open(&pair.far, VethPair::WIRE);
    let args = [
        "matrix",
        "--benchmarks",
        "l2fwd",
        "--paths",
        path,
        "--duration",
        "60",
        "--json",
    ];
    let mut running = start_bench(&pair.near, VethPair::NIC, &args);
    running.await_text("l2fwd nic0");
    for seed in 0..50u8 {
        let sent = frame::plain([60, 64, 65, 1513, 1514][usize::from(seed) % 5], seed);
        wire.send(&sent);
        let got = wire.receive(wait::SOON).expect("it comes back");
        let mut expected = sent;
        expected[..12].rotate_left(6);
        frame::assert_same(&got, &expected);
    }
    // A program's count is read at each look.
    running.await_sleeps(LOOKS);
    running.signal(Signal::TERM);
    assert!(running.wait(wait::SOON).success(), "{running}");
    let l2fwd = figure(&json_of(&running.said()), "l2fwd", path);
    assert_eq!(l2fwd["frames"], 50, "{l2fwd}");
    assert_nothing_attached(&pair);
}

#[rstest]
fn matrix_receives_and_counts_each_frame(
    #[values("native-copy", "skb-copy", "packet-v3", "packet-v2", "xdp")] path: &str,
) {
    require!(Root);
    let pair = VethPair::new();
    let wire = PacketPort::open(&pair.far, VethPair::WIRE);
    let args = [
        "matrix",
        "--benchmarks",
        "rxdrop",
        "--paths",
        path,
        "--duration",
        "60",
        "--json",
    ];
    let mut running = start_bench(&pair.near, VethPair::NIC, &args);
    running.await_text("rxdrop nic0");
    let before = pair.received_by_nic();
    for seed in 0..200 {
        wire.send(&frame::plain(64 + usize::from(seed), seed));
    }
    await_received(&pair, before, &mut running);
    running.signal(Signal::TERM);
    assert!(running.wait(wait::SOON).success(), "{running}");
    let rxdrop = figure(&json_of(&running.said()), "rxdrop", path);
    assert_eq!(rxdrop["frames"], 200, "{rxdrop}");
    assert_nothing_attached(&pair);
}

#[rstest]
fn matrix_numbers_the_frames_that_it_sends(
    #[values("native-copy", "skb-copy", "packet-v3", "packet-v2")] path: &str,
    #[values("60", "1514")] size: &str,
) {
    require!(Root);
    let pair = VethPair::new();
    let wire = PacketPort::open(&pair.far, VethPair::WIRE);
    let mut running = start_bench(
        &pair.near,
        VethPair::NIC,
        &[
            "matrix",
            "--benchmarks",
            "txonly",
            "--paths",
            path,
            "--duration",
            "0.3",
            "--size",
            size,
            "--json",
        ],
    );
    for sequence in 0..32u64 {
        let got = wire.receive(wait::SOON).expect("frames come");
        assert_eq!(got.len().to_string(), size);
        assert_eq!(got[42..50], sequence.to_be_bytes());
    }
    assert!(running.wait(wait::SOON).success());
    let txonly = figure(&json_of(&running.said()), "txonly", path);
    assert!(txonly["frames"].as_u64() >= Some(32), "{txonly}");
}

#[test]
fn whole_matrix_has_a_figure_or_a_reason_everywhere() {
    require!(Root);
    let pair = VethPair::new();
    // Both ends in one namespace, for --sender.
    let link = ["link", "add", "one", "type", "veth", "peer", "name", "other"];
    pair.near.ip(&link);
    for end in ["one", "other"] {
        pair.near.ip(&["link", "set", end, "up"]);
    }
    let mut command = pair.near.command(bench());
    command.args([
        "matrix",
        "--ifname",
        "one",
        "--sender",
        "other",
        "--duration",
        "0.3",
        "--json",
    ]);
    let mut running = Running::start(command);
    assert!(
        running.wait(Duration::from_secs(300)).success(),
        "{}",
        running.said()
    );
    let matrix = json_of(&running.said());
    assert_eq!(matrix["figures"].as_array().map(Vec::len), Some(18), "{matrix}");
    for benchmark in ["rxdrop", "txonly", "l2fwd"] {
        for path in PATHS {
            let it = figure(&matrix, benchmark, path);
            assert!(it["frames_per_second"].as_f64() > Some(0.0), "{it}");
            assert!(it["frames"].as_u64() > Some(0), "{it}");
        }
        let it = figure(&matrix, benchmark, "zero-copy");
        let reason = it["reason"].as_str().expect("veth has no zero-copy");
        assert!(reason.contains("no zero-copy"), "{it}");
        let it = figure(&matrix, benchmark, "xdp");
        assert_eq!(it["reason"].is_string(), benchmark == "txonly", "{it}");
    }
    let link = pair.near.output_of("ip", &["link", "show"]);
    assert!(!link.contains("xdp"), "{link}");
}

#[test]
fn matrix_without_a_sender_says_that_no_frame_came() {
    require!(Root);
    let pair = VethPair::new();
    let args = ["matrix", "--benchmarks", "rxdrop", "--paths", "packet-v3"];
    let mut running = start_bench(&pair.near, VethPair::NIC, &args);
    assert!(running.wait(Duration::from_secs(300)).success());
    assert_has(&running.said(), &["no frame came within 10 s"]);
}

#[rstest]
#[case::mode(&["--mode", "skb"], "--paths")]
#[case::endless(&["--duration", "0"], "--duration 0")]
#[case::never(&["--reps", "0"], "0 is not in 1 to 1000")]
#[case::sender_is_itself(&["--sender", "nic0"], "--sender nic0")]
#[case::sender_is_not_there(&["--sender", "nic1"], "--sender nic1")]
fn bad_value_of_a_matrix_is_one_line_that_names_it(#[case] args: &[&str], #[case] named: &str) {
    require!(Root);
    let pair = VethPair::new();
    assert_refused(&pair, &[&["matrix"], args].concat(), named);
}

/// The benchmarks were a command of the daemon's, and scripts name it.
#[test]
fn command_of_the_daemon_runs_the_benchmarks() {
    require!(Root);
    let pair = VethPair::new();
    let raw = ["bench", "txonly", "--ifname", VethPair::NIC, "--duration", "0.3"];
    for (args, words) in [
        (&raw[..], "frames per second"),
        (&["bench", "--help"], "Usage: vhost-af-xdp-bench [OPTIONS]"),
        (&["complete", "--", "vhost-af-xdp", "bench", "rx"], "rxdrop\t"),
    ] {
        // Beside the daemon, or there.
        let path = format!("PATH={}", bench().parent().expect("a directory").display());
        let mut command = pair.near.command("env");
        command.arg(path).arg(binary()).args(args);
        let mut running = Running::start(command);
        assert!(running.wait(wait::SOON).success(), "{running}");
        assert!(running.said().contains(words), "{words}: {running}");
    }
}

#[test]
fn without_the_program_of_the_benchmarks_the_command_names_it() {
    require!(Root);
    let (pair, dir) = (VethPair::new(), tempfile::tempdir().expect("a directory"));
    let mut command = pair.near.command("env");
    command.arg("PATH=/nowhere").arg(program::daemon_in(dir.path()));
    command.args(["bench", "rxdrop"]);
    Running::start(command).assert_complains(&["cannot run vhost-af-xdp-bench: install it"]);
}
