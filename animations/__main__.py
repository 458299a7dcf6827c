"""List the scenes, or render them.

python -m animations                                       the scenes and what they show
python -m animations render KDAWhiteboard --quality high   one scene; what is up to date is skipped
python -m animations render --all --format gif             every scene
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

import animations

ROOT = Path(animations.__file__).parent.parent
QUALITIES = ("low", "medium", "high")  # 480p15, 720p30, 1080p60


def scenes() -> dict[str, type]:
    """Every scene of this folder by its name, in the order of the files."""
    from animations.stage import StageScene

    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(animations.__path__) if not module.name.startswith("_")):
        module = import_module(f"animations.{name}")
        for thing in vars(module).values():
            if isinstance(thing, type) and issubclass(thing, StageScene) and thing.__module__ == module.__name__ != StageScene.__module__:
                found[thing.__name__] = thing
    return found


def fingerprint() -> str:
    """Changes when the code, a trained model or a teacher's setting (K3_...) changes."""
    digest = hashlib.sha256()
    for folder in ("animations", "k3viz", "minimodel"):
        for path in sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".json", ".safetensors"}):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    digest.update(repr(sorted(item for item in os.environ.items() if item[0].startswith("K3_"))).encode())
    return digest.hexdigest()


def render(scene: type, *, quality: str, format: str, force: bool) -> None:
    """Render one scene into manim's media folder, unless the file there was made from the same code and settings."""
    from manim import tempconfig

    settings = {
        "quality": f"{quality}_quality",
        "format": "mp4" if format == "gif" else format,
        "output_file": scene.__name__,
        "progress_bar": "display" if sys.stderr.isatty() else "none",
    }
    with tempconfig(settings):
        drawing = scene()
        made = Path(drawing.renderer.file_writer.output_plan.primary_artifact)
        path = made.with_suffix(f".{format}")
        stamp, now = path.with_name(path.name + ".stamp"), f"{fingerprint()} {quality}"
        if not force and path.exists() and stamp.exists() and stamp.read_text() == now:
            print(f"{scene.__name__}: {path} is up to date")
            return
        drawing.render()
    if format == "gif":
        write_gif(made, path)
        print(f"{scene.__name__}: {path}")
    stamp.write_text(now)


def write_gif(film: Path, path: Path) -> None:
    """A film as a small gif: 7.5 pictures a second, one palette, no dithering (manim's own is about twenty times larger)."""
    import av
    from PIL import Image

    with av.open(str(film)) as opened:
        rate = opened.streams.video[0].average_rate
        step = max(1, round(rate / 7.5))
        frames = [frame.to_image() for i, frame in enumerate(opened.decode(video=0)) if i % step == 0]
    width, height = frames[0].size
    samples = frames[:: max(1, len(frames) // 16)]
    column = Image.new("RGB", (width, height * len(samples)))
    for i, sample in enumerate(samples):
        column.paste(sample, (0, i * height))
    palette = column.quantize(96)
    first, *rest = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=round(1000 * step / rate), loop=0)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m animations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command = parser.add_subparsers(dest="command").add_parser("render", help="write films or stills of scenes")
    command.add_argument("names", nargs="*", metavar="NAME", help="scenes to render")
    command.add_argument("--all", action="store_true", help="every scene")
    command.add_argument("--quality", choices=QUALITIES, default="low", help="480p15, 720p30 or 1080p60 (default: low)")
    command.add_argument("--format", choices=("mp4", "gif", "webm", "png"), default="mp4", help="png is the last frame (default: mp4)")
    command.add_argument("--force", action="store_true", help="render again what is up to date")
    options = parser.parse_args(arguments)

    if line := animations.missing():
        sys.exit(line)
    known = scenes()
    if options.command is None:
        for name, scene in known.items():
            print(f"{name}  ({Path(sys.modules[scene.__module__].__file__).name})\n    {scene.__doc__.splitlines()[0]}")
        return
    names = list(known) if options.all else options.names
    if not names or (options.all and options.names):
        command.error("give the names of scenes, or --all")
    if unknown := [name for name in names if name not in known]:
        command.error(f"unknown scene {', '.join(unknown)}; the scenes are {', '.join(known)}")
    for i, name in enumerate(names, start=1):
        print(f"[{i}/{len(names)}]", end=" ", flush=True)
        render(known[name], quality=options.quality, format=options.format, force=options.force)


if __name__ == "__main__":
    main()
