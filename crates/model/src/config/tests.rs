//! Tests of ports and files as they are read.

use serde_json::{Value, json};

use super::*;
use crate::mistakes;

fn port(json: Value) -> Result<Port, Mistake> {
    match json {
        Value::Object(keys) => Port::read(keys),
        other => panic!("{other} is no object"),
    }
}

#[test]
fn port_is_written_as_it_is_read() {
    let json = json!({
        "socket-path": "/run/vm1.sock", "ifname": "eth1", "queues": 2, "force-copy": true, "memory": "send-direct",
        "vlan": "100,200-203", "max-memory": "32GiB", "socket-group": 7, "from-guest-bits": "100M", "isolated": true,
        "ips": "192.0.2.10,2001:db8::/64", "rule": [{"direction": "to-guest", "action": "deny"}],
    });
    let read = port(json.clone()).expect("possible");
    assert_eq!(Value::Object(read.keys()), json);
    assert_eq!(
        serde_json::from_value::<Port>(json!(read)).expect("the same"),
        read
    );
    let other = port(json!({"vlan": [100, "200-203"], "mac": null, "isolated": false})).expect("possible");
    assert_eq!(Value::Object(other.keys()), json!({"vlan": "100,200-203"}));
}

#[test]
fn words_are_read_as_json_is() {
    let base = port(json!({"ifname": "eth1", "queues": 2, "socket-path": "/a", "socket-group": 7}))
        .expect("possible");
    let words = [
        "socket-path=/b",
        "start-queue=2",
        "guard",
        "force-copy=false",
        "vlan=7+9-10",
    ];
    let read = base.with_words(words).expect("possible");
    let wanted = json!({
        "socket-path": "/b", "ifname": "eth1", "queues": 2, "start-queue": 2, "guard": true, "vlan": "7,9-10",
        "socket-group": 7,
    });
    assert_eq!(Value::Object(read.keys()), wanted);
    let null = port(json!({"null": true})).expect("possible");
    let on = null.with_words(["ifname=eth1"]).expect("possible");
    assert_eq!(
        Value::Object(on.keys()),
        json!({"ifname": "eth1"}),
        "the option is for ports that name nothing else"
    );
    let client = base.with_words(["socket-path=/c", "client"]).expect("possible");
    assert_eq!(client.socket.socket_group, None, "another port's");
    let error = base.with_words(["queues=x"]).expect_err("no number");
    assert_eq!(
        error.what,
        "queues = \"x\": give a number of 0 to 65535, without quotes"
    );
    for (words, what) in [
        (["guard=yes", "client"], "guard = \"yes\": give true or false"),
        (
            ["memory=ram", "client"],
            "memory = \"ram\": give one of copy, send-direct, direct",
        ),
        (
            ["queus=1", "client"],
            "unknown key \"queus\": did you mean \"queues\"?",
        ),
        (
            ["client", "client"],
            "client is given more than once: give it once",
        ),
    ] {
        assert_eq!(base.with_words(words).expect_err(words[0]).what, what);
    }
}

#[test]
fn mistakes_name_key_value_and_remedy() {
    for (json, key, what) in [
        (
            json!({"queus": 1}),
            "queus",
            "unknown key \"queus\": did you mean \"queues\"?",
        ),
        (
            json!({"queues": "1"}),
            "queues",
            "queues = \"1\": give a number of 0 to 65535",
        ),
        (json!({"queues": 1.5}), "queues", "give a number"),
        (json!({"queues": 70000}), "queues", "give a number of 0 to 65535"),
        (json!({"force-copy": "yes"}), "force-copy", "give true or false"),
        (json!({"vlan": [[1]]}), "vlan", "give a list"),
        (json!({"vlan": {"a": 1}}), "vlan", "give a list"),
        (
            json!({"vlan": 5000}),
            "vlan",
            "vlan = 5000: give numbers and ranges of 0 (untagged) to 4094",
        ),
        (json!({"mac": 1}), "mac", "give text in quotes"),
        (
            json!({"max-memory": "32"}),
            "max-memory",
            "name the unit, such as 32GiB",
        ),
        (
            json!({"workers": 1}),
            "workers",
            "belongs below a line `[daemon]`",
        ),
        (
            json!({"rule": [{"direction": "to-guest"}]}),
            "rule",
            "rule 1: action is missing",
        ),
        (
            json!({"rule": [{"direction": "to-guest", "action": "alow"}]}),
            "rule",
            "rule 1: action: give allow or deny",
        ),
        (
            json!({"rule": [{"direction": "to-guest", "action": "deny", "protocl": "tcp"}]}),
            "rule",
            "did you mean \"protocol\"?",
        ),
        (json!({"rule": 7}), "rule", "give a list of tables"),
    ] {
        let mistake = port(json).expect_err(key);
        assert_eq!(mistake.key.as_deref(), Some(key));
        assert!(
            mistake.what.contains(what),
            "{what:?} is not in {:?}",
            mistake.what
        );
    }
}

#[test]
fn keys_that_can_change_at_run_time_are_marked() {
    let live = |json: Value, key: &str| port(json).expect("possible").is_live(key);
    for key in [
        "rule",
        "to-guest-bits",
        "guard",
        "ips",
        "hints",
        "isolated",
        "vlan",
    ] {
        assert!(live(json!({"network": "lan"}), key), "{key}");
    }
    for key in ["mac", "queues", "memory", "socket-path", "learning", "offload"] {
        assert!(!live(json!({"network": "lan"}), key), "{key}");
    }
    for other in [json!({"ifname": "e"}), json!({"network": "lan", "ifname": "e"})] {
        assert!(!live(other, "vlan"), "the lease has them");
    }
    assert!(!live(json!({"network": "lan", "learning": true}), "vlan"));
}

#[test]
fn lines_are_those_of_the_keys() {
    let text = "[port.vm1]\nifname = \"eth0\"\nqueues = 2\n[port.vm2]\n[[port.vm2.rule]]\ndirection = \"to-guest\"\n\
                action = \"deny\"\n";
    let file = ConfigFile::parse(std::path::Path::new("c.toml"), text).expect("possible");
    assert_eq!(file.tables.ports[0].line_of("--queues 2: too many"), 3);
    assert_eq!(file.tables.ports[0].line_of("no socket-path"), 1);
    assert_eq!(file.tables.ports[1].line_of("rule: something"), 5);
    let wrong = ConfigFile::parse(std::path::Path::new("c.toml"), &text.replace("deny", "dny"))
        .expect_err("misspelt");
    assert_eq!(wrong.line, Some(7), "{}", wrong.what);
    assert!(ConfigFile::parse(std::path::Path::new("c.toml"), "[port.\"a b\"]").is_err());
}

#[test]
fn every_key_has_documentation() {
    for (key, property) in Port::schema()
        .into_iter()
        .chain(Network::schema())
        .chain(Daemon::schema())
    {
        let text = property["description"].as_str().unwrap_or_default();
        assert!(text.len() > 10, "{key}: {text:?}");
        assert_eq!(
            mistakes::nearest(&key, [key.as_str()].into_iter()),
            Some(key.as_str())
        );
    }
}

#[test]
fn key_that_is_false_is_written_unless_that_is_its_default() {
    let network = Network::read(
        json!({"uplink": "e", "host": false})
            .as_object()
            .expect("keys")
            .clone(),
    );
    let keys = network.expect("a network").keys();
    assert_eq!(Value::Object(keys), json!({"uplink": "e", "host": false}));
    let port = Port::read(
        json!({"isolated": false, "hairpin": true})
            .as_object()
            .expect("keys")
            .clone(),
    );
    assert_eq!(
        Value::Object(port.expect("a port").keys()),
        json!({"hairpin": true})
    );
}
