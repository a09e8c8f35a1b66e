use anyhow::bail;
use clap::{CommandFactory, Parser};
use common::command_line::{mistake, named_command, sentence};
use testkit::assert_has;

use super::{Cli, Command};
use crate::config::{Control, InterfaceQueues, NicConfig, Placement, ServeConfig};

pub(crate) fn serve(arguments: &[&str]) -> anyhow::Result<ServeConfig> {
    let arguments = ["vhost-af-xdp", "serve"].iter().chain(arguments);
    match Cli::try_parse_from(arguments)?.command {
        Some(Command::Serve(args)) => args.into_config(),
        _ => bail!("not serve"),
    }
}

#[test]
fn ports_inherit_what_they_do_not_say() {
    let config = serve(&[
        "--ifname=eth1",
        "--memory=direct",
        "--port=socket-path=/a",
        "--port=socket-path=/b,start-queue=1,memory=copy",
    ])
    .expect("valid");
    assert_eq!(config.ports.len(), 2);
    assert_eq!(config.ports[0].options.placement, Placement::Direct);
    assert_eq!(config.ports[1].options.placement, Placement::Copy);
    assert!(
        matches!(&config.ports[1].nic, NicConfig::Interface(InterfaceQueues { name, start_queue: 1, .. }) if name == "eth1")
    );
}

#[test]
fn missing_interface_names_the_remedy() {
    let error = serve(&["--socket-path=/a"]).expect_err("no interface");
    assert_has(&error.to_string(), &["name one by --ifname"]);
}

#[test]
fn forced_zero_copy_excludes_what_cannot_be_zero_copy() {
    let with = |option: &str| serve(&["--ifname=eth1", "--socket-path=/a", "--force-zero-copy", option]);
    assert!(
        with("--mode=native")
            .and_then(|config| Ok(config.check()?))
            .is_ok()
    );
    for option in ["--mode=skb", "--memory=direct"] {
        let error = with(option).expect("options").check().expect_err("refused");
        assert_has(&error.to_string(), &["--force-zero-copy"]);
    }
    assert!(with("--force-copy").is_err());
}

#[test]
fn offloads_are_chosen_a_port_within_what_its_memory_can_do() {
    let config = serve(&[
        "--ifname=eth1",
        "--offload=all,-uso",
        "--port=socket-path=/a",
        "--port=socket-path=/b,start-queue=1,offload=tso4+guest-csum",
        "--port=socket-path=/c,start-queue=2,memory=direct",
    ])
    .expect("valid");
    config.check().expect("within");
    let names = |port: usize| config.ports[port].offload.names();
    assert!(names(0).contains(&"guest-tso4") && !names(0).contains(&"uso"));
    assert_eq!(names(1), ["csum", "tso4", "guest-csum"]);
    assert!(names(2).contains(&"tso4") && !names(2).contains(&"guest-tso4"));
}

#[test]
fn what_a_minus_takes_away_is_off_and_nothing_else() {
    let config = serve(&[
        "--ifname=eth1",
        "--sandbox",
        "-files",
        "--offload=-uso",
        "--port=socket-path=/a",
        "--port=socket-path=/b,start-queue=1,memory=direct,offload=-ecn+-csum",
    ])
    .expect("valid");
    config.check().expect("within");
    assert_eq!(config.layers.off(), ["files"]);
    let off = |port: usize| config.ports[port].offloads_off();
    assert_eq!(off(0), ["uso"]);
    assert_eq!(off(1), ["csum", "tso4", "tso6", "ecn", "uso"]);
}

#[test]
fn offload_that_direct_memory_cannot_do_is_refused_by_name() {
    let config = serve(&[
        "--ifname=eth1",
        "--memory=direct",
        "--offload=guest-tso4",
        "--socket-path=/a",
    ]);
    let error = config.expect("words").check().expect_err("not in direct");
    assert_has(&error.to_string(), &["guest-tso4"]);
    assert!(serve(&["--ifname=eth1", "--offload=ufo", "--socket-path=/a"]).is_err());
}

#[test]
fn tables_without_a_pause_are_refused() {
    for (argument, accepted) in [
        ("--watch=0", false),
        ("--watch=86401", false),
        ("--watch", true),
        ("--watch=5", true),
    ] {
        let read = Cli::try_parse_from(["vhost-af-xdp", "queues", argument]);
        assert_eq!(read.is_ok(), accepted, "{argument}");
    }
}

#[test]
fn access_is_for_sockets_that_are_made_here() {
    let config = serve(&[
        "--null",
        "--socket-group=root",
        "--port=socket-path=/a",
        "--port=socket-path=/b,socket-mode=600,socket-owner=7",
        "--port=socket-path=/c,client",
    ])
    .expect("valid");
    let access = |port: usize| config.ports[port].access;
    assert_eq!(
        (access(0).group, access(0).mode, access(0).owner),
        (Some(0), 0o660, None)
    );
    assert_eq!(
        (access(1).group, access(1).mode, access(1).owner),
        (Some(0), 0o600, Some(7))
    );
    for arguments in [
        ["--null", "--socket-mode=660", "--socket-path=/a", "--client"].as_slice(),
        &["--null", "--socket-mode=660", "--fd=7"],
        &["--null", "--port=socket-path=/a,client,socket-group=root"],
    ] {
        let error = serve(arguments).expect_err("nothing to give");
        assert_has(&format!("{error:#}"), &["does not make this socket"]);
    }
}

#[test]
fn cable_has_two_ends() {
    let ends = |ports: &[&str]| serve(&[&["--cable=x"], ports].concat()).expect("words").check();
    ends(&["--port=socket-path=/a", "--port=socket-path=/b"]).expect("two");
    let error = ends(&["--port=socket-path=/a", "--port=socket-path=/b,ifname=eth1"]).expect_err("one");
    assert_has(&error.to_string(), &["cable x: 1 port(s)"]);
}

#[test]
fn unknown_port_key_is_refused() {
    let error = serve(&["--null", "--port=socket-path=/a,colour=red"]).expect_err("unknown key");
    assert_has(&format!("{error:#}"), &["colour"]);
}

#[test]
fn mac_and_vlans_say_which_frames_a_port_takes() {
    let config = serve(&[
        "--ifname=eth1",
        "--vlan=7",
        "--port=socket-path=/a,mac=02:00:00:00:00:0a,vlan=0+200-202+201",
        "--port=socket-path=/b,start-queue=1",
    ])
    .expect("valid");
    config.check().expect("an interface");
    let filter = |port: usize| config.ports[port].wanted().expect("an interface").filter;
    assert_eq!(filter(0).macs, [[2, 0, 0, 0, 0, 10]]);
    assert_eq!(filter(0).vlans, [0, 200, 201, 202]);
    assert!(filter(1).macs.is_empty() && filter(1).vlans == [7]);
    for (list, words) in [
        ("4095", "0 (untagged) to 4094"),
        ("3-1", "ranges"),
        ("x", "ranges"),
    ] {
        let error = serve(&["--ifname=eth1", "--socket-path=/a", "--vlan", list]).expect_err(list);
        assert_has(&error.to_string(), &[words]);
    }
    let check = |args: &[&str]| {
        serve(args)
            .expect("words")
            .check()
            .expect_err("refused")
            .to_string()
    };
    assert!(check(&["--null", "--socket-path=/a", "--vlan=1"]).contains("--ifname"));
    assert!(check(&["--ifname=eth1", "--socket-path=/a", "--vlan=1-17"]).contains("17 VLANs"));
}

#[test]
fn name_that_no_interface_can_have_is_refused() {
    for name in ["", "sixteen-letters-", "a/b", "eth 1", "..", "eth1:0"] {
        for arguments in [
            [format!("--ifname={name}"), "--socket-path=/a".to_owned()].as_slice(),
            &[
                "--null".to_owned(),
                format!("--port=socket-path=/a,ifname={name}"),
            ],
        ] {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let error = format!("{:#}", serve(&arguments).expect_err(name));
            assert_has(&error, &[&format!("ifname {name:?}: no interface can have")]);
            assert_has(&error, &["`ip link` lists them"]);
        }
    }
    serve(&["--ifname=fifteen-letters", "--socket-path=/a"]).expect("possible");
}

#[test]
fn place_for_status_is_named_none_or_the_usual_one() {
    for (arguments, control) in [
        (&[][..], Control::Default),
        (&["--control=none"], Control::None),
        (&["--control=/x"], Control::Path("/x".into())),
    ] {
        let config = serve(&[&["--null", "--socket-path=/a"], arguments].concat()).expect("valid");
        assert_eq!(config.control, control);
    }
}

#[test]
fn mistyped_option_is_told_in_one_line_with_the_one_that_was_meant() {
    for (option, meant) in [
        ("--qeues", ": did you mean --queues?"),
        ("--zero-copy", ": did you mean --force-zero-copy?"),
        ("--socket", ": did you mean --socket-path?"),
        ("--bridge", ""),
    ] {
        let words = ["vhost-af-xdp", "serve", option, "2"];
        let error = Cli::try_parse_from(words).expect_err("no such option");
        assert_eq!(
            mistake(
                &Cli::command(),
                words.into_iter().skip(1).map(str::to_owned),
                &error
            ),
            format!("unknown option {option}{meant}; `vhost-af-xdp serve --help` explains")
        );
    }
}

#[test]
fn shared_memory_is_for_all_pairs_together() {
    let with = |options: &[&str]| {
        let config = serve(&[&["--ifname=eth1", "--shared-umem"], options].concat())?;
        config.check()?;
        let slices = config.ports.iter();
        anyhow::Ok(
            slices
                .map(|port| (port.options.packet_bytes, port.options.slices_from))
                .collect::<Vec<_>>(),
        )
    };
    let two = [
        "--port=socket-path=/a,queues=3",
        "--port=socket-path=/b,start-queue=3",
    ];
    // The default is 6 MiB, or the least for each pair.
    assert_eq!(
        with(&two).expect("valid"),
        [(1536 << 10, Some(0)), (1536 << 10, Some(3))]
    );
    let many = ["--socket-path=/a", "--queues=64"];
    assert_eq!(with(&many).expect("valid"), [(512 << 10, Some(0))]);
    // Whole chunks.
    let odd = [&two[..], &["--packet-memory=3076KiB"]].concat();
    assert_eq!(with(&odd).expect("valid")[1], (768 << 10, Some(3)));
    // Only ports that copy, on queues of an interface.
    let direct = [&two[..], &["--port=socket-path=/c,start-queue=4,memory=direct"]].concat();
    assert_eq!(with(&direct).expect("valid")[2], (6 << 20, None));
    for (options, said) in [
        (
            &["--socket-path=/a", "--queues=64", "--packet-memory=6MiB"][..],
            "32768KiB to 393216KiB",
        ),
        (&["--socket-path=/a", "--packet-memory=8MiB"], "512KiB to 6144KiB"),
        (
            &["--socket-path=/a", "--memory=direct"],
            "no port has queues of an interface with memory=copy",
        ),
        (
            &["--port=socket-path=/a,packet-memory=1MiB"],
            "give it once, as --packet-memory",
        ),
        (
            &["--socket-path=/a", "--force-zero-copy"],
            "--shared-umem and --force-zero-copy exclude",
        ),
        (
            &["--socket-path=/a", "--inhibit", "--sock-fds=3"],
            "--shared-umem and --inhibit exclude",
        ),
    ] {
        let error = format!("{:#}", with(options).expect_err("refused"));
        assert!(error.contains(said), "{options:?}: {error}");
    }
    // The limit for the UMEM of one pair is unchanged.
    let error = serve(&["--ifname=eth1", "--socket-path=/a", "--packet-memory=8MiB"]).expect_err("refused");
    assert_has(&error.to_string(), &["from 512KiB to 6MiB"]);
}

#[test]
fn mistakes_point_at_the_help_of_the_innermost_command() {
    for (line, named) in [
        ("--bogus", ""),
        ("serve --bogus", "serve "),
        ("mark set eth1 0", "mark set "),
        ("port set mark vlan", "port set "),
    ] {
        assert_eq!(
            named_command(&Cli::command(), line.split(' ').map(str::to_owned)).1,
            named,
            "{line}"
        );
    }
}

#[test]
fn value_that_is_no_number_is_named_with_what_is_meant() {
    for (line, words) in [
        ("serve --queues=", "--queues"),
        (
            "mark set eth1 x",
            "'x' for '<MARK>': give a whole number such as 4",
        ),
        ("events --after 99999999999999999999", "the number is too large"),
        ("mark set eth1 0", "0 is not in 1 to"),
    ] {
        let words_of_line = ["vhost-af-xdp"].into_iter().chain(line.split(' '));
        let said = match Cli::try_parse_from(words_of_line) {
            Err(error) => sentence(&error),
            Ok(_) => panic!("{line} is understood"),
        };
        assert!(said.contains(words), "{line}: {said}");
        assert!(
            !said.contains("digit") && !said.contains("literal"),
            "{line}: {said}"
        );
    }
    let error = serve(&["--port=socket-path=/a,queues=x", "--ifname=eth1"]).expect_err("no number");
    assert_has(
        &format!("{error:#}"),
        &["queues = \"x\": give a number of 0 to 65535"],
    );
}
