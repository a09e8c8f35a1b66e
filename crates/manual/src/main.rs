//! Makes the manual pages of the programs, and completions for bash, zsh and fish: `manual DIRECTORY`; and documents
//! that are generated from the code: `manual --docs TREE`.
//!
//! Pages are generated from the command lines that the programs define, so that nothing is written twice. Completion
//! scripts only call the program, which completes.
//! `scripts/package` puts all of it into the Debian package.
//!
//! | in the directory | what |
//! |---|---|
//! | `man1/` | a page for each program and each of its commands |
//! | `bash/`, `zsh/`, `fish/` | completions, under the names that the shells look for |

mod openapi;
mod operations;
mod reference;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Command, CommandFactory as _};
use clap_mangen::Man;

/// Version of the whole workspace.
const VERSION: &str = env!("CARGO_PKG_VERSION");

fn main() -> anyhow::Result<()> {
    let mut words = std::env::args_os().skip(1);
    let (first, tree) = (words.next(), words.next().map(PathBuf::from));
    if let (Some("--docs"), Some(tree)) = (first.as_ref().and_then(|word| word.to_str()), tree) {
        return write_documents(&tree);
    }
    let directory = first.map(PathBuf::from);
    let directory = directory.context("manual DIRECTORY: where are they to be written?")?;
    for (name, command) in [
        ("vhost-af-xdp", vhost_af_xdp::command_line()),
        ("vhost-af-xdp-bench", bench::command_line()),
        ("vhost-af-xdp-dra", program::dra::Options::command()),
        ("vhost-af-xdp-kubevirt", program::kubevirt::Options::command()),
        ("vhost-af-xdp-steward", program::steward::Options::command()),
        ("vhost-af-xdp-top", client::top::Top::command()),
    ] {
        let command = shown(name, &command);
        write_pages(&command, &place(&directory, "man1")?)?;
        write_completions(name, &directory)?;
    }
    Ok(())
}

/// Writes the documents of a tree that are generated from the code.
fn write_documents(tree: &Path) -> anyhow::Result<()> {
    for (name, text) in [
        ("openapi.json", openapi::text()?),
        ("keys.md", reference::keys()),
        ("operations.md", operations::text()),
    ] {
        let path = tree.join("docs").join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The command without hidden ones below it, and without `help`, which repeats the pages.
fn shown(name: &'static str, command: &Command) -> Command {
    let about = command.get_about().cloned().unwrap_or_default();
    let shown = command
        .get_subcommands()
        .filter(|subcommand| !subcommand.is_hide_set());
    let after = command.get_after_help().cloned().unwrap_or_default();
    Command::new(name)
        .about(about)
        .version(VERSION)
        .after_help(after)
        .args(command.get_arguments().cloned())
        .subcommands(shown.cloned())
        .disable_help_subcommand(true)
}

fn place(directory: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let place = directory.join(name);
    fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
    Ok(place)
}

/// Writes a page for the command, and one for each of its subcommands, recursively.
fn write_pages(command: &Command, directory: &Path) -> anyhow::Result<()> {
    let mut all = command.clone();
    all.build();
    write_page_and_below(&all, command.get_name(), directory)
}

fn write_page_and_below(command: &Command, name: &str, directory: &Path) -> anyhow::Result<()> {
    let command = command.clone().version(VERSION);
    write_page(&command, name, &directory.join(format!("{name}.1")))?;
    for subcommand in command.get_subcommands() {
        write_page_and_below(
            subcommand,
            &format!("{name}-{}", subcommand.get_name()),
            directory,
        )?;
    }
    Ok(())
}

fn write_page(command: &Command, name: &str, path: &Path) -> anyhow::Result<()> {
    let after = command.get_after_help().map(ToString::to_string);
    let man = Man::new(command.clone().after_help("").display_name(name.to_owned()))
        .section("1")
        .source(format!("vhost-af-xdp {VERSION}"));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut page = String::from_utf8(page)?;
    if let Some(after) = after.filter(|after| !after.is_empty()) {
        page.push_str(&examples(&after));
    }
    page.push_str(".SH SEE ALSO\n/usr/share/doc/vhost\\-af\\-xdp/\n");
    fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))
}

/// A section for the text below the options, with its lines unchanged.
fn examples(text: &str) -> String {
    let mut page = ".SH EXAMPLES\n.nf\n".to_owned();
    for line in text.lines().filter(|line| *line != "Examples:") {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        // A dot or a quote at the beginning would be a request.
        let guard = if line.starts_with(['.', '\'']) { "\\&" } else { "" };
        // Writing to a String cannot fail.
        let _ = writeln!(page, "{guard}{line}");
    }
    page + ".fi\n"
}

/// The scripts of the shells: each passes the words up to the cursor to `vhost-af-xdp complete`. (place, beginning and
/// end of the file's name, which is what the shell looks for, text)
const COMPLETIONS: [(&str, &str, &str, &str); 3] = [
    ("bash", "", "", include_str!("completions/bash")),
    ("zsh", "_", "", include_str!("completions/zsh")),
    ("fish", "", ".fish", include_str!("completions/fish")),
];

fn write_completions(name: &str, directory: &Path) -> anyhow::Result<()> {
    for (shell, before, after, text) in COMPLETIONS {
        let path = place(directory, shell)?.join(format!("{before}{name}{after}"));
        let text = text
            .replace("NAME", name)
            .replace("FUNCTION", &name.replace('-', "_"));
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
