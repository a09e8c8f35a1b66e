"""What docs/benchmarks.md shows of the whole system's figures: tables and a picture, made from the rows in a file."""

import json
import re
from pathlib import Path

from .whole import FRAMES, FRAMES_OF_HOST, GSO_BYTES, WHOLE

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs" / "benchmarks" / "whole.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "benchmarks" / "cost.svg"
TITLES = {
    "ours/one-guest": "**one guest**",
    "ours/one-guest/forced-copy": "– in copy mode",
    "ours/one-guest/polling": "– polling",
    "ours/one-guest/tap": "– in tap mode",
    "ours/network": "**network**",
    "ours/network/polling": "– polling",
    "ours/network/62-idle": "– 62 idle guests beside it",
    "ours/network/1000-idle": "– 1,000 idle guests beside it",
    "ours/network/tap": "– in tap mode",
    "ours/network/64-busy": "– 64 guests at once",
    "ours/network/64-busy/polling": "– 64 guests at once, polling",
    "ours/socket-alone": "– AF_XDP socket, no guest",
    "vhost-net/bridge": "vhost-net, bridge",
    "vhost-net/bridge/64-busy": "– 64 guests at once",
    "vhost-net/openvswitch": "vhost-net, OVS",
    "vhost-net/openvswitch/64-busy": "– 64 guests at once",
    "vhost-net/macvtap": "macvtap",
    "dpdk/vhost": "DPDK's vhost (polls)",
    "dpdk/openvswitch": "OVS, DPDK (polls)",
    "dpdk/openvswitch/64-busy": "– 64 guests at once",
    "host/alone": "no daemon",
    "host/native": "native mode",
    "host/skb": "skb mode",
    "host/tap": "tap mode",
}
# What of ours is to be held against a peer: that which does the same for guests.
SAME = {
    "vhost-net/bridge": "ours/network",
    "vhost-net/openvswitch": "ours/network",
    "vhost-net/macvtap": "ours/one-guest",
    "dpdk/vhost": "ours/one-guest/polling",
    "dpdk/openvswitch": "ours/network/polling",
    "vhost-net/bridge/64-busy": "ours/network/64-busy",
    "vhost-net/openvswitch/64-busy": "ours/network/64-busy",
    "dpdk/openvswitch/64-busy": "ours/network/64-busy/polling",
}
NICS = ("veth", "igb", "virtio_net")
# Columns of a NIC where there are several, and how rows end that only the file has.
FEW = ((64, 64), (64, 1))
NOT_SHOWN = ("-idle", "-busy", "-busy/polling", "/forced-copy")
# Of the picture: a group each, and a bar each in it.
GROUPS = (
    ("from guest, 64 bytes, 64 at once", "from-guest", 64, 64),
    ("from guest, 64 bytes, one by one", "from-guest", 64, 1),
    ("to guest, 64 bytes, 64 at once", "to-guest", 64, 64),
    ("to guest, 64 bytes, one by one", "to-guest", 64, 1),
    ("guest to guest, 64 bytes, 64 at once", "guest-to-guest", 64, 64),
)
BARS = (
    ("ours/network", "vhost-af-xdp, network", "#0b6e4f"),
    ("vhost-net/bridge", "vhost-net, tap, bridge", "#8a8d91"),
    ("vhost-net/openvswitch", "vhost-net, tap, Open vSwitch", "#b9bcc0"),
    ("dpdk/openvswitch", "Open vSwitch over DPDK (polls)", "#d08c2f"),
)


class Figures:
    """Rows by what they are of."""

    def __init__(self, rows):
        self.rows = rows
        self.by = {(row["nic"], row["who"], row["way"], row["size"], row["batch"]): row for row in rows if "way" in row}

    def of(self, *key):
        """Instructions, or None."""
        return self.by.get(key, {}).get("instructions")

    def cell(self, nic, who, way, size, batch):
        """A figure, and what ours is of a peer's."""
        figure = self.of(nic, who, way, size, batch)
        if figure is None:
            return ""
        same = "ours/network" if (way, who) == ("guest-to-guest", "vhost-net/macvtap") else SAME.get(who)
        ours = self.of(nic, same, way, size, batch)
        return f"{figure:,.0f}" + (f" ({ours / figure:.2f})" if ours else "")

    def path(self, way):
        """The table of a path: a NIC's columns are left out where it has no part in it."""
        nics = [nic for nic in NICS if any(key[0] == nic and key[2] == way for key in self.by)]
        columns = [(nic, *column) for nic in nics for column in (FRAMES if len(nics) == 1 else FEW)]
        lines = [" | ".join(["|", *(f"{nic} {size:,} x{batch}" for nic, size, batch in columns)]) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for who in (who for who in TITLES if not who.endswith(NOT_SHOWN)):
            cells = [self.cell(nic, who, way, size, batch) for nic, size, batch in columns]
            lines += [" | ".join([f"| {TITLES[who]}", *cells]) + " |"] if any(cells) else []
        return lines

    def whole(self):
        """The table of GSO packets, by way and NIC."""
        columns = [(way, nic) for way in ("gso", "stream") for nic in NICS]
        names = {"gso": "from", "stream": "to"}
        lines = ["| | " + " | ".join(f"{names[way]}, {nic}" for way, nic in columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for who in (who for who in TITLES if not who.endswith(NOT_SHOWN)):
            cells = [self.cell(nic, who, way, GSO_BYTES, WHOLE[way]) for way, nic in columns]
            lines += [" | ".join([f"| {TITLES[who]}", *cells]) + " |"] if any(cells) else []
        return lines

    def host(self):
        """The table of the host's own traffic: figures, and what they are of those without a daemon."""
        ways = {"stream-to-host": (GSO_BYTES, WHOLE["stream-to-host"]), "to-host": FRAMES_OF_HOST[0]}
        columns = [(nic, way, *size) for nic in NICS[:2] for way, size in ways.items()]
        heads = (f"{nic}, {way.replace('-', ' ')}, {size:,} x{batch}" for nic, way, size, batch in columns)
        lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
        for who in (who for who in TITLES if who.startswith("host/")):
            figures = [(self.of(nic, who, *column), self.of(nic, "host/alone", *column)) for nic, *column in columns]
            cells = [f"{figure:,.0f}" + (f" ({figure / alone:.2f})" if figure != alone else "") for figure, alone in figures]
            lines.append(" | ".join([f"| {TITLES[who]}", *cells]) + " |")
        return lines

    def table(self, name):
        """What stands behind a mark of that name."""
        words = name.split()
        return {"path": self.path, "whole": self.whole, "host": self.host}[words[0]](*words[1:])


def filled(page, figures):
    """The page, with what stands between its marks made anew."""
    mark = re.compile(r"(<!-- (\w[^>]*) -->\n).*?(<!-- end -->)", re.S)
    return mark.sub(lambda found: found[1] + "\n" + "\n".join(figures.table(found[2])) + "\n\n" + found[3], page)


def picture(figures):
    """An SVG of bars."""
    left, width, high, gap, head = 250, 430, 15, 22, 44 + 18 * len(BARS)
    group = high * len(BARS) + gap
    total = head + group * len(GROUPS)
    values = {(title, who): figures.of("veth", who, *key) for title, *key in GROUPS for who, _, _ in BARS}
    scale = width / max(value for value in values.values() if value)

    def text(x, y, what, more=""):
        return f'<text x="{x}" y="{y}"{more}>{what}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 70}" height="{total}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        text(10, 20, "Instructions a frame, in driver, kernel and back end (veth)", ' font-size="14" font-weight="bold"'),
    ]
    for number, (_, title, colour) in enumerate(BARS):
        y = 32 + 18 * number
        out += [f'<rect x="10" y="{y}" width="12" height="12" fill="{colour}"/>', text(28, y + 10, title)]
    for number, (title, *_) in enumerate(GROUPS):
        y = head + group * number
        out.append(text(10, y + high * len(BARS) / 2 + 4, title))
        for bar, (who, _, colour) in enumerate(BARS):
            value, at = values[title, who], y + high * bar
            if value:
                out.append(f'<rect x="{left}" y="{at}" width="{value * scale:.0f}" height="{high - 2}" fill="{colour}"/>')
            out.append(text(f"{left + (value or 0) * scale + 5:.0f}", at + 11, f"{value:,.0f}" if value else "not measured"))
    return "\n".join([*out, "</svg>"]) + "\n"


def main():
    figures = Figures(json.loads(ROWS.read_text()))
    PAGE.write_text(filled(PAGE.read_text(), figures))
    PICTURE.write_text(picture(figures))


if __name__ == "__main__":
    main()
