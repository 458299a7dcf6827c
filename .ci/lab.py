"""`make lab`: set up what is missing, then serve the first notebook in JupyterLab. Standard library only.

PORT chooses the port (default: the first free one from 8888), LAB_ARGS holds further options for JupyterLab.
"""
import os
import secrets
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import setup

NOTEBOOK = "notebooks/00_start_here.ipynb"


def is_free(port):
    with socket.socket() as probe:
        if os.name != "nt":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def choose_port():
    if os.environ.get("PORT"):
        return int(os.environ["PORT"])
    return next(port for port in range(8888, 9888) if is_free(port))


def can_show_a_browser():
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def wait_until_it_answers(server, url):
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    sys.exit(f"JupyterLab stopped with status {server.returncode}; its messages are above.")


def main():
    start = time.time()
    setup.main("lab")
    port = choose_port()
    token = secrets.token_urlsafe(16)
    options = [f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={setup.ROOT}", "--ServerApp.answer_yes=True",
               "--log-level=ERROR", "--LabApp.log_level=ERROR"]
    if not can_show_a_browser():
        options.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--allow-root")  # Jupyter refuses to run as root otherwise; in a container that is the usual user
    setup.say("Starting JupyterLab")
    command = [str(setup.PYTHON), "-m", "jupyterlab", NOTEBOOK, *options, *shlex.split(os.environ.get("LAB_ARGS", ""))]
    server = subprocess.Popen(command, cwd=setup.ROOT, env={**os.environ, "JUPYTER_TOKEN": token})
    try:
        base = f"http://127.0.0.1:{port}"
        wait_until_it_answers(server, f"{base}/api/status?token={token}")
        setup.say(f"The course is open, {time.time() - start:.0f} s after the start. If no browser shows it, go to")
        print(f"\n   {base}/lab/tree/{NOTEBOOK}?token={token}\n", flush=True)
        setup.say("In the menu: Run, Run All Cells. Here: Ctrl-C stops the server.")
        sys.exit(server.wait())
    except KeyboardInterrupt:
        server.wait()  # Ctrl-C reached it too
    finally:
        if server.poll() is None:
            server.terminate()


if __name__ == "__main__":
    main()
