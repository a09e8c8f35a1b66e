//! A libvirt of the test's own: libvirtd in the foreground, with everything that it keeps in a private place.
//!
//! Theory of operation. libvirtd runs in a mount namespace where /run, /var/lib, /var/cache, /var/log and
//! /etc/libvirt are empty, so that it neither finds nor leaves anything on the host, and in a PID namespace, so that
//! its QEMUs end with it, however it ends. Only its socket lies where `virsh` outside can reach it. The user that
//! Debian's package libvirt-daemon-system would make exists in there alone. QEMU's group is the daemon's, which may
//! then connect to a socket that QEMU makes (libvirt sets a umask of 002). There is no systemd, no virtlogd and no
//! cgroup.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::directory::private_dir;
use crate::guest::Images;
use crate::systemd::Systemd;
use crate::world::GUEST;
use crate::{Running, wait};

/// Arguments: where its socket is to be, a hook or nothing, whom QEMU runs as, places that are to be empty.
const START: &str = r#"set -e
sockets="$1" hook="$2" user="$3"
shift 3
for place in "$@" /var/lib /var/cache /var/log /etc/libvirt; do
    mkdir -p "$place"
    mount -t tmpfs vax-libvirt "$place"
done
for kind in passwd group; do
    cp "/etc/$kind" "/var/lib/$kind"
    mount --bind "/var/lib/$kind" "/etc/$kind"
done
if [ -n "$hook" ]; then install -D "$hook" "/etc/libvirt/hooks/qemu.d/$(basename "$hook")"; fi
echo libvirt-qemu:x:64055:64055::/:/usr/sbin/nologin >>/etc/passwd
echo libvirt-qemu:x:64055: >>/etc/group
cat >/etc/libvirt/qemu.conf <<END
user = "$user"
group = "nogroup"
dynamic_ownership = 0
remember_owner = 0
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
END
cat >/etc/libvirt/libvirtd.conf <<END
unix_sock_dir = "$sockets"
auth_unix_ro = "none"
auth_unix_rw = "none"
END
libvirtd --config /etc/libvirt/libvirtd.conf --pid-file /run/libvirtd.pid &
wait $!"#;

/// The name of a [`domain`].
pub const NAME: &str = "vax-guest";

/// A copy of a file in a directory that libvirt sees, as the one where the file is may be hidden from it.
///
/// # Panics
/// If the file cannot be copied.
pub fn copied(file: &Path, directory: &Path) -> PathBuf {
    let copy = directory.join(file.file_name().expect("a file"));
    let _ = fs::copy(file, &copy).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    copy
}

/// What a guest is made of, in a directory that libvirt sees.
pub fn images(directory: &Path) -> Images {
    let images = Images::get();
    Images {
        kernel: copied(&images.kernel, directory),
        initramfs: copied(&images.initramfs, directory),
        ..images
    }
}

/// A domain with these elements for memory and interface, and with a console and a command shell as `scripts/guest` has
/// them. `state` is a directory of that kind.
///
/// `vectors` of interface `ua-net` is 0 because Debian 12's QEMU crashes when a vhost-user device masks an MSI-X vector
/// without KVM.
pub fn domain(images: &Images, state: &Path, memory: &str, interface: &str) -> String {
    let (kernel, initramfs) = (images.kernel.display(), images.initramfs.display());
    let cmdline = &images.cmdline;
    let state = state.display();
    format!(
        "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{NAME}</name>
  <memory unit='MiB'>256</memory>
  {memory}
  <vcpu>1</vcpu>
  <cpu mode='maximum'/>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initramfs}</initrd>
    <cmdline>{cmdline} guest.ip={GUEST}</cmdline>
  </os>
  <devices>
    {interface}
    <serial type='file'>
      <source path='{state}/console.log'/>
      <target port='0'/>
    </serial>
    <serial type='pipe'>
      <source path='{state}/shell'/>
      <target port='1'/>
    </serial>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
  </devices>
  <qemu:override>
    <qemu:device alias='ua-net'>
      <qemu:frontend>
        <qemu:property name='vectors' type='unsigned' value='0'/>
      </qemu:frontend>
    </qemu:device>
  </qemu:override>
</domain>"
    )
}

/// A running libvirtd. Ended on drop, with its domains.
#[must_use]
pub struct Libvirt {
    running: Running,
    sockets: PathBuf,
    _dir: Option<TempDir>,
}

impl Libvirt {
    /// Starts one, and waits until it answers.
    ///
    /// # Panics
    /// If it does not.
    pub fn start() -> Self {
        let dir = private_dir();
        let sockets = dir.path().to_owned();
        Self {
            _dir: Some(dir),
            ..Self::start_by(Command::new("env"), sockets, (None, "root"), &["/run"])
        }
    }

    /// Starts one in a systemd's namespaces, with a hook and with its socket in a directory that both sides have; waits
    /// until it answers. It ends with that systemd.
    ///
    /// # Panics
    /// If it does not.
    pub fn start_in(systemd: &Systemd, sockets: &Path, hook: &Path) -> Self {
        Self::start_by(
            systemd.command(),
            sockets.to_owned(),
            (Some(hook), "root"),
            &["/run/libvirt"],
        )
    }

    /// The same without a hook, and with QEMU as the user that Debian's libvirt runs it as.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn start_unprivileged_in(systemd: &Systemd, sockets: &Path) -> Self {
        Self::start_by(
            systemd.command(),
            sockets.to_owned(),
            (None, "libvirt-qemu"),
            &["/run/libvirt"],
        )
    }

    /// `empty`: what it is not to find, beside what it never is.
    fn start_by(
        mut command: Command,
        sockets: PathBuf,
        (hook, user): (Option<&Path>, &str),
        empty: &[&str],
    ) -> Self {
        command
            .args([
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "--pid",
                "--fork",
            ])
            .args(["--kill-child", "--mount-proc", "sh", "-c", START, "sh"])
            .args([sockets.as_path(), hook.unwrap_or(Path::new(""))])
            .arg(user)
            .args(empty);
        let mut libvirt = Self {
            running: Running::start(command),
            sockets,
            _dir: None,
        };
        let up = wait::until(3 * wait::SOON, || {
            libvirt.running.check();
            libvirt.socket().exists() && libvirt.try_virsh(&["version"]).status.success()
        });
        assert!(up, "libvirtd does not answer: {}", libvirt.running);
        libvirt
    }

    /// Runs `virsh` and returns what it printed.
    ///
    /// # Panics
    /// If it fails.
    pub fn virsh(&self, args: &[&str]) -> String {
        let output = self.try_virsh(args);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let complained = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "virsh {args:?}: {said}{complained}\n{}",
            self.running
        );
        said
    }

    /// Runs `virsh`.
    ///
    /// # Panics
    /// If it is not there.
    pub fn try_virsh(&self, args: &[&str]) -> Output {
        let uri = format!("qemu+unix:///system?socket={}", self.socket().display());
        let mut command = Command::new("virsh");
        command.args(["--connect", &uri]).args(args);
        command.output().expect("virsh is installed")
    }

    fn socket(&self) -> PathBuf {
        self.sockets.join("libvirt-sock")
    }
}
