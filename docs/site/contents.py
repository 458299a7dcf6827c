"""The order of the site's pages. It stands here and not in the pages, where a repository viewer would show it as code."""
import json
from fnmatch import fnmatchcase

# A pattern takes what no line before it has taken. A page that is in no list stops the build.
CONTENTS = {
    "Course": ["notebooks/[0-9]*", "notebooks/exercises/README"],
    "See it": ["docs/gallery", "docs/animations", "docs/evidence"],
    "Guide": ["docs/install", "docs/minimodel", "docs/architecture", "docs/glossary", "docs/faq", "docs/limits", "docs/performance",
              "docs/teaching", "docs/decisions", "docs/[a-z]*", "minimodel/pretrained/*/README", "tests/golden/README"],
    "Reference": [*(f"docs/api/{page}" for page in ("index", "kda", "model", "experts", "running", "training")), "docs/api/*"],
}  # fmt: skip
STARTERS, SOLUTIONS = "notebooks/exercises/", "notebooks/exercises/solutions/"
HIDDEN = "\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def listed(patterns, names):
    """The names that fit, in the order of the patterns; a star doesn't reach into folders."""
    found = []
    for pattern in patterns:
        fits = (name for name in sorted(names) if name.count("/") == pattern.count("/") and fnmatchcase(name, pattern))
        found += [name for name in fits if name not in found]
    return found


def toctree(caption, names):
    if not names:
        return ""
    return HIDDEN.format(caption=caption, entries="\n".join(f"/{name}" for name in names))


def add_lists(app, docname, source):
    """The start page lists all pages, the exercises' page the starters, a starter its solution."""
    names = app.env.found_docs
    if docname == app.config.root_doc:
        source[0] += "".join(toctree(caption, listed(patterns, names)) for caption, patterns in CONTENTS.items())
    elif docname == f"{STARTERS}README":
        source[0] += toctree("Exercises", listed([f"{STARTERS}[0-9]*"], names))
    elif docname.startswith(SOLUTIONS):  # a starter and its solution have one title in the repository
        notebook = json.loads(source[0])
        title = notebook["cells"][0]["source"]
        notebook["cells"][0]["source"] = "".join(title).replace("\n", ": a solution\n", 1)
        source[0] = json.dumps(notebook)
    elif docname.startswith(STARTERS):
        name = docname.removeprefix(STARTERS)
        notebook = json.loads(source[0])
        link = f"[Solution](solutions/{name}.ipynb)" + toctree("Solution", [SOLUTIONS + name])
        notebook["cells"].append({"cell_type": "markdown", "id": "solution", "metadata": {}, "source": link})
        source[0] = json.dumps(notebook)


def setup(app):
    app.connect("source-read", add_lists)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
