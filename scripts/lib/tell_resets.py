"""Makes a copy of QEMU 10.0.13 that tells a vhost-user back end which queue its guest resets: tell_resets.py PROGRAM COPY

Purpose: VIRTIO_F_RING_RESET is of use with vhost-user only where the VMM stops the vring and starts it again. QEMU has
all that it takes, and does it for tap devices alone: `virtio_net_queue_reset` and `virtio_net_queue_enable`
(hw/net/virtio-net.c) compare the type of the network device with NET_CLIENT_DRIVER_TAP before they call
`vhost_net_virtqueue_reset` and `vhost_net_virtqueue_restart`. So it is up to 11.1. A change that names vhost-user there
was posted in 2022 ("Support VIRTIO_F_RING_RESET for vhost-user in virtio pci-modern", qemu-devel). Here the same is done
to a copy of the program, for scripts/kernels: in these two comparisons the number for tap becomes the one for
vhost-user. It goes for a device with one queue pair: the index of further ones is another one in QEMU's own tables
(`vhost_user_get_vq_index`).

How: the machine code around each comparison, as it is in Debian's 10.0.13 for x86_64, must be there exactly once, with
the call of the function at the place where it is behind it; both functions are among the program's dynamic symbols. So
any other program is refused.
"""

import os
import struct
import sys

TAP, VHOST_USER = 3, 12  # NetClientDriver, qapi/net.json
# cmpl $imm8,(%rax)
COMPARE = "83 38"
# What is called, what is before the comparison and behind it, and how far behind its number the call is, in bytes.
PLACES = [
    ("vhost_net_virtqueue_reset", "49 8b 7c 24 20 48 8b 07", "74 55 be 01 00 00 00 e8", 95),
    ("vhost_net_virtqueue_restart", "49 8b 44 24 20 48 8b 00", "75 ad 89 da 4c 89 e6 48 89 ef e8", 10),
]


def fail(why):
    sys.exit(f"tell_resets.py: {sys.argv[1]}: {why}: this is for the QEMU 10.0.13 of Debian 13 (x86_64) only")


def sections(program):
    """Name of each section: (address, offset in the file, size)."""
    (table,) = struct.unpack_from("<Q", program, 0x28)
    size, count, names = struct.unpack_from("<HHH", program, 0x3A)
    entries = [struct.unpack_from("<IIQQQQ", program, table + at * size) for at in range(count)]
    strings = entries[names][4]
    return {text(program, strings + entry[0]): entry[3:6] for entry in entries}


def text(program, at):
    return program[at : program.index(b"\0", at)].decode()


def symbols(program, parts):
    """Name of each dynamic symbol: its address."""
    (_, table, size), (_, strings, _) = parts[".dynsym"], parts[".dynstr"]
    entries = (struct.unpack_from("<IBBHQQ", program, at) for at in range(table, table + size, 24))
    return {text(program, strings + entry[0]): entry[4] for entry in entries}


def number_of_comparison(code, before, behind):
    """Where in the code the number is that is compared with."""
    before = bytes.fromhex(before + COMPARE)
    around = before + bytes([TAP]) + bytes.fromhex(behind)
    if code.count(around) != 1:
        fail(f"{around.hex(' ')} is there {code.count(around)} times")
    return code.index(around) + len(before)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], "rb") as file:
        program = bytearray(file.read())
    if program[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", program, 0x12)[0] != 62:
        fail("no program for x86_64")
    parts = sections(program)
    address, offset, size = parts[".text"]
    code = bytes(program[offset : offset + size])
    known = symbols(program, parts)
    for function, before, behind, distance in PLACES:
        number = number_of_comparison(code, before, behind)
        call = number + 1 + distance
        opcode, relative = struct.unpack_from("<Bi", code, call)
        if opcode != 0xE8 or address + call + 5 + relative != known.get(function):
            fail(f"{function} is not called behind its comparison")
        program[offset + number] = VHOST_USER
    with open(sys.argv[2], "wb") as file:
        file.write(program)
    os.chmod(sys.argv[2], 0o755)


main()
