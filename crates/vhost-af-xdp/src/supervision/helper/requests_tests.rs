//! Tests of what an attacker who took over a daemon can get by its requests; in one process.

use std::fs;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::thread::JoinHandle;

use super::*;
use crate::supervision::helper::queries::VmmSockets;
use crate::supervision::helper::{adopting, make_directory, message_pair};

/// The helper of a daemon whose file has no ports, and which may add ports with sockets in one directory.
struct Kept {
    requests: Requests,
    place: PathBuf,
    vmm_sockets: Arc<VmmSockets>,
    answering: Option<JoinHandle<()>>,
}

impl Kept {
    fn new() -> Self {
        Self::with("")
    }

    /// The same with this file.
    fn with(text: &str) -> Self {
        Self::create(text, false)
    }

    /// The same with another directory, in whose directories sockets may be, too.
    fn within_others() -> Self {
        let others = "[daemon]\nsocket-directories = [\"PLACE/of-others/*\"]\n";
        Self::create(others, true)
    }

    fn create(text: &str, with_others: bool) -> Self {
        let place = make_directory().expect("a place");
        let file = place.join("c.toml");
        fs::write(&file, text.replace("PLACE", &place.display().to_string())).expect("ours");
        if with_others {
            fs::create_dir(place.join("of-others")).expect("ours");
        }
        let (ours, theirs) = message_pair().expect("sockets");
        let vmm_sockets = Arc::new(VmmSockets::default());
        let request_server = server(&place, &file, &vmm_sockets);
        Self {
            requests: Requests::new(ours).expect("a socket"),
            place,
            vmm_sockets,
            answering: Some(std::thread::spawn(move || {
                request_server.answer_all(theirs.as_fd());
            })),
        }
    }

    /// Sockets that are in its directory.
    fn sockets(&self) -> usize {
        fs::read_dir(&self.place).expect("ours").count() - 1
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&self.requests.socket, rustix::net::Shutdown::Both);
        let answered = self.answering.take().map(JoinHandle::join);
        let _ = fs::remove_dir_all(&self.place);
        assert!(answered.is_none_or(|answered| answered.is_ok()), "it panicked");
    }
}

/// Its side of the helper.
fn server(place: &Path, file: &Path, vmm_sockets: &Arc<VmmSockets>) -> RequestServer {
    let (files, known) = (Arc::new(Files::of(Vec::new())), Arc::clone(vmm_sockets));
    RequestServer {
        file: file::read(file).expect("ours"),
        options: Daemon::default(),
        state: Some(place.join("state.toml")),
        added_ports: AddedPorts::All,
        directories: Arc::new(Directories::open(&[place.to_owned(), place.join("of-others/*")])),
        adopt: adopting(None, vmm_sockets, &files),
        files,
        made: Box::new(move |path| known.add([path])),
    }
}

/// A port with the null NIC.
fn port(name: &str, path: &Path, client: bool) -> Entry<Port> {
    let mut port = Port::default();
    port.socket.socket_path = Some(path.to_owned());
    port.socket.client = client;
    port.interface.null = true;
    Entry::of_no_file(name, port)
}

fn of(port: &Entry<Port>) -> Tables {
    Tables {
        ports: vec![port.clone()],
        ..Tables::default()
    }
}

#[test]
fn added_port_is_not_the_files_with_any_line_number() {
    // The daemon of the file may connect to VMMs.
    let kept = Kept::with("[port.c]\nclient = true\nnull = true\nsocket-path = \"/run/a-vmms.sock\"\n");
    for line in [0, 1, usize::MAX] {
        // With such a path it could query the memory maps of all processes that listen or connect there.
        let mut elsewhere = port("a", Path::new("/run/of-another.sock"), true);
        elsewhere.line = line;
        let refused = kept
            .requests
            .put(&of(&elsewhere))
            .expect_err("elsewhere")
            .to_string();
        assert!(refused.contains("added by the API"), "line {line}: {refused}");
        assert!(refused.contains("may have sockets in"), "line {line}: {refused}");
        let mut here = port("a", &kept.place.join("a.sock"), false);
        here.line = line;
        let judged = kept.requests.put(&of(&here)).expect("allowed");
        assert_eq!(judged.ports[0].line_of("socket-path"), 0);
    }
}

#[test]
fn table_of_the_file_is_not_added() {
    let kept = Kept::with("[port.c]\nnull = true\nsocket-path = \"/run/c.sock\"\n");
    let tables = of(&port("c", &kept.place.join("c.sock"), false));
    let refused = kept.requests.put(&tables).expect_err("of the file").to_string();
    assert!(refused.contains("reload the configuration"), "{refused}");
}

#[test]
fn listed_with_a_star_directories_may_come_later_but_are_no_links() {
    let kept = Kept::within_others();
    let listen = |directory: &str| {
        let path = kept.place.join("of-others").join(directory).join("a.sock");
        kept.requests.put(&of(&port("a", &path, false))).expect("allowed");
        kept.requests.adopt().expect("judged");
        kept.requests.listen("a")
    };
    let others = kept.place.join("of-others");
    let absent = listen("claim")
        .expect_err("there is no such directory")
        .to_string();
    assert!(absent.contains("create the directory first"), "{absent}");
    for _ in 0..2 {
        fs::create_dir(others.join("claim")).expect("ours");
        listen("claim").expect("it is there");
        assert!(others.join("claim/a.sock").exists());
        // The file that was at this path before is another one.
        fs::remove_dir_all(others.join("claim")).expect("ours");
    }
    std::os::unix::fs::symlink("/tmp", others.join("link")).expect("ours");
    listen("link").expect_err("a link");
    assert!(!Path::new("/tmp/a.sock").exists());
    for outside in ["a.sock", "claim/deeper/a.sock"] {
        let outside = port("a", &others.join(outside), false);
        kept.requests.put(&of(&outside)).expect_err("elsewhere");
    }
}

#[test]
fn there_are_no_more_sockets_than_ports_that_count() {
    let kept = Kept::new();
    let mut listeners = Vec::new();
    for number in 0..20 {
        // One port, each time with another path; the daemon never asks to remove a socket.
        let path = kept.place.join(format!("{number}.sock"));
        kept.requests.put(&of(&port("a", &path, false))).expect("allowed");
        kept.requests.adopt().expect("judged");
        listeners.push(kept.requests.listen("a").expect("it counts"));
        assert_eq!(kept.sockets(), 1);
        // By its configured path, and by the path that the kernel has for it.
        assert_eq!(kept.vmm_sockets.len(), 2);
    }
    // The configuration in force stays, whatever else is requested.
    let other = kept.place.join("other.sock");
    kept.requests
        .put(&of(&port("b", &other, false)))
        .expect("allowed");
    kept.requests.adopt().expect("judged");
    listeners.push(kept.requests.listen("b").expect("it counts"));
    assert!(kept.place.join("19.sock").exists());
    assert_eq!((kept.sockets(), kept.vmm_sockets.len()), (2, 4));
    kept.requests.without(TableKind::Port, "a").expect("there");
    kept.requests.adopt().expect("judged");
    assert!(other.exists());
    assert_eq!((kept.sockets(), kept.vmm_sockets.len()), (1, 2));
}

#[test]
fn added_port_is_checked_and_kept_without_a_look_at_the_others() {
    let directory = tempfile::tempdir().expect("a directory");
    let (place, file) = (directory.path(), directory.path().join("c.toml"));
    fs::write(&file, "[network.lan]\n").expect("ours");
    let server = server(place, &file, &Arc::default());
    let mut proposals = Proposals {
        in_force: server.file.clone(),
        ..Proposals::default()
    };
    let ask = |request, tables: Option<&Entry<Port>>, proposals: &mut Proposals| {
        let text = tables.map(|port| text_with(&of(port)).expect("a memory file"));
        server.answer(request, text, proposals)
    };
    let with_rule = |number: usize| {
        let path = place.join(format!("{number}.sock"));
        let keys = serde_json::json!({
            "socket-path": path, "network": "lan", "rule": [{"direction": "to-guest", "action": "deny"}]
        });
        Port::named(&format!("vm{number}"), keys.as_object().expect("keys")).expect("a port")
    };
    for number in 0..50 {
        ask(Request::Put, Some(&with_rule(number)), &mut proposals).expect("allowed");
        let (_, alone) = proposals.proposed.as_ref().expect("proposed");
        // The first one is checked with the file.
        assert_eq!(alone.is_some(), number > 0, "{number}");
        ask(Request::Adopt, None, &mut proposals).expect("checked");
        assert_eq!(proposals.text.is_some(), number > 0, "{number}");
        ask(Request::Keep, None, &mut proposals).expect("kept");
    }
    // A mistake is found as with all others, and forgotten.
    let twice = Entry::of_no_file("other", with_rule(7).value);
    let refused = ask(Request::Put, Some(&twice), &mut proposals).expect_err("the same socket");
    assert!(refused.contains("is asked for by two ports"), "{refused}");
    ask(Request::Put, Some(&with_rule(50)), &mut proposals).expect("allowed");
    ask(Request::Adopt, None, &mut proposals).expect("checked");
    ask(
        Request::Without(TableKind::Port, "vm3".to_owned()),
        None,
        &mut proposals,
    )
    .expect("there");
    ask(Request::Adopt, None, &mut proposals).expect("checked");
    ask(Request::Keep, None, &mut proposals).expect("kept");
    let added = &proposals.in_force.added;
    let names: Vec<_> = (0..=50).filter(|&number| number != 3).map(with_rule).collect();
    assert_eq!(added.ports, names);
    let kept = fs::read_to_string(place.join("state.toml")).expect("kept");
    assert_eq!(
        state::parse(Path::new("state.toml"), &kept).expect("a state file"),
        *added
    );
}
