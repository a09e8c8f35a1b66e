//! Builds the guest programs under `guest/`: flat binaries, `$OUT_DIR/guest.bin` and `$OUT_DIR/interrupts.bin`.
//!
//! Needs clang (`CLANG` names another than the one in `PATH`), and ld and objcopy of binutils. There is no C library
//! and no kernel in it.

#[path = "src/layout.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "a module of the library; the guest needs a part"
)]
mod layout;
#[path = "src/page.rs"]
#[allow(unreachable_pub, reason = "a module of the library")]
mod page;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use layout::GUEST_SOURCES;

const HEADERS: [&str; 5] = ["mailbox.h", "machine.h", "virtio.h", "net.h", "guest.ld"];

/// No floating point (the guest saves none), no red zone, no calls into a library.
const FLAGS: [&str; 14] = [
    "--target=x86_64-unknown-none-elf",
    "-std=c11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-main",
    "-ffreestanding",
    "-fno-pic",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-mno-red-zone",
    "-mgeneral-regs-only",
    "-c",
];

fn main() {
    println!("cargo:rerun-if-env-changed=CLANG");
    for name in GUEST_SOURCES.iter().chain(&HEADERS).chain(&["interrupts.S"]) {
        println!("cargo:rerun-if-changed=guest/{name}");
    }
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
        return;
    }
    let guest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("guest");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    std::fs::write(out.join("layout.h"), header()).expect("a header can be written to OUT_DIR");
    let script = guest.join("guest.ld").into_os_string();
    let build = Build { guest, out };
    let begin = format!("--defsym=PROGRAM_AT={:#x}", layout::PROGRAM_AT);
    build.program("guest", &GUEST_SOURCES, &[begin.into(), "-T".into(), script]);
    let begin = format!("{:#x}", layout::INTERRUPTS_AT);
    build.program("interrupts", &["interrupts.S"], &["-Ttext".into(), begin.into()]);
}

/// The numbers of `src/layout.rs`, and checks of the mailbox's fields against `src/page.rs`.
fn header() -> String {
    // Writing into a string cannot fail.
    let mut text = String::from("/* Written by build.rs. */\n");
    for (name, value) in layout::OF_THE_GUEST {
        let _ = writeln!(text, "#define {name} {value:#x}");
    }
    text.push_str("#define CHECK_MAILBOX");
    // There is no padding in it (`IntoBytes`): each field ends where the next one begins.
    let ends = page::OFFSETS[1..].iter().map(|(_, offset)| *offset);
    for ((field, offset), end) in page::OFFSETS.iter().zip(ends.chain([page::PAGE_BYTES])) {
        let bytes = end - offset;
        for claim in [
            format!("__builtin_offsetof(struct mailbox, {field}) == {offset}"),
            format!("sizeof(((struct mailbox *)0)->{field}) == {bytes}"),
        ] {
            let _ = write!(text, " _Static_assert({claim}, \"{field}\");");
        }
    }
    let _ = writeln!(
        text,
        " _Static_assert(sizeof(struct mailbox) == {}, \"all\");",
        page::PAGE_BYTES
    );
    text
}

struct Build {
    guest: PathBuf,
    out: PathBuf,
}

impl Build {
    /// Compiles, links and flattens a program. `place`: the linker's options that say where it lies.
    fn program(&self, name: &str, sources: &[&str], place: &[OsString]) {
        let clang = env::var_os("CLANG").unwrap_or_else(|| "clang".into());
        let objects: Vec<_> = sources
            .iter()
            .map(|source| self.out.join(format!("{source}.o")))
            .collect();
        for (number, (source, object)) in sources.iter().zip(&objects).enumerate() {
            let mut arguments: Vec<OsString> = FLAGS.iter().map(Into::into).collect();
            arguments.extend([
                "-I".into(),
                self.out.clone().into(),
                format!("-DSOURCE={number}").into(),
            ]);
            arguments.extend([self.guest.join(source).into(), "-o".into(), object.into()]);
            run(&clang, &arguments, "clang");
        }
        let linked = self.out.join(format!("{name}.elf"));
        let mut arguments: Vec<OsString> = ["-m", "elf_x86_64", "-static", "-nostdlib", "-z", "noexecstack"]
            .iter()
            .map(Into::into)
            .collect();
        arguments.extend_from_slice(place);
        arguments.extend(["-o".into(), linked.clone().into()]);
        arguments.extend(objects.into_iter().map(Into::into));
        run("ld".as_ref(), &arguments, "binutils");
        flatten(&linked, &self.out.join(format!("{name}.bin")));
    }
}

fn flatten(linked: &Path, flat: &Path) {
    run(
        "objcopy".as_ref(),
        &["-O".into(), "binary".into(), linked.into(), flat.into()],
        "binutils",
    );
}

/// # Panics
/// If the command is missing or fails, with the package that has it.
fn run(program: &OsStr, arguments: &[OsString], package: &str) {
    let program_name = program.to_string_lossy();
    match Command::new(program).args(arguments).status() {
        Ok(status) if status.success() => (),
        Ok(status) => panic!("{program_name} of the guest program failed ({status}): {arguments:?}"),
        Err(error) => {
            panic!("cannot run {program_name} for the guest program: {error}\nhint: apt install {package}")
        }
    }
}
