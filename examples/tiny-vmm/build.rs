//! Builds the guest program under `guest/`: `$OUT_DIR/guest.elf`.
//!
//! Needs clang (`CLANG` names another than the one in `PATH`) and ld of binutils. The guest has no C library.

#[path = "src/layout.rs"]
#[allow(dead_code, unreachable_pub, reason = "a module of the library")]
mod layout;

use std::env;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

/// No floating point (the guest saves no such registers), no red zone, no calls into a library.
const ARGUMENTS: &str = "--target=x86_64-linux-gnu -std=c11 -O2 -Wall -Wextra -Werror -Wno-main \
    -ffreestanding -fno-pic -fno-stack-protector -fno-asynchronous-unwind-tables -mno-red-zone -mgeneral-regs-only \
    -fuse-ld=bfd -nostdlib -static -Wl,--build-id=none -Wl,-z,noexecstack -T guest.ld \
    start.S virtio.c net.c control.c main.c";

/// # Panics
/// If clang is missing or fails.
fn main() {
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-changed=guest");
    println!("cargo:rerun-if-changed=src/layout.rs");
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    std::fs::write(out.join("layout.h"), header()).expect("OUT_DIR is writable");
    let mut clang = Command::new(env::var_os("CLANG").unwrap_or_else(|| "clang".into()));
    clang.current_dir("guest").args(ARGUMENTS.split_whitespace());
    match clang
        .arg("-I")
        .arg(&out)
        .arg("-o")
        .arg(out.join("guest.elf"))
        .status()
    {
        Ok(status) if status.success() => (),
        Ok(status) => panic!("building the guest program failed ({status}): {clang:?}"),
        Err(error) => {
            panic!("cannot run clang for the guest program: {error}\nhint: apt install clang binutils")
        }
    }
}

/// The numbers and the mailbox of `src/layout.rs` in C.
fn header() -> String {
    // Writing into a string cannot fail.
    let mut text = String::from("/* Written by build.rs. */\n");
    for (name, value) in layout::NUMBERS {
        let _ = writeln!(text, "#define {name} {value:#x}");
    }
    text.push_str("struct mailbox {\n");
    for field in layout::FIELDS {
        let _ = writeln!(text, "\tunsigned long {field};");
    }
    text + "};\n"
}
