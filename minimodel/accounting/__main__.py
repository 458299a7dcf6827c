"""``python -m minimodel.accounting --model k3``: what a model costs."""

import argparse

from minimodel.accounting.report import PRESETS, report

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m minimodel.accounting", description="What a model costs: parameters and memory.")
    parser.add_argument("--model", choices=PRESETS, default="k3", help="which preset to count (default: k3)")
    print(report(parser.parse_args().model))
