# shellcheck shell=bash
# A QEMU that tells a vhost-user back end which queue its guest resets: no released one that we looked at does.
#
# Theory of operation. A copy of Debian's is made for one run, in a directory that is thrown away, and two bytes of it
# are changed (tell_resets.py). Its libraries and firmware are those of the cache. Needs common.sh and debian.sh.

# telling_qemu SUITE DIRECTORY: sets GUEST_QEMU (see guest.sh) to a suite's QEMU, of which a changed copy is in the
# directory.
telling_qemu() {
    local root
    debian_qemu "$1"
    root="$(dirname "$GUEST_QEMU")"
    python3 "$REPO/scripts/lib/tell_resets.py" "$root/program" "$2/program" || fail "that needs another QEMU (see above)"
    sed "s:^here=.*:here='$root':; s:[$]here/program:$2/program:" "$GUEST_QEMU" >"$2/telling-qemu"
    chmod 755 "$2/telling-qemu"
    GUEST_QEMU="$2/telling-qemu"
}
