//! Tests of configuration files.

use std::path::{Path, PathBuf};

use model::config::MemberOptions;

use steer::ModeRequest;

use super::*;
use crate::cli::tests::serve as read_options;
use crate::config::{MemberVlans, NicConfig, Placement};

fn read(text: &str) -> Result<ServeConfig, FileError> {
    judge(parse(Path::new("c.toml"), text)?)
}

fn serve(arguments: &[&str]) -> ServeConfig {
    read_options(arguments).expect("a configuration")
}

#[track_caller]
fn assert_wrong(text: &str, words: &[&str]) {
    let said = read(text).expect_err(text).to_string();
    for word in words {
        assert!(said.contains(word), "{word:?} is missing in {said:?} of {text:?}");
    }
}

#[test]
fn port_of_a_file_is_that_of_the_same_options() {
    let file = read(
        "[daemon]\nworkers = 2\ncpus = [0]\nspin-us = 7\ncontrol = \"none\"\nuser = 12\nsandbox = [\"-files\"]\n\
         [port.a]\nsocket-path = \"/a\"\nifname = \"eth1\"\nqueues = 2\nstart-queue = 4\nmac = \"02:00:00:00:00:0a\"\n\
         vlan = [7, \"100-102\"]\nmemory = \"direct\"\noffload = [\"-uso\"]\nmax-memory = \"2GiB\"\nforce-copy = true\n\
         mode = \"skb\"\nbusy-poll-us = 20\nsocket-mode = \"620\"\nsocket-owner = 7\nsocket-group = \"root\"\n\
         [port.b]\nsocket-path = \"/b\"\nnull = true\nframe-size = 100\nclient = true\n\
         [port.c]\nfd = 9\nifname = \"eth2\"\ninhibit = true\nsock-fds = [7]\n",
    )
    .expect("valid");
    let line = serve(&[
        "--workers=2",
        "--cpus=0",
        "--spin-us=7",
        "--control=none",
        "--user=12",
        "--sandbox=-files",
        "--socket-path=/a",
        "--ifname=eth1",
        "--queues=2",
        "--start-queue=4",
        "--mac=02:00:00:00:00:0a",
        "--vlan=7,100-102",
        "--memory=direct",
        "--offload=-uso",
        "--max-memory=2GiB",
        "--force-copy",
        "--mode=skb",
        "--busy-poll-us=20",
        "--socket-mode=620",
        "--socket-owner=7",
        "--socket-group=root",
    ]);
    let named = |config: &PortConfig, name: &str| PortConfig {
        name: name.into(),
        ..config.clone()
    };
    assert_eq!(file.ports[0], named(&line.ports[0], "a"));
    assert_eq!(
        (
            file.workers,
            &file.cpus,
            file.waits.spin,
            &file.control,
            &file.layers,
            &file.user
        ),
        (
            line.workers,
            &line.cpus,
            line.waits.spin,
            &line.control,
            &line.layers,
            &line.user
        )
    );
    let line = serve(&["--null", "--frame-size=100", "--client", "--socket-path=/b"]);
    let same = |port: &PortConfig| PortConfig {
        memory: line.ports[0].memory,
        ..port.clone()
    };
    assert_eq!(same(&file.ports[1]), named(&line.ports[0], "b"));
    let line = serve(&["--fd=9", "--ifname=eth2", "--inhibit", "--sock-fds=7"]);
    assert_eq!(same(&file.ports[2]), named(&line.ports[0], "c"));
}

#[test]
fn defaults_of_a_file_are_those_of_the_options() {
    let file = read("[port.a]\nsocket-path = \"/a\"\nifname = \"eth1\"\n").expect("valid");
    let line = serve(&["--socket-path=/a", "--ifname=eth1"]);
    let port = PortConfig {
        name: "a".into(),
        ..line.ports[0].clone()
    };
    assert_eq!(file.ports, [port]);
    assert_eq!(
        (file.waits.spin, file.steward_timeout),
        (line.waits.spin, line.steward_timeout)
    );
    assert!(matches!(&file.ports[0].nic, NicConfig::Interface(queues) if queues.name == "eth1"));
}

#[test]
fn mistakes_are_told_with_line_key_and_remedy() {
    let port = "[port.vm1]\nsocket-path = \"/a\"\n";
    for (line, words) in [
        (
            "ifname = 5",
            ["line 3: port vm1: ifname = 5", "give text in quotes"],
        ),
        (
            "queues = \"2\"",
            ["line 3: port vm1: queues = \"2\"", "give a number"],
        ),
        (
            "client = 1",
            ["line 3: port vm1: client = 1", "give true or false"],
        ),
        ("vlan = [[1]]", ["line 3: port vm1: vlan = [[1]]", "give a list"]),
        (
            "socket-mode = 0o660",
            ["line 3: port vm1: socket-mode = 0o660", "give text"],
        ),
        (
            "colour = \"red\"",
            [
                "line 3: port vm1: unknown key \"colour\"",
                "docs/keys.md lists them",
            ],
        ),
        ("workers = 2", ["line 3: port vm1: workers belongs", "`[daemon]`"]),
        (
            "network = \"lan\"",
            ["line 3: port vm1: network \"lan\"", "`[network.lan]`"],
        ),
        ("null = true\ntrunk = [7]", ["line 4: port vm1: trunk", "network"]),
        ("queues = 70000", ["line 3: port vm1: queues = 70000", "65535"]),
        (
            "null = true\nqueues = 0",
            ["line 4: port vm1: queues 0", "1 to 128"],
        ),
        (
            "memory = \"ram\"",
            [
                "line 3: port vm1: memory = \"ram\"",
                "one of copy, send-direct, direct",
            ],
        ),
        ("mac = \"x\"", ["line 3: port vm1: mac = \"x\"", "six hex bytes"]),
        (
            "null = true\nifname = \"e\"",
            ["line 4: port vm1: ifname excludes null", "leave one out"],
        ),
        (
            "",
            [
                "line 1: port vm1: no network and no interface",
                "by ifname or network",
            ],
        ),
        (
            "null = true\noffload = \"ufo\"",
            ["line 4: port vm1: offload ufo", "guest-uso6"],
        ),
        (
            "null = true\nsocket-owner = \"no one\"",
            ["line 4: port vm1: socket-owner", "no such user"],
        ),
        (
            "ifname = \"a b\"",
            ["line 3: port vm1: ifname \"a b\"", "`ip link`"],
        ),
        (
            "fd = 7\nnull = true",
            ["port vm1: fd excludes socket-path", "leave one out"],
        ),
        (
            "queues = 1\nqueues = 2",
            ["line 4: `queues = 2`", "duplicate key"],
        ),
        ("queues 1", ["line 3: `queues 1`", "expected"]),
    ] {
        assert_wrong(&format!("{port}{line}\n"), &words);
    }
    for (text, words) in [
        (
            "[daemon]\nworkers = 0\n",
            ["line 2: [daemon]: workers 0", "1 to 256"],
        ),
        (
            "[daemon]\nifname = \"e\"\n",
            ["line 2: ifname belongs", "[port.NAME]"],
        ),
        (
            "[daemon]\nsocket-directories = [\"run\"]\n",
            ["line 2: [daemon]: socket-directories", "absolute"],
        ),
        (
            "[network.lan]\n[port.a]\nnetwork = \"lan\"\nvlan = 5000\n",
            ["line 4: port a: vlan = 5000", "0 (untagged) to 4094"],
        ),
        (
            "[network.lan]\n[port.a]\nsocket-path = \"/a\"\nnetwork = \"lan\"\nvlan = 0\n",
            ["line 5: port a: vlan 0: a port of a network", "1 to 4094"],
        ),
        (
            "[networks.lan]\n",
            ["line 1: unknown table \"networks\"", "[network.NAME]"],
        ),
        (
            "network = 1\n",
            ["line 1: network: a network begins", "[network.NAME]"],
        ),
        (
            "[network.lan]\nuplink = \"a b\"\n",
            ["line 2: network lan: uplink \"a b\"", "`ip link`"],
        ),
        (
            "[network.lan]\nifname = \"e\"\n",
            ["line 2: network lan: ifname belongs", "[port.NAME]"],
        ),
        ("port = 1\n", ["line 1: port: a port begins", "[port.NAME]"]),
        ("[[port]]\n", ["line 1: port: a port begins", "[port.NAME]"]),
        ("[port]\nqueues = 1\n", ["line 2: port.queues", "[port.NAME]"]),
        ("[port.\"a b\"]\n", ["line 1: port \"a b\"", "letters"]),
        (
            "[port.a]\nsocket-path = \"a.sock\"\nnull = true\n",
            ["line 2: port a: socket-path", "absolute"],
        ),
        (
            "[port.a]\nsocket-path = \"/x/../a\"\nnull = true\n",
            ["line 2: port a", "without `..`"],
        ),
    ] {
        assert_wrong(text, &words);
    }
}

/// Messages about ports that run or cannot start are the same for files and command lines: they name keys, as `--port`
/// and files do. Only messages of `cli` and `config` name options, which become keys in errors of a file.
#[test]
fn messages_name_keys_and_no_options() {
    fn sources(directory: &Path, into: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).expect("the sources") {
            let path = entry.expect("an entry").path();
            match path.is_dir() {
                true => sources(&path, into),
                false => into.push(path),
            }
        }
    }
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for of in [
        "vhost-af-xdp/src",
        "common/src/binding.rs",
        "common/src/drivers.rs",
        "steer/src",
        "steward/src/server",
        "steward/src/policy.rs",
        "steward/src/client",
        "xsk/src",
    ] {
        let path = crates.join(of);
        match path.is_dir() {
            true => sources(&path, &mut files),
            false => files.push(path),
        }
    }
    // Command lines, of other programs and of this one, and reasons that only documents have.
    let apart = [
        "/cli",
        "/check/",
        "config/check.rs",
        "config/build.rs",
        "sandbox/calls.rs",
        "tests.rs",
    ];
    // Independent of where the tree is.
    let within = |path: &Path| {
        path.strip_prefix(&crates)
            .map(|path| path.to_string_lossy().into_owned())
    };
    files.retain(|path| {
        let path = within(path).expect("beneath the crates");
        !apart.iter().any(|part| path.contains(part))
    });
    assert!(files.len() > 100, "{}", files.len());
    let (ports, networks) = (Port::schema(), Network::schema());
    let is_key = |word: &str| ports.contains_key(word) || networks.contains_key(word);
    let mut wrong = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(&path).expect("text");
        let product = text
            .split("\n#[cfg(test)]\nmod tests {")
            .next()
            .unwrap_or_default();
        for line in product
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
        {
            let words = line.split("--").skip(1).map(|rest| {
                let end = rest.find(|c: char| !(c.is_ascii_lowercase() || c == '-'));
                &rest[..end.unwrap_or(rest.len())]
            });
            wrong.extend(
                words
                    .filter(|word| is_key(word))
                    .map(|word| format!("--{word} in {}", path.display())),
            );
        }
    }
    assert_eq!(wrong, <Vec<String>>::new());
}

#[test]
fn ports_that_do_not_go_together_are_told_by_the_later_one() {
    let one =
        "[port.a]\nsocket-path = \"/a\"\nifname = \"e\"\n[port.b]\nsocket-path = \"/b\"\nifname = \"e\"\n";
    assert_wrong(one, &["line 4: port b: queue 0 of e is asked for by port a, too"]);
    assert_wrong(
        &format!(
            "{}mode = \"skb\"\nstart-queue = 1\n",
            one.replacen("[port.b]", "mode = \"native\"\n[port.b]", 1)
        ),
        &["port b: interface e is asked for with"],
    );
    let cable = "[port.a]\nsocket-path = \"/a\"\ncable = \"c\"\n";
    assert_wrong(cable, &["line 3: port a: cable c: 1 port(s) name it"]);
}

#[test]
fn what_a_guest_receives_in_direct_memory_has_no_rules_and_no_limits() {
    let port = "[port.a]\nsocket-path = \"/a\"\nifname = \"e\"\nmemory = \"direct\"\n";
    for keys in [
        "to-guest-bits = \"1M\"",
        "to-guest-default = \"deny\"",
        "[[port.a.rule]]\ndirection = \"to-guest\"\naction = \"deny\"",
    ] {
        assert_wrong(&format!("{port}{keys}\n"), &["port a: ", "memory=send-direct"]);
    }
}

#[test]
fn ports_of_networks_say_what_goes_together() {
    let lan = "[network.lan]\nuplink = \"e\"\n[port.a]\nsocket-path = \"/a\"\nnetwork = \"lan\"\n";
    for (line, words) in [
        ("vlan = [1, 2]", ["line 6: port a: vlan", "trunk"]),
        ("vlan = 0", ["line 6: port a: vlan", "1 to 4094"]),
        ("trunk = \"0-3\"", ["line 6: port a: trunk", "1 to 4094"]),
        (
            "vlan = 1\ntrunk = 2",
            ["port a: trunk excludes vlan", "leave one out"],
        ),
        ("cable = \"c\"", ["port a: ", "excludes"]),
        (
            "memory = \"direct\"",
            ["line 6: port a: memory", "memory = \"copy\""],
        ),
        (
            "[port.b]\nsocket-path = \"/b\"\nifname = \"e\"",
            ["line 6: port b: queue 0 of e", "network lan, too"],
        ),
    ] {
        assert_wrong(&format!("{lan}{line}\n"), &words);
    }
    let two = |first: &str, second: &str| {
        format!(
            "{lan}mac = \"02:00:00:00:00:01\"\n{first}\n[port.b]\nsocket-path = \"/b\"\nnetwork = \"lan\"\n{second}\nmac = \"02:00:00:00:00:01\"\n"
        )
    };
    for (first, second) in [
        ("", ""),
        ("vlan = 7", "trunk = \"6-8\""),
        ("trunk = \"1-9\"", "trunk = \"9-10\""),
    ] {
        assert_wrong(
            &two(first, second),
            &["line 12: port b: mac 02:00:00:00:00:01: port a of network lan"],
        );
    }
    for (first, second) in [
        ("", "vlan = 7"),
        ("vlan = 7", "vlan = 8"),
        ("trunk = \"1-9\"", "vlan = 10"),
    ] {
        assert!(read(&two(first, second)).is_ok(), "{first} {second}");
    }
    let read = read(&format!(
        "{lan}trunk = \"7,3-4\"\nisolated = true\nlearning = true\nhairpin = true\nlink-control = true\n"
    ))
    .expect("valid");
    let wanted = NicConfig::Network {
        name: "lan".to_owned(),
        vlans: MemberVlans::Trunk(vec![3, 4, 7]),
        options: MemberOptions {
            isolated: true,
            hairpin: true,
            link_control: true,
            learning: true,
            ..MemberOptions::default()
        },
        own: None,
    };
    assert_eq!(read.ports[0].nic, wanted);
}

#[test]
fn port_of_a_network_may_have_a_queue_of_its_own() {
    let lan =
        "[network.lan]\nuplink = \"eth0\"\nqueues = 2\n[port.a]\nsocket-path = \"/a\"\nnetwork = \"lan\"\n";
    let mac = "mac = \"02:00:00:00:00:01\"\n";
    for (keys, words) in [
        (
            "memory = \"send-direct\"\n",
            ["line 7: port a: memory", "name a queue of its own with ifname"],
        ),
        (
            "ifname = \"eth0\"\nstart-queue = 2\n",
            ["port a: network with ifname", "set mac"],
        ),
        (
            "ifname = \"eth1\"\nmac = \"02:00:00:00:00:01\"\n",
            ["line 7: port a: ifname eth1", "is eth0"],
        ),
        (
            "ifname = \"eth0\"\nstart-queue = 1\nmac = \"02:00:00:00:00:01\"\n",
            ["port a: queue 1 of eth0", "network lan, too"],
        ),
        ("start-queue = 0\n", ["line 7: port a: start-queue: ", "ifname"]),
        ("mode = \"skb\"\n", ["line 7: port a: mode: ", "ifname"]),
        ("force-copy = true\n", ["line 7: port a: force-copy: ", "ifname"]),
        (
            "force-zero-copy = true\n",
            ["line 7: port a: force-zero-copy: ", "ifname"],
        ),
    ] {
        assert_wrong(&format!("{lan}{keys}"), &words);
    }
    assert!(read(&format!("{lan}force-copy = false\n")).is_ok());
    let alone = "[network.lan]\n[port.a]\nsocket-path = \"/a\"\nnetwork = \"lan\"\n";
    assert_wrong(
        &format!("{alone}{mac}ifname = \"eth0\"\n"),
        &["port a: ifname eth0", "is none"],
    );
    let text = format!("{lan}{mac}ifname = \"eth0\"\nstart-queue = 2\nmemory = \"send-direct\"\nvlan = 7\n");
    let read_of = |text: &str| read(text).expect("valid");
    let read = read_of(&text);
    let wanted = read.ports[0].wanted().expect("queues");
    assert_eq!((wanted.start_queue, wanted.queues, wanted.network), (2, 1, false));
    let direct = &read_of(&text.replace("send-direct", "direct")).ports[0];
    assert_eq!(
        (direct.options.placement, direct.asked),
        (Placement::SendDirect, Placement::Direct)
    );
    assert_eq!(
        (wanted.filter.macs.as_slice(), wanted.filter.vlans.as_slice()),
        (&[[2, 0, 0, 0, 0, 1]][..], &[7][..])
    );
}

#[test]
fn addresses_of_a_guest_are_read_as_they_are_written() {
    let lan =
        "[network.lan]\n[port.a]\nsocket-path = \"/a\"\nnetwork = \"lan\"\nmac = \"02:00:00:00:00:01\"\n";
    for (line, words) in [
        (
            "ips = \"192.0.2.300\"",
            ["line 6: port a: ips", "is not an IP address"],
        ),
        (
            "ips = [\"192.0.2.1\", \"192.0.2.1/24\"]",
            ["line 6: port a: ips", "192.0.2.0/24"],
        ),
        ("ips = []", ["line 6: port a: ips", "is not an IP address"]),
        ("router = true", ["line 6: port a: router", "needs ips"]),
        ("dhcp-server = true", ["line 6: port a: dhcp-server", "needs ips"]),
    ] {
        assert_wrong(&format!("{lan}{line}\n"), &words);
    }
    let nobody = "[port.a]\nsocket-path = \"/a\"\nifname = \"e\"\n";
    for line in ["guard = true", "ips = \"192.0.2.10\""] {
        assert_wrong(
            &format!("{nobody}{line}\n"),
            &["line 4: port a: guard and ips", "set mac"],
        );
    }
    let text = format!("{lan}ips = [\"192.0.2.10\", \"2001:db8:1::/64\"]\nrouter = true\n");
    let guard = read(&text).expect("valid").ports[0].keys.guard.clone();
    let shown: Vec<_> = guard
        .ips
        .iter()
        .flat_map(|ips| &ips.0)
        .map(ToString::to_string)
        .collect();
    assert_eq!(shown, ["192.0.2.10", "2001:db8:1::/64"]);
    assert_eq!((guard.router, guard.dhcp_server), (true, false));
}

#[test]
fn file_without_ports_is_one() {
    assert!(read("").expect("empty").ports.is_empty());
}

#[test]
fn command_line_goes_before_the_files_daemon() {
    let file = parse(Path::new("c.toml"), "[daemon]\nspin-us = 7\n").expect("valid");
    assert_eq!(judge(file).expect("valid").waits.spin.as_micros(), 7);
    for (options, words) in [
        (["--config=/none", "--queues=2"], "--config"),
        (
            ["--config=/none", "--rule=action=allow direction=to-guest"],
            "--config",
        ),
        (["--config=/none", "--port=socket-path=/a"], "--config"),
        (["--json", "--null"], "--check"),
    ] {
        let error = read_options(&options).expect_err(options[1]).to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn examples_are_understood() {
    let guests = include_str!("../../../../docs/deploy/vhost-af-xdp.toml");
    let network = include_str!("../../../../docs/deploy/lan.toml");
    for (text, names) in [
        (guests, &["vm1", "vm2", "left", "right"][..]),
        (network, &["vm1", "vm2"]),
    ] {
        let file = parse(Path::new("example"), text).expect("TOML with known keys");
        let named: Vec<_> = file.tables.ports.iter().map(|port| port.name.as_str()).collect();
        assert_eq!(named, names);
        for table in &file.tables.ports {
            let mut table = table.clone();
            // This host may have no such group.
            table.value.socket.socket_group = None;
            build_port(&file.path, &table, 4).expect("possible");
        }
    }
}

#[test]
fn port_that_is_added_alone_is_checked_as_with_all_others() {
    let text = "[network.lan]\n[port.c]\nsocket-path = \"/c\"\nnetwork = \"lan\"\nclient = true\n";
    let mut file = parse(Path::new("/c.toml"), text).expect("a file");
    let port = |name: &str, keys: &serde_json::Value| {
        Port::named(name, keys.as_object().expect("keys")).expect("a port")
    };
    let all = |file: &ConfigFile| with_added(file.clone(), &Daemon::default(), false);
    let mut config = all(&file).expect("possible");
    for (number, keys) in [
        serde_json::json!({"network": "lan", "mac": "02:00:00:00:00:01", "vlan": 7}),
        serde_json::json!({"network": "lan", "mac": "02:00:00:00:00:01", "trunk": ["8-10"]}),
        serde_json::json!({"network": "lan", "client": true, "max-memory": "1GiB"}),
        serde_json::json!({"null": true}),
    ]
    .into_iter()
    .enumerate()
    {
        let mut keys = keys;
        keys["socket-path"] = format!("/{number}").into();
        let mut port = port(&format!("p{number}"), &keys);
        config = with_another(config, &file.path, &mut port).expect("possible");
        file.added.ports.push(port);
    }
    let at_once = all(&file).expect("possible");
    assert!(config.ports == at_once.ports, "{:?}", config.ports);
    assert_eq!(config.taken, at_once.taken);
    for keys in [
        serde_json::json!({"network": "lan", "socket-path": "/1"}),
        serde_json::json!({"network": "lan", "socket-path": "/x", "mac": "02:00:00:00:00:01", "vlan": 9}),
        serde_json::json!({"network": "other", "socket-path": "/x"}),
        serde_json::json!({"network": "lan", "socket-path": "x"}),
        serde_json::json!({"network": "lan", "socket-path": "/x", "max-memory": "48TiB"}),
        serde_json::json!({"cable": "x", "socket-path": "/x"}),
    ] {
        let mut port = port("x", &keys);
        let alone = with_another(config.clone(), &file.path, &mut port);
        assert!(alone.is_none(), "{keys}");
        let mut file = file.clone();
        file.added.ports.push(port);
        all(&file).map(drop).expect_err(&keys.to_string());
    }
}

#[test]
fn options_of_queues_are_those_of_the_underlay_and_its_uplink_is_in_tap_mode() {
    let lan = "[network.lan]\nuplink = \"vx100\"\nunderlay = \"eth0\"\n";
    let keys = "force-copy = true\nunderlay-queues = 2\nunderlay-start-queue = 4\n";
    let port = "[port.a]\nsocket-path = \"/a\"\nnetwork = \"lan\"\n";
    let file = read(&format!("{lan}{keys}{port}")).expect("valid");
    let leased: Vec<_> = file.queues();
    let leased: Vec<_> = leased
        .iter()
        .map(|of| (of.interface.as_str(), of.first, of.count))
        .collect();
    assert_eq!(leased, [("vx100", 0, 1), ("eth0", 4, 2)]);
    let uplink = file.networks[0].uplink.as_ref().expect("an uplink");
    let underlay = uplink.underlay.as_ref().expect("an underlay");
    assert_eq!(
        [uplink.options.bind, underlay.options.bind],
        [xsk::BindRequest::Auto, xsk::BindRequest::ForceCopy]
    );
    assert_eq!(
        [uplink.wanted().mode, underlay.wanted().mode],
        [ModeRequest::Tap, ModeRequest::Xdp]
    );
    for (keys, words) in [
        ("mode = \"native\"\n", ["network lan: mode", "tap mode"]),
        (
            "underlay-queues = 0\n",
            ["network lan: underlay-queues 0", "1 to"],
        ),
    ] {
        assert_wrong(&format!("{lan}{keys}{port}"), &words);
    }
    // Networks share all queues of an underlay, or none.
    let other = "[network.other]\nuplink = \"vx200\"\nunderlay = \"eth0\"\n";
    assert!(read(&format!("{lan}{keys}{port}{other}{keys}")).is_ok());
    assert_wrong(
        &format!("{lan}{keys}{port}{other}underlay-start-queue = 5\n"),
        &["network other: queue 5 of eth0 is asked for by network lan, too"],
    );
    let other = "[network.other]\nuplink = \"eth0\"\n[port.b]\nsocket-path = \"/b\"\nnetwork = \"other\"\n";
    assert_wrong(
        &format!("{lan}{port}{other}"),
        &["network other: queue 0 of eth0 is asked for by network lan, too"],
    );
    for (lan, words) in [
        ("underlay = \"eth0\"\n", "underlay: needs an uplink"),
        ("uplink = \"eth0\"\nunderlay = \"eth0\"\n", "this is the uplink"),
        (
            "uplink = \"eth0\"\ndrop-unknown-senders = true\n",
            "drop-unknown-senders: needs an underlay",
        ),
    ] {
        assert_wrong(&format!("[network.lan]\n{lan}{port}"), &[words]);
    }
}
