"""An indented block of a docstring, after an empty line, is code: as in Markdown, and as everybody reads it in the source."""


def mark_code(app, what, name, thing, options, lines):
    for number in range(len(lines) - 1, 0, -1):
        starts = lines[number].startswith("    ") and not lines[number - 1].strip()
        last = next((line for line in reversed(lines[:number]) if line.strip()), "")
        if starts and last and not last.startswith((" ", "* ", "- ", "..")) and not last.endswith("::"):
            lines[number:number] = ["::", ""]


def setup(app):
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
