//! The control socket: its protocol, and clients that do not keep to it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::{Daemon, DriverConfig, NetNs, Rig, Serve, VethPair, assert_soon, holdings, require, wait};

fn connect(daemon: &Daemon) -> UnixStream {
    let stream = UnixStream::connect(daemon.path("control")).expect("it listens");
    stream.set_read_timeout(Some(wait::SOON)).expect("a socket");
    stream
}

/// A connection on which several requests are answered.
struct Client(BufReader<UnixStream>);

impl Client {
    fn of(daemon: &Daemon) -> Self {
        Self(BufReader::new(connect(daemon)))
    }

    fn ask(&mut self, request: &Value) -> Value {
        self.0
            .get_mut()
            .write_all(format!("{request}\n").as_bytes())
            .expect("it reads");
        self.next()
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("an answer");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }
}

#[test]
fn parts_of_the_state_are_answered_by_path() {
    require!(Root);
    let netns = NetNs::new("control");
    let daemon = Daemon::start(&netns, &Serve::null());
    let mut client = Client::of(&daemon);
    let all = &client.ask(&json!({"get": []}))["ok"];
    let name = all["ports"][0]["name"].as_str().expect("a name");
    assert_eq!(
        client.ask(&json!({"get": ["ports", name, "mac"]}))["ok"],
        all["ports"][0]["mac"]
    );
    assert_eq!(client.ask(&json!({"get": ["version"]}))["ok"], all["version"]);
    let rules = &client.ask(&json!({"get": ["ports", name, "rules"]}))["ok"];
    assert_eq!(rules["from_guest"]["default"], "allow");
    let kind = |client: &mut Client, request: Value| {
        let error = client.ask(&request)["error"].clone();
        assert!(
            error["message"].is_string() && error["remedy"].is_string(),
            "{error}"
        );
        error["kind"].as_str().expect("a kind").to_owned()
    };
    assert_eq!(
        kind(&mut client, json!({"get": ["ports", "no", "mac"]})),
        "no-such"
    );
    assert_eq!(
        kind(&mut client, json!({"get": ["ports", "no", "rules"]})),
        "no-port"
    );
    assert_eq!(kind(&mut client, json!({"change": "reload"})), "no-file");
    assert_eq!(
        client.ask(&json!({"change": "reset-workers"}))["ok"]["what"],
        "reset"
    );
    assert_eq!(kind(&mut client, json!({"shut": "down"})), "no-request");
    assert_eq!(client.0.read(&mut [0]).expect("closed"), 0, "it is given up");
}

#[test]
fn events_are_sent_at_once_and_as_they_happen() {
    require!(Root);
    let netns = NetNs::new("control");
    let daemon = Daemon::start(&netns, &Serve::null());
    let mut client = Client::of(&daemon);
    assert_eq!(
        client.ask(&json!({"events": {"after": 7}}))["ok"],
        json!({"lost": 0, "events": []})
    );
    let guest = testkit::Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    let event = &client.next()["ok"]["events"][0];
    assert_eq!(
        (&event["sequence"], &event["event"]),
        (&json!(1), &json!("connected"))
    );
    drop(guest);
    assert_eq!(client.next()["ok"]["events"][0]["event"], "closed");
}

#[test]
fn hostile_clients_cost_no_frame_and_others_are_answered() {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC);
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::default());
    rig.post(64, &[2048]);
    let pid = rig.daemon.process().pid();
    let _ = rig.daemon.status();
    let before = holdings::steady(pid, wait::QUIET);
    // A thousand that say nothing, half a line, or ask and do not read.
    let mut held = Vec::new();
    for at in 0..1000 {
        let mut stream = connect(&rig.daemon);
        stream.set_nonblocking(true).expect("a socket");
        let words: &[u8] = match at % 3 {
            0 => b"",
            1 => b"{\"get\": [",
            _ => b"{\"get\": []}\n",
        };
        // It may have been closed for another one.
        let _ = stream.write_all(words);
        held.push(stream);
        if at % 100 == 0 {
            rig.assert_passes_both_ways();
            assert_eq!(rig.daemon.port(0)["connected"], true);
        }
    }
    rig.assert_passes_both_ways();
    assert_eq!(rig.daemon.port(0)["connected"], true);
    // Those who send what is no request, without end, are given up.
    for flood in [
        &[b'x'; 1 << 16][..],
        &b"reload\n".repeat(1 << 12),
        &b"[[[[[[[[".repeat(1 << 13),
    ] {
        let mut stream = connect(&rig.daemon);
        stream.set_write_timeout(Some(wait::SOON)).expect("a socket");
        let ended = (0..1000).any(|_| stream.write_all(flood).is_err());
        assert!(ended, "all of it was read");
        rig.assert_passes_both_ways();
    }
    // One asks all the time, and does not read.
    let mut deaf = connect(&rig.daemon);
    deaf.set_write_timeout(Some(Duration::from_millis(100)))
        .expect("a socket");
    while deaf.write_all(&b"{\"get\": []}\n".repeat(100)).is_ok() {}
    rig.assert_passes_both_ways();
    assert_eq!(rig.daemon.port(0)["connected"], true);
    drop((held, deaf));
    assert_soon!(
        holdings::of(pid).is_within(&before),
        "before {before:?}, after {:?}",
        holdings::of(pid)
    );
}
