//! The policy and the ground under a steward: what is read again, and what it does not begin on.

use crate::common;

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{POLICY, World, lessee, raw::Raw, refusal, soon, take};
use rustix::process::Signal;
use steward_client::{Lease, LeaseError};
use steward_protocol::{Answer, Reason, Request, Wanted};
use testkit::{Running, assert_has, assert_soon, frame, require, wait};

const STEWARD: &str = env!("CARGO_BIN_EXE_vhost-af-xdp-steward");

fn write_policy(world: &World, text: &str) {
    common::write_policy(&world.dir, text);
}

/// Lets the steward read its policy again.
#[track_caller]
pub(crate) fn reread(world: &mut World, text: &str, words: &str) {
    let report = |world: &World| world.steward.said().matches(words).count();
    let before = report(world);
    write_policy(world, text);
    world.steward.signal(Signal::HUP);
    assert_soon!(report(world) > before, "never report {words}");
}

#[track_caller]
fn await_end(lease: &Lease) -> LeaseError {
    wait::until_some(wait::SOON, || lease.take_changes().err()).expect("it ends")
}

#[test]
fn policy_is_read_again_and_leases_that_it_does_not_allow_any_more_end() {
    require!(Root);
    let mut world = World::with(2, POLICY);
    let first = world.lease(0, 1).expect("allowed");
    let second = world.lease(1, 1).expect("allowed");
    reread(
        &mut world,
        "[[allow]]\nuser = 0\ninterface = \"nic0\"\n",
        "the policy stays as it was",
    );
    assert!(world.steward.said().contains("add `queues ="));
    for lease in [&first, &second] {
        lease.take_changes().expect("it goes on");
    }
    first.counters(0, soon()).expect("ours");
    // As its second rule, where it was the first that fits.
    let narrower = "[[allow]]\nuser = 0\ninterface = \"nic1\"\nqueues = \"all\"\n\
                    [[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"1\"\nat-most = 1\n";
    reread(&mut world, narrower, "the policy was read again");
    let LeaseError::Refused(why) = await_end(&first) else {
        panic!("the lessee should have received the reason")
    };
    assert_eq!(why.reason, Reason::NotAllowed);
    assert_has(&why.text, &["queue 0 of nic0"]);
    second.take_changes().expect("it goes on");
    second.counters(1, soon()).expect("ours");
    assert_eq!(refusal(world.lease(0, 1)).reason, Reason::NotAllowed);
    assert!(refusal(world.lease(1, 1)).text.contains("1 are leased"));
    reread(&mut world, "", "the policy was read again");
    assert!(matches!(await_end(&second), LeaseError::Refused(_)));
    world.await_no_program();
}

#[test]
fn kept_leases_are_held_against_a_policy_that_is_read_before_their_lessees_are_back() {
    require!(Root);
    let mut world = World::kept();
    let lease = world.lease(0, 1).expect("allowed");
    world.restart_after(Signal::KILL);
    reread(&mut world, "", "the policy was read again");
    world.await_nothing();
    drop(lease);
}

const STATION: [u8; 6] = [2, 0, 0, 0, 0, 7];
const NAMED: &str = "macs = [\"02:00:00:00:00:07\"]\n";
/// Why the NIC has no rules for addresses that the policy does not name.
const NOT_NAMED: &str = "a steward makes rules if its policy names them (`macs`, `vlans`)";

fn for_station() -> Wanted {
    common::filtered(0, &[STATION], &[])
}

#[test]
fn lessee_is_notified_of_names_of_a_reloaded_policy() {
    require!(Root);
    let rule = "[[allow]]\nuser = 0\ninterface = \"nic0\"\nqueues = \"all\"\n";
    let mut world = World::with(1, rule);
    let lease = take(&world.socket(), &for_station()).expect("allowed");
    let steering = lease.facts().steering;
    assert_has(&steering, &[NOT_NAMED]);
    for (policy, is_named) in [(format!("{rule}{NAMED}"), true), (rule.to_owned(), false)] {
        reread(&mut world, &policy, "the policy was read again");
        let told = wait::until_some(wait::SOON, || lease.take_changes().expect("it goes on"));
        let steering = told.expect("it is told").steering;
        assert_eq!(!steering.contains(NOT_NAMED), is_named, "{steering}");
    }
}

#[test]
fn lessee_that_comes_back_by_another_rule_has_the_names_of_that_rule() {
    require!(Root);
    let rule = |who: &str| format!("[[allow]]\n{who}\ninterface = \"nic0\"\nqueues = \"all\"\n");
    let policy = rule("group = 4242") + NAMED + &rule("user = 4321");
    let mut world = World::kept_for(&policy, "60");
    let token = [7; 16];
    let mut first = Raw::connect_as(&world.socket(), 4321, 4242);
    let named = |answer: Answer| match answer {
        Answer::Facts(facts) => !facts.steering.contains(NOT_NAMED),
        other => panic!("{other:?}"),
    };
    assert!(named(first.ask(&Request::Lease(for_station()))));
    assert_eq!(first.ask(&Request::Keep { token }), Answer::Done);
    world.restart_after(Signal::KILL);
    let mut second = Raw::connect_as(&world.socket(), 4321, 4321);
    assert!(!named(second.ask(&Request::Resume { token })));
}

#[test]
fn user_without_a_rule_gets_the_missing_rule() {
    require!(Root);
    let world = World::new();
    let stranger = Raw::connect_as(&world.socket(), 4321, 4321);
    let refusal = stranger.refusal(wait::SOON);
    assert_eq!(refusal.reason, Reason::NotAllowed);
    assert_has(
        &refusal.text,
        &[
            "user 4321",
            "`user = 4321`",
            "`interface`",
            "`queues`",
            "(--user)",
        ],
    );
}

#[test]
fn mistake_on_the_command_line_takes_one_line() {
    for arguments in [&["--nonsense"][..], &["--grace", "x"], &["--policy"], &["extra"]] {
        let output = Command::new(STEWARD).args(arguments).output().expect("it runs");
        let report = String::from_utf8(output.stderr).expect("text");
        assert_eq!(
            (output.status.code(), report.lines().count()),
            (Some(2), 1),
            "{report}"
        );
        assert!(
            report.contains("--help") && report.contains(arguments[0]),
            "{report}"
        );
    }
    let both = Command::new(STEWARD).args(["--check", "--take-back"]).output();
    let both = both.expect("it runs");
    let report = String::from_utf8(both.stderr).expect("text");
    assert!(
        !both.status.success() && report.contains("'--check' cannot be used with '--take-back'"),
        "{report}"
    );
    let output = Command::new(STEWARD).arg("--help").output().expect("it runs");
    assert!(output.status.success() && output.stderr.is_empty());
}

/// It needs no privilege.
#[test]
fn check_prints_the_policy_its_warnings_and_its_mistakes() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("p.toml");
    let rule = "[[allow]]\nuser = 7\ninterface = \"nic0\"\nqueues = \"0-3\"\nzcrx = [\"192.0.2.1:443\"]\n";
    let check = |more: &str| {
        fs::write(&path, format!("{rule}{more}")).expect("writable");
        let output = Command::new(STEWARD)
            .arg("--check")
            .arg("--policy")
            .arg(&path)
            .output();
        let output = output.expect("it runs");
        let [shown, said] = [output.stdout, output.stderr].map(|it| String::from_utf8(it).expect("text"));
        (output.status.success(), shown, said)
    };
    let is_shown = |text: &str, line: &[&str]| {
        let mut lines = text.lines().map(|it| it.split_whitespace().collect::<Vec<_>>());
        assert!(lines.any(|words| words == line), "{line:?}: {text}");
    };
    let (good, shown, warned) = check("af-xdp = false\n");
    for (key, value) in [
        ("rule", "1"),
        ("user", "7"),
        ("interface", "nic0"),
        ("queues", "0-3"),
        ("af-xdp", "false"),
    ] {
        is_shown(&shown, &[key, value]);
    }
    assert_eq!((good, warned.as_str()), (true, ""));
    let (good, shown, warned) = check("vlans = [\"7\"]\n");
    is_shown(&shown, &["vlans", "7"]);
    assert!(good && warned.starts_with("warning: "), "{warned}");
    assert_has(&warned, &["rule 1: vlans: with `zcrx`"]);
    let (good, shown, said) = check("memlok = 1\n");
    assert_eq!(
        (good, shown.as_str(), said.lines().count()),
        (false, "", 1),
        "{said}"
    );
    assert_has(&said, &["line 6", "memlok"]);
}

/// Starts a steward that must refuse to; what it says last.
#[track_caller]
fn complaint(world: &World, mut command: Command, socket: &str) -> String {
    command.arg("--policy").arg(world.dir.path().join("policy.toml"));
    command.arg("--socket").arg(world.dir.path().join(socket));
    command.stdin(Stdio::null());
    let mut running = Running::start(command);
    assert!(!running.wait(wait::SOON).success(), "{running}");
    let report = running.said();
    assert!(!report.contains("ready"), "{report}");
    report.lines().last().unwrap_or_default().to_owned()
}

#[test]
fn socket_that_cannot_be_is_refused_with_the_reason() {
    require!(Root);
    let world = World::new();
    for (socket, words) in [
        ("steward.sock", &["another process listens there"][..]),
        ("no/steward.sock", &["`mkdir -p ", "--socket"]),
        ("policy.toml", &["not a socket: choose another path"]),
    ] {
        assert_has(&complaint(&world, world.command(), socket), words);
    }
    assert!(!world.dir.path().join("no").exists());
    drop(world.lease(0, 1).expect("the first one serves"));
}

#[test]
fn steward_without_capabilities_names_them_and_is_not_ready() {
    require!(Root);
    let world = World::new();
    for (keeps, lacks) in [
        (
            "-all",
            "CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF, CAP_IPC_LOCK, CAP_SETUID",
        ),
        ("-all,+net_admin,+net_raw,+bpf,+setuid", "it lacks CAP_IPC_LOCK:"),
    ] {
        let mut command = world.veth.near.command("setpriv");
        command.args([
            "--inh-caps",
            "-all",
            "--bounding-set",
            keeps,
            "--no-new-privs",
            STEWARD,
        ]);
        let report = complaint(&world, command, "other.sock");
        assert_has(&report, &[lacks, "start it as root"]);
    }
}

/// Linux 6.1, for instance. (That cannot be had here; what is different in it is that rings of bound sockets are not
/// mapped.)
#[test]
fn kernel_on_which_lessees_bind_themselves_needs_unbound_sockets() {
    require!(Root);
    let mut world = World::of_one_queue();
    let command = || {
        let mut command = world.veth.near.command(STEWARD);
        command.env("STEWARD_OLD_KERNEL", "1");
        command
    };
    let report = complaint(&world, command(), "other.sock");
    assert_has(&report, &["`unbound-sockets = true`", "6.4"]);
    let command = command();
    world.end_steward(Signal::TERM);
    write_policy(&world, &format!("[limits]\nunbound-sockets = true\n{POLICY}"));
    world.start_as(command);
    world.steward.await_text("ready");
    let lease = world.lease(0, 1).expect("allowed");
    let steering = lease.facts().steering;
    assert_has(&steering, &["reach any free queue"]);
    let mut echo = lessee::Echo::open(&lease, 0);
    let sent = frame::plain(100, 3);
    world.wire.try_send(&sent).expect("sent");
    let echoed = wait::until_some(wait::SOON, || {
        echo.run(Duration::from_millis(10));
        world.wire.receive(Duration::ZERO)
    });
    assert_eq!(echoed, Some(sent));
    reread(&mut world, POLICY, "does not have `unbound-sockets");
    lease.counters(0, soon()).expect("ours");
}
