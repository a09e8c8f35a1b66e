# What the test of the package does as root of a system that is thrown away: installs it, runs what it installed, and
# removes it. Arguments: the package, an interface with its other end elsewhere. Each step is named on stdout before its
# output.
set -eu
package="$1" interface="$2"
step() { echo "==== $1"; }
files() {
    find /etc /usr /var /run /opt /sys/fs/bpf -xdev ! -path '/var/lib/dpkg/*' ! -path '/var/cache/*' ! -path '/var/log/*' \
        ! -path '/etc/group*' ! -path '/etc/gshadow*' ! -path '/etc/passwd*' ! -path '/etc/shadow*' ! -path '/etc/.pwd.lock' \
        ! -path '/run/systemd*' | sort
}
# What this machine itself has of it is no concern of the test.
rm -rf /etc/vhost-af-xdp
files >/tmp/before
step install
DEBIAN_FRONTEND=noninteractive dpkg -i "$package"
files >/tmp/installed
getent group vhost-af-xdp
ls -l /etc/systemd/system/sockets.target.wants/
step verify
systemd-analyze verify /usr/lib/systemd/system/vhost-af-xdp-steward.socket \
    /usr/lib/systemd/system/vhost-af-xdp-steward.service vhost-af-xdp@vm1.service \
    vhost-af-xdp-network@lan.service 2>&1 | grep vhost-af-xdp || true
step run
vhost-af-xdp --version
vhost-af-xdp check "$interface" --json
# Both of its rules, for this interface.
sed -i "s/^#\(\[\[allow\]\]\|[a-z]* = \)/\1/; s/eth[01]/$interface/" /etc/vhost-af-xdp/steward.toml
vhost-af-xdp-steward --check
vhost-af-xdp-steward 2>/tmp/steward.log &
steward=$!
tries=0
until [ -S /run/vhost-af-xdp/steward.sock ] || [ $tries = 100 ]; do sleep 0.1; tries=$((tries + 1)); done
chmod 1777 /tmp
setpriv --reuid=nobody --regid=nogroup --groups="$(getent group vhost-af-xdp | cut -d: -f3)" \
    vhost-af-xdp serve --steward /run/vhost-af-xdp/steward.sock --socket-path /tmp/vm1.sock --ifname "$interface" \
    --control /tmp/control.sock 2>/tmp/serve.log &
daemon=$!
tries=0
until grep -q ready /tmp/serve.log || [ $tries = 150 ]; do sleep 0.1; tries=$((tries + 1)); done
step status
vhost-af-xdp status --control /tmp/control.sock --json || cat /tmp/serve.log /tmp/steward.log
step leases
vhost-af-xdp queues "$interface" --json --control /tmp/control.sock
kill "$daemon"
wait "$daemon" || echo "the daemon ended with $?"
step network
groupadd --system vm1
groupadd --system vm2
# The example for this interface, and the command of the unit with what the unit gives it.
sed "s/eth0/$interface/; s/queues = 4/queues = 2/" /usr/share/doc/vhost-af-xdp/examples/lan.toml >/etc/vhost-af-xdp/lan.toml
install -d -m 711 -o nobody -g nogroup /run/vhost-af-xdp-lan
vhost-af-xdp serve --config /etc/vhost-af-xdp/lan.toml --check
command="$(sed -n '/^ExecStart=/,/[^\\]$/{s/^ExecStart=//;s/\\$//;s/%i/lan/g;p}' \
    /usr/lib/systemd/system/vhost-af-xdp-network@.service | tr -d '\n')"
# shellcheck disable=SC2086 # it is words
setpriv --reuid=nobody --regid=nogroup --groups="$(getent group vhost-af-xdp | cut -d: -f3)" \
    --inh-caps=+chown --ambient-caps=+chown $command 2>/tmp/network.log &
daemon=$!
tries=0
until [ "$(grep -c ready /tmp/network.log)" = 2 ] || [ $tries = 150 ]; do sleep 0.1; tries=$((tries + 1)); done
step "network status"
vhost-af-xdp status --control /run/vhost-af-xdp-lan/control.sock --json || cat /tmp/network.log /tmp/steward.log
step "network sockets"
stat -c '%n %G %a' /run/vhost-af-xdp-lan/*.sock
# What a steward leaves that was killed: who removes the package takes it back.
kill -KILL "$steward"
step pinned
find /sys/fs/bpf -type f | head -n 3
kill "$daemon"
wait "$daemon" || echo "the daemon ended with $?"
rm -r /etc/vhost-af-xdp/lan.toml /run/vhost-af-xdp-lan
step remove
dpkg -r vhost-af-xdp
files >/tmp/removed
step left
comm -13 /tmp/before /tmp/removed
step purge
dpkg -P vhost-af-xdp
files >/tmp/purged
step "left after purge"
comm -13 /tmp/before /tmp/purged
step missing
comm -23 /tmp/before /tmp/purged
step end
