"""Common parts of written files: how a file is written, and of HTML and SVG the shell of a page, fonts and colours.

Pages and pictures are self-contained: no server, no network, only the reader's fonts.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path

from gpucoll.errors import ArgumentError

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
LIGHT = {"paper": "#ffffff", "ink": "#1b2127", "muted": "#5c6773", "grid": "#e4e8ec", "axis": "#9aa4ae",
         "tint": "#f4f6f8", "border": "#dde2e7", "focus": "#0068b0"}
DARK = {"paper": "#12161b", "ink": "#e9edf1", "muted": "#9aa6b2", "grid": "#262d35", "axis": "#5d6874",
        "tint": "#1a2027", "border": "#2d3640", "focus": "#6ab2ff"}
# Lines on light paper: Okabe and Ito's hues, adjusted for a contrast of 3:1 with the paper, and for readers with colour
# blindness.
LINES = ("#185bcc", "#d65d11", "#299269", "#b2499d", "#835600", "#2f2a7e", "#2e9dd7", "#7a2e1d")


def page_file(title: str, style: str, body: str, script: str) -> str:
    """Return an HTML file; its content policy forbids every other script, and all resources from elsewhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
              "base-uri 'none'; form-action 'none'")
    return ('<!doctype html>\n<html lang="en" class="plain">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}"
            f"<script>{script}</script>\n</body>\n</html>\n")


def palettes(light: Mapping[str, str], dark: Mapping[str, str]) -> str:
    """Return a style sheet with a colour per role; light or dark by the reader's preference or by data-theme."""
    day, night = ("".join(f"--{role}:{colour};" for role, colour in roles.items()) for roles in (light, dark))
    return (f":root{{{day}}}\n@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{night}}}}}\n"
            f":root[data-theme=dark]{{color-scheme:dark;{night}}}\n:root[data-theme=light]{{color-scheme:light}}\n")


def script_data(value: object) -> str:
    """Return JSON for use inside a script element: "<" is escaped, so no text in the JSON ends the element.

    >>> script_data(["</script>", 1])
    '["\\\\u003c/script>",1]'
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def write(path: Path, content: str | bytes) -> None:
    """Write a file; raise ArgumentError with code GC-FILE."""
    try:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}", code="GC-FILE") from None


def asset(package: str, name: str) -> str:
    """Return the text of file `name`, installed beside the modules of `package`."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
