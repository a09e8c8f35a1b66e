//! `port`, `network` and `events`, and what the API shows of what they do.

use serde_json::{Value, json};
use testkit::{NetNs, Serve, require};

use super::changes::{Scene, network};

#[test]
fn commands_change_what_the_api_shows() {
    require!(Root);
    let netns = NetNs::new("api");
    let scene = Scene::new(&netns, Serve::file().by_root(), &[], &network(None, &[1]));
    let control = scene.daemon.path("control").to_str().expect("UTF-8").to_owned();
    let run = |words: &[&str]| {
        let words = [words, &["--control", &control]].concat();
        let (status, said) = testkit::daemon::run_to_end(&netns, &words);
        (status.code(), said)
    };
    let path = scene.daemon.path("vm2.sock");
    let keys = [
        "network=lan",
        &format!("socket-path={}", path.display()),
        "mac=02:00:00:00:00:02",
    ];
    let add = [&["port", "add", "vm2"], &keys[..]].concat();
    let (code, said) = run(&add);
    assert!(
        code == Some(0) && said.starts_with("port vm2 began\nwhat was added ends with the daemon: "),
        "{said}"
    );
    let (code, said) = run(&add);
    assert!(
        code == Some(1) && said.contains("port vm2 already exists: "),
        "{said}"
    );
    let (code, said) = run(&["port", "set", "vm2", "isolated", "vlan=5"]);
    assert!(
        code == Some(0) && said.contains("has changed (isolated, vlan), and goes on"),
        "{said}"
    );
    // What is neither true nor false switches nothing off.
    for value in ["yes", "TRUE", "on", "1"] {
        let (code, said) = run(&["port", "set", "vm2", &format!("isolated={value}")]);
        assert!(
            code == Some(1) && said.contains(&format!("isolated = \"{value}\": give true or false")),
            "{said}"
        );
    }
    assert_eq!(scene.api.get("/v1/ports/vm2")["configuration"]["isolated"], true);
    let (code, said) = run(&["port", "set", "vm2", "mac=02:00:00:00:00:07"]);
    assert!(
        code == Some(1) && said.contains("changing mac of port "),
        "{said}"
    );
    let (code, _) = run(&["port", "set", "vm2", "mac=02:00:00:00:00:07", "--disconnect"]);
    assert_eq!(code, Some(0));
    let (code, said) = run(&["port", "list"]);
    assert!(
        code == Some(0) && said.contains("02:00:00:00:00:07") && said.contains(" api "),
        "{said}"
    );
    let (code, said) = run(&["network", "list", "--json"]);
    let networks: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((code, &networks["networks"][0]["name"]), (Some(0), &json!("lan")));
    let network = |words: &[&str]| run(&[&["network"], words].concat());
    let (code, said) = network(&["add", "blue"]);
    assert!(
        code == Some(0) && said.starts_with("network blue began\n"),
        "{said}"
    );
    let (code, said) = network(&["set", "blue", "uplink=lo"]);
    assert!(code == Some(1) && said.contains("uplink = \"lo\""), "{said}");
    let (code, said) = network(&["list"]);
    let row = said.lines().find(|line| line.starts_with("blue"));
    assert!(
        code == Some(0) && row.is_some_and(|row| row.contains(" api ")),
        "{said}"
    );
    assert_eq!(network(&["remove", "blue"]).0, Some(0));
    let (code, said) = network(&["remove", "blue"]);
    assert!(
        code == Some(1) && said.contains("there is no network \"blue\": `network list`"),
        "{said}"
    );
    let (code, said) = run(&["port", "remove", "vm1"]);
    assert!(code == Some(1) && said.contains("is one of"), "{said}");
    assert_eq!(run(&["port", "remove", "vm2"]).0, Some(0));
    let (code, said) = run(&["events", "--no-wait"]);
    let events: Vec<&str> = said
        .lines()
        .filter_map(|line| line.split(" port vm2 ").nth(1))
        .collect();
    let begins = |at: usize, word: &str| events[at].starts_with(word);
    assert!(
        code == Some(0) && begins(0, "added: ") && begins(1, "changed: isolated, vlan"),
        "{said}"
    );
    // A mistake is found without a daemon.
    let (status, said) = testkit::daemon::run_to_end(&netns, &["port", "add", "x", "queus=1"]);
    assert!(
        status.code() == Some(1) && said.contains("unknown key \"queus\""),
        "{said}"
    );
}
