//! Networks that are added, changed and removed by the API, besides those of a file.

use serde_json::{Value, json};
use testkit::daemon::DIR;
use testkit::{Daemon, NetNs, Serve, VethPair, require};

use super::UPLINK;
use super::changes::{Scene, assert_passes, network, numbered};

/// Keys of a port of that network.
fn keys(scene: &Scene, guest: u8, network: &str) -> Value {
    let mut keys = scene.keys(guest);
    keys["network"] = json!(network);
    keys
}

#[test]
fn network_is_added_with_ports_survives_a_restart_and_is_removed() {
    require!(Root);
    let netns = NetNs::new("api");
    let state = format!("[daemon]\nstate = \"{DIR}/added.toml\"\n");
    let text = network(None, &[1]).replacen("[daemon]\n", &state, 1);
    let mut scene = Scene::new(&netns, Serve::file().by_root(), &[], &text);
    scene.do_change("PUT", "networks/blue", &json!({}), "added");
    for guest in [2, 3] {
        scene.do_change(
            "PUT",
            &format!("vm{guest}"),
            &keys(&scene, guest, "blue"),
            "added",
        );
    }
    let (mut second, mut third) = (scene.guest(2), scene.guest(3));
    assert_passes(&mut second, &mut third, &numbered(3, 2, 1));
    drop((second, third));

    scene.daemon.kill();
    scene.restart(&netns);
    let blue = scene.api.get("/v1/networks/blue");
    assert_eq!(
        (&blue["source"], &blue["ports"], &blue["configuration"]),
        (&json!("api"), &json!(["vm2", "vm3"]), &json!({})),
        "{blue}"
    );
    assert_eq!(scene.api.get("/v1/networks/lan")["source"], "file");
    let (mut second, mut third) = (scene.guest(2), scene.guest(3));
    assert_passes(&mut third, &mut second, &numbered(2, 3, 2));
    drop((second, third));

    // The network cannot start, and so its ports cannot: they begin when it does.
    scene.daemon.kill();
    let kept = scene.daemon.path("added.toml");
    let text = std::fs::read_to_string(&kept).expect("kept");
    let text = text.replace("[network.blue]\n", "[network.blue]\nuplink = \"absent\"\n");
    std::fs::write(&kept, text).expect("ours");
    scene.restart(&netns);
    let ports = ["vm2", "vm3"];
    assert_eq!(
        ports.map(|name| scene.daemon.port_named(name).is_some()),
        [false; 2]
    );
    let answer = scene.change("PUT", "networks/blue", &json!({}));
    assert!(answer.body.contains("port vm3 began"), "{}", answer.body);
    assert_eq!(scene.api.get("/v1/networks/blue")["ports"], json!(ports));
    let (_second, _third) = (scene.guest(2), scene.guest(3));

    scene.refuse(
        "DELETE",
        "networks/blue",
        &Value::Null,
        (409, None, "network blue has port(s) vm2, vm3"),
    );
    for guest in [2, 3] {
        scene.do_change("DELETE", &format!("vm{guest}"), &Value::Null, "removed");
    }
    scene.do_change("DELETE", "networks/blue", &Value::Null, "removed");
    scene.refuse(
        "DELETE",
        "networks/blue",
        &Value::Null,
        (404, None, "there is no network \"blue\""),
    );
    scene.daemon.kill();
    scene.restart(&netns);
    assert_eq!(scene.api.ask("/v1/networks/blue", &[]).status, 404);
}

#[test]
fn guests_stay_connected_when_their_network_gets_another_uplink() {
    require!(Root);
    let veth = VethPair::new();
    veth.join_as(UPLINK, "wire1", 2, 1500);
    let scene = Scene::new(&veth.near, Serve::file(), &[UPLINK], &network(Some(UPLINK), &[1]));
    let of_queue = |queue: u32| json!({"uplink": UPLINK, "start-queue": queue});
    scene.refuse(
        "PUT",
        "networks/blue",
        &of_queue(0),
        (422, Some("start-queue"), "queue 0 of nic1"),
    );
    scene.do_change("PUT", "networks/blue", &json!({}), "added");
    scene.do_change("PUT", "vm2", &keys(&scene, 2, "blue"), "added");
    let mut guest = scene.guest(2);
    scene.do_change("PATCH", "networks/blue", &of_queue(1), "changed");
    let runs = |daemon: &Daemon| daemon.status()["networks"][1]["queues"][0]["running"] == true;
    scene.daemon.await_that(|| runs(&scene.daemon));
    scene.do_change("PATCH", "networks/blue", &of_queue(1), "nothing");
    // The default of `host` is true.
    for (host, what) in [(false, "changed"), (false, "nothing"), (true, "changed")] {
        scene.do_change("PATCH", "networks/blue", &json!({"host": host}), what);
        assert_eq!(scene.api.get("/v1/networks/blue")["configuration"]["host"], host);
    }
    scene.do_change(
        "PATCH",
        "networks/blue",
        &json!({"uplink": null, "start-queue": null}),
        "changed",
    );
    assert_eq!(scene.api.get("/v1/networks/blue")["uplink"], Value::Null);
    // The guest is the same one, and frames still reach it.
    scene.do_change("PUT", "vm3", &keys(&scene, 3, "blue"), "added");
    assert_passes(&mut scene.guest(3), &mut guest, &numbered(2, 3, 1));
    assert_eq!(scene.api.get("/v1/ports/vm2")["sessions"], 1);
}

#[test]
fn impossible_network_is_refused_by_key_and_nothing_changes() {
    require!(Root);
    let netns = NetNs::new("api");
    let text = network(None, &[1]);
    let scene = Scene::new(&netns, Serve::file().by_root(), &[], &text);
    let many = json!({"uplink": "lo", "queues": 4_000_000_000_u32});
    // Without a steward's policy only what the file names can be used: others may control the daemon.
    let foreign = "ports or networks of the file have";
    for (body, key, words) in [
        (json!({"uplik": "eth1"}), "uplik", "did you mean \"uplink\"?"),
        (json!({"uplink": 7}), "uplink", "uplink = 7"),
        (many, "queues", "1 to 128 queues"),
        (json!({"uplink": "lo"}), "uplink", foreign),
    ] {
        scene.refuse("PUT", "networks/blue", &body, (422, Some(key), words));
    }
    scene.refuse("PUT", "networks/a%2Fb", &json!({}), (422, None, "a name has"));
    scene.refuse(
        "PATCH",
        "networks/blue",
        &json!({}),
        (404, None, "no network \"blue\""),
    );
    let of_file = (409, None, "network lan is one of");
    scene.refuse("PUT", "networks/lan", &json!({}), of_file);
    scene.refuse("PATCH", "networks/lan", &json!({}), of_file);
    scene.refuse("DELETE", "networks/lan", &Value::Null, of_file);
    // A port of the file cannot depend on what is not in the file: the next start would fail.
    scene.do_change("PUT", "networks/blue", &json!({}), "added");
    let port = super::changes::of_file(2).replace("\"lan\"", "\"blue\"");
    scene.daemon.write_file(&format!("{text}{port}"));
    let answer = scene.api.change("POST", "/v1/reload", &Value::Null);
    assert!(
        answer.status == 409 && answer.body.contains("network blue was added"),
        "{answer:?}"
    );
    // The file takes over what it names.
    scene.daemon.write_file(&format!("{text}[network.blue]\n{port}"));
    let answer = scene.api.change("POST", "/v1/reload", &Value::Null);
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(scene.api.get("/v1/networks/blue")["source"], "file");
    assert!(scene.daemon.port_named("vm2").is_some());
}
