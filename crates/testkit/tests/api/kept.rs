//! Added ports are there after a restart, where the file names a place that keeps them.

use serde_json::{Value, json};
use testkit::daemon::DIR;
use testkit::{NetNs, Serve, assert_has, assert_soon, require};

use super::changes::{Scene, network};

/// The file of a network with a port, and a place for those that are added.
fn text() -> String {
    network(None, &[1]).replacen(
        "[daemon]\n",
        // The command line has others of these keys.
        &format!("[daemon]\nstate = \"{DIR}/ports.toml\"\ncontrol = \"none\"\napi-mode = \"660\"\n"),
        1,
    )
}

/// Kills the daemon in a moment that it does not choose, and starts it again.
fn restart(scene: &mut Scene, netns: &NetNs) {
    scene.daemon.kill();
    scene.restart(netns);
}

#[test]
fn added_ports_are_there_after_a_restart() {
    require!(Root);
    let netns = NetNs::new("api");
    let mut scene = Scene::new(&netns, Serve::file().by_root(), &[], &text());
    let mut keys = scene.keys(2);
    keys["rule"] =
        json!([{"direction": "to-guest", "action": "allow", "protocol": "tcp", "destination-ports": "22"}]);
    scene.do_change("PUT", "vm2", &keys, "added");
    scene.do_change("PUT", "vm3", &scene.keys(3), "added");
    let done = scene.change("PATCH", "vm2", &json!({"isolated": true})).json()["done"].to_string();
    assert_has(
        &done,
        &["what was added is kept in ", "ports.toml for the next start"],
    );
    restart(&mut scene, &netns);
    let port = scene.api.get("/v1/ports/vm2");
    assert_eq!(
        (&port["source"], &port["isolated"]),
        (&json!("api"), &json!(true)),
        "{port}"
    );
    let rules = scene.api.get("/v1/ports/vm2/rules");
    assert_eq!(rules["rules"][0]["destination-ports"], "22", "{rules}");
    assert!(scene.daemon.port_named("vm3").is_some());
    drop(scene.guest(3));
    scene.do_change("DELETE", "vm3", &Value::Null, "removed");
    // The new file cannot be written.
    let new = scene.daemon.path("ports.toml.new");
    std::fs::create_dir(&new).expect("ours");
    let done = scene.change("PUT", "vm4", &scene.keys(4)).json()["done"].to_string();
    assert_has(&done, &["port vm4 began", "NOT kept in "]);
    let control = scene.daemon.path("control").to_str().expect("UTF-8").to_owned();
    let words = ["port", "set", "vm4", "isolated", "--control", &control];
    let (status, said) = testkit::daemon::run_to_end(&netns, &words);
    assert!(
        status.code() == Some(1) && said.contains("the change is in force, but NOT kept in "),
        "{said}"
    );
    assert_eq!(scene.api.get("/v1/ports/vm4")["isolated"], true);
    std::fs::remove_dir(&new).expect("ours");
    restart(&mut scene, &netns);
    let names = ["vm3", "vm4"].map(|name| scene.daemon.port_named(name).is_some());
    assert_eq!(names, [false, false]);
    // One that the file names is the file's from then on.
    scene.daemon.reload_with(&(text() + &super::changes::of_file(2)));
    restart(&mut scene, &netns);
    assert_eq!(scene.api.get("/v1/ports/vm2")["source"], "file");
}

#[test]
fn kept_port_that_is_not_possible_any_more_is_left_out_and_logged() {
    require!(Root);
    let netns = NetNs::new("api");
    let mut scene = Scene::new(&netns, Serve::file().by_root(), &[], &text());
    scene.do_change("PUT", "vm2", &scene.keys(2), "added");
    scene.do_change("PUT", "vm3", &scene.keys(3), "added");
    // The file has the address of one of them now; an attacker who was the daemon names an interface for another.
    let other = super::changes::of_file(4).replace("00:04", "00:02");
    scene.daemon.write_file(&(text() + &other));
    let kept = scene.daemon.path("ports.toml");
    let before = std::fs::read_to_string(&kept).expect("kept");
    let thief = "[port.thief]\nifname = \"lo\"\nsocket-path = \"";
    let thief = format!(
        "{before}\n{thief}{}\"\n",
        scene.daemon.path("thief.sock").display()
    );
    let outside = "[port.outside]\nnetwork = \"lan\"\nsocket-path = \"/run/elsewhere/x.sock\"\n";
    std::fs::write(&kept, format!("{thief}{outside}")).expect("ours");
    restart(&mut scene, &netns);
    let names =
        ["vm1", "vm2", "vm3", "vm4", "thief", "outside"].map(|name| scene.daemon.port_named(name).is_some());
    assert_eq!(names, [true, false, true, true, false, false]);
    assert_has(
        &scene.daemon.said(),
        &[
            "port vm2: mac 02:00:00:00:00:02",
            "port thief: ifname = \"lo\"",
            "port outside: socket-path",
        ],
    );
    let failed = || scene.daemon.status()["configuration"]["failed"].to_string();
    assert_has(&failed(), &["port vm2 could not start"]);
    // It is kept meanwhile, also when another version cannot start, and is there again once the file allows it.
    let (mut keys, socket) = (scene.keys(2), scene.daemon.path("vm2.sock"));
    keys["mac"] = "02:00:00:00:00:22".into();
    std::fs::write(&socket, "").expect("ours");
    scene.refuse("PUT", "vm2", &keys, (409, None, "cannot listen"));
    assert_has(&failed(), &["port vm2 could not start"]);
    std::fs::remove_file(&socket).expect("ours");
    scene.do_change("PUT", "vm5", &scene.keys(5), "added");
    let said = scene.daemon.reload_with(&text());
    assert_has(&said, &["port vm2 began"]);
    assert!(!failed().contains("vm2"), "{}", failed());
    assert_eq!(scene.api.get("/v1/ports/vm2")["mac"], "02:00:00:00:00:02");
    drop(scene.guest(2));
    scene.do_change("DELETE", "thief", &Value::Null, "removed");
    assert!(!std::fs::read_to_string(&kept).expect("kept").contains("thief"));
}

#[test]
fn kept_port_that_the_host_cannot_start_is_left_out_until_a_reload() {
    require!(Root);
    let netns = NetNs::new("api");
    let mut scene = Scene::new(&netns, Serve::file().by_root(), &[], &text());
    scene.do_change("PUT", "vm2", &scene.keys(2), "added");
    scene.daemon.kill();
    // Where its socket was is a file of somebody else.
    let socket = scene.daemon.path("vm2.sock");
    assert_soon!(!socket.exists(), "the helper removes it");
    std::fs::write(&socket, "").expect("ours");
    scene.restart(&netns);
    let said = scene.daemon.said();
    assert!(
        scene.daemon.port_named("vm2").is_none() && said.contains("left out, as it was added at run time"),
        "{said}"
    );
    drop(scene.guest(1));
    let failed = scene.daemon.status()["configuration"]["failed"].to_string();
    assert_has(&failed, &["port vm2 could not start"]);
    // It is kept all the same, and starts once it can.
    scene.do_change("PUT", "vm3", &scene.keys(3), "added");
    std::fs::remove_file(&socket).expect("ours");
    scene.daemon.reload_with(&text());
    drop(scene.guest(2));
    restart(&mut scene, &netns);
    drop(scene.guest(2));
}

#[test]
fn without_a_place_the_answer_says_that_ports_end_with_the_daemon() {
    require!(Root);
    let netns = NetNs::new("api");
    let scene = Scene::new(&netns, Serve::file().by_root(), &[], &network(None, &[1]));
    let done = scene.change("PUT", "vm2", &scene.keys(2)).json()["done"].to_string();
    assert_has(
        &done,
        &["what was added ends with the daemon: `state` below [daemon]"],
    );
}
