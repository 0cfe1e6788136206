"""Sphinx: MyST pages, furo, and reference pages generated from the source."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

project = "outlast"
author = "the outlast authors"
copyright = "the outlast authors, Apache-2.0"
extensions = ["myst_parser", "outlast_reference"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext"]
html_theme = "furo"
html_title = "outlast"
html_show_sphinx = False
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
