//! A process that sends frames from the interface at the other end: this program's own `txonly`.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use steer::mac_text;

use crate::args::Plan;

/// Sends until it is dropped; if this process is killed, not much longer than a figure takes.
#[derive(Debug)]
pub(super) struct Sender(Child);

impl Sender {
    /// Starts it. `longest`: how long it sends if it is not ended before.
    /// Errors: the process cannot be started.
    pub(super) fn start(interface: &str, plan: &Plan, longest: Duration) -> anyhow::Result<Self> {
        let (size, seconds) = (plan.args.size.to_string(), longest.as_secs_f64().to_string());
        // To the interface's own address, for NICs that accept no other.
        let to = mac_text(plan.link.mac);
        let child = Command::new("/proc/self/exe")
            .args(["txonly", "--json", "--ifname", interface])
            .args(["--dst-mac", &to, "--size", &size, "--duration", &seconds])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("--sender {interface}: no process could be started"))?;
        Ok(Self(child))
    }

    /// Why it ended, if it did.
    pub(super) fn complaint(&mut self) -> Option<String> {
        self.0.try_wait().ok().flatten()?;
        let mut said = String::new();
        if let Some(stderr) = self.0.stderr.as_mut() {
            let _ = stderr.read_to_string(&mut said);
        }
        let said = said.trim().trim_start_matches("vhost-af-xdp-bench: ");
        Some(format!("the sender ended: {said}"))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
