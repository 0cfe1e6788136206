"""Sphinx: MyST pages and furo. What the reference pages take from the source stands in them (`make reference`)."""

from __future__ import annotations

project = "outlast"
author = "the outlast authors"
copyright = "the outlast authors, Apache-2.0"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext"]
html_theme = "furo"
html_title = "outlast"
html_show_sphinx = False
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
