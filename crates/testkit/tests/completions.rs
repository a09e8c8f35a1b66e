//! Completions as a user gets them: the shells are asked, bash and zsh by a Tab on a terminal.

use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;
use testkit::netns::NetNs;
use testkit::process::{Running, run};
use testkit::{program, require};

/// The interface of the namespace that shells run in; no other name begins as it does.
const NIC: &str = "completed7";

struct Scripts {
    directory: TempDir,
    ns: NetNs,
}

impl Scripts {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        run(
            program::manual().to_str().expect("ASCII"),
            &[directory.path().to_str().expect("ASCII")],
        );
        let ns = NetNs::new("completions");
        ns.ip(&["link", "add", NIC, "type", "veth", "peer", "other7"]);
        Self { directory, ns }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A command that runs in the namespace and finds the daemon by its name.
    fn command(&self, program: &str) -> Command {
        let mut command = self.ns.command(program);
        let place = program::daemon().parent().expect("a file is in a directory");
        let others = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{others}", place.display()));
        command.env("TERM", "dumb").env("HOME", self.directory.path());
        command.current_dir(self.directory.path());
        command
    }

    /// A shell on a terminal, once it has read the completions.
    fn terminal(&self, shell: &str, set_up: &str) -> Running {
        let mut command = self.command("script");
        command.args(["-qfec", shell, "/dev/null"]);
        let mut shell = Running::start(command);
        // The words that are awaited are not those that the terminal echoes.
        shell.type_in(&format!("{set_up}; echo so\"me\"thing\n"));
        shell.await_text("something");
        shell
    }
}

/// What a Tab makes of a line; the next line is a new one.
fn press_tab(shell: &mut Running, typed: &str, completed: &str) {
    shell.type_in(&format!("{typed}\t"));
    shell.await_text(completed);
    // Ctrl-U.
    shell.type_in("\u{15}");
}

/// (what is typed, what a Tab makes of its last word)
const COMPLETED: [(&str, &str); 6] = [
    ("vhost-af-xdp ch", "vhost-af-xdp check "),
    ("vhost-af-xdp port re", "vhost-af-xdp port remove "),
    ("vhost-af-xdp serve --ifn", "vhost-af-xdp serve --ifname "),
    ("vhost-af-xdp queues comp", "vhost-af-xdp queues completed7 "),
    (
        "vhost-af-xdp port add vm1 memory=send",
        "vhost-af-xdp port add vm1 memory=send-direct ",
    ),
    ("vhost-af-xdp-steward --take", "vhost-af-xdp-steward --take-back "),
];

#[test]
fn bash_completes_commands_options_interfaces_and_keys() {
    require!(Root);
    let scripts = Scripts::new();
    let source = |name: &str| format!("source {}", scripts.file(&format!("bash/{name}")).display());
    let set_up = format!("{}; {}", source("vhost-af-xdp"), source("vhost-af-xdp-steward"));
    let mut shell = scripts.terminal("bash --norc --noprofile -i", &set_up);
    for (typed, completed) in COMPLETED {
        press_tab(&mut shell, typed, completed);
    }
}

#[test]
fn zsh_completes_commands_options_interfaces_and_keys() {
    require!(Root, Shells);
    let scripts = Scripts::new();
    let place = scripts.file("zsh");
    let set_up = format!(
        "fpath=({} $fpath); autoload -Uz compinit; compinit -u -D",
        place.display()
    );
    let mut shell = scripts.terminal("zsh -f -i", &set_up);
    for (typed, completed) in COMPLETED {
        press_tab(&mut shell, typed, completed);
    }
}

#[test]
fn fish_completes_commands_options_interfaces_and_keys() {
    require!(Root, Shells);
    let scripts = Scripts::new();
    for (typed, completed) in COMPLETED {
        let name = typed.split(' ').next().expect("a word");
        let script = format!(
            "source {}; complete --do-complete '{typed}'",
            scripts.file(&format!("fish/{name}.fish")).display()
        );
        let mut command = scripts.command("fish");
        let output = command
            .args(["--no-config", "-c", &script])
            .output()
            .expect("it runs");
        let offered = String::from_utf8_lossy(&output.stdout);
        let word = completed.trim_end().rsplit(' ').next().expect("a word");
        let offered: Vec<_> = offered
            .lines()
            .filter_map(|line| line.split('\t').next())
            .collect();
        assert_eq!(
            offered,
            [word],
            "{typed}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
