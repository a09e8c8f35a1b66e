//! Filter rules of ports of a network, by the file and by the API: they change while guests are there, and ten thousand
//! are taken.

use serde_json::{Value, json};
use testkit::api::{open_dir, with_api};
use testkit::daemon::DIR;
use testkit::filter_rules::{HOST, tables as rules, udp};
use testkit::lan::{BROADCAST, Lan, STRANGER, file, mac, port};
use testkit::{DriverConfig, Serve, VethPair, assert_has, require, wait};

/// What the uplink gets, of these tests' frames.
fn on_the_wire(lan: &Lan, count: usize) -> Vec<Vec<u8>> {
    let ours = |frame: &Vec<u8>| frame[..6] == STRANGER || frame[..6] == BROADCAST && frame[6] == 2;
    let all = std::iter::from_fn(|| lan.wire.receive(wait::SOON));
    all.filter(ours).take(count).collect()
}

fn counter(lan: &Lan, guest: usize, name: &str) -> u64 {
    lan.daemon.counter_of(&format!("vm{guest}"), name)
}

#[test]
fn reload_applies_other_rules_and_the_guest_stays() {
    require!(Root);
    let keys = [""];
    let text = |list: &[&str]| format!("{}{}", file(Some(VethPair::NIC), &keys), rules(0, list));
    let first = "direction=from-guest action=allow protocol=udp destination-ports=1";
    let mut lan = Lan::on(
        VethPair::new(),
        &Serve::file(),
        &text(&[first]),
        1,
        &DriverConfig::default(),
    );
    let sent = |port| udp(STRANGER, mac(0), HOST, port);
    for port in [2, 1] {
        lan.send(0, &sent(port));
    }
    assert_eq!(on_the_wire(&lan, 1), [sent(1)]);
    let said = lan.daemon.reload_with(&text(&[
        "direction=from-guest action=allow protocol=udp destination-ports=2",
    ]));
    assert_has(&said, &["port vm0 has changed (rule), and goes on"]);
    for port in [1, 2] {
        lan.send(0, &sent(port));
    }
    assert_eq!(on_the_wire(&lan, 1), [sent(2)]);
    let said = lan.daemon.reload_with(&text(&[]));
    assert_has(&said, &["port vm0 has changed (rule), and goes on"]);
    lan.send(0, &sent(3));
    assert_eq!(on_the_wire(&lan, 1), [sent(3)]);
    assert_eq!(lan.daemon.port_named("vm0").expect("it is there")["sessions"], 1);
    // A mistake is told with its line, and nothing changes.
    let wrong = text(&[first, "direction=from-guest action=allow destination-ports=1"]);
    // One more line is the mode.
    let line = wrong.lines().count() + 1;
    lan.daemon.write_file(&wrong);
    let (done, said) = lan.daemon.reload();
    assert!(
        !done
            && said.contains(&format!(
                "line {line}: port vm0: rule 2: destination-ports: needs protocol tcp"
            )),
        "{said}"
    );
}

#[test]
fn rules_of_the_api_hold_for_every_frame_after_the_answer() {
    require!(Root);
    let dir = open_dir();
    let (serve, api) = with_api(Serve::file(), &dir);
    let text = format!(
        "[daemon]\nsocket-directories = [\"{DIR}\"]\n[network.lan]\nuplink = \"{}\"\n",
        VethPair::NIC
    );
    let mut lan = Lan::on(VethPair::new(), &serve, &text, 0, &DriverConfig::default());
    let socket = lan.daemon.path("vm0.sock");
    let added = api.change(
        "PUT",
        "/v1/ports/vm0",
        &json!({"network": "lan", "socket-path": socket, "mac": "02:00:00:00:00:00"}),
    );
    assert_eq!(added.status, 201, "{added:?}");
    lan.guests = testkit::lan::guests(&lan.daemon, 1, &DriverConfig::default());
    let path = "/v1/ports/vm0/rules";
    let put = |rules: &Value| {
        let answer = api.change("PUT", path, rules);
        assert_eq!(answer.status, 200, "{answer:?}");
    };
    let only = |port: u16| {
        let (direction, protocol) = ("from-guest", "udp");
        json!({"rules": [{
            "direction": direction, "action": "allow", "protocol": protocol, "destination-ports": [port],
        }]})
    };
    let sent = |port| udp(STRANGER, mac(0), HOST, port);
    for round in 0..100u16 {
        // What the last one allowed is known to the cache, and refused from now on.
        put(&only(1000 + round));
        lan.guests[0].pairs[0].reap_sent();
        for port in [999 + round, 1000 + round] {
            lan.send(0, &sent(port));
        }
        assert_eq!(on_the_wire(&lan, 1), [sent(1000 + round)], "{round}");
    }
    let seen = api.get(path);
    assert_eq!(seen["rules"][0]["frames"], 1, "{seen}");
    assert_eq!(seen["rules"][0]["destination-ports"], "1099");
    assert_eq!(
        (
            &seen["from_guest"]["default"],
            &seen["from_guest"]["default_frames"]
        ),
        (&json!("deny"), &json!(1))
    );
    assert_eq!(seen["to_guest"]["default"], "allow");
    // What was told can be said again, and changes nothing: counters go on.
    put(&json!({"rules": seen["rules"]}));
    assert_eq!(api.get(path)["rules"][0]["frames"], 1);
    assert_eq!(counter(&lan, 0, "from_guest_filter"), 100);
    let port = api.get("/v1/ports/vm0");
    assert_eq!(port["filter"]["rules"], 1);
    assert_eq!(port["configuration"]["rule"][0]["protocol"], "udp", "{port}");
    put(
        &json!({"rules": [{"direction": "to-guest", "action": "deny", "mark": 7}], "to-guest-default": "allow"}),
    );
    assert_eq!(api.get(path)["rules"][0]["mark"], 7);
    // No frame from another port has one, nor one of a NIC that notes none.
    lan.wire.send(&udp(mac(0), STRANGER, HOST, 1));
    assert_eq!(lan.received(0), udp(mac(0), STRANGER, HOST, 1));
    // None any more.
    put(&json!({"rules": []}));
    lan.send(0, &sent(1));
    assert_eq!(on_the_wire(&lan, 1), [sent(1)]);
    let answer = api.change(
        "PUT",
        path,
        &json!({"rules": [{"direction": "from-guest", "action": "no"}]}),
    );
    assert_eq!(
        (answer.status, &answer.json()["key"]),
        (422, &json!("rule")),
        "{answer:?}"
    );
    assert_eq!(api.ask("/v1/ports/vm9/rules", &[]).status, 404);
}

#[test]
fn ten_thousand_rules_are_taken_by_the_api_and_one_more_is_not() {
    require!(Root);
    let dir = open_dir();
    let (serve, api) = with_api(Serve::file(), &dir);
    let text = format!("[daemon]\nsocket-directories = [\"{DIR}\"]\n[network.lan]\n");
    let netns = testkit::NetNs::new("filter");
    let daemon = testkit::Daemon::start_file(&netns, &serve, &[], &text);
    let keys = json!({"network": "lan", "socket-path": daemon.path("vm0.sock"), "mac": "02:00:00:00:00:00"});
    assert_eq!(api.change("PUT", "/v1/ports/vm0", &keys).status, 201);
    let rule = |at: usize| {
        let [.., a, b] = at.to_be_bytes();
        json!({"direction": "to-guest", "action": "allow", "protocol": "tcp", "source": format!("10.0.{a}.{b}")})
    };
    let body = dir.path().join("rules.json");
    let data = format!("@{}", body.display());
    let put = |count: usize| {
        let list: Vec<Value> = (0..count).map(rule).collect();
        std::fs::write(&body, json!({"rules": list}).to_string()).expect("room");
        api.ask("/v1/ports/vm0/rules", &["--request", "PUT", "--data", &data])
    };
    let answer = put(10_000);
    assert_eq!(answer.status, 200, "{answer:?}");
    let seen = api.get("/v1/ports/vm0/rules");
    assert_eq!(seen["rules"].as_array().map(Vec::len), Some(10_000));
    assert!(
        seen["to_guest"]["memory_bytes"]
            .as_u64()
            .is_some_and(|bytes| bytes < 4 << 20)
    );
    let answer = put(10_001);
    assert_eq!(answer.status, 422, "{answer:?}");
    assert_eq!(
        api.get("/v1/ports/vm0/rules")["rules"].as_array().map(Vec::len),
        Some(10_000)
    );
}

#[test]
fn file_has_room_for_ten_thousand_rules_as_tables_and_is_bounded() {
    let netns = testkit::NetNs::new("filter");
    let dir = tempfile::tempdir().expect("room");
    let path = dir.path().join("c.toml");
    let check = |text: &str| {
        std::fs::write(&path, text).expect("room");
        let args = ["serve", "--check", "--config", path.to_str().expect("ASCII")];
        testkit::daemon::run_to_end(&netns, &args)
    };
    let rule = |at: usize| {
        let [.., a, b] = at.to_be_bytes();
        format!(
            "direction=to-guest action=allow protocol=tcp source=10.0.{a}.{b} destination-ports=1000-2000"
        )
    };
    let list: Vec<String> = (0..10_000).map(rule).collect();
    let list: Vec<&str> = list.iter().map(String::as_str).collect();
    let port = port(0, "").replace(DIR, "/run");
    let text = format!("[network.lan]\n{port}{}", rules(0, &list));
    assert!(text.len() > 1 << 20, "{}", text.len());
    let (status, said) = check(&text);
    assert!(status.success() && said.contains("and 9"), "{said}");
    let (status, said) = check(&format!("#{}", " ".repeat(16 << 20)));
    assert!(
        !status.success() && said.contains("it is longer than 16384 KiB"),
        "{said}"
    );
}
