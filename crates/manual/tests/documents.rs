//! Documents: links between them and to files of the tree lead somewhere, and each is in the summary.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Where names of documents are looked for in comments and messages.
const SOURCES: [&str; 8] = [
    ".ci", "bpf", "crates", "docs", "examples", "fuzz", "scripts", "tests",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Files below a directory of the tree, as paths from its root.
fn files(directory: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![PathBuf::from(directory)];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(root().join(&directory)).expect("a directory of the tree") {
            let entry = entry.expect("readable");
            let path = directory.join(entry.file_name());
            let kind = entry.file_type().expect("known");
            if kind.is_dir() && entry.file_name() != "target" {
                directories.push(path);
            } else if kind.is_file() {
                found.push(path);
            }
        }
    }
    found
}

fn is_document(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

/// README.md and others beside it, and those of docs.
fn documents() -> BTreeSet<PathBuf> {
    let beside = fs::read_dir(root())
        .expect("the tree")
        .map(|entry| entry.expect("readable").file_name().into());
    beside
        .chain(files("docs"))
        .filter(|path| is_document(path))
        .collect()
}

fn text(path: &Path) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A path from the root, without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => assert!(normal.pop(), "{} leads out of the tree", path.display()),
            Component::CurDir => (),
            other => normal.push(other),
        }
    }
    normal
}

/// What a document links to: targets of `[text](target)` outside of code.
fn targets(text: &str) -> Vec<String> {
    let prose: Vec<_> = text.lines().filter(|line| !line.starts_with("    ")).collect();
    let prose = prose.join("\n");
    let links = prose.split("](").skip(1);
    links
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target.to_owned()))
        .collect()
}

/// Anchors of headings, as GitHub and mdbook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let headings = text.lines().filter(|line| line.starts_with('#'));
    for heading in headings.filter_map(|line| line.trim_start_matches('#').strip_prefix(' ')) {
        let kept = heading
            .chars()
            .filter(|char| char.is_alphanumeric() || " -_".contains(*char));
        let anchor: String = kept.map(|char| if char == ' ' { '-' } else { char }).collect();
        let anchor = anchor.to_lowercase();
        let again = (1..).map(|number| format!("{anchor}-{number}"));
        let mut names = std::iter::once(anchor.clone()).chain(again);
        let free = names.find(|name| !anchors.contains(name));
        anchors.extend(free);
    }
    anchors
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut broken = Vec::new();
    for document in documents() {
        for target in targets(&text(&document)) {
            if target.contains("://") {
                continue;
            }
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let beside = document.parent().expect("a directory");
            let path = match path {
                "" => document.clone(),
                path => normal(&beside.join(path)),
            };
            let leads = root().join(&path).exists()
                && (anchor.is_empty() || is_document(&path) && anchors(&text(&path)).contains(anchor));
            if !leads {
                broken.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(
        broken.is_empty(),
        "links that lead nowhere:\n{}",
        broken.join("\n")
    );
}

#[test]
fn summary_names_each_document_once() {
    let summary = Path::new("docs/SUMMARY.md");
    let named: Vec<_> = targets(&text(summary))
        .iter()
        .map(|target| normal(&Path::new("docs").join(target)))
        .collect();
    let once: BTreeSet<_> = named.iter().cloned().collect();
    assert_eq!(once.len(), named.len(), "docs/SUMMARY.md names a document twice");
    let mut documents = documents();
    assert!(documents.remove(summary));
    assert_eq!(once, documents);
}

#[test]
fn documents_that_sources_name_exist() {
    let mut missing = Vec::new();
    for source in SOURCES
        .into_iter()
        .flat_map(files)
        .filter(|path| !is_document(path))
    {
        let Ok(text) = fs::read_to_string(root().join(&source)) else {
            continue;
        };
        for rest in text.split("docs/").skip(1) {
            let end = rest.find(|char: char| !(char.is_ascii_alphanumeric() || "-_/.".contains(char)));
            let name = rest[..end.unwrap_or(rest.len())].trim_end_matches('.');
            let named = name.split_once(".md").map(|(name, _)| format!("docs/{name}.md"));
            // Documents of QEMU and others are named, too, with a path of their own before or in it.
            let others = named
                .as_ref()
                .is_none_or(|named| named.contains("interop") || named.contains("network/"));
            if !others && named.as_ref().is_some_and(|named| !root().join(named).exists()) {
                missing.push(format!("{}: {}", source.display(), named.unwrap_or_default()));
            }
        }
    }
    assert!(missing.is_empty(), "no such documents:\n{}", missing.join("\n"));
}

#[test]
fn anchors_are_as_github_makes_them() {
    let text = "# One\n## Options of `-netdev af-xdp`\n## One\n## 10. Effects on the host\n## O_DIRECT\n";
    let expected = [
        "10-effects-on-the-host",
        "o_direct",
        "one",
        "one-1",
        "options-of--netdev-af-xdp",
    ];
    assert_eq!(anchors(text), expected.map(str::to_owned).into());
}

/// `cargo run -p manual -- --docs .` writes them.
#[test]
fn generated_documents_are_those_of_the_model() {
    let tree = tempfile::tempdir().expect("a directory");
    let docs = tree.path().join("docs");
    fs::create_dir(&docs).expect("ours");
    let manual = std::process::Command::new(env!("CARGO_BIN_EXE_manual"))
        .arg("--docs")
        .arg(tree.path())
        .status();
    assert!(manual.expect("a program").success());
    for name in ["keys.md", "openapi.json", "operations.md"] {
        let written = fs::read_to_string(docs.join(name)).expect("written");
        let is_same = written == text(&Path::new("docs").join(name));
        assert!(
            is_same,
            "docs/{name} is not what the code says: cargo run -p manual -- --docs ."
        );
    }
}

/// Each line of the threat model names a test that is there, and it is one page.
#[test]
fn threat_model_names_a_test_for_each_attempt() {
    let security = text(Path::new("SECURITY.md"));
    let (_, page) = security
        .split_once("## Threat model of the steward")
        .expect("a page");
    let page = page.split("\n## ").next().expect("text");
    assert!(page.lines().count() <= 60, "{} lines", page.lines().count());
    let sources = files("crates").into_iter().filter(|path| is_source(path));
    let sources: String = sources.map(|path| text(&path)).collect();
    let attempts: Vec<&str> = page.lines().filter(|line| line.starts_with("- ")).collect();
    assert!(attempts.len() > 20);
    for attempt in attempts {
        let name = attempt.rsplit('`').nth(1).unwrap_or_default();
        let named = format!("fn {name}(");
        // The attributes are between the blank line before the function and its name.
        let mut before = sources
            .match_indices(&named)
            .filter_map(|(at, _)| sources[..at].rsplit("\n\n").next());
        let is_test = before.any(|lines| lines.contains("test]\n") && !lines.contains("#[ignore"));
        assert!(is_test && name.len() > 20, "{attempt}: names no test of the tree");
    }
}

fn is_source(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
}
