"""Links to Python files lead to the highlighted page that viewcode makes of the file; where it makes none, to a copy of the file."""
from pathlib import PurePosixPath

from docutils import nodes
from sphinx import addnodes


def lead_to_pages(app, doctree, docname):
    known = getattr(app.env, "_viewcode_modules", {})
    for link in list(doctree.findall(addnodes.download_reference)):
        path = PurePosixPath(app.env.relfn2path(link["reftarget"], docname)[0])
        module = ".".join(path.with_suffix("").parts)
        if path.suffix == ".py" and known.get(module):
            target = app.builder.get_relative_uri(docname, f"_modules/{module.replace('.', '/')}")
            link.replace_self(nodes.reference("", "", *link.children, refuri=target, internal=True))


def setup(app):
    app.connect("doctree-resolved", lead_to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
