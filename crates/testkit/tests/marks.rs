//! `vhost-af-xdp mark`: flows get marks in the program's table, and rules of a port match them.

use std::process::Output;

use rstest::rstest;
use serde_json::{Value, json};
use testkit::daemon::binary;
use testkit::kernel::has_hints;
use testkit::{Daemon, DriverConfig, NetNs, PacketPort, Serve, VethPair, assert_soon, frame, require};

/// Of the frames of [`frame::udp`] from that port.
const FLOW: [&str; 10] = [
    "--protocol",
    "udp",
    "--source",
    "10.9.0.1",
    "--source-port",
    "5",
    "--destination",
    "10.9.0.2",
    "--destination-port",
    "9",
];

/// All of them.
const SERVICE: [&str; 6] = [
    "--protocol",
    "udp",
    "--destination",
    "10.9.0.2",
    "--destination-port",
    "9",
];

fn mark(namespace: &NetNs, words: &[&str]) -> Output {
    let mut command = namespace.command(binary());
    command.arg("mark").args(words).output().expect("it runs")
}

#[track_caller]
fn done(namespace: &NetNs, words: &[&str]) -> String {
    let output = mark(namespace, words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {said}");
    String::from_utf8(output.stdout).expect("text")
}

#[track_caller]
fn refused(namespace: &NetNs, words: &[&str], with: &[&str]) {
    let output = mark(namespace, words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{words:?} is done");
    assert!(with.iter().all(|word| said.contains(word)), "{said}");
}

fn listed(namespace: &NetNs) -> Value {
    let said = done(namespace, &["list", VethPair::NIC, "--json"]);
    serde_json::from_str(&said).expect("JSON")
}

fn serve(leased: bool) -> Serve {
    Serve::interface(VethPair::NIC).leased_if(leased)
}

/// Sends a frame of the flow from that port, and waits until the counter says that this is what became of it.
#[track_caller]
fn goes(wire: &PacketPort, daemon: &Daemon, flow: u16, counter: &str) {
    let before = daemon.counter(counter);
    wire.send(&frame::udp(flow, 64));
    assert_soon!(daemon.counter(counter) > before, "{counter}");
}

#[rstest]
fn flows_have_the_marks_that_they_are_given(#[values(false, true)] leased: bool) {
    require!(Root);
    if !has_hints() {
        return;
    }
    let veth = VethPair::new();
    let near = &veth.near;
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let rule = "direction=to-guest action=allow mark=7";
    let serve = serve(leased).with("--hints", "mark").with("--rule", rule);
    let daemon = Daemon::start(near, &serve);
    assert_eq!(daemon.port(0)["lanes"][0]["hints"]["on"], json!(["mark"]));
    let _guest = daemon.connect(0, &daemon.socket(), &DriverConfig::default(), 64);
    let (passes, is_denied) = ("to_guest_frames", "to_guest_filter");
    let nic = VethPair::NIC;

    goes(&wire, &daemon, 5, is_denied);
    done(near, &[&["set", nic, "7"][..], &FLOW].concat());
    goes(&wire, &daemon, 5, passes);
    goes(&wire, &daemon, 6, is_denied);
    // What a flow has itself counts before what the service has.
    done(near, &[&["set", nic, "8"][..], &FLOW].concat());
    done(near, &[&["set", nic, "7"][..], &SERVICE].concat());
    goes(&wire, &daemon, 5, is_denied);
    goes(&wire, &daemon, 6, passes);
    let of = |mark: u32, source: Value, port: Value| {
        json!({"mark": mark, "protocol": "udp", "source": source, "source_port": port,
               "destination": "10.9.0.2", "destination_port": 9})
    };
    let both = json!([
        of(7, Value::Null, Value::Null),
        of(8, json!("10.9.0.1"), json!(5))
    ]);
    assert_eq!(listed(near), both);
    let table = done(near, &["list", nic]);
    let rows: Vec<Vec<&str>> = table
        .lines()
        .skip(2)
        .map(|row| row.split_whitespace().collect())
        .collect();
    assert!(rows[0].contains(&"-") && rows[1].contains(&"10.9.0.1"), "{table}");

    done(near, &[&["remove", nic][..], &FLOW].concat());
    goes(&wire, &daemon, 5, passes);
    refused(
        near,
        &[&["remove", nic][..], &FLOW].concat(),
        &["no mark", "mark list"],
    );
    done(near, &["clear", nic]);
    goes(&wire, &daemon, 6, is_denied);
    assert_eq!(listed(near), json!([]));
}

#[test]
fn where_no_program_leaves_marks_it_is_said_with_the_remedy() {
    require!(Root);
    let veth = VethPair::new();
    let list = ["list", VethPair::NIC];
    refused(&veth.near, &list, &["no XDP program", "`mark` among the hints"]);
    let _daemon = Daemon::start(&veth.near, &serve(false).with("--hints", "none"));
    refused(&veth.near, &list, &["no map of marks", "`mark` among the hints"]);
    refused(&veth.near, &["list", "nothing0"], &["nothing0"]);
    let mut command = veth.near.command("setpriv");
    command.args(["--bounding-set", "-all", "--inh-caps", "-all"]);
    let output = command
        .arg(binary())
        .arg("mark")
        .args(list)
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("root"), "{said}");
}
