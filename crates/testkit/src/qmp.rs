//! Orders to a running QEMU (QMP, QEMU's docs/interop/qmp-spec.txt).
//!
//! One command at a time, each answered before the next. Events that come between are skipped: what a test waits for it
//! asks for.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::wait;

/// Bytes a second that a migration may use at first, so that frames are received while memory is copied.
const SLOW: usize = 16 << 20;
const FAST: usize = 1024 << 20;

/// A connection to a QEMU's control socket.
#[derive(Debug)]
pub struct Qmp {
    stream: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects, and leaves the negotiation behind.
    ///
    /// # Panics
    /// If no QEMU answers there.
    pub fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        stream.set_read_timeout(Some(2 * wait::SOON)).expect("not zero");
        let mut qmp = Self {
            stream: BufReader::new(stream),
        };
        let greeting = qmp.read();
        assert!(greeting.get("QMP").is_some(), "not QEMU: {greeting}");
        qmp.execute("qmp_capabilities", &json!({}));
        qmp
    }

    /// Runs a command and returns what it answers.
    ///
    /// # Panics
    /// If QEMU refuses it.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Value {
        self.try_execute(command, arguments)
            .unwrap_or_else(|refusal| panic!("{command}: {refusal}"))
    }

    /// Runs a command.
    ///
    /// # Errors
    /// QEMU's words.
    ///
    /// # Panics
    /// If QEMU does not answer.
    pub fn try_execute(&mut self, command: &str, arguments: &Value) -> Result<Value, String> {
        let line = json!({"execute": command, "arguments": arguments}).to_string();
        self.stream
            .get_mut()
            .write_all(line.as_bytes())
            .expect("QEMU reads its control socket");
        loop {
            let mut answer = self.read();
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                return Err(error["desc"].as_str().unwrap_or_default().to_owned());
            }
        }
    }

    /// A command of the human monitor, and what it prints.
    ///
    /// # Panics
    /// If QEMU refuses it.
    pub fn human(&mut self, line: &str) -> String {
        let said = self.execute("human-monitor-command", &json!({"command-line": line}));
        said.as_str().unwrap_or_default().to_owned()
    }

    /// Moves the guest to another QEMU that waits for one, by a socket at that path; what QEMU reports at the end.
    ///
    /// # Panics
    /// If it does not move.
    pub fn migrate_to(&mut self, destination: &mut Self, socket: &Path) -> Value {
        let uri = format!("unix:{}", socket.display());
        destination.execute("migrate-incoming", &json!({"uri": uri}));
        let speed = |bytes: usize| json!({"max-bandwidth": bytes, "downtime-limit": 300});
        self.execute("migrate-set-parameters", &speed(SLOW));
        self.execute("migrate", &json!({"uri": uri}));
        std::thread::sleep(Duration::from_secs(2));
        let now = self.execute("query-migrate", &json!({}));
        assert_ne!(now["status"], "failed", "{now}");
        self.execute("migrate-set-parameters", &speed(FAST));
        let end = wait::until_some(3 * wait::SOON, || {
            let now = self.execute("query-migrate", &json!({}));
            (now["status"] == "completed" || now["status"] == "failed").then_some(now)
        });
        let end = end.expect("the migration ends");
        assert_eq!(end["status"], "completed", "{end}");
        end
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("QEMU answers");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("QEMU says {line:?}: {error}"))
    }
}
