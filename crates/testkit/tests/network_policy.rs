//! A steward whose policy changes under a network that runs: what it takes is said, and comes back with it.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rstest::rstest;
use rustix::process::{Pid, Signal, kill_process};
use testkit::{Daemon, Driver, DriverConfig, PacketPort, Serve, VethPair, frame, lan, require, wait};

/// A network with these keys, and two ports, of which the first has those.
fn file_with(keys: &str, of_first: &str) -> String {
    let (nic, first, second) = (VethPair::NIC, lan::port(0, of_first), lan::port(1, ""));
    format!("[network.lan]\nuplink = \"{nic}\"\nhost = false\n{keys}\n{first}{second}")
}

fn file(keys: &str) -> String {
    file_with(keys, "")
}

/// Rules with these keys for networks of the daemon on interfaces.
pub(crate) fn policy(rules: &[(&str, &str)]) -> String {
    let rule = |&(interface, keys): &(&str, &str)| {
        format!(
            "[[allow]]\nuser = {}\ninterface = \"{interface}\"\nqueues = \"all\"\n{keys}\n",
            testkit::lessor::ID
        )
    };
    let rules: String = rules.iter().map(rule).collect();
    format!("[limits]\nunbound-sockets = true\n{rules}")
}

/// The rule of the daemon's network has these keys for a steward that reads it.
fn write_policy(daemon: &Daemon, keys: &str) {
    let policy = policy(&[(VethPair::NIC, &format!("network = true\n{keys}"))]);
    daemon.lessor.as_ref().expect("leased").change_policy(&policy);
}

/// And the steward reads it.
fn change_policy(daemon: &mut Daemon, keys: &str) {
    write_policy(daemon, keys);
    read_policy(daemon);
}

/// The steward reads its policy, which may have changed.
pub(crate) fn read_policy(daemon: &mut Daemon) {
    let read = |daemon: &Daemon| {
        let lessor = daemon.lessor.as_ref().expect("leased");
        lessor.steward.said().matches("the policy was read again").count()
    };
    let before = read(daemon);
    daemon.signal_steward(Signal::HUP);
    daemon.await_that(|| read(daemon) > before);
}

/// Waits until the network says that this is why it is not whole.
#[track_caller]
fn await_impaired(daemon: &Daemon, words: &[&str]) {
    daemon.await_network(&words.join(", "), |network| {
        let why = network["impaired"].to_string();
        words.iter().all(|word| why.contains(word))
    });
}

#[test]
fn queue_that_lacks_memory_is_tried_again() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let serve = Serve::file().leased();
    let mut daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &file(""));
    change_policy(&mut daemon, "memlock = \"8 MiB\"");
    daemon.write_file(&file("queues = 2"));
    let (done, said) = daemon.reload();
    assert!(!done && said.contains("memlock"), "{said}");
    await_impaired(&daemon, &["queue 1", "memlock"]);
    // It is said once, however often it is tried.
    let lines = |level: &str| {
        let lessor = daemon.lessor.as_ref().expect("leased");
        let said = lessor.steward.said();
        let refused = said.lines().filter(|line| line.contains("refused: "));
        refused.filter(|line| line.contains(level)).count()
    };
    let before = lines("DEBUG");
    let is_tried_again = || lines("DEBUG") >= before + 2;
    assert!(wait::until(2 * wait::SOON, is_tried_again));
    assert_eq!(lines("WARN"), 1);
    let said = daemon.said().matches("no uplink").count();
    assert_eq!(said, 1);
    change_policy(&mut daemon, "memlock = \"unlimited\"");
    daemon.await_network("whole", |network| network["impaired"].is_null());
    // What comes by either queue arrives.
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let mut guest = guest(&daemon, 0);
    for number in 0..64 {
        assert_hears(&mut guest, 0, &wire, number);
    }
}

/// Both ways of a policy that says so little that a guest's address is not in it.
#[rstest]
fn guest_that_a_policy_cuts_off_is_named_and_comes_back_with_it(#[values(false, true)] restarted: bool) {
    require!(Root);
    let veth = VethPair::with(1, 1500);
    let serve = Serve::file().leased();
    let mut daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &file(""));
    let mut guests = [0, 1].map(|number| guest(&daemon, number));
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let little = "memlock = \"unlimited\"\nmacs = [\"02:00:00:00:00:00\"]";
    for frame in [10, 20] {
        let all = "memlock = \"unlimited\"";
        for (number, guest) in (0..).zip(&mut guests) {
            assert_hears(guest, number, &wire, frame);
        }
        match restarted {
            false => change_policy(&mut daemon, little),
            true => {
                daemon.end_steward(rustix::process::Signal::KILL);
                write_policy(&daemon, little);
                daemon.start_lessor_again(&veth.near);
            }
        }
        await_impaired(&daemon, &["02:00:00:00:00:01", "`macs`"]);
        assert!(
            !daemon.network()["impaired"]
                .to_string()
                .contains("02:00:00:00:00:00")
        );
        wire.send(&numbered(1, frame + 2));
        // Behind that one.
        assert_hears(&mut guests[0], 0, &wire, frame + 1);
        assert!(guests[1].pairs[0].poll().is_none(), "it is cut off");
        change_policy(&mut daemon, all);
        daemon.await_network("whole", |network| network["impaired"].is_null());
        assert_hears(&mut guests[1], 1, &wire, frame + 3);
    }
    let said = daemon.said();
    assert_eq!(said.matches("guests are cut off").count(), 2, "{said}");
}

fn guest(daemon: &Daemon, number: u8) -> Driver {
    let path = daemon.path(&format!("vm{number}.sock"));
    daemon.connect(number.into(), &path, &DriverConfig::default(), 128)
}

fn numbered(guest: u8, number: u8) -> Vec<u8> {
    let mut frame = frame::plain(100, number);
    frame[..6].copy_from_slice(&[0x02, 0, 0, 0, 0, guest]);
    frame[6..12].copy_from_slice(&lan::STRANGER);
    frame
}

/// What a station of the LAN sends a guest next arrives.
#[track_caller]
fn assert_hears(guest: &mut Driver, number: u8, wire: &PacketPort, frame: u8) {
    let sent = numbered(number, frame);
    wire.send(&sent);
    let got = guest.pairs[0].receive(wait::SOON).expect("it arrives");
    frame::assert_same(&got.frame, &sent);
}

/// Reloads the network with other keys while its steward is stopped; whether `status` answers before the reload ends.
fn answers_meanwhile(daemon: &mut Daemon, keys: &str) -> bool {
    daemon.await_network("whole", |network| network["impaired"].is_null());
    let steward = &mut daemon.lessor.as_mut().expect("leased").steward;
    steward.signal(Signal::STOP);
    let pid = Pid::from_raw(steward.pid().cast_signed()).expect("not zero");
    daemon.write_file(&file(keys));
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = daemon.reload();
            is_done.store(true, Relaxed);
        });
        let lessor = daemon.lessor.as_ref().expect("leased");
        let is_asked = || lessor.is_asked() || is_done.load(Relaxed);
        assert!(wait::until(wait::SOON, is_asked), "it is not asked");
        let shown = daemon.network();
        assert_eq!(shown["uplink"], VethPair::NIC, "{shown:#}");
        let answers = !is_done.load(Relaxed);
        kill_process(pid, Signal::CONT).expect("it is our child");
        answers
    })
}

#[test]
fn steward_that_is_silent_holds_up_nobody_who_looks() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    let serve = Serve::file().leased();
    let mut daemon = Daemon::start_file(&veth.near, &serve, &[VethPair::NIC], &file(""));
    // The daemon gives such a steward up after ten seconds, and this test may be without a CPU for as long.
    let mut tries = ["hints = \"hash\"", "", "hints = \"hash\""].into_iter();
    let answers = tries.any(|keys| answers_meanwhile(&mut daemon, keys));
    assert!(answers, "a status waits for the steward");
}
