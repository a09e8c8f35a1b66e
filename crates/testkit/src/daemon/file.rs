//! A daemon whose ports are those of a file.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::{Daemon, Serve, lessor_for, private_dir, serving};
use crate::lessor::Lessor;
use crate::{NetNs, Running, procfs, program, wait};

/// In a file's text: the directory of its sockets.
pub const DIR: &str = "@DIR@";

impl Daemon {
    /// Starts it with a file of this text ([`DIR`] stands for where its sockets are), and waits until it answers. Where
    /// `serve` says leased, these interfaces' queues are.
    ///
    /// # Panics
    /// If it ends.
    pub fn start_file(netns: &NetNs, serve: &Serve, interfaces: &[&str], text: &str) -> Self {
        let dir = private_dir();
        let lessor = lessor_for(netns, &dir, serve, interfaces);
        std::fs::write(dir.path().join("config.toml"), in_dir(text, &dir)).expect("writable");
        let mut daemon = Self {
            running: start(netns, &dir, lessor.as_ref(), serve),
            lessor,
            dir,
        };
        daemon.await_sockets(&[daemon.path("control")]);
        daemon.await_ready();
        daemon
    }

    /// Starts it again after its end, with its file, and waits until it answers.
    ///
    /// # Panics
    /// If it still runs, what is left of it stays, or it ends.
    pub fn restart_file(&mut self, netns: &NetNs, serve: &Serve) {
        assert!(self.running.ended().is_some(), "it still runs: {}", self.running);
        let control = self.path("control");
        assert!(wait::until(wait::SOON, || !control.exists()), "its sockets stay");
        self.running = start(netns, &self.dir, self.lessor.as_ref(), serve);
        self.await_sockets(&[control]);
        self.await_ready();
    }

    /// Another file, which is not read yet.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn write_file(&self, text: &str) {
        std::fs::write(self.path("config.toml"), in_dir(text, &self.dir)).expect("writable");
    }

    /// `vhost-af-xdp reload`: whether all was done, and what it said.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn reload(&self) -> (bool, String) {
        let mut command = Command::new(program::daemon());
        command.arg("reload").arg("--control").arg(self.path("control"));
        let output = command.output().expect("a program");
        let said = [output.stdout, output.stderr].concat();
        (
            output.status.success(),
            String::from_utf8_lossy(&said).into_owned(),
        )
    }

    /// Another file, which is read and applied.
    ///
    /// # Panics
    /// If it is refused.
    #[track_caller]
    pub fn reload_with(&self, text: &str) -> String {
        self.write_file(text);
        let (done, said) = self.reload();
        assert!(done, "{said}\n{}", self.said());
        said
    }

    /// What `status` tells of a port by its name.
    pub fn port_named(&self, name: &str) -> Option<Value> {
        let status = self.status();
        let ports = status["ports"].as_array()?;
        ports.iter().find(|port| port["name"] == name).cloned()
    }

    /// Where its helper is: the one process that it started.
    ///
    /// # Panics
    /// If there is none.
    pub fn helper(&mut self) -> u32 {
        let pid = self.process().pid();
        let [helper] = procfs::children(pid)[..] else {
            panic!("one child, and not {:?}", procfs::children(pid))
        };
        helper
    }
}

fn start(netns: &NetNs, dir: &tempfile::TempDir, lessor: Option<&Lessor>, serve: &Serve) -> Running {
    let mut command = serving(netns, dir, lessor, serve);
    command.arg("--config").arg(dir.path().join("config.toml"));
    command.args(serve.args());
    Running::start(command)
}

/// A file's text where sockets are in that directory. Where a table with an interface says no mode it is AF_XDP.
fn in_dir(text: &str, dir: &tempfile::TempDir) -> String {
    let path: PathBuf = dir.path().to_owned();
    let text = text.replace(DIR, path.to_str().expect("UTF-8"));
    let tables = text
        .split_inclusive('\n')
        .fold(Vec::<String>::new(), |mut tables, line| {
            match tables.last_mut().filter(|_| !line.starts_with('[')) {
                Some(table) => table.push_str(line),
                None => tables.push(line.to_owned()),
            }
            tables
        });
    let is_key = |line: &str, key: &str| line.split('=').next().is_some_and(|name| name.trim() == key);
    let has = |table: &str, key: &str| table.lines().any(|line| is_key(line, key));
    let with_mode =
        |table: String| match (has(&table, "ifname") || has(&table, "uplink")) && !has(&table, "mode") {
            true => format!("{}\nmode = \"xdp\"\n", table.trim_end_matches('\n')),
            false => table,
        };
    tables.into_iter().map(with_mode).collect()
}
