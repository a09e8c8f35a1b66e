"""Between a guest under User-mode Linux and a back end of DPDK: hides that there is a control queue.

DPDK offers one, which nobody of its serves: QEMU does, in front of it. UML passes on all queues, and its guest would wait for
the first answer forever. Messages of vhost-user pass through here, which a guest sends when it starts; rings and notifications do not.
"""

import os
import socket
import struct
import threading

HEADER = struct.Struct("<III")
GET_FEATURES = 1
FDS_MAX = 8
# VIRTIO_NET_F_: CTRL_GUEST_OFFLOADS, CTRL_VQ, CTRL_RX, CTRL_VLAN, CTRL_RX_EXTRA, GUEST_ANNOUNCE, MQ, CTRL_MAC_ADDR, HASH_REPORT, RSS.
HIDDEN = sum(1 << bit for bit in (2, *range(17, 24), 34, 57, 60))


class Relay:
    """Sockets at two paths, for one guest and for its back end; for as long as the `with` lasts."""

    def __init__(self, guest_path, back_end_path):
        self.paths = (guest_path, back_end_path)
        self.sockets = []

    def __enter__(self):
        listeners = [self._keep(socket.socket(socket.AF_UNIX)) for _ in self.paths]
        for listener, path in zip(listeners, self.paths):
            listener.bind(path)
            listener.listen(1)
        threading.Thread(target=self._serve, args=listeners, daemon=True).start()
        return self

    def __exit__(self, *_):
        for each in self.sockets:
            # Ends who waits there, which closing does not.
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()

    def _keep(self, made):
        self.sockets.append(made)
        return made

    def _serve(self, *listeners):
        try:
            guest, back_end = (self._keep(listener.accept()[0]) for listener in listeners)
        except OSError:
            return
        threading.Thread(target=pump, args=(back_end, guest), daemon=True).start()
        pump(guest, back_end)


def pump(source, target):
    """Passes messages on until one of the two ends."""
    try:
        while True:
            head, fds, _, _ = socket.recv_fds(source, HEADER.size, FDS_MAX)
            if not head:
                break
            head += exactly(source, HEADER.size - len(head))
            request, flags, size = HEADER.unpack(head)
            payload = exactly(source, size)
            if request == GET_FEATURES and size:
                payload = struct.pack("<Q", struct.unpack("<Q", payload)[0] & ~HIDDEN)
            socket.send_fds(target, [HEADER.pack(request, flags, size) + payload], fds)
            for fd in fds:
                os.close(fd)
    except OSError:
        pass
    # So that the other one learns of it.
    try:
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def exactly(source, count):
    """So many bytes."""
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise OSError("the connection ended in a message")
        data += more
    return data
