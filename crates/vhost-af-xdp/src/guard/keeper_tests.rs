//! Tests of the keeper.

use std::os::fd::AsRawFd;

use rustix::net::{SocketAddrUnix, socket_with};

use super::*;

#[test]
fn leases_are_read_as_they_are_written() {
    let lease = parse_lease("3+2@e@th+0").expect("valid");
    let queues = Queues {
        interface: "e@th+0".to_owned(),
        first: 3,
        count: 2,
    };
    assert_eq!(lease, queues);
    assert!(parse_lease("eth0").is_err() && parse_lease("a+1@eth0").is_err());
}

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
    drop(files);
    assert!(!ours.exists() && other.exists());
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
