//! The arrows between the files of a crate: who imports whom, as its sources say.
//!
//! No circles in any crate, and between rooms of the daemon one direction. Crate `dataplane`, which moves frames, knows
//! none of those that decide about them.
//!
//! Each root of a crate is read from its `mod` lines on. A path leads to the file that defines what it names, also if a
//! re-export lies between; an import that only re-exports is no arrow. Not seen: methods of values and macros that
//! other files define.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, Item, ItemUse, Meta, UseTree, Visibility};

/// Rooms of the daemon, folders and files beside them: each may import those before it. Code of the running
/// daemon imports no command.
const ROOMS: &[&str] = &[
    "thread",
    "output",
    "journal",
    "listener",
    "termination",
    "nic",
    "config",
    "supervision",
    "network",
    "port",
    "vhost_user",
    "ports",
    "reload",
    "api",
    "other_losses",
    "port_watch",
    "sibling",
    "check",
    "cli",
    "config_display",
    "ask",
    "capture",
    "complete",
    "mark",
    "netkit",
    "serve",
    "",
];

/// Imports that go the other way still: what is wanted of an interface is described with the rest of a port.
const BACK: &[(&str, &str)] = &[("nic", "config")];

/// What each file imports, by module.
type Arrows = BTreeMap<String, BTreeSet<String>>;

/// A path as it is written.
type Names = Vec<String>;

#[derive(Default)]
struct Module {
    /// The module of the file it is in.
    file: String,
    /// What `use` brings into its scope.
    imported: BTreeMap<String, Names>,
    /// All paths of its code.
    paths: Vec<Names>,
    /// Lines of code of its file, if it is the head of one.
    lines: usize,
}

impl Module {
    fn read_use(&mut self, tree: &UseTree, before: &[String], is_public: bool) {
        let with = |name: &dyn ToString| [before, &[name.to_string()]].concat();
        let (name, path) = match tree {
            UseTree::Path(path) => return self.read_use(&path.tree, &with(&path.ident), is_public),
            UseTree::Group(group) => {
                return group
                    .items
                    .iter()
                    .for_each(|tree| self.read_use(tree, before, is_public));
            }
            UseTree::Name(name) if name.ident == "self" => (before.last().cloned(), before.to_vec()),
            UseTree::Name(name) => (Some(name.ident.to_string()), with(&name.ident)),
            UseTree::Rename(rename) => (Some(rename.rename.to_string()), with(&rename.ident)),
            UseTree::Glob(_) => {
                assert!(!is_public, "{before:?}: name what is re-exported");
                (None, with(&'*'))
            }
        };
        if !is_public {
            self.paths.push(path.clone());
        }
        self.imported.extend(name.map(|name| (name, path)));
    }

    /// Of functions, types and macros.
    fn read_code(&mut self, code: TokenStream) {
        let (mut path, mut colons) = (Names::new(), 0);
        let mut tokens = code.into_iter();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(word) if word == "use" => {
                    let line = tokens.by_ref().take_while(
                        |token| !matches!(token, TokenTree::Punct(punct) if punct.as_char() == ';'),
                    );
                    let line: TokenStream = line.collect();
                    if let Ok(import) = syn::parse2::<ItemUse>(quote::quote!(use #line;)) {
                        self.read_use(&import.tree, &[], false);
                    }
                }
                TokenTree::Ident(word) => {
                    if colons != 2 {
                        self.paths.push(std::mem::take(&mut path));
                    }
                    path.push(word.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    colons = 0;
                    self.read_code(group.stream());
                }
                _ => colons = 0,
            }
        }
        self.paths.push(path);
    }
}

/// The modules of one root, by their paths from it on.
#[derive(Default)]
struct Tree(BTreeMap<String, Module>);

impl Tree {
    /// `below` is the folder that files of its modules are in.
    fn read_file(&mut self, module: &str, file: &Path, below: &Path) {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let items = syn::parse_file(&text).expect("it compiles").items;
        self.read(module, module, items, file, below);
        self.0.entry(module.to_owned()).or_default().lines = lines_of_code(&text);
    }

    fn read(&mut self, module: &str, of: &str, items: Vec<Item>, file: &Path, below: &Path) {
        let mut read = Module {
            file: of.to_owned(),
            ..Module::default()
        };
        for item in items.into_iter().filter(|item| !is_of_tests(item)) {
            match item {
                Item::Use(import) => {
                    let is_public = !matches!(import.vis, Visibility::Inherited);
                    read.read_use(&import.tree, &[], is_public);
                }
                Item::Mod(child) => {
                    let name = child.ident.to_string();
                    let (path, below) = (join(module, &name), below.join(&name));
                    match (child.content, path_of(&child.attrs)) {
                        (Some((_, items)), _) => self.read(&path, of, items, file, &below),
                        (None, Some(other)) => {
                            let other = file.with_file_name(other);
                            self.read_file(&path, &other, other.parent().expect("a folder"));
                        }
                        (None, None) => {
                            let files = [below.with_extension("rs"), below.join("mod.rs")];
                            let file = files.iter().find(|file| file.exists()).expect("it compiles");
                            self.read_file(&path, file, &below);
                        }
                    }
                }
                item => read.read_code(item.into_token_stream()),
            }
        }
        self.0.insert(module.to_owned(), read);
    }

    /// The module that defines what a path names, or is it, and which of the two; nothing of other crates.
    fn find(&self, at: &str, path: &[String], depth: usize) -> Option<(String, bool)> {
        let mut at = at.to_owned();
        for (index, name) in path.iter().enumerate() {
            let child = join(&at, name);
            match name.as_str() {
                "crate" => at = String::new(),
                "self" => (),
                "super" => at = at.rsplit_once("::").map_or("", |(up, _)| up).to_owned(),
                _ if self.0.contains_key(&child) => at = child,
                _ => match self.0[&at].imported.get(name) {
                    Some(import) if depth < 8 => {
                        let (found, is_module) = self.find(&at, import, depth + 1)?;
                        if !is_module {
                            return Some((found, false));
                        }
                        at = found;
                    }
                    _ => return (index > 0).then_some((at, false)),
                },
            }
        }
        Some((at, true))
    }

    fn arrows(&self) -> Arrows {
        let mut arrows = Arrows::new();
        for (at, module) in &self.0 {
            let imports = arrows.entry(module.file.clone()).or_default();
            for path in &module.paths {
                // A module is not what is imported, but items by its name.
                if let Some((at, false)) = self.find(at, path, 0) {
                    imports.extend(Some(self.0[&at].file.clone()).filter(|file| *file != module.file));
                }
            }
        }
        arrows
    }
}

/// Lines that are neither blank nor comments, without the tests at the end of the file.
fn lines_of_code(text: &str) -> usize {
    let code = text
        .split("\n#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default();
    let lines = code.lines().map(str::trim);
    lines
        .filter(|line| !line.is_empty() && !line.starts_with("//"))
        .count()
}

fn join(module: &str, name: &str) -> String {
    match module {
        "" => name.to_owned(),
        _ => format!("{module}::{name}"),
    }
}

/// What `#[path = "..."]` says.
fn path_of(attributes: &[Attribute]) -> Option<String> {
    let path = attributes
        .iter()
        .find(|attribute| attribute.path().is_ident("path"))?;
    let Meta::NameValue(value) = &path.meta else {
        return None;
    };
    let text = value.value.to_token_stream().to_string();
    Some(text.trim_matches('"').to_owned())
}

/// Whether it is compiled for tests only.
fn is_of_tests(item: &Item) -> bool {
    let (Item::Const(syn::ItemConst { attrs, .. })
    | Item::Enum(syn::ItemEnum { attrs, .. })
    | Item::Fn(syn::ItemFn { attrs, .. })
    | Item::Impl(syn::ItemImpl { attrs, .. })
    | Item::Macro(syn::ItemMacro { attrs, .. })
    | Item::Mod(syn::ItemMod { attrs, .. })
    | Item::Static(syn::ItemStatic { attrs, .. })
    | Item::Struct(syn::ItemStruct { attrs, .. })
    | Item::Use(syn::ItemUse { attrs, .. })) = item
    else {
        return false;
    };
    let conditions = attrs.iter().filter(|attribute| attribute.path().is_ident("cfg"));
    let mut texts = conditions.map(|attribute| attribute.meta.to_token_stream().to_string());
    texts.any(|text| text.contains("fuzzing") || (text.contains("test") && !text.contains("not (test")))
}

fn tree(root: &Path) -> Tree {
    let mut tree = Tree::default();
    tree.read_file("", root, root.parent().expect("a folder"));
    tree
}

/// The folder of a crate, named from `crates/` on.
fn folder(of: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(of)
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.expect("readable").path()).collect()
}

/// Every root of every crate: libraries, programs and examples.
fn roots() -> Vec<PathBuf> {
    let crates = [entries(&folder("")), entries(&folder("../examples"))].concat();
    let mut roots = Vec::new();
    for folder in crates {
        roots.extend(["src/lib.rs", "src/main.rs"].map(|root| folder.join(root)));
        for entry in [
            entries(&folder.join("src/bin")),
            entries(&folder.join("examples")),
        ]
        .concat()
        {
            roots.push(entry.join("main.rs"));
            roots.push(entry);
        }
    }
    roots.retain(|root| root.is_file() && root.extension() == Some(OsStr::new("rs")));
    roots
}

/// What a file imports, and what that imports, and so on.
fn reach<'a>(arrows: &'a Arrows, from: &str) -> BTreeSet<&'a str> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(at) = next.pop() {
        for target in arrows.get(at).into_iter().flatten() {
            if seen.insert(target.as_str()) {
                next.push(target);
            }
        }
    }
    seen
}

/// The largest sets of files that all lead to each other, but for the head of a folder: a module and its own children
/// may know each other.
fn circles(arrows: &Arrows) -> Vec<Arrows> {
    let reach: BTreeMap<_, _> = arrows
        .keys()
        .map(|file| (file.as_str(), reach(arrows, file)))
        .collect();
    let circle_of = |(file, reached): (&&str, &BTreeSet<&str>)| {
        let back = reached
            .iter()
            .filter(|other| reach.get(*other).is_some_and(|reach| reach.contains(file)));
        back.map(|file| (*file).to_owned()).collect::<BTreeSet<_>>()
    };
    let found: BTreeSet<_> = reach
        .iter()
        .map(circle_of)
        .filter(|circle| !circle.is_empty())
        .collect();
    let without_head = |files: BTreeSet<String>| {
        let is_head = |head: &&String| {
            files
                .iter()
                .all(|file| *file == **head || file.starts_with(&join(head, "")))
        };
        let head = files.iter().find(is_head);
        let rest = files.iter().filter(|file| Some(*file) != head);
        let within = |file: &String| {
            arrows[file]
                .intersection(&files)
                .filter(|to| Some(*to) != head)
                .cloned()
        };
        let rest = rest.map(|file| (file.clone(), within(file).collect())).collect();
        match head {
            Some(_) => circles(&rest),
            None => vec![rest],
        }
    };
    found.into_iter().flat_map(without_head).collect()
}

/// A tree of files with these contents, by module.
fn arrows_of(files: &[(&str, &str)]) -> Arrows {
    let mut tree = Tree::default();
    for (module, text) in files {
        let items = syn::parse_file(text).expect("Rust").items;
        tree.read(module, module, items, Path::new(""), Path::new(""));
    }
    tree.arrows()
}

#[test]
fn every_kind_of_path_is_an_arrow_to_where_the_item_is_defined() {
    for code in [
        "use crate::a::b::Item;",
        "use super::b::{self as other, Item};",
        "use crate::a; fn f() { a::b::item() }",
        "use crate::{a::{b::{self}}}; fn f() { format!(\"{}\", b::item()) }",
        "fn f() { use crate::a::b as other; other::item() }",
        "struct S(crate::a::b::Item);",
        "use super::Item;",
        "use crate::a::b::*;",
        "use super::Renamed as Again; fn f(_: Again::Inner) {}",
        "use self::inner::item; mod inner { pub use crate::a::b::item; }",
    ] {
        let arrows = arrows_of(&[
            ("", "use a::Item;"),
            ("a", "pub use self::b::{Item, Item as Renamed};"),
            ("a::b", "pub struct Item;"),
            ("a::c", code),
        ]);
        assert_eq!(arrows["a::c"], ["a::b".to_owned()].into(), "{code}");
        assert_eq!(arrows[""], ["a::b".to_owned()].into());
        assert_eq!(arrows["a"], [].into(), "it only re-exports");
    }
    let bare = arrows_of(&[("a", "fn f() { b::item() }"), ("a::b", "fn item() {}")]);
    assert_eq!(bare["a"], ["a::b".to_owned()].into());
}

#[test]
fn circle_is_seen_unless_it_is_of_a_folder_and_its_head() {
    let head = ("a", "fn f() { b::item() }");
    assert_eq!(circles(&arrows_of(&[head, ("a::b", "use super::f;")])).len(), 0);
    let others = [("a::b", "use crate::c::d;"), ("c", "use crate::a::f;")];
    let found = circles(&arrows_of(&[&[head], &others[..]].concat()));
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].len(), 3);
}

#[test]
fn files_import_each_other_in_no_circle() {
    let mut found = Vec::new();
    for root in roots() {
        let circles = circles(&tree(&root).arrows());
        found.extend(
            circles
                .iter()
                .map(|circle| format!("{}: {circle:#?}", root.display())),
        );
    }
    assert!(found.is_empty(), "circles:\n{}", found.join("\n"));
}

#[test]
fn rooms_import_in_one_direction() {
    let arrows = tree(&folder("vhost-af-xdp/src/lib.rs")).arrows();
    // They are read.
    assert!(arrows["port::lanes"].contains("port::attachment"));
    assert!(reach(&arrows, "serve").contains("port::lanes"));
    let room = |file: &str| file.split("::").next().unwrap_or("").to_owned();
    let place = |room: &str| ROOMS.iter().position(|known| *known == room);
    let (mut wrong, mut back) = (Vec::new(), BTreeSet::new());
    for (file, imports) in &arrows {
        let from = room(file);
        assert!(place(&from).is_some(), "{from}: name it in ROOMS");
        for to in imports.iter().filter(|to| place(&room(to)) > place(&from)) {
            match BACK
                .iter()
                .find(|(known, other)| *known == from && *other == room(to))
            {
                Some(known) => _ = back.insert(known),
                None => wrong.push(format!("{file} -> {to}")),
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(back, BACK.iter().collect(), "imports that BACK names");
}

/// Files of tests that are no module of a crate's one test program would not be run.
#[test]
fn test_programs_have_all_files_of_tests() {
    for of in [
        "notifier",
        "steer",
        "vhost-af-xdp-steward",
        "testkit",
        "../examples/tiny-vmm",
        "xsk",
    ] {
        let read = |path: &str| fs::read_to_string(folder(of).join(path)).expect("part of the tree");
        let (program, manifest) = (read("tests/system.rs"), read("Cargo.toml"));
        for entry in fs::read_dir(folder(of).join("tests")).expect("part of the tree") {
            let path = entry.expect("readable").path();
            let name = path.file_stem().and_then(OsStr::to_str).expect("ASCII");
            let is_known = program.lines().any(|line| line == format!("mod {name};"))
                || manifest.contains(&format!("[[test]]\nname = \"{name}\""));
            assert!(is_known, "{}: name it in system.rs beside it", path.display());
        }
    }
}

/// Crates that a crate depends on outside of tests.
fn dependencies(of: &str) -> BTreeSet<String> {
    let manifest = fs::read_to_string(folder(of).join("Cargo.toml")).expect("part of the tree");
    let (_, below) = manifest.split_once("[dependencies]").expect("it has some");
    let section = below.split("\n[").next().unwrap_or_default();
    let names = section.lines().filter_map(|line| line.split(['.', ' ']).next());
    names.map(str::to_owned).collect()
}

#[test]
fn data_path_imports_only_what_moves_and_describes_frames() {
    let ours: BTreeSet<_> = entries(&folder(""))
        .iter()
        .filter_map(|of| of.file_name())
        .filter_map(OsStr::to_str)
        .map(str::to_owned)
        .collect();
    let found = dependencies("dataplane");
    let wanted = [
        "acl",
        "common",
        "device",
        "model",
        "packet",
        "steer",
        "virtqueue",
        "xsk",
    ]
    .map(str::to_owned);
    assert_eq!(
        found.intersection(&ours).cloned().collect::<BTreeSet<_>>(),
        wanted.into()
    );
}

#[test]
fn privileged_core_lessees_side_and_parts_are_apart() {
    let (core, program) = (dependencies("steward"), dependencies("vhost-af-xdp-steward"));
    assert!(core.contains("steer") && program.contains("steward"));
    for (of, other) in [
        (&core, "zcrx"),
        (&core, "steward-client"),
        (&program, "steward-client"),
        (&dependencies("steward-client"), "steward"),
        (&dependencies("steward-protocol"), "steward"),
        (&dependencies("host"), "steward-protocol"),
    ] {
        assert!(!of.contains(other), "{other}");
    }
}

/// Whoever has to trust the steward can read its core in a day.
#[test]
fn privileged_core_has_at_most_8000_lines_of_code() {
    assert_eq!(
        lines_of_code("use a;\n\n  // b\nfn c() {}\n#[cfg(test)]\nmod tests {\n}\n"),
        2
    );
    let core = tree(&folder("steward/src/lib.rs"));
    let lines: usize = core.0.values().map(|module| module.lines).sum();
    assert!((4000..=8000).contains(&lines), "{lines} lines");
}
