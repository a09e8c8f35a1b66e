//! docs/openapi.json against the running server: every path, every method, every answer by its schema.

use jsonschema::Validator;
use serde_json::{Value, json};
use testkit::api::{Answer, Api};
use testkit::{Driver, DriverConfig, Serve, frame, require};

const TEXT: &str = include_str!("../../../../docs/openapi.json");

pub(crate) struct Document(Value);

impl Document {
    pub(crate) fn read() -> Self {
        Self(serde_json::from_str(TEXT).expect("JSON"))
    }

    fn paths(&self) -> Vec<&String> {
        self.0["paths"].as_object().expect("paths").keys().collect()
    }

    /// Whether a path has a method.
    fn has(&self, path: &str, method: &str) -> bool {
        self.0["paths"][path][method.to_lowercase()].is_object()
    }

    /// Of what a path answers to a method with this status. What it does not have is answered as where it is.
    fn validator(&self, method: &str, path: &str, answer: &Answer) -> Validator {
        let methods = &self.0["paths"][path];
        let any = || methods.as_object().and_then(|methods| methods.values().next());
        let method = methods.get(method.to_lowercase()).or_else(any);
        let responses = &method.expect("a method")["responses"];
        let status = answer.status.to_string();
        let response = responses.get(&status).unwrap_or(&responses["default"]);
        let schema = &response["content"][&answer.media_type]["schema"];
        assert!(schema.is_object(), "{path} says nothing of {answer:?}");
        let mut schema = schema.clone();
        schema["components"] = self.0["components"].clone();
        jsonschema::options().build(&schema).expect("a schema")
    }

    #[track_caller]
    fn check(&self, path: &str, answer: &Answer) {
        self.check_of("GET", path, answer);
    }

    /// The same, of another method.
    #[track_caller]
    pub(crate) fn check_of(&self, method: &str, path: &str, answer: &Answer) {
        let body = match answer.media_type.ends_with("json") {
            true => answer.json(),
            false => json!(answer.body),
        };
        let validator = self.validator(method, path, answer);
        let errors: Vec<String> = validator
            .iter_errors(&body)
            .map(|error| format!("{} at {}", error, error.instance_path))
            .collect();
        assert!(errors.is_empty(), "{path}: {}\n{body:#}", errors.join("\n"));
    }
}

/// A path that has a name in it, of the first thing of its kind, if there is one.
fn filled(path: &str, api: &Api) -> Option<String> {
    let Some((all, _)) = path.split_once("/{name}") else {
        return Some(path.to_owned());
    };
    let kind = all.rsplit('/').next().expect("a kind");
    let name = api.get(all)[kind][0]["name"].as_str()?.to_owned();
    Some(path.replace("{name}", &name.replace('/', "%2F")))
}

fn check_all(document: &Document, api: &Api) {
    for path in document
        .paths()
        .into_iter()
        .filter(|path| document.has(path, "get"))
    {
        let Some(asked) = filled(path, api) else { continue };
        let answer = api.ask(&asked, &[]);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        document.check(path, &answer);
    }
}

#[test]
fn every_answer_is_as_the_document_says() {
    require!(Root);
    let document = Document::read();
    let dir = super::open_dir();
    let (mut rig, api) = super::rig(&dir);
    rig.assert_passes_both_ways();
    check_all(&document, &api);
    let port = &api.get("/v1/ports")["ports"][0];
    assert_eq!(
        (&port["connected"], &port["lanes"][0]["running"]),
        (&json!(true), &json!(true))
    );
    drop(rig.driver);
    rig.daemon
        .await_port(0, "no guest", |port| port["connected"] == false);
    check_all(&document, &api);
    let closed = &api.get("/v1/ports")["ports"][0]["last_closed"];
    assert_eq!(closed["reason"], "disconnected", "{closed}");
}

#[test]
fn networks_and_their_ports_are_as_the_document_says() {
    require!(Root);
    let document = Document::read();
    let dir = super::open_dir();
    let (serve, api) = super::with_api(Serve::file(), &dir);
    let mut rig = super::rig_with_network(&serve);
    let guest = Driver::connect(&rig.daemon.path("vm2.sock"), &DriverConfig::default()).expect("accepted");
    rig.daemon
        .await_port(1, "a lane runs", |port| port["lanes"][0]["running"] == true);
    rig.assert_passes_both_ways();
    check_all(&document, &api);
    let networks = api.get("/v1/networks")["networks"].clone();
    let lan = &networks[0];
    assert_eq!(
        (&lan["name"], &lan["uplink"], &lan["ports"]),
        (&json!("lan"), &json!("nic1"), &json!(["vm2"]))
    );
    assert_eq!(lan["queues"][0]["running"], true, "{lan}");
    let network_of = |port: &str| api.get(&format!("/v1/ports/{port}"))["network"].clone();
    assert_eq!(
        (network_of("vm1"), network_of("vm2")),
        (json!(null), json!("lan"))
    );
    let metrics = api.ask("/metrics", &[]).body;
    for line in [
        "vhost_af_xdp_frames_total{network=\"\",port=\"vm1\",direction=\"to_guest\"}",
        "vhost_af_xdp_frames_total{network=\"lan\",port=\"vm2\",direction=\"to_guest\"} 0",
        "vhost_af_xdp_network_info{network=\"lan\",uplink=\"nic1\",",
        "vhost_af_xdp_network_impaired{network=\"lan\"} 0",
        "vhost_af_xdp_drops_total{network=\"lan\",port=\"\",reason=\"group_limited\",source=\"program\"} 0",
    ] {
        assert!(metrics.contains(line), "no {line} in:\n{metrics}");
    }
    drop(guest);
}

#[test]
fn what_is_refused_is_refused_as_the_document_says() {
    require!(Root);
    let document = Document::read();
    let (netns, dir) = (testkit::NetNs::new("api"), super::open_dir());
    let (_daemon, api) = super::on_null(&netns, &dir);
    let check = |path: &str, asked: &str, options: &[&str], status: u16| {
        let answer = api.ask(asked, options);
        assert_eq!(answer.status, status, "{asked} {options:?}: {answer:?}");
        let method = options.iter().position(|option| *option == "--request");
        document.check_of(method.map_or("GET", |at| options[at + 1]), path, &answer);
        let remedy = answer.json()["remedy"].as_str().expect("words").to_owned();
        assert!(remedy.len() > 10, "{remedy}");
    };
    for path in document.paths() {
        let Some(asked) = filled(path, &api) else { continue };
        let methods = ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
        for method in methods.into_iter().filter(|method| !document.has(path, method)) {
            check(path, &asked, &["--request", method], 405);
        }
        if !document.has(path, "get") {
            continue;
        }
        let body = ["--request", "GET", "--data", "{}"];
        check(path, &asked, &body, 413);
        check(path, &format!("{asked}?what=ever"), &[], 400);
        let head = api.ask(&asked, &["--head"]);
        assert_eq!(head.status, 200, "{head:?}");
    }
    check("/v1/ports/{name}", "/v1/ports/nobody", &[], 404);
    check("/v1/networks/{name}", "/v1/networks/nowhere", &[], 404);
    // Its ports are those of the command line.
    let [put, keys] = [["--request", "PUT"], ["--data", "{}"]];
    check("/v1/ports/{name}", "/v1/ports/vm1", &[put, keys].concat(), 409);
    check("/v1/reload", "/v1/reload", &["--request", "POST"], 409);
    for wrong in ["/v1/events?wait=21", "/v1/events?after=x"] {
        check("/v1/events", wrong, &[], 400);
    }
    for nothing in [
        "/",
        "/v1",
        "/v1/",
        "/v1/port",
        "/v2/status",
        "/v1/status/",
        "/%2e%2e",
    ] {
        assert_eq!(api.ask(nothing, &["--path-as-is"]).status, 404, "{nothing}");
    }
}

#[test]
fn counters_and_metrics_say_what_status_says() {
    require!(Root);
    let dir = super::open_dir();
    let (mut rig, api) = super::rig(&dir);
    for seed in 0..10 {
        rig.assert_to_guest(&frame::plain(200, seed));
    }
    let status = rig.daemon.port(0);
    let of = |counters: &Value| -> u64 {
        let all = counters.as_array().expect("counters");
        let named = all.iter().find(|counter| counter["name"] == "to_guest_frames");
        named.expect("it is counted")["value"].as_u64().expect("a number")
    };
    let counters = api.get("/v1/counters");
    let value = of(&counters["ports"][0]["pairs"][0]["counters"]);
    assert_eq!(value, of(&status["lanes"][0]["counters"]));
    assert!(value >= 10, "{value}");
    let name = counters["ports"][0]["name"].as_str().expect("a name");
    let metrics = api.ask("/metrics", &[]).body;
    let line =
        format!("vhost_af_xdp_frames_total{{network=\"\",port=\"{name}\",direction=\"to_guest\"}} {value}\n");
    assert!(metrics.contains(&line), "no {line} in:\n{metrics}");
}

#[test]
fn events_come_in_order_by_both_ways() {
    require!(Root);
    let document = Document::read();
    let (netns, dir) = (testkit::NetNs::new("api"), super::open_dir());
    let (daemon, api) = super::on_null(&netns, &dir);
    let stream = [
        "--no-buffer",
        "--header",
        "Accept: text/event-stream",
        "--max-time",
        "20",
    ];
    let streaming = {
        let api = api.clone();
        std::thread::spawn(move || api.ask("/v1/events", &stream))
    };
    for _ in 0..3 {
        let guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
        drop(guest);
        daemon.await_port(0, "no guest", |port| port["connected"] == false);
    }
    let (mut last, mut events) = (0, Vec::new());
    while events.len() < 6 {
        let answer = api.ask(&format!("/v1/events?after={last}&wait=20"), &[]);
        document.check("/v1/events", &answer);
        let answer = answer.json();
        assert_eq!(answer["lost"], 0);
        let more = answer["events"].as_array().expect("events").clone();
        assert!(!more.is_empty(), "nothing in time");
        last = answer["last"].as_u64().expect("a number");
        events.extend(more);
    }
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence"], at + 1);
        let what = if at % 2 == 0 { "connected" } else { "closed" };
        assert_eq!(event["event"], what, "{event}");
    }
    assert_eq!(events[1]["reason"], "disconnected");
    // From a place on.
    let rest = api.get("/v1/events?after=4")["events"].clone();
    assert_eq!(rest.as_array().expect("events")[..], events[4..]);
    let streamed = streaming.join().expect("it ends").body;
    let data: Vec<Value> = streamed
        .lines()
        .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
        .collect();
    assert_eq!(data, events);
    let again = [
        "--header",
        "Last-Event-ID: 5",
        stream[1],
        stream[2],
        "--max-time",
        "5",
        "--no-buffer",
    ];
    let answer = api.ask("/v1/events", &again);
    assert!(
        answer.body.contains("id: 6\n") && !answer.body.contains("id: 5\n"),
        "{answer:?}"
    );
}
