//! What happens to the interface under a daemon whose queues are leased: it is told, says why, and goes on when it can.

use testkit::{Daemon, DriverConfig, NetNs, Rig, Serve, VethPair, require, wait};

const BUFFER: u32 = 2048;

#[test]
fn interface_that_is_renamed_goes_on_under_the_same_lease() {
    require!(Root);
    let serve = Serve::interface(VethPair::NIC).leased();
    let mut rig = Rig::with(VethPair::new(), &serve, &DriverConfig::default());
    rig.post(64, &[BUFFER]);
    rig.rename_nic("other0");
    wait::a_moment();
    assert!(rig.daemon.port(0)["impaired"].is_null());
    rig.assert_passes_both_ways();
    // When it is gone, one of the name that was asked for is waited for, and no other.
    let away = NetNs::new("away");
    rig.veth.near.ip(&["link", "set", "other0", "netns", away.name()]);
    rig.daemon.await_impaired(
        0,
        &format!("interface other0 is gone, trying {} again", VethPair::NIC),
    );
    away.ip(&["link", "set", "other0", "name", VethPair::NIC]);
    away.ip(&["link", "set", VethPair::NIC, "netns", rig.veth.near.name()]);
    rig.veth.near.ip(&["link", "set", VethPair::NIC, "up"]);
    rig.daemon.await_recovered(0);
    rig.await_passes_both_ways();
}

#[test]
fn queue_that_channels_take_away_impairs_the_port_and_is_used_again_when_it_is_back() {
    require!(Root);
    let veth = VethPair::with(2, 1500);
    // In direct placement queues are bound while a guest has them; the kernel gives up no queue that is bound.
    let serve = Serve::interface(VethPair::NIC)
        .with("--queues", "2")
        .with("--memory", "direct")
        .leased();
    let daemon = Daemon::start(&veth.near, &serve);
    let shrink = || {
        let mut command = veth.near.command("ethtool");
        command.args(["-L", VethPair::NIC, "rx", "1"]);
        command.output().expect("ethtool(8)").status.success()
    };
    veth.far.run("ethtool", &["-L", VethPair::WIRE, "tx", "1"]);
    assert!(wait::until(wait::SOON, shrink), "the queue stays bound");
    daemon.await_impaired(0, "queue 1");
    daemon.await_impaired(0, "ethtool -L");
    veth.near.run("ethtool", &["-L", VethPair::NIC, "rx", "2"]);
    daemon.await_recovered(0);
    let mut rig = Rig::around(veth, daemon, &DriverConfig::default());
    rig.post(64, &[BUFFER]);
    rig.assert_passes_both_ways();
}
