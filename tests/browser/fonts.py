"""Fonts made for the tests, so that how wide a page is does not depend on the fonts that a machine happens to have.

Every character but a space is the same box. The usual fonts for reading are about 0.5 em wide in the mean, DejaVu Sans
about 0.58.
"""

import base64
import struct

UNITS = 1000
"""Of the font, to an em."""

ASCENT, DESCENT = 800, 200

FIRST, LAST = 0x20, 0x2FFF
"""The characters that it has: letters, punctuation, arrows and signs."""


def box_font(width_em: float) -> bytes:
    """Return a TrueType font whose characters all have that width, in em."""
    width = round(width_em * UNITS)
    box = _box(width)
    return _file(
        {
            b"OS/2": _os2(width),
            b"cmap": _cmap(),
            b"glyf": box,
            b"head": _head(width),
            b"hhea": struct.pack(">I3hH11hH", 0x10000, ASCENT, -DESCENT, 0, width, 0, 0, width, 1, *[0] * 7, 3),
            b"hmtx": struct.pack(">HhHhHh", *(width, 0) * 3),
            b"loca": struct.pack(">4I", 0, 0, len(box), len(box)),  # glyph 1 is the box, those around it are empty
            b"maxp": struct.pack(">I14H", 0x10000, 3, 4, 1, 0, 0, 2, *[0] * 8),
            b"name": struct.pack(">3H", 0, 0, 6),
            b"post": struct.pack(">IIhh5I", 0x30000, 0, -100, 50, 1, 0, 0, 0, 0),
        }
    )


def script(width_em: float) -> str:
    """Return the JavaScript that makes a page use such a font for all that it shows, from its first moment."""
    font = base64.b64encode(box_font(width_em)).decode()
    return f"""
    const bytes = Uint8Array.from(atob("{font}"), each => each.charCodeAt(0));
    document.fonts.add(new FontFace("Boxes", bytes));
    const sheet = new CSSStyleSheet();
    sheet.replaceSync("*, ::before, ::after {{ font-family: Boxes !important; }}");
    document.adoptedStyleSheets = [sheet];
    """


def _file(tables: dict[bytes, bytes]) -> bytes:
    """Put the tables together. Sums stay 0: browsers make their own."""
    power = len(tables).bit_length() - 1
    head = struct.pack(">I4H", 0x10000, len(tables), 16 << power, power, 16 * len(tables) - (16 << power))
    start = len(head) + 16 * len(tables)
    entries, body = b"", b""
    for name, table in tables.items():
        entries += name + struct.pack(">3I", 0, start + len(body), len(table))
        body += table + bytes(-len(table) % 4)
    return head + entries + body


def _cmap() -> bytes:
    """A space is glyph 2, any other is glyph 1, in one segment of format 4; a second one must end the list."""
    glyphs = struct.pack(">H", 2) + struct.pack(">H", 1) * (LAST - FIRST)
    ends, starts = (LAST, 0xFFFF), (FIRST, 0xFFFF)
    added, to_glyphs = (0, 1), (4, 0)  # from its own place in the last list, the glyphs of the first segment start 4 on
    lists = struct.pack(">2H H 2H 2H 2H", *ends, 0, *starts, *added, *to_glyphs) + glyphs
    table = struct.pack(">7H", 4, 14 + len(lists), 0, 4, 4, 1, 0) + lists
    return struct.pack(">2H 2HI", 0, 1, 3, 1, 12) + table


def _box(width: int) -> bytes:
    """A rectangle with some room around it, as one outline of four points."""
    left, right, top = 50, width - 50, 600
    xs = struct.pack(">4h", left, 0, right - left, 0)
    ys = struct.pack(">4h", 0, top, 0, -top)
    outline = struct.pack(">5h 2H 4B", 1, left, 0, right, top, 3, 0, *[1] * 4) + xs + ys
    return outline + bytes(-len(outline) % 4)


def _head(width: int) -> bytes:
    return struct.pack(
        ">4I2H2q4h2H3h", 0x10000, 0x10000, 0, 0x5F0F3CF5, 0, UNITS, 0, 0, 0, 0, width, 600, 0, 8, 2, 1, 0
    )


def _os2(width: int) -> bytes:
    return struct.pack(
        ">Hh3H11h10s4I4s3H3h2H", 3, width, 400, 5, 0, *[0] * 10, 0, bytes(10), 0, 0, 0, 0, b"test", 64, FIRST, LAST,
        ASCENT, -DESCENT, 0, ASCENT, DESCENT,
    ) + struct.pack(">2I2h3H", 0, 0, 500, 700, 0, 0x20, 0)  # fmt: skip
