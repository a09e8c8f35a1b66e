//! `vhost-af-xdp queues`: what it says of real queues, held and free.

use serde_json::Value;
use testkit::{Daemon, Driver, DriverConfig, NetNs, Serve, VethPair, daemon, frame, require, wait};

fn queues(netns: &NetNs, daemon: &Daemon) -> Value {
    let control = daemon.path("control");
    let output = netns
        .command(daemon::binary())
        .args(["queues", VethPair::NIC, "--json", "--control"])
        .arg(control)
        .output()
        .expect("it runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn await_free(netns: &NetNs, daemon: &Daemon) {
    let free = wait::until(wait::SOON, || {
        let queue = &queues(netns, daemon)[0];
        queue["bound"] == serde_json::json!([]) && queue["holder"]["mode"].is_null()
    });
    assert!(free, "no guest, but a socket: {:#}", queues(netns, daemon));
}

#[test]
fn queue_of_a_running_guest_is_shown_with_its_holder_and_a_free_one_without() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let mut daemon = Daemon::start(&veth.near, &Serve::interface(VethPair::NIC));
    // The daemon has tried the queue at its start; the kernel lets go of a socket a little later.
    await_free(&veth.near, &daemon);
    let mut guest = Driver::connect(&daemon.socket(), &DriverConfig::default()).expect("accepted");
    guest.pairs[0].send(&frame::plain(100, 1), testkit::Layout::Whole);
    guest.pairs[0].await_sent();
    let now = queues(&veth.near, &daemon);
    assert_eq!(now.as_array().expect("a list").len(), 2, "{now:#}");
    let held = &now[0];
    assert_eq!(
        (&held["interface"], &held["queue"]),
        (&VethPair::NIC.into(), &0.into())
    );
    assert_eq!(held["bound"], serde_json::json!(["xsk"]));
    let holder = &held["holder"];
    assert_eq!(holder["pid"], daemon.process().pid());
    assert_eq!(holder["vmm"], std::process::id());
    assert_eq!(holder["from_guest_frames"], 1);
    assert!(
        holder["command"].as_str().expect("text").contains("serve --"),
        "{holder:#}"
    );
    assert_eq!(
        (&now[1]["bound"], &now[1]["holder"]),
        (&serde_json::json!([]), &Value::Null)
    );
    drop(guest);
    await_free(&veth.near, &daemon);
}

#[test]
fn interface_that_is_not_there_is_said() {
    require!(Root);
    let netns = NetNs::new("queues");
    let (status, said) = daemon::run_to_end(&netns, &["queues", "nope"]);
    assert_eq!(status.code(), Some(1));
    assert!(said.contains("no interface \"nope\""), "{said}");
}
