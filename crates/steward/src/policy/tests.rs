use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use steer::ModeRequest;

use super::*;

fn parse(text: &str) -> Result<Policy, String> {
    Policy::parse(Path::new("p.toml"), text).map_err(|error| error.to_string())
}

fn peer(uid: u32, gid: u32, groups: &[u32]) -> Credentials {
    Credentials {
        pid: 1,
        uid,
        gid,
        groups: groups.to_vec(),
    }
}

fn wanted(interface: &str, start_queue: u32, queues: u32) -> Wanted {
    Wanted {
        interface: interface.to_owned(),
        start_queue,
        queues,
        mode: ModeRequest::Xdp,
        filter: Filter::default(),
        network: false,
    }
}

/// The same for an address and a VLAN.
fn steered(start_queue: u32, queues: u32, last_byte: u8, vlan: u16) -> Wanted {
    Wanted {
        filter: Filter {
            macs: vec![[0x52, 0x54, 0, 0, 0, last_byte]],
            vlans: vec![vlan],
        },
        ..wanted("eth1", start_queue, queues)
    }
}

#[test]
fn flows_are_listed() {
    let flows = ["192.0.2.1:443", "[2001:db8::1]:80"];
    let listed = flows_text(&flows.map(|flow| flow.parse().expect("a flow")));
    assert_eq!(listed, flows.join(", "));
}

const FULL: &str = r#"
[limits]
connections = 3
[[allow]]
user = 1000
interface = "eth1"
queues = "0-3,6"
at-most = 2
memlock = "256 MiB"
macs = ["52:54:00:00:00:01"]
vlans = ["100", "200-202"]
[[allow]]
group = 107
interface = "eth1"
queues = "all"
busy-poll = 64
[[allow]]
user = "root"
group = 50
interface = "eth2"
queues = "0"
memlock = "unlimited"
"#;

#[test]
fn policy_is_shown_as_it_was_understood() {
    let text = parse(FULL).expect("valid").shown;
    let words: Vec<_> = text.split_whitespace().collect();
    let expected = "limits connections 3 \
                    rule 1 user 1000 interface eth1 queues 0-3,6 at-most 2 memlock 256MiB \
                    macs 52:54:00:00:00:01 vlans 100,200-202 \
                    rule 2 group 107 interface eth1 queues 0-255 busy-poll 64 \
                    rule 3 user 0 group 50 interface eth2 queues 0 memlock unlimited \
                    defaults of limits connections 64 defaults of rules";
    assert!(words.join(" ").starts_with(expected), "{text}");
}

#[test]
fn users_get_only_leases_that_a_rule_allows() {
    let policy = parse(FULL).expect("valid");
    let none = |_| 0;
    let alice = peer(1000, 1000, &[]);
    assert_eq!(policy.find(&alice, &steered(2, 2, 1, 100), none), Ok(0));
    let refused = |peer: &Credentials, wanted: &Wanted| {
        let refusal = policy.find(peer, wanted, none).expect_err("not allowed");
        assert_eq!(refusal.reason, Reason::NotAllowed);
        refusal.text
    };
    assert!(refused(&alice, &wanted("eth1", 3, 2)).contains("queue 4 of eth1: the policy allows it 0-3,6"));
    assert!(refused(&alice, &steered(0, 3, 1, 100)).contains("2 queue(s) of eth1 at a time"));
    assert!(refused(&alice, &wanted("eth2", 0, 1)).contains("user 1000 may not lease queues of eth2"));
    let remedy = refused(&alice, &wanted("eth2", 0, 1));
    assert!(
        remedy.contains("`user = 1000` and `interface = \"eth2\"`") && remedy.contains("(--user)"),
        "{remedy}"
    );
    assert!(remedy.contains("eth2 (only of eth1): "), "{remedy}");
    // The daemon of a unit is known by its group; its user has another number each time.
    let remedy = refused(&peer(1001, 1001, &[107]), &wanted("eth2", 0, 1));
    assert!(
        remedy.contains("`group = 107` and `interface = \"eth2\"`"),
        "{remedy}"
    );
    assert!(refused(&peer(1001, 1001, &[]), &wanted("eth1", 0, 1)).contains("user 1001"));
    assert_eq!(policy.rules_for(&peer(1001, 1001, &[])).count(), 0);
    // A rule with user and group is for those who are both.
    assert!(refused(&peer(0, 0, &[]), &wanted("eth2", 0, 1)).contains("no rule"));
    assert!(refused(&peer(1, 50, &[]), &wanted("eth2", 0, 1)).contains("no rule"));
    assert_eq!(
        policy.find(&peer(0, 0, &[7, 50]), &wanted("eth2", 0, 1), none),
        Ok(2)
    );
    // Supplementary groups count.
    assert_eq!(
        policy.find(&peer(5, 5, &[107]), &wanted("eth1", 250, 6), none),
        Ok(1)
    );
}

#[test]
fn rule_with_addresses_and_vlans_is_for_leases_of_these_only() {
    let policy = parse(FULL).expect("valid");
    let alice = peer(1000, 1000, &[]);
    let refused = |wanted: &Wanted| policy.find(&alice, wanted, |_| 0).expect_err("not allowed").text;
    let none = wanted("eth1", 0, 1);
    assert!(
        refused(&none).contains("one of 52:54:00:00:00:01 (mac)"),
        "{}",
        refused(&none)
    );
    let other = steered(0, 1, 2, 100);
    assert!(refused(&other).contains("not allow MAC 52:54:00:00:00:02, it allows 52:54:00:00:00:01"));
    assert!(refused(&steered(0, 1, 1, 203)).contains("not allow VLAN 203, it allows 100,200-202"));
    let mut untagged = steered(0, 1, 1, 100);
    untagged.filter.vlans.push(0);
    assert!(refused(&untagged).contains("VLAN 0"));
    untagged.filter.vlans.clear();
    assert!(refused(&untagged).contains("(vlan)"));
    // A rule without either allows any, and none; the NIC is told only what a rule names.
    let bob = peer(5, 107, &[]);
    assert_eq!(policy.find(&bob, &other, |_| 0), Ok(1));
    assert_eq!(policy.find(&bob, &none, |_| 0), Ok(1));
    assert!(
        !policy.rule(0).names.is_empty() && [1, 9].iter().all(|&rule| policy.rule(rule).names.is_empty())
    );
}

#[test]
fn queues_are_counted_for_each_rule() {
    let policy = parse(FULL).expect("valid");
    let alice = peer(1000, 107, &[]);
    let one_leased = |rule: usize| if rule == 0 { 1 } else { 0 };
    assert_eq!(policy.find(&alice, &steered(0, 1, 1, 100), one_leased), Ok(0));
    // What the first rule has no room for, the second may allow.
    assert_eq!(policy.find(&alice, &steered(0, 2, 1, 100), one_leased), Ok(1));
}

#[test]
fn mistakes_are_named_with_their_place() {
    let rule = |text: &str| parse(&format!("[[allow]]\n{text}")).expect_err("a mistake");
    for (text, words) in [
        ("user = 1\nqueues = \"0\"", "add `interface = \"eth1\"`"),
        (
            "user = 1\ninterface = \"e\"",
            "add `queues = \"0-3\"` or `queues = \"all\"`",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nat-most = 0",
            "at-most = 0: give a number of 1 or more",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nbusy-poll = 0",
            "busy-poll = 0: give a number of 1 to 65535",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nmacs = []",
            "macs = []: nothing could be leased",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nvlans = []",
            "vlans = []: give numbers",
        ),
        (
            "user = 4294967295\ninterface = \"e\"\nqueues = \"0\"",
            "user 4294967295",
        ),
        (
            "group = \"4294967295\"\ninterface = \"e\"\nqueues = \"0\"",
            "group \"4294967295\"",
        ),
        (
            "user = -1\ninterface = \"e\"\nqueues = \"0\"",
            "user = -1: give a name in quotes, or a number of 0 to 4294967294",
        ),
        (
            "interface = \"e\"\nqueues = \"0\"",
            "neither user nor group: add `group = ",
        ),
        ("user = 1\ninterface = \"e\"\nqueues = \"3-1\"", "0-3,6"),
        ("user = 1\ninterface = \"e\"\nqueues = \"0-256\"", "0 to 255"),
        ("user = 1\ninterface = \"e\"\nqueues = \"\"", "0-3,6"),
        (
            "user = \"no such user\"\ninterface = \"e\"\nqueues = \"0\"",
            "no user \"no such user\"",
        ),
        ("user = -1\ninterface = \"e\"\nqueues = \"0\"", "line 2"),
        ("user = 1\ninterface = \"\"\nqueues = \"0\"", "not a name"),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nmemlock = \"64MB\"",
            "64 MiB",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nmemlock = \"99999999999 GiB\"",
            "64 MiB",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nat_most = 1",
            "at_most",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nmacs = [\"01:00:5e:00:00:01\"]",
            "macs = [\"01:00:5e:00:00:01\"]: \"01:00:5e:00:00:01\": a multicast address",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nmacs = [\"00:00:00:00:00:00\"]",
            "\"00:00:00:00:00:00\": this address is invalid: use one such as",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nmacs = [\"52-54-00-00-00-01\"]",
            "\"52-54-00-00-00-01\": not a MAC address: give six hex bytes such as",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nmemlock = \"0 MiB\"",
            "memlock = \"0 MiB\": nothing could be locked: a queue pair takes 6 MiB",
        ),
        (
            "user = 1\ninterface = \"sixteen-letters-\"\nqueues = \"0\"",
            "interface = \"sixteen-letters-\"",
        ),
        (
            "user = 1\ninterface = \"..\"\nqueues = \"0\"",
            "`ip link` lists them",
        ),
        (
            "user = 1\ninterface = \"e\"\nqueues = \"0\"\nvlans = [\"4095\"]",
            "of 0 (untagged) to 4094",
        ),
    ] {
        let report = rule(text);
        assert!(
            report.contains(words) && report.starts_with("p.toml line "),
            "{report}"
        );
        assert_eq!(report.lines().count(), 1, "{report}");
    }
}

/// The parser says "invalid type: integer `0`, expected a string", and no key.
#[test]
fn value_of_another_kind_is_reported_with_key_line_and_remedy() {
    for (line, words) in [
        (
            "queues = 0",
            "queues = 0: give numbers and ranges in quotes such as \"0-3,6\", or \"all\"",
        ),
        ("queues = [0, 1]", "queues = [0, 1]: give numbers"),
        ("interface = 7", "interface = 7: give text in quotes"),
        ("user = true", "user = true: give a name in quotes, or a number"),
        (
            "group = 4294967296",
            "group = 4294967296: give a name in quotes, or a number of 0 to 4294967294",
        ),
        (
            "at-most = \"4\"",
            "at-most = \"4\": give a number of 1 or more, without quotes",
        ),
        ("at-most = -1", "at-most = -1: give a number"),
        (
            "memlock = 64",
            "memlock = 64: give a size in quotes such as \"64 MiB\"",
        ),
        (
            "macs = 7",
            "macs = 7: give a list such as [\"52:54:00:00:00:01\"]",
        ),
        (
            "busy-poll = true",
            "busy-poll = true: give a number of 1 to 65535",
        ),
        (
            "busy-poll = 65536",
            "busy-poll = 65536: give a number of 1 to 65535",
        ),
        (
            "vlans = true",
            "vlans = true: give a list such as [\"100-103\", 200]",
        ),
        ("hints = true", "hints = true: give a list"),
        ("zcrx = [\n443]", "zcrx = [: \"443\": not an address with a port"),
    ] {
        let report = parse(&format!("[[allow]]\n# a comment\n{line}\n")).expect_err(line);
        let place = "p.toml line 3: rule 1: ";
        assert!(report.starts_with(&format!("{place}{words}")), "{report}");
        assert_eq!(report.lines().count(), 1, "{report}");
    }
    for (text, words) in [
        (
            "allow = 5",
            "line 1: allow: give each rule below a line `[[allow]]`",
        ),
        (
            "[[limits]]\nconnections = 1",
            "line 1: limits: give keys and values below one line `[limits]`",
        ),
        (
            "[limits]\nconnections = \"9\"",
            "line 2: connections = \"9\": give a number of 1 or more",
        ),
        (
            "[limits]\nconnections = -1",
            "line 2: connections = -1: give a number",
        ),
        (
            "[limits]\nunbound-sockets = 1",
            "line 2: unbound-sockets = 1: give true or false",
        ),
        (
            "limits = 5",
            "line 1: limits: give keys and values below one line `[limits]`",
        ),
        (
            "[allow]\nuser = 1",
            "line 1: allow: give each rule below a line `[[allow]]`",
        ),
    ] {
        let report = parse(text).expect_err(text);
        assert!(report.contains(words), "{report}");
    }
}

#[test]
fn text_that_is_no_policy_is_shown_with_its_line() {
    for (line, words) in [
        (
            "memlok = 1",
            "rule 1: unknown key \"memlok\": did you mean \"memlock\"?",
        ),
        ("interface = \"eth1", "`interface = \"eth1`: invalid basic string"),
        ("queues = 0-3", "`queues = 0-3`: "),
        ("queues", "`queues`: "),
        ("user = 2", "`user = 2`: duplicate key"),
        (
            "connections = 2",
            "rule 1: connections belongs below a line `[limits]`",
        ),
    ] {
        let report = parse(&format!("[[allow]]\nuser = 1\n{line}\n")).expect_err(line);
        assert!(report.starts_with(&format!("p.toml line 3: {words}")), "{report}");
        assert_eq!(report.lines().count(), 1, "{report}");
    }
    let long = format!("[[allow]]\nuser = [\"{}ä\"]", "ä".repeat(90));
    let report = parse(&long).expect_err("a list");
    assert!(
        report.contains("ä…: give a name in quotes") && report.len() < 300,
        "{report}"
    );
}

#[test]
fn rule_that_cannot_be_is_named_with_its_line() {
    let report =
        parse("# all\n[[allow]]\nuser = 1\ninterface = \"e\"\nqueues = \"0\"\n\n[[allow]]\nuser = 2\n");
    let report = report.expect_err("no interface");
    assert!(
        report.starts_with("p.toml line 7: rule 2: interface is missing"),
        "{report}"
    );
}

#[test]
fn empty_policy_allows_nothing() {
    let policy = parse("").expect("valid");
    assert_eq!(policy.rules_for(&peer(0, 0, &[])).count(), 0);
    assert!(policy.shown.contains("nobody"), "{}", policy.shown);
}

#[test]
fn number_in_quotes_is_a_number_unless_it_is_a_name() {
    let rule = |user: &str| {
        parse(&format!(
            "[[allow]]\nuser = {user}\ninterface = \"e\"\nqueues = \"0\""
        ))
    };
    assert_eq!(rule("\"20001\""), rule("20001"));
    assert_eq!(rule("\"root\""), rule("0"));
    assert!(rule("\"-1\"").is_err() && rule("\"4294967296\"").is_err());
}

#[test]
fn limit_of_no_connections_is_an_error() {
    let report = parse("[limits]\nconnections = 0").expect_err("nobody");
    assert!(report.contains("line 2: connections = 0"), "{report}");
    for more in [901, 1_000_000] {
        let report = parse(&format!("[limits]\nconnections = {more}")).expect_err("more than there are");
        assert!(
            report.contains(&format!("line 2: connections = {more}: a steward has 900 in all")),
            "{report}"
        );
    }
    assert_eq!(
        parse("[limits]\nconnections = 900").map(|policy| policy.connections),
        Ok(900)
    );
    assert!(!parse("").expect("valid").unbound);
    let policy = parse("[limits]\nunbound-sockets = true").expect("valid");
    assert!(policy.unbound);
}

#[test]
fn file_that_others_can_replace_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let (inner, mode) = (dir.path().join("etc"), |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("ours");
    });
    fs::create_dir(&inner).expect("ours");
    let path = inner.join("steward.toml");
    fs::write(&path, FULL).expect("writable");
    let link = dir.path().join("link.toml");
    std::os::unix::fs::symlink(&path, &link).expect("ours");
    mode(&path, 0o644);
    mode(&inner, 0o755);
    assert!(Policy::read(&path).is_ok() && Policy::read(&link).is_ok());
    let (change, move_it) = ("chmod go-w", "move it, for example to /etc/vhost-af-xdp");
    for others in [0o664, 0o646] {
        mode(&path, others);
        let error = Policy::read(&path).expect_err("writable by others").to_string();
        assert!(error.contains(change), "{error}");
    }
    mode(&path, 0o644);
    for (of, others, remedy) in [
        (&inner, 0o777, change),
        (&inner, 0o1777, move_it),
        (&inner, 0o775, change),
        (&dir.path().to_owned(), 0o777, change),
    ] {
        mode(of, others);
        for path in [&path, &link] {
            let error = Policy::read(path).expect_err("replaceable").to_string();
            assert!(
                error.contains(remedy) && error.contains(&of.display().to_string()),
                "{error}"
            );
        }
        mode(of, 0o755);
    }
    assert!(Policy::read(&dir.path().join("none")).is_err());
    // Sticky above is as good as not writable: names there are their owners'.
    mode(dir.path(), 0o1777);
    assert!(Policy::read(&path).is_ok());
    let none = Policy::read(&inner.join("none.toml"))
        .expect_err("not there")
        .to_string();
    assert!(none.contains("--policy"), "{none}");
}

/// All of these are read in the thread that serves: none may keep it, or fill its memory.
#[test]
fn special_and_endless_files_are_rejected_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name);
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, path("fifo"), fifo, mode, 0).expect("a FIFO");
    fs::create_dir(path("directory")).expect("a directory");
    std::os::unix::fs::symlink("/dev/zero", path("zero")).expect("a link");
    std::os::unix::fs::symlink("circle", path("circle")).expect("a link");
    let long = fs::File::create(path("long")).expect("a file");
    long.set_len(1 << 40).expect("sparse");
    let comments = format!("{FULL}{}", "#\n".repeat(1 << 19));
    fs::write(path("comments"), comments).expect("writable");
    for (name, why) in [
        ("fifo", "not a regular file"),
        ("directory", "not a regular file"),
        ("zero", "not a regular file"),
        ("circle", "symbolic links"),
        ("long", "longer than 1024 KiB"),
        ("comments", "longer than 1024 KiB"),
    ] {
        let (answer, read) = std::sync::mpsc::channel();
        let path = path(name);
        std::thread::spawn(move || answer.send(Policy::read(&path)));
        let error = read
            .recv_timeout(testkit::wait::SOON)
            .unwrap_or_else(|_| panic!("{name} keeps its reader"))
            .expect_err(name);
        let source = std::error::Error::source(&error).map(ToString::to_string);
        assert!(
            source.as_ref().is_some_and(|source| source.contains(why)),
            "{name}: {error}: {source:?}"
        );
        assert!(error.to_string().contains("--policy"), "{error}");
    }
}

#[test]
fn text_in_other_letters_is_shown_as_any() {
    // Whatever is written before the value is looked through for its key.
    let report = parse("# Größe = 1, für ß = ä\n[[allow]]\n[[allow.user]]\nx = 1\n").expect_err("no user");
    assert!(report.starts_with("p.toml line 3: "), "{report}");
}

#[test]
fn stations_of_a_network_are_judged_one_by_one() {
    let rule = "[[allow]]\nuser = 7\ninterface = \"eth1\"\nqueues = \"all\"\n";
    let policy = |more: &str| Policy::parse(Path::new("p"), &format!("{rule}{more}")).expect("a policy");
    let peer = peer(7, 7, &[]);
    let network = Wanted {
        network: true,
        ..wanted("eth1", 0, 2)
    };
    let found = |policy: &Policy| policy.find(&peer, &network, |_| 0).is_ok();
    assert!(!found(&policy("")), "it has to say so");
    let (any, some) = (
        policy("network = true\n"),
        policy("network = true\nmacs = [\"02:00:00:00:00:01\"]\nvlans = [\"5-6\"]\n"),
    );
    assert!(found(&any) && found(&some));
    let closed = policy("network = true\nhost = false\n");
    assert!(any.check_host(0).is_ok() && closed.check_host(0).is_err());
    let vain = Policy::parse(Path::new("p"), &format!("{rule}host = true\n")).expect_err("no network");
    assert!(vain.to_string().contains("network = true"), "{vain}");
    let of_host = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 3]].into();
    let judged = |policy: &Policy, last: u8, vlan| {
        let mac = [2, 0, 0, 0, 0, last];
        let station = steer::Station { vlan, mac };
        policy.check_station(0, station, &of_host).is_ok()
    };
    assert!(judged(&any, 2, 9));
    assert!(!judged(&any, 1, 9) && !judged(&any, 3, 9), "the host's");
    assert!(judged(&some, 1, 5), "the host's, and named");
    assert!(!judged(&some, 1, 7) && !judged(&some, 1, 0) && !judged(&some, 2, 5));
}

#[test]
fn networks_advertise_only_addresses_that_their_rule_names() {
    let rule = "[[allow]]\nuser = 7\ninterface = \"eth1\"\nqueues = \"0-3\"\n";
    let policy = |more: &str| Policy::parse(Path::new("p"), &format!("{rule}{more}")).expect("a policy");
    let some = policy("network = true\nadvertise = true\nips = [\"192.0.2.0/24\"]\nat-most = 2\n");
    let (none, on_eth1) = (policy("network = true\n"), policy(""));
    let refused = |policy: &Policy, ip: Option<&str>| {
        let ip = ip.map(|ip| ip.parse().expect("an address"));
        policy
            .check_advertised(0, ip)
            .err()
            .map(|refusal| refusal.to_string())
    };
    for allowed in [None, Some("192.0.2.9")] {
        assert_eq!(refused(&some, allowed), None);
        let why = refused(&none, allowed).expect("`advertise` is not set");
        assert!(why.contains("`advertise = true`"), "{why}");
    }
    let why = refused(&some, Some("192.0.3.1")).expect("not in `ips`");
    assert!(
        why.contains("192.0.3.1") && why.contains("`ips` of rule 1"),
        "{why}"
    );
    let (user, other) = (peer(7, 7, &[]), peer(8, 8, &[]));
    assert!(none.check_network_on(&user, "eth1").is_ok());
    for (policy, peer, interface) in [
        (&none, &user, "eth2"),
        (&none, &other, "eth1"),
        (&on_eth1, &user, "eth1"),
    ] {
        assert!(policy.check_network_on(peer, interface).is_err());
    }
    // A connection for each queue that can be leased, and some without a lease.
    assert_eq!((none.places(0), some.places(0)), (4 + ASKING, 2 + ASKING));
    assert_eq!(
        (none.rules_for(&user).count(), none.rules_for(&other).count()),
        (1, 0)
    );
    assert!(!none.allows_zcrx() && policy("zcrx = [\"192.0.2.1:80\"]\n").allows_zcrx());
}

#[test]
fn netkits_need_a_rule_that_allows_them() {
    let rule = "[[allow]]\nuser = 7\ninterface = \"eth1\"\nqueues = \"0-3\"\n";
    let parse = |more: &str| Policy::parse(Path::new("p"), &format!("{rule}{more}"));
    let policy = |more: &str| parse(more).expect("a policy");
    assert!(policy("netkit = true\n").check_netkit(0).is_ok());
    for none in ["", "netkit = false\n"] {
        let refusal = policy(none).check_netkit(0).expect_err("not report");
        assert_eq!(refusal.reason, Reason::NotAllowed);
        assert!(refusal.text.contains("`netkit = true` to rule 1"), "{refusal}");
    }
    assert!(
        policy("netkit = true\n").check_netkit(usize::MAX).is_err(),
        "of no rule"
    );
    let report = parse("netkit = \"yes\"\n").expect_err("no answer").to_string();
    assert!(report.contains("true or false"), "{report}");
    let vain =
        parse("zcrx = [\"192.0.2.1:443\"]\naf-xdp = false\nnetkit = true\n").expect_err("no lease for it");
    assert!(vain.to_string().contains("netkit"), "{vain}");
}

#[test]
fn hints_are_all_that_a_rule_names_or_all() {
    let rule = "[[allow]]\nuser = 7\ninterface = \"eth1\"\nqueues = \"0-3\"\n";
    let parse = |more: &str| Policy::parse(Path::new("p"), &format!("{rule}{more}"));
    let hints = |more: &str| parse(more).expect("a policy").rule(0).hints;
    assert_eq!(hints(""), HintSet::ALL);
    assert_eq!(hints("hints = \"none\"\n"), HintSet::NONE);
    assert_eq!(
        hints("hints = \"vlan,hash\"\n"),
        HintSet::HASH.with(HintSet::VLAN)
    );
    let report = parse("hints = \"time\"\n").expect_err("no such hint").to_string();
    assert!(report.contains("hash,vlan,timestamp,mark"), "{report}");
}
