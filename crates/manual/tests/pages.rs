//! Pages and completions are made, and are understood by who reads them.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

fn made() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let output = Command::new(env!("CARGO_BIN_EXE_manual"))
        .arg(directory.path())
        .output()
        .expect("it runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    directory
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("made").flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().into_string().expect("ASCII"))
        .collect();
    names.sort_unstable();
    names
}

/// What a program says, or none where it is not installed; with `REQUIRE_PRIV=1` the reader of pages must be.
fn run(program: &str, args: &[&str], file: &Path) -> Option<Output> {
    let output = Command::new(program).args(args).arg(file).output();
    if output.is_err() {
        let required = program == "groff" && std::env::var("REQUIRE_PRIV").as_deref() == Ok("1");
        assert!(!required, "REQUIRE_PRIV=1, but {program} is not installed");
        println!("SKIPPED: {program} is not installed");
    }
    output.ok()
}

/// Names of the pages of a command and of those below it.
fn pages_of(name: &str, command: &clap::Command, into: &mut Vec<String>) {
    into.push(format!("{name}.1"));
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        pages_of(&format!("{name}-{}", below.get_name()), below, into);
    }
}

#[test]
fn each_program_and_each_command_has_a_page() {
    let directory = made();
    let mut wanted = ["dra", "kubevirt", "steward"]
        .map(|name| format!("vhost-af-xdp-{name}.1"))
        .to_vec();
    pages_of("vhost-af-xdp", &vhost_af_xdp::command_line(), &mut wanted);
    pages_of("vhost-af-xdp-bench", &bench::command_line(), &mut wanted);
    wanted.sort_unstable();
    // The daemon's command that runs the program has the same name.
    wanted.dedup();
    wanted.sort_unstable();
    assert_eq!(names(&directory.path().join("man1")), wanted);
    for page in ["vhost-af-xdp-serve.1", "vhost-af-xdp-port-add.1"] {
        assert!(wanted.contains(&page.to_owned()), "{page}");
    }
}

#[test]
fn pages_are_read_without_a_warning() {
    let directory = made();
    for name in names(&directory.path().join("man1")) {
        let path = directory.path().join("man1").join(&name);
        let page = fs::read_to_string(&path).expect("text");
        assert!(!page.contains("helper"), "what is hidden stays so: {name}");
        let Some(output) = run("groff", &["-man", "-Tutf8", "-ww", "-rLL=100n"], &path) else {
            return;
        };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{name}: {said}");
    }
}

#[test]
fn page_has_options_and_examples_as_they_are() {
    let directory = made();
    let path = directory.path().join("man1/vhost-af-xdp-serve.1");
    let Some(output) = run(
        "groff",
        &["-man", "-Tascii", "-P-c", "-P-b", "-P-u", "-rLL=100n"],
        &path,
    ) else {
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    for line in [
        "vhost-af-xdp-serve - Serve guests",
        "--socket-path",
        "vhost-af-xdp serve --socket-path /run/vm1.sock --ifname eth1",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
}

/// What they propose the shells are asked in testkit's `completions.rs`.
#[test]
fn completions_are_under_the_names_that_shells_look_for() {
    let directory = made();
    for program in ["", "-bench", "-steward", "-top"].map(|name| format!("vhost-af-xdp{name}")) {
        for file in [
            format!("bash/{program}"),
            format!("zsh/_{program}"),
            format!("fish/{program}.fish"),
        ] {
            let text = fs::read_to_string(directory.path().join(&file)).expect("made");
            assert!(text.contains(&program), "{file}: {text}");
            assert!(
                !text.contains("NAME") && !text.contains("FUNCTION"),
                "{file}: {text}"
            );
        }
    }
}

/// Help is wrapped at 100 columns: an example that is longer could not be typed in as it is shown.
#[test]
fn examples_of_help_are_shown_as_they_are_typed_in() {
    fn look(command: &clap::Command, path: &str) -> usize {
        let path = format!("{path} {}", command.get_name());
        let text = command
            .get_after_help()
            .map(ToString::to_string)
            .unwrap_or_default();
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{path}: {line}");
        }
        let inner: usize = command.get_subcommands().map(|inner| look(inner, &path)).sum();
        inner + usize::from(!text.is_empty())
    }
    assert!(look(&vhost_af_xdp::command_line(), "") > 10, "there are examples");
    assert_eq!(look(&bench::command_line(), ""), 2);
}

/// Each option that help tells of is in the section of its command, or among the lines that show how to call it.
#[test]
fn document_has_every_option_of_help() {
    fn look(command: &clap::Command, sections: &[&str]) {
        let keys = include_str!("../../../docs/keys.md");
        let name = command.get_name();
        let shown = command.get_opts().filter(|option| !option.is_hide_set());
        for option in shown.filter_map(|option| option.get_long()) {
            let option = format!("--{option}");
            // Keys of ports and of the daemon have a page of their own, made of the model.
            let key = name == "serve" && keys.contains(&format!("\n- `{}` (", &option[2..]));
            assert!(
                key || sections.iter().any(|section| section.contains(&option)),
                "{option} of {name} is not in docs/cli.md"
            );
        }
        for inner in command.get_subcommands() {
            look(inner, sections);
        }
    }
    let document = include_str!("../../../docs/cli.md");
    let section = |name: &str| {
        document.split("\n## ").find(|section| {
            let title = section.lines().next().unwrap_or_default();
            title.split(", ").any(|word| word == name)
        })
    };
    let command_line = vhost_af_xdp::command_line();
    for command in command_line
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
    {
        let name = command.get_name();
        let called = document
            .lines()
            .find(|line| line.starts_with(&format!("    vhost-af-xdp {name} ")));
        let sections: Vec<_> = section(name).into_iter().chain(called).collect();
        look(command, &sections);
    }
}
