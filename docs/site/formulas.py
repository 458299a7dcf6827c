"""Formulas as MathML, which browsers draw themselves: no script and no font is loaded. docutils translates them, while the page is made."""
import re

from docutils.nodes import SkipNode
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging

log = logging.getLogger(__name__)
# Sizes of brackets are left out: in MathML brackets grow with what they hold.
SIZES = re.compile(r"\\[bB]ig+[lrm]?(?![a-zA-Z])")


def mathml(tex, *, block=False):
    """The MathML of a formula in LaTeX. Raises MathError for a command that docutils doesn't know."""
    return tex2mathml(re.sub(r"\\dots(?![a-zA-Z])", r"\\ldots", SIZES.sub("", tex)), as_block=block)


def write(writer, node, *, block=False):
    try:
        writer.body.append(mathml(node.astext(), block=block))
    except MathError as error:
        log.warning("no MathML for the formula %r: %s", node.astext(), error, location=node)


def visit(writer, node):
    write(writer, node)
    raise SkipNode


def visit_block(writer, node):
    writer.body.append('<div class="formula">')
    write(writer, node, block=True)
    writer.body.append("</div>\n")
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
