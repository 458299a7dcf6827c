"""Seeded generators of small tasks with exact answers: ``meeting``, ``needle``, ``mqar``, ``palindrome``, ``stack``.

The last three give (ids, labels) and are scored by ``scoring.accuracy``; the first two write notes, scored by ``meeting.score``. ``story``
tells one note like the article's, another for each seed. ``text`` has no exact answers: it reads any file as bytes.
"""

__all__ = ["meeting", "mqar", "needle", "palindrome", "scoring", "stack", "story", "text"]
