//! Ports that are added, changed and removed by the API, beside those of a file.

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::api::{Answer, Api};
use testkit::daemon::DIR;
use testkit::lan::{self, mac};
use testkit::{Daemon, Driver, Layout, NetNs, Serve, assert_soon, frame, require, wait};

use super::document::Document;

const PORT: &str = "/v1/ports/{name}";
const NETWORK: &str = "/v1/networks/{name}";

/// What a file says of a port of the network, and of the directory of sockets.
pub(super) fn of_file(guest: u8) -> String {
    lan::port(guest.into(), "")
}

/// A network, and these ports on it.
pub(super) fn network(uplink: Option<&str>, ports: &[u8]) -> String {
    let uplink = uplink.map_or_else(String::new, |uplink| format!("uplink = \"{uplink}\"\n"));
    let ports: String = ports.iter().map(|&guest| of_file(guest)).collect();
    format!("[daemon]\nsocket-directories = [\"{DIR}\"]\n[network.lan]\n{uplink}{ports}")
}

/// A daemon of this file, and its API.
pub(super) struct Scene {
    pub(super) daemon: Daemon,
    pub(super) api: Api,
    document: Document,
    serve: Serve,
    _dir: TempDir,
}

impl Scene {
    pub(super) fn new(netns: &NetNs, serve: Serve, interfaces: &[&str], text: &str) -> Self {
        let dir = super::open_dir();
        let (serve, api) = super::with_api(serve, &dir);
        Self {
            daemon: Daemon::start_file(netns, &serve, interfaces, text),
            serve,
            api,
            document: Document::read(),
            _dir: dir,
        }
    }

    /// Starts it again after its end.
    pub(super) fn restart(&mut self, netns: &NetNs) {
        self.daemon.restart_file(netns, &self.serve);
    }

    /// The keys of a port of the network.
    pub(super) fn keys(&self, guest: u8) -> Value {
        let socket = self.daemon.path(&format!("vm{guest}.sock"));
        json!({"network": "lan", "socket-path": socket, "mac": format!("02:00:00:00:00:{guest:02x}")})
    }

    /// Asks for a change of a port, or of `networks/NAME`, and compares the answer with the document.
    #[track_caller]
    pub(super) fn change(&self, method: &str, name: &str, body: &Value) -> Answer {
        let (path, documented) = match name.starts_with("networks/") {
            true => (format!("/v1/{name}"), NETWORK),
            false => (format!("/v1/ports/{name}"), PORT),
        };
        let answer = self.api.change(method, &path, body);
        self.document.check_of(method, documented, &answer);
        answer
    }

    /// The same, where it is done.
    #[track_caller]
    pub(super) fn do_change(&self, method: &str, port: &str, body: &Value, what: &str) {
        let answer = self.change(method, port, body);
        let status = if what == "added" { 201 } else { 200 };
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.json()["what"], what, "{answer:?}");
    }

    /// The same, where it is refused: which key, and what is said.
    #[track_caller]
    pub(super) fn refuse(
        &self,
        method: &str,
        port: &str,
        body: &Value,
        (status, key, words): (u16, Option<&str>, &str),
    ) {
        let answer = self.change(method, port, body);
        assert_eq!(answer.status, status, "{answer:?}");
        let problem = answer.json();
        assert_eq!(problem["key"].as_str(), key, "{problem}");
        let detail = problem["detail"].as_str().expect("words");
        assert!(detail.contains(words), "{detail}");
        assert!(problem["remedy"].as_str().is_some_and(|remedy| remedy.len() > 10));
    }

    pub(super) fn guest(&self, guest: u8) -> Driver {
        lan::guest(&self.daemon, guest.into())
    }

    fn events(&self) -> Vec<(String, String)> {
        let events = self.api.get("/v1/events")["events"].clone();
        let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
        let events = events.as_array().expect("events").iter();
        events
            .map(|event| (text(&event["port"]), text(&event["event"])))
            .collect()
    }
}

pub(super) fn numbered(to: u8, from: u8, number: u32) -> Vec<u8> {
    let mut frame = frame::numbered(number);
    frame[..6].copy_from_slice(&mac(to.into()));
    frame[6..12].copy_from_slice(&mac(from.into()));
    frame
}

/// Sends a frame from one guest to the other, until it arrives.
#[track_caller]
pub(super) fn assert_passes(from: &mut Driver, to: &mut Driver, sent: &[u8]) {
    let arrives = wait::until(wait::SOON, || {
        from.pairs[0].reap_sent();
        from.pairs[0].send(sent, Layout::Whole);
        to.pairs[0]
            .receive(wait::QUIET)
            .is_some_and(|got| got.frame == sent)
    });
    assert!(arrives, "nothing arrives");
}

#[test]
fn port_is_added_changed_live_replaced_and_removed() {
    require!(Root);
    let netns = NetNs::new("api");
    let scene = Scene::new(&netns, Serve::file(), &[], &network(None, &[1]));
    let mut one = scene.guest(1);
    scene.do_change("PUT", "vm2", &scene.keys(2), "added");
    scene.do_change("PUT", "vm2", &scene.keys(2), "nothing");
    let said = scene.api.get("/v1/ports/vm2");
    assert_eq!(
        (&said["source"], &said["configuration"]),
        (&json!("api"), &scene.keys(2))
    );
    assert_eq!(scene.api.get("/v1/ports/vm1")["source"], "file");
    assert_eq!(scene.api.get("/v1/networks/lan")["ports"], json!(["vm1", "vm2"]));
    let mut two = scene.guest(2);
    assert_passes(&mut one, &mut two, &numbered(2, 1, 1));
    // In a VLAN of its own it is alone, and its guest stays.
    scene.do_change(
        "PATCH",
        "vm2",
        &json!({"vlan": 7, "to-guest-bits": "1G"}),
        "changed",
    );
    one.pairs[0].send(&numbered(2, 1, 2), Layout::Whole);
    assert!(
        two.pairs[0].receive(wait::QUIET).is_none(),
        "it is in another VLAN"
    );
    scene.do_change("PATCH", "vm2", &json!({"vlan": null}), "changed");
    assert_passes(&mut one, &mut two, &numbered(2, 1, 3));
    let said = scene.api.get("/v1/ports/vm2");
    assert_eq!(
        (&said["sessions"], &said["configuration"]["vlan"]),
        (&json!(1), &Value::Null)
    );
    // What its guest was told.
    let other = json!({"mac": "02:00:00:00:00:09"});
    scene.refuse(
        "PATCH",
        "vm2",
        &other,
        (409, Some("mac"), "changing mac of port "),
    );
    scene.do_change("PATCH", "vm2?disconnect=true", &other, "replaced");
    assert!(two.await_close(wait::SOON), "its VMM is disconnected");
    scene.do_change("DELETE", "vm2", &Value::Null, "removed");
    assert!(!scene.daemon.path("vm2.sock").exists());
    scene.refuse("DELETE", "vm2", &Value::Null, (404, None, "no port \"vm2\""));
    let told: Vec<String> = scene
        .events()
        .into_iter()
        .filter(|(port, _)| port == "vm2")
        .map(|it| it.1)
        .collect();
    assert_eq!(
        told,
        [
            "added",
            "connected",
            "changed",
            "changed",
            "closed",
            "removed",
            "added",
            "removed"
        ]
    );
}

#[test]
fn what_cannot_be_is_refused_by_key_and_all_is_as_before() {
    require!(Root);
    let netns = NetNs::new("api");
    let scene = Scene::new(&netns, Serve::file().by_root(), &[], &network(None, &[1]));
    scene.do_change("PUT", "vm2", &scene.keys(2), "added");
    let with = |guest: u8, key: &str, value: Value| {
        let mut keys = scene.keys(guest);
        keys[key] = value;
        keys
    };
    let own = json!(scene.daemon.path("control"));
    let neither = "isolated = \"yes\": give true or false";
    for (key, value, words) in [
        ("queus", json!(1), "unknown key"),
        ("queues", json!(200), "1 to 128"),
        ("queues", json!("2"), "give a number"),
        ("isolated", json!("yes"), neither),
        ("network", json!("wan"), "none of that name"),
        ("socket-path", json!("/elsewhere/x"), "socket-directories"),
        ("socket-path", json!("x.sock"), "absolute"),
        ("socket-path", own, "the daemon itself uses this path"),
        ("socket-owner", json!("no such user"), "no such user"),
    ] {
        scene.refuse("PUT", "vm3", &with(3, key, value), (422, Some(key), words));
    }
    let on_lo = json!({"socket-path": scene.daemon.path("x.sock"), "ifname": "lo"});
    let inherited = json!({"fd": 7, "null": true});
    for (body, key, words) in [
        (on_lo, Some("ifname"), "of the file"),
        (inherited, Some("fd"), "put the port into the file"),
        (scene.keys(2), None, "asked for by two ports"),
    ] {
        scene.refuse("PUT", "vm3", &body, (422, key, words));
    }
    let of_file = (409, None, "is one of");
    scene.refuse("PUT", "vm1", &scene.keys(1), of_file);
    scene.refuse("PATCH", "vm1", &json!({"isolated": true}), of_file);
    scene.refuse("DELETE", "vm1", &Value::Null, of_file);
    scene.refuse("PUT", "a%2Fb", &scene.keys(3), (422, None, "a name has"));
    scene.refuse(
        "PUT",
        "vm2?disconnect=true",
        &scene.keys(2),
        (400, None, "this takes no parameters"),
    );
    // What only the host knows: another one's file is there. The port is put back to what it was.
    std::fs::write(scene.daemon.path("taken"), "").expect("ours");
    let taken = json!({"socket-path": scene.daemon.path("taken")});
    scene.refuse(
        "PATCH",
        "vm2?disconnect=true",
        &taken,
        (409, None, "not a socket"),
    );
    assert_eq!(scene.api.get("/v1/ports/vm2")["configuration"], scene.keys(2));
    let _guest = scene.guest(2);
    let new = ["--request", "PUT", "--header", "If-None-Match: *", "--data", "{}"];
    assert_eq!(scene.api.ask("/v1/ports/vm2", &new).status, 412);
    for garbage in ["", "[]", "{", "null", "\"x\"", "{\"queues\":"] {
        let answer = scene
            .api
            .ask("/v1/ports/vm3", &["--request", "PUT", "--data-binary", garbage]);
        assert_eq!(answer.status, 400, "{garbage}: {answer:?}");
        scene.document.check_of("PUT", PORT, &answer);
    }
    let names: Vec<Value> = scene.api.get("/v1/ports")["ports"]
        .as_array()
        .expect("ports")
        .clone();
    assert_eq!(names.len(), 2, "{names:?}");
}

#[test]
fn file_that_is_read_again_leaves_what_was_added_and_takes_over_what_it_names() {
    require!(Root);
    let netns = NetNs::new("api");
    let text = network(None, &[1]);
    let scene = Scene::new(&netns, Serve::file().by_root(), &[], &text);
    scene.do_change("PUT", "vm2", &scene.keys(2), "added");
    scene.do_change("PUT", "vm3", &scene.keys(3), "added");
    let two = scene.guest(2);
    // The file has it now, by the same words, and it goes on.
    scene.daemon.write_file(&format!("{text}{}", of_file(2)));
    let answer = scene.api.change("POST", "/v1/reload", &Value::Null);
    scene.document.check_of("POST", "/v1/reload", &answer);
    assert_eq!(
        (answer.status, &answer.json()["what"]),
        (200, &json!("reloaded")),
        "{answer:?}"
    );
    assert_eq!(scene.api.get("/v1/ports/vm2")["source"], "file");
    assert_eq!(scene.api.get("/v1/ports/vm2")["connected"], true);
    assert_eq!(scene.api.get("/v1/ports/vm3")["source"], "api");
    scene.refuse("DELETE", "vm2", &Value::Null, (409, None, "is one of"));
    // What contradicts what was added is refused, and says so.
    scene
        .daemon
        .write_file(&format!("{text}{}", of_file(3).replace("vm3]", "vm4]")));
    let answer = scene.api.change("POST", "/v1/reload", &Value::Null);
    let said = answer.json()["detail"].as_str().expect("words").to_owned();
    assert!(
        answer.status == 409 && said.contains("added by the API: port vm3"),
        "{said}"
    );
    // Out of the file it goes; what was added stays.
    scene.daemon.reload_with(&text);
    assert_eq!(scene.api.ask("/v1/ports/vm2", &[]).status, 404);
    assert_eq!(scene.api.get("/v1/ports/vm3")["source"], "api");
    drop(two);
}

#[test]
fn who_may_look_only_changes_nothing() {
    require!(Root);
    let netns = NetNs::new("api");
    let dir = super::open_dir();
    let look = dir.path().join("look.sock");
    let serve = Serve::file()
        .by_root()
        .with("--api-mode", "666")
        .with("--api-read-only", look.to_str().expect("UTF-8"));
    let scene = Scene::new(&netns, serve, &[], &network(None, &[]));
    let look = Api::at(look);
    for (method, path, documented) in [
        ("PUT", "/v1/ports/vm1", PORT),
        ("PATCH", "/v1/ports/vm1", PORT),
        ("DELETE", "/v1/ports/vm1", PORT),
        ("POST", "/v1/reload", "/v1/reload"),
        ("POST", "/v1/workers/reset", "/v1/workers/reset"),
    ] {
        let answer = look.change(method, path, &Value::Null);
        assert_eq!(answer.status, 403, "{method}: {answer:?}");
        scene.document.check_of(method, documented, &answer);
        // Everybody may connect there, and only its user and group may change something.
        let (api, stranger) = (scene.api.clone(), path.to_owned());
        let answer = super::as_stranger(move || api.change(method, &stranger, &Value::Null));
        assert_eq!(answer.status, 403, "{method}: {answer:?}");
        scene.document.check_of(method, documented, &answer);
    }
    assert_eq!(look.ask("/v1/ports", &[]).status, 200);
    let api = scene.api.clone();
    assert_eq!(super::as_stranger(move || api.ask("/v1/ports", &[])).status, 200);
    scene.do_change("PUT", "vm1", &scene.keys(1), "added");
}

#[test]
fn what_a_port_may_send_and_gets_is_shown_as_it_is_now() {
    require!(Root);
    let netns = NetNs::new("api");
    let scene = Scene::new(&netns, Serve::file(), &[], &network(None, &[1]));
    let mut keys = scene.keys(2);
    (keys["hairpin"], keys["vlan"]) = (json!(true), json!(7));
    scene.do_change("PUT", "vm2", &keys, "added");
    let by_command = |words: &[&str]| {
        let (status, said) = testkit::daemon::run_to_end(&netns, words);
        assert!(status.success(), "{said}");
        said
    };
    let control = scene.daemon.path("control").display().to_string();
    let assert_shown = |named: &Value, lines: &[&str], listed: &[&str]| {
        let status = scene.daemon.port_named("vm2").expect("a port");
        for (key, value) in named.as_object().expect("keys") {
            assert_eq!(scene.api.get("/v1/ports/vm2")[key], *value, "{key}");
            assert_eq!(status[key], *value, "{key}");
        }
        let text = by_command(&["status", "vm2", "--control", &control]);
        let has = |line: &&str| text.lines().any(|shown| shown == *line);
        assert!(lines.iter().all(has), "{lines:?}:\n{text}");
        let text = by_command(&["port", "list", "--control", &control]);
        let row = text.lines().find(|row| row.contains("vm2.sock")).expect("a row");
        assert!(listed.iter().all(|word| row.contains(word)), "{text}");
    };
    let named = json!({
        "vlan": 7, "trunk": null, "isolated": false, "promiscuous": false, "hairpin": true, "learning": false,
        "guard": true, "ips": [], "router": false, "dhcp_server": false,
    });
    assert_shown(&named, &["vlan: 7", "hairpin: true"], &["VLAN 7 ", " hairpin "]);
    let other = json!({
        "vlan": null, "trunk": [9, "7-8"], "isolated": true, "ips": "192.0.2.10,2001:db8::/64", "router": true,
    });
    scene.do_change("PATCH", "vm2", &other, "changed");
    let named = json!({
        "vlan": null, "trunk": "7-9", "isolated": true, "hairpin": true, "ips": ["192.0.2.10", "2001:db8::/64"],
        "router": true,
    });
    assert_shown(
        &named,
        &[
            "trunk: 7-9",
            "isolated: true",
            "hairpin: true",
            "ips: 192.0.2.10, 2001:db8::/64",
            "router: true",
        ],
        &[
            "VLANs 7-9 with tags",
            "isolated, hairpin, ips 192.0.2.10 2001:db8::/64, router",
        ],
    );
    // What cannot be changes nothing of it.
    let taken = json!({"mac": "02:00:00:00:00:01", "trunk": null});
    scene.refuse("PATCH", "vm2", &taken, (422, Some("mac"), "has this address"));
    assert_eq!(scene.api.get("/v1/ports/vm2")["trunk"], "7-9");
}

#[test]
fn limit_that_is_reached_is_told_once() {
    require!(Root);
    let netns = NetNs::new("api");
    let scene = Scene::new(&netns, Serve::file().by_root(), &[], &network(None, &[1]));
    scene.do_change("PUT", "vm2", &scene.keys(2), "added");
    let (mut one, two) = (scene.guest(1), scene.guest(2));
    scene.do_change("PATCH", "vm2", &json!({"to-guest-packets": 1}), "changed");
    for number in 0..60 {
        one.pairs[0].send(&numbered(2, 1, number), Layout::Whole);
    }
    one.pairs[0].await_sent();
    let told = || {
        scene
            .events()
            .into_iter()
            .filter(|(_, event)| event == "limit-reached")
            .collect::<Vec<_>>()
    };
    assert_soon!(!told().is_empty(), "{:?}", scene.events());
    assert_eq!(told(), [("vm2".to_owned(), "limit-reached".to_owned())]);
    drop(two);
}
