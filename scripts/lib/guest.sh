# shellcheck shell=bash
# A real Linux guest under QEMU, small and quick to boot, driven from the host by commands.
#
# Theory of operation. The kernel is Debian's cloud kernel, taken out of its package without installing it; the
# initramfs is a static busybox, iperf3 and ethtool with their libraries, netcheck (netcheck.c), modules for virtio,
# VLANs and macvlan, and guest-init. Both are built once and kept in $CACHE, under names made from what they were built of. A
# guest lives in a state directory:
#     pid          number and start time of its QEMU        accel       kvm, tcg or uml
#     console.log  what the kernel said (ttyS0)              qemu.log    what QEMU said
#     shell.in, shell.out   pipes to guest-init's command shell (ttyS1); `lock` lets one command at a time through
#     qmp          socket where QEMU takes orders (QMP)
# KVM is used if a guest really comes up under it: /dev/kvm may be there and ordinary kernels may still not run (PVM,
# some nested clouds). So a guest without a NIC is booted once, given up after 8 seconds of silence on its console,
# and the outcome is remembered until the host boots again. Otherwise QEMU interprets (TCG): slower, and just as
# right. Another QEMU than Debian's is taken if GUEST_QEMU names its program, another kernel if GUEST_KERNEL_DEB names
# a file that is a Debian package of one; where a fault of QEMU 7.2 is gone, it is not worked around. With
# GUEST_ACCEL=uml the guest runs under User-mode Linux instead (uml.sh). Needs common.sh and install.sh.

# shellcheck source=scripts/lib/uml.sh
source "$REPO/scripts/lib/uml.sh"

readonly GUEST_SILENCE_S=8
readonly GUEST_BOOT_S=60
absolute_paths GUEST_QEMU GUEST_KERNEL_DEB
GUEST_QEMU="${GUEST_QEMU:-qemu-system-x86_64}"
# Set when it is first asked for.
GUEST_QEMU_VERSION=''
# Mitigations defend the guest's kernel from its programs, of which there are none, at a price under TCG.
# no_timer_check: where other work keeps an interpreted guest from its CPU, the kernel finds that its timer does not tick
# and gives up.
readonly GUEST_CMDLINE="console=ttyS0 panic=-1 mitigations=off nokaslr net.ifnames=0 no_timer_check"
# In the order in which they must be loaded.
# shellcheck disable=SC2034 # by name
readonly GUEST_MODULES=(
    drivers/virtio/virtio_ring drivers/virtio/virtio drivers/virtio/virtio_pci_legacy_dev
    drivers/virtio/virtio_pci_modern_dev drivers/virtio/virtio_pci net/core/failover drivers/net/net_failover
    drivers/net/virtio_net net/llc/llc net/802/stp net/802/garp net/802/mrp net/8021q/8021q drivers/net/macvlan
)

# ---- images ------------------------------------------------------------------------------------------------------

# The name of the newest package of a kernel for virtual machines: Debian's cloud kernel, e.g.
# linux-image-6.1.0-56-cloud-amd64, or Ubuntu's linux-image-6.8.0-31-generic; empty if apt knows none.
guest_kernel_package() {
    local name
    for name in linux-image-cloud-amd64 linux-image-virtual; do
        # It fails for what it does not know.
        { apt-cache depends "$name" 2>/dev/null || true; } | sed -n 's/^ *Depends: \(linux-image-.*\)/\1/p'
    done | head -n 1
}

# Sets GUEST_KERNEL to a directory with vmlinuz and modules/, fetching the package if it is not in the cache.
guest_kernel() {
    local package version directory
    [[ "$(uname -m)" == x86_64 ]] || fail "the guest needs an x86_64 host, not $(uname -m)"
    if [[ -n ${GUEST_KERNEL_DEB-} ]]; then
        [[ -r $GUEST_KERNEL_DEB ]] || fail "GUEST_KERNEL_DEB: '$GUEST_KERNEL_DEB' cannot be read; it is a linux-image package's path"
        # Their names differ, also where their versions do not (amd64, cloud-amd64).
        GUEST_KERNEL="$CACHE/given-$(dpkg-deb -f "$GUEST_KERNEL_DEB" Package)_$(dpkg-deb -f "$GUEST_KERNEL_DEB" Version)"
        [[ -e $GUEST_KERNEL ]] || guest_unpack_kernel "$GUEST_KERNEL_DEB"
        return 0
    fi
    package="$(guest_kernel_package)"
    if [[ -z $package ]]; then
        # A fresh system may have no package lists, and a cache filled earlier may do without them.
        GUEST_KERNEL="$(find "$CACHE" -maxdepth 1 -name 'kernel-*' 2>/dev/null | sort -V | tail -n 1)"
        [[ -z $GUEST_KERNEL ]] || return 0
        update_package_lists
        package="$(guest_kernel_package)"
        [[ -n $package ]] || fail "apt knows no linux-image-cloud-amd64 (Debian) or linux-image-virtual (Ubuntu); add the main archive to its sources"
    fi
    version="$(apt-cache policy "$package" | sed -n 's/^ *Candidate: //p')"
    GUEST_KERNEL="$CACHE/kernel-$version"
    [[ ! -e $GUEST_KERNEL ]] || return 0

    say "guest kernel: fetching $package $version"
    directory="$(mktemp -d "$CACHE/fetch.XXXXXX")"
    on_exit rm -rf "$directory"
    guest_download "$package" "$directory"
    # Ubuntu's modules are a package of their own.
    [[ $package != *-generic ]] || guest_download "${package/-image-/-modules-}" "$directory"
    guest_unpack_kernel "$directory"/*.deb
    rm -rf "$directory"
}

# Makes the directory GUEST_KERNEL of the packages that a kernel is divided into: guest_unpack_kernel FILE...
guest_unpack_kernel() {
    local directory file
    directory="$(mktemp -d "$CACHE/unpack.XXXXXX")"
    on_exit rm -rf "$directory"
    mkdir "$directory/tree" "$directory/kernel"
    for file in "$@"; do
        # What is needed of a few hundred MB; no package has all of it, so that tar complains.
        dpkg-deb --fsys-tarfile "$file" | tar -x -C "$directory/tree" --wildcards '*/vmlinuz*' '*/modules.builtin' \
            '*/kernel/net' '*/kernel/drivers/net' '*/kernel/drivers/virtio' '*/kernel/drivers/dca' '*/kernel/drivers/i2c' \
            '*/kernel/drivers/vhost' '*/kernel/lib/libcrc32c.ko*' '*/kernel/crypto/crc32c_generic.ko*' 2>/dev/null || true
    done
    # In /boot, /lib and /usr/lib, according to their ages.
    find "$directory/tree" -name 'vmlinuz*' -type f -exec mv {} "$directory/kernel/vmlinuz" \;
    find "$directory/tree" -name modules.builtin -exec mv {} "$directory/kernel/" \;
    find "$directory/tree" -path '*/lib/modules/*/kernel' -prune -exec mv {} "$directory/kernel/modules" \;
    [[ -e $directory/kernel/vmlinuz && -e $directory/kernel/modules ]] ||
        fail "$* has no kernel with modules; it has to be a linux-image package"
    # A rename, so that a half-made directory never passes for a kernel; of two that race the second uses the first one's.
    mv -T "$directory/kernel" "$GUEST_KERNEL" 2>/dev/null || [[ -e $GUEST_KERNEL/vmlinuz ]]
    rm -rf "$directory"
}

# guest_download PACKAGE DIRECTORY; package lists that are too old name files that are gone, hence the second try.
guest_download() {
    (cd "$2" && apt_quietly -o APT::Sandbox::User=root download "$1" 2>/dev/null) && return 0
    update_package_lists
    (cd "$2" && apt_quietly -o APT::Sandbox::User=root download "$1") ||
        fail "could not download $1; check the network"
}

# The programs of Debian's that the guest has, beside busybox, and their libraries, a line each. glibc loads libgcc_s
# by itself, when a thread is cancelled, and aborts where there is none; iperf3 has had threads since 3.16.
guest_programs() {
    local name program
    for name in "$@"; do
        program="$(command -v "$name")" || fail "there is no program $name here"
        echo "$program"
        ldd "$program" | grep -o '/[^ ]*'
    done
    realpath "$(gcc -print-file-name=libgcc_s.so.1)"
}

# Copies a program or a library, unless it lies there already, and the libraries that it needs, into a root: guest_pack
# FILE ROOT. What a path is a link to stays a link: a driver of DPDK's has several names, by which it would be loaded as
# often if they were files.
guest_pack() {
    local path file
    while read -r path; do
        [[ $path != "$2"/* ]] || continue
        file="$(realpath "$path")"
        [[ -e $2$file ]] || install -D "$file" "$2$file"
        [[ $file == "$path" ]] || { mkdir -p "$2$(dirname "$path")" && ln -sf "$file" "$2$path"; }
    done < <(echo "$1"; ldd "$1" 2>/dev/null | grep -o '/[^ ]*')
}

# Sets NETCHECK to the program of netcheck.c, which runs on the host and in the guest, building it if its source has
# changed.
guest_netcheck() {
    local source="$REPO/scripts/lib/netcheck.c"
    NETCHECK="$CACHE/netcheck-$(sha256sum "$source" | cut -c 1-16)"
    [[ ! -e $NETCHECK ]] || return 0
    gcc -O2 -Wall -Wextra -static -s -o "$NETCHECK.$$" "$source" || fail "netcheck.c does not compile (see above)"
    mv "$NETCHECK.$$" "$NETCHECK"
}

# Adds a module of the kernel, unless that has it built in: guest_add_module PATH DIRECTORY
guest_add_module() {
    local file="$GUEST_KERNEL/modules/$1.ko" name="${1##*/}.ko"
    if [[ -e $file ]]; then
        cp "$file" "$2/$name"
    elif [[ -e $file.xz ]]; then
        xz -dc "$file.xz" >"$2/$name"
    elif [[ -e $file.zst ]]; then
        zstd -qdc "$file.zst" >"$2/$name"
    else
        grep -q "/$1.ko\$" "$GUEST_KERNEL/modules.builtin" || fail "the guest's kernel has no module $1 ($GUEST_KERNEL)"
        return 0
    fi
    echo "$name" >>"$2/order"
}

# Sets GUEST_INITRAMFS, building it if what goes into it has changed: guest_initramfs MODULES PROGRAM..., the name of
# an array like GUEST_MODULES, and programs of the host's that are needed beside busybox's.
guest_initramfs() {
    local -n modules="$1"
    local init="$REPO/scripts/lib/guest-init" key root file module
    guest_netcheck
    key="$({
        basename "$GUEST_KERNEL"
        printf '%s\n' "${modules[@]}"
        guest_programs "${@:2}" | sort -u | xargs cat /bin/busybox "$init"
        basename "$NETCHECK"
    } | sha256sum | cut -c 1-16)"
    GUEST_INITRAMFS="$CACHE/initramfs-$key"
    [[ ! -e $GUEST_INITRAMFS ]] || return 0

    say "guest initramfs: building"
    root="$(mktemp -d "$CACHE/initramfs-root.XXXXXX")"
    on_exit rm -rf "$root" "$root.cpio"
    mkdir -p "$root/bin" "$root/lib/modules"
    cp /bin/busybox "$root/bin/busybox"
    while read -r file; do
        install -D "$file" "$root$file"
    done < <(guest_programs "${@:2}" | sort -u)
    install -D "$NETCHECK" "$root/usr/bin/netcheck"
    for module in "${modules[@]}"; do
        guest_add_module "$module" "$root/lib/modules"
    done
    install -m 755 "$init" "$root/init"
    # Not compressed: an interpreted guest is slower at inflating than QEMU is at copying.
    (cd "$root" && find . | sort | cpio -o -H newc --owner 0:0 --quiet) >"$root.cpio"
    mv "$root.cpio" "$GUEST_INITRAMFS"
    rm -rf "$root"
}

# guest_keep_prepared VARIABLE: exports what guest_prepare or uml_prepare has set, so that scripts that this one starts
# need not find out again what is installed, which takes seconds of CPU time.
guest_keep_prepared() {
    export "$1=$GUEST_KERNEL|$GUEST_INITRAMFS|$NETCHECK"
}

# guest_take_prepared VARIABLE: sets what guest_keep_prepared exported; fails if there is nothing.
guest_take_prepared() {
    IFS='|' read -r GUEST_KERNEL GUEST_INITRAMFS NETCHECK <<<"${!1-}"
    [[ -n $NETCHECK ]]
}

# Installs and builds all that guest_boot needs.
guest_prepare() {
    ! guest_take_prepared GUEST_PREPARED || return 0
    install_packages "${PACKAGES_GUEST[@]}"
    mkdir -p "$CACHE"
    guest_kernel
    guest_initramfs GUEST_MODULES iperf3 ethtool
}

# ---- QEMU --------------------------------------------------------------------------------------------------------

# Whether QEMU is of that version or a later one: guest_qemu_is_since MAJOR.MINOR
guest_qemu_is_since() {
    if [[ -z $GUEST_QEMU_VERSION ]]; then
        GUEST_QEMU_VERSION="$("$GUEST_QEMU" --version | sed -n 's/^QEMU emulator version \([0-9.]*\).*/\1/p')"
        [[ -n $GUEST_QEMU_VERSION ]] || fail "'$GUEST_QEMU' is no QEMU; GUEST_QEMU names the program"
    fi
    [[ "$(printf '%s\n' "$1" "$GUEST_QEMU_VERSION" | sort -V | head -n 1)" == "$1" ]]
}

# Makes the state directory of a guest that is about to start: guest_new_state STATE
guest_new_state() {
    mkdir -p "$1"
    rm -f "$1"/{pid,accel,console.log,qemu.log,qmp,shell.in,shell.out}
    mkfifo "$1/shell.in" "$1/shell.out"
    : >"$1/console.log"
}

# guest_start STATE ACCEL CMDLINE QEMU_ARG...: starts QEMU in the background and returns at once. The arguments say
# what memory there is.
guest_start() {
    # TCG interprets `rep movsb`, which the kernel prefers for copying where there is ERMS, a byte at a time: without
    # it a guest moves twice as much TCP. Linux 6.1 does not come up on a CPU with FSRM and without ERMS, as QEMU 10's
    # would be.
    local state="$1" accel="$2" cmdline="$3" cpu=max,-erms,-fsrm
    shift 3
    guest_new_state "$state"
    [[ $accel != kvm ]] || cpu=host
    # QEMU counts instructions in one thread only.
    [[ $accel != tcg || " $* " == *" -icount "* ]] || accel=tcg,thread=multi
    "$GUEST_QEMU" -nodefaults -no-user-config -display none -no-reboot \
        -machine q35 -accel "$accel" -cpu "$cpu" \
        -kernel "$GUEST_KERNEL/vmlinuz" -initrd "$GUEST_INITRAMFS" \
        -append "$GUEST_CMDLINE $cmdline" \
        -serial "file:$state/console.log" \
        -chardev "pipe,id=shell,path=$state/shell" -serial chardev:shell \
        -qmp "unix:$state/qmp,server=on,wait=off" \
        "$@" </dev/null >"$state/qemu.log" 2>&1 &
    local pid=$!
    disown "$pid"
    process_identity "$pid" >"$state/pid"
    echo "${accel%%,*}" >"$state/accel"
}

# guest_alive STATE
guest_alive() {
    process_alive "$(cat "$1/pid" 2>/dev/null)"
}

# guest_await_ready STATE SECONDS [SILENCE_SECONDS]: until the guest takes commands; fails when QEMU ends, the time is
# over, or the console said nothing for that long.
guest_await_ready() {
    local console="$1/console.log" limit=$((SECONDS + $2)) silence="${3:-$2}" heard=$SECONDS size=0 now
    until grep -aq '@ready' "$console"; do
        guest_alive "$1" && ((SECONDS < limit && SECONDS - heard <= silence)) || return 1
        now="$(stat -c %s "$console")"
        ((now == size)) || heard=$SECONDS
        size=$now
        sleep 0.2
    done
}

# Whether QEMU has made a socket, or is gone: guest_listens_or_died STATE SOCKET
guest_listens_or_died() {
    [[ -S $2 ]] || ! guest_alive "$1"
}

# Whether QEMU has made its control socket, or is gone: guest_takes_orders_or_died STATE
guest_takes_orders_or_died() {
    [[ -S $1/qmp ]] || ! guest_alive "$1"
}

# Why a guest did not come up, in what it left behind: guest_last_words STATE
guest_last_words() {
    local log
    for log in qemu.log console.log; do
        if [[ -s $1/$log ]]; then
            tr -d '\r' <"$1/$log" | grep -av '^$' | tail -n 2 | paste -sd '|'
            return 0
        fi
    done
    echo "nothing on its console"
}

# Sets GUEST_ACCEL to kvm or tcg: as the environment says, as remembered, or as found out by a trial.
guest_choose_accel() {
    local remembered="$CACHE/accel" boot_id state verdict
    case "${GUEST_ACCEL:-auto}" in
        kvm | tcg) return 0 ;;
        auto) ;;
        *) fail "accelerator '$GUEST_ACCEL' is none of auto, kvm, tcg and uml" ;;
    esac
    boot_id="$(cat /proc/sys/kernel/random/boot_id)"
    if [[ "$(head -n 1 "$remembered" 2>/dev/null)" == "$boot_id" ]]; then
        GUEST_ACCEL="$(tail -n 1 "$remembered")"
        return 0
    fi
    if [[ ! -w /dev/kvm ]]; then
        GUEST_ACCEL=tcg
        say "guest: no /dev/kvm here, so QEMU interprets it (TCG)"
        return 0
    fi
    say "guest: trying KVM"
    state="$(mktemp -d "$CACHE/trial.XXXXXX")"
    on_exit rm -rf "$state"
    on_exit guest_stop "$state"
    guest_start "$state" kvm '' -machine memory-backend=ram -object memory-backend-memfd,id=ram,size=256M,share=on -m 256M
    if guest_await_ready "$state" 30 "$GUEST_SILENCE_S"; then
        GUEST_ACCEL=kvm verdict="guests run under KVM"
    else
        GUEST_ACCEL=tcg verdict="no guest comes up under KVM here ($(guest_last_words "$state")), so QEMU interprets it (TCG)"
    fi
    guest_stop "$state"
    rm -rf "$state"
    say "guest: $verdict"
    printf '%s\n%s\n' "$boot_id" "$GUEST_ACCEL" >"$remembered"
}

# guest_boot STATE NETDEV [mac=M] [ip=A/P] [mtu=N] [queues=N] [ring=N] [packed=1] [mem=MIB] [hotplug=MIB] [cpus=N]
# [hugepages=1] [intx=1] [migratable=1] [incoming=1] [group=G] [reconnect=MS]: boots a guest and waits until it
# answers; or, with incoming=1, makes a QEMU that waits for a guest from elsewhere, which it will not run before it is
# told `cont`, and returns when it takes orders. NETDEV is what follows -netdev, without its id, or `vhost-user:PATH`
# for a socket where a back end listens (QEMU connects again when that is restarted), or `vhost-user-server:PATH` for
# one where QEMU listens, to which processes of the group G may connect.
guest_boot() {
    local state="$1" netdev="$2" mac=52:54:00:12:34:56 ip='' mtu='' queues=1 ring=1024 packed='' mem=512
    local hotplug='' cpus='' hugepages='' intx='' migratable='' incoming='' group='' reconnect=1000 socket='' device=''
    local setting
    for setting in "${@:3}"; do
        case "$setting" in
            mac=* | ip=* | mtu=* | queues=* | ring=* | packed=* | mem=* | hotplug=* | cpus=* | hugepages=* | intx=* | migratable=* | incoming=* | group=* | reconnect=*) local "$setting" ;;
            *) fail "guest_boot: unknown setting '$setting'" ;;
        esac
    done
    ! guest_alive "$state" || fail "a guest of $state is running already; end it first: scripts/guest stop --dir $state"
    if [[ ${GUEST_ACCEL-} == uml ]]; then
        case "$netdev" in
            vhost-user:*) device="virtio_uml.device=${netdev#*:}:1" ;;
            transport=*) device="vec0:$netdev" ;;
            *) fail "a UML guest needs a back end that listens (--socket), or a transport of its own (--netdev transport=...)" ;;
        esac
        for setting in "${@:3}"; do
            case "$setting" in
                queues=1 | ip=* | mtu=* | mem=* | group=*) ;;
                *) fail "a UML guest takes no '--${setting%%=*}'; it has one queue pair, and the back end's MAC address" ;;
            esac
        done
        uml_prepare
        say "guest: booting under uml"
        uml_start "$state" "$device" "$mem" ${ip:+"guest.ip=$ip"} ${mtu:+"guest.mtu=$mtu"}
        guest_await_booted "$state"
        return 0
    fi
    guest_prepare
    guest_choose_accel

    local kib=$((mem * 1024))
    # QEMU 7.2 loses pages that an interpreted guest writes while it migrates, where memory is a multiple of 256 KiB:
    # it clears their dirty bits 64 at a time and leaves the vCPU's TLB as it was
    # (cpu_physical_memory_sync_dirty_bitmap in include/exec/ram_addr.h). 10.2.2 does not lose any.
    [[ -z $migratable$incoming || $GUEST_ACCEL != tcg ]] || guest_qemu_is_since 10.2 || kib=$((kib + 8))
    local memory="memory-backend-memfd,id=ram,size=${kib}K,share=on"
    [[ -z $hugepages ]] || memory+=",hugetlb=on,hugetlbsize=2M"
    local args=(-machine memory-backend=ram -object "$memory" -m "${kib}K${hotplug:+,slots=8,maxmem=$((mem + hotplug))M}" -smp "${cpus:-$queues}")
    case "$netdev" in
        vhost-user:*)
            local again="reconnect-ms=$reconnect"
            guest_qemu_is_since 9.2 || again="reconnect=$(((reconnect + 999) / 1000))"
            args+=(-chardev "socket,id=backend,path=${netdev#*:},$again")
            ;;
        vhost-user-server:*)
            socket="${netdev#*:}"
            rm -f "$socket"
            args+=(-chardev "socket,id=backend,path=$socket,server=on,wait=off")
            ;;
    esac
    case "$netdev" in
        vhost-user*) netdev="vhost-user,chardev=backend,queues=$queues" ;;
    esac
    device="virtio-net-pci,netdev=net0,mac=$mac,disable-legacy=on,rx_queue_size=$ring,romfile="
    # QEMU allows longer transmit rings with vhost-user only.
    [[ $netdev != vhost-user* ]] || device+=",tx_queue_size=$ring"
    ((queues == 1)) || device+=",mq=on"
    [[ -z $packed ]] || device+=",packed=on"
    if [[ -n $intx ]] || { [[ $GUEST_ACCEL == tcg && $netdev == vhost-user* ]] && ! guest_qemu_is_since 10.2; }; then
        # Debian 12's QEMU (7.2.22) crashes when a vhost-user device masks an MSI-X vector without KVM: it releases an
        # irqfd that was never made (kvm_virtio_pci_irqfd_release in hw/virtio/virtio-pci.c); 10.2.2 does not. So the
        # guest gets a plain PCI interrupt.
        device+=",vectors=0"
    elif ((queues > 1)); then
        device+=",vectors=$((2 * queues + 2))"
    fi
    args+=(-netdev "$netdev,id=net0" -device "$device")
    [[ -z $incoming ]] || args+=(-incoming defer -S)

    say "guest: booting under $GUEST_ACCEL"
    guest_start "$state" "$GUEST_ACCEL" "${ip:+guest.ip=$ip} ${mtu:+guest.mtu=$mtu}" "${args[@]}"
    if [[ -n $group && -n $socket ]]; then
        # QEMU waits there for the back end before it boots the guest.
        wait_until 10 guest_listens_or_died "$state" "$socket"
        chgrp "$group" "$socket" && chmod g+w "$socket"
    fi
    if [[ -n $incoming ]]; then
        wait_until 10 guest_takes_orders_or_died "$state" && guest_alive "$state" && return 0
        guest_give_up "$state"
    fi
    guest_await_booted "$state"
}

# Waits until a guest takes commands: guest_await_booted STATE
guest_await_booted() {
    guest_await_ready "$1" "$GUEST_BOOT_S" || guest_give_up "$1"
}

# Ends a guest that did not come up, and fails: guest_give_up STATE
guest_give_up() {
    local what="did not answer within $GUEST_BOOT_S s" words
    words="$(guest_last_words "$1")"
    guest_alive "$1" || what="ended before it answered"
    guest_stop "$1"
    fail "the guest $what: $words"
}

# guest_run STATE SECONDS COMMAND: runs a shell command in the guest, prints what it prints, returns its status. A
# command that takes longer is ended by SIGTERM (status 143); a guest that does not answer at all gives status 124.
guest_run() {
    local state="$1" seconds="$2" id="$$-$RANDOM$RANDOM" code
    code="$(base64 -w 0 <<<"$3")"
    # What does not fit the guest's serial input buffer would be lost on the way.
    ((${#code} < 3500)) || fail "the command is too long for the guest's serial line (${#code} of 3500 base64 characters)"
    guest_alive "$state" || fail "no guest is running in $state; boot one: scripts/guest boot --dir $state …"
    local lock hold in out reply reader line begun='' held='' status=124
    exec {lock}>"$state/lock"
    flock "$lock"
    # Opening a pipe for both directions never blocks; what stays open for the output only reads, so that the end of
    # QEMU is its end.
    exec {in}<>"$state/shell.in" {hold}<>"$state/shell.out"
    exec {out}<"$state/shell.out" {hold}>&-
    # The time limit is that of `timeout`, as bash may crash when a signal meets `read -t`.
    exec {reply}< <(exec timeout $((seconds + 5)) cat <&"$out")
    reader=$!
    # The empty line ends whatever a guest that was moved meanwhile took for the beginning of one.
    printf '\n%s %s %s\n' "$id" "$seconds" "$code" >&"$in"
    while IFS= read -r -u "$reply" line; do
        if [[ -z $begun ]]; then
            [[ $line != "@begin $id" ]] || begun=1
        elif [[ $line == "@end $id "* ]]; then
            # One line is held back: the last one before `@end` is guest-init's own if it is empty.
            [[ -z ${held#?} ]] || printf '%s\n' "${held#?}"
            status="${line##* }"
            break
        else
            [[ -z $held ]] || printf '%s\n' "${held#?}"
            held="+$line"
        fi
    done
    # All of its group: should `timeout` not have run since it started `cat`, it would end and leave that behind, with
    # the lock.
    kill -- "-$reader" 2>/dev/null || kill "$reader" 2>/dev/null || true
    wait "$reader" 2>/dev/null || true
    exec {in}>&- {out}<&- {reply}<&- {lock}>&-
    return "$status"
}

# guest_stop STATE: ends the guest as if its power had failed. The state directory stays, with its logs.
guest_stop() {
    local identity
    identity="$(cat "$1/pid" 2>/dev/null)" || return 0
    if [[ "$(cat "$1/accel")" == uml ]]; then
        uml_stop "$1" "$identity"
    else
        end_process "$identity"
    fi
    rm -f "$1/pid"
}
