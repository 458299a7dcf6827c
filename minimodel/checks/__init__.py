"""Feedback for the exercises: ``checks.kda_step(my_function)`` says "right", or which invariant broke and the likely slip.

    from minimodel import checks

    checks.kda_step(my_kda_step)      # prints "kda_step: right, on 5 inputs", or raises checks.NotYet with one paragraph

A learner's function and the course's own are given the same fresh inputs. ``checks.STEPS`` lists the steps in the order of the notebooks in
``notebooks/exercises``; ``seed=`` draws other inputs, and so does the environment variable
``K3_SEED``, for all checks at once. ``checks.check(answer, is_right, hint)`` is what the small exercises inside the course's notebooks use.
"""

from minimodel.checks import assembly, bills, chunks, depth, experts, four_bits, recall, updates, whiteboard
from minimodel.checks.answers import check
from minimodel.checks.grading import Draw, NotYet, Slip, Step, seed_in_use

CHAPTERS = (whiteboard, chunks, recall, bills, depth, experts, updates, four_bits, assembly)
STEPS: dict[str, Step] = {step.name: step for chapter in CHAPTERS for step in chapter.STEPS}

globals().update(STEPS)

__all__ = ["STEPS", "Draw", "NotYet", "Slip", "Step", "check", "seed_in_use", *STEPS]
