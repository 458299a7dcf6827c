"""The documentation site, as Sphinx builds it: `make docs`. The source folder is the whole repository: a link that works there works here.

What is special to this project lies in docs/site: notebooks with living figures, formulas as MathML, source files beside their pages.
"""
import sys
from pathlib import Path

import plotly

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS / "site"), str(ROOT)]

project = "K3 made small"
author = project
html_title = project
language = "en"

root_doc = "README"
include_patterns = ["README.md", "docs/*.md", "docs/api/*.md", "notebooks/**", "minimodel/pretrained/*/README.md", "tests/golden/README.md"]
exclude_patterns = [".*", "site", "media", "runs", "build", "dist", "**/.ipynb_checkpoints", "**/__pycache__", "benchmarks", "**.py"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
extensions += ["contents", "docstrings", "figures", "formulas", "public_names", "sources"]  # docs/site

# Markdown and notebooks: as a repository viewer reads them, with formulas between dollars. Nothing is run.
nb_execution_mode = "off"
nb_ipywidgets_js = {}
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_update_mathjax = False

# The reference: signatures as they are written, members in the order of the file
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 100
add_module_names = False
viewcode_line_numbers = True

# Nothing comes from another machine. plotly.js is taken from the installed package, once for all pages.
html_theme = "furo"
html_static_path = ["site/static", str(Path(plotly.__file__).parent / "package_data/plotly.min.js")]
templates_path = ["site/templates"]
html_additional_pages = {"index": "start.html"}
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_domain_indices = False
html_show_copyright = False
html_show_search_summary = False  # the summary is fetched from the page, which browsers refuse for files
html_math_renderer = "mathml"
