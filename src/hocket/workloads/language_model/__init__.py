"""A small GPT on the reference texts of Python. Read `model`."""
