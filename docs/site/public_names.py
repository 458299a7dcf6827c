"""The directive `public-names`: a package's public names with their first sentence, each a link to its place in the reference."""
import importlib
import inspect
import re

from sphinx.util.docutils import SphinxDirective


def home(thing, name):
    """The module whose page describes it: where it is defined, or the package beside that which offers it."""
    parts = thing.__module__.split(".")
    packages = (".".join(parts[:depth]) for depth in range(2, len(parts)))
    return next((package for package in packages if name in getattr(importlib.import_module(package), "__all__", ())), thing.__module__)


def first_sentence(thing):
    paragraph = " ".join(inspect.getdoc(thing).split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`])|(?<=\.)$", paragraph)[0].rstrip(":")
    return re.sub(r":\w+:`~?([^`]+)`", r"``\1``", sentence).replace("|", r"\|")


class PublicNames(SphinxDirective):
    required_arguments = 1

    def run(self):
        package = importlib.import_module(self.arguments[0])
        things = {name: getattr(package, name) for name in sorted(package.__all__, key=str.lower)}
        rows = [f"| [`{name}`](#{home(thing, name)}.{name}) | {first_sentence(thing)} |" for name, thing in things.items()]
        return self.parse_text_to_nodes("\n".join(["| name | what it is |", "|---|---|", *rows]))


def setup(app):
    app.add_directive("public-names", PublicNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
