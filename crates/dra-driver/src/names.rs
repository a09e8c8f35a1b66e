//! Names of ports, directories, sockets and devices, made of names in the cluster.
//!
//! A name is the same each time it is made, also by a driver of another release: prepared claims outlive the driver.
//! Paths in a container are made of names that the pod's author wrote, so they are the same on each node. The path of a
//! Unix socket has at most 107 bytes: longer names are cut, and end in a hash.

use std::path::Path;

/// Longest path of a Unix socket (`sun_path`, unix(7)), without its NUL.
pub(crate) const LONGEST_SOCKET: usize = 107;
/// Longest path of the directory that has a directory for each claim.
pub(crate) const LONGEST_DIRECTORY: usize = LONGEST_SOCKET - (1 + CLAIM) - (1 + FILE);
/// Where a container has its claims' sockets.
const IN_CONTAINERS: &str = "/var/run/vhost-af-xdp";
/// Length of a claim's name here.
const CLAIM: usize = 16;
/// Longest name of a socket's file.
const FILE: usize = NAME + ".100.sock".len();
/// Longest names of claims and requests in paths.
const NAME: usize = 32;
/// Longest name of a request in the name of a port, which has at most 32 bytes.
const IN_PORT: usize = 32 - PORTS.len() - CLAIM - "-.100".len();
/// How names of ports begin.
pub(crate) const PORTS: &str = "dra-";

/// The FNV-1a hash (64 bits).
fn hash(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// A name of at most `longest` bytes: this one, or its beginning and its hash.
pub(crate) fn short(name: &str, longest: usize) -> String {
    match name.len() <= longest {
        true => name.to_owned(),
        false => {
            let hash = format!("{:08x}", hash(name) as u32);
            let kept = longest.saturating_sub(hash.len() + 1);
            match name.get(..kept).filter(|kept| !kept.is_empty()) {
                Some(kept) => format!("{kept}-{hash}"),
                None => hash,
            }
        }
    }
}

/// The beginning of a text that is longer than this, bytes.
pub(crate) fn cut(text: &str, longest: usize) -> &str {
    let end = (0..=longest.min(text.len()))
        .rev()
        .find(|at| text.is_char_boundary(*at));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// Whether kubelet's UID of a claim can be part of a path.
pub(crate) fn is_uid(uid: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-';
    (1..=64).contains(&uid.len()) && uid.chars().all(is_part)
}

/// Length of a UID that an API server makes.
pub(crate) const UID_LENGTH: usize = 36;

/// A claim's name in names of ports and directories: the beginning of its UID.
pub(crate) fn claim(uid: &str) -> String {
    let digits: String = uid.chars().filter(char::is_ascii_hexdigit).take(CLAIM).collect();
    match digits.len() == CLAIM {
        true => digits.to_ascii_lowercase(),
        false => format!("{:016x}", hash(uid)),
    }
}

/// Whether a directory has the name of a claim.
pub(crate) fn is_claim(name: &str) -> bool {
    let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
    name.len() == CLAIM && name.chars().all(is_digit)
}

/// Whether this can be a pod's name for a claim, a DNS label. It becomes part of paths.
pub(crate) fn is_label(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let is_edge = |end: Option<char>| end.is_some_and(|c| c != '-');
    let edges = is_edge(name.chars().next()) && is_edge(name.chars().last());
    name.len() <= 63 && edges && name.chars().all(is_part)
}

/// The port of a request, and the file name of its socket. `number`: which of the devices of the request.
pub(crate) fn port_and_socket(uid: &str, request: &str, number: usize) -> (String, String) {
    let request = base(request);
    let suffix = if number == 0 {
        String::new()
    } else {
        format!(".{number}")
    };
    (
        format!("{PORTS}{}-{}{suffix}", claim(uid), short(request, IN_PORT)),
        format!("{}{suffix}.sock", short(request, NAME)),
    )
}

/// The request without the alternative that was chosen for it (`REQUEST/SUBREQUEST`).
pub(crate) fn base(request: &str) -> &str {
    request.split('/').next().unwrap_or(request)
}

/// Where a container has the sockets of a claim, by the name that the pod has for it.
pub(crate) fn in_container(claim: &str) -> String {
    format!("{IN_CONTAINERS}/{}", short(claim, NAME))
}

/// The environment variable with the path of a socket.
pub(crate) fn variable(claim: &str, request: &str, number: usize) -> String {
    let upper = |c: char| match c.is_ascii_alphanumeric() {
        true => c.to_ascii_uppercase(),
        false => '_',
    };
    let name: String = format!("{claim}_{}", base(request)).chars().map(upper).collect();
    let suffix = if number == 0 {
        String::new()
    } else {
        format!("_{number}")
    };
    format!("VHOST_AF_XDP_{name}{suffix}")
}

/// The device of a network: a DNS label.
pub(crate) fn device(network: &str) -> String {
    let is_label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let fits = network.chars().all(is_label) && !network.ends_with('-');
    match fits {
        true => network.to_owned(),
        false => {
            let clean = |c: char| {
                if is_label(c.to_ascii_lowercase()) {
                    c.to_ascii_lowercase()
                } else {
                    '-'
                }
            };
            let cleaned: String = network.chars().map(clean).collect();
            format!("{cleaned}-{:08x}", hash(network) as u32)
        }
    }
}

/// A MAC address for a port whose claim names none: the same each time.
pub(crate) fn mac(port: &str) -> [u8; 6] {
    let [a, b, c, d, e, ..] = hash(port).to_be_bytes();
    [0x02, a, b, c, d, e]
}

/// Whether a socket can have this path.
pub(crate) fn fits(socket: &Path) -> bool {
    socket.as_os_str().len() <= LONGEST_SOCKET
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const UID: &str = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";

    #[test]
    fn names_are_the_same_in_all_releases() {
        assert_eq!(
            port_and_socket(UID, "net", 0),
            ("dra-0f1e2d3c4b5a6978-net".to_owned(), "net.sock".to_owned())
        );
        assert_eq!(port_and_socket(UID, "net/fast", 2).1, "net.2.sock");
        let long = "a-request-with-63-bytes-is-the-longest-that-kubernetes-has-here";
        let (port, socket) = port_and_socket(UID, long, 0);
        assert_eq!(port, "dra-0f1e2d3c4b5a6978-caa9b534");
        assert_eq!(socket, "a-request-with-63-bytes-caa9b534.sock");
        assert_eq!(in_container("claim"), "/var/run/vhost-af-xdp/claim");
        assert_eq!(variable("my-claim", "net/fast", 0), "VHOST_AF_XDP_MY_CLAIM_NET");
        assert_eq!(variable("c", "net", 1), "VHOST_AF_XDP_C_NET_1");
        assert_eq!(device("lan-1"), "lan-1");
        assert_eq!(device("Lan_1"), format!("lan-1-{:08x}", hash("Lan_1") as u32));
    }

    #[test]
    fn longest_names_fit() {
        let long = "x".repeat(63);
        let (port, socket) = port_and_socket(UID, &long, 99);
        assert!(model::config::is_name(&port), "{port}");
        let place = Path::new("/").join("d".repeat(LONGEST_DIRECTORY - 1));
        assert!(fits(&place.join(claim(UID)).join(socket)));
        let (_, socket) = port_and_socket(UID, &long, 0);
        assert!(fits(&Path::new(&in_container(&"c".repeat(253))).join(socket)));
    }

    #[test]
    fn different_claims_and_requests_have_different_names() {
        let mut names = HashSet::new();
        for uid in ["a", "b", UID, "0f1e2d3c-4b5a-6979-8796-a5b4c3d2e1f0"] {
            for request in ["net", "net-1", "a-long-request-1", "a-long-request-2"] {
                for number in 0..3 {
                    assert!(names.insert(port_and_socket(uid, request, number).0));
                }
            }
        }
    }

    #[test]
    fn paths_are_made_of_labels_and_claims_only() {
        assert!(is_claim(&claim(UID)) && is_claim(&claim("x")) && is_label("my-claim-1"));
        for wrong in [
            "",
            "..",
            ".keep",
            "lost+found",
            "0123456789ABCDEF",
            "../0123456789abc",
        ] {
            assert!(!is_claim(wrong) && !is_label(wrong), "{wrong:?}");
        }
        for wrong in ["../../etc", "a/b", "a.b", "-a", "a-", "A", "a\n", &"x".repeat(64)] {
            assert!(!is_label(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn only_words_of_letters_digits_and_hyphens_are_uids() {
        assert!(is_uid(UID));
        for wrong in ["", "..", "a/b", "a.b", &"x".repeat(65)] {
            assert!(!is_uid(wrong), "{wrong:?}");
        }
    }
}
