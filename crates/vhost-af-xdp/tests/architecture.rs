//! The arrows between the files of a crate: who imports whom, as its sources say.
//!
//! No circles in any crate, and a few arrows of the daemon's that must never be: frames know nothing of those who
//! decide about them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

const DAEMON: &str = "vhost-af-xdp";

/// Rooms, and what nothing in them may import.
const NEVER: &[(&str, &[&str])] = &[
    ("switch", &["port", "vhost_user", "api", "serve", "cli", "config"]),
    ("direct", &["port", "vhost_user", "api", "serve", "cli", "config"]),
    (
        "nic",
        &["port", "vhost_user", "api", "serve", "cli", "switch", "direct"],
    ),
    ("port", &["vhost_user", "api", "serve", "cli"]),
    ("guard", &["port", "vhost_user", "api", "serve", "cli"]),
];

/// What each file imports, by module.
type Arrows = BTreeMap<String, BTreeSet<String>>;

fn sources(directory: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("the sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

/// Without tests: their modules stand last.
fn product(text: &str) -> &str {
    text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or(text)
}

/// The words `crate::a::b`, `super::a` and `crate::a::{b, c}` of a file, as paths from the crate on.
fn paths(module: &[&str], text: &str) -> Vec<Vec<String>> {
    let code: Vec<_> = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect();
    let code = code.join("\n");
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    for (start, _) in code.match_indices("crate::").chain(code.match_indices("super::")) {
        let before = code[..start].chars().next_back();
        if before.is_some_and(is_word) {
            continue;
        }
        let (word, rest) = code[start..].split_at(code[start..].find(|c| !is_word(c)).unwrap_or(0));
        let parts: Vec<_> = word.split("::").filter(|part| !part.is_empty()).collect();
        let up = parts.iter().take_while(|&&part| part == "super").count();
        let base = match up {
            0 => parts[1..].to_vec(),
            _ => [&module[..module.len().saturating_sub(up)], &parts[up..]].concat(),
        };
        let names = match rest.strip_prefix('{').filter(|_| word.ends_with("::")) {
            Some(group) => members(group, ""),
            None => vec![String::new()],
        };
        for name in names {
            let parts = name.split("::").filter(|part| !part.is_empty());
            found.push(base.iter().copied().chain(parts).map(str::to_owned).collect());
        }
    }
    found
}

/// The paths of a group whose brace was opened just before `text`, behind `base`.
fn members(text: &str, base: &str) -> Vec<String> {
    let (mut found, mut name, mut rest) = (Vec::new(), String::new(), text.char_indices());
    while let Some((at, c)) = rest.next() {
        match c {
            '{' => {
                let inner = &text[at + 1..];
                found.extend(members(inner, &format!("{base}{}", name.trim())));
                let mut open = 1;
                while open > 0
                    && let Some((_, c)) = rest.next()
                {
                    open += i32::from(c == '{') - i32::from(c == '}');
                }
                name.clear();
            }
            ',' | '}' => {
                let first = name.trim().split(' ').next().unwrap_or("");
                if !first.is_empty() {
                    found.push(format!("{base}{first}"));
                }
                name.clear();
                if c == '}' {
                    break;
                }
            }
            c => name.push(c),
        }
    }
    found
}

/// Of the daemon, or of another crate beside it.
fn arrows(of: &str) -> Arrows {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(of)
        .join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let name = |path: &PathBuf| {
        let path = path.strip_prefix(&root).expect("inside").with_extension("");
        let parts: Vec<_> = path
            .iter()
            .map(|part| part.to_string_lossy().into_owned())
            .collect();
        let parts = match parts.last().map(String::as_str) {
            Some("mod") => &parts[..parts.len() - 1],
            _ => &parts[..],
        };
        parts.join("::")
    };
    let is_test = |module: &str| {
        let last = module.rsplit("::").next().unwrap_or(module);
        last.ends_with("tests") || last.starts_with("test_") || matches!(last, "fuzzing" | "lib" | "main")
    };
    let modules: BTreeSet<String> = files.iter().map(name).collect();
    let mut arrows = Arrows::new();
    for file in &files {
        let module = name(file);
        if is_test(&module) {
            continue;
        }
        let text = fs::read_to_string(file).expect("readable");
        let parts: Vec<_> = module.split("::").collect();
        let imports = arrows.entry(module.clone()).or_default();
        for path in paths(&parts, product(&text)) {
            // The longest beginning that is a file.
            let target = (1..=path.len()).rev().map(|len| path[..len].join("::"));
            let target = target.into_iter().find(|target| modules.contains(target));
            imports.extend(target.filter(|target| *target != module && !is_test(target)));
        }
    }
    arrows
}

/// Whether a way leads from one file to another.
fn leads(arrows: &Arrows, from: &str, to: &str) -> bool {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(at) = next.pop() {
        for target in arrows.get(at).into_iter().flatten() {
            if target == to {
                return true;
            }
            if seen.insert(target) {
                next.push(target);
            }
        }
    }
    false
}

#[test]
fn sources_are_read() {
    let arrows = arrows(DAEMON);
    assert!(arrows["switch::worker"].contains("switch::lane"));
    assert!(leads(&arrows, "serve", "switch::lane"));
}

#[test]
fn groups_in_groups_are_read() {
    let found = paths(&["a", "b"], "use super::{c::{d, e::{F}}, g as h};\nuse crate::i;");
    let found: BTreeSet<_> = found.iter().map(|path| path.join("::")).collect();
    let wanted = ["a::c::d", "a::c::e::F", "a::g", "i"];
    assert_eq!(found, wanted.map(str::to_owned).into());
}

#[test]
fn files_import_each_other_in_no_circle() {
    for of in [
        DAEMON,
        "device",
        "notifier",
        "offload",
        "steer",
        "steward",
        "testkit",
        "virtqueue",
        "../examples/tiny-vmm",
        "xsk",
        "zcrx",
    ] {
        let arrows = arrows(of);
        let in_circles: Vec<_> = arrows.keys().filter(|file| leads(&arrows, file, file)).collect();
        let ties: Vec<_> = in_circles
            .iter()
            .map(|file| {
                let within: Vec<_> = arrows[*file]
                    .iter()
                    .filter(|to| in_circles.contains(to))
                    .collect();
                format!("{file} -> {within:?}")
            })
            .collect();
        assert!(in_circles.is_empty(), "circles of {of}:\n{}", ties.join("\n"));
    }
}

#[test]
fn frames_know_nothing_of_those_who_decide() {
    let arrows = arrows(DAEMON);
    let mut wrong = Vec::new();
    for (room, never) in NEVER {
        for (file, imports) in arrows
            .iter()
            .filter(|(file, _)| file.split("::").next() == Some(room))
        {
            let bad = imports
                .iter()
                .filter(|to| never.contains(&to.split("::").next().unwrap_or("")));
            wrong.extend(bad.map(|to| format!("{file} -> {to}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files of tests that are no module of a crate's one test program would not be run.
#[test]
fn test_programs_have_all_files_of_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for of in [
        "notifier",
        "steer",
        "steward",
        "testkit",
        "../examples/tiny-vmm",
        "xsk",
    ] {
        let read = |path: &str| fs::read_to_string(root.join(of).join(path)).expect("part of the tree");
        let (program, manifest) = (read("tests/system.rs"), read("Cargo.toml"));
        for entry in fs::read_dir(root.join(of).join("tests")).expect("part of the tree") {
            let path = entry.expect("readable").path();
            let name = path.file_stem().and_then(OsStr::to_str).expect("ASCII");
            let is_known = program.lines().any(|line| line == format!("mod {name};"))
                || manifest.contains(&format!("[[test]]\nname = \"{name}\""));
            assert!(is_known, "{}: name it in system.rs beside it", path.display());
        }
    }
}
