//! The daemon's HTTP API as its clients see it: curl on a Unix socket; and the processes that answer.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::daemon::private_dir;
use crate::{Daemon, Serve, procfs, wait};

/// A directory in which every user's daemon may make sockets, and everybody look for them.
///
/// # Panics
/// If it cannot be made.
pub fn open_dir() -> TempDir {
    let dir = private_dir();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).expect("ours");
    dir
}

/// With a socket there on which it answers HTTP.
///
/// # Panics
/// Never: the directory's name is ASCII.
pub fn with_api(serve: Serve, dir: &TempDir) -> (Serve, Api) {
    let socket = dir.path().join("api.sock");
    let serve = serve.with("--api", socket.to_str().expect("ASCII"));
    (serve, Api::at(socket))
}

/// What came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Without parameters.
    pub media_type: String,
    /// All of it.
    pub body: String,
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Panics
    /// If it is none.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("no JSON ({error}): {self:?}"))
    }
}

/// A socket on which HTTP is answered.
#[derive(Debug, Clone)]
pub struct Api(PathBuf);

impl Api {
    /// At this path.
    pub fn at(socket: impl Into<PathBuf>) -> Self {
        Self(socket.into())
    }

    /// Where it is.
    pub fn socket(&self) -> &Path {
        &self.0
    }

    /// What curl makes of a request, if it is answered.
    pub fn try_ask(&self, path: &str, options: &[&str]) -> Option<Answer> {
        let output = Command::new("curl")
            .args(["--silent", "--max-time", "30", "--unix-socket"])
            .arg(&self.0)
            .args(["--write-out", "\n%{http_code} %{content_type}"])
            .args(options)
            .arg(format!("http://localhost{path}"))
            .output()
            .expect("curl runs");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        let (body, last) = text.rsplit_once('\n')?;
        let (status, media_type) = last.split_once(' ')?;
        let status = status.parse().ok().filter(|&status| status != 0)?;
        Some(Answer {
            status,
            media_type: media_type.split(';').next().unwrap_or("").to_owned(),
            body: body.to_owned(),
        })
    }

    /// What curl makes of a request.
    ///
    /// # Panics
    /// If there is no answer.
    pub fn ask(&self, path: &str, options: &[&str]) -> Answer {
        let answer = self.try_ask(path, options);
        answer.unwrap_or_else(|| panic!("no answer to {path} at {}", self.0.display()))
    }

    /// Asks for a change, with a JSON body if that is one.
    ///
    /// # Panics
    /// If there is no answer.
    pub fn change(&self, method: &str, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        let with_body = ["--request", method, "--data", &body];
        self.ask(
            path,
            if body == "null" {
                &with_body[..2]
            } else {
                &with_body
            },
        )
    }

    /// Gets a document.
    ///
    /// # Panics
    /// If it is not answered with one.
    pub fn get(&self, path: &str) -> Value {
        let answer = self.ask(path, &[]);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.json()
    }
}

/// The processes beside a daemon that answer HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processes {
    /// Starts the other one.
    pub parent: u32,
    /// Talks to clients.
    pub child: u32,
}

impl Processes {
    /// Those of a daemon.
    ///
    /// # Panics
    /// If there are none.
    pub fn of(daemon: &mut Daemon) -> Self {
        let pid = daemon.process().pid();
        let found = wait::until_some(wait::SOON, || {
            let parent = procfs::children(pid)
                .into_iter()
                .find(|&pid| name(pid) == "gateway")?;
            let child = *procfs::children(parent).first()?;
            Some(Self { parent, child })
        });
        found.expect("processes that answer HTTP")
    }

    /// Waits until neither is there.
    ///
    /// # Panics
    /// If one stays.
    pub fn await_end(self) {
        let gone = |pid: u32| !Path::new(&format!("/proc/{pid}")).exists() || state(pid) == Some('Z');
        let ended = wait::until(wait::SOON, || gone(self.parent) && gone(self.child));
        assert!(ended, "{self:?}");
    }
}

fn name(pid: u32) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    text.trim().to_owned()
}

fn state(pid: u32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(')')?.1.trim().chars().next()
}
