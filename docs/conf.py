"""The site: `make docs` builds it from the Markdown of this folder, without a network."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from importlib.metadata import version as version_of

project = "rankscope"
author = "The rankscope authors"
copyright = "the rankscope authors, MIT licence"
version = release = version_of("rankscope")

extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton", "sphinxcontrib.bibtex", "sitegen"]
exclude_patterns = ["_build", "sitegen", "**/.ipynb_checkpoints"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!rankscope(_studies|_explorer)?\.).*")]  # names of other packages, in types

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "cache"  # run once, and again when it changes
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
bibtex_bibfiles = ["references.bib"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
toc_object_entries_show_parents = "hide"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = "rankscope"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
