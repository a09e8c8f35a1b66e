//! VLAN tags that the NIC takes off and tells of: guests have the frames as without that.
//!
//! The other end of the veth hands its tag over beside the frame, as a NIC with `rxvlan on` does.

use testkit::lan::{STRANGER, file, frame, guests, mac, tagged};
use testkit::{Daemon, DriverConfig, PacketPort, Serve, TaggedPort, VethPair, require, wait};

#[test]
fn tag_that_was_taken_off_is_seen_by_who_has_frames_with_it_and_by_nobody_else() {
    require!(Root);
    let ports = [
        "vlan = 100",
        "trunk = \"100-101\"",
        "trunk = \"100-101\"\npromiscuous = true",
        "",
    ];
    let veth = VethPair::new();
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "on"]);
    let text = file(Some(VethPair::NIC), &ports);
    let text = text.replacen("[network.lan]\n", "[network.lan]\nhints = \"vlan\"\n", 1);
    let daemon = Daemon::start_file(&veth.near, &Serve::file(), &[VethPair::NIC], &text);
    let queue = || daemon.status()["networks"][0]["queues"][0].clone();
    if queue()["hints"]["on"] != serde_json::json!(["vlan"]) {
        println!("SKIPPED: this kernel tells of no tags: {}", queue()["hints"]);
        return;
    }
    let mut guests = guests(&daemon, ports.len(), &DriverConfig::default());
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let beside = TaggedPort::on((&veth.far, VethPair::WIRE), 0x8100, 100);
    let mut received = |guest: usize| {
        let got = guests[guest].pairs[0].receive(wait::SOON);
        got.unwrap_or_else(|| panic!("nothing comes to guest {guest}: {}", daemon.said()))
            .frame
    };
    for round in 0..20 {
        let to = |guest, number| frame(mac(guest), STRANGER, 60 + usize::from(round), number);
        let (of_access, of_trunk) = (to(0, round), to(1, round));
        // Beside the frame, and in it.
        beside.port().send(&of_access);
        assert_eq!(received(0), of_access);
        assert_eq!(received(2), tagged(&of_access, 100), "it hears all");
        wire.send(&tagged(&of_access, 100));
        assert_eq!(received(0), of_access);
        assert_eq!(received(2), tagged(&of_access, 100));
        beside.port().send(&of_trunk);
        wire.send(&tagged(&of_trunk, 100));
        wire.send(&tagged(&of_trunk, 101));
        for vlan in [100, 100, 101] {
            assert_eq!(received(1), tagged(&of_trunk, vlan));
            assert_eq!(received(2), tagged(&of_trunk, vlan));
        }
        // Of another VLAN than the port's, of none, and of one for who is of none.
        wire.send(&tagged(&to(0, round), 101));
        wire.send(&to(0, round));
        beside.port().send(&to(3, round));
        wire.send(&to(3, 0xee));
        assert_eq!(received(3), to(3, 0xee));
    }
    // Nothing else is under way to anybody.
    let last = frame(mac(0), STRANGER, 60, 0xee);
    wire.send(&tagged(&last, 100));
    assert_eq!(received(0), last);
    let last = frame(mac(1), STRANGER, 60, 0xee);
    wire.send(&tagged(&last, 100));
    assert_eq!(received(1), tagged(&last, 100));
    assert_eq!(queue()["hints"]["seen"], serde_json::json!(["vlan"]));
    let queue = queue();
    let counters = queue["counters"].as_array().expect("a list");
    let put_back = counters
        .iter()
        .find(|counter| counter["name"] == "to_guest_tags_put_back");
    assert_eq!(put_back.expect("a counter")["value"], 20, "{counters:?}");
}
