//! Attaching to real interfaces: modes, refusals, and that nothing stays behind.

use crate::common;
use testkit::assert_has;

use std::process::{Command, Stdio};
use std::time::Duration;

use common::{ForeignProgram, Pair, as_a_steward, gone_within, program_on, read_all, read_line};
use steer::{AttachError, AttachedAs, Held, Mode, ModeRequest, Program, with_sources};
use testkit::VethPair;

/// Set for a test that this binary runs in a process of its own; the value is the interface's index.
const CHILD: &str = "STEER_TEST_CHILD_IFINDEX";

fn child(test: &str, ifindex: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("own path"));
    command
        .args(["--exact", test, "--ignored", "--nocapture", "--quiet"])
        .env(CHILD, ifindex.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn child_ifindex() -> u32 {
    std::env::var(CHILD)
        .expect("run by another test")
        .parse()
        .expect("an index")
}

#[test]
fn each_mode_and_variant_attaches_as_asked() {
    let Some(pair) = Pair::new(1500) else { return };
    let cases = [
        (ModeRequest::Xdp, Mode::Native),
        (ModeRequest::Native, Mode::Native),
        (ModeRequest::Skb, Mode::Skb),
    ];
    for frags in [false, true] {
        for (request, expected) in cases {
            let program = Program::attach(pair.ifindex(), request, frags).expect("veth takes XDP");
            assert_eq!(program.mode(), expected);
            assert_eq!(program.fallback(), None);
            assert_eq!(program_on(pair.ifindex()), Some(program.id()));
            drop(program);
            assert_eq!(
                program_on(pair.ifindex()),
                None,
                "dropping the Program removes it"
            );
        }
    }
}

#[test]
fn auto_falls_back_to_skb_and_keeps_the_reason() {
    let Some(pair) = Pair::new(1500) else { return };
    let program = Program::attach(pair.loopback(), ModeRequest::Xdp, false).expect("skb works everywhere");
    assert_eq!(program.mode(), Mode::Skb);
    let reason = program.fallback().expect("lo has no native XDP");
    assert_has(reason, &["native mode"]);
    assert_has(reason, &["Operation not supported"]);
}

#[test]
fn native_that_the_driver_lacks_is_refused_in_the_kernels_words() {
    let Some(pair) = Pair::new(1500) else { return };
    let error =
        Program::attach(pair.loopback(), ModeRequest::Native, false).expect_err("lo has no native XDP");
    assert!(
        matches!(
            error,
            AttachError::Refused {
                mode: Mode::Native,
                ..
            }
        ),
        "{error:?}"
    );
    let text = with_sources(&error);
    assert_has(&text, &["lo refuses"]);
    assert_has(&text, &["Underlying driver does not support XDP"]);
    assert_eq!(program_on(pair.loopback()), None);
}

#[test]
fn large_mtu_is_named_in_native_mode_and_frags_or_skb_take_it() {
    let Some(pair) = Pair::new(9000) else { return };
    let error = Program::attach(pair.ifindex(), ModeRequest::Native, false).expect_err("9000 is too much");
    assert!(
        matches!(
            error,
            AttachError::MtuTooLarge {
                mtu: 9000,
                frags: false,
                ..
            }
        ),
        "{error:?}"
    );
    let text = with_sources(&error);
    assert_has(
        &text,
        &[
            "nic0 (9000)",
            "without multi-buffer frames: lower it, or use skb mode (mode=skb)",
        ],
    );

    let auto = Program::attach(pair.ifindex(), ModeRequest::Xdp, false).expect("skb takes it");
    assert_eq!(auto.mode(), Mode::Skb);
    assert!(
        auto.fallback().is_some_and(|reason| reason.contains("9000")),
        "{:?}",
        auto.fallback()
    );
    drop(auto);
    let frags = Program::attach(pair.ifindex(), ModeRequest::Native, true).expect("frags takes it");
    assert_eq!(frags.mode(), Mode::Native);
}

#[test]
fn program_loads_with_the_capabilities_of_a_steward() {
    let Some(pair) = Pair::new(1500) else { return };
    let ifindex = pair.ifindex();
    for frags in [false, true] {
        let attached = as_a_steward(|| Program::attach(ifindex, ModeRequest::Native, frags).map(drop));
        attached.expect("it takes no other capability");
    }
}

#[test]
fn interface_that_is_not_there_is_named() {
    let Some(_pair) = Pair::new(1500) else { return };
    for ifindex in [4_000_000, u32::MAX] {
        let error = Program::attach(ifindex, ModeRequest::Xdp, false).expect_err("no such interface");
        assert!(error.to_string().contains(&ifindex.to_string()), "{error}");
    }
}

#[test]
fn program_of_another_is_named_and_stays() {
    let Some(pair) = Pair::new(1500) else { return };
    for native in [true, false] {
        let foreign = ForeignProgram::attach(pair.ifindex(), native);
        for request in [ModeRequest::Xdp, ModeRequest::Native, ModeRequest::Skb] {
            let error = Program::attach(pair.ifindex(), request, false).expect_err("the place is taken");
            let AttachError::Foreign {
                interface,
                program,
                held,
            } = &error
            else {
                panic!("{error:?}")
            };
            assert_eq!(interface, VethPair::NIC);
            assert_eq!(program.id, foreign.id);
            assert_eq!(program.name.as_deref(), ForeignProgram::NAME.to_str().ok());
            let mode = if native { Mode::Native } else { Mode::Skb };
            assert_eq!(program.mode, AttachedAs::Mode(mode));
            assert_eq!(*held, Held::Interface);
            let kind = if native { "xdpdrv" } else { "xdpgeneric" };
            let text = error.to_string();
            assert_has(&text, &[&format!("`ip link set dev nic0 {kind} off`")]);
            assert_has(&text, &[&format!("id {}", foreign.id)]);
            assert_eq!(program_on(pair.ifindex()), Some(foreign.id), "still there");
        }
    }
}

/// Numbers of programs go up by one with each that is loaded on this machine.
#[test]
fn look_at_a_program_loads_none_and_tries_none_in_its_place() {
    let Some(pair) = Pair::new(1500) else { return };
    const LOOKS: u32 = 200;
    let loaded_meanwhile = || {
        let first = ForeignProgram::attach(pair.ifindex(), true).id;
        let foreign = ForeignProgram::attach(pair.ifindex(), true);
        for _ in 0..LOOKS {
            let on = steer::program_on(pair.ifindex()).expect("it is there");
            assert_eq!(on.id, foreign.id);
        }
        drop(foreign);
        let last = ForeignProgram::attach(pair.ifindex(), true).id;
        last.wrapping_sub(first)
    };
    // Other tests load some, too.
    assert!((0..20).any(|_| loaded_meanwhile() < LOOKS));
}

#[test]
fn program_on_a_link_is_named_with_its_link() {
    let Some(pair) = Pair::new(1500) else { return };
    let first = Program::attach(pair.ifindex(), ModeRequest::Skb, false).expect("free");
    let error = Program::attach(pair.ifindex(), ModeRequest::Xdp, false).expect_err("the place is taken");
    let AttachError::Foreign { program, held, .. } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(program.id, first.id());
    assert_eq!(program.mode, AttachedAs::Mode(Mode::Skb));
    let Held::Link(link) = held else {
        panic!("root may look: {error:?}")
    };
    assert_has(&error.to_string(), &[&format!("bpftool link detach id {link}")]);
    assert_eq!(program_on(pair.ifindex()), Some(first.id()));
}

#[test]
fn killed_process_leaves_no_program() {
    let Some(pair) = Pair::new(1500) else { return };
    let mut process = child("attach::child_attaches_and_waits", pair.ifindex())
        .spawn()
        .expect("this binary runs");
    let mut stdout = process.stdout.take().expect("piped");
    let id: u32 = loop {
        let line = read_line(&mut stdout);
        if let Some(id) = line.strip_prefix("attached ") {
            break id.parse().expect("an id");
        }
    };
    assert_eq!(program_on(pair.ifindex()), Some(id));
    process.kill().expect("SIGKILL");
    process.wait().expect("killed child ends");
    assert!(
        gone_within(pair.ifindex(), Duration::from_secs(30)),
        "the program outlived its process"
    );
}

#[test]
#[ignore = "run in a process of its own by killed_process_leaves_no_program"]
fn child_attaches_and_waits() {
    let program = Program::attach(child_ifindex(), ModeRequest::Xdp, false).expect("free");
    println!("\nattached {}", program.id());
    loop {
        std::thread::park();
    }
}

#[test]
fn libbpf_prints_nothing_when_refused() {
    let Some(pair) = Pair::new(1500) else { return };
    let mut process = child("attach::child_is_refused", pair.loopback())
        .spawn()
        .expect("this binary runs");
    let said = read_all(&mut process.stderr.take().expect("piped"));
    assert!(process.wait().expect("child ends").success());
    assert_eq!(said, "");
}

#[test]
#[ignore = "run in a process of its own by libbpf_prints_nothing_when_refused"]
fn child_is_refused() {
    Program::attach(child_ifindex(), ModeRequest::Native, false).expect_err("lo has no native XDP");
    let program = Program::attach(child_ifindex(), ModeRequest::Skb, false).expect("skb works everywhere");
    program.disable_queue(3).expect("nothing to disable is no error");
}
