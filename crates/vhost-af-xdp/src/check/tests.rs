use ::host::links::{DriverSends, DriverXdp, Link};
use ::host::nic::Tags;
use common::drivers::TABLE;
use steer::{AttachedAs, ForeignProgram, HintSet, Mode};
use testkit::assert_has;

use program::steward::DEFAULT_SOCKET;

use super::*;
use crate::api::queues::Queue;
use crate::api::queues::{Holder, Leased};

/// igb with two queues, without another user, as root sees it.
fn igb() -> Facts {
    Facts {
        link: Link {
            index: 2,
            name: "eth1".to_owned(),
            mtu: 1500,
            driver: "igb".to_owned(),
            up: true,
            rx_queues: 2,
            ..Link::default()
        },
        carrier: Some(true),
        loopback: false,
        bridge: None,
        losses: String::new(),
        kernel: Some((7, 2)),
        release: "7.2.13".to_owned(),
        driver: Some(DriverXdp {
            native: true,
            pieces: false,
            sends: DriverSends::default(),
        }),
        line: TABLE.iter().find(|line| line.driver == "igb"),
        program: None,
        most_queues: Some(8),
        rules: Ok(0),
        contexts: Ok(0),
        tags: Tags::There,
        hints: Some(HintSet::NONE),
        queues: Vec::new(),
        lacking: Vec::new(),
        memlock_bytes: Some(8 << 20),
        locks_any: true,
        huge_pages: Vec::new(),
        steward: false,
        steward_at: DEFAULT_SOCKET.to_owned(),
        not_seen: Vec::new(),
    }
}

fn with(change: impl FnOnce(&mut Facts)) -> Report {
    let mut facts = igb();
    change(&mut facts);
    Report::new(facts, None)
}

fn modes(report: &Report) -> [Option<&str>; 3] {
    [0, 1, 2].map(|at| report.placements[at].mode.as_deref())
}

fn typed(report: &Report, goal: &str) -> String {
    let advice = report.advice.iter().find(|advice| advice.goal == goal);
    advice.map(|advice| advice.lines.join("\n")).unwrap_or_default()
}

fn found(report: &Report) -> String {
    let lines: Vec<_> = report.findings.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

const ZERO_COPY: Option<&str> = Some("zero-copy");
const NATIVE: Option<&str> = Some("copy (native)");
const SKB: Option<&str> = Some("copy (skb)");
const TAP: Option<&str> = Some("tap");

#[test]
fn modes_are_those_of_the_conditions_that_serve_goes_by() {
    let report = with(|_| ());
    assert_eq!(modes(&report), [ZERO_COPY; 3]);
    // What direct placement requires of the guest and its VMM, each condition once.
    let depends = report.placements[2].depends_on.join("\n");
    assert_has(
        &depends,
        &["(mac, vlan)", "steward", "IN_ORDER", "inflight", "huge pages"],
    );
    assert_eq!(report.placements[2].depends_on.len(), 5);

    let ixgbe = with(|facts| facts.line = TABLE.iter().find(|line| line.driver == "ixgbe"));
    assert_eq!(modes(&ixgbe), [ZERO_COPY, ZERO_COPY, NATIVE]);
    assert_has(&ixgbe.placements[2].why_not_more[0], &["not known for it"]);
    assert_has(&typed(&ixgbe, "direct placement"), &["--memory send-direct"]);

    let ice = with(|facts| facts.line = TABLE.iter().find(|line| line.driver == "ice"));
    assert_eq!(modes(&ice), [NATIVE; 3]);
    assert_has(&ice.placements[0].why_not_more[0], &["known bad"]);

    let none = with(|facts| facts.driver.as_mut().expect("said").native = false);
    assert_eq!(modes(&none), [TAP, SKB, SKB]);
    let bond = with(|facts| facts.link.driver = "bonding".to_owned());
    assert_eq!(modes(&bond), [TAP, SKB, SKB]);
    let jumbo = with(|facts| facts.link.mtu = 9000);
    assert_eq!(modes(&jumbo), [TAP, None, None]);
    assert_has(&typed(&jumbo, "direct placement"), &["mtu 3822"]);
}

#[test]
fn kernel_that_does_not_say_is_told_of_by_the_table_of_drivers() {
    let old = with(|facts| {
        facts.driver = None;
        facts.kernel = Some((6, 1));
    });
    assert_eq!(modes(&old), [ZERO_COPY; 3]);
    let lacks: Vec<_> = old.facts.lacks().map(|(from, _)| from).collect();
    assert_eq!(lacks, ["6.3", "6.4", "6.6", "6.8", "6.18"]);
    let unknown = with(|facts| (facts.driver, facts.line) = (None, None));
    assert_eq!(modes(&unknown), [TAP, SKB, SKB]);
}

#[test]
fn checksums_are_whose_they_will_be() {
    let of = |report: &Report| report.placements[0].checksums.clone();
    assert_eq!(of(&with(|_| ())).as_deref(), Some("daemon"));
    let does = |facts: &mut Facts| facts.driver.as_mut().expect("said").sends.checksum = true;
    assert_eq!(of(&with(does)).as_deref(), Some("NIC (TX metadata)"));
    let old = with(|facts| {
        does(facts);
        facts.kernel = Some((6, 7));
    });
    assert_eq!(of(&old).as_deref(), Some("daemon"));
}

#[test]
fn queues_that_are_taken_are_not_proposed() {
    let taken = |queue| Queue {
        interface: "eth1".to_owned(),
        queue,
        bound: vec!["xsk".to_owned()],
        ..Queue::default()
    };
    let report = with(|facts| {
        facts.link.rx_queues = 6;
        facts.queues = vec![taken(0), taken(2)];
    });
    assert_eq!(report.facts.free_queues(), [1, 3, 4, 5]);
    assert_has(&typed(&report, "one guest on a queue"), &["--start-queue 1"]);
    assert_has(&typed(&report, "several pairs"), &["--start-queue 3 --queues 3"]);
    let none = with(|facts| facts.queues = vec![taken(0), taken(1)]);
    assert_has(&typed(&none, "one guest on a queue"), &["no queue is free"]);
    let all_taken = typed(&none, "one guest on a queue");
    assert!(
        all_taken.contains("queues 0-1: somebody else's") && all_taken.contains("ethtool -L eth1 combined 3"),
        "{none}"
    );
    assert_has(&typed(&none, "several pairs"), &["ethtool -L eth1 combined 4"]);
    assert_eq!(none.facts.holders(), ["queues 0-1: somebody else's"]);
}

/// A queue that process 7 uses for network lan, or for a port of it.
fn ours(number: u32, port: Option<&str>) -> Queue {
    Queue {
        interface: "eth1".to_owned(),
        queue: number,
        bound: vec!["xsk".to_owned()],
        holder: Some(Holder {
            pid: 7,
            network: Some("lan".to_owned()),
            port: port.map(str::to_owned),
            configuration: Some("/etc/lan.toml".into()),
            api: Some("/run/api.sock".into()),
            ..Holder::default()
        }),
        ..Queue::default()
    }
}

fn program() -> Option<ForeignProgram> {
    Some(ForeignProgram {
        id: 5,
        mode: AttachedAs::Mode(Mode::Native),
        name: None,
    })
}

#[test]
fn network_that_has_the_queues_gets_one_more_port_and_nothing_has_to_go() {
    let report = with(|facts| {
        facts.queues = vec![ours(0, None), ours(1, None)];
        facts.program = program();
    });
    assert_eq!(report.facts.holders(), ["queues 0-1: network lan, process 7"]);
    let text = report.to_string();
    for wrong in [
        "another's",
        "others'",
        "would be the host's",
        "end its holder",
        "somebody else",
        "[network.lan]",
    ] {
        assert!(!text.contains(wrong), "{wrong}: {text}");
    }
    assert_eq!(
        typed(&report, "many guests by address"),
        "# network lan of process 7 has queues 0-1: a further guest is a port of it, and takes no queue\n\
         vhost-af-xdp port add NAME socket-path=PATH network=lan mac=MAC"
    );
    assert!(
        report
            .facts
            .program_text()
            .as_deref()
            .is_some_and(|program| program.ends_with("process 7's, for network lan")),
        "{text}"
    );
    // One more queue is for one guest alone: the NIC's RSS still uses only those of the network.
    let more = typed(&report, "one guest on a queue");
    assert_has(&more, &["ethtool -L eth1 combined 3", "ethtool -X eth1 equal 2"]);
    // Frames for its guests arrive on all queues, unless the NIC is configured.
    let half = with(|facts| {
        facts.link.rx_queues = 3;
        facts.queues = vec![ours(0, None), ours(1, Some("vm1"))];
        facts.program = program();
    });
    assert_eq!(
        half.facts.holders(),
        [
            "queue 0: network lan, process 7",
            "queue 1: port vm1 of network lan, process 7"
        ]
    );
    assert_has(
        &typed(&half, "many guests by address"),
        &["# queues 1-2 are not its own"],
    );
    assert!(
        typed(&half, "one guest on a queue").starts_with(
            "vhost-af-xdp port add NAME socket-path=PATH ifname=eth1 start-queue=2 network=lan mac=MAC"
        ),
        "{half}"
    );
}

#[test]
fn further_guests_go_where_the_program_is() {
    let line = |change: fn(&mut Queue)| {
        let report = with(|facts| {
            let mut queue = ours(0, Some("vm1"));
            queue.holder.as_mut().expect("one").network = None;
            change(&mut queue);
            facts.queues = vec![queue];
            facts.program = program();
        });
        typed(&report, "one guest on a queue")
    };
    let by_file = line(|queue| queue.holder.as_mut().expect("one").api = None);
    assert!(
        by_file.starts_with(
            "# in /etc/lan.toml, then `vhost-af-xdp reload`: [port.NAME] with socket-path = \"PATH\", ifname = \"eth1\", \
             start-queue = 1"
        ),
        "{by_file}"
    );
    let fixed = line(|queue| queue.holder.as_mut().expect("one").configuration = None);
    assert_has(&fixed, &["its ports are fixed"]);
    // A steward's program can serve other daemons, too.
    let leased = line(|queue| {
        queue.lease = Some(Leased {
            pid: 7,
            command: String::new(),
            uid: 1,
            start_queue: 0,
            queues: 1,
            steered: "queue",
            impaired: false,
            orphaned: false,
            zcrx: false,
        });
    });
    assert_has(
        &leased,
        &["--start-queue 1 --steward /run/vhost-af-xdp/steward.sock"],
    );
}

#[test]
fn loopback_is_told_what_serves_instead() {
    let report = with(|facts| {
        facts.loopback = true;
        facts.link.name = "lo".to_owned();
    });
    let text = report.to_string();
    assert!(
        !text.contains("--ifname lo") && !text.contains("uplink = \"lo\""),
        "{text}"
    );
    assert!(
        typed(&report, "guests among themselves").contains("[network.inner]"),
        "{text}"
    );
    assert!(
        typed(&report, "guests and this host").contains("type veth"),
        "{text}"
    );
}

#[test]
fn netkit_without_a_peer_is_told_the_one_way_that_there_is() {
    let of = |queues| {
        with(|facts| {
            facts.link.has_leased_only = true;
            facts.link.name = "pod0".to_owned();
            facts.link.rx_queues = queues;
        })
    };
    let report = of(2);
    let line = "--ifname pod0 --start-queue 1 --inhibit --map-path MAP";
    assert_has(&typed(&report, "one guest on the leased queue"), &[line]);
    assert_has(&report.to_string(), &["only a program on that NIC sees"]);
    assert!(
        report.placements.iter().all(|placement| placement.mode.is_none()),
        "{report}"
    );
    assert!(
        of(1).to_string().contains("no queue is leased to pod0"),
        "{}",
        of(1)
    );
}

#[test]
fn network_takes_all_queues_and_says_what_becomes_of_tags() {
    let of = |report: &Report| serde_json::to_value(&report.network).expect("JSON");
    let network = of(&with(|_| ()));
    assert_eq!(
        (&network["mode"], &network["queues"]),
        (&"zero-copy".into(), &2.into())
    );
    assert_eq!(network["taken_queues"], serde_json::json!([]));
    let report = with(|facts| {
        facts.tags = Tags::TakenOff;
        facts.queues = vec![Queue {
            interface: "eth1".to_owned(),
            queue: 1,
            bound: vec!["xsk".to_owned()],
            ..Queue::default()
        }];
    });
    assert_eq!(of(&report)["taken_queues"], serde_json::json!([1]));
    assert!(
        found(&report).contains("note: eth1: the driver takes tags off, and ports with VLANs are refused")
    );
    assert!(!report.is_faulty(), "guests may use none: {report}");
    let reported = with(|facts| (facts.tags, facts.hints) = (Tags::TakenOff, Some(HintSet::VLAN)));
    assert_has(&reported.facts.vlans(), &["in native mode"]);
    assert_eq!(found(&reported), "");
    let lines = typed(&report, "many guests by address");
    assert_has(
        &lines,
        &["queue 1: somebody else's", "uplink = \"eth1\"", "queues = 2"],
    );
    // A network copies frames, so the MTU limit of direct placement does not apply.
    let jumbo = with(|facts| facts.link.mtu = 9000);
    assert_eq!(of(&jumbo)["mode"], "tap");
}

#[test]
fn what_an_operator_should_act_on_has_a_remedy() {
    let report = with(|facts| {
        facts.link.up = false;
        facts.tags = Tags::TakenOff;
        facts.lacking = vec!["CAP_NET_ADMIN", "CAP_BPF"];
    });
    assert_has(
        &found(&report),
        &[
            "error: eth1: eth1 is down: `ip link set dev eth1 up`",
            "CAP_NET_ADMIN, CAP_BPF, which this process lacks: start it as root",
            "ethtool -K eth1 rxvlan off",
        ],
    );
    assert!(report.is_faulty());
    assert_eq!(found(&with(|_| ())), "");
    assert!(!with(|_| ()).is_faulty());
    let leased = with(|facts| {
        facts.lacking = vec!["CAP_BPF"];
        facts.steward = true;
    });
    assert_has(
        &typed(&leased, "one guest on a queue"),
        &["--steward /run/vhost-af-xdp/steward.sock"],
    );
    let short = with(|facts| (facts.locks_any, facts.memlock_bytes) = (false, Some(64 << 10)));
    assert_eq!(short.facts.copy_pairs(), Some(0));
    assert_has(&found(&short), &["raise it (`ulimit -l 6144`"]);
    let all: [fn(&mut Facts); 7] = [
        |facts| facts.loopback = true,
        |facts| (facts.link.has_leased_only, facts.link.rx_queues) = (true, 1),
        |facts| facts.carrier = Some(false),
        |facts| (facts.link.mtu, facts.kernel) = (9000, Some((6, 1))),
        |facts| facts.program = program(),
        |facts| facts.losses = "mv0 drops them: use mode = \"tap\"".to_owned(),
        |facts| {
            facts.queues = [0, 1]
                .map(|queue| Queue {
                    holder: None,
                    ..ours(queue, Some("a"))
                })
                .into();
        },
    ];
    for change in all {
        let report = with(change);
        assert!(report.is_faulty(), "{report}");
        assert!(
            report.findings.iter().all(|finding| finding.remedy.is_some()),
            "{report}"
        );
    }
}

#[test]
fn document_has_each_field_and_no_other() {
    let document = include_str!("../../../../docs/cli.md");
    let begin = document.find("\n## check\n").expect("the section");
    let rows = document[begin..]
        .lines()
        .skip_while(|line| !line.starts_with("| field"));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    let names = rows.flat_map(|row| row.split('|').nth(1).expect("a cell").split(", "));
    let mut documented: Vec<_> = names
        .map(|name| name.trim().trim_matches('`').trim_end_matches("[]"))
        .collect();
    documented.sort_unstable();
    let value = serde_json::to_value(with(|_| ())).expect("JSON");
    let mut fields: Vec<_> = value.as_object().expect("an object").keys().collect();
    fields.sort_unstable();
    assert_eq!(documented, fields);
}

#[test]
fn text_has_the_fields_and_ends_with_the_findings() {
    let text = with(|facts| facts.link.up = false).to_string();
    assert_has(
        &text,
        &[
            "interface: name eth1, index 2, mtu 1500, mac 00:00:00:00:00:00, up false, carrier true, receive_queues 2",
            "\nplacement copy:\n  mode: zero-copy\n  checksums: daemon\n",
            "\ntype one guest on a queue:\n  lines:\n    vhost-af-xdp serve --socket-path /run/vm1.sock --ifname eth1\n",
        ],
    );
    assert!(
        text.ends_with("\nerror: eth1: eth1 is down: `ip link set dev eth1 up`\n"),
        "{text}"
    );
}

#[test]
fn what_an_interface_loses_that_stands_on_others_comes_first() {
    let losses = "mv0 gets packets of up to 64 KiB: use mode = \"tap\"";
    let report = with(|facts| facts.losses = losses.to_owned());
    assert_eq!(found(&report), format!("warning: eth1: {losses}"));
}

#[test]
fn what_tcp_of_the_host_costs_goes_by_interface_and_mode() {
    let said = |change: fn(&mut Facts)| with(change).facts.host();
    let costs = |change, times: &str| {
        let said = said(change).expect("something");
        assert_has(&said, &[&format!("costs it {times} times the instructions")]);
    };
    costs(|_| (), "1.3");
    costs(|facts| facts.driver.as_mut().expect("said").native = false, "3.3");
    costs(|facts| facts.link.partial_checksums = true, "14");
    let above = |facts: &mut Facts| {
        facts.losses = "mv0 gets packets of up to 64 KiB".to_owned();
        facts.driver.as_mut().expect("said").native = false;
    };
    costs(above, "1.4");
    assert_eq!(said(|facts| facts.loopback = true), None);
}
