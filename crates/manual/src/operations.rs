//! docs/operations.md: generated from the steward's table. `manual --docs TREE` writes it; a test compares it.

use std::fmt::Write as _;

use steward::server::OPERATIONS;

const HEAD: &str = "\
# Operations of the steward

<!-- Written by `cargo run -p manual -- --docs .` from crates/steward/src/server/operations.rs. Do not edit. -->

All that a process can have the [steward](privileges.md) do. Each message is checked as a whole, needs a rule of the
policy for its user (not root's), waits for its turn, and is rejected without [units](cli.md#turns-and-limits). The [end
of a lease](privileges.md#what-ends-a-lease) undoes it, but for what a row names. The next steward continues leases with
a token, and undoes the others. A *job* is done by a child of the steward, and only that receives the message's files.
";

/// docs/operations.md.
pub(crate) fn text() -> String {
    let mut text = HEAD.to_owned();
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "\n| request | checked | done | undone | limited by |\n|---|---|---|---|---|"
    );
    for row in OPERATIONS {
        let (name, checks, does) = (row.name, row.checks, row.does);
        let _ = writeln!(
            text,
            "| `{name}` | {checks} | {does} | {} | {} |",
            row.undone, row.limit
        );
    }
    text
}
