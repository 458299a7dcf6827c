"""Training: one loop (``loop.py``) for the course's small models (``meeting.py``) and for any text at GPU size (``text.py``).

``python -m minimodel.train --help`` names the commands.
"""

from minimodel.train.loop import Recipe, train
from minimodel.train.meeting import train_meeting
from minimodel.train.memory import training_bytes
from minimodel.train.text import train_text

__all__ = ["Recipe", "train", "train_meeting", "train_text", "training_bytes"]
