"""Sphinx's configuration of the site; `scripts/docs` builds it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import reference

from gpucoll.version import __version__

project = "gpucoll"
author = "gpucoll authors"
copyright = "gpucoll authors, MIT licence"
release = version = __version__

extensions = ["myst_parser", "numpydoc", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.viewcode",
              "sphinx_copybutton", "sphinx_design", "gallery", "curves", "meanings", "reference", "search_words",
              "without_mpi"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_ext", "_drawings", "changes.d"]

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence"]
myst_heading_anchors = 3

default_role = "py:obj"  # what docstrings put in single backticks is a name where there is one, and else code
autodoc_typehints = "none"  # the sections of the docstrings have the types, and the shapes of arrays
autodoc_mock_imports = reference.absent()
intersphinx_timeout = 5
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
toc_object_entries_show_parents = "hide"
numpydoc_show_class_members = False
autosummary_generate = False  # numpydoc brings it; nothing is for it
numpydoc_use_plots = False
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"  # but for these words
numpydoc_xref_aliases = {
    **{word: word for word in "None int str float bool list tuple dict callable iterable mapping sequence".split()},
    "array": "numpy.ndarray", "arrays": "numpy.ndarray", "dtype": "numpy.dtype", "stream": "cupy.cuda.Stream",
    "Communicator": "gpucoll.Communicator", "Work": "gpucoll.Work", "Status": "gpucoll.Status",
    "ReduceOp": "gpucoll.ReduceOp", "Transport": "gpucoll.Transport", "ShardedArray": "gpucoll.training.ShardedArray",
    "Mesh": "gpucoll.training.Mesh", "ProcessGroup": "gpucoll.distributed.ProcessGroup",
    **{f"mpi4py.MPI.{word}": f"mpi4py.MPI.{word}" for word in "Comm Intracomm Op Request Status Info".split()},
}

html_theme = "pydata_sphinx_theme"
html_title = f"gpucoll {release}"
html_static_path = ["_static"]
html_extra_path = ["_drawings"]  # written by _ext/gallery.py
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_favicon = "_static/mark.svg"
html_theme_options = {
    "logo": {"text": "gpucoll", "image_light": "_static/mark.svg", "image_dark": "_static/mark.svg"},
    "header_links_before_dropdown": 6,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "show_toc_level": 2,
    "navbar_align": "left",
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "github-dark",
}
ALONE = ("index start algorithms gpus eight-gpus errors clusters performance ci costs architecture contributing "
         "changes").split()
html_sidebars = {page: [] for page in ALONE}  # their sidebar would be empty
html_context = {"default_mode": "auto"}
copybutton_exclude = ".linenos, .gp, .go"
linkcheck_timeout = 20
linkcheck_anchors = False
