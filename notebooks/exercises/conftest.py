"""Starters are meant to fail; tests/test_exercises.py looks at how. Solutions are run like every notebook."""
collect_ignore_glob = ["[0-9]*.ipynb"]
