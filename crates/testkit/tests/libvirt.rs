//! Domains of a real libvirt, with the XML that docs/vmm.md gives.

use std::fs;
use std::path::Path;

use rstest::rstest;
use testkit::daemon::Placement;
use testkit::guest::{Guest, Images};
use testkit::libvirt::{self, Libvirt, NAME};
use testkit::systemd::Systemd;
use testkit::world::{HOST, Listener, give_address};
use testkit::{Daemon, Serve, VethPair, require, wait};

const HOOK: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/deploy/libvirt-hook");

/// The domain of docs/vmm.md. `state` is a directory that libvirt sees.
fn domain(images: &Images, state: &Path, socket: &Path, listener: Listener) -> String {
    let socket = socket.display();
    let source = match listener {
        Listener::Daemon => format!(
            "<source type='unix' path='{socket}' mode='client'><reconnect enabled='yes' timeout='1'/></source>"
        ),
        Listener::Vmm => format!("<source type='unix' path='{socket}' mode='server'/>"),
    };
    let memory = "<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>";
    let interface = format!(
        "<interface type='vhostuser'>
      <mac address='52:54:00:12:34:56'/>
      {source}
      <model type='virtio'/>
      <driver rx_queue_size='1024' tx_queue_size='1024'/>
      <alias name='ua-net'/>
    </interface>"
    );
    libvirt::domain(images, state, memory, &interface)
}

#[rstest]
fn domain_is_defined_started_destroyed_and_undefined(
    #[values((Listener::Daemon, Placement::Copy), (Listener::Vmm, Placement::Direct))] (listener, placement): (
        Listener,
        Placement,
    ),
) {
    require!(Root, Qemu, Libvirt);
    let veth = VethPair::new();
    give_address(&veth);
    let mut serve = Serve::interface(VethPair::NIC).placement(placement);
    let mut daemon = match listener {
        Listener::Daemon => Daemon::start(&veth.near, &serve),
        Listener::Vmm => {
            serve = serve.flag("--client");
            Daemon::spawn(&veth.near, &serve)
        }
    };
    let libvirt = Libvirt::start();
    let guest = Guest::elsewhere();
    let file = daemon.path("domain.xml");
    let xml = domain(
        &libvirt::images(guest.state()),
        guest.state(),
        &daemon.socket(),
        listener,
    );
    fs::write(&file, xml).expect("a directory of our own");
    let _ = libvirt.virsh(&["define", file.to_str().expect("ASCII")]);
    let _ = libvirt.virsh(&["start", NAME]);
    guest.await_ready();
    let said = libvirt.virsh(&["domiflist", NAME]);
    assert!(said.contains("vhostuser"), "{said}");
    let _ = guest.run(&format!("ping -c 5 -i 0.2 -W 60 {HOST}"));

    daemon.kill();
    daemon.restart(&veth.near, &serve);
    guest
        .run_until_success(10 * wait::SOON, &format!("ping -c 1 -W 20 {HOST}"))
        .unwrap_or_else(|said| {
            let (log, status) = (daemon.said(), daemon.status());
            panic!("no ping after a restart: {said}\n{log}\n{status:#}");
        });

    let _ = libvirt.virsh(&["destroy", NAME]);
    daemon.await_port(0, "the end of the VMM", |port| port["connected"] == false);
    let _ = libvirt.virsh(&["undefine", NAME]);
    assert_eq!(libvirt.virsh(&["list", "--all", "--name"]).trim(), "");
    daemon.process().check();
}

/// A network without ports, and where they may have sockets later.
fn lan() -> String {
    let nic = VethPair::NIC;
    format!(
        "[daemon]\nsocket-directories = [\"/run/vhost-af-xdp-lan\"]\n\n[network.lan]\nuplink = \"{nic}\"\n"
    )
}

#[rstest]
fn hook_gives_a_domain_a_port_of_a_network_and_takes_it_back() {
    require!(Root, Qemu, Libvirt, Systemd);
    let veth = VethPair::new();
    give_address(&veth);
    let guest = Guest::elsewhere();
    let systemd = Systemd::start_with(&veth.near, &[guest.state()]);
    systemd.run(&["groupadd", "--system", "vhost-af-xdp"]);
    systemd.run(&["install", "-d", "/etc/vhost-af-xdp"]);
    let nic = VethPair::NIC;
    let policy = format!(
        "[[allow]]\ngroup = \"vhost-af-xdp\"\ninterface = \"{nic}\"\nqueues = \"all\"\nnetwork = true\n"
    );
    let write = |path: &str, text: &str| fs::write(systemd.path(path), text).expect("writable");
    write("/etc/vhost-af-xdp/steward.toml", &policy);
    write("/etc/vhost-af-xdp/lan.toml", &lan());
    systemd.run(&[
        "systemctl",
        "start",
        "vhost-af-xdp-steward.socket",
        "vhost-af-xdp-network@lan",
    ]);
    let status =
        || String::from_utf8_lossy(&systemd.try_run(&["vhost-af-xdp", "status"]).stdout).into_owned();
    assert!(status().contains("network lan: up"), "{}", systemd.log());
    let libvirt = Libvirt::start_in(
        &systemd,
        guest.state(),
        &libvirt::copied(Path::new(HOOK), guest.state()),
    );

    let socket = "/run/vhost-af-xdp-lan/vm1.sock";
    let xml = domain(
        &libvirt::images(guest.state()),
        guest.state(),
        Path::new(socket),
        Listener::Daemon,
    );
    let with_keys = |keys: &str| {
        let ports = format!("<v:ports xmlns:v='urn:vhost-af-xdp'><v:port name='vm1' {keys}/></v:ports>");
        xml.replace("<memory ", &format!("<metadata>{ports}</metadata><memory "))
    };
    let define = |xml: &str| {
        let file = guest.state().join("domain.xml");
        fs::write(&file, xml).expect("a directory of our own");
        let _ = libvirt.virsh(&["define", file.to_str().expect("ASCII")]);
    };
    // What the daemon refuses, libvirt refuses, with the reason; nothing of it stays.
    define(&with_keys("vlan='none'"));
    let refused = libvirt.try_virsh(&["start", NAME]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("vlan = \"none\""),
        "{said}"
    );
    let file = || fs::read_to_string(systemd.path("/etc/vhost-af-xdp/lan.toml")).expect("it is there");
    assert_eq!(file(), lan());
    let _ = libvirt.virsh(&["undefine", NAME]);

    define(&with_keys("isolated='true'"));
    let _ = libvirt.virsh(&["start", NAME]);
    let owner = systemd.run(&["stat", "-c", "%u %a", socket]);
    assert_eq!(
        owner.trim(),
        "64055 600",
        "it is for the user that libvirt runs QEMU as"
    );
    let text = file();
    for line in ["[port.\"vm1\"]", "mac = \"52:54:00:12:34:56\"", "isolated = true"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    guest.await_ready();
    let said = guest.run(&format!("ping -c 5 -i 0.2 -W 60 {HOST}"));
    assert!(said.contains(" 0% packet loss"), "{said}");

    let _ = libvirt.virsh(&["destroy", NAME]);
    assert!(!systemd.path(socket).exists(), "{}", status());
    assert_eq!(file(), lan());
}
