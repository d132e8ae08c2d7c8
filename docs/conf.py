"""How Sphinx makes the guide: pages of Markdown, the reference from the docstrings, everything local."""

import importlib.metadata
import os
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

project = "Shardfast"
author = "the Shardfast authors"
release = importlib.metadata.version("shardfast")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["decisions"]  # for contributors, who read them in the repository
nitpicky = True
suppress_warnings = ["misc.highlighting_failure"]

myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 3  # the anchors that GitHub makes of the same headings
myst_links_external_new_tab = False

autodoc_mock_imports = ["pyarrow", "ray"]  # no package of the guide's environment has them
autodoc_typehints = "none"  # signatures show names and defaults; types are in the text, where they say something
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"Shardfast {release}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # summaries are fetched, which browsers refuse for pages from disk

REPOSITORY = "https://github.com/shardfast/shardfast/blob/main"


def link_to_the_repository(app: Sphinx, doctree: nodes.document) -> None:
    """Makes links to files outside of the guide lead to the repository."""
    here = Path(app.env.doc2path(app.env.docname)).parent
    for link in list(doctree.findall(addnodes.pending_xref)):
        if link["reftype"] == "myst" and link["refdomain"] == "doc" and link["reftarget"] not in app.env.found_docs:
            _replace(link, f"{link['reftarget']}.md", link.get("reftargetid"))
    for link in list(doctree.findall(addnodes.download_reference)):
        _replace(link, os.path.normpath(here / link["reftarget"]), None)


def _replace(link: nodes.Element, path: str, anchor: str | None) -> None:
    target = os.path.relpath(path, ROOT) + (f"#{anchor}" if anchor else "")
    link.replace_self(nodes.reference("", "", *link.children, refuri=f"{REPOSITORY}/{target}"))


def setup(app: Sphinx) -> None:
    """Registers the above with Sphinx."""
    app.connect("doctree-read", link_to_the_repository, priority=100)
