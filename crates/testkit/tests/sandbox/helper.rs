//! What a daemon that was taken over gets of its helper: nothing that its operator's file does not say.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

use rstest::rstest;
use testkit::daemon::{private_dir, sandbox_attempt};
use testkit::{Running, require, wait};

/// Ports of the null NIC, by name and path.
fn ports(ports: &[(&str, &Path)]) -> String {
    let port = |(name, path): &(&str, &Path)| {
        format!(
            "[port.{name}]\nsocket-path = \"{}\"\nnull = true\n",
            path.display()
        )
    };
    ports.iter().map(port).collect()
}

#[rstest]
// Else the others would prove nothing.
#[case::what_the_file_says(r#"["Read", "Adopt", {"Listen": "new"}]"#, "")]
#[case::what_is_free_again(r#"[{"Remove": "@DIR@/a.sock"}, "Read", "Adopt", {"Listen": "a"}]"#, "")]
#[case::what_is_not_adopted(r#"["Read", {"Listen": "new"}]"#, "no such port")]
#[case::what_was_not_read(r#"["Adopt"]"#, "nothing was read")]
#[case::by_a_path(r#"["Read", "Adopt", {"Listen": "@DIR@/x.sock"}]"#, "no such port")]
#[case::by_a_path_in_an_object(r#"["Read", "Adopt", {"Listen": {"path": "/etc/x"}}]"#, "no request")]
#[case::over_a_file(
    r#"["Read", "Adopt", {"Listen": "file"}]"#,
    "not a socket: choose another path"
)]
#[case::over_a_link(
    r#"["Read", "Adopt", {"Listen": "link"}]"#,
    "not a socket: choose another path"
)]
#[case::over_a_directory(
    r#"["Read", "Adopt", {"Listen": "directory"}]"#,
    "not a socket: choose another path"
)]
#[case::of_somebody_who_listens(r#"["Read", "Adopt", {"Listen": "others"}]"#, "another process listens")]
#[case::that_it_has_already(r#"["Read", "Adopt", {"Listen": "a"}]"#, "another process listens")]
#[case::removing_a_file(r#"[{"Remove": "@DIR@/file"}]"#, "no socket of this daemon's")]
#[case::removing_anothers(r#"[{"Remove": "@DIR@/others"}]"#, "no socket of this daemon's")]
#[case::removing_by_another_path(
    r#"[{"Remove": "@DIR@/./a.sock"}, {"Remove": "/etc/hostname"}]"#,
    "no socket of this"
)]
fn request_is_judged_by_the_file(#[case] requests: &str, #[case] refusal: &str) {
    require!(Root);
    let dir = private_dir();
    let path = |name: &str| dir.path().join(name);
    let first = ports(&[("a", &path("a.sock"))]);
    fs::write(path("c.toml"), &first).expect("writable");
    let mut attempt = asking(
        &requests.replace("@DIR@", dir.path().to_str().expect("UTF-8")),
        &path("c.toml"),
    );
    fs::write(path("file"), "precious").expect("writable");
    fs::create_dir(path("directory")).expect("ours");
    std::os::unix::fs::symlink(path("target"), path("link")).expect("ours");
    let _others = UnixListener::bind(path("others")).expect("ours");
    let named = ["file", "directory", "link", "others"].map(|name| (name, path(name)));
    let named: Vec<_> = named.iter().map(|(name, path)| (*name, path.as_path())).collect();
    let all = [first, ports(&[("new", &path("new.sock"))]), ports(&named)].concat();
    fs::write(path("c.toml"), all).expect("writable");
    attempt.type_in("\n");
    let status = attempt.wait(wait::SOON);
    let said = attempt.said();
    assert_eq!(status.success(), refusal.is_empty(), "{said}");
    assert!(said.contains(refusal), "{said}");
    assert_eq!(fs::read_to_string(path("file")).expect("still there"), "precious");
    assert!(!path("target").exists() && path("directory").is_dir());
    assert!(
        fs::symlink_metadata(path("link"))
            .expect("still there")
            .is_symlink()
    );
    assert!(
        fs::metadata(path("others"))
            .expect("still there")
            .file_type()
            .is_socket()
    );
    // What was made goes with it.
    let left = || path("new.sock").exists() || path("a.sock").exists();
    assert!(wait::until(wait::SOON, || !left()), "a socket stays");
}

#[test]
fn file_that_names_another_directory_is_refused() {
    require!(Root);
    let (dir, other) = (private_dir(), private_dir());
    let path = |name: &str| dir.path().join(name);
    let elsewhere = other.path().join("new.sock");
    for further in [
        elsewhere.as_path(),
        &path("below/new.sock"),
        Path::new("/new.sock"),
    ] {
        let first = ports(&[("a", &path("a.sock"))]);
        fs::write(path("c.toml"), &first).expect("writable");
        let mut attempt = asking(r#"["Read", "Adopt", {"Listen": "new"}]"#, &path("c.toml"));
        fs::write(path("c.toml"), [first, ports(&[("new", further)])].concat()).expect("writable");
        attempt.type_in("\n");
        let status = attempt.wait(wait::SOON);
        let said = attempt.said();
        assert!(!status.success() && said.contains("no such port"), "{said}");
        assert!(!further.exists());
    }
}

/// What is put in the way of a directory's path later does not lead elsewhere.
#[test]
fn socket_is_made_in_the_directory_that_was_there_when_the_daemon_began() {
    require!(Root);
    let (dir, other) = (private_dir(), private_dir());
    let (place, moved) = (dir.path().join("vms"), dir.path().join("moved"));
    fs::create_dir(&place).expect("ours");
    let config = dir.path().join("c.toml");
    let first = ports(&[("a", &place.join("a.sock"))]);
    fs::write(&config, &first).expect("writable");
    let requests = r#"["Read", "Adopt", {"Listen": "new"}, {"Listen": "nobody"}]"#;
    let mut attempt = asking(requests, &config);
    fs::write(
        &config,
        [first, ports(&[("new", &place.join("new.sock"))])].concat(),
    )
    .expect("writable");
    fs::rename(&place, &moved).expect("ours");
    std::os::unix::fs::symlink(other.path(), &place).expect("ours");
    attempt.type_in("\n");
    attempt.wait(wait::SOON);
    assert!(
        attempt.said().contains("no such port"),
        "the third was done: {attempt}"
    );
    assert_eq!(fs::read_dir(other.path()).expect("ours").count(), 0);
    let left = || fs::read_dir(&moved).expect("ours").count();
    // The one of the start is known by its path.
    assert!(wait::until(wait::SOON, || left() == 1), "{} sockets", left());
}

/// A daemon of that file, taken over, which is about to ask.
fn asking(requests: &str, config: &Path) -> Running {
    let mut command = Command::new(sandbox_attempt());
    command.args([&format!("ask:{requests}"), "--control", "none", "--config"]);
    command.arg(config);
    let mut attempt = Running::start(command);
    attempt.await_text("found the helper");
    attempt
}
