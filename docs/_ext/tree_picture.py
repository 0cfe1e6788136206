"""Draw the tree of a step's sum, and who adds what with four members and with three, on one host and on two:
`tree_picture.py tree.svg levels.svg`.

Shares, partial sums, what a host sends and additions are those that `outlast.core.protocol` gives a run; nothing is
placed by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from outlast.core.protocol.host_cuts import host_nodes
from outlast.core.protocol.tree import cover, schedule, shares, split

_LEAVES = 8
_X, _Y, _R, _PANEL = 56, 62, 15, 490
_COLOURS = ("#2f7fc9", "#16845b", "#b07b00", "#8d4bab")
_SOFT, _LINE = "#55606e", "#b9c1cb"
_HOSTS = {"r0": "host a", "r1": "host a", "r2": "host b", "r3": "host b"}
Node = tuple[int, int]


def picture() -> str:
    """The SVG: two panels, the same tree in both."""
    panels = [
        _panel(0, ("r0", "r1", "r2", "r3"), "four members"),
        _panel(_PANEL, ("r0", "r2", "r3"), "r1 has died: the same tree, the same bits"),
    ]
    note = "ring: a partial sum that its member sends; white: added where slices are reduced"
    return _framed(panels, note, "The tree of a sum over eight microbatches, with four members and with three")


def levels() -> str:
    """The SVG of the same on two hosts: what is added in a host's memory, and what crosses the network."""
    panels = [
        _panel(0, ("r0", "r1", "r2", "r3"), "two hosts, four members: one sum a host", _HOSTS),
        _panel(_PANEL, ("r0", "r2", "r3"), "r1 has died: the same tree, the same bits", _HOSTS),
    ]
    note = "ring: a sum that a host sends, added in its memory; white: added where slices are reduced"
    return _framed(panels, note, "The sum of eight microbatches on two hosts, with four members and with three")


def _framed(panels: list[str], note: str, label: str) -> str:
    width, height = 2 * _PANEL, 350
    inner = "\n".join([f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>', *panels])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{label}" font-family="system-ui, sans-serif" font-size="13">\n{inner}\n'
        f'<text x="24" y="{height - 14}" fill="{_SOFT}">{note}</text>\n</svg>\n'
    )


def _panel(left: int, names: tuple[str, ...], title: str, hosts: dict[str, str] | None = None) -> str:
    ranges = shares(len(names), _LEAVES)
    own = [tuple(cover(range(low, high), _LEAVES)) for low, high in ranges]
    sent = {node for nodes in own for node in nodes}
    if hosts is not None:
        places = list(dict.fromkeys(hosts[name] for name in names))
        groups = [[i for i, name in enumerate(names) if hosts[name] == place] for place in places]
        sent = {node for nodes in host_nodes(groups, own, _LEAVES) for node in nodes}
    later = {parent for _, _, parent in schedule(tuple(sorted(sent)), _LEAVES)}
    drawn = [f'<text x="{left + 24}" y="28" font-weight="600">{title}</text>']
    for node in _nodes((0, _LEAVES)):
        x, y = _at(node, left)
        for child in split(node) if node[1] - node[0] > 1 else ():
            cx, cy = _at(child, left)
            drawn.append(f'<line x1="{x}" y1="{y}" x2="{cx}" y2="{cy}" stroke="{_LINE}"/>')
    for node in _nodes((0, _LEAVES)):
        owner = next(name for name, (low, high) in zip(names, ranges, strict=True) if low <= node[0] < high)
        drawn += _circle(node, left, _colour(owner), ring=node in sent, late=node in later)
    for place, (low, high) in enumerate(ranges):
        x = (_at((low, low + 1), left)[0] + _at((high - 1, high), left)[0]) / 2
        told = names[place] if hosts is None else f"{names[place]} on {hosts[names[place]]}"
        drawn.append(f'<text x="{x}" y="310" text-anchor="middle" fill="{_colour(names[place])}">{told}</text>')
    return "\n".join(drawn)


def _colour(name: str) -> str:
    return _COLOURS[int(name[1:])]


def _circle(node: Node, left: int, colour: str, *, ring: bool, late: bool) -> list[str]:
    x, y = _at(node, left)
    fill = "#fff" if late else colour
    edge = _SOFT if late else "#17202b" if ring else colour
    ink = _SOFT if late else "#fff"
    words = str(node[0]) if node[1] - node[0] == 1 else f"{node[0]}-{node[1] - 1}"
    return [
        f'<circle cx="{x}" cy="{y}" r="{_R}" fill="{fill}" stroke="{edge}" stroke-width="{4 if ring else 1.5}"/>',
        f'<text x="{x}" y="{y + 4}" text-anchor="middle" fill="{ink}" font-size="11">{words}</text>',
    ]


def _nodes(node: Node) -> list[Node]:
    if node[1] - node[0] == 1:
        return [node]
    left, right = split(node)
    return [node, *_nodes(left), *_nodes(right)]


def _at(node: Node, left: int) -> tuple[float, float]:
    depth = (node[1] - node[0]).bit_length() - 1
    return left + 48 + _X * (node[0] + node[1] - 1) / 2, 270 - _Y * depth


if __name__ == "__main__":
    for place, made in zip(sys.argv[1:], (picture, levels), strict=False):
        Path(place).write_text(made(), encoding="utf-8")
