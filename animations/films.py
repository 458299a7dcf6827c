"""Films of the scenes: which scenes there are, rendering one unless it is up to date, and frames of what was rendered."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

from PIL import Image
from tqdm import tqdm

import animations

ROOT = Path(animations.__file__).parent.parent
QUALITIES = ("low", "medium", "high")  # 480p15, 720p30, 1080p60
FORMATS = ("mp4", "gif", "webm", "png")


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


def source(scene: type) -> str:
    """The scene's file, from the top folder."""
    return Path(sys.modules[scene.__module__].__file__).relative_to(ROOT).as_posix()


def caption(scene: type) -> str:
    """What the scene shows, in a sentence."""
    return scene.__doc__.splitlines()[0]


def fingerprint() -> str:
    """Changes when the code, a trained model or a teacher's setting (K3_...) changes."""
    digest = hashlib.sha256()
    for folder in ("animations", "k3viz", "minimodel"):
        for path in sorted(p for p in (ROOT / folder).rglob("*") if p.suffix in {".py", ".json", ".safetensors"}):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    digest.update(repr(sorted(item for item in os.environ.items() if item[0].startswith("K3_"))).encode())
    return digest.hexdigest()


def render(scene: type, *, quality: str = "low", format: str = "mp4", force: bool = False) -> tuple[Path, bool]:
    """Render a scene into manim's media folder, unless the file there was made from the same code and settings.

    Returns the file, and whether it was up to date.
    """
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
            return path, True
        drawing.render()
    if format == "gif":
        write_gif(made, path)
    stamp.write_text(now)
    return path, False


def render_all(names: list[str], *, quality: str, format: str, force: bool, jobs: int) -> dict[str, Path]:
    """The files of the named scenes, rendered where they are out of date. A scene that fails is named at the end; the others are made."""
    made, failed = {}, {}
    options = {"quality": quality, "format": format, "force": force}
    with tqdm(total=len(names), desc="scenes", unit="scene", disable=len(names) == 1) as bar:
        for name, result in (_in_turn if jobs == 1 else _at_once)(names, options, jobs):
            if isinstance(result, Exception):
                failed[name] = result
                bar.write(f"{name}: failed: {type(result).__name__}: {result}", file=sys.stderr)
            else:
                made[name], up_to_date = result
                bar.write(f"{name}: {made[name]}{' is up to date' if up_to_date else ''}")
            bar.update()
    if failed:
        sys.exit(f"not rendered: {', '.join(failed)}")
    return {name: made[name] for name in names}


def _in_turn(names: list[str], options: dict, _jobs: int):
    for name in names:
        yield name, _one(name, options)


def _at_once(names: list[str], options: dict, jobs: int):
    # in this module, since what stands in a package's __main__ can't be sent to other processes
    # spawn: every scene starts from a clean manim; one scene a process, since fonts and pictures of the last one stay in memory
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(_one, name, options): name for name in names}
        for done in as_completed(waiting):
            yield waiting[done], done.exception() or done.result()


def _one(name: str, options: dict) -> tuple[Path, bool] | Exception:
    try:
        return render(scenes()[name], **options)
    except Exception as error:  # noqa: BLE001  the other scenes go on
        return error


def frames_of(film: Path, chosen: Callable[[int, int], bool] = lambda i, n: True) -> tuple[list[Image.Image], float]:
    """The frames that ``chosen(number, frames in all)`` takes, and how many seconds the film lasts."""
    import av

    with av.open(str(film)) as opened:
        video = opened.streams.video[0]
        n = video.frames or sum(1 for _ in opened.decode(video=0))  # webm does not say
        opened.seek(0)
        return [frame.to_image() for i, frame in enumerate(opened.decode(video=0)) if chosen(i, n)], n / float(video.average_rate)


def write_gif(film: Path, path: Path) -> None:
    """A film as a small gif: 7.5 pictures a second, one palette, no dithering (manim's own is about twenty times larger)."""
    frames, seconds = frames_of(film)
    step = max(1, round(len(frames) / seconds / 7.5))
    pause = round(1000 * step * seconds / len(frames))
    frames = frames[::step]
    width, height = frames[0].size
    samples = frames[:: max(1, len(frames) // 16)]
    column = Image.new("RGB", (width, height * len(samples)))
    for i, sample in enumerate(samples):
        column.paste(sample, (0, i * height))
    palette = column.quantize(96)
    first, *rest = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=pause, loop=0)
