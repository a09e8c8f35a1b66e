# shellcheck shell=bash
# The NIC of tests/nic, built for a Debian kernel that is not this machine's.
#
# Theory of operation. The kernel's headers and the programs that build modules are packages of its suite, unpacked into
# the cache once. Those programs need that suite's C library, and so are run by its loader. The compiler is this
# machine's: it may be older than the kernel's, which for modules costs one option that it does not know and some hints
# for sanitizers. Types of the kernel are not told to BPF (no pahole here). The module is kept under a name made from
# its source and its kernel; it is not signed, which taints the guest's kernel and no more. Needs common.sh, install.sh,
# guest.sh and debian.sh.

readonly NIC_SOURCE="$REPO/tests/nic"
# What nic_module sets.
# shellcheck disable=SC2034 # for who uses it
NIC_MODULE='' NIC_REASON=''
# What builds modules, of its suite's packages: under which name, and what is run then. Two of these names are programs
# that only choose one of the others.
readonly NIC_TOOLS=("scripts/basic/fixdep fixdep.program" "scripts/mod/modpost modpost.real-lsb-64"
    "tools/objtool/objtool objtool.real-x86")

# nic_headers SUITE: sets NIC_HEADERS to a directory with the headers of GUEST_KERNEL, which are fetched if they are not
# in the cache. Fails with NIC_REASON set if the suite has those of another kernel only.
nic_headers() {
    local version directory file there
    version="${GUEST_KERNEL##*/linux-"$1"-}"
    NIC_HEADERS="$CACHE/headers-$1-$version"
    [[ ! -e $NIC_HEADERS ]] || return 0
    say "headers of Debian $1's kernel: fetching them"
    directory="$(mktemp -d "$CACHE/fetch.XXXXXX")"
    on_exit rm -rf "$directory"
    debian_fetch "$1" "$directory" linux-headers-amd64 \
        '^(linux-(headers|kbuild)-[0-9].*|libc6|libelf1t64|libzstd1|zlib1g)$'
    file="$(find "$directory" -name 'linux-headers-*-common_*.deb')"
    there="$(dpkg-deb -f "$file" Version)"
    if [[ $there != "$version" ]]; then
        # shellcheck disable=SC2034 # for who uses it
        NIC_REASON="Debian $1 has headers of $there only, and the cache has the kernel $version (--update fetches both)"
        rm -rf "$directory"
        return 1
    fi
    for file in "$directory"/*.deb; do
        dpkg-deb -x "$file" "$directory/root"
    done
    nic_keep_headers "$directory/root" "$directory/kept"
    mv -T "$directory/kept" "$NIC_HEADERS" 2>/dev/null || [[ -e $NIC_HEADERS/src/config ]]
    rm -rf "$directory"
}

# nic_keep_headers ROOT KEPT: makes a directory of what building a module needs of a root: src/, with links `config` and
# `common` to the two trees of headers, and lib/ with programs that run here.
nic_keep_headers() {
    local kbuild tool name program
    mkdir -p "$2/libraries"
    cp -L "$1"/usr/lib/x86_64-linux-gnu/{ld-linux-x86-64.so.2,libc.so.6,libelf.so.1,libzstd.so.1,libz.so.1} "$2/libraries/"
    mv "$1/usr/src" "$2/src"
    mv "$1/usr/lib" "$2/lib"
    kbuild="$(find "$2/lib" -maxdepth 1 -name 'linux-kbuild-*')"
    for tool in "${NIC_TOOLS[@]}"; do
        read -r name program <<<"$tool"
        mv "$kbuild/$name" "$kbuild/$name.program"
        cat >"$kbuild/$name" <<END
#!/bin/sh
# A program of another Debian than this machine's, with its libraries.
here="\$(dirname "\$(realpath "\$0")")"
libraries="\$(realpath "\$here/../../../../libraries")"
exec "\$libraries/ld-linux-x86-64.so.2" --library-path "\$libraries" "\$here/$program" "\$@"
END
        chmod 755 "$kbuild/$name"
    done
    ln -s "$(basename "$(find "$2/src" -maxdepth 1 -name 'linux-headers-*-common')")" "$2/src/common"
    ln -s "$(basename "$(find "$2/src" -maxdepth 1 -name 'linux-headers-*-amd64')")" "$2/src/config"
}

# nic_module SUITE: sets NIC_MODULE to the module, built for GUEST_KERNEL, building it if its source has changed. Fails
# with NIC_REASON set if it cannot be had. Needs TEMP_DIR.
nic_module() {
    local build config log
    nic_headers "$1" || return 1
    NIC_MODULE="$CACHE/nic-$({
        basename "$NIC_HEADERS"
        cat "$NIC_SOURCE"/*
    } | sha256sum | cut -c 1-16).ko"
    [[ ! -e $NIC_MODULE ]] || return 0
    install_packages "${PACKAGES_BUILD[@]}"
    say "the NIC's module: building"
    build="$TEMP_DIR/nic"
    mkdir "$build"
    cp "$NIC_SOURCE"/* "$build/"
    config="$NIC_HEADERS/src/config"
    log="$(make -C "$NIC_HEADERS/src/common" O="$config" KBUILD_OUTPUT="$config" M="$build" ARCH=x86 CROSS_COMPILE='' \
        CC=gcc CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT='' CONFIG_DEBUG_INFO_BTF_MODULES='' modules 2>&1)" ||
        fail "the module of tests/nic does not build: $log"
    strip --strip-debug -o "$NIC_MODULE.$$" "$build/rig_nic.ko"
    mv "$NIC_MODULE.$$" "$NIC_MODULE"
}
