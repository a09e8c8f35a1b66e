//! A hostile VMM whose file never answers, beside its file system's server: both are processes of their own
//! (`src/bin/stalled`).

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_setfd};

use crate::vmm::{LOG, RAM, inflight_bytes};
use crate::{Running, program};

/// What the file is given as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// All of guest memory.
    Ram,
    /// The part of guest memory that holds frames; rings are elsewhere.
    Buffers,
    /// The dirty log.
    Log,
    /// The inflight region.
    Inflight,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Buffers => "buffers",
            Self::Log => "log",
            Self::Inflight => "inflight",
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Self::Ram | Self::Buffers => RAM,
            Self::Log => LOG,
            Self::Inflight => inflight_bytes(false),
        }
    }
}

/// The server of such a file, and where the file is.
fn serve(program: &Path, bytes: u64, how: &[&str]) -> (Running, String) {
    let mut command = Command::new(program);
    command.args(["serve", &bytes.to_string()]).args(how);
    let mut server = Running::start(command);
    server.await_text("/file\n");
    let said = server.said();
    let file = said.lines().find_map(|line| line.strip_prefix("file "));
    let file = file.expect("it was awaited").to_owned();
    (server, file)
}

/// A file that never answers, not even that it is closed. On drop the server goes first: then nothing waits for it.
#[must_use]
pub struct SilentFile {
    server: Running,
    /// Open for reading and writing.
    pub file: File,
}

impl SilentFile {
    /// One of so many bytes.
    ///
    /// # Panics
    /// If there is no FUSE.
    pub fn new(bytes: u64) -> Self {
        let (mut server, path) = serve(program::stalled(), bytes, &[]);
        let file = File::options().read(true).write(true).open(path);
        server.type_in("mute\n");
        server.await_text("mute\n");
        Self {
            server,
            file: file.expect("it is served"),
        }
    }

    /// Waits until so many processes have begun to close it, none of which will be done.
    ///
    /// # Panics
    /// If they are fewer.
    #[track_caller]
    pub fn await_closing(&self, processes: usize) {
        let closing = || self.server.said().matches("asked FLUSH ").count();
        let are_there = crate::wait::until(crate::wait::SOON, || closing() == processes);
        assert!(are_there, "{} are closing it", closing());
    }
}

/// A file that is opened and closed like any other until something was written to it. From Linux 6.16 on, which makes
/// no copies of such pages, whoever closes it then waits for its server, which does not take them: until this is
/// dropped.
#[must_use]
pub struct LateFile {
    _server: Running,
    path: String,
}

impl LateFile {
    /// One of so many bytes.
    ///
    /// # Panics
    /// If there is no FUSE.
    pub fn new(bytes: u64) -> Self {
        let (server, path) = serve(program::stalled(), bytes, &["late"]);
        Self {
            _server: server,
            path,
        }
    }

    /// Opens it for reading and writing.
    ///
    /// # Panics
    /// If it is closed by somebody, who waits.
    pub fn open(&self) -> File {
        let file = File::options().read(true).write(true).open(&self.path);
        file.expect("it is served")
    }
}

/// A process whose write to a tap device does not end: what it writes is in such a file. On drop the server goes first,
/// and the write ends.
#[must_use]
pub struct StuckWrite {
    _server: Running,
    _writer: Running,
}

impl StuckWrite {
    /// Begins it.
    ///
    /// # Panics
    /// If there is no FUSE.
    pub fn begin(tap: &File) -> Self {
        let program = program::stalled();
        let (mut server, file) = serve(program, 4096, &[]);
        // The process inherits it.
        fcntl_setfd(tap, FdFlags::empty()).expect("it is open");
        let mut command = Command::new(program);
        command.args(["write", &file, &tap.as_raw_fd().to_string()]);
        let writer = Running::start(command);
        server.await_text("asked READ");
        Self {
            _server: server,
            _writer: writer,
        }
    }
}

/// See the module's head. On drop the server goes first: then nothing waits for it any longer.
#[must_use]
pub struct Stalled {
    server: Running,
    vmm: Running,
}

impl Stalled {
    /// Starts both; `program` is the binary `stalled`. The VMM has the file open, and has said nothing yet to the back
    /// end at `socket`.
    ///
    /// # Panics
    /// If one does not start.
    pub fn new(program: &str, role: Role, socket: &Path) -> Self {
        let (server, file) = serve(Path::new(program), role.bytes(), &[]);
        let mut command = Command::new(program);
        command.args(["give", role.name(), &file]).arg(socket);
        let mut stalled = Self {
            server,
            vmm: Running::start(command),
        };
        stalled.vmm.await_text("open\n");
        stalled
    }

    /// From now on the server answers nothing.
    ///
    /// # Panics
    /// If it has ended.
    pub fn mute(&mut self) {
        self.server.type_in("mute\n");
        self.server.await_text("mute\n");
    }

    /// Lets the VMM have its session; whether it was `accepted` or `refused` so soon, or there was `no answer`.
    ///
    /// # Panics
    /// If it has ended.
    pub fn go(&mut self, limit: Duration) -> &'static str {
        self.vmm.type_in("go\n");
        let outcome = crate::wait::until_some(limit, || {
            self.vmm.check();
            let said = self.vmm.said();
            ["accepted", "refused"]
                .into_iter()
                .find(|outcome| said.contains(outcome))
        });
        outcome.unwrap_or("no answer")
    }

    /// What the server was asked, by others than the VMM.
    ///
    /// # Panics
    /// If a line of it is not understood.
    pub fn asked_by_others(&self) -> Vec<String> {
        let said = self.server.said();
        let asked = said.lines().filter_map(|line| line.strip_prefix("asked "));
        let asked = asked.map(|asked| asked.rsplit_once(" by ").expect("as it is printed"));
        let vmm = self.vmm.pid().to_string();
        // The kernel itself has number 0.
        let others = asked.filter(|&(_, thread)| thread != "0" && thread != vmm);
        others.map(|(name, _)| name.to_owned()).collect()
    }
}
