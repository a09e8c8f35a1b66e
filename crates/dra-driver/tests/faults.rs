//! Mistakes, losses and attacks.

use std::os::unix::fs::symlink;

use rustix::process::Signal;
use serde_json::json;
use testkit::{assert_has, require, wait};

use crate::support::kubelet::send_garbage;
use crate::support::scene::{State, on_node};

#[test]
fn mistakes_are_reported_and_leave_nothing() {
    require!(Root);
    on_node(State::Kept, |mut scene, _| {
        let mac = |last: u8| json!({"mac": format!("02:00:00:00:00:{last:02x}")});
        let good = scene
            .cluster
            .allocate("good", &[("net", "lan", 1, None)], &[("FromClaim", mac(1))]);
        scene.kubelet.prepared(&good);
        for (name, device, keys, wanted) in [
            ("key", "lan", json!({"vlna": 1}), "did you mean \"vlan\"?"),
            (
                "version",
                "lan",
                json!({"apiVersion": "vhost-af-xdp.dev/v2"}),
                "give vhost-af-xdp.dev/v1alpha1",
            ),
            (
                "path",
                "lan",
                json!({"socket-path": "/run/x.sock"}),
                "the driver sets it",
            ),
            ("pair", "lan", json!({"vlan": 1, "trunk": "2"}), "trunk"),
            ("twice", "lan", mac(1), "02:00:00:00:00:01"),
            ("network", "gone", json!({}), "no network of the daemon"),
            (
                "owner",
                "lan",
                json!({"socket-owner": "nobody-of-this-name"}),
                "nobody-of-this-name",
            ),
        ] {
            let claim = scene
                .cluster
                .allocate(name, &[("net", device, 1, None)], &[("FromClaim", keys)]);
            for _ in 0..2 {
                let error = scene.kubelet.prepare(&[&claim]).remove(0).expect_err(name);
                assert!(
                    error.contains(wanted) && error.starts_with("request net: "),
                    "{name}: {error}"
                );
            }
            scene.await_that("event", |scene| {
                scene.cluster.events(&claim).iter().any(|it| it.contains(wanted))
            });
            assert_eq!(scene.cluster.events(&claim).len(), 1, "{name}");
            scene.await_that("status", |scene| {
                let condition = &scene.cluster.status(&claim)[0]["conditions"][0];
                condition["status"] == "False"
                    && condition["message"]
                        .as_str()
                        .is_some_and(|it| it.contains(wanted))
            });
            assert!(
                !scene.sockets(&claim).exists() && !scene.checkpoint(&claim).exists(),
                "{name}"
            );
        }
        // Of several claims each has its own answer.
        let other = scene
            .cluster
            .allocate("other", &[("net", "lan", 1, None)], &[("FromClaim", mac(2))]);
        let bad = scene
            .cluster
            .allocate("bad", &[("net", "lan", 1, None)], &[("FromClaim", mac(1))]);
        let [first, second] = &scene.kubelet.prepare(&[&bad, &other])[..] else {
            panic!("two")
        };
        assert!(first.is_err() && second.is_ok());

        scene.end_daemon();
        let error = scene.kubelet.prepare(&[&bad]).remove(0).expect_err("no daemon");
        assert_has(&error, &["no daemon answers at", "start it"]);
        scene
            .kubelet
            .release(&good)
            .expect_err("the daemon may have its port");
        scene.restart_daemon(&["lan", "inner"]);
        scene.kubelet.release(&good).expect("released");
        scene.kubelet.release(&other).expect("released");
        // Kubelet does so for a claim that was not prepared, too.
        scene.kubelet.release(&bad).expect("released");
        scene.assert_empty();

        // A claim of this name that is another one.
        scene.cluster.delete(&good);
        let error = scene.kubelet.prepare(&[&good]).remove(0).expect_err("gone");
        assert_has(&error, &["the claim is gone"]);
        send_garbage(&scene.kubelet.registration_socket());
        scene.kubelet.register();
    });
}

#[test]
fn ports_are_restored_to_a_daemon_that_lost_them() {
    require!(Root);
    on_node(State::Lost, |mut scene, _| {
        let lan = scene.cluster.allocate("lan", &[("net", "lan", 1, None)], &[]);
        let inner = scene.cluster.allocate("inner", &[("net", "inner", 1, None)], &[]);
        scene.kubelet.prepared(&lan);
        scene.kubelet.prepared(&inner);
        scene.end_daemon();
        scene.restart_daemon(&["lan"]);
        scene.await_that("restored", |scene| scene.port(&lan, "net").is_some());
        scene.await_that("published", |scene| {
            scene.cluster.devices().is_some_and(|all| all.len() == 1)
        });
        scene.driver.await_text("its pod has no network until then");
        // Its network is back after a restart.
        scene.end_daemon();
        scene.restart_daemon(&["lan", "inner"]);
        let back = wait::until(2 * wait::SOON, || scene.port(&inner, "net").is_some());
        assert!(back, "{}", scene.driver.said());
        scene.kubelet.release(&lan).expect("released");
        scene.kubelet.release(&inner).expect("released");
        scene.assert_empty();
    });
}

#[test]
fn ports_come_back_after_a_reboot() {
    require!(Root);
    on_node(State::Kept, |mut scene, _| {
        let claim = scene.cluster.allocate("c", &[("net", "lan", 1, None)], &[]);
        let gone = scene.cluster.allocate("gone", &[("net", "lan", 1, None)], &[]);
        let devices = scene.kubelet.prepared(&claim);
        scene.kubelet.prepared(&gone);
        scene.end_driver(Signal::KILL);
        scene.end_daemon();
        // What a reboot empties: /run.
        let cdi = scene.cdi(&claim);
        std::fs::remove_dir_all(scene.sockets(&claim)).expect("there");
        std::fs::remove_dir_all(scene.sockets(&gone)).expect("there");
        std::fs::remove_dir_all(scene.dir.path().join("cdi")).expect("there");
        scene.cluster.delete(&gone);
        // The daemon starts first: it has no place for the socket yet, and leaves the port out.
        scene.restart_daemon(&["lan", "inner"]);
        assert!(scene.port(&claim, "net").is_none());
        scene.restart_driver(&[]);
        scene.await_that("restored", |scene| scene.port(&claim, "net").is_some());
        assert!(scene.sockets(&claim).join("net.sock").exists());
        assert_eq!(scene.cdi(&claim), cdi);
        assert_eq!(scene.kubelet.prepared(&claim), devices);
        scene.await_that("collected", |scene| !scene.checkpoint(&gone).exists());
        scene.kubelet.release(&claim).expect("released");
        // Not for a later start either.
        let kept = std::fs::read_to_string(scene.daemon.path("added.toml")).expect("written");
        assert!(!kept.contains("dra-"), "{kept}");
        scene.assert_empty();
    });
}

#[test]
fn what_kubelet_forgot_is_collected() {
    require!(Root);
    on_node(State::Kept, |mut scene, _| {
        let share = [("net", "lan", 1, None)];
        let [gone, gone_too, unreadable, lost, kept] = ["gone", "gone-too", "unreadable", "lost", "kept"]
            .map(|name| scene.cluster.allocate(name, &share, &[]));
        for claim in [&gone, &gone_too, &unreadable, &lost, &kept] {
            scene.kubelet.prepared(claim);
        }
        scene.end_driver(Signal::KILL);
        for claim in [&gone, &gone_too] {
            scene.cluster.delete(claim);
        }
        for claim in [&gone_too, &unreadable] {
            std::fs::write(scene.checkpoint(claim), "{").expect("ours");
        }
        std::fs::remove_file(scene.checkpoint(&lost)).expect("ours");
        std::fs::write(scene.checkpoint(&lost).with_extension("new"), "{").expect("ours");
        scene.restart_driver(&[]);
        for claim in [&gone, &gone_too, &lost] {
            scene.await_that("collected", |scene| {
                scene.port(claim, "net").is_none()
                    && !scene.sockets(claim).exists()
                    && scene.cdi(claim).is_none()
            });
        }
        // A claim whose checkpoint is broken keeps its port, and is released all the same.
        for claim in [&unreadable, &kept] {
            assert!(scene.port(claim, "net").is_some());
            scene.kubelet.prepared(claim);
            scene.kubelet.release(claim).expect("released");
        }
        scene.assert_empty();
    });
}

#[test]
fn links_in_a_claims_directory_are_not_followed() {
    require!(Root);
    on_node(State::Kept, |mut scene, _| {
        let claim = scene.cluster.allocate("c", &[("net", "lan", 1, None)], &[]);
        let victim = scene.dir.path().join("victim");
        std::fs::create_dir(&victim).expect("ours");
        std::fs::write(victim.join("file"), "kept").expect("ours");
        scene.kubelet.prepared(&claim);
        // A privileged pod replaces its socket, and adds links and directories.
        let sockets = scene.sockets(&claim);
        std::fs::remove_file(sockets.join("net.sock")).expect("there");
        symlink(victim.join("file"), sockets.join("net.sock")).expect("ours");
        symlink(&victim, sockets.join("directory")).expect("ours");
        std::fs::create_dir_all(sockets.join("a/b")).expect("ours");
        symlink(&victim, sockets.join("a/b/c")).expect("ours");
        scene.end_daemon();
        scene.restart_daemon(&["lan", "inner"]);
        scene.kubelet.release(&claim).expect("released");
        scene.assert_empty();

        // The whole directory is a link.
        scene.kubelet.prepared(&claim);
        std::fs::remove_dir_all(&sockets).expect("there");
        symlink(&victim, &sockets).expect("ours");
        scene.end_driver(Signal::KILL);
        scene.restart_driver(&[]);
        scene.driver.await_text("check that the driver may write there");
        scene.kubelet.release(&claim).expect("released");
        scene.assert_empty();
        assert_eq!(std::fs::read(victim.join("file")).expect("there"), b"kept");
        assert_eq!(std::fs::read_dir(&victim).expect("there").count(), 1);
    });
}
