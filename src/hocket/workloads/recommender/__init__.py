"""A recommender with embedding tables on MovieLens-100K. Read `model`."""

RATINGS = 100_000
HELD_OUT = RATINGS // 10
FETCH = "pip download --no-deps -d ~/.cache/hocket recbole"
"""How a user comes by the wheel that has them."""
