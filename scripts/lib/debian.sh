# shellcheck shell=bash
# Packages of other Debian suites than this machine's, fetched and unpacked without installing them.
#
# Theory of operation. apt is asked with sources, lists and caches of its own, in a directory that is thrown away, so
# that nothing of this machine's changes; its proxies and the like hold. The mirror is the one that this machine's
# sources name, the signatures are checked with Debian's keyring. A mirror that lags serves sid's lists after their
# date: that is let pass, as what comes from there runs in guests only. Needs common.sh and install.sh.

readonly DEBIAN_KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
PACKAGES_DEBIAN=(debian-archive-keyring)

# The address of Debian's main archive, as this machine's sources have it; of an Ubuntu, which has none, Debian's own.
debian_mirror() {
    local mirror
    if grep -qs '^ID=ubuntu' /etc/os-release; then
        echo http://deb.debian.org/debian
        return
    fi
    # shellcheck disable=SC2016 # apt's own variables
    mirror="$(apt-get indextargets --format '$(REPO_URI) $(COMPONENT) $(RELEASE)' 'Created-By: Packages' |
        awk '$2 == "main" && $3 ~ /^(oldstable|stable|testing|unstable|bookworm|trixie|forky|sid)$/ { print $1; exit }')"
    [[ -n $mirror ]] || fail "apt's sources name no Debian archive; add Debian's main archive to /etc/apt/sources.list"
    printf '%s\n' "$mirror"
}

# debian_fetch SUITE DIRECTORY PACKAGE PATTERN: downloads into the directory what the package comes to in a suite:
# those of it and of its dependencies whose names match the pattern.
debian_fetch() {
    local suite="$1" directory="$2" mirror apt packages options=("signed-by=$DEBIAN_KEYRING")
    install_packages "${PACKAGES_DEBIAN[@]}"
    mirror="$(debian_mirror)"
    [[ $suite != sid ]] || options+=(check-valid-until=no)
    apt="$(mktemp -d "$directory/apt.XXXXXX")"
    on_exit rm -rf "$apt"
    mkdir -p "$apt"/{state/lists,cache/archives}/partial
    : >"$apt/status"
    echo "deb [${options[*]}] $mirror $suite main" >"$apt/sources.list"
    local own=(-o "Dir::Etc::SourceList=$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::Etc::Preferences=/dev/null
        -o Dir::Etc::PreferencesParts=/dev/null -o "Dir::State=$apt/state" -o "Dir::State::Status=$apt/status" -o "Dir::Cache=$apt/cache"
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::GzipIndexes=true -o APT::Install-Recommends=false)
    apt_quietly "${own[@]}" update || fail "the package lists of Debian $suite cannot be had from $mirror (see above); check the network"
    mapfile -t packages < <(apt-get "${own[@]}" -s install "$3" 2>/dev/null | sed -n 's/^Inst \([^ ]*\) .*/\1/p' | grep -E -- "$4")
    ((${#packages[@]})) || fail "Debian $suite has no $3 that can be installed; its mirror may be out of step: try again later"
    (cd "$directory" && apt_quietly "${own[@]}" download "${packages[@]}") ||
        fail "packages of Debian $suite cannot be downloaded from $mirror (see above); check the network"
    rm -rf "$apt"
}

# debian_newest NAME: the newest directory of the cache whose name begins so; nothing if there is none.
debian_newest() {
    find "$CACHE/" -maxdepth 1 -name "$1*" 2>/dev/null | sort -V | tail -n 1
}

# debian_kernel SUITE: sets GUEST_KERNEL (see guest.sh) to a suite's, which is fetched if it is not in the cache. The
# ordinary kernel, with drivers of NICs, not the cloud's.
debian_kernel() {
    local directory package
    GUEST_KERNEL="$(debian_newest "linux-$1-")"
    [[ -z $GUEST_KERNEL ]] || return 0
    say "kernel of Debian $1: fetching it"
    directory="$(mktemp -d "$CACHE/fetch.XXXXXX")"
    on_exit rm -rf "$directory"
    debian_fetch "$1" "$directory" linux-image-amd64 '^linux-(image|binary|modules|base)-[0-9]'
    package="$(find "$directory" -name 'linux-image-[0-9]*.deb')"
    GUEST_KERNEL="$CACHE/linux-$1-$(dpkg-deb -f "$package" Version)"
    guest_unpack_kernel "$directory"/linux-*.deb
    rm -rf "$directory"
}

# debian_qemu SUITE: sets GUEST_QEMU to a program that runs a suite's QEMU with that suite's libraries; it is fetched
# if it is not in the cache.
debian_qemu() {
    local directory root file
    root="$(debian_newest "qemu-$1-")"
    if [[ -z $root ]]; then
        say "QEMU of Debian $1: fetching it"
        directory="$(mktemp -d "$CACHE/fetch.XXXXXX")"
        on_exit rm -rf "$directory"
        debian_fetch "$1" "$directory" qemu-system-x86 .
        for file in "$directory"/*.deb; do
            dpkg-deb -x "$file" "$directory/root"
        done
        debian_keep_qemu "$directory/root" "$directory/kept"
        root="$CACHE/qemu-$1-$(dpkg-deb -f "$directory"/qemu-system-x86_*.deb Version | tr -c '[:alnum:].\n' -)"
        mv -T "$directory/kept" "$root" 2>/dev/null || [[ -e $root/qemu-system-x86_64 ]]
        rm -rf "$directory"
    fi
    # shellcheck disable=SC2034 # for guest.sh
    GUEST_QEMU="$root/qemu-system-x86_64"
}

# debian_keep_qemu ROOT KEPT: makes a directory of what QEMU needs of a root, a quarter of it, and of a program that
# runs it. Its loadable modules, for displays and sound, are not among it.
debian_keep_qemu() {
    local loader="usr/lib64/ld-linux-x86-64.so.2" program="usr/bin/qemu-system-x86_64" libraries
    mapfile -t libraries < <("$1/$loader" --library-path "$1/usr/lib/x86_64-linux-gnu" --list "$1/$program" | grep -o "$1/usr/lib/[^ ]*")
    mkdir -p "$2/lib"
    cp -L "$1/$loader" "$2/loader"
    cp -L "${libraries[@]}" "$2/lib/"
    cp "$1/$program" "$2/program"
    cp -r "$1"/usr/share/{qemu,seabios} "$2/"
    cat >"$2/qemu-system-x86_64" <<'END'
#!/bin/sh
# QEMU of another Debian than this machine's, with its libraries.
here="$(dirname "$(realpath "$0")")"
exec "$here/loader" --library-path "$here/lib" "$here/program" -L "$here/qemu" -L "$here/seabios" "$@"
END
    chmod 755 "$2/qemu-system-x86_64"
}
