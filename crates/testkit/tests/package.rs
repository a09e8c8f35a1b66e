//! The Debian package: what is in it, and what it does to a system.
//!
//! It is made of the programs under test (scripts/package --programs), and installed on a copy of this machine's system
//! that is thrown away: an overlay with namespaces of its own, in which nothing is started but what the test starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;
use testkit::{VethPair, assert_has, program, require};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const INSIDE: &str = include_str!("package/inside.sh");

/// Makes an overlay over the whole system its root, and runs the rest there. Arguments: a directory, a script, those of
/// the script.
const OVERLAY: &str = r#"set -e
place="$1"
mount -t tmpfs -o mode=755 vax-overlay "$place"
mkdir "$place/upper" "$place/work" "$place/root"
mount -t overlay -o "lowerdir=/,upperdir=$place/upper,workdir=$place/work" vax-root "$place/root"
cp "$3" "$place/root/package.deb"
mount -t proc vax-proc "$place/root/proc"
mount --rbind /sys "$place/root/sys"
mount -t bpf vax-bpf "$place/root/sys/fs/bpf"
mount --rbind /dev "$place/root/dev"
for directory in run tmp; do mount -t tmpfs -o mode=1777 vax-tmp "$place/root/$directory"; done
printf '%s' "$2" >"$place/root/tmp/inside"
mkdir "$place/root/tmp/old"
cd "$place/root"
pivot_root . tmp/old
umount -l /tmp/old
exec env -i PATH="$PATH" sh /tmp/inside /package.deb "$4""#;

/// A package of the programs under test, which goes with the directory.
fn package(directory: &TempDir) -> PathBuf {
    let programs = directory.path().join("programs");
    fs::create_dir(&programs).expect("writable");
    let [driver, hook] = program::of_kubernetes();
    for path in [
        &driver,
        &hook,
        program::daemon(),
        program::bench(),
        program::top(),
        &program::gateway(),
        program::steward(),
        program::manual(),
    ] {
        let name = path.file_name().expect("a program");
        std::os::unix::fs::symlink(path, programs.join(name)).expect("writable");
    }
    let output = Command::new(Path::new(ROOT).join("scripts/package"))
        .arg("--programs")
        .arg(&programs)
        .arg("--output")
        .arg(directory.path())
        .output()
        .expect("part of the tree");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let path = String::from_utf8(output.stdout).expect("a path");
    PathBuf::from(path.trim())
}

fn output(command: &mut Command) -> String {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("it is installed");
    let (said, complained) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{said}{complained}");
    said.into_owned()
}

fn dpkg_deb(option: &str, package: &Path) -> String {
    output(Command::new("dpkg-deb").arg(option).arg(package))
}

/// Text files of the package as they will be installed.
fn unpacked(package: &Path) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    output(
        Command::new("dpkg-deb")
            .arg("--raw-extract")
            .arg(package)
            .arg(directory.path().join("package")),
    );
    directory
}

#[track_caller]
fn assert_is_roots_and_has_what_it_should(package: &Path) {
    let list = dpkg_deb("--contents", package);
    for line in list.lines() {
        let mode = line.split_whitespace().next().expect("a mode");
        let owner = line.split_whitespace().nth(1).expect("an owner");
        assert!(owner == "0/0" || owner == "root/root", "{line}");
        let is_program = line.contains("./usr/bin/v");
        let wanted = match (mode.starts_with('d'), is_program) {
            (true, _) => "drwxr-xr-x",
            (false, true) => "-rwxr-xr-x",
            (false, false) => "-rw-r--r--",
        };
        assert_eq!(mode, wanted, "{line}");
    }
    for path in [
        "usr/bin/vhost-af-xdp",
        "usr/bin/vhost-af-xdp-bench",
        "usr/bin/vhost-af-xdp-dra",
        "usr/bin/vhost-af-xdp-gateway",
        "usr/bin/vhost-af-xdp-kubevirt",
        "usr/bin/vhost-af-xdp-top",
        "usr/bin/vhost-af-xdp-steward",
        "usr/lib/systemd/system/vhost-af-xdp@.service",
        "usr/lib/systemd/system/vhost-af-xdp-network@.service",
        "usr/share/doc/vhost-af-xdp/examples/lan.toml",
        "usr/share/doc/vhost-af-xdp/examples/libvirt-hook",
        "usr/lib/systemd/system/vhost-af-xdp-steward.service",
        "usr/lib/systemd/system/vhost-af-xdp-steward.socket",
        "usr/lib/sysusers.d/vhost-af-xdp.conf",
        "usr/share/man/man1/vhost-af-xdp-serve.1.gz",
        "usr/share/man/man1/vhost-af-xdp-steward.1.gz",
        "usr/share/bash-completion/completions/vhost-af-xdp",
        "usr/share/zsh/vendor-completions/_vhost-af-xdp",
        "usr/share/fish/vendor_completions.d/vhost-af-xdp.fish",
        "usr/share/qemu/vhost-user/50-vhost-af-xdp.json",
        "usr/share/doc/vhost-af-xdp/copyright",
        "usr/share/doc/vhost-af-xdp/docs/cli.md",
        "usr/share/doc/vhost-af-xdp/docs/deploy/network.md",
        "usr/share/doc/vhost-af-xdp/docs/deploy/kubernetes/driver.yaml",
        "etc/vhost-af-xdp/steward.toml",
    ] {
        assert!(
            list.lines().any(|line| line.ends_with(&format!(" ./{path}"))),
            "{path}: {list}"
        );
    }
    let control = dpkg_deb("--info", package);
    assert_has(
        &control,
        &[
            "Depends: ",
            "libc6 (",
            "libelf1",
            "zlib1g",
            "Section: net",
            "conffiles",
        ],
    );
}

#[track_caller]
fn assert_tells_of_no_path_of_this_machine(package: &Path) {
    let directory = unpacked(package);
    let here = fs::canonicalize(ROOT).expect("the tree");
    let found = Command::new("grep")
        .args(["-rlF", "--exclude-dir=bin"])
        .arg(here)
        .arg(directory.path())
        .output()
        .expect("grep is installed");
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
    // Scripts that dpkg runs are such as sh understands.
    for script in ["postinst", "prerm", "postrm"] {
        let path = directory.path().join("package/DEBIAN").join(script);
        output(Command::new("sh").arg("-n").arg(&path));
        let text = fs::read_to_string(path).expect("text");
        assert!(!text.contains("#DEBHELPER#"), "{text}");
    }
}

/// What was said between one step and the next.
fn step<'a>(said: &'a str, name: &str) -> &'a str {
    let begin = format!("==== {name}\n");
    let at = said
        .find(&begin)
        .unwrap_or_else(|| panic!("no step {name}:\n{said}"));
    let rest = &said[at + begin.len()..];
    rest.split("==== ").next().expect("a part")
}

/// One test, as it takes long to make a package.
#[test]
fn package_has_what_it_should_and_its_programs_run_and_nothing_is_left_of_them() {
    require!(Root, Packager);
    let directory = tempfile::tempdir().expect("a directory");
    let package = package(&directory);
    assert_is_roots_and_has_what_it_should(&package);
    assert_tells_of_no_path_of_this_machine(&package);
    let veth = VethPair::with(2, 1500);
    // As the example says: a port has a VLAN.
    veth.near.run("ethtool", &["-K", VethPair::NIC, "rxvlan", "off"]);
    let place = tempfile::tempdir().expect("a directory");
    let mut command = veth.near.command("unshare");
    command
        .args([
            "--mount",
            "--propagation",
            "private",
            "--pid",
            "--fork",
            "--kill-child",
            "--ipc",
            "--uts",
        ])
        .args(["sh", "-c", OVERLAY, "sh"])
        .arg(place.path())
        .arg(INSIDE)
        .arg(&package)
        .arg(VethPair::NIC);
    let said = output(&mut command);

    assert_has(step(&said, "install"), &["vhost-af-xdp:x:"]);
    assert_has(step(&said, "install"), &["vhost-af-xdp-steward.socket"]);
    assert!(!step(&said, "install").contains("dpkg: error"), "{said}");
    assert_eq!(step(&said, "verify"), "", "{said}");
    assert_has(step(&said, "run"), &["\"mode\": \"copy (native)\""]);
    let status: Value = serde_json::from_str(step(&said, "status")).unwrap_or_else(|_| panic!("{said}"));
    assert_eq!(status[0]["ports"][0]["nic"], VethPair::NIC, "{said}");
    let leases: Value = serde_json::from_str(step(&said, "leases")).expect("JSON");
    assert_eq!(leases[0]["lease"]["start_queue"], 0, "{said}");
    let status: Value =
        serde_json::from_str(step(&said, "network status")).unwrap_or_else(|_| panic!("{said}"));
    let network = &status[0]["networks"][0];
    assert_eq!(network["uplink"], VethPair::NIC, "{said}");
    assert_eq!(network["ports"], serde_json::json!(["vm1", "vm2"]), "{said}");
    let sockets = step(&said, "network sockets");
    for port in ["vm1", "vm2"] {
        let socket = format!("/run/vhost-af-xdp-lan/{port}.sock {port} 660\n");
        assert!(sockets.contains(&socket), "{said}");
    }
    assert!(!said.contains("ended with"), "{said}");
    // The steward that was killed left its program for the next one; who removes the package takes it off.
    assert_ne!(step(&said, "pinned"), "", "{said}");
    let left: Vec<_> = step(&said, "left").lines().collect();
    assert_eq!(
        left,
        ["/etc/vhost-af-xdp", "/etc/vhost-af-xdp/steward.toml"],
        "{said}"
    );
    assert_eq!(step(&said, "left after purge"), "", "{said}");
    assert_eq!(step(&said, "missing"), "", "{said}");
    let mut ip = veth.near.command("ip");
    let shown = output(ip.args(["link", "show", VethPair::NIC]));
    assert!(!shown.contains("xdp"), "{shown}");
}
