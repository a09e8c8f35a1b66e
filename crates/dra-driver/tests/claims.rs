//! Claims from allocation to release.

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::{Driver, DriverConfig, Layout, PacketPort, VethPair, lan, require, wait};

use crate::support::cluster::DRIVER;
use crate::support::scene::{State, on_node};

#[test]
fn networks_are_published_and_again_when_wiped() {
    require!(Root);
    on_node(State::Kept, |scene, _| {
        let devices = |wanted: &[&str]| {
            scene.await_that("published", |scene| {
                let devices = scene.cluster.devices().unwrap_or_default();
                let names: Vec<_> = devices.iter().map(|device| device["name"].clone()).collect();
                names == *wanted
            });
            scene.cluster.devices().expect("there")
        };
        let [lan, inner] = &devices(&["lan", "inner"])[..] else {
            panic!("two")
        };
        let attributes = &lan["attributes"];
        assert_eq!(attributes["network"], json!({"string": "lan"}));
        assert_eq!(attributes["uplink"], json!({"string": VethPair::NIC}));
        assert_eq!(attributes["mtu"], json!({"int": 1500}));
        assert_eq!(attributes["vlans"], json!({"bool": true}));
        assert_eq!(inner["attributes"]["mode"], json!({"string": "internal"}));
        assert_eq!(lan["allowMultipleAllocations"], true);
        assert_eq!(lan["capacity"]["ports"]["value"], "256");
        assert_eq!(lan["capacity"]["queues"]["requestPolicy"]["default"], "1");
        scene.cluster.wipe_slices();
        devices(&["lan", "inner"]);
        // The garbage collector deletes a slice whose owner is gone.
        let node = scene.cluster.replace_node();
        scene.cluster.wipe_slices();
        devices(&["lan", "inner"]);
        assert_eq!(scene.cluster.owners(), [node]);
    });
}

#[test]
fn claim_has_its_port_until_it_is_released() {
    require!(Root);
    on_node(State::Kept, |mut scene, veth| {
        let class = json!({"vlan": 5, "from-guest-bits": "1G"});
        let keys = json!({"mac": "02:00:00:00:00:07", "ips": ["192.0.2.7"], "rule": ["direction=from-guest action=allow"]});
        let configs = [("FromClass", class), ("FromClaim", keys)];
        let claim = scene.cluster.allocate("c", &[("net", "lan", 1, None)], &configs);
        let devices = scene.kubelet.prepared(&claim);
        let [device] = &devices[..] else {
            panic!("{devices:?}")
        };
        let id = format!("{DRIVER}/claim={}_net", claim.uid);
        assert_eq!(device.cdi_device_ids, [id]);
        assert_eq!(
            (device.request_names.join(","), device.device_name.as_str()),
            ("net".to_owned(), "lan")
        );
        let port = scene.port(&claim, "net").expect("added");
        assert_eq!(port["mac"], "02:00:00:00:00:07");
        assert_eq!(port["configuration"]["vlan"], 5);
        let socket = scene.sockets(&claim).join("net.sock");
        let file = std::fs::metadata(&socket).expect("there");
        assert!(file.file_type().is_socket());
        assert_eq!(file.mode() & 0o777, 0o666);
        check_files(
            &scene.cdi(&claim).expect("written"),
            &scene.sockets(&claim),
            &claim.uid,
        );

        scene.await_that("reported", |scene| {
            scene.cluster.status(&claim)[0]["conditions"][0]["status"] == "True"
        });
        let status = scene.cluster.status(&claim);
        assert_eq!(status[0]["networkData"]["hardwareAddress"], "02:00:00:00:00:07");
        assert_eq!(status[0]["networkData"]["ips"], json!(["192.0.2.7/32"]));
        assert_eq!(
            status[0]["data"]["socketPath"],
            "/var/run/vhost-af-xdp/of-c/net.sock"
        );

        // It is the same again, after each restart too.
        let inode = file.ino();
        assert_eq!(scene.kubelet.prepared(&claim), devices);
        scene.end_driver(Signal::KILL);
        scene.restart_driver(&[]);
        assert_eq!(scene.kubelet.prepared(&claim), devices);
        scene.end_driver(Signal::TERM);
        assert!(!scene.kubelet.registration_socket().exists() && !scene.kubelet.service_socket().exists());
        assert_eq!(std::fs::metadata(&socket).expect("there").ino(), inode);
        scene.restart_driver(&[]);
        scene.end_daemon();
        scene.restart_daemon(&["lan", "inner"]);
        assert_eq!(scene.kubelet.prepared(&claim), devices);
        exchange(&socket, veth);

        for _ in 0..2 {
            scene.kubelet.release(&claim).expect("released");
            scene.assert_empty();
        }
        assert_eq!(scene.kubelet.prepared(&claim), devices);
        scene.kubelet.release(&claim).expect("released");
        scene.assert_empty();
    });
}

/// A guest at the socket and a station of the LAN, in VLAN 5, exchange frames.
fn exchange(socket: &Path, veth: &VethPair) {
    let mut guest = Driver::connect(socket, &DriverConfig::default()).expect("accepted");
    guest.pairs[0].post(64, &[2048]);
    let wire = PacketPort::open(&veth.far, VethPair::WIRE);
    let from = [0x02, 0, 0, 0, 0, 7];
    let arp = announcement(from, [192, 0, 2, 7]);
    let arrives = wait::until(wait::SOON, || {
        guest.pairs[0].send(&arp, Layout::Whole);
        wire.receive(wait::QUIET)
            .is_some_and(|frame| frame == lan::tagged(&arp, 5))
    });
    assert!(arrives, "nothing leaves the guest");
    let to_guest = lan::frame(from, lan::STRANGER, 60, 1);
    let arrives = wait::until(wait::SOON, || {
        wire.send(&lan::tagged(&to_guest, 5));
        guest.pairs[0]
            .receive(wait::QUIET)
            .is_some_and(|got| got.frame == to_guest)
    });
    assert!(arrives, "nothing reaches the guest");
}

/// An ARP message by which a guest announces its address.
fn announcement(mac: [u8; 6], ip: [u8; 4]) -> Vec<u8> {
    let ethernet_ipv4_request = [0, 1, 8, 0, 6, 4, 0, 1];
    let mut frame = [
        &[0xff; 6][..],
        &mac,
        &[8, 6],
        &ethernet_ipv4_request,
        &mac,
        &ip,
        &[0; 6],
        &ip,
    ]
    .concat();
    frame.resize(60, 0);
    frame
}

/// The files for container runtime and pod.
#[track_caller]
fn check_files(cdi: &Value, sockets: &Path, uid: &str) {
    let options = json!(["ro", "bind", "nosuid", "nodev", "noexec"]);
    let mount =
        json!({"hostPath": sockets, "containerPath": "/var/run/vhost-af-xdp/of-c", "options": options});
    assert_eq!(cdi["containerEdits"]["mounts"], json!([mount]));
    let device = &cdi["devices"][0];
    assert_eq!(device["name"], format!("{uid}_net"));
    let edits = &device["containerEdits"];
    assert_eq!(
        edits["env"],
        json!(["VHOST_AF_XDP_OF_C_NET=/var/run/vhost-af-xdp/of-c/net.sock"])
    );
    let mount = &edits["mounts"][0];
    let path = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/of-c/net/vhost-af-xdp.dev-metadata.json";
    assert_eq!(mount["containerPath"], path);
    let text = std::fs::read_to_string(mount["hostPath"].as_str().expect("a path")).expect("written");
    let objects: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let versions: Vec<_> = objects
        .iter()
        .map(|object| object["apiVersion"].clone())
        .collect();
    assert_eq!(
        versions,
        [
            "metadata.resource.k8s.io/v1beta1",
            "metadata.resource.k8s.io/v1alpha1"
        ]
    );
    let device = &objects[0]["requests"][0]["devices"][0];
    assert_eq!(
        device["attributes"]["socketPath"]["string"],
        "/var/run/vhost-af-xdp/of-c/net.sock"
    );
    assert_eq!(device["networkData"]["hardwareAddress"], "02:00:00:00:00:07");
    assert_eq!(objects[0]["podClaimName"], "of-c");
}

#[test]
fn claim_may_have_several_requests_shares_and_networks() {
    require!(Root);
    on_node(State::Kept, |mut scene, _| {
        let ids = [
            "8a3e1a0c-0000-4000-8000-000000000001",
            "8a3e1a0c-0000-4000-8000-000000000002",
        ];
        let shares = [
            ("a", "lan", 2, Some(ids[0])),
            ("a", "lan", 2, Some(ids[1])),
            ("b", "inner", 1, Some(ids[0])),
        ];
        let claim = scene.cluster.allocate("c", &shares, &[]);
        let devices = scene.kubelet.prepared(&claim);
        let shown: Vec<_> = devices
            .iter()
            .map(|it| (it.device_name.as_str(), it.share_id.as_deref()))
            .collect();
        assert_eq!(
            shown,
            [
                ("lan", Some(ids[0])),
                ("lan", Some(ids[1])),
                ("inner", Some(ids[0]))
            ]
        );
        let mut macs = Vec::new();
        for (name, network, queues) in [("a", "lan", 2), ("a.1", "lan", 2), ("b", "inner", 1)] {
            let port = scene.port(&claim, name).expect("added");
            assert_eq!(
                (&port["network"], port["lanes"].as_array().map(Vec::len)),
                (&json!(network), Some(queues))
            );
            assert!(scene.sockets(&claim).join(format!("{name}.sock")).exists());
            macs.push(port["mac"].clone());
        }
        macs.dedup();
        assert_eq!(macs.len(), 3);
        let env = &scene.cdi(&claim).expect("written")["devices"][0]["containerEdits"]["env"];
        assert_eq!(
            env[1],
            "VHOST_AF_XDP_OF_C_A_1=/var/run/vhost-af-xdp/of-c/a.1.sock"
        );
        scene.await_that("reported", |scene| {
            let status = scene.cluster.status(&claim);
            status
                .as_array()
                .is_some_and(|all| all.len() == 3 && all.iter().all(|it| it["shareID"].is_string()))
        });

        // Kubelet did not see that it was allocated again.
        scene
            .cluster
            .allocate_again(&claim, &[("b", "lan", 1, None)], &[]);
        assert_eq!(scene.kubelet.prepared(&claim).len(), 1);
        assert!(scene.port(&claim, "a").is_none());
        assert_eq!(scene.port(&claim, "b").expect("added")["network"], "lan");
        scene.kubelet.release(&claim).expect("released");

        // Owner and permissions are options.
        scene.end_driver(Signal::TERM);
        scene.restart_driver(&[
            "--socket-mode",
            "660",
            "--socket-group",
            "65534",
            "--directory-mode",
            "771",
        ]);
        scene.kubelet.prepared(&claim);
        let directory = std::fs::metadata(scene.sockets(&claim)).expect("there");
        assert_eq!((directory.mode() & 0o7777, directory.gid()), (0o771, 65534));
        let socket = std::fs::metadata(scene.sockets(&claim).join("b.sock")).expect("there");
        assert_eq!((socket.mode() & 0o7777, socket.gid()), (0o660, 65534));
        scene.kubelet.release(&claim).expect("released");
        scene.assert_empty();
    });
}
