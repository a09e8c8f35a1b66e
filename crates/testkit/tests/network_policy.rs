//! A steward whose policy changes under a network that runs: what it takes is said, and comes back with it.

use rstest::rstest;
use testkit::daemon::DIR;
use testkit::{Daemon, Driver, DriverConfig, PacketPort, Serve, VethPair, frame, require, wait};

/// A station of the LAN.
const STRANGER: [u8; 6] = [0x02, 0, 0, 0, 1, 0];

/// A network with these keys, and two ports.
fn file(keys: &str) -> String {
    let port = |guest: u8| {
        format!(
            "[port.vm{guest}]\nnetwork = \"lan\"\nsocket-path = \"{DIR}/vm{guest}.sock\"\nmac = \
             \"02:00:00:00:00:{guest:02x}\"\n"
        )
    };
    let (nic, first, second) = (VethPair::NIC, port(0), port(1));
    format!("[network.lan]\nuplink = \"{nic}\"\nhost = false\n{keys}\n{first}{second}")
}

/// The rule of the daemon's network has these keys for a steward that reads it.
fn write_policy(daemon: &Daemon, keys: &str) {
    let policy = format!(
        "[limits]\nunbound-sockets = true\n[[allow]]\nuser = {}\ninterface = \"{}\"\nqueues = \"all\"\n\
         network = true\n{keys}\n",
        testkit::lessor::ID,
        VethPair::NIC
    );
    daemon.lessor.as_ref().expect("leased").change_policy(&policy);
}

/// And the steward reads it.
fn change_policy(daemon: &mut Daemon, keys: &str) {
    let read = |daemon: &Daemon| {
        let lessor = daemon.lessor.as_ref().expect("leased");
        lessor.steward.said().matches("the policy was read again").count()
    };
    let before = read(daemon);
    write_policy(daemon, keys);
    let lessor = daemon.lessor.as_mut().expect("leased");
    lessor.steward.signal(rustix::process::Signal::HUP);
    let is_read = || read(daemon) > before;
    assert!(wait::until(wait::SOON, is_read), "{}", daemon.said());
}

fn network(daemon: &Daemon) -> serde_json::Value {
    daemon.status()["networks"][0].clone()
}

#[track_caller]
fn await_whole(daemon: &Daemon) {
    let is_whole = || network(daemon)["impaired"].is_null();
    assert!(wait::until(wait::SOON, is_whole), "{:#}", network(daemon));
}

/// Waits until the network says that this is why it is not whole.
#[track_caller]
fn await_impaired(daemon: &Daemon, words: &[&str]) {
    let says = || {
        let why = network(daemon)["impaired"].to_string();
        words.iter().all(|word| why.contains(word))
    };
    assert!(wait::until(wait::SOON, says), "{words:?}: {:#}", network(daemon));
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
    std::thread::sleep(wait::SOON / 2);
    let said = daemon.said().matches("no uplink").count();
    assert_eq!(said, 1, "{}", daemon.said());
    change_policy(&mut daemon, "memlock = \"unlimited\"");
    await_whole(&daemon);
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
                let steward = &mut daemon.lessor.as_mut().expect("leased").steward;
                steward.signal(rustix::process::Signal::KILL);
                steward.wait(wait::SOON);
                write_policy(&daemon, little);
                daemon.start_lessor_again(&veth.near);
            }
        }
        await_impaired(&daemon, &["02:00:00:00:00:01", "`macs`"]);
        assert!(
            !network(&daemon)["impaired"]
                .to_string()
                .contains("02:00:00:00:00:00")
        );
        assert_hears(&mut guests[0], 0, &wire, frame + 1);
        wire.send(&numbered(1, frame + 2));
        assert!(guests[1].pairs[0].receive(wait::QUIET).is_none(), "it is cut off");
        change_policy(&mut daemon, all);
        await_whole(&daemon);
        assert_hears(&mut guests[1], 1, &wire, frame + 3);
    }
    let said = daemon.said();
    assert_eq!(said.matches("guests are cut off").count(), 2, "{said}");
}

fn guest(daemon: &Daemon, number: u8) -> Driver {
    let path = daemon.path(&format!("vm{number}.sock"));
    let mut driver = Driver::connect(&path, &DriverConfig::default()).expect("accepted");
    driver.pairs[0].post(128, &[2048]);
    daemon.await_port(number.into(), "a lane runs", |port| {
        port["lanes"][0]["running"] == true
    });
    driver
}

fn numbered(guest: u8, number: u8) -> Vec<u8> {
    let mut frame = frame::plain(100, number);
    frame[..6].copy_from_slice(&[0x02, 0, 0, 0, 0, guest]);
    frame[6..12].copy_from_slice(&STRANGER);
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
