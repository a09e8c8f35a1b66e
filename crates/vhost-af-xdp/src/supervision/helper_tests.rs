//! Tests of the helper.

use std::os::fd::AsRawFd;

use rustix::net::{SocketAddrUnix, socket_with};
use steward_client::{Lease, LeaseError, Waiting};
use steward_protocol::{Reason, Wanted};

use super::*;
use crate::config::file;

#[test]
fn file_that_was_replaced_is_left_alone() {
    let directory = make_directory().expect("a place");
    let (ours, other) = (directory.join("ours"), directory.join("other"));
    fs::write(&ours, "").expect("written");
    fs::write(&other, "").expect("written");
    let files = Files::of(vec![ours.clone(), other.clone()]);
    let again = directory.join("again");
    fs::write(&again, "").expect("written");
    fs::rename(&again, &other).expect("replaced");
    files.remove_all();
    assert!(!ours.exists() && other.exists());
    fs::remove_dir_all(directory).expect("ours");
}

/// Requests a lease of queue 0 of an interface that does not exist; returns why it is refused.
fn refusal(private: &OwnedFd) -> Reason {
    let wanted = Wanted {
        interface: "no-such-nic".to_owned(),
        start_queue: 0,
        queues: 1,
        mode: steer::ModeRequest::Xdp,
        filter: steer::Filter::default(),
        network: false,
    };
    let path = PathBuf::from(format!("/proc/self/fd/{}", private.as_raw_fd()));
    match Lease::take(&path, &wanted, Waiting::default()) {
        Err(LeaseError::Refused(refusal)) => refusal.reason,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("there is no such interface"),
    }
}

#[test]
fn policy_of_the_daemon_has_its_queues_and_no_netkits() {
    let queues = Queues {
        interface: "eth1".to_owned(),
        first: 2,
        count: 3,
    };
    let policy = policy(7, vec![queues], Some(64)).expect("rules");
    assert!(policy.check_host(0).is_ok());
    let rule = format!("{:?}", policy.rule(0));
    for fields in [
        "user: Some(7), group: None, interface: \"eth1\", queues: {2, 3, 4}, ",
        "memlock: Some(18446744073709551615), ",
        "network: true, host: true, advertise: true, ",
        "netkit: false, ",
        "busy_poll: Some(64), ",
    ] {
        assert!(rule.contains(fields), "{rule}");
    }
}

#[test]
fn queues_are_leased_by_the_file_that_was_adopted_last() {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let Private { listener, file } = Private::listen(user.as_raw(), group.as_raw()).expect("listens");
    let (policies, others) = Policies::new(user.as_raw()).expect("sockets");
    let server = Server::new(
        policy(user.as_raw(), Vec::new(), None).expect("no rule"),
        listener,
    );
    let server =
        server.and_then(|server| server.with_reload(others.asked, PolicySource::Given(others.policies)));
    let mut server = server.expect("a steward");
    let (end, ended) = UnixStream::pair().expect("sockets");
    let serving = std::thread::spawn(move || server.run(ended.as_fd()));
    let directory = make_directory().expect("a place");
    let config = |text: &str| {
        let path = directory.join("c.toml");
        fs::write(&path, text).expect("written");
        file::judge(file::read(&path).expect("a file")).expect("a configuration")
    };
    assert_eq!(refusal(&file), Reason::NotAllowed, "of no file");
    let port = "[port.a]\nsocket-path = \"/x\"\nifname = \"no-such-nic\"\n";
    for (text, reason) in [
        (port.to_owned(), Reason::NoInterface),
        (format!("{port}start-queue = 1\n"), Reason::NotAllowed),
        (format!("{port}queues = 2\n"), Reason::NoInterface),
        (String::new(), Reason::NotAllowed),
    ] {
        policies.go_by(&config(&text)).expect("applied");
        assert_eq!(refusal(&file), reason, "{text}");
    }
    drop(end);
    serving.join().expect("no panic").expect("it served");
    fs::remove_dir_all(directory).expect("ours");
}

#[test]
fn socket_without_a_name_is_reached_through_its_descriptor() {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    let private = Private::listen(user.as_raw(), group.as_raw()).expect("listens");
    let path = format!("/proc/self/fd/{}", private.file.as_raw_fd());
    let client = socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    );
    let address = SocketAddrUnix::new(path.as_str()).expect("short");
    rustix::net::connect(client.expect("a socket"), &address).expect("somebody listens");
}
