//! The manual at the head of `src/lib.rs` names files and functions that exist.

use std::fs;
use std::path::Path;

/// What is between backticks in the manual, from "From the guest" on.
fn names(manual: &str) -> Vec<String> {
    let steps = manual
        .split_once("# From the guest")
        .expect("the ways of a frame")
        .1;
    let text: Vec<&str> = steps
        .lines()
        .skip(1)
        .map_while(|line| line.strip_prefix("//!"))
        .collect();
    let text = text.join(" ");
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn functions_on_the_way_of_a_frame_are_in_the_named_files() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let manual = fs::read_to_string(source.join("lib.rs")).expect("part of the tree");
    let (mut file, mut checked) = (String::new(), 0);
    for name in names(&manual) {
        if name.ends_with(".rs") {
            file = fs::read_to_string(source.join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        } else if !name.contains("::") {
            assert!(
                ['(', '<']
                    .iter()
                    .any(|next| file.contains(&format!("fn {name}{next}"))),
                "{name} is not in the file before it"
            );
            checked += 1;
        }
    }
    assert!(checked > 30, "{checked} functions");
}
