//! Compiles the programs under `bpf/` and makes their skeletons, `$OUT_DIR/NAME.skel.rs`.
//!
//! Needs clang (`CLANG` names another than the one in `PATH`) and the kernel's userspace headers
//! (`linux-libc-dev`). libbpf's own headers come with libbpf-cargo.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let manifest_dir =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let bpf_dir = manifest_dir.join("../../bpf");

    for header in [
        "steer.h",
        "steer_body.h",
        "steer_groups.h",
        "steer_hints.h",
        "steer_key.h",
        "steer_queues.h",
        "steer_stations.h",
        "steer_tunnel.h",
    ] {
        println!("cargo:rerun-if-changed={}", bpf_dir.join(header).display());
    }
    println!("cargo:rerun-if-env-changed=CLANG");

    let mut args: Vec<OsString> = vec!["-Wall".into(), "-Wextra".into(), "-Werror".into()];
    // BTF contains the path of the source: without the directories of the machine that builds it.
    let mut map: OsString = "-fdebug-prefix-map=".into();
    map.push(&bpf_dir);
    map.push("=/vhost-af-xdp/bpf");
    args.push(map);
    if let Some(dir) = arch_include_dir() {
        args.push("-idirafter".into());
        args.push(dir.into());
    }

    for name in ["steer", "steer_bound", "verdict", "send", "tap"] {
        let source = bpf_dir.join(name).with_extension("bpf.c");
        println!("cargo:rerun-if-changed={}", source.display());
        let mut builder = SkeletonBuilder::new();
        // The skeleton is read by rustc alone; a path that does not exist makes it skip formatting, so that a
        // toolchain without rustfmt builds too.
        builder
            .source(&source)
            .clang_args(&args)
            .rustfmt("/nonexistent/rustfmt");
        if let Some(clang) = env::var_os("CLANG") {
            builder.clang(clang);
        }
        let skeleton = out_dir.join(name).with_extension("skel.rs");
        if let Err(error) = builder.build_and_generate(skeleton) {
            panic!(
                "cannot build {}: {error:?}\nhint: apt install clang linux-libc-dev",
                source.display()
            );
        }
    }
}

/// Where `asm/types.h` lives for this target when it is not directly in `/usr/include`.
///
/// With `-target bpf` clang does not search the multiarch directory of Debian and its like.
fn arch_include_dir() -> Option<PathBuf> {
    if Path::new("/usr/include/asm/types.h").exists() {
        return None;
    }
    let arch = env::var("CARGO_CFG_TARGET_ARCH").ok()?;
    let triplet = match arch.as_str() {
        "powerpc64" => "powerpc64le-linux-gnu".to_owned(),
        "arm" => "arm-linux-gnueabihf".to_owned(),
        other => format!("{other}-linux-gnu"),
    };
    let dir = Path::new("/usr/include").join(triplet);
    dir.join("asm/types.h").exists().then_some(dir)
}
