"""Examples that benchmarks run: built when they are first asked for, or named by the environment (OFFLOAD_COST_BIN for one
of a crate, TINY_VMM_BIN for one that is a package)."""

import json
import os
import shutil
import subprocess

from .process import Failed, NotHere, Process

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def program(name, package="testkit"):
    """Path of an example of a crate."""
    return named(name, lambda variable: build(name, package, variable))


def package_program(package):
    """Path of the program of an example that is a package of its own."""
    return named(package, lambda variable: cargo_build(["-p", package], package, variable))


def named(name, make):
    """What the environment names, or what is made now."""
    variable = f"{name.upper().replace('-', '_')}_BIN"
    if variable not in os.environ:
        os.environ[variable] = make(variable)
    return os.environ[variable]


def build(name, package, variable, features=None):
    """Builds an example of a crate, with these cargo features; its path."""
    words = ["-p", package, "--example", name, *(["--features", features] if features else [])]
    return cargo_build(words, os.path.join("examples", name), variable)


def cargo_build(words, path, variable):
    """Builds what these words tell cargo; the path of what came of it, which is `path` below the profile's directory."""
    cargo = shutil.which("cargo")
    if not cargo:
        raise NotHere(f"no cargo, and no {variable}")
    if subprocess.run([cargo, "build", "--quiet", "--release", *words], cwd=REPO, check=False).returncode:
        raise Failed(f"cargo build {' '.join(words)} failed")
    target = os.environ.get("CARGO_TARGET_DIR") or os.path.join(REPO, "target")
    return os.path.join(target, "release", path)


def sample(run, contender, argv, cpu=None, seconds=120):
    """What one prints: JSON. It is given up after so many seconds."""
    with Process(contender, argv, run.log_dir, cpu=cpu) as process:
        run.remember(process)
        process.wait(seconds)
        try:
            return json.loads(process.log())
        except ValueError as error:
            raise Failed(f"{contender} printed no JSON: {process.log_tail()}") from error
