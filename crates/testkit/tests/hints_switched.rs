//! Hints that are switched by the file while frames come: lanes go on, no frame is lost, none is taken for one of
//! another VLAN, and `status` tells what is on.

use std::time::Duration;

use rstest::rstest;
use serde_json::{Value, json};
use testkit::daemon::DIR;
use testkit::frame::udp;
use testkit::kernel::has_hints;
use testkit::lan::{STRANGER, file, guests, mac, tagged, telling};
use testkit::{Daemon, Driver, DriverConfig, PacketPort, Serve, TaggedPort, VethPair, require, soak, wait};

/// Frames to each guest that are under way at a time.
const BURST: u32 = 8;

fn serve(leased: bool) -> Serve {
    match leased {
        true => Serve::file().leased(),
        false => Serve::file().by_root(),
    }
}

/// A network with hints, and ports with these keys.
fn network(hints: &str, ports: &[&str]) -> String {
    let text = file(Some(VethPair::NIC), ports);
    text.replacen(
        "[network.lan]\n",
        &format!("[network.lan]\nhints = \"{hints}\"\n"),
        1,
    )
}

/// A port with a queue of the interface.
fn port(hints: &str) -> String {
    let nic = VethPair::NIC;
    format!("[port.vm0]\nsocket-path = \"{DIR}/vm0.sock\"\nifname = \"{nic}\"\nhints = \"{hints}\"\n")
}

/// Reads a file with other hints. A user may have them switched some times at once, and then again in a moment; and the
/// kernel waits for all CPUs each time, which takes as long as they have other work.
#[track_caller]
fn switch(daemon: &Daemon, text: &str, whose: &str) {
    daemon.write_file(text);
    let switched = wait::until(wait::SOON, || {
        let (done, said) = daemon.reload();
        let is_later = ["too often", "has not answered"]
            .iter()
            .any(|why| said.contains(why));
        assert!(done || is_later, "{said}\n{}", daemon.said());
        if !done {
            std::thread::sleep(Duration::from_millis(100));
            return false;
        }
        let goes_on = said.contains(&format!("{whose} has changed (hints), and goes on"));
        assert!(goes_on || said.contains("nothing changed"), "{said}");
        true
    });
    assert!(switched, "{}", daemon.said());
}

/// What `status` has of a queue's or a lane's hints.
fn names(hints: &Value, field: &str) -> String {
    let list = hints[field].as_array().expect("a list").iter();
    let names: Vec<&str> = list.filter_map(Value::as_str).collect();
    match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(","),
    }
}

/// A datagram that the NIC has a hash of, with a number.
fn datagram(number: u32) -> Vec<u8> {
    let mut frame = udp(7, 60);
    frame[..6].copy_from_slice(&mac(0));
    frame[6..12].copy_from_slice(&STRANGER);
    // Behind the headers.
    frame[42..46].copy_from_slice(&number.to_be_bytes());
    frame
}

/// Nothing was lost because of what stood before it, or of a queue that was set up anew.
#[track_caller]
fn assert_none_lost(daemon: &Daemon) {
    for name in [
        "to_guest_hints_unknown",
        "to_guest_tag_unknown",
        "to_guest_queue_stopped",
    ] {
        assert_eq!(daemon.counter(name), 0, "{name}: {:#}", daemon.status());
    }
}

/// The next frames of a guest are these, in their order.
#[track_caller]
fn assert_receives(guest: &mut Driver, frames: &[Vec<u8>], daemon: &Daemon) {
    for sent in frames {
        let got = guest.pairs[0].receive(wait::SOON);
        let got = got.unwrap_or_else(|| panic!("a frame is lost: {}", daemon.said()));
        assert_eq!(&got.frame, sent, "{:#}", daemon.status());
    }
}

#[rstest]
fn tags_that_are_taken_off_are_told_whatever_else_is_switched(#[values(false, true)] leased: bool) {
    require!(Root);
    if !has_hints() {
        return;
    }
    let ports = ["vlan = 100", "trunk = \"100-101\"", ""];
    let veth = VethPair::new();
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "on"]);
    let text = |hints: &str| network(hints, &ports);
    let daemon = Daemon::start_file(&veth.near, &serve(leased), &[VethPair::NIC], &text("vlan"));
    let queue = || daemon.status()["networks"][0]["queues"][0].clone();
    assert_eq!(queue()["hints"]["on"], json!(["vlan"]));
    let mut guests = guests(&daemon, ports.len(), &DriverConfig::default());
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let beside = TaggedPort::on((&veth.far, VethPair::WIRE), 0x8100, 100);
    let switches = || {
        for at in 0..soak::count(24, 1000) {
            let (asked, on) = [
                ("hash,vlan", "hash,vlan"),
                ("auto", "vlan"),
                ("vlan,timestamp,mark", "vlan,timestamp,mark"),
                ("vlan", "vlan"),
            ][at % 4];
            switch(&daemon, &text(asked), "network lan");
            let hints = queue()["hints"].clone();
            assert_eq!(
                (&hints["asked"], names(&hints, "on").as_str()),
                (&json!(asked), on)
            );
        }
    };
    let bursts = wait::rounds_during(switches, |round| {
        let numbers = round * BURST..(round + 1) * BURST;
        let to = |guest, vlan| {
            numbers
                .clone()
                .map(move |n| telling(mac(guest), STRANGER, vlan, n))
        };
        for frame in to(0, 100).chain(to(1, 100)) {
            beside.port().send(&frame);
        }
        to(1, 101).for_each(|frame| wire.send(&tagged(&frame, 101)));
        to(2, 0).for_each(|frame| wire.send(&frame));
        let (plain, tagged_as) = (to, |vlan| move |frame: Vec<u8>| tagged(&frame, vlan));
        assert_receives(&mut guests[0], &plain(0, 100).collect::<Vec<_>>(), &daemon);
        let of_trunk = to(1, 100)
            .map(tagged_as(100))
            .chain(to(1, 101).map(tagged_as(101)));
        assert_receives(&mut guests[1], &of_trunk.collect::<Vec<_>>(), &daemon);
        assert_receives(&mut guests[2], &plain(2, 0).collect::<Vec<_>>(), &daemon);
    });
    println!("{bursts} bursts while hints were switched");
    assert_none_lost(&daemon);
    assert!(names(&queue()["hints"], "seen").contains("vlan"), "{:#}", queue());
}

#[rstest]
#[case::own_queue(false)]
#[case::network(true)]
fn frames_of_no_vlan_come_whatever_is_switched(#[case] in_network: bool) {
    require!(Root);
    if !has_hints() {
        return;
    }
    let text = |hints: &str| match in_network {
        true => network(hints, &[""]),
        false => port(hints),
    };
    let whose = if in_network { "network lan" } else { "port vm0" };
    let veth = VethPair::new();
    let daemon = Daemon::start_file(&veth.near, &serve(false), &[VethPair::NIC], &text("none"));
    let mut guests = guests(&daemon, 1, &DriverConfig::default());
    let shown = || match in_network {
        true => daemon.status()["networks"][0]["queues"][0].clone(),
        false => daemon.port(0)["lanes"][0].clone(),
    };
    assert_eq!(names(&shown()["hints"], "possible"), "hash,vlan,timestamp,mark");
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let switches = || {
        for at in 0..soak::count(24, 1000) {
            // The tag that was asked for before may be told for a while still, and is `auto`'s then.
            let (asked, may_be_on) = [
                ("hash,vlan,timestamp,mark", &["hash,vlan,timestamp,mark"][..]),
                ("none", &["none"]),
                ("mark", &["mark"]),
                ("auto", &["none", "vlan"]),
            ][at % 4];
            switch(&daemon, &text(asked), whose);
            let hints = shown()["hints"].clone();
            assert_eq!(hints["asked"], asked);
            assert!(may_be_on.contains(&names(&hints, "on").as_str()), "{hints}");
        }
    };
    let bursts = wait::rounds_during(switches, |round| {
        let numbers = round * BURST..(round + 1) * BURST;
        let sent: Vec<Vec<u8>> = numbers.map(datagram).collect();
        sent.iter().for_each(|frame| wire.send(frame));
        assert_receives(&mut guests[0], &sent, &daemon);
    });
    println!("{bursts} bursts while hints were switched");
    assert_none_lost(&daemon);
    assert!(names(&shown()["hints"], "seen").contains("hash"), "{:#}", shown());
}
