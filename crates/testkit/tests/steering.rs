//! `--mac` and `--vlan`: which frames of its queues a guest gets, and that the host gets the others.

use rstest::rstest;
use testkit::{DriverConfig, PacketPort, Rig, Serve, VethPair, frame, require, wait};

const MAC: &str = "02:00:00:00:be:ef";
const OURS: [u8; 6] = [2, 0, 0, 0, 0xbe, 0xef];

fn to(mac: [u8; 6], vlan: Option<u16>, seed: u8) -> Vec<u8> {
    let mut frame = match vlan {
        Some(vlan) => frame::tagged(200, vlan, seed),
        None => frame::plain(200, seed),
    };
    frame[..6].copy_from_slice(&mac);
    frame
}

#[rstest]
fn guest_gets_frames_of_its_address_and_vlan_and_the_host_the_others(
    #[values(false, true)] leased: bool,
    #[values("copy", "direct")] memory: &str,
) {
    require!(Root);
    let mut serve = Serve::interface(VethPair::NIC)
        .with("--mac", MAC)
        .with("--vlan", "100-101,0")
        .with("--memory", memory);
    serve = serve.leased_if(leased);
    let veth = VethPair::new();
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    let mut rig = Rig::with(veth, &serve, &DriverConfig::default());
    let host = PacketPort::open(&rig.veth.near, VethPair::NIC);
    rig.pair().post(64, &[2048]);
    let mut seed = 0x80;
    let arrives = wait::until(wait::SOON, || {
        seed += 1;
        let probe = to(OURS, None, seed);
        let _ = rig.wire.try_send(&probe);
        let arrivals = std::iter::from_fn(|| rig.pair().receive(wait::QUIET));
        arrivals.into_iter().any(|got| got.frame == probe)
    });
    assert!(arrives);
    let last = frame::last();
    rig.wire.send(&last);
    let _ = host.receive_before(&last);
    for (mac, vlan, is_ours) in [
        (OURS, None, true),
        (OURS, Some(100), true),
        ([0xff; 6], Some(101), true),
        (OURS, Some(7), false),
        ([0xff; 6], Some(7), false),
        (frame::TO, None, false),
    ] {
        let sent = to(mac, vlan, 5);
        rig.wire.send(&sent);
        if is_ours {
            let got = rig.pair().receive(wait::SOON).expect("it is the guest's");
            frame::assert_same(&got.frame, &sent);
        } else {
            assert!(
                host.receive(wait::SOON).is_some(),
                "{mac:x?} {vlan:?} is the host's"
            );
            seed += 1;
            let last = to(OURS, None, seed);
            rig.wire.send(&last);
            assert!(
                rig.pair().receive_before(&last).is_empty(),
                "{mac:x?} {vlan:?} is not the guest's"
            );
        }
    }
    let port = rig.daemon.port(0);
    assert_eq!(
        (&port["steered"], &port["macs"]),
        (&"program".into(), &serde_json::json!([MAC]))
    );
    let note = port["steering_note"].as_str().expect("nobody names them");
    assert!(note.contains("the NIC has no rules"), "{note}");
    let attached = port["lanes"][0]["fallbacks"].to_string();
    assert!(
        !attached.contains("the NIC has no rules"),
        "that is no reason for a mode: {attached}"
    );
    assert_eq!(port["vlans"], serde_json::json!([0, 100, 101]));
    // And the one behind which the host's are looked at.
    assert_eq!(rig.daemon.counter("not_ours"), 3 + 1);
}
