"""Make .venv and install the project into it: `python .ci/setup.py lab`, or `test`, or `docs`. Standard library only.

A second run does nothing: what was installed is remembered in .venv, with a hash of pyproject.toml, constraints.txt and the
Python version. On Debian and Ubuntu, as root, `test` also installs the system packages of the scenes and the browser test; elsewhere
it prints the one line to run and goes on without them.
"""
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "k3-installed.json"
EXTRAS = {"lab": ["notebooks"], "docs": ["docs"], "test": ["docs", "notebooks", "test"], "scenes": ["animations"]}
# manim compiles pycairo and manimpango on Linux; the browser test drives Chromium, which needs a font
SCENE_PACKAGES = ["gcc", "libc6-dev", "python3-dev", "pkg-config", "libcairo2-dev", "libpango1.0-dev"]
BROWSER_PACKAGES = ["chromium", "fonts-dejavu-core"]
VENV_PACKAGES = ["python3-venv"]


def say(text):
    print(f"== {text}", flush=True)


def run(*command, **options):
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, **options)


def create_venv():
    if PYTHON.exists() and subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    try:
        import ensurepip  # noqa: F401  Debian's python3 comes without it
    except ImportError:
        sys.exit("This Python can't make a virtual environment. On Debian and Ubuntu run: apt-get install python3-venv   and start again.")
    say(f"Creating .venv with Python {platform.python_version()}")
    run(sys.executable, "-m", "venv", VENV)


def installed_state():
    """What an installation depends on: when this changes, pip runs again."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    version = subprocess.run([str(PYTHON), "-VV"], capture_output=True, text=True, check=True).stdout
    return hashlib.sha256(digest.digest() + version.encode()).hexdigest()


def install(extras):
    state = installed_state()
    stamp = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    done = set(stamp.get("extras", [])) if stamp.get("state") == state else set()
    if done.issuperset(extras):
        say(f"Already installed in .venv: {', '.join(extras)}")
        return
    extras = sorted(done.union(extras))
    say(f"Installing the project with {', '.join(extras)} into .venv (2 to 3 GB, some minutes the first time)")
    run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-c", "constraints.txt", "-e", f".[{','.join(extras)}]")
    no_news_popup()
    part = STAMP.with_suffix(".part")
    part.write_text(json.dumps({"state": state, "extras": extras}))
    part.replace(STAMP)


def no_news_popup():
    """JupyterLab asks at its first start whether it may fetch news. The answer for this environment is no."""
    settings = VENV / "share/jupyter/lab/settings"
    settings.mkdir(parents=True, exist_ok=True)
    answer = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
    (settings / "overrides.json").write_text(json.dumps(answer))


def is_debian():
    release = Path("/etc/os-release")
    words = release.read_text().replace('"', "").split() if release.exists() else []
    return any(word.startswith(("ID=", "ID_LIKE=")) and ("debian" in word or "ubuntu" in word) for word in words)


def missing_packages():
    def is_there(name):
        answer = subprocess.run(["dpkg-query", "-W", "-f=${Status}", name], capture_output=True, text=True)
        return answer.stdout.endswith(" installed")
    return [name for name in VENV_PACKAGES + SCENE_PACKAGES + BROWSER_PACKAGES if not is_there(name)]


def system_packages():
    """Install what the scenes and the browser test need from the system, or say which line does it."""
    if not is_debian():
        return say("Not Debian or Ubuntu: the scenes may need cairo and pango, the browser test needs Chromium or Chrome (docs/install.md)")
    missing = missing_packages()
    line = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if not missing:
        return say("System packages: all there")
    if os.geteuid() != 0:
        say("Not root, so these system packages stay missing; the tests that need them will be skipped. To have them, run:")
        return say("   sudo " + " ".join(line))
    say("Installing system packages: " + " ".join(missing))
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-q", env=quiet)
    run(*line, "-q", env=quiet)


def can_build_manim():
    """manim has wheels for Windows; elsewhere it is compiled against cairo and pango."""
    if os.name == "nt":
        return True
    if not shutil.which("pkg-config"):
        return False
    return subprocess.run(["pkg-config", "--exists", "cairo", "pangocairo"]).returncode == 0


def main(goal):
    if sys.version_info < (3, 11):  # noqa: UP036 (an older Python may read this file, to be told so)
        sys.exit(f"Python 3.11 or newer is needed; {sys.executable} is {platform.python_version()}. "
                 "If you have a newer one: make lab PYTHON=python3.12")
    start = time.time()
    extras = EXTRAS[goal]
    if goal == "test":
        system_packages()
        if can_build_manim():
            extras = extras + EXTRAS["scenes"]
        else:
            say("cairo and pango are missing: manim is not installed, the tests of the scenes will be skipped")
    create_venv()
    install(extras)
    say(f"Set-up done after {time.time() - start:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("lab", "docs", "test"):
        sys.exit(f"usage: {sys.argv[0]} lab|docs|test")
    main(sys.argv[1])
