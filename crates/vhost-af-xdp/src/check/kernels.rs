//! What kernels have by version, as data. docs/hardware.md has the same lines, and a test compares both.

/// First version and feature. The first line is the oldest version that the program supports.
pub(super) const TABLE: &[((u32, u32), &str)] = &[
    ((5, 18), "the oldest kernel that works"),
    (
        (6, 3),
        "drivers report features (`xdp-features`); before, zero-copy is tried",
    ),
    (
        (6, 4),
        "the steward binds leased sockets; before, it needs `unbound-sockets = true`",
    ),
    ((6, 6), "frames in several pieces (MTU above 3822)"),
    ((6, 8), "TX metadata (checksums); `queues`"),
    ((6, 18), "`bench --tx-budget`"),
    (
        (7, 1),
        "a map rejects sockets without an RX ring: daemon and steward make it first",
    ),
];

/// The last line is no feature.
const FEATURES: usize = TABLE.len() - 1;

/// First version with TX metadata.
pub(super) const TX_METADATA: (u32, u32) = (6, 8);

/// Features that a kernel lacks.
pub(super) fn lacks(kernel: (u32, u32)) -> impl Iterator<Item = &'static ((u32, u32), &'static str)> {
    TABLE[..FEATURES].iter().filter(move |(from, _)| kernel < *from)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = include_str!("../../../../docs/hardware.md");

    #[test]
    fn document_has_each_line_and_no_other() {
        let begin = DOCUMENT.find("\n| from | what |\n").expect("the table") + 1;
        let rows: Vec<_> = DOCUMENT[begin..]
            .lines()
            .skip(2)
            .take_while(|line| line.starts_with('|'))
            .collect();
        let lines = TABLE
            .iter()
            .map(|((major, minor), what)| format!("| {major}.{minor} | {what} |"));
        assert_eq!(rows, lines.collect::<Vec<_>>());
    }

    #[test]
    fn older_kernels_lack_what_came_later() {
        let lacking = |kernel| lacks(kernel).map(|(from, _)| *from).collect::<Vec<_>>();
        assert_eq!(lacking((6, 6)), [(6, 8), (6, 18)]);
        assert_eq!(lacking((7, 0)), []);
        assert_eq!(lacking((5, 10)).len(), FEATURES);
        assert!(TABLE.iter().any(|(from, _)| *from == TX_METADATA));
    }
}
