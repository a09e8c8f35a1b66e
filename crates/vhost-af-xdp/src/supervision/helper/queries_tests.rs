//! Tests of queries and answers, in one process.
#![allow(unsafe_code)]

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::supervision::helper::make_directory;

#[test]
fn only_connections_of_its_own_sockets_are_looked_at() {
    use std::os::unix::net::UnixListener;
    let directory = make_directory().expect("a place");
    let (ours, other) = (directory.join("ours"), directory.join("other"));
    let met = UnixListener::bind(&ours).expect("listens");
    let connected = UnixStream::connect(&ours).expect("somebody listens");
    let (accepted, _) = met.accept().expect("connected");
    let known = |path: PathBuf| {
        let sockets = VmmSockets::default();
        sockets.add([path]);
        sockets
    };
    let paths = known(ours);
    assert!(is_made_at(accepted.as_fd(), &paths) && is_made_at(connected.as_fd(), &paths));
    assert!(!is_made_at(accepted.as_fd(), &known(other)));
    let (one, _two) = UnixStream::pair().expect("sockets");
    assert!(!is_made_at(one.as_fd(), &paths));
    fs::remove_dir_all(directory).expect("ours");
}

fn mapped(address: u64, file: &OwnedFd) -> MappedFile<BorrowedFd<'_>> {
    let file = file.as_fd();
    MappedFile { address, file }
}

/// Ends a test that hangs.
const LONG: Duration = Duration::from_secs(30);

type Asked = (Queries, OwnedFd, [UnixStream; 2], (PathBuf, Arc<VmmSockets>));

/// Both ends of the socket for queries, and of a connection to a socket whose path is in the list.
fn asked(timeout: Duration) -> Asked {
    use std::os::unix::net::UnixListener;
    let directory = make_directory().expect("a place");
    let path = directory.join("vm.sock");
    let met = UnixListener::bind(&path).expect("listens");
    let ours = UnixStream::connect(&path).expect("somebody listens");
    let (theirs, _) = met.accept().expect("connected");
    let (socket, answers) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .expect("sockets");
    let known = VmmSockets::default();
    known.add([path]);
    (
        Queries { socket, timeout },
        answers,
        [ours, theirs],
        (directory, Arc::new(known)),
    )
}

/// Maps the file privately in this process; returns the address.
fn map_privately(file: &OwnedFd) -> u64 {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    rustix::fs::ftruncate(file, 4096).expect("ours");
    let flags = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping at a place of the kernel's choice, which nothing refers to.
    let mapped = unsafe { mmap(std::ptr::null_mut(), 4096, flags.0, flags.1, file, 0) };
    mapped.expect("mapped") as u64
}

#[test]
fn helper_reports_private_mappings_of_the_queried_file_only() {
    use rustix::fs::{MemfdFlags, memfd_create};
    let (queries, answers, [_ours, theirs], (directory, vmm_sockets)) = asked(LONG);
    let helper = std::thread::spawn(move || answer_all(&answers, &vmm_sockets));
    let [file, other] = ["ram", "other"].map(|name| memfd_create(name, MemfdFlags::CLOEXEC).expect("a file"));
    let [at, elsewhere] = [&file, &other].map(map_privately);
    let ask = |address, file: &OwnedFd| queries.ask(theirs.as_fd(), &[mapped(address, file)]);
    assert_eq!(ask(at, &file), Some(at));
    // Answers about any address would reveal each private mapping of the process to enough queries.
    assert_eq!(ask(elsewhere, &file), None);
    let code = helper_reports_private_mappings_of_the_queried_file_only as fn() as usize as u64;
    assert_eq!(ask(code, &file), None);
    assert_eq!(ask(elsewhere, &other), Some(elsewhere));
    drop(queries);
    helper.join().expect("it ends with its daemon");
    fs::remove_dir_all(directory).expect("ours");
}

#[test]
fn helper_that_does_not_answer_is_not_waited_for_and_its_late_answer_not_believed() {
    let (queries, answers, [_ours, theirs], (directory, _)) = asked(Duration::from_millis(20));
    let file = OwnedFd::from(theirs.try_clone().expect("a descriptor"));
    let files = [mapped(0x1000, &file)];
    assert_eq!(queries.ask(theirs.as_fd(), &files), None);
    // The answer to the first query comes before that to the second.
    let first = read_query(&answers).expect("a socket").expect("a query");
    reply(&first.answer, Some(0x1000));
    assert_eq!(queries.ask(theirs.as_fd(), &files), None);
    let queries = Queries {
        timeout: LONG,
        ..queries
    };
    let second = read_query(&answers).expect("a socket").expect("a query");
    std::thread::scope(|scope| {
        let third = scope.spawn(|| queries.ask(theirs.as_fd(), &files));
        let of_third = read_query(&answers).expect("a socket").expect("a query");
        reply(&second.answer, Some(0x1000));
        reply(&of_third.answer, None);
        assert_eq!(third.join().expect("answered"), None);
    });
    fs::remove_dir_all(directory).expect("ours");
}

#[test]
fn answer_goes_to_an_eventfd_only() {
    let (mut ours, theirs) = UnixStream::pair().expect("sockets");
    reply(&theirs.into(), Some(0x1000));
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut ours, &mut bytes).expect("read");
    assert!(bytes.is_empty());
}

#[test]
fn question_of_one_port_is_not_behind_that_of_another() {
    let (queries, answers, [_ours, theirs], (directory, _)) = asked(LONG);
    let file = OwnedFd::from(theirs.try_clone().expect("a descriptor"));
    let ask = || queries.ask(theirs.as_fd(), &[mapped(0x1000, &file)]);
    std::thread::scope(|scope| {
        let first = scope.spawn(ask);
        let of_first = read_query(&answers).expect("a socket").expect("a question");
        let second = scope.spawn(ask);
        let of_second = read_query(&answers).expect("a socket").expect("a question");
        reply(&of_second.answer, Some(0x2000));
        assert_eq!(second.join().expect("answered"), Some(0x2000));
        reply(&of_first.answer, Some(0x1000));
        assert_eq!(first.join().expect("answered"), Some(0x1000));
    });
    fs::remove_dir_all(directory).expect("ours");
}

/// Forks a process with that PID, which runs `body` and ends.
fn copy_numbered(number: libc::pid_t, body: impl FnOnce()) -> bool {
    let numbers = [number];
    // SAFETY: all zeros are valid.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.exit_signal = libc::SIGCHLD as u64;
    arguments.set_tid = numbers.as_ptr() as u64;
    arguments.set_tid_size = 1;
    let size = size_of::<libc::clone_args>();
    // SAFETY: the arguments exist; the copy has memory of its own, and does system calls only.
    match unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size) } {
        0 => {
            body();
            // SAFETY: this copy needs no clean-up.
            unsafe { libc::_exit(0) }
        }
        made => made > 0,
    }
}

#[test]
fn process_that_has_the_number_of_one_that_connected_is_not_looked_into() {
    use std::os::unix::net::UnixListener;

    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::net::{SocketAddrUnix, connect};
    use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
    if !rustix::process::geteuid().is_root() {
        let required = std::env::var("REQUIRE_PRIV").is_ok_and(|value| value == "1");
        assert!(!required, "REQUIRE_PRIV=1, but this is not root");
        println!("SKIPPED: this needs root: processes by their numbers");
        return;
    }
    let directory = make_directory().expect("a place");
    let path = directory.join("vm.sock");
    let met = UnixListener::bind(&path).expect("listens");
    let vmm_sockets = Arc::new(VmmSockets::default());
    vmm_sockets.add([path.clone()]);
    // The forked processes have this mapping, too.
    let file = memfd_create("ram", MemfdFlags::CLOEXEC).expect("a file");
    let address = map_privately(&file);
    let socket = crate::listener::stream(rustix::net::SocketFlags::empty()).expect("a socket");
    let at = SocketAddrUnix::new(&path).expect("short");
    let number = (2000..).find(|&number| copy_numbered(number, || _ = connect(&socket, &at)));
    let number = number.and_then(Pid::from_raw).expect("a number that is free");
    let (connection, _) = met.accept().expect("connected");
    let asked = || Query {
        answer: Arc::new(file.try_clone().expect("a descriptor")),
        connection: connection.try_clone().expect("a descriptor").into(),
        files: vec![MappedFile {
            address,
            file: file.try_clone().expect("a descriptor"),
        }],
    };
    waitpid(Some(number), WaitOptions::empty()).expect("ours");
    let lives = copy_numbered(number.as_raw_pid(), || {
        // SAFETY: waits for the signal that ends it.
        let _ = unsafe { libc::pause() };
    });
    assert!(lives, "somebody else has taken the number");
    let told = private_mapping(&asked(), &vmm_sockets);
    kill_process(number, Signal::KILL).expect("ours");
    waitpid(Some(number), WaitOptions::empty()).expect("ours");
    assert_eq!(told, None);
    fs::remove_dir_all(directory).expect("ours");
}

/// A socket that takes an hour to close, as long as its peer is there.
fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut socket = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (other, _) = listener.accept().expect("it connects");
    let hour = Some(Duration::from_secs(3600));
    rustix::net::sockopt::set_socket_linger(&socket, hour).expect("an option");
    socket.set_nonblocking(true).expect("an option");
    while socket.write(&[0; 1 << 16]).is_ok() {}
    (socket, other)
}

/// Threads that answer queries.
fn answering() -> usize {
    let threads = fs::read_dir("/proc/self/task").expect("ours").flatten();
    let names = threads.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| name.trim() == "answer").count()
}

#[test]
fn files_that_take_for_ever_to_close_hold_up_so_many_threads_and_no_more() {
    let (queries, answers, [_ours, theirs], (directory, vmm_sockets)) = asked(Duration::from_millis(20));
    let mut others = Vec::new();
    for _ in 0..2 * ANSWERS_MAX {
        let (file, other) = lingering();
        others.push(other);
        let file = OwnedFd::from(file);
        let asked = queries.send(theirs.as_fd(), &[mapped(0x1000, &file)]);
        asked.expect("room");
    }
    // Started only now: it must have the last descriptor of each file. Closing one delays the thread that reads them.
    let helper = std::thread::spawn(move || answer_all(&answers, &vmm_sockets));
    let started = Instant::now();
    while answering() < ANSWERS_MAX && started.elapsed() < LONG {
        std::thread::sleep(Duration::from_millis(10));
    }
    for _ in 0..20 {
        // Other tests of this process may have some for a moment.
        assert!(answering() < ANSWERS_MAX + 8, "{} of {ANSWERS_MAX}", answering());
        std::thread::sleep(Duration::from_millis(10));
    }
    drop((others, queries));
    helper.join().expect("it ends with its daemon");
    fs::remove_dir_all(directory).expect("ours");
}
