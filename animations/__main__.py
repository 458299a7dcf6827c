"""List the scenes, render them, or put them on a contact sheet.

python -m animations                                       the scenes and what they show
python -m animations render KDAWhiteboard --quality high   one scene; what is up to date is skipped
python -m animations render --all --format gif --jobs 2    every scene, two at a time
python -m animations sheet                                 first, middle and last frame of every scene in one picture
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import animations


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m animations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    render = commands.add_parser("render", help="write films or stills of scenes")
    render.add_argument("names", nargs="*", metavar="NAME", help="scenes to render")
    render.add_argument("--all", action="store_true", help="every scene")
    render.add_argument("--quality", choices=("low", "medium", "high"), default="low", help="480p15, 720p30 or 1080p60 (default: low)")
    render.add_argument("--format", choices=("mp4", "gif", "webm", "png"), default="mp4", help="png is the last frame (default: mp4)")
    render.add_argument("--force", action="store_true", help="render again what is up to date")
    sheet = commands.add_parser("sheet", help="write a picture with three frames of every scene")
    sheet.add_argument("--out", type=Path, default=Path("media/scenes.png"), help="the picture (default: media/scenes.png)")
    sheet.add_argument("--docs", action="store_true", help="write docs/animations.md, its sheet and its stills instead")
    for command in (render, sheet):
        command.add_argument("--jobs", type=int, default=1, help="scenes rendered at the same time, up to 2 GB of memory each (default: 1)")
    options = parser.parse_args(arguments)

    if line := animations.missing():
        sys.exit(line)
    from animations import films

    known = films.scenes()
    if options.command is None:
        for name, scene in known.items():
            print(f"{name}  ({Path(films.source(scene)).name})\n    {films.caption(scene)}")
        return
    most = os.cpu_count() or 1
    if not 1 <= options.jobs <= most:
        command = render if options.command == "render" else sheet
        command.error(f"--jobs must lie in 1..{most}, the number of this machine's cores, got {options.jobs}")
    if options.command == "sheet":
        from animations.sheet import contact_sheet, write_docs

        made = films.render_all(list(known), quality="low", format="mp4", force=False, jobs=options.jobs)
        if options.docs:
            write_docs(known, made)
        else:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            contact_sheet(made, options.out)
            print(options.out)
        return
    names = list(known) if options.all else options.names
    if not names or (options.all and options.names):
        render.error("give the names of scenes, or --all")
    if unknown := [name for name in names if name not in known]:
        render.error(f"unknown scene {', '.join(unknown)}; the scenes are {', '.join(known)}")
    films.render_all(names, quality=options.quality, format=options.format, force=options.force, jobs=options.jobs)


if __name__ == "__main__":
    main()
