//! A VMM that shares a file of such a file system.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use testkit::vmm::{Act, LOG, RAM, Shared, Vmm, inflight_bytes, memory, table};
use vhost::vhost_user::message::FrontendReq;

/// Says a whole session once it is told to, then how far it came, and keeps all that it has.
pub(crate) fn give(role: &str, file: &Path, socket: &Path) {
    let file = File::options().read(true).write(true).open(file);
    let file = OwnedFd::from(file.expect("the server answers yet"));
    println!("open");
    while crate::line() != "go" {}
    let (shared, buffers) = share(role, file);
    let mut acts = shared.session();
    if let Some(buffers) = &buffers {
        for act in &mut acts {
            if let Act::Say(FrontendReq::SET_MEM_TABLE, payload, files) = act {
                *payload = table(&[(0, RAM, 0), (RAM, RAM, 0)]);
                files.push(buffers.as_fd());
            }
        }
    }
    match Vmm::connect(socket).perform(&shared, &acts) {
        Ok(done) if done < acts.len() => println!("refused"),
        Ok(_) => println!("accepted"),
        Err(_) => println!("no answer"),
    }
    loop {
        let _ = crate::line();
    }
}

/// What is shared, and the file in which guest memory goes on, if it is not in one.
fn share(role: &str, file: OwnedFd) -> (Shared, Option<OwnedFd>) {
    let [ram, log, inflight] = [RAM, LOG, inflight_bytes(false)].map(memory);
    match role {
        // Nothing can be written into it.
        "ram" => (Shared::as_they_are([file, log, inflight], false), None),
        "log" => (Shared::of([ram, file, inflight], false), None),
        "inflight" => (Shared::of([ram, log, file], false), None),
        "buffers" => {
            let shared = Shared::of([ram, log, inflight], false);
            shared.move_buffers(RAM);
            (shared, Some(file))
        }
        _ => panic!("{role} is none of ram, buffers, log, inflight"),
    }
}
